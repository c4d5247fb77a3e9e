"""Fallback plan for a model without any other plan: the model's own code computes on DTensors.

All parameters become DTensors. The results are exact, but the computation is slow. Linears inside blocks are chosen by
name and sharded over tp. If DTensor cannot run an operation on sharded tensors (most views of fused heads), they are
gathered first. Keys and values cannot be cached. Only `attn_implementation="eager"` works, because fused attention has
no DTensor rule on a CPU.
"""

from __future__ import annotations

import re
import types
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement
from torch.utils._pytree import tree_map_only

from dtmega.interop.hf.tp.native import block_names
from dtmega.interop.hf.tp.plan import HFPlan, add_head, dropouts
from dtmega.interop.hf.tp.regions import Guard
from dtmega.interop.hf.tp.styles import Stack
from dtmega.interop.hf.tp.vocab import LogitsHead
from dtmega.plans.base import as_function, distribute
from dtmega.plans.vocabulary import VocabEmbedding

# Name patterns of linears in blocks: COLUMN linears are sharded by output features, ROW linears by input features.
COLUMN = r"(q|k|v|query|key|value|qkv|gate|up|fc1|fc_in|c_fc|wi(_\d)?|intermediate\.dense|in)(_proj)?"
ROW = r"(o|out|down|fc2|fc_out|wo|dense|output\.dense|c)(_proj)?"
COST = (
    "'{family}' has no adapter and no plan of transformers: it will compute on DTensors. This is exact but slow (1.1 "
    "to 1.9 times an adapter, where both were measured), may gather whole activations in attention, caches no keys and "
    "values, and lets plain tensors mix with DTensors in this process, as copies"
)


class GlobalLinear(ParallelStyle):
    """Style of an nn.Linear that computes on DTensors; the weight is sharded by output or by input features."""

    cost = ("as DTensor decides", "")

    def __init__(self, by_output: bool) -> None:
        self.by_output = by_output
        self.placements: dict[str, Placement] = {"weight": Shard(0 if by_output else 1)}
        self.placements["bias"] = Shard(0) if by_output else Replicate()

    def check(self, module: nn.Module, tp: int) -> None:
        if type(module).forward is not nn.Linear.forward:
            raise ValueError(f"GlobalLinear is for nn.Linear, not for {type(module).__name__}")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, distribute(parameter, device_mesh, self.placements[name]))
        if self.by_output:
            module.register_forward_pre_hook(lambda _, args: (pinned(args[0], device_mesh), *args[1:]))
        else:
            module.register_forward_hook(lambda _, args, out: pinned(out, device_mesh))
        return module


class GlobalWhole(ParallelStyle):
    """Style of a module whose parameters are replicated. DTensor sums the gradients over tp where needed."""

    placements: ClassVar[dict[str, Placement]] = {"": Replicate()}
    cost = ("as DTensor decides", "")

    def check(self, module: nn.Module, tp: int) -> None:
        """Accept any module."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, distribute(parameter, device_mesh, Replicate()))
        return module


class GlobalEmbedding(VocabEmbedding):
    """A VocabEmbedding whose output, the hidden state, becomes a DTensor."""

    def forward(self, module: Any, x: Tensor) -> Tensor:
        return DTensor.from_local(super().forward(module, x), module.weight.device_mesh, [Replicate()], run_check=False)


class GlobalHead(LogitsHead):
    """A LogitsHead that first turns the hidden state, a DTensor, into a plain tensor."""

    def forward(self, module: Any, x: Tensor) -> Tensor:
        return super().forward(module, local(x))


class GlobalForward(ParallelStyle):
    """Style of the whole model: plain tensors, such as masks and positions, are treated as replicated DTensors."""

    cost = ("", "")

    def check(self, module: Any, tp: int) -> None:
        if dropouts(module):
            raise ValueError(f"the generic plan cannot drop alike on all ranks: set {', '.join(dropouts(module))} to 0")
        if module.config._attn_implementation != "eager":
            raise ValueError(
                f"the generic plan needs attn_implementation='eager' (from_pretrained or set_attn_implementation), got "
                f"'{module.config._attn_implementation}'"
            )

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        Guard(Stack())._apply(module, device_mesh)
        module.config.use_cache = False
        if getattr(module, "generation_config", None) is not None:
            module.generation_config.use_cache = False
        module.forward = types.MethodType(as_function(self.forward), module)
        return module

    def forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # torch's context manager `implicit_replication()` would end before the user calls backward, but backward needs
        # implicit replication too. So allow implicit replication permanently.
        DTensor._op_dispatcher._allow_implicit_replication = True
        return tree_map_only(DTensor, local, type(module).forward(module, *args, **kwargs))


def local(x: Any) -> Any:
    """Gather a DTensor into a plain tensor; return any other value unchanged."""
    if not isinstance(x, DTensor):
        return x
    return x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Replicate()])


def pinned(x: Any, mesh: DeviceMesh) -> DTensor:
    """Make x a replicated DTensor with a replicated gradient: a Partial gradient is summed at this point."""
    return DTensor.from_local(local(x), mesh, [Replicate()], run_check=False)


def generic_plan(model: Any, tp: int, loss_parallel: bool) -> HFPlan:
    """Make a plan for a model from its module names alone."""
    plan = HFPlan(model.config.model_type, tp, False, {}, block_names(model))
    plan.table[""] = GlobalForward()
    embedding = model.get_input_embeddings()
    add_head(plan, model, loss_parallel, GlobalHead)
    head_parameters: set[int] = set()
    if plan.head is not None:
        head_parameters = {id(p) for p in model.get_output_embeddings().parameters()}
    for name, module in model.named_modules():
        direct_parameters = list(module.parameters(recurse=False))
        if name in plan.table or not direct_parameters:
            continue
        # Parameters that are tied to the head's parameters are sharded together with the head.
        if module is not embedding and all(id(p) in head_parameters for p in direct_parameters):
            continue
        plan.table[name] = GlobalEmbedding(Stack()) if module is embedding else _style(name, module, plan.blocks)
    plan.notes.append(COST.format(family=plan.family))
    return plan


def _style(name: str, module: nn.Module, blocks: list[str]) -> ParallelStyle:
    is_in_block = any(name.startswith(f"{block}.") for block in blocks)
    if is_in_block and isinstance(module, nn.Linear):
        last_two_parts = ".".join(name.split(".")[-2:])
        if re.fullmatch(rf"([^.]+\.)?{COLUMN}", last_two_parts):
            return GlobalLinear(by_output=True)
        if re.fullmatch(rf"([^.]+\.)?{ROW}", last_two_parts):
            return GlobalLinear(by_output=False)
    return GlobalWhole()
