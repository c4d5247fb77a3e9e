"""A fake device and fake ranks: tensors have shapes, dtypes and a device, but no memory and no values.

    with on_fake_device(torch.device("cuda", 0), rank=0, world_size=384, observer=observer):
        x = torch.empty(8, 8, device="cuda:0", requires_grad=True)      # without a GPU, and without CUDA
        (x @ x).sum().backward()

Tensors on the fake device are torch's fake tensors, and the process group is torch's "fake" process group, which
completes every collective immediately. An observer is informed of every operator.

torch's autograd engine reads a tensor's device in C++. If that device were a GPU, the engine would need a build of
torch with CUDA. A fake tensor is a tensor on torch's "meta" device that reports a different device in Python. The
engine therefore sees the meta device, while all Python code, including torch's own, sees the GPU.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol
from unittest.mock import patch

import torch
import torch._dynamo.decorators  # Dynamo must check the signature of `_make_subclass` before the patch below
import torch._dynamo.polyfills.loader
import torch.distributed as dist
from torch import Tensor, _decomp
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from dtmega.ops import host
from dtmega.planning.counting import sent
from dtmega.planning.counting.autograd_sums import EngineSums
from dtmega.planning.counting.launches import tensors_in
from dtmega.planning.counting.queues import Streams
from dtmega.planning.counting.torch_cuda import answers_of_cuda


class Observer(Protocol):
    """The interface of an object that observes everything that runs on the fake device."""

    def launched(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Record an operator that was launched."""
        ...

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Record that the memory of a storage was freed or allocated again."""
        ...

    def repeated(self, times: int) -> AbstractContextManager[object]:
        """Count each launch in the `with` block `times` times."""
        ...


class FakeDevice:
    """The state of a fake device.

    Attributes:
        device: fake device.
        fake: `FakeTensorMode` that creates the fake device's tensors.
        skipped: one sentence for each check that was skipped because it needs values.
        sums: recognizer of gradient additions that the autograd engine would do in place on a real device.
        streams: streams of the device.
        everything: whether to make fake tensors even if the program names no device. On a fake CPU, this flag
            separates the tensors of the model from the tensors of the program around the model.
        stepping: whether a step is running. A step makes no tensors on the real meta device.
    """

    def __init__(self, device: torch.device, observer: Observer) -> None:
        self.device = device
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.sums = EngineSums(self.fake)
        self.skipped: list[str] = []
        self.streams = Streams()
        self.everything = False
        self.stepping = False
        self._observer = observer

    @contextlib.contextmanager
    def holding_everything(self, everything: bool = True) -> Iterator[None]:
        """Make fake tensors inside the `with` block, even where the program names no device (`everything`)."""
        before, self.everything = self.everything, everything
        try:
            yield
        finally:
            self.everything = before

    def run(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator on fake tensors, and inform the observer."""
        if self.sums.in_place(operator, args):
            operator = torch.ops.aten.add_.Tensor
        named = kwargs.get("device")
        kinds_here = ("cuda", "meta") if self.stepping else ("cuda",)
        is_here = named is not None and named.type in kinds_here
        is_meta = named is not None and named.type == "meta"
        makes_fake = self.everything and not is_meta and not tensors_in(args)
        if operator is torch.ops._c10d_functional.wait_tensor.default:
            # On the meta device, torch would make a new tensor, but a real device returns the argument itself.
            (output,) = args
        elif is_here or makes_fake:
            with self.fake:
                output = operator(*args, **kwargs)
        else:
            output = operator(*args, **kwargs)
        self._observer.launched(operator, args, kwargs, output)
        return output

    def repeated(self, times: int) -> AbstractContextManager[object]:
        """Make the observer count each launch in the `with` block `times` times."""
        return self._observer.repeated(times)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Notify the observer that the memory of a storage was freed or allocated again."""
        self._observer.resized(storage)


class _Watching(TorchDispatchMode):
    """Sends every operator through the fake device. This is an infrastructure mode, so Dynamo stays enabled."""

    def __init__(self, fake_device: FakeDevice) -> None:
        super().__init__()
        self._fake_device = fake_device

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return func(*args, **(kwargs or {}))
        return self._fake_device.run(func, args, kwargs or {})


class PlannedHost(host.Host):
    """The host of a plan. Wherever a real host reads a value from the device, this host gets 1 or True.

    Args:
        fake_device: fake device.
        true_share: assumed share of true elements in each mask that the program passes to `true_indices`.
        imbalance: number of rows that the rank receives, divided by the number of rows that it sends.
    """

    def __init__(self, fake_device: FakeDevice, true_share: float, imbalance: float) -> None:
        self._fake_device = fake_device
        self._true_share = true_share
        self._imbalance = imbalance

    def must_skip(self, check: str) -> bool:
        if check not in self._fake_device.skipped:
            self._fake_device.skipped.append(check)
        return True

    def read(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, FakeTensor):
            return tensor.cpu()
        with self._fake_device.holding_everything(False):
            return torch.ones(tensor.shape, dtype=tensor.dtype, device="cpu")

    def read_sizes(self, sizes: Tensor, total: int) -> Tensor:
        if not isinstance(sizes, FakeTensor):
            return sizes.cpu()
        n_ranks = sizes.shape[1]
        rows = [_evenly(total, n_ranks), _evenly(round(total * self._imbalance), n_ranks)]
        with self._fake_device.holding_everything(False):
            return torch.tensor(rows, dtype=sizes.dtype, device="cpu")

    def each(self, parts: Sequence[slice]) -> Iterator[slice]:
        lengths = Counter(part.stop - part.start for part in parts)
        for part in parts:
            times = lengths.pop(part.stop - part.start, 0)
            if times:
                with self._fake_device.repeated(times):
                    yield part

    def true_indices(self, mask: Tensor) -> Tensor:
        if not isinstance(mask, FakeTensor):
            return super().true_indices(mask)
        return torch.zeros(round(len(mask) * self._true_share), dtype=torch.int64, device=mask.device)


def _evenly(total: int, n_parts: int) -> list[int]:
    """Whole numbers, one per part, that add up to `total` and differ by at most 1."""
    return [(total + part) // n_parts for part in range(n_parts)]


@contextlib.contextmanager
def on_fake_device(
    device: torch.device,
    rank: int,
    world_size: int,
    observer: Observer,
    *,
    true_share: float = 1.0,
    imbalance: float = 1.0,
) -> Iterator[FakeDevice]:
    """Inside the `with` block, act as one rank of a job, on a device that need not exist.

    Args:
        device: fake device, "cuda:0" or "cpu".
        rank: number of the rank.
        world_size: number of ranks in the job.
        observer: observer that is informed of all operators.
        true_share, imbalance: arguments of `PlannedHost`.
    """
    fake_device = FakeDevice(device, observer)
    resize = torch.UntypedStorage.resize_

    def resize_and_tell(storage: torch.UntypedStorage, n_bytes: int) -> Any:
        result = resize(storage, n_bytes)
        fake_device.resized(storage)
        return result

    # At the first `with torch.device(...)`, torch lists the functions that the device mode changes. Enter the mode once
    # here, before any function is patched.
    with torch.device("meta"):
        torch.empty(0)
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(torch.UntypedStorage, "resize_", resize_and_tell))
        stack.enter_context(_fixed_messages_at_start())
        stack.enter_context(sent.holding_tensors(device))
        if device.type == "cuda":
            for name, answer in answers_of_cuda(fake_device.streams).items():
                stack.enter_context(patch.object(torch.cuda, name, answer))
            stack.enter_context(_meta_in_autograd(fake_device))
            stack.enter_context(_gradients_of_composites())
        stack.enter_context(host.answering(PlannedHost(fake_device, true_share, imbalance)))
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        stack.callback(dist.destroy_process_group)
        stack.enter_context(_Watching(fake_device))
        yield fake_device


@contextlib.contextmanager
def _meta_in_autograd(fake_device: FakeDevice) -> Iterator[None]:
    """Make fake tensors show the meta device to C++ and a GPU to Python."""
    make = Tensor._make_subclass
    dispatch = FakeTensorMode.dispatch
    move = Tensor.to

    def dispatch_here(mode: FakeTensorMode, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # torch's composite operators pass on the device that C++ reads from a tensor.
        if kwargs and kwargs.get("device") == torch.device("meta"):
            is_of_tensor = any(isinstance(each, FakeTensor) and each.is_cuda for each in args)
            if is_of_tensor or fake_device.stepping:
                kwargs = kwargs | {"device": fake_device.device}
        return dispatch(mode, operator, types, args, kwargs)

    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # C++ would ask CUDA for the number of the current GPU.
        args = tuple(fake_device.device if each in ("cuda", torch.device("cuda")) else each for each in args)
        return move(tensor, *args, **kwargs)

    def make_on_meta(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dispatch_device"):
            kwargs |= {"dispatch_device": False}
        return make(*args, **kwargs)

    def is_cuda(tensor: Tensor) -> bool:
        return tensor.device.type == "cuda"

    def is_meta(tensor: Tensor) -> bool:
        return tensor.device.type == "meta"

    def device_of_part(tensor: DTensor) -> torch.device:
        return tensor._local_tensor.device

    with (
        patch.object(Tensor, "_make_subclass", staticmethod(make_on_meta)),
        patch.object(Tensor, "to", to),
        patch.object(FakeTensorMode, "dispatch", dispatch_here),
        patch.object(FakeTensor, "is_cuda", property(is_cuda), create=True),
        patch.object(FakeTensor, "is_meta", property(is_meta), create=True),
        patch.object(DTensor, "is_cuda", property(is_cuda), create=True),
        patch.object(DTensor, "is_meta", property(is_meta), create=True),
        patch.object(DTensor, "device", property(device_of_part), create=True),
        patch.object(fake_tensor, "init_gpu_context", lambda device: None),
        patch.object(FakeTensorMode, "avoid_device_init", True),
    ):
        # With this setting, torch.tensor(numbers, device=...) moves the numbers with an operator that modes can see.
        lifts_on_cpu = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        try:
            yield
        finally:
            torch._C._set_only_lift_cpu_tensors(lifts_on_cpu)


@contextlib.contextmanager
def _gradients_of_composites() -> Iterator[None]:
    """Give composite operators such as `torch.where(x, y, 0.0)` a gradient on the meta device when AOT traces them.

    torch registers a shape function for these operators on the meta device. In torch 2.13, torch's Python dispatcher
    mistakes the shape function for a kernel without a gradient, warns, and stops backward at the operator.
    """
    key = torch._C.DispatchKey.AutogradMeta
    changed: list[Any] = []
    for table in ("post_autograd", "meta"):
        for operator in _decomp.global_decomposition_table[table]:
            if not isinstance(operator, torch._ops.OpOverload) or key in operator.py_kernels:
                continue
            is_composite = operator.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
            if is_composite and torch._C.DispatchKey.Meta in operator.py_kernels:
                operator.py_kernels[key] = operator.decompose
                operator._dispatch_cache.clear()
                changed.append(operator)
    try:
        yield
    finally:
        for operator in changed:
            del operator.py_kernels[key]
            operator._dispatch_cache.clear()


def _fixed_messages_at_start() -> Any:
    """Skip the vote in which neighbouring stages agree on shapes, because `pipelining/stage.py` sets the shapes."""
    from torch.distributed.pipelining import schedules

    modes = getattr(schedules, "InferenceMode", None)
    if modes is None:  # torch 2.11 does not vote
        return contextlib.nullcontext()

    def vote(_: Any, stages: Any, *__: Any) -> None:
        for stage in stages:
            stage._inference_mode = modes.STATIC

    return patch.object(schedules._PipelineSchedule, "_warmup_p2p", vote)
