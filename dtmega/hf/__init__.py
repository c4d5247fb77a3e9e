"""The wing for models of `transformers`: their classes, names and files stay, what trains and cuts them is here.

An annex: nothing of the core but `dtmega/families.py` imports it, and a first reader may skip it.

    families.py      the facts about each family, as data
    directory.py     DIR -> its configuration and model; initial.py: the values that the family starts with
    model.py         that model as the trainer has it, whole or one stage of a pipeline
    resolve.py       the keys of a configuration that DIR decides
    files/           directories of transformers: config.json, safetensors, export; also of models that are written here
    record.py        the answers of the wing to what the trainer asks of a family; joins model.py and tp/
    tp/              a model cut over ranks, and the proof that it is the same: works without the trainer

Read them in that order; then, of tp/:

    styles.py, packed.py, experts.py, vocab.py    how one module is cut: words beside those of `plans/styles.py`
    regions.py, dropout.py, logits.py             what happens between modules, before them and behind them
    plan.py, native.py, generic.py                from a model to a table of these: our rows, transformers' own, none
    parallel.py, load.py                          the table applied; then each rank reads its part of the files
    tiny.py, verify.py, command.py                a small clone, cut, against one process

In a loop of your own:

    print(plan_for(model, tp=2))                  # the table first
    mesh = init_device_mesh("cuda", (4, 2), mesh_dim_names=("dp_shard", "tp"))
    print(verify_plan(model, mesh))               # a small clone, cut, against one process
    model = parallelize_hf(model, mesh)           # then train it as you would: loss, backward, clip_grad_norm_, AdamW
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtmega.hf.tp.command import verify_plan
    from dtmega.hf.tp.load import Read, load_hf
    from dtmega.hf.tp.parallel import parallelize_hf, plan_for
    from dtmega.hf.tp.plan import HFPlan
    from dtmega.hf.tp.verify import Verification

__all__ = ["HFPlan", "Read", "Verification", "load_hf", "parallelize_hf", "plan_for", "verify_plan"]

_HOMES = {
    "HFPlan": "plan",
    "Read": "load",
    "Verification": "verify",
    "load_hf": "load",
    "parallelize_hf": "parallel",
    "plan_for": "parallel",
    "verify_plan": "command",
}


def __getattr__(name: str) -> Any:
    """A public name, when it is first asked for: whoever reads a directory needs nothing of tp/."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"dtmega.hf.tp.{_HOMES[name]}"), name)
