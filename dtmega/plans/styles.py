"""The styles of a plan. A style shards one kind of module over tp, in dtmega's models and in transformers models.

    style              for                        what it does
    Enter              attention, feed-forward    gathers the input once for all Columns inside the module
    EnterOnce          nn.Identity                gathers an input (e.g. an encoder's output) once for several modules
    Column             nn.Linear                  sharded by output features; the input is complete on every rank
    KVColumn           nn.Linear                  a Column for keys or values, even with fewer heads than ranks
    Row                nn.Linear                  sharded by input features; the ranks' products are summed
    Norm               LayerNorm, RMSNorm         replicated, applied to this rank's tokens (or heads)
    Whole              any module                 replicated; the module keeps its own forward
    VocabEmbedding     nn.Embedding               (vocabulary.py) sharded by rows
    WholeEmbedding     nn.Embedding               (vocabulary.py) replicated, applied to this rank's positions
    HeadColumns        nn.Embedding               (vocabulary.py) sharded by columns, one column per head
    VocabHead          a head with a loss         (vocabulary.py) sharded by rows
    Rejoin             an unsharded head          (vocabulary.py) gathers the input; every rank computes the whole head
    SequenceShard      a dropout site             selects the positions of this rank's slice of the sequence
    ShardBuffer        a buffer                   sharded along one dim, for instance by heads

base.py has the base class of the styles, and products.py has the matrix product.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from dtmega.plans import mappings, products
from dtmega.plans.base import Stack, Style, add_adapter, as_function, computing_on, has_adapter, local_part
from dtmega.plans.products import product


class Enter(ParallelStyle):
    """A module whose input is gathered once, [B, S/tp, D] -> [B, S, D], for all linear layers inside the module.

    The gathered input is not saved, but gathered again in backward (products.py). Without sequence parallelism, every
    rank already has the full input, and only its gradient is reduced. The input is the first positional argument or,
    without positional arguments, the keyword argument `hidden_states`. The module keeps its own forward.

    Args:
        stack: stack that contains the module, as in `Style`.
        also: names of additional keyword arguments with hidden states that every rank has in full, such as an
            encoder's output.
    """

    enters, inside = True, False
    cost = ("backward all-reduce", "all-gather, backward all-gather and reduce-scatter")

    def __init__(self, stack: Stack | bool = True, also: tuple[str, ...] = ()) -> None:
        self.stack = stack if isinstance(stack, Stack) else Stack(stack)
        self.also = also
        self._function = as_function(self.forward)

    def check(self, module: nn.Module, tp: int) -> None:
        """Accept any module."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.check(module, device_mesh.size())
        self.group = device_mesh.get_group()
        module.forward = types.MethodType(self._function, module)
        module.gathers_again = True  # pyright: ignore[reportArgumentType]
        module.has_one_product = False  # pyright: ignore[reportArgumentType]
        return module

    def forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        entered = self.stack.enter_products(args[0] if args else kwargs["hidden_states"], self.group, module)
        if args:
            args = (entered, *args[1:])
        else:
            kwargs["hidden_states"] = entered
        for name in self.also:
            if kwargs.get(name) is not None:
                kwargs[name] = mappings.copy(kwargs[name], self.group)
        self.other_inputs(module, kwargs)
        return products.again(type(module).forward(module, *args, **kwargs), entered)

    def other_inputs(self, module: Any, kwargs: dict[str, Any]) -> None:
        """Change the module's keyword arguments, except the input, in place. Subclasses override this method."""


class EnterOnce(ParallelStyle):
    """An nn.Identity through which hidden states, such as an encoder's output, reach the Columns of several modules.

    The hidden states are gathered once for all these modules, [B, S/tp, D] -> [B, S, D], and saved for backward. In
    backward, the gradients from all modules are added up first, and then reduced over tp once. Without sequence
    parallelism, every rank already has the full hidden states.
    """

    cost = Enter.cost

    def __init__(self, stack: Stack | bool = True) -> None:
        self.stack = stack if isinstance(stack, Stack) else Stack(stack)
        self._function = as_function(self.forward)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if type(module) is not nn.Identity:
            raise ValueError(f"EnterOnce is for nn.Identity: it would replace the forward of {type(module).__name__}")
        self.group = device_mesh.get_group()
        module.forward = types.MethodType(self._function, module)
        return module

    def forward(self, module: Any, x: Tensor) -> Tensor:
        return self.stack.enter(x, self.group)


class Column(Style):
    """nn.Linear sharded by output features: [B, S, D] -> [B, S, F/tp], inside an Enter.

    A fused projection stays a single product: rows are ordered [head, (q, k, v), K], so each shard has whole heads.
    """

    placements: ClassVar[Mapping[str, Placement]] = {"weight": Shard(0), "bias": Shard(0)}
    inside = True

    def entering(self) -> Column:
        """Make the module a separate region, whose input is [B, S/tp, D] if the sequence is sharded."""
        self.enters, self.cost = True, Enter.cost
        return self

    def forward(self, module: Any, x: Tensor) -> Tensor:
        if not self.enters:
            return self.adapted(module, x)
        entered = self.stack.enter_products(x, self.group, module)
        return products.again(self.adapted(module, entered), entered)

    def adapted(self, module: Any, x: Tensor) -> Tensor:
        """Compute this rank's output features, including the result of the layer's adapter, if any."""
        out = self.multiply(module, x)
        if not has_adapter(module):
            return out
        a = self.stack.shared(module.lora_a, self.group, of_heads=True)
        return add_adapter(module, out, product(x, a), self.rows(module.lora_b))

    def multiply(self, module: Any, x: Tensor) -> Tensor:
        return product(x, self.matrix(module), local_part(module.bias))

    def rows(self, parameter: Any) -> Any:
        """The rows of a parameter [out, ...] for this rank's output features."""
        return local_part(parameter)


class KVColumn(Column):
    """nn.Linear that computes keys or values: sharded like a Column, or replicated if there are too few heads.

    If there are fewer heads than ranks, each rank has the whole weight and computes only the head that its query heads
    need, so each head is computed by tp / kv_heads ranks. The weight's gradient is then partial, {U_tp}.
    """

    of_heads = True

    def __init__(self, kv_heads: int, stack: Stack | bool = True) -> None:
        super().__init__(stack)
        self.kv_heads = kv_heads

    def placement(self, name: str, tp: int) -> Placement | None:
        return super().placement(name, tp) if self.kv_heads % tp == 0 else Replicate()

    def check(self, module: nn.Module, tp: int) -> None:
        check_kv_heads(self.kv_heads, tp, "n_kv_heads", "[mesh] tp, [model] n_kv_heads")
        super().check(module, tp)

    def multiply(self, module: Any, x: Tensor) -> Tensor:
        return product(x, self.rows(module.weight), self.rows(module.bias))

    def rows(self, parameter: Any) -> Any:
        group = self.group
        if parameter is None or self.kv_heads % group.size() == 0:
            return local_part(parameter)
        head = group.rank() * self.kv_heads // group.size()
        return self.stack.shared(parameter, group, of_heads=True).unflatten(0, (self.kv_heads, -1))[head]


def check_kv_heads(kv_heads: int, tp: int, key: str, change: str = "[mesh] tp") -> None:
    """Raise an error if the key/value heads can be neither sharded nor replicated evenly.

    Args:
        kv_heads: number of key/value heads.
        tp: number of ranks.
        key: name of the configuration key that holds `kv_heads`, for the error message.
        change: configuration keys that the message asks the user to change.

    Raises:
        ValueError: kv_heads does not divide tp, and tp does not divide kv_heads.
    """
    if kv_heads % tp and tp % kv_heads:
        raise ValueError(
            f"tp={tp} and {key}={kv_heads}: neither divides the other, so heads of keys can neither be cut nor copied "
            f"evenly ({change})"
        )


class Row(Style):
    """nn.Linear sharded by input features: [B, S, F/tp] -> [B, S/tp, D], or [B, S, D] without sequence parallelism.

    The ranks' products are summed. The bias is added once, to the sum.
    """

    placements: ClassVar[Mapping[str, Placement]] = {"weight": Shard(1), "bias": Replicate()}
    cost = ("all-reduce", "reduce-scatter, backward all-gather")

    def forward(self, module: Any, x: Tensor) -> Tensor:
        out = self.stack.leave(product(x, self.matrix(module)), self.group)
        if has_adapter(module):
            reduced = self.stack.leave(product(x, local_part(module.lora_a)), self.group)
            out = add_adapter(module, out, reduced, self.stack.shared(module.lora_b, self.group, self.of_heads))
        return out if module.bias is None else out + self.stack.shared(module.bias, self.group, self.of_heads)


class Whole(Style):
    """A module that keeps its own forward and whose parameters are replicated over tp.

    Args:
        stack: stack that contains the module, as in `Style`.
        of_heads: whether the module sees only this rank's heads.
    """

    def __init__(self, stack: Stack | bool = True, of_heads: bool = False) -> None:
        super().__init__(stack)
        self.of_heads = of_heads
        if self.stack.sums_in_backward:
            all_reduce = "backward all-reduce of the weight"
            is_partial_when_cut = of_heads or self.stack.sequence_parallel
            self.cost = (all_reduce if of_heads else "", all_reduce if is_partial_when_cut else "")

    def placement(self, name: str, tp: int) -> Placement | None:
        return Replicate()

    def check_class(self, module: nn.Module) -> None:
        """Accept any class, because the module keeps its own forward."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return super()._apply(module, device_mesh) if any(True for _ in module.parameters(recurse=False)) else module

    def forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        group = self.group
        with computing_on(module, lambda parameter: self.stack.shared(parameter, group, self.of_heads)):
            out = type(module).forward(module, *args, **kwargs)
            if not has_adapter(module):
                return out
            return add_adapter(module, out, product(args[0], module.lora_a), module.lora_b)


class Norm(Whole):
    """A LayerNorm or RMSNorm over the last dim of [B, S/tp, D] or [B, S, D]; with `of_heads`, of [B, S, H/tp, K].

    The style is for nn.LayerNorm, nn.RMSNorm, and similar classes in transformers. A class counts as similar if its
    name ends in "LayerNorm" or "RMSNorm", and if it has only a 1-D weight and perhaps a 1-D bias, but no buffers. The
    transformers classes keep their own forward, because these classes differ in precision and in offsets.
    """

    def known(self) -> tuple[type[nn.Module], ...]:
        return nn.LayerNorm, nn.RMSNorm

    def check_class(self, module: nn.Module) -> None:
        parameters = dict(module.named_parameters())
        has_name = type(module).__name__.endswith(tuple(known.__name__ for known in self.known()))
        has_only_these = parameters.keys() <= {"weight", "bias"} and not list(module.buffers())
        if not has_name or not has_only_these or any(p.ndim != 1 for p in parameters.values()):
            shapes = {name: list(p.shape) for name, p in parameters.items()}
            raise ValueError(
                f"Norm is for LayerNorm, RMSNorm and their like, with vectors as weights: it does not know "
                f"{type(module).__name__} with {shapes}"
            )

    def forward(self, module: Any, x: Tensor) -> Tensor:
        if type(module) not in self.known():
            return super().forward(module, x)
        group, shape, eps = self.group, module.normalized_shape, module.eps
        weight = self.stack.shared(module.weight, group, self.of_heads)
        if type(module) is nn.RMSNorm:
            return F.rms_norm(x, shape, weight, eps)
        return F.layer_norm(x, shape, weight, self.stack.shared(module.bias, group, self.of_heads), eps)


class SequenceShard(ParallelStyle):
    """A dropout site whose input is this rank's slice of the sequence. The site gets the positions of that slice only.

    Dropout masks are keyed by position, so each rank draws its slice of the mask that a single device would draw. The
    style is for modules that are called with (x [B, S/tp, D], sample_ids, places [B, S]); `places` are the positions.

    Args:
        cut: whether the sequence is sharded. If False, the site gets all positions, and the style does nothing.
    """

    def __init__(self, cut: bool = True) -> None:
        self.cut = cut
        self.rank = 0
        self._function = as_function(self.forward)

    def forward(self, module: Any, x: Tensor, sample_ids: Tensor | None, places: Tensor) -> Tensor:
        first = self.rank * x.shape[1]
        return type(module).forward(module, x, sample_ids, places[:, first : first + x.shape[1]])

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if "places" not in inspect.signature(type(module).forward).parameters:
            raise ValueError(f"SequenceShard is for modules that are given places, {type(module).__name__} is not")
        if not self.cut:
            return module
        self.rank = device_mesh.get_local_rank()
        module.forward = types.MethodType(self._function, module)
        return module


@dataclass(frozen=True)
class ShardBuffer:
    """A buffer with `size` entries along `dim`, which `shard_buffers` shards along that dim.

    The pattern in the plan names the buffer instead of a module.
    """

    size: int
    dim: int = 0


Plan = Mapping[str, ParallelStyle | ShardBuffer]
