"""Claims about checkpoint/staging.py: what a thread writes while training goes on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dtmega.checkpoint.staging import Stager
from dtmega.ops.shards import local


@pytest.fixture
def tensors() -> Iterator[dict[str, Tensor]]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    yield {
        "plain": torch.arange(6.0).view(2, 3),
        "transposed": torch.arange(6.0).view(2, 3).t(),
        "shard": distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)]),
        "replicated": distribute_tensor(torch.ones(3, dtype=torch.bfloat16), mesh, [Replicate()]),
    }
    dist.destroy_process_group()


class Operations(TorchDispatchMode):
    """Name and arguments of every operation on plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append((func.name(), args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: local(tensor).clone() for name, tensor in tensors.items()}


def assert_equal(staged: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert staged.keys() == expected.keys()
    for name, tensor in staged.items():
        assert torch.equal(local(tensor), expected[name]), name


def test_staged_values_are_those_of_the_moment_at_each_save(tensors):
    stager = Stager()
    for factor in (1, 2, 3):
        now = copies(tensors)
        staged = stager.stage(tensors)
        for tensor in tensors.values():
            tensor.mul_(-factor - 1)  # as the optimizer does, while a thread writes
        assert_equal(staged, now)


def test_a_copy_has_the_layout_of_its_tensor(tensors):
    for name, staged in Stager().stage(tensors).items():
        assert (type(staged), staged.dtype, staged.shape) == (
            type(tensors[name]),
            tensors[name].dtype,
            tensors[name].shape,
        )
        assert getattr(staged, "placements", None) == getattr(tensors[name], "placements", None)


def test_the_second_save_allocates_nothing(tensors):
    stager = Stager()
    first = {name: local(staged).data_ptr() for name, staged in stager.stage(tensors).items()}
    with Operations() as operations:
        second = stager.stage(tensors)
    assert {name: local(staged).data_ptr() for name, staged in second.items()} == first
    assert {name for name, _, _ in operations.seen} == {"aten::copy_"}


def test_what_is_on_a_gpu_is_pinned_once_and_has_arrived_before_training_goes_on(monkeypatch):
    """Without a GPU: what is asked of torch, and in which order."""
    with FakeTensorMode(), Operations() as operations:
        stream = Mock()
        stream.synchronize.side_effect = lambda: operations.seen.append(("synchronize", (), {}))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
        weights = {"a": torch.empty(4, device="cuda"), "offloaded": torch.empty(4)}
        stager = Stager()
        for _ in range(2):
            stager.stage(weights)
    seen = [(name, args, kwargs) for name, args, kwargs in operations.seen if name != "prim::device"]
    made = [kwargs["pin_memory"] for name, _, kwargs in seen if name == "aten::empty_like"]
    moved = [args[2] for name, args, _ in seen if name == "aten::copy_" and len(args) > 2]
    assert made == [True, False]
    assert moved == [True] * 2
    assert [name for name, _, _ in seen].count("synchronize") == 2
    assert seen[-1][0] == "synchronize"
