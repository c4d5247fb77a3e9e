"""Claims about [model] name = "hf": on every layout the trainer makes of a directory what transformers makes of it."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dtmega import train
from dtmega.__main__ import main as command
from dtmega.checkpoint import resume
from dtmega.interop.hf.families import OVER_CP
from tests import hf_models, hf_train, layouts
from tests.hf_models import Case
from tests.hf_train import Job

# Where layouts sum in another order; rounding alone is below 2e-6 of the largest.
LOSS, GRADIENT, STEPPED = 1e-6, 1e-5, 1e-4
TIED = ("bloom", "gpt2", "qwen3", "opt")
FAMILIES = ["bloom", "gpt2", "llama", "mistral", "qwen2", "qwen3", "gpt_neox", "opt"]
CASES = [*(Case(name, tied=name in TIED) for name in FAMILIES), Case("qwen2 sliding")]
# With a plan of transformers' own; the last has two matrices in one, which FSDP2 cuts along the other dim.
CAPPED, DIVIDED = Case("gemma2"), Case("granite", tied=False)
NATIVE, PACKED = Case("olmo2", tied=False), Case("phi3", tied=False)
MIXTURES = [Case(name, tied=name == "qwen3_moe") for name in hf_models.MIXTURES]
*_, DEEPSEEK = MIXTURES
CODEGEN = Case("codegen", tied=False)  # both of whose matrices in parts are cut
XGLM = Case("xglm")
GPT2, UNKNOWN = Case("gpt2"), Case("gpt_neo", tied=False)
# The fused head is one for all families, and interop/hf/tp/test_plan.py has each of them on tp.
BLOOM, OPT = Case("bloom"), Case("opt")
# In stages: a family with two kinds of layers, and one whose base model multiplies what comes in.
STAGED = [Case("gemma3_text"), DIVIDED]
OTHERS = ["arcee", "ernie4_5", "exaone4", "smollm3", "starcoder2", "gemma", "gemma2", "olmo", "olmo2", "olmo3"]
OTHERS += ["gptj", "codegen", "mpt", "xglm", "gpt_bigcode", "stablelm parallel, norms"]
OTHERS += ["phi", "phi3", "cohere", "cohere2", "glm", "glm4"]
EVERY = [*CASES, *STAGED, *MIXTURES, *(Case(name, tied=i % 2 == 0) for i, name in enumerate(OTHERS))]
# Over cp: windows of some layers, layers that rotate nothing, scales of scores, positions that are learned, heads that
# share keys, experts.
SHARING = [Case(name, tied=False) for name in ("gemma3_text", "smollm3", "granite", "opt", "mixtral")]
# Layout -> what is trained there, each kind of layer once. Each family is cut into stages in `REPEATING`, and by tp in
# interop/hf/tp/test_plan.py.
EVERYWHERE = {
    "1": [OPT, GPT2, CAPPED],
    "tp 2": [DEEPSEEK, CODEGEN],
    "pp 2": [BLOOM, GPT2, *STAGED, DEEPSEEK],
    "dp 2": [XGLM, UNKNOWN, DEEPSEEK],
    "tp 2 x dp 2": [GPT2, PACKED],
    "dp 2, ep 2": [DEEPSEEK],
    "cp 2": SHARING,
    "cp 2, heads": [STAGED[0]],
    "cp 2 x tp 2": [PACKED],
    "cp 2 x pp 2": [STAGED[0]],
}
REPEATING = {"tp 2 x dp 2, recompute": CASES, "pp 2": EVERY, "pp 2 x tp 2": EVERY}
REPEATING |= {
    layout: [*(case for case in CASES if case not in EVERYWHERE[layout]), *MIXTURES] for layout in ("1", "tp 2")
}
REPEATING["1"] += [UNKNOWN, DIVIDED]
REPEATING["tp 2"] += [NATIVE, CAPPED]
SHARED = [case for case in EVERY if case.family in OVER_CP and case != CAPPED]
REPEATING |= dict.fromkeys(("cp 2", "cp 2 x pp 2", "cp 2 x dp 2"), SHARED)
# Those whose heads of keys and values are enough for two ranks.
REPEATING |= {"cp 2, heads": [case for case in SHARED if case.name != "gpt_bigcode"]}
REPEATING |= {"cp 2 x tp 2": SHARED}
REPEATING |= {"dp 2": [GPT2, *MIXTURES, Case("mamba")], "tp 2 x dp 2": MIXTURES}
REPEATING |= dict.fromkeys(("dp 2, ep 2", "dp 4, ep 2", "pp 2 x dp 2, ep 2"), MIXTURES)
REPEATING["cp 2, ep 2"] = [case for case in MIXTURES if case.family in OVER_CP]
# What is saved where, and where it is read.
WRITERS = {
    "4": ("tp 2 x dp 2", GPT2),
    "2 async": ("dp 2", GPT2),
    "1": ("1", GPT2),
    "pp": ("pp 2", GPT2),
    "packed": ("tp 2 x dp 2", CODEGEN),
    "experts": ("tp 2 x dp 2", DEEPSEEK),
}
READERS = {
    "4": ["pp 2"],
    "2 async": ["1"],
    "1": ["tp 2 x dp 2"],
    "pp": ["1"],
    "packed": ["tp 2"],
    "experts": ["pp 2"],
}
DRAWN = ["1", "tp 2", "pp 2", "dp 2"]


@functools.cache
def truths(repeating: bool = False) -> tuple[dict[Case, str], str]:
    trained = REPEATING if repeating else EVERYWHERE
    return hf_train.truths(list(dict.fromkeys(case for cases in trained.values() for case in cases)))


def numbers_on(trained: dict[str, list[Case]]) -> dict[str, Job]:
    directories, path = truths(repeating=trained is REPEATING)
    return {
        layout: Job(layout, hf_train.numbers, ({case: directories[case] for case in cases}, path))
        for layout, cases in trained.items()
    }


@functools.cache
def folder(name: str) -> Path:
    """A folder of this module, next to the models."""
    path = Path(truths()[1]).with_suffix("") / name
    path.mkdir(parents=True, exist_ok=True)
    return path


@functools.cache
def measured() -> dict[str, list[Any]]:
    """All that `make test` measures, so that its processes start once."""
    directories = truths()[0]
    gpt2 = directories[GPT2]
    jobs = numbers_on(EVERYWHERE)
    for layout in ("1", "tp 2"):
        jobs[f"smoothing {layout}"] = Job(layout, hf_train.smoothing, (gpt2,))
    for layout in ("1", "dp 2"):
        jobs[f"bf16 {layout}"] = Job(layout, hf_train.rounded, (gpt2,))
    jobs["bf16 positions"] = Job("1", hf_train.rounded, (directories[XGLM],))
    for layout in DRAWN:
        jobs[f"drawn {layout}"] = Job(layout, hf_train.drawn, (without_weights(),))
    for name, (layout, case) in WRITERS.items():
        mode, where = "async" if "async" in name else "sync", directories[case]
        jobs[f"saved {name}"] = Job(layout, hf_train.saving, (where, str(folder(name)), mode))
        for reader in READERS[name]:
            jobs[f"{name} on {reader}"] = Job(
                reader, hf_train.reading, (where, str(folder(name) / resume.name(hf_train.STEPS)))
            )
    for layout in ("tp 2", "pp 2"):
        argv = [*arguments(), "--run.dir", str(folder("resumed")), "--train.exit_interval", "2"]
        jobs[f"trained {layout}"] = Job(layout, hf_train.training, (argv, str(folder(layout))))
    argv = [*arguments(), "--run.dir", str(folder("shared"))]
    jobs["trained cp 2"] = Job("cp 2", hf_train.training, (argv, str(folder("cp 2"))))
    # What others have left behind comes last; those of one layout share a group.
    late = [name for name, job in jobs.items() if job.fn is hf_train.reading or name == "trained pp 2"]
    order = sorted(jobs, key=lambda name: (name in late, jobs[name].layout))
    return hf_train.run_all({name: jobs[name] for name in order})


@functools.cache
def repeated() -> dict[str, list[Any]]:
    return hf_train.run_all(numbers_on(REPEATING))


def without_weights() -> dict[str, str]:
    """Directories with a config.json and nothing else."""
    found = {}
    for name in ("gpt2", "opt"):
        found[name] = str(folder(f"{name} without weights"))
        hf_models.plain(Case(name, tied=name == "gpt2")).config.save_pretrained(found[name])
    return found


@functools.cache
def arguments() -> list[str]:
    """The arguments of train.py for a tiny LLaMA whose directory has weights and a tokenizer, on text in its words."""
    home = folder("llama")
    hf_models.build(Case("llama", tied=False)).save_pretrained(home)
    text = layouts.write_text(home)["data.path"]
    keys = {
        "model.path": home,
        "data.path": text,
        "data.seq_len": 16,
        "data.split": "8,1,1",
        "data.num_workers": 0,
        "batch.global_batch_size": 4,
        "optim.lr": 1e-2,
        "optim.warmup": 0,
        "train.steps": 4,
        "train.drift_interval": 1,
        "log.params_norm": "true",
        "eval.steps": 1,
        "eval.prompt": "w7 w8",
        "eval.sample_tokens": 3,
        "precision.params": "float32",
        "log.tensorboard": "false",
        "run.device": "cpu",
    }
    config = str(layouts.ROOT / "configs" / "hf.toml")
    return ["--config", config, *(word for k, v in keys.items() for word in (f"--{k}", str(v)))]


@pytest.fixture
def main() -> Iterator[Any]:
    yield train.main
    if dist.is_initialized():
        dist.destroy_process_group()


def check_numbers(results: list[Any], case: Case) -> None:
    """Check the results of all ranks of a layout."""
    expected = {n for n, p in hf_models.build(case).named_parameters() if p.requires_grad}
    for kind, bound in (("gradients", GRADIENT), ("stepped", STEPPED)):
        worst: dict[str, float] = {}
        for result in results:
            worst |= {n: max(e, worst.get(n, 0.0)) for n, e in result[case][kind].items()}
        assert worst.keys() == expected
        assert {n: e for n, e in worst.items() if not e <= bound} == {}
    assert max(result[case]["loss"] for result in results) <= LOSS
    assert max(result[case]["losses"] for result in results) <= STEPPED


def pairs(trained: dict[str, list[Case]]) -> list[Any]:
    return [
        pytest.param(layout, case, id=f"{layout}-{case.name}{'-tied' if case.tied else ''}")
        for layout, cases in trained.items()
        for case in cases
    ]


@pytest.mark.parametrize(("layout", "case"), pairs(EVERYWHERE))
def test_loss_every_gradient_and_two_clipped_steps_are_those_of_transformers_and_torch(layout: str, case: Case):
    check_numbers(measured()[layout], case)


@pytest.mark.full
@pytest.mark.parametrize(("layout", "case"), pairs(REPEATING))
def test_the_same_on_two_axes_at_once(layout: str, case: Case):
    check_numbers(repeated()[layout], case)


@pytest.mark.parametrize("layout", EVERYWHERE)
def test_a_rank_reads_of_the_files_what_it_holds_and_no_more(layout: str):
    # What tp does not cut are norms, biases and positions, of which OPT has 2050; the embedding is cut 66 : 65.
    share = {"1": 1.0, "tp 2": 0.6, "dp 2": 0.52, "tp 2 x dp 2": 0.32, "pp 2": 1.0}
    share |= {"cp 2": 0.52, "cp 2, heads": 0.52, "cp 2 x tp 2": 0.32, "cp 2 x pp 2": 0.52}
    for case in EVERYWHERE[layout]:
        found = [(result[case]["bytes_read"], result[case]["bytes_held"]) for result in measured()[layout]]
        assert all(read == held for read, held in found), case
        model = hf_models.build(case)
        alone = sum(tensor.nbytes for tensor in [*model.parameters(), *hf_models.stored_buffers(model).values()])
        if case.name not in ("opt", "deepseek_v3"):  # whose attention transformers leaves whole
            assert max(read for read, _ in found) <= share[layout] * alone, case


def test_label_smoothing_is_of_training_only():
    expected = torch.load(truths()[1], weights_only=False)[GPT2]
    for layout in ("1", "tp 2"):
        for training, evaluation in measured()[f"smoothing {layout}"]:
            assert training == pytest.approx(expected["smoothed"], rel=LOSS)
            assert evaluation == pytest.approx(expected["losses"][0], rel=LOSS)
            assert training != pytest.approx(evaluation, rel=1e-4)


# Positions that are no parameters are added to what is embedded in bf16.
@pytest.mark.parametrize(("job", "case"), [("1", GPT2), ("dp 2", GPT2), ("positions", XGLM)], ids=str)
def test_in_bf16_blocks_compute_in_it_and_what_is_trained_stays_fp32(job: str, case: Case):
    expected = torch.load(truths()[1], weights_only=False)[case]["losses"][0]
    for found in measured()[f"bf16 {job}"]:
        assert found["loss"] == pytest.approx(expected, rel=1e-2)
        assert found["loss"] != pytest.approx(expected, rel=1e-6)
        assert (found["masters"], found["activations"]) == ({torch.float32}, {torch.bfloat16})


def together(results: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Join the tensors of all stages; ranks that have the same tensor have the same bits."""
    found: dict[str, Tensor] = {}
    for result in results:
        for name, tensor in result.items():
            assert torch.equal(found.setdefault(name, tensor), tensor), name
    return found


@pytest.mark.parametrize(("name", "layout"), [(name, layout) for name in READERS for layout in READERS[name]])
def test_what_is_saved_on_one_layout_is_read_on_another_with_the_same_bits(name: str, layout: str):
    saved, read = together(measured()[f"saved {name}"]), together(measured()[f"{name} on {layout}"])
    model = hf_models.build(WRITERS[name][1])
    assert saved.keys() == read.keys()
    n_moments = 2 * len(list(model.parameters()))
    assert len(saved) == len(list(model.parameters())) + n_moments + len(hf_models.stored_buffers(model))
    assert [n for n, t in saved.items() if not torch.equal(t, read[n])] == []
    assert all(t.any() for n, t in saved.items() if n.endswith("weight"))


@pytest.mark.parametrize("layout", DRAWN[1:])
def test_initial_values_have_the_bits_of_one_process_on_every_layout(layout: str):
    for name in without_weights():
        alone, here = ([r[name] for r in measured()[f"drawn {where}"]] for where in ("1", layout))
        alone, here = together(alone), together(here)
        assert alone.keys() == here.keys()
        assert [n for n, t in alone.items() if not torch.equal(t, here[n])] == []


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def series(run_dir: Path, key: str) -> list[float]:
    return [line[key] for line in metrics(run_dir) if "loss" in line]


def test_a_run_from_a_directory_says_what_it_trains_goes_on_on_other_layouts_and_ends_with_a_sample(
    main, tmp_path, capsys
):
    assert measured()["trained tp 2"] == [0, 0]
    assert measured()["trained pp 2"] == [0, 0]
    assert measured()["trained cp 2"] == [0, 0]
    capsys.readouterr()
    assert main([*arguments(), "--run.dir", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    n_parameters = sum(p.numel() for p in hf_models.build(Case("llama", tied=False)).parameters())
    assert f"{n_parameters:,} parameters" in said
    assert "a sample:\nw7 w8" in said
    assert "has no weights" not in said
    for key, bound in (("loss", 1e-6), ("grad_norm", 1e-5), ("params_norm", 1e-6)):
        alone = series(tmp_path, key)
        assert len(alone) == 4
        assert series(folder("resumed"), key) == pytest.approx(alone, rel=bound)
        assert series(folder("shared"), key) == pytest.approx(alone, rel=bound)
    evaluated = [
        [line["val_loss"] for line in metrics(path) if "val_loss" in line] for path in (tmp_path, folder("shared"))
    ]
    assert evaluated[0]
    assert evaluated[1] == pytest.approx(evaluated[0], rel=1e-6)
    assert "a sample:\nw7 w8" in (folder("cp 2") / "stdout-0").read_text()
    by_rank = (folder(layout) / "stdout-0" for layout in ("tp 2", "pp 2"))
    first, second = (path.read_text() for path in by_rank)
    assert "stopped after step 2 of 4" in first
    assert "python -m dtmega generate --run" in second
    dist.destroy_process_group()
    assert command(["generate", "--run", str(folder("resumed")), "--prompt", "w7 w8", "--tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("w7 w8")


def test_a_checkpoint_of_the_trainer_is_where_another_run_starts(main, tmp_path):
    resumed = folder("resumed")
    assert measured()["trained pp 2"] == [0, 0]
    for start in (resumed, resumed / "checkpoints" / "step-00000004"):
        run_dir = tmp_path / start.name
        argv = [*arguments(), "--run.dir", str(run_dir), "--model.init_from", str(start), "--train.steps", "1"]
        assert main(argv) == 0
        dist.destroy_process_group()
        assert series(run_dir, "loss")[0] < series(resumed, "loss")[0] - 0.1
