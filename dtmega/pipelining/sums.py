"""Run a stage's backward pass, and let a `Sums` object accumulate the weights' gradients of each microbatch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward, stage_backward_weight


class Sums(Protocol):
    """The interface of `fsdp.shard_sums.ShardSums` and `fsdp.exact.StageSums`, which accumulate a stage's gradients."""

    def expect(self, last: bool) -> None: ...

    def units(self) -> Iterator[set[nn.Parameter]]: ...

    def swept(self, microbatch: int) -> None: ...

    def finish(self) -> None: ...


Gradients = tuple[tuple[Tensor | None, ...], list[dict[str, Any]] | None]  # (input gradients, torch's weight groups)


def backward_and_sum(
    sums: Sums, module: nn.Module, backward_type: str, arguments: dict[str, Any], microbatch: int, last: bool
) -> Gradients:
    """Run a backward pass, or only its weight part. `sums` sets FSDP2's switches, which torch's method would turn off.

    Args:
        sums: object that accumulates the gradients.
        module: module of the stage.
        backward_type: "full" for a whole backward, or "weight" for the weight part.
        arguments: arguments that torch passes to the backward, keyed by name.
        microbatch: index of the microbatch in the step.
        last: whether this is the last microbatch of a step.
    """
    sums.expect(last)
    if backward_type == "full":
        of_inputs = stage_backward(arguments["stage_output"], arguments["output_grads"], arguments["input_values"])
    else:
        of_inputs = ()
        _backward_weights(sums, module, arguments["param_groups"])
    sums.swept(microbatch)
    return of_inputs, None


def _backward_weights(sums: Sums, module: nn.Module, param_groups: Sequence[dict[str, Any]]) -> None:
    """Compute the weights' gradients unit by unit, so that only one unit has unsharded gradients at a time.

    Args:
        sums: object that lists the units: sets of weights whose gradients FSDP2 reduces together.
        module: module of the stage.
        param_groups: torch's groups of weights, each with the gradients from which the weights' gradients are computed.
    """
    remaining = list(param_groups)
    for unit in sums.units():
        of_unit, others = [], []
        for group in remaining:
            # A group holds the nodes of the autograd graph that accumulate the gradients of weights.
            touches = any(node.variable in unit for node in group["params"])
            (of_unit if touches else others).append(group)
        stage_backward_weight(module.parameters(), of_unit)
        remaining = others
    assert not remaining
