"""Reduce-scatter gradients after each microbatch of a pipeline, so that a rank keeps only sharded gradients.

Without a pipeline, FSDP2 does this by itself (`sync_gradients`). But torch's pipeline stages let FSDP2 reduce
gradients only once, after a step's last microbatch. In addition, if a schedule splits backward in two, FSDP2's hooks
do not run in the second part, which computes the gradients of weights.

    sums = ShardSums(stage)
    sums.expect(last)          # before each backward; FSDP2 reduces a unit's gradients once they are complete
    for unit in sums.units():  # only for the second part of a split backward:
        ...                    # compute the gradients of the unit's parameters
    sums.finish()              # after a step's last microbatch: free the gathered weights
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard


class ShardSums:
    """Reduce-scatters each microbatch's gradients over the data ranks and adds the results to a stage's gradients.

    A unit is a group of parameters that FSDP2 gathers in one collective: a block's parameters, or all parameters
    outside the blocks. With HSDP, only the last microbatch also all-reduces gradients over dp_replicate.

    Args:
        stage: model of the stage, wrapped by `apply_fsdp`.
    """

    def __init__(self, stage: nn.Module) -> None:
        assert isinstance(stage, FSDPModule)
        self._stage = stage
        # The last block comes first, and the root last, as in an ordinary backward. All ranks use this order,
        # regardless of the order in which torch lists the weights.
        self._modules = [module for module in stage.modules() if isinstance(module, FSDPModule)][::-1]

    def expect(self, last: bool) -> None:
        """Prepare FSDP2 to reduce the weight gradients of one microbatch.

        Args:
            last: whether this is the last microbatch of a step.
        """
        # With this flag, FSDP2 waits for the reduce-scatters, and keeps no unsharded gradients until the next backward.
        self._stage.set_is_last_backward(True)
        self._stage.set_reshard_after_backward(False)
        self._stage.set_requires_gradient_sync(True)
        self._stage.set_requires_all_reduce(last)

    def units(self) -> Iterator[set[nn.Parameter]]:
        """Yield the parameters of each unit and reduce the unit's gradients when the caller resumes the iteration."""
        # FSDP2's hooks also run during the caller's work, and would reduce zeros in place of gradients not yet ready.
        self._stage.set_requires_gradient_sync(False)
        seen = set[nn.Parameter]()
        for module in self._modules:
            unit = set(module.parameters()) - seen
            seen |= unit
            yield unit
            group = _state(module)._fsdp_param_group
            if group is not None:
                module.set_requires_gradient_sync(True, recurse=False)
                group.post_backward()
                module.set_requires_gradient_sync(False, recurse=False)
        # Run FSDP2's callback for the end of a microbatch's backward, because no hook of FSDP2 runs the callback here.
        _state(self._stage)._root_post_backward_final_callback()

    def swept(self, microbatch: int) -> None:
        """Do nothing after a microbatch, because FSDP2 has already reduced the gradients of each unit."""

    def finish(self) -> None:
        """Free the gathered weights after a step or an evaluation."""
        self._stage.set_is_last_backward(True)
        self._stage.set_reshard_after_backward(True)
        # All gradients are already reduced. If this flag were set, torch 2.13 would reduce zeros for every parameter.
        self._stage.set_requires_gradient_sync(False)
        _state(self._stage)._root_post_backward_final_callback()


def _state(module: FSDPModule) -> Any:
    """FSDP2's internal state of a wrapped module."""
    return fully_shard.state(module)  # pyright: ignore[reportFunctionMemberAccess]
