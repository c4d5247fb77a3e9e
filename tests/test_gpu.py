"""Paths that only a GPU takes, against plain formulas on a CPU: `pytest -m gpu` where CUDA is.

Each body runs on a CPU too, where the plain kernel stands for the other, so that it cannot rot. Runs are of one process
with a group of its own: nccl there, gloo here.
"""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks import gpu_layouts
from dtmega import config, mesh, train
from dtmega.checkpoint.staging import Stager
from dtmega.data.loader import TrainBatches
from dtmega.data.objectives.rows import Rows
from dtmega.models.experts import Experts
from dtmega.ops.attention import LARGEST_FUSED_HEAD, attention
from dtmega.ops.attention_rule import alibi_slopes, attention_rule
from dtmega.ops.cross_entropy import linear_cross_entropy
from dtmega.training.step import train_step
from tests import counts, ranks
from tests.ops.test_attention import textbook

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
on_each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
DTYPES = {"float32": (torch.float32, 2e-5), "bfloat16": (torch.bfloat16, 2e-2)}
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
in_each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def error(found: Tensor, expected: Tensor) -> float:
    """The relative distance from the truth in fp64."""
    return float((found.detach().cpu().double() - expected).norm() / expected.norm())


def draws(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# ---- attention

B, H, S, K = 2, 4, 200, 32  # no whole number of FlexAttention's blocks
RULES = ("causal", "documents", "padding", "ALiBi", "relative table")


def said_twice(words: str) -> tuple[dict[str, Any], Tensor | float, Tensor]:
    """A rule as keywords of `attention_rule`, and over all pairs: what is added, what is allowed."""
    places = torch.arange(S).repeat(B, 1)
    distance = places[:, None, None, :] - places[:, None, :, None]
    causal = distance <= 0
    if words == "documents":
        ids = (places % 67 == 0).long().cumsum(1)
        same = ids[:, None, :, None] == ids[:, None, None, :]
        return {"causal": True, "document_ids": ids}, 0.0, causal & same
    if words == "padding":
        ids = -(places >= torch.tensor([[S - 1], [S // 2]])).long()
        same = ids[:, None, :, None] == ids[:, None, None, :]
        return {"causal": False, "document_ids": ids}, 0.0, same
    if words == "ALiBi":
        slopes = alibi_slopes(H)
        return {"causal": True, "slopes": slopes}, slopes.double()[:, None, None] * distance, causal
    if words == "relative table":
        table = draws(H, 41, seed=9).float()
        entry = table.double()[:, distance[0, 0].clamp(-20, 20) + 20]
        return {"causal": False, "table": table}, entry, torch.ones_like(causal)
    return {"causal": True}, 0.0, causal


@on_each_device
@in_each_dtype
@pytest.mark.parametrize("words", RULES)
def test_attention_and_its_gradients_are_the_textbooks(words: str, dtype: str, device: str):
    kind, bound = DTYPES[dtype]
    keywords, added, allowed = said_twice(words)
    truth = [draws(B, H, S, K, seed=i).to(kind).double().requires_grad_() for i in range(3)]
    gradient = draws(B, H, S, K, seed=3).to(kind).double()
    expected = textbook(truth[0], truth[1], truth[2], added, allowed)
    expected.backward(gradient)
    on_device = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in keywords.items()}
    rule = attention_rule(torch.arange(S, device=device).repeat(B, 1), **on_device)
    assert (rule.block_mask is not None) == (device == "cuda")
    ours = [x.detach().to(device, kind).requires_grad_() for x in truth]
    out = attention(ours[0], ours[1], ours[2], rule)
    out.backward(gradient.to(device, kind))
    assert error(out, expected.detach()) < bound
    for mine, true in zip(ours, truth, strict=True):
        assert mine.grad is not None
        assert true.grad is not None
        assert error(mine.grad, true.grad) < bound


@on_each_device
def test_a_graph_of_attention_that_is_kept_gives_its_gradients_again(device: str):
    q, k, v = (draws(B, H, S, K, seed=i).float().to(device).requires_grad_() for i in range(3))
    rule = attention_rule(torch.arange(S, device=device).repeat(B, 1), causal=True)
    out = attention(q, k, v, rule)
    gradient = torch.ones_like(out)
    first = torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)
    again = torch.autograd.grad(out, (q, k, v), gradient)
    for one, other in zip(first, again, strict=True):
        assert other.equal(one)


@on_each_device
def test_heads_too_wide_for_the_fused_kernel_have_the_textbooks_attention_too(device: str):
    wide = 2 * LARGEST_FUSED_HEAD
    q, k, v = (draws(1, 2, S, wide, seed=i) for i in range(3))
    _, added, allowed = said_twice("causal")
    expected = textbook(q, k, v, added, allowed[:1])
    rule = attention_rule(torch.arange(S, device=device)[None], causal=True)
    ours = [x.float().to(device) for x in (q, k, v)]
    assert error(attention(ours[0], ours[1], ours[2], rule), expected) < 2e-5


# ---- the loss


@on_each_device
@in_each_dtype
def test_the_fused_loss_and_its_gradients_are_cross_entropys(dtype: str, device: str, monkeypatch: pytest.MonkeyPatch):
    kind, bound = DTYPES[dtype]
    monkeypatch.setattr("dtmega.ops.cross_entropy.CHUNK_TOKENS", {device: 64})  # three chunks, the last one smaller
    monkeypatch.setattr("dtmega.ops.cross_entropy.CHUNK_LOGITS", 0)
    n, d, v = 150, 32, 67
    labels = torch.arange(n) % v
    labels[::7] = -100
    h, weight = (draws(*shape, seed=i).to(kind).double().requires_grad_() for i, shape in enumerate([(n, d), (v, d)]))
    expected = F.cross_entropy(h @ weight.T, labels, reduction="sum", label_smoothing=0.1)
    expected.backward()
    ours = [x.detach().to(device, kind).requires_grad_() for x in (h, weight)]
    loss = linear_cross_entropy(ours[0], ours[1], labels.to(device), label_smoothing=0.1)
    loss.backward()
    assert error(loss, expected.detach()) < bound
    for mine, true in zip(ours, (h, weight), strict=True):
        assert mine.grad is not None
        assert true.grad is not None
        assert error(mine.grad, true.grad) < bound


# ---- experts


@on_each_device
@in_each_dtype
def test_experts_and_their_gradients_are_all_experts_results_weighted_with_zeros_for_dropped_pairs(
    dtype: str, device: str
):
    kind, bound = DTYPES[dtype]
    n_experts, d, ffn, n = 4, 32, 48, 50
    shapes = [(1, n, d), (n, 2), (n_experts, ffn, d), (n_experts, ffn, d), (n_experts, d, ffn)]
    truth = [draws(*shape, seed=i).to(kind).double().requires_grad_() for i, shape in enumerate(shapes)]
    x, weights, gate, up, down = truth
    # Number E is no expert. The last expert has no pair, and the first token has none either.
    chosen = torch.stack([torch.arange(n) % 3, torch.full((n,), n_experts)], 1)
    chosen[0] = n_experts
    inner = F.silu(torch.einsum("nd,efd->nef", x[0], gate)) * torch.einsum("nd,efd->nef", x[0], up)
    every = torch.einsum("nef,edf->ned", inner, down)
    shares = torch.zeros(n, n_experts + 1, dtype=torch.float64).scatter_add(1, chosen, weights)[:, :n_experts]
    expected = (every * shares.unsqueeze(-1)).sum(1)
    gradient = draws(n, d, seed=9).to(kind).double()
    expected.backward(gradient)
    ours = [t.detach().to(device, torch.float32 if t is weights else kind).requires_grad_() for t in truth]
    module = Experts(n_experts, d, ffn)
    numbers = chosen.to(device)
    kept = ours[1].masked_fill(numbers == n_experts, 0.0)
    out = module.compute(ours[0], numbers, kept, ours[2], ours[3], ours[4])
    out.backward(gradient.to(device, kind)[None])
    assert error(out[0], expected.detach()) < bound
    for mine, true in zip(ours, truth, strict=True):
        assert mine.grad is not None
        assert true.grad is not None
        assert error(mine.grad, true.grad) < bound


# ---- host and device


class NumberedRows(Rows):
    """Sample g is g in every place."""

    def __getitem__(self, indices: range) -> dict[str, Tensor]:
        return {"tokens": torch.tensor([*indices])[:, None].repeat(1, 4)}


@on_each_device
def test_a_loader_that_pins_gives_the_same_batches_in_pages_that_copies_need_not_wait_for(device: str):
    data, batch = config.Data(num_workers=0), config.Batch(micro_batch_size=2, global_batch_size=4)
    steps = TrainBatches(NumberedRows(), data, batch, 0, 1, pin_memory=device == "cuda")
    for number, step in zip(range(3), steps, strict=False):
        tokens = [microbatch["tokens"] for microbatch in step.microbatches]
        assert torch.cat(tokens)[:, 0].tolist() == [*range(4 * number, 4 * number + 4)]
        assert all(t.is_pinned() for t in tokens) == (device == "cuda")
        arrived = tokens[0].to(device, non_blocking=True)
        assert arrived.cpu().equal(tokens[0])


@on_each_device
def test_staged_values_are_those_of_the_moment_while_the_device_goes_on(device: str):
    tensors = {"a": draws(300, 300, seed=0).to(device), "b": draws(7, seed=1).to(device, torch.bfloat16)}
    stager = Stager()
    for factor in (2, 3):
        now = {name: tensor.cpu().clone() for name, tensor in tensors.items()}
        staged = stager.stage(tensors)
        for tensor in tensors.values():
            tensor.mul_(factor)
        assert all(staged[name].equal(now[name]) for name in now)
        assert all(tensor.is_pinned() for tensor in staged.values()) == (device == "cuda")


# ---- a process


def first(device: str) -> torch.device:
    """The first device of a kind."""
    return torch.device(device, 0) if device == "cuda" else torch.device(device)


def in_a_process(device: str, fn: Callable[..., Any], *args: Any) -> Any:
    """fn(*args) in a process of its own.

    torch's compiler opens the GPU's driver when it is imported, in the server of forked ranks, too, and no fork can use
    a driver that is open already.
    """
    if device == "cpu":
        (result,) = ranks.run(1, fn, *args, timeout_s=300.0)
        return result
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(fn, *args).result(timeout=300.0)


@contextlib.contextmanager
def group_of_one():
    """The trainer makes its own process group, by its device."""
    if dist.is_initialized():
        dist.destroy_process_group()
    yield
    dist.destroy_process_group()


def world_of_one(device: str) -> tuple[str, list[float]]:
    with group_of_one():
        world = mesh.start(first(device), mesh.resolve(config.Mesh(), 1))
        sums = []
        for group in world.groups.values():
            x = torch.full((3,), 2.0, device=device)
            dist.all_reduce(x, group=group)
            sums.append(x.sum().item())
        return dist.get_backend(), sums


@on_each_device
def test_a_world_of_one_sums_to_itself_in_every_group(device: str):
    backend, sums = in_a_process(device, world_of_one, device)
    assert backend == {"cpu": "gloo", "cuda": "nccl"}[device]
    assert sums == [6.0] * len(sums)


def losses(device: str) -> dict[str, list[float]]:
    """The losses of four steps, on the device eager and compiled; on a CPU compiled graphs are traced only."""
    found = {}
    with counts.traced_only() if device == "cpu" else contextlib.nullcontext(), group_of_one():
        for name, where, compiled in (("truth", "cpu", False), ("eager", device, False), ("compiled", device, True)):
            cfg = counts.settings(model=counts.MODEL | {"hidden_size": 64}, compile={"enable": compiled})
            run = counts.begin(cfg, first(where))
            found[name] = [train_step(run, counts.batch(cfg, number)).loss for number in range(4)]
    return found


@on_each_device
def test_compiled_and_eager_steps_on_a_device_have_the_losses_of_a_cpu(device: str):
    found = in_a_process(device, losses, device)
    assert found["eager"] == pytest.approx(found["truth"], rel=1e-5)
    assert found["compiled"] == pytest.approx(found["truth"], rel=1e-5)


KEYS = {"model.hidden_size": 64, "model.n_layers": 2, "model.n_heads": 4, "model.vocab_size": 260, "data.seq_len": 8}
QUIET = {"data.num_workers": 0, "eval.interval": 0, "eval.steps": 1, "eval.prompt": "", "log.tensorboard": "false"}


def trained(device: str, corpus: str, folder: Path, exit_interval: int) -> int:
    """Train six steps, or until `exit_interval`; asynchronous checkpoints, dropout."""
    keys = KEYS | QUIET | {"run.dir": folder, "run.device": device, "data.path": corpus, "data.tokenizer": "bytes"}
    keys |= {"train.steps": 6, "train.exit_interval": exit_interval, "checkpoint.mode": "async"}
    keys |= {"model.hidden_dropout": 0.1, "batch.global_batch_size": 2, "compile.enable": "false"}
    argv = ["--config", "bloom.toml", *(word for key, value in keys.items() for word in (f"--{key}", str(value)))]
    with group_of_one():
        return train.main(argv)


def losses_in(run: Path) -> dict[int, float]:
    """The losses by step."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


@on_each_device
def test_a_stopped_run_goes_on_to_the_bit(device: str, corpus: str, tmp_path: Path):
    for name, exit_interval in (("whole", 0), ("halves", 3), ("halves", 0)):
        in_a_process(device, trained, device, corpus, tmp_path / name, exit_interval)
    whole, halves = (losses_in(tmp_path / name) for name in ("whole", "halves"))
    assert halves == whole
    assert len(whole) == 6


# ---- ranks that share it


@pytest.mark.parametrize("row", gpu_layouts.ROWS, ids=lambda row: row.name)
def test_each_layout_of_the_benchmark_is_a_configuration(row: gpu_layouts.Row, tmp_path: Path):
    for leg in row.legs:
        cfg = config.load(gpu_layouts.arguments(row, leg.keys, tmp_path / "run"))
        assert math.prod(max(1, leg.keys.get(f"mesh.{axis}", 1)) for axis in AXES) == leg.n_ranks
        assert cfg.train.steps == gpu_layouts.STEPS


@pytest.mark.full
def test_the_benchmark_of_layouts_finds_those_right_that_run_here():
    command = [sys.executable, "benchmarks/gpu_layouts.py", "mixture: ep 2 with", "resume"]
    found = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.count("| right |") == 2


# ---- what is compiled for it


@pytest.mark.full
def test_two_blocks_share_a_graph_whose_kernels_fit_into_an_h100():
    found = subprocess.run(
        [sys.executable, "benchmarks/gpu_kernels.py", "bloom-560m"],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    if "compiles nothing: " in found.stderr:
        pytest.skip(found.stderr.strip())
    assert found.returncode == 0, found.stderr
    words = found.stdout
    said = re.search(r"bloom-560m: 1 graph for two blocks, (\d+) kernels .* at most (\d+) KiB ", words)
    assert said is not None, words
    n_kernels, shared_kib = map(int, said.groups())
    # Attention forward and backward, its delta, and no more than two passes around each product and norm.
    assert 3 <= n_kernels <= 30
    assert 0 < shared_kib <= 227
    moved = re.findall(r"(forward|backward): passes move ([\d.]+) MiB, at least ([\d.]+)", words)
    ratios = {way: float(ours) / float(least) for way, ours, least in moved}
    # Forward masks of dropout are kept. Backward biases are summed and q, k, v put together in passes of their own.
    assert 1 <= ratios["forward"] <= 1.1
    assert 1 <= ratios["backward"] <= 2.2
    # The loss: one reads the logits, one reads and overwrites them, whatever the length of a chunk.
    assert len(re.findall(r"loss, V [\d,]+: 2 graphs for chunks of two lengths, 2 kernels", words)) == 2
    assert re.findall(r"(sums|derivatives): ([\d.]+) times", words) == [("sums", "1.000"), ("derivatives", "2.000")] * 2
    # Under cp, forward and backward of attention for each of a rank's two runs, or once for a part of the heads.
    shared = re.findall(r"over cp 2, (\w+): (\d) graph for two blocks.*\n  FlexAttention: (\d) kernels", words)
    assert shared == [("gather", "1", "4"), ("heads", "1", "2")]
