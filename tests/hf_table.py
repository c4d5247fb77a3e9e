"""`python tests/hf_table.py`: docs/hugging-face-models.md, what becomes of each causal class of transformers.

    python tests/hf_table.py                    all of them; about six minutes on two busy cores
    python tests/hf_table.py gptj falcon        these, printed

Each class is asked for with the sizes of its own default configuration, on meta. "Accepted" is what a start of the
trainer says; "proven" is what `verify-plan --tp 2` finds on the small copy.
"""

from __future__ import annotations

import re
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dtmega import config, families, mesh
from dtmega.interop.hf.tp.command import on_meta
from dtmega.plans import verify_plan
from dtmega.training.checks import check
from tests import ranks

PAGE = Path(__file__).resolve().parent.parent / "docs" / "hugging-face-models.md"
LIMIT_S = 120  # a class
LAYOUTS = {"dp": {"dp_shard": 2}, "tp": {"tp": 2}, "pp": {"pp": 2}}
OPENING = """\
# Hugging Face's causal models

<!-- Written by tests/hf_table.py. -->

This page lists the parallel axes that `[model] name = "hf"` supports for each model type that transformers {version}
maps to a causal class, as measured by

    python tests/hf_table.py

- **dp, tp, pp**: a start with `dp_shard`, `tp` or `pp` = 2 accepts the class in its default configuration. Another
  configuration may have heads that tp does not divide, or an option that is refused.
- **proven**: the largest relative deviation of loss, logits and gradients that `verify-plan --tp 2` finds, in fp32 on
  CPU. A plan that transformers provides is verified like this at each start, and refused if it is wrong or cannot be
  verified; tp is empty then. Pipelines are verified by `tests/interop/hf/test_model.py`, one case for each family.
- **drawn**: without weights, a start draws initial values. Other classes need weights, because they draw initial values
  in ways (decays of Mamba, distributions that are not normal) that differ from layout to layout. To make initial
  weights, use `from_config(...).save_pretrained(DIR)` of transformers.

Of {all} model types, {none} are not decoders, or fail in transformers itself. The other {taken} can be trained:
dp {dp}, tp {tp} (all proven), pp {pp}, drawn {drawn}.

| model type | class | dp | tp | proven | pp | drawn | why not |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""


class Row(NamedTuple):
    """The answers for one model type; `refused` has the reason for each thing that is not accepted."""

    kind: str
    name: str
    refused: dict[str, str]
    proven: str

    def __str__(self) -> str:
        if "all" in self.refused:
            return f"| {self.kind} | {self.name} | | | | | | {self.refused['all']} |"
        yes = {what: "" if what in self.refused else "yes" for what in (*LAYOUTS, "drawn")}
        why = "; ".join(f"{what}: {reason}" for what, reason in self.refused.items() if what != "drawn")
        cells = (self.kind, self.name, yes["dp"], yes["tp"], self.proven, yes["pp"], yes["drawn"], why)
        return f"| {' | '.join(cells)} |"


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise a TimeoutError after some seconds."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"more than {seconds} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def reason(error: BaseException, home: str) -> str:
    """The part of a message that stands in a table."""
    text = str(error).replace(f"{home}/config.json", "config.json").replace(home, "it")
    text = re.split(r": it is none of|, and '[\w-]+' is none of|; |\n| \(\[", text)[0].strip()
    text = text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"
    return (text[:117] + "..." if len(text) > 120 else text).replace("|", "/")


def asked(home: str, layout: dict[str, int], **model: Any) -> None:
    """Ask what a start asks.

    Raises:
        ValueError: a start refuses it.
    """
    sections = {
        "model": {"name": "hf", "path": home, **model},
        "data": {"seq_len": 16, "tokenizer": "bytes"},
        "train": {"steps": 1},
        "batch": {"micro_batch_size": 1, "global_batch_size": 8},
        "precision": {"params": "float32"},
        "mesh": layout,
    }
    cfg = families.resolve(config.validate(sections, "a class"))
    check(cfg, mesh.resolve(cfg.mesh, 2 if layout else 1), torch.device("cpu"))


def proof(home: str) -> float:
    warnings.filterwarnings("ignore")
    found = verify_plan(on_meta(Path(home)), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    return max(found.errors.values()) if found.ok else torch.inf


def row(config_class: type[Any], home: str) -> Row:
    """The answers for one configuration class."""
    model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    model_class = model_class[0] if isinstance(model_class, tuple) else model_class
    kind, name, refused = config_class.model_type, model_class.__name__, dict[str, str]()
    try:
        with limited(LIMIT_S):
            default = config_class()
            if hasattr(default, "is_decoder"):
                default.is_decoder = True  # what BERT and its like need to be causal
            default.architectures = [name]
            default.save_pretrained(home)
            asked(home, {}, init_from="elsewhere")
    except Exception as error:  # also what transformers itself raises
        return Row(kind, name, {"all": reason(error, home)}, "")
    for what, layout in {**LAYOUTS, "drawn": {}}.items():
        try:
            with limited(LIMIT_S):
                asked(home, layout, **({} if what == "drawn" else {"init_from": "elsewhere"}))
        except Exception as error:
            refused[what] = reason(error, home)
    proven = ""
    if "tp" not in refused:
        try:
            worst = max(ranks.run(2, proof, home, timeout_s=LIMIT_S))
            proven = f"{worst:.0e}"
            if worst == torch.inf:
                proven, refused["tp"] = "", "the plan of transformers is wrong, as its proof finds"
        except AssertionError as error:  # with the message of each rank
            refused["tp"] = reason(ValueError(str(error).strip().splitlines()[-1].removeprefix("ValueError: ")), home)
    return Row(kind, name, refused, proven)


def main(kinds: list[str]) -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    by_kind = {config_class.model_type: config_class for config_class in transformers.MODEL_FOR_CAUSAL_LM_MAPPING}
    rows = []
    for kind in kinds or sorted(by_kind):
        with tempfile.TemporaryDirectory() as home:
            rows.append(row(by_kind[kind], home))
        print(rows[-1], flush=True)
    if kinds:
        return
    taken = [found for found in rows if "all" not in found.refused]
    counts = {what: sum(what not in found.refused for found in taken) for what in (*LAYOUTS, "drawn")}
    counts |= {"all": len(rows), "none": len(rows) - len(taken), "taken": len(taken)}
    opening = OPENING.format(version=transformers.__version__, **counts)
    PAGE.write_text(opening + "\n".join(str(found) for found in rows) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
