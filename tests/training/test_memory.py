"""Memory of a step, on every axis: what a block keeps for backward goes when its backward is done.

The bytes of all storages are counted where each block begins, in forward and again in backward, when the gradient of
its input is there. Between the beginnings of two blocks, backward has to free what forward has added. A tensor that
lives longer than its use (a gathered input, a buffer of a message) makes backward free less.
"""

from __future__ import annotations

import functools
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dtmega.training.step import train_step
from tests import ranks
from tests.planning import real_step

SETTLED_S = 0.02  # in which gloo's threads let go of tensors
NUMBERS_BYTES = 64  # less than any activation: the loads of a layer's experts are kept until the step ends
MEASURED = 1  # the middle one of three microbatches: the gradients are there, and are not reduced yet
BLOOM = {"model.name": "bloom", "model.hidden_dropout": 0.1, "model.attention_dropout": 0.1}
LLAMA = {"model.name": "llama", "model.n_kv_heads": 2, "model.ffn_hidden_size": 64}
MOE = {"model.name": "moe", "model.n_kv_heads": 2, "model.ffn_hidden_size": 64}
MOE |= {"model.n_experts": 4, "model.expert_ffn_hidden_size": 32}
SMALL = {
    "model.vocab_size": 64,
    "model.hidden_size": 32,
    "model.n_layers": 5,
    "model.n_heads": 4,
    "data.seq_len": 16,
    "batch.micro_batch_size": 2,
    "train.steps": 9,
    "precision.params": "float32",
    "compile.enable": False,
}
# Name -> processes, keys.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, BLOOM),
    "tp 2": (2, BLOOM | {"mesh.tp": 2}),
    "tp 2, gated": (2, LLAMA | {"mesh.tp": 2}),
    "tp 2, no sequence parallel": (2, BLOOM | {"mesh.tp": 2, "mesh.sequence_parallel": False}),
    "tp 2, recompute": (2, LLAMA | {"mesh.tp": 2, "recompute.mode": "full"}),
    "cp 2 by gathers": (2, BLOOM | {"mesh.cp": 2, "mesh.cp_form": "gather"}),
    "cp 2 by heads": (2, BLOOM | {"mesh.cp": 2, "mesh.cp_form": "heads"}),
    "dp_shard 2": (2, BLOOM | {"mesh.dp_shard": 2}),
    "dp_replicate 2, bf16": (2, BLOOM | {"mesh.dp_replicate": 2, "precision.params": "bfloat16"}),
    "ep 2": (2, MOE | {"mesh.dp_shard": 2, "mesh.ep": 2}),
    "ep 2 x tp 2": (4, MOE | {"mesh.dp_shard": 2, "mesh.ep": 2, "mesh.tp": 2}),
    "pp 2": (2, BLOOM | {"mesh.pp": 2, "model.n_layers": 10}),
}


class Storages(TorchDispatchMode):
    """The storages that operations inside make, for as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                storage = (leaf._local_tensor if isinstance(leaf, DTensor) else leaf).untyped_storage()
                self._made[storage._cdata] = StorageWeakRef(storage)
        return out

    def living_bytes(self) -> int:
        total = 0
        for cdata, reference in [*self._made.items()]:
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._made[cdata]
            else:
                total += storage.nbytes()
        return total

    def settled_bytes(self) -> int:
        """The same, when other threads had time to let go of what they hold."""
        until = time.monotonic() + SETTLED_S
        least = self.living_bytes()
        while time.monotonic() < until:
            time.sleep(0.001)
            least = min(least, self.living_bytes())
        return least


def kept_and_freed(values: dict[str, Any]) -> tuple[list[int], list[int]]:
    """For each block but the first and the last: the bytes that its forward adds, and those that its backward frees."""
    parts = real_step.built(values)
    (stage,) = parts.model.stages.values()
    storages = Storages()
    n_calls: dict[int, int] = defaultdict(int)
    forward: dict[int, int] = {}
    backward: dict[int, int] = {}

    def watch(i: int, block: nn.Module) -> None:
        def begins(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if torch._C._current_graph_task_id() != -1:  # backward computes the block again
                return
            n_calls[i] += 1
            if n_calls[i] == MEASURED + 1:
                forward[i] = storages.settled_bytes()
                hidden = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.requires_grad)
                hidden.register_hook(ends)

        def ends(gradient: Tensor) -> None:
            backward[i] = storages.settled_bytes()

        block.register_forward_pre_hook(begins, with_kwargs=True)

    for i, block in enumerate(stage.blocks()):
        watch(i, block)
    with storages:
        train_step(parts, real_step.batch_of(parts))
    inner = range(1, len(forward) - 1)
    return [forward[i + 1] - forward[i] for i in inner], [backward[i + 1] - backward[i] for i in inner]


def on_this_rank(names: Sequence[str]) -> dict[str, tuple[list[int], list[int]]]:
    found = {}
    for name in names:
        keys = LAYOUTS[name][1]
        axes = [keys.get(f"mesh.{axis}", 1) for axis in ("tp", "cp", "pp")]
        n_sequences = 3 * SMALL["batch.micro_batch_size"] * dist.get_world_size() // math.prod(axes)
        found[name] = kept_and_freed(real_step.nested(SMALL | keys | {"batch.global_batch_size": n_sequences}))
    return found


@functools.cache
def measured(n: int) -> list[dict[str, tuple[list[int], list[int]]]]:
    return ranks.run(n, on_this_rank, [name for name in LAYOUTS if LAYOUTS[name][0] == n])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full) if n > 2 else name for name, (n, _) in LAYOUTS.items()]
)
def test_backward_frees_block_by_block_what_forward_has_kept(name: str):
    for found in measured(LAYOUTS[name][0]):
        kept, freed = found[name]
        assert len(kept) == 3
        assert all(0 <= k - f < NUMBERS_BYTES < k for k, f in zip(kept, freed, strict=True)), (kept, freed)
