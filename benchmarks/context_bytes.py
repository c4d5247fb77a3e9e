"""Count the bytes that a rank holds for a long sequence, with and without context parallelism, without a GPU.

    python benchmarks/context_bytes.py [--config bloom-1b7.toml] [--seq-len 32768]    # needs g++ and a torch for CPUs

The script runs the unchanged `parallelize` and `forward_backward` of one rank, on one sequence in bf16 with fp32
masters. All tensors are fake tensors on a simulated CUDA device (`one_gpu.py`), and the process group is torch's fake
process group: nothing is computed or sent, but every tensor has its real size. Each layout is counted separately:

    parameters       fp32, this rank's shards
    gradients        fp32, at the end of the step
    for backward     tensors that forward keeps: activations, gathered or cast weights, the gradient of the head
    peak             the maximum at any time, including parameters and gradients

A stand-in replaces FlexAttention, and keeps the tensors that FlexAttention keeps: the inputs, the output and one
logarithm per query. Blocks are not compiled, because fake tensors inside compiled graphs cannot be counted, and there
is no dropout. Compiled blocks keep less. During the count, Python holds each tensor a moment longer than in a run, so
autograd adds the second gradient of a tied weight into new memory. The counted peak may therefore be too high by this
[V, D] tensor in bf16. The script does not count AdamW's moments, which take twice the bytes of the parameters, and does
not count memory that the allocator leaves unused between tensors.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import one_gpu

if reason := one_gpu.missing():
    sys.exit(f"counts nothing: {reason}")
# Load the simulated GPU before torch is imported, because torch looks for a GPU only once.
one_gpu.load()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402
from torch._subclasses import fake_tensor  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from dtmega import config, families, mesh  # noqa: E402
from dtmega.ops import attention  # noqa: E402
from dtmega.ops.shards import local  # noqa: E402
from dtmega.training import parallelize  # noqa: E402

LAYOUTS = {
    "one process": {},
    "dp_shard 4": {"dp_shard": 4},
    "cp 2, gather": {"cp": 2, "cp_form": "gather"},
    "cp 2, heads": {"cp": 2, "cp_form": "heads"},
    "cp 4, gather": {"cp": 4, "cp_form": "gather"},
    "cp 4, heads": {"cp": 4, "cp_form": "heads"},
}
DEVICE = torch.device("cuda", 0)


class Held(NamedTuple):
    """The bytes that one rank holds, one field for each column of the table."""

    parameters: int
    gradients: int
    for_backward: int
    peak: int


class Count(TorchDispatchMode):
    """Counts the bytes of all tensors that are alive on the device.

    Attributes:
        now, peak: current number of bytes, and maximum so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}  # bytes of each storage, by address

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is not torch.ops.prim.device.default:
            for tensor in tree_leaves(out):
                if isinstance(tensor, Tensor):
                    self._see(tensor)
        return out

    def resized(self, storage: torch.UntypedStorage, n_bytes: int) -> None:
        """Note the new size of a storage that FSDP or `Masters` has freed or allocated again."""
        if storage._cdata in self._sizes:
            self._set(storage._cdata, n_bytes)

    def _see(self, tensor: Tensor) -> None:
        part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if part.device.type != DEVICE.type:
            return
        storage = part.untyped_storage()
        if storage._cdata not in self._sizes:
            weakref.finalize(storage, self._forget, storage._cdata)
        self._set(storage._cdata, storage.nbytes())

    def _set(self, key: int, n_bytes: int) -> None:
        self.now += n_bytes - self._sizes.get(key, 0)
        self._sizes[key] = n_bytes
        self.peak = max(self.peak, self.now)

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


@torch.library.custom_op("benchmarks::flex", mutates_args=())
def flex(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Stand-in for FlexAttention: the output and the logarithm of each query's sum, as tensors without values."""
    raise NotImplementedError  # only the fake below is ever called


@flex.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    n_rows, n_heads, n_queries, _ = q.shape
    out = q.new_empty(n_rows, n_queries, n_heads, v.shape[-1]).transpose(1, 2)
    return out, q.new_empty(n_rows, n_heads, n_queries, dtype=torch.float32)


@torch.library.custom_op("benchmarks::flex_backward", mutates_args=())
def flex_backward(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Stand-in for FlexAttention's backward: the gradients of q, k and v, as tensors without values."""
    raise NotImplementedError  # only the fake below is ever called


@flex_backward.register_fake
def _(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, *output)


flex.register_autograd(lambda ctx, gradient, _: flex_backward(gradient, *ctx.saved_tensors[:3]), setup_context=_keep)


@contextlib.contextmanager
def pretending(count: Count, fake: FakeTensorMode) -> Iterator[None]:
    """Replace all functions that need a real device, for results or for memory."""
    resize, make_groups, make_empty = torch.UntypedStorage.resize_, mesh.make_groups, torch.empty
    # When a `torch.device` first serves as a context, torch lists the functions that such a context changes. Make torch
    # list these functions now, before one of them is replaced.
    with torch.device("meta"):
        torch.empty(0)

    def resize_and_count(storage: torch.UntypedStorage, n_bytes: int) -> Any:
        resized = resize(storage, n_bytes)
        count.resized(storage, n_bytes)
        return resized

    def empty(*args: Any, **kwargs: Any) -> Tensor:
        # FSDP must wrap meta modules outside `fake`, but makes empty tensors on the device at the same time. Only these
        # empty tensors are made inside `fake`.
        with fake if torch.device(kwargs.get("device") or "cpu") == DEVICE else contextlib.nullcontext():
            return make_empty(*args, **kwargs)

    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(torch.UntypedStorage, "resize_", resize_and_count))
        stack.enter_context(patch.object(torch, "empty", empty))
        stack.enter_context(patch.object(fake_tensor, "init_gpu_context", lambda device: None))
        stack.enter_context(patch.object(attention, "_flex", lambda q, k, v, *_: flex(q, k, v)[0]))
        # The ranks compare how many groups they have made, in numbers that somebody has to read.
        on_cpu = functools.partial(make_groups, device=torch.device("cpu"))
        stack.enter_context(patch.object(mesh, "make_groups", lambda sizes, _, timeout: on_cpu(sizes, timeout=timeout)))
        # Leave out `_unseen`, the masks of a few biases, because torch reads values to find the biases' places in a
        # shard.
        stack.enter_context(patch.object(parallelize.ShardedModel, "unseen_elements", ()))
        yield


def hold(arguments: list[str], axes: dict[str, Any]) -> Held:
    """Count the bytes that the first rank of a layout holds in a step with one sequence per data rank.

    Args:
        arguments: command line of the run.
        axes: values of the [mesh] keys, by key.
    """
    for axis, size in {"dp_shard": 1, **axes}.items():
        arguments = [*arguments, f"--mesh.{axis}", str(size)]
    world_size = axes.get("cp", 1) * axes.get("dp_shard", 1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    count, fake = Count(), FakeTensorMode(allow_non_fake_inputs=True)
    with pretending(count, fake):
        cfg = families.resolve(config.load(arguments))
        world = mesh.start(DEVICE, mesh.resolve(cfg.mesh, world_size))
        parallelize.check(cfg, world.sizes, DEVICE)
        kind = type(families.of(cfg.model))
        allocate = kind.allocate

        def allocate_fake(*args: Any) -> None:
            with fake:
                allocate(*args)

        with count, patch.object(kind, "allocate", allocate_fake):
            model = parallelize.parallelize(cfg, world)
        held = step(model, count, fake, cfg.data.seq_len)
    dist.destroy_process_group()
    return held


def step(model: parallelize.ShardedModel, count: Count, fake: FakeTensorMode, seq_len: int) -> Held:
    run_backward = torch.autograd.backward
    kept: list[int] = []

    def backward(*args: Any) -> None:
        kept.append(count.now)
        run_backward(*args)

    with fake, count, patch.object(torch.autograd, "backward", backward):
        tokens = torch.zeros(1, seq_len, dtype=torch.int64, device=DEVICE)
        rows = {"tokens": tokens, "labels": tokens.clone(), "sample_ids": tokens[:, 0].clone()}
        before = count.now
        counts = {term.per: 1.0 for term in model.objective.sums}
        model.forward_backward([rows], counts)
    parameters = {id(p): p for _, p in model.named_parameters()}.values()
    sizes = [local(p.detach()).nbytes for p in parameters]
    gradients = [local(p.grad).nbytes for p in parameters if p.grad is not None]
    return Held(sum(sizes), sum(gradients), kept[0] - before, count.peak)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default="bloom-1b7.toml")
    parser.add_argument("--seq-len", type=int, default=32768)
    arguments = parser.parse_args()
    one_gpu.answer()
    run = ["--config", arguments.config, "--data.seq_len", str(arguments.seq_len), "--batch.micro_batch_size", "1"]
    run += ["--model.hidden_dropout", "0", "--model.attention_dropout", "0", "--compile.enable", "false"]
    print(
        f"{arguments.config}, S {arguments.seq_len}, torch {torch.__version__}; GiB of one rank, and of one process's"
    )
    print("| layout | parameters | gradients | for backward | peak | CPU s |\n| --- |" + " ---: |" * 5)
    first: Held | None = None
    for name, axes in LAYOUTS.items():
        started_s = time.process_time()
        held = hold(run, axes)
        first = first or held
        cells = [f"{of / 2**30:.2f} ({of / one:.3f})" for of, one in zip(held, first, strict=True)]
        print(f"| {name} | {' | '.join(cells)} | {time.process_time() - started_s:.0f} |", flush=True)


if __name__ == "__main__":
    main()
