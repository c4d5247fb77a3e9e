"""Train one rank's shard of a model: forward and backward of a step, the sums over ranks, and the losses of a batch.

`parallelize.py` builds a `ShardedModel`, and `step.py` trains it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from dtmega import rooms
from dtmega.data.objectives.objective import Objective
from dtmega.data.objectives.sums import Tally
from dtmega.distributed import replica_check
from dtmega.mesh import World
from dtmega.models.initial import init_weights
from dtmega.models.model import Model
from dtmega.ops import optim, ranges
from dtmega.ops.shards import boxes, local

if TYPE_CHECKING:
    from dtmega.fsdp.exact import ExactSums
    from dtmega.fsdp.replicas import Replicas
    from dtmega.models.routing import Loads
    from dtmega.ops.context_parallel import ContextParallel
    from dtmega.ops.optim.muon import Matrices
    from dtmega.pipelining.pipeline import Pipeline
    from dtmega.pipelining.tied import Tied


class Copies(Protocol):
    """The weights that a stage computes with, where these are not its parameters themselves.

    They are casts (`fsdp.masters.Masters`) or gathered shards (`fsdp.wrapped.Gathered`).
    """

    def expect(self, last: bool, reduces: bool) -> None: ...

    def release(self) -> None: ...


class ShardedModel:
    """This rank's part of a model: its pipeline stages, and methods to train the stages.

    On one process, this is the whole model. `parallelize` sets the attributes after `objective`, each only in runs that
    need it.

    Attributes:
        stages: stage index -> model of the stage; {0: the whole model} without a pipeline.
        objective: objective for which the model is trained.
        copies: copies of parameters with which the stages compute; [] if they compute with the parameters.
        partial: stage index -> names of the parameters whose gradients must be all-reduced over tp.
        sum_over_tp: function that all-reduces the gradients in `partial`; None without tp.
        sharded: whether each microbatch's gradients are reduce-scattered, so that only shards of them accumulate.
        pipeline: schedule over all stages; None without a pipeline.
        tied: parameters that this rank's stages share with other stages. Each of these stages holds a copy.
        replicas: objects that all-reduce gradients over dp_replicate, one per stage; [] if dp_replicate is 1, or if
            FSDP or `exact` reduces these gradients.
        context: cp ranks, over which each sequence is sharded; None if cp is 1.
        exact: gradients, added up as fixed-point integers ([run] exact); None if they are reduced in floating point.
        matrices: weights that Muon trains; None if the optimizer is not Muon.
        loads: loads of the model's experts; None if the model counts none.
        unproven: names of this rank's matrices of adapters that have had no gradient yet.
        on_reduce: function called after backward, before the remaining gradients are reduced over ranks.
    """

    def __init__(self, world: World, stages: Mapping[int, Model], objective: Objective) -> None:
        self.world, self.stages, self.objective = world, stages, objective
        self.copies: list[Copies] = []
        self.partial: dict[int, Sequence[str]] = {}
        self.sum_over_tp: Callable[[nn.Module, Sequence[str], DeviceMesh], None] | None = None
        self.sharded = False
        self.pipeline: Pipeline | None = None
        self.tied: list[Tied] = []
        self.replicas: list[Replicas] = []
        self.context: ContextParallel | None = None
        self.exact: ExactSums | None = None
        self.matrices: Matrices | None = None
        self.loads: Loads | None = None
        self.unproven: list[str] = []
        self.on_reduce: Callable[[], object] | None = None

    def draw(self, seed: int) -> None:
        """Draw the initial values of all parameters.

        A value depends only on the seed, the parameter's name, and the value's index in the unsharded parameter.
        """
        for stage in self.stages.values():
            init_weights(stage, seed)

    def forward_backward(
        self, microbatches: Sequence[dict[str, Tensor]], counts: Mapping[str, float], scale: float | None = None
    ) -> Tensor:
        """Compute the gradients of one step. The loss is a weighted sum of the objective's means over the batch.

        Each mean is a sum over the global batch, divided by a count over the global batch. Every rank, microbatch and
        stage divides its contribution to the sum by this global count, so the layout does not change the loss.

        Args:
            microbatches: microbatches that the ranks of this rank's `model` group compute together.
            counts: divisors of the sums, keyed by name and counted over the global batch.
            scale: loss scale for float16, which multiplies all gradients; None in other precisions.

        Returns:
            This rank's contribution to each sum, fp64 [sums] in the objective's order. The contributions of all ranks
            in the `loss` group add up to the sums over the global batch.
        """
        factor = 1.0 if scale is None else scale
        tally = Tally(self.objective.sums, self.world.device, counts, factor, self.exact and self.exact.rounded)
        if self.exact is not None:
            self.exact.begin(len(microbatches) * self.world.data_size, factor)
        if scale is not None:
            for model in self.stages.values():
                model.expect(tally.factors())
        with self._shared(microbatches) as parts:
            if self.pipeline is not None:
                self.pipeline.step(parts, tally)
            else:
                self._run_microbatches(parts, tally)
        if self.on_reduce is not None:
            self.on_reduce()
        if self.exact is not None:
            self.exact.finish(self.tied)
        else:
            self._sum_gradients()
        for parameter, mask in self.unseen_elements:
            if parameter.grad is not None:
                local(parameter.grad).masked_fill_(mask, 0.0)
        return tally.totals

    def _sum_gradients(self) -> None:
        """All-reduce gradients over dp_replicate, tp and tied stages, except what FSDP reduced in the last backward."""
        # Fill in zeros first, because the code below expects a gradient for every trained parameter on every rank.
        self._fill_missing_gradients()
        for replicas in self.replicas:
            replicas.finish()
        if self.sum_over_tp is not None:
            for number, model in self.stages.items():
                self.sum_over_tp(model, self.partial[number], self.world.tp)
        # Sum tied gradients last. After the reductions over dp and tp, a copy's gradient lacks only the contributions
        # of the other stages that use the parameter.
        for tied in self.tied:
            tied.sum_gradients()
        if self.unproven:
            groups, device = [self.world.groups[name] for name in ("fsdp", "tp")], self.world.device
            parameters = dict(self.named_parameters())
            self.unproven = rooms.lora_proof().without_gradient(self.unproven, parameters, groups, device)

    @contextlib.contextmanager
    def _shared(self, microbatches: Sequence[dict[str, Tensor]]) -> Iterator[Sequence[dict[str, Tensor]]]:
        """Inside the `with` block, shard each sequence over the cp ranks.

        Outside the block, for example when the trained model generates samples, every rank computes whole sequences.
        """
        if self.context is None:
            yield microbatches
            return
        first, *_ = self.stages.values()
        parts = [first.part_of(rows, self.context) for rows in microbatches]
        for model in self.stages.values():
            model.context = self.context
        try:
            yield parts
        finally:
            for model in self.stages.values():
                model.context = None

    def _run_microbatches(self, microbatches: Sequence[dict[str, Tensor]], tally: Tally) -> None:
        """Run forward and backward for all microbatches, without a pipeline, and accumulate the gradients."""
        (model,) = self.stages.values()
        for i, microbatch in enumerate(microbatches):
            # Unless gradients accumulate as shards, the data ranks reduce gradients once per step, in the last
            # microbatch. Before the last microbatch, each rank accumulates its gradients locally.
            last = i == len(microbatches) - 1
            sums_here = last and self.exact is None
            for copies in self.copies:
                copies.expect(sums_here, reduces=sums_here or self.sharded)
            if last:
                for replicas in self.replicas:
                    replicas.expect()
            with ranges.named("forward", stage=0, microbatch=i):
                in_loss = tally.add_all(model(**microbatch))
            # The loss itself is never computed. Backward starts from each sum, with the derivative of the loss with
            # respect to that sum.
            factors = [torch.full_like(total, factor) for total, factor in in_loss]
            with ranges.named("backward", stage=0, microbatch=i):
                torch.autograd.backward([total for total, _ in in_loss], factors)
            if self.exact is not None:
                self.exact.of_stage[0].swept(i)
        self.release()

    def release(self) -> None:
        """Put the parameters back into the modules, for the optimizer and checkpoints, and free their copies.

        Call this method after the last microbatch, and after a forward without a backward, because such a forward
        leaves copies in the modules.
        """
        for copies in self.copies:
            copies.release()

    @functools.cached_property
    def unseen_elements(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Pairs (parameter, mask of this rank's shard). The mask marks elements that affect no output of the model."""
        masked = []
        for stage in self.stages.values():
            for name, mask in stage.unseen().items():
                parameter = stage.get_parameter(name)
                for box in boxes(parameter.detach()):
                    masked.append((parameter, mask[box.where].to(box.part.device)))
        return masked

    def _fill_missing_gradients(self) -> None:
        """Give a zero gradient to each parameter that none of this rank's tokens has used.

        AdamW would skip a parameter without a gradient. The parameter's decay and moments would then depend on which
        tokens and layers the rank has. Frozen parameters remain without a gradient.
        """
        for _, parameter in self.named_parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def losses(self, microbatches: Sequence[dict[str, Tensor]]) -> Tensor:
        """Compute this rank's contribution to each sum, like `forward_backward`, but without gradients and dropout."""
        for model in self.stages.values():
            model.eval()
        totals = self.forward_only(microbatches)
        self.release()
        for model in self.stages.values():
            model.train()
        return totals

    @torch.no_grad()
    def forward_only(self, microbatches: Sequence[dict[str, Tensor]]) -> Tensor:
        """Compute this rank's contribution to each sum, without gradients. The caller must `release` the copies."""
        tally = Tally(self.objective.sums, self.world.device, rounded=self.exact and self.exact.rounded)
        with self._shared(microbatches) as parts:
            if self.pipeline is not None:
                self.pipeline.evaluate(parts, tally)
            else:
                (model,) = self.stages.values()
                for part in parts:
                    tally.add_all(model(**part))
        return tally.totals

    @torch.no_grad()
    def settle_counts(self, skipped: bool) -> None:
        """All-reduce a step's counts, such as the loads of experts, and pass the totals to the model.

        Args:
            skipped: whether the step was skipped, so that no weight has changed.
        """
        if self.loads is None:
            return
        mine = [counts for stage in self.stages.values() if (counts := stage.counts_of_step()) is not None]
        total = torch.stack(mine).sum(0)
        dist.all_reduce(total, group=self.world.groups["loss"])
        self.loads.add(total)
        for stage in self.stages.values():
            stage.after_step(total, skipped)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters, with their names in the whole model.

        If several of this rank's stages hold copies of a parameter, each copy is yielded, under the same name.
        """
        for model in self.stages.values():
            for name, parameter in model.named_parameters():
                yield model.full_name(name), parameter

    def stored_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's tensors for a checkpoint, with names: each stage's parameters, then its stored buffers."""
        for model in self.stages.values():
            for name, tensor in model.stored_tensors():
                yield model.full_name(name), tensor

    def weights(self) -> list[Tensor]:
        """Local shards of parameters. The ranks of a `shards` group together return each element exactly once."""
        return [local(p.detach()) for p in self.counted_once().values()]

    def gradients(self, every: bool = False) -> list[Tensor]:
        """Local shards of the parameters' gradients.

        Args:
            every: whether to return all gradients that this rank holds, as clipping requires. If False, only the
                parameters in `weights` count, so that a norm over the `shards` group counts each element once.
        """
        parameters = [p for _, p in self.named_parameters()] if every else self.counted_once().values()
        return [local(p.grad) for p in parameters if p.grad is not None]

    def statistics(self, num_zeros: bool, params_norm: bool) -> dict[str, float]:
        """Statistics of the last step: zeros in the gradient, norm of the parameters, extreme loads of experts."""
        device = self.world.device
        group = self.world.groups["shards"]
        values = {} if self.loads is None else self.loads.numbers()
        if num_zeros:
            values["num_zeros"] = optim.count_zeros(self.gradients(), device, group)
        if params_norm and self.exact is not None:
            values["params_norm"] = self.exact.weights_norm(self.counted_once(), group)
        elif params_norm:
            values["params_norm"] = optim.total_norm(self.weights(), device, group)
        return values

    def counted_once(self) -> dict[str, nn.Parameter]:
        """The parameters that this rank counts in sums over the `shards` group, keyed by name.

        If tp ranks hold copies of a parameter, only the first tp rank counts it. If several stages hold copies, only
        the first of these stages counts it.
        """
        first_tp_rank = self.world.coordinate("tp") == 0
        counted: dict[str, nn.Parameter] = {}
        for name, tensor in self.owned().items():
            if isinstance(tensor, nn.Parameter) and (first_tp_rank or not _replicated_over_tp(tensor)):
                counted[name] = tensor
        return counted

    def owned(self) -> dict[str, Tensor]:
        """The stored tensors of this rank's stages, keyed by name, without copies of an earlier stage's parameters."""
        duplicates = set[int]()
        for tied in self.tied:
            duplicates.update(map(id, tied.duplicates))
        return {name: tensor for name, tensor in self.stored_tensors() if id(tensor) not in duplicates}

    def check_copies(self) -> None:
        """Check that copies of a stored tensor on different ranks are bit-identical.

        Raises:
            RuntimeError: copies of a tensor differ. The message names the tensor and the ranks.
        """
        tensors = self.owned()
        replica_check.check_equal(tensors, self.world.groups["dp_replicate"], "copies over dp_replicate")
        replicated = {n: t for n, t in tensors.items() if _replicated_over_tp(t)}
        replica_check.check_equal(replicated, self.world.groups["tp"], "copies over tp")
        for tied in self.tied:
            if not tied.equal():
                raise RuntimeError(f"the copies of '{tied.name}' on stages {tied.stages} are not equal any more")


def _replicated_over_tp(tensor: Tensor) -> bool:
    """True if every tp rank has the whole tensor."""
    # Stored buffers are never sharded.
    if not isinstance(tensor, nn.Parameter):
        return True
    if not isinstance(tensor, DTensor) or "tp" not in (tensor.device_mesh.mesh_dim_names or ()):
        return False
    # FSDP puts its mesh axes before the existing axes of a DTensor, so tp is the last axis.
    return tensor.placements[-1] == Replicate()
