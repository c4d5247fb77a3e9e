"""Claims about [lora] and [train] freeze in whole runs: what is trained, saved and gone on with, on any layout."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from dtmega import config
from dtmega.__main__ import main as command
from dtmega.checkpoint.base import Digesting
from dtmega.checkpoint.resume import open_checkpoint, state_of
from dtmega.checkpoint.weights import Weights
from dtmega.distributed.agreement import Startup
from dtmega.inference.trained import open_trained
from dtmega.interop import stored
from tests.layouts import FAMILIES, PAIRS, tensors, write_text
from tests.resumed import Record, Training, train_all

FEW = {"train.steps": 5, "optim.warmup": 2, "checkpoint.interval": 2, "checkpoint.keep": 9, "eval.interval": 0}
KEYS = (
    FAMILIES["llama"]
    | FEW
    | {"train.drift_interval": 2, "log.num_zeros": False, "log.params_norm": False}
    | {"model.vocab_size": 131, "model.n_layers": 2}
)
LORA = {"lora.rank": 3, "lora.alpha": 6.0}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "tp 2": (2, {"mesh.tp": 2} | PAIRS),
    "tp 4, few heads": (4, {"mesh.tp": 4, "mesh.sequence_parallel": False} | PAIRS),
    "pp 2": (2, {"mesh.pp": 2}),
    "tp 2, compiled": (2, {"mesh.tp": 2, "compile.enable": True} | PAIRS),
    "tp 2, selective": (2, {"mesh.tp": 2, "recompute.mode": "selective"} | PAIRS),
    "cp 2": (2, {"mesh.cp": 2} | PAIRS),
    "dp_shard 2": (2, {"mesh.dp_shard": 2}),
    "HSDP 2 x 2": (4, {"mesh.dp_replicate": 2, "mesh.dp_shard": 2}),
}
FEW_LAYOUTS = ("1", "HSDP 2 x 2")
FROZEN, LATER = ["embed.*", "layers.0.*"], ["layers.1.mlp.*"]
EXPORTED = ("1", "three layouts", "HSDP 2 x 2")
COMPARED = [
    "three layouts",
    *(name if name in FEW_LAYOUTS else pytest.param(name, marks=pytest.mark.full) for name in LAYOUTS if name != "1"),
]
LOSS, STEPPED = 1e-5, 1e-4


@functools.cache
def folder() -> Path:
    return Path(tempfile.mkdtemp())


@functools.cache
def keys() -> dict[str, Any]:
    return KEYS | write_text(folder() / "data")


def with_adapters(*names: str) -> list[Training]:
    """Runs of five steps with adapters on these layouts."""
    lora = keys() | LORA | {"model.init_from": str(folder() / "base")}
    return [Training(LAYOUTS[name][0], lora | LAYOUTS[name][1], folder() / name) for name in names]


def on_three_layouts() -> list[Training]:
    """One run that goes on on another layout twice."""
    trainings = []
    for (training,), stop in ((with_adapters("tp 2"), 2), (with_adapters("pp 2"), 2), (with_adapters("1"), 0)):
        changed = training.keys | {"train.exit_interval": stop}
        trainings.append(training._replace(keys=changed, folder=folder() / "three layouts"))
    return trainings


def with_frozen_weights() -> list[Training]:
    """A run whose first stage of a pipeline is all frozen, on one process, and on three layouts, with more at last."""
    frozen = keys() | {"model.init_from": str(folder() / "base"), "train.freeze": FROZEN}
    alone = Training(1, frozen | {"train.exit_interval": 4}, folder() / "frozen, one process")
    on_other_layouts = [
        alone._replace(n=2, keys=frozen | {"mesh.dp_shard": 2, "train.exit_interval": 2}),
        alone._replace(n=2, keys=frozen | {"mesh.pp": 2, "train.exit_interval": 2}),
        alone._replace(keys=frozen | {"train.freeze": [*FROZEN, *LATER]}),
    ]
    return [alone, *(training._replace(folder=folder() / "frozen") for training in on_other_layouts)]


@functools.cache
def records() -> dict[str, Path]:
    """Folders of the runs that `make test` trains, by name, in one group."""
    base = Training(1, keys() | {"train.steps": 1, "checkpoint.interval": 0}, folder() / "base")
    trainings = [base, *with_adapters(*FEW_LAYOUTS), *on_three_layouts(), *with_frozen_weights()]
    train_all(trainings)
    return {training.folder.name: training.folder for training in trainings}


@functools.cache
def more_records() -> dict[str, Path]:
    """The same, and the runs on all other layouts."""
    found = records()
    trainings = with_adapters(*(name for name in LAYOUTS if name not in FEW_LAYOUTS))
    train_all(trainings)
    return found | {training.folder.name: training.folder for training in trainings}


def record(name: str) -> Record:
    return Record((records() if name in records() else more_records())[name])


def worst(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).norm() / b[name].norm()) for name in b)


@pytest.mark.parametrize("name", COMPARED)
def test_adapters_train_on_every_layout_as_on_one_process(name: str):
    ours, truth = record(name), record("1")
    losses = zip(ours.series("loss"), truth.series("loss"), strict=True)
    assert max(abs(a / b - 1) for a, b in losses) <= LOSS
    assert worst(ours.final, truth.final) <= STEPPED


def test_a_run_with_frozen_weights_trains_the_others_on_every_layout_as_on_one_process():
    ours, truth = record("frozen"), record("frozen, one process")
    losses = zip(ours.series("loss")[:4], truth.series("loss"), strict=True)
    assert max(abs(a / b - 1) for a, b in losses) <= LOSS
    assert worst(tensors(folder() / "frozen" / "checkpoints", 4), truth.final) <= STEPPED
    assert all(name.startswith(("layers.1.", "norm.", "head.")) for name in truth.final)


def test_what_is_frozen_later_stays_in_the_checkpoints_with_what_it_had_learned():
    before, after = tensors(folder() / "frozen" / "checkpoints", 4), record("frozen").final
    later = [name for name in before if name.startswith("layers.1.mlp.")]
    assert len(later) == 3
    for name in later:
        assert torch.equal(before[name], after[name])
        assert not torch.equal(before[name], record("base").final[name])
    assert not torch.equal(before["norm.weight"], after["norm.weight"])
    assert "changed since the checkpoint: train.freeze" in (folder() / "frozen" / "stdout-0").read_text()


def test_a_run_with_frozen_weights_is_read_with_those_of_its_base():
    run = records()["frozen"]
    section = config.model_section(state_of(open_checkpoint(str(run))).config["model"], "test")
    weights = stored.weights(section.model_copy(update={"init_from": str(run)}))
    assert weights is not None
    assert torch.equal(weights.read("embed.weight"), record("base").final["embed.weight"])
    assert torch.equal(weights.read("norm.weight"), record("frozen").final["norm.weight"])


def test_a_checkpoint_holds_the_adapters_and_their_moments_alone_and_the_digest_of_the_base_on_any_layout():
    bases = []
    for name in (*FEW_LAYOUTS, "three layouts"):
        checkpoint = open_checkpoint(str(records()[name]))
        kinds = {tensor.split("/")[-2] for tensor in checkpoint.tensors}
        assert kinds == {"model", "exp_avg", "exp_avg_sq"}
        assert all(tensor.endswith((".lora_a", ".lora_b")) for tensor in checkpoint.tensors)
        assert len(checkpoint.tensors) == 3 * 2 * 7 * 2  # kinds x (A, B) x layers with adapters x blocks
        bases.append(state_of(checkpoint).base)
    assert all(base == bases[0] for base in bases)
    assert bases[0].path == open_checkpoint(str(records()["base"])).path


@pytest.mark.full
def test_the_digest_of_a_base_is_that_of_whole_tensors_on_every_layout():
    source = Digesting(Weights(open_checkpoint(str(records()["base"]))), KEYS["model.vocab_size"])
    for name in source.tensors:
        source.read(name)
    for name in LAYOUTS:
        base = state_of(open_checkpoint(str(more_records()[name]))).base
        assert base is not None
        assert base.digests == source.digests([*source.tensors]), name


def convert(*words: str) -> int:
    return command(["convert", *words])


def by_hand(base: str, folder: Path) -> Any:
    """transformers' model of a directory with the adapters of a folder for peft, as its files are documented."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    settings = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    scale = settings["lora_alpha"] / settings["r"]
    adapted = [
        name for name, _ in model.named_modules() if any(name.endswith(f".{end}") for end in settings["target_modules"])
    ]
    assert {f"base_model.model.{name}.lora_{x}.weight" for name in adapted for x in "AB"} == tensors.keys()
    for name in adapted:
        a, b = (tensors[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")
        update = scale * b @ a
        with torch.no_grad():
            model.get_submodule(name).weight.add_(update.t() if settings["fan_in_fan_out"] else update)
    return model.eval()


@functools.cache
def exported() -> dict[str, Path]:
    """The base and each run with adapters, as directories of transformers and as folders for peft."""
    found: dict[str, Path] = {"base": folder() / "hf base"}
    assert convert("--from", "dtmega", str(records()["base"]), "--to", "hf", str(found["base"])) == 0
    for name in EXPORTED:
        for kind, more in (("peft", []), ("merged", ["--merge"])):
            target = found[f"{name}, {kind}"] = folder() / f"{kind} {name}"
            assert convert("--from", "dtmega", str(records()[name]), "--to", "hf", str(target), *more) == 0
    return found


def logits(model: Any) -> torch.Tensor:
    tokens = torch.randint(0, 131, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(tokens).logits


@pytest.mark.parametrize("name", EXPORTED)
def test_adapters_for_peft_and_the_merged_directory_give_the_same_logits(name: str):
    with_adapters = logits(by_hand(str(exported()["base"]), exported()[f"{name}, peft"]))
    merged = transformers.AutoModelForCausalLM.from_pretrained(exported()[f"{name}, merged"], dtype=torch.float32)
    base = transformers.AutoModelForCausalLM.from_pretrained(exported()["base"], dtype=torch.float32)
    assert (with_adapters - logits(base.eval())).abs().max() > 0.01
    assert (with_adapters - logits(merged.eval())).abs().max() <= 1e-6


# peft asks transformers 5 for what is called otherwise there.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_peft_itself_loads_the_adapters_of_each_layout():
    import peft

    for name in EXPORTED:
        base = transformers.AutoModelForCausalLM.from_pretrained(exported()["base"], dtype=torch.float32)
        theirs = peft.PeftModel.from_pretrained(base, str(exported()[f"{name}, peft"])).eval()
        ours = by_hand(str(exported()["base"]), exported()[f"{name}, peft"])
        assert (logits(theirs) - logits(ours)).abs().max() <= 1e-6


def test_a_run_with_adapters_is_read_for_inference_with_them_merged():
    trained = open_trained(str(records()["HSDP 2 x 2"]), None, {}, Startup())
    merged = transformers.AutoModelForCausalLM.from_pretrained(exported()["HSDP 2 x 2, merged"], dtype=torch.float32)
    assert (logits(lambda tokens: SimpleNamespace(logits=trained.model(tokens))) - logits(merged)).abs().max() <= 1e-5


@functools.cache
def ends() -> dict[str, str]:
    """The ends of runs that were to go on with another base, or to begin without one, by the names of their folders."""
    lora = keys() | LORA
    base = {"model.init_from": str(records()["base"])}
    moved, other = folder() / "moved", folder() / "other"
    shutil.copytree(exported()["base"], moved)
    trainings = [
        Training(1, keys() | {"train.steps": 1, "run.seed": 5, "checkpoint.interval": 0}, other),
        Training(1, lora, folder() / "drawn", code=2),
        Training(1, keys() | {"train.freeze": ["embed*"]}, folder() / "drawn, frozen", code=2),
    ]
    for name, path, code in (("moved base", moved, 0), ("other base", other, 2), ("no base", folder() / "nowhere", 2)):
        shutil.copytree(records()["1"], folder() / name)
        elsewhere = lora | base | {"train.steps": 6, "lora.base_path": str(path)}
        trainings.append(Training(1, elsewhere, folder() / name, code=code))
    train_all(trainings)
    return {t.folder.name: json.loads((t.folder / "exit.json").read_text())["reason"] for t in trainings}


def test_a_run_goes_on_with_its_base_elsewhere_and_in_another_form():
    assert Record(folder() / "moved base").steps.keys() == set(range(1, 7)) if ends() else False


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("other base", "is not the base of this run: 21 of 21 tensors differ"),
        ("no base", "the base of this run cannot be read"),
        ("drawn", "without weights to start from"),
        ("drawn, frozen", "without weights to start from"),
    ],
)
def test_another_a_missing_and_a_drawn_base_are_refused(name: str, words: str):
    assert words in ends()[name]


def test_inspect_and_the_report_tell_rank_targets_and_what_is_trained_and_frozen(capsys, tmp_path: Path):
    run, n_frozen = records()["HSDP 2 x 2"], sum(t.numel() for t in record("base").final.values())
    n_trained = sum(t.numel() for t in record("HSDP 2 x 2").final.values())
    assert command(["inspect", str(run)]) == 0
    told = capsys.readouterr().out
    assert f"{n_trained:,} parameters in 28 tensors" in told
    assert f"{n_frozen:,} frozen parameters in 21 tensors, not in the checkpoint" in told
    assert "adapters    rank 3, alpha 6.0, on linears" in told
    assert f"trained: {n_trained:,} parameters; frozen: {n_frozen:,}" in (run / "stdout-0").read_text()
    assert command(["report", str(run), "--output", str(tmp_path / "report.html")]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "adapters of rank 3, alpha 6.0, on linears" in page
    assert f"{n_trained / 1e3:.1f}" in page


@pytest.mark.parametrize("target", ["megatron", "dtmega"])
def test_weights_for_other_formats_are_written_only_with_adapters_merged(target: str, tmp_path: Path, capsys):
    where = ("--from", "dtmega", str(records()["1"]), "--to", target, str(tmp_path / "out"))
    assert convert(*where) == 2
    assert "expected --merge" in capsys.readouterr().err
    assert convert(*where, "--merge") == 0


def test_merged_weights_are_the_start_of_another_run_that_trains_everything(tmp_path: Path):
    merged = load_file(exported()["1, merged"] / "model.safetensors")
    model = config.model_section(state_of(open_checkpoint(str(records()["1"]))).config["model"], "test")
    weights = stored.weights(model.model_copy(update={"init_from": str(records()["1"])}))
    assert weights is not None
    theirs = merged["model.layers.0.self_attn.q_proj.weight"]
    assert (weights.read("layers.0.attn.q.weight") - theirs).abs().max() <= 1e-7
