"""Add gradients as integers, so that all layouts and microbatch orders yield identical bits ([run] exact).

After each microbatch, this module takes autograd's gradients, rounds them to multiples of a power of two (their
parameter's `Grid`, `ops/fixed_point.py`) and adds them as int64. If FSDP2 shards a parameter, the integers are
reduce-scattered after each microbatch. Once per step, the sums are all-reduced over dp_replicate and, for partial sums
and tied parameters, over tp and pipeline stages.

    sums.begin(n_microbatches, scale)    # before a step's first forward: chooses the grids
    sums.of_stage[0].swept(i)            # after the backward of microbatch i
    sums.finish(tied)                    # after the last microbatch: sets all parameters' gradients, or none
    sums.settle(skipped)                 # after the step: chooses the next grids from this step's largest gradients

A grid is chosen from a number that is the same on all layouts: the largest gradient of any microbatch in the last step
that was not skipped, or, in a tensor's first step, 1 / (number of microbatches). If a gradient is too large for its
grid, all ranks skip the step, and the grid is made coarser.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from dtmega.checkpoint.state import ExactState
from dtmega.fsdp import digests
from dtmega.fsdp.digests import Digest, StepDigests
from dtmega.fsdp.sends import ReducesAndScatters
from dtmega.fsdp.slots import Place, Slot
from dtmega.mesh import World
from dtmega.ops import fixed_point, host
from dtmega.ops.fixed_point import Grid
from dtmega.ops.shards import local


class Groups(NamedTuple):
    """The process groups over which gradients are summed.

    Attributes:
        everyone: group of all ranks, which agree on the largest gradients.
        shards: group of the ranks that together hold all shards of a parameter.
        replicas: group of the ranks that hold the same shard as this rank.
        tp: tensor-parallel group, in which the ranks' gradients of some parameters are partial sums.
    """

    everyone: dist.ProcessGroup
    shards: dist.ProcessGroup
    replicas: dist.ProcessGroup
    tp: dist.ProcessGroup


class SharedByStages(Protocol):
    """A parameter with copies in several stages (`pipelining.tied.Tied`)."""

    @property
    def copies(self) -> Mapping[int, nn.Parameter]: ...

    @property
    def group(self) -> dist.ProcessGroup | None: ...


class StageSums:
    """The integer sums of one stage's gradients, with the interface `pipelining.sums.Sums`.

    Args:
        stage: model of the stage, whose parameters must not be gathered when the first step begins.
        full_name: function that converts a parameter's name in the stage to its name in the whole model.
        ties: groups of parameter names that share one parameter (tied weights).
        read_by_layers: names of the parameters that each layer reads in a separate call.
        partial: names of the parameters whose gradient on each tp rank is a partial sum.
        owner: object that holds the integer sums of all of this rank's stages.
    """

    def __init__(
        self,
        stage: nn.Module,
        full_name: Callable[[str], str],
        ties: Sequence[Sequence[str]],
        read_by_layers: Sequence[str],
        partial: Sequence[str],
        owner: ExactSums,
    ) -> None:
        self._stage, self._full_name, self._partial, self._owner = stage, full_name, partial, owner
        self._places: dict[nn.Parameter, list[Place]] = {}
        here = dict(stage.named_parameters(remove_duplicate=False))
        self._further: list[tuple[str, Place]] = []
        for names in ties:
            first, *others = [name for name in names if name in here] or [""]
            self._further += [(first, self._place(name)) for name in others]
        self._further += [(name, self._place(name)) for name in read_by_layers if name in here]
        self.slots_of_units: list[list[Slot]] = []

    def _place(self, name: str) -> Place:
        module, _, attribute = name.rpartition(".")
        return Place(self._stage.get_submodule(module), attribute)

    def build(self) -> None:
        """Group the trained parameters into units: one per FSDP2 parameter group, or a single unit without FSDP2."""
        fsdp_units: list[list[Any]] = []
        for module in self._stage.modules():
            if isinstance(module, FSDPModule):
                group = fully_shard.state(module)._fsdp_param_group  # pyright: ignore[reportFunctionMemberAccess]
                fsdp_units.append([] if group is None else list(group.fsdp_params))
        named = dict(self._stage.named_parameters())
        unit_of: dict[int, tuple[int, Any]] = {}
        for number, records in enumerate(fsdp_units):
            for record in records:
                unit_of[id(record.sharded_param)] = number, record
        self.slots_of_units = [[] for _ in fsdp_units or [None]]
        for name, parameter in named.items():
            if parameter.requires_grad:
                number, record = unit_of.get(id(parameter), (0, None))
                places = [place for first, place in self._further if first == name]
                slot = Slot(self._full_name(name), parameter, record, places, name in self._partial)
                self.slots_of_units[number].append(slot)

    def slots(self) -> Iterator[Slot]:
        for unit in self.slots_of_units:
            yield from unit

    def expect(self, last: bool) -> None:
        """Prevent FSDP2 from reducing gradients in a pipeline's next backward."""
        if isinstance(self._stage, FSDPModule):
            self._stage.set_is_last_backward(False)
            self._stage.set_reshard_after_backward(False)
            self._stage.set_requires_gradient_sync(False)

    def units(self) -> Iterator[set[nn.Parameter]]:
        """Yield all parameters as one unit, because `swept` adds all gradients of a microbatch at once."""
        yield set(self._stage.parameters())

    def swept(self, microbatch: int) -> None:
        """Add the gradients of a microbatch whose backward has ended.

        Args:
            microbatch: index of the microbatch among this rank's microbatches of the step.
        """
        for unit in self.slots_of_units:
            self._owner.add(unit, microbatch)

    def finish(self) -> None:
        """Free the gathered weights after a step or an evaluation of a pipeline."""
        if isinstance(self._stage, FSDPModule):
            self._stage.set_is_last_backward(True)
            self._stage.set_reshard_after_backward(True)
            state = fully_shard.state(self._stage)  # pyright: ignore[reportFunctionMemberAccess]
            state._root_post_backward_final_callback()


class ExactSums:
    """The gradients of a step on this rank, as sums of integers.

    Args:
        sizes: name of each parameter of the whole model -> number of elements; identical on all ranks.
        n_parts: maximum number of gradients that one microbatch contributes to an element: uses of a shared parameter
            x tp ranks x cp ranks.
        groups: process groups to reduce over.
        device: device of the sums.
        share: name of this rank's share of a microbatch (tp and cp coordinates), hashed with each tensor's name.

    Attributes:
        sizes: value of the argument `sizes`.
        of_stage: index of each of this rank's stages -> sums of the stage.
        state: largest gradients of the last step that was not skipped, as checkpoints store them.
        overflowed: names of the tensors with a gradient too large for their grid in the last step.
        finite: whether all gradients of the last step were finite.
        grids: name of each tensor -> grid to which its gradients are rounded in this step.
        digests: index of each of this rank's microbatches in this step -> digest of the rounded gradients.
    """

    # What makes sums of losses exact: a function of each term, and a function of the totals over all ranks.
    rounded = staticmethod(fixed_point.scalar)
    exact_or_infinite = staticmethod(fixed_point.exact_or_infinite)

    def __init__(
        self, sizes: Mapping[str, int], n_parts: int, groups: Groups, device: torch.device, share: str = ""
    ) -> None:
        self.sizes = sizes
        self._index = {name: i for i, name in enumerate(sizes)}
        self._n_parts, self._groups, self._device, self._share = n_parts, groups, device, share
        self.of_stage: dict[int, StageSums] = {}
        self.state = ExactState({}, {})
        self.overflowed: list[str] = []
        self.finite = True
        self.grids: dict[str, Grid] = {}
        self.digests: dict[int, Digest] = {}
        self._scale = 1.0
        self._largest = torch.zeros(len(sizes), dtype=torch.float64, device=device)
        self._found: list[float] = []
        self._keys = digests.first_keys(device)

    def begin(self, n_microbatches: int, scale: float) -> None:
        """Choose the grid for each parameter's gradients in a step.

        Args:
            n_microbatches: number of microbatches in the global batch, on all data ranks together.
            scale: loss scale, by which the gradients are divided before they are rounded.
        """
        for stage in self.of_stage.values():
            if not stage.slots_of_units:
                stage.build()
        n_terms = n_microbatches * self._n_parts
        first = 1.0 / n_microbatches
        self.grids = {name: Grid.of(self.state.maxima.get(name, first), n_terms) for name in self._index}
        self._scale = scale
        self.digests = {}
        self._largest.zero_()

    @torch.no_grad()
    def add(self, unit: Sequence[Slot], microbatch: int) -> None:
        """Round a unit's gradients from one microbatch and add them to the sums and the digest."""
        digest = self.digests.setdefault(microbatch, Digest(self._keys))
        shards = self._groups.shards.size() > 1
        sums: list[Tensor] = []
        for slot in unit:
            integers = None if shards else slot.total
            if integers is None:
                integers = torch.zeros(slot.whole_shape, dtype=torch.int64, device=self._device)
            i = self._index[slot.name]
            for gradient in slot.take():
                self._largest[i] = torch.maximum(self._largest[i], fixed_point.largest_of(gradient))
                seen = functools.partial(digest.add, f"{slot.name}, {self._share}")
                self.grids[slot.name].add(integers, gradient, self._scale, seen)
            sums.append(integers)
        # If all parameters of a stage are in its blocks, the unit for parameters outside the blocks is empty.
        if shards and unit:
            sums = self._scatter(unit, sums)
        for slot, integers in zip(unit, sums, strict=True):
            slot.total = integers if slot.total is None or not shards else slot.total.add_(integers)

    def _scatter(self, unit: Sequence[Slot], wholes: Sequence[Tensor]) -> list[Tensor]:
        """Reduce-scatter unsharded tensors over the ranks that shard them: each rank gets the sums of its shards."""
        n = self._groups.shards.size()
        rows: list[Tensor] = []
        for slot, whole in zip(unit, wholes, strict=True):
            dim = slot.fsdp.fsdp_placement.dim
            length = -(-whole.shape[dim] // n)
            missing = n * length - whole.shape[dim]
            padded = F.pad(whole, [0, 0] * (whole.ndim - 1 - dim) + [0, missing])
            rows.append(padded.unflatten(dim, (n, length)).movedim(dim, 0))
        packed = torch.cat([row.reshape(n, -1) for row in rows], dim=1)
        out = packed.new_empty(packed.shape[1])
        if self._device.type == "cpu":
            ReducesAndScatters()(out, packed.flatten(), self._groups.shards, dist.ReduceOp.SUM)
        else:
            dist.reduce_scatter_tensor(out, packed, group=self._groups.shards)
        sums = []
        for slot, row, flat in zip(unit, rows, out.split([row[0].numel() for row in rows]), strict=True):
            dim = slot.fsdp.fsdp_placement.dim
            n_mine = local(slot.parameter).shape[dim]
            sums.append(flat.view(row.shape[1:]).narrow(dim, 0, n_mine).contiguous())
        return sums

    @torch.no_grad()
    def finish(self, tied: Sequence[SharedByStages]) -> None:
        """All-reduce the integers over the ranks that `add` did not sum over, then set each parameter's gradient.

        If any gradient is not finite or is too large for its grid, no parameter gets a gradient on any rank.

        Args:
            tied: parameters that have copies in several stages.
        """
        dist.all_reduce(self._largest, dist.ReduceOp.MAX, group=self._groups.everyone)
        self._found = [value / self._scale for value in host.read(self._largest).tolist()]
        self.finite = all(map(math.isfinite, self._found))
        self.overflowed = []
        if self.finite:
            for name, i in self._index.items():
                if self._found[i] > self.grids[name].limit:
                    self.overflowed.append(name)
        if self.succeeded:
            self._sum_over_ranks(tied)
        for stage in self.of_stage.values():
            for slot in stage.slots():
                if self.succeeded:
                    self._write(slot)
                slot.total = None

    @property
    def succeeded(self) -> bool:
        """True if all gradients of the last step were finite, and none was too large for its grid."""
        return self.finite and not self.overflowed

    def _sum_over_ranks(self, tied: Sequence[SharedByStages]) -> None:
        for stage in self.of_stage.values():
            for unit in stage.slots_of_units:
                totals = [_sum_of(slot) for slot in unit]
                _all_reduce(totals, self._groups.replicas)
                partial = [total for slot, total in zip(unit, totals, strict=True) if slot.partial]
                _all_reduce(partial, self._groups.tp)
        slot_of = {slot.parameter: slot for stage in self.of_stage.values() for slot in stage.slots()}
        for shared in tied:
            slots = [slot_of[copy] for copy in shared.copies.values() if copy in slot_of]
            if not slots:
                continue
            total = _sum_of(slots[0])
            for slot in slots[1:]:
                total += _sum_of(slot)
            if shared.group is not None:
                _all_reduce([total], shared.group)
            for slot in slots:
                slot.total = total

    def _write(self, slot: Slot) -> None:
        gradient = torch.empty_like(slot.parameter, memory_format=torch.contiguous_format)
        self.grids[slot.name].write(_sum_of(slot), local(gradient))
        slot.parameter.grad = gradient

    def settle(self, skipped: bool) -> None:
        """Record a step's largest gradients, which determine the next step's grids.

        Args:
            skipped: whether the step was skipped. After a skipped step, only the grids that were too fine change.
        """
        names = self.overflowed if skipped else self._index
        for name in names:
            largest = self._found[self._index[name]]
            if largest > 0:
                self.state.maxima[name] = largest

    def squared_norm(self, counted: Mapping[str, nn.Parameter], group: dist.ProcessGroup) -> float:
        """The square of the gradient's norm; infinity if the step failed and therefore has no gradient.

        Args:
            counted: parameter name -> this rank's shard of the parameter. Each element is on only one rank of the
                group.
            group: process group of the ranks that together hold the model once.
        """
        if not self.succeeded:
            return math.inf
        parts = {name: local(p.grad) for name, p in counted.items() if p.grad is not None}
        return fixed_point.squared_norm(parts, self.sizes, group)

    def weights_norm(self, counted: Mapping[str, nn.Parameter], group: dist.ProcessGroup) -> float:
        """The norm of all weights. The arguments are the same as for `squared_norm`."""
        parts = {name: local(parameter.detach()) for name, parameter in counted.items()}
        return math.sqrt(fixed_point.squared_norm(parts, self.sizes, group))

    def digests_of_step(self, counted: Mapping[str, Tensor], world: World, n_microbatches: int) -> StepDigests:
        """Add up the digests of all ranks after a step, with one all-reduce.

        Args:
            counted: parameter name -> this rank's shard of the parameter, as for `squared_norm`.
            world: processes and mesh of the run.
            n_microbatches: number of this rank's microbatches.
        """
        found = torch.zeros(1 + n_microbatches * world.data_size, dtype=torch.int64, device=world.device)
        # The dp_replicate ranks hold copies of the weights. Only the first copy is hashed.
        first_copy = world.coordinate("dp_replicate") == 0
        if first_copy and not host.must_skip("digests of the weights are computed in a run, not here ([run] exact)"):
            found[0] = digests.of_weights(counted, world.device)
        first = 1 + world.data_rank * n_microbatches
        for number, digest in self.digests.items():
            found[first + number] = digest.total
        dist.all_reduce(found)
        update, *microbatches = host.read(found).tolist()
        return StepDigests(update, tuple(microbatches))


def _sum_of(slot: Slot) -> Tensor:
    assert slot.total is not None
    return slot.total


def _all_reduce(totals: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Sum integer tensors over a group in place, with one all-reduce for all tensors."""
    if group.size() == 1 or not totals:
        return
    flat = torch.cat([total.flatten() for total in totals])
    dist.all_reduce(flat, group=group)
    for total, part in zip(totals, flat.split([total.numel() for total in totals]), strict=True):
        total.copy_(part.view_as(total))
