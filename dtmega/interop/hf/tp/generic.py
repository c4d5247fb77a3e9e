"""Plans for any other model: its own code computes on DTensors, which all parameters are. Right, but slow.

A block's linears are cut by their names; what torch cannot cut in between (most views of fused heads) it gathers. Keys
and values cannot be cached. Only `attn_implementation="eager"`: fused attention has no DTensor rule on CPU.
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

COLUMN = r"(q|k|v|query|key|value|qkv|gate|up|fc1|fc_in|c_fc|wi(_\d)?|intermediate\.dense|in)(_proj)?"
ROW = r"(o|out|down|fc2|fc_out|wo|dense|output\.dense|c)(_proj)?"
COST = (
    "'{family}' has no adapter and no plan of transformers: it will compute on DTensors. This is exact but slow (1.1 "
    "to 1.9 times an adapter, where both were measured), may gather whole activations in attention, caches no keys and "
    "values, and lets plain tensors mix with DTensors in this process, as copies"
)


class GlobalLinear(ParallelStyle):
    """nn.Linear on DTensors, cut by output features or by input features."""

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
    """A module whose parameters are whole; DTensor knows what to do with their gradients."""

    placements: ClassVar[dict[str, Placement]] = {"": Replicate()}
    cost = ("as DTensor decides", "")

    def check(self, module: nn.Module, tp: int) -> None:
        """Accept any module."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, distribute(parameter, device_mesh, Replicate()))
        return module


class GlobalEmbedding(VocabEmbedding):
    """An embedding that computes as ever; from here on the hidden state is a DTensor."""

    def forward(self, module: Any, x: Tensor) -> Tensor:
        return DTensor.from_local(super().forward(module, x), module.weight.device_mesh, [Replicate()], run_check=False)


class GlobalHead(LogitsHead):
    """A head that computes as ever; from here on the results are plain tensors."""

    def forward(self, module: Any, x: Tensor) -> Tensor:
        return super().forward(module, local(x))


class GlobalForward(ParallelStyle):
    """The whole model: plain tensors among DTensors (masks, positions) count as replicated."""

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
        Guard(Stack(), drops=False)._apply(module, device_mesh)
        module.config.use_cache = False
        if getattr(module, "generation_config", None) is not None:
            module.generation_config.use_cache = False
        module.forward = types.MethodType(as_function(self.forward), module)
        return module

    def forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # torch's context `implicit_replication()` ends before the user calls backward, where autograd restores at each
        # node what was allowed when backward began: so it stays allowed.
        DTensor._op_dispatcher._allow_implicit_replication = True
        return tree_map_only(DTensor, local, type(module).forward(module, *args, **kwargs))


def local(x: Any) -> Any:
    """The whole of a tensor, as a plain one."""
    if not isinstance(x, DTensor):
        return x
    return x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Replicate()])


def pinned(x: Any, mesh: DeviceMesh) -> DTensor:
    """x whole on every rank, and its gradient too: a Partial one is summed here and not carried on."""
    return DTensor.from_local(local(x), mesh, [Replicate()], run_check=False)


def generic_plan(model: Any, tp: int, loss_parallel: bool) -> HFPlan:
    plan = HFPlan(model.config.model_type, tp, False, {}, block_names(model))
    plan.table[""] = GlobalForward()
    embedding = model.get_input_embeddings()
    add_head(plan, model, loss_parallel, GlobalHead)
    of_head = {id(p) for p in model.get_output_embeddings().parameters()} if plan.head is not None else set()
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if name in plan.table or not own or (module is not embedding and all(id(p) in of_head for p in own)):
            continue
        inside = any(name.startswith(f"{block}.") for block in plan.blocks)
        short = ".".join(name.split(".")[-2:])
        if module is embedding:
            style: ParallelStyle = GlobalEmbedding(Stack())
        elif inside and isinstance(module, nn.Linear) and re.fullmatch(rf"([^.]+\.)?{COLUMN}", short):
            style = GlobalLinear(by_output=True)
        elif inside and isinstance(module, nn.Linear) and re.fullmatch(rf"([^.]+\.)?{ROW}", short):
            style = GlobalLinear(by_output=False)
        else:
            style = GlobalWhole()
        plan.table[name] = style
    plan.notes.append(COST.format(family=plan.family))
    return plan
