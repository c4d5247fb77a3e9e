"""The initial values of a family of `transformers`: it draws them on meta, and this notes what it does."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


@torch.no_grad()
def draws_of(hf: Any) -> dict[str, tuple[float, float] | None]:
    """Name of a parameter -> (mean, std) of its normal distribution, one of which is 0; None: anything else.

    The row of a padding token, which some families put to zero afterwards, is not told from the others.

    Args:
        hf: a whole model of `transformers` on meta.
    """
    for tensor in (*hf.modules(), *hf.parameters()):
        tensor._is_hf_initialized = False  # what has it is left alone
    names = {id(parameter): name for name, parameter in hf.named_parameters()}
    with _LookOn(names) as mode:
        # Children first: GPT-2 scales c_proj when the layer has drawn it. Each model within the model draws its own.
        hf.initialize_weights()
    return mode.found


class _LookOn(TorchDispatchMode):
    """A mode in which the draws of initial values are noted.

    Attributes:
        found: what was done to each parameter last.
    """

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self._names = names
        self.found: dict[str, tuple[float, float] | None] = dict.fromkeys(names.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operation = func.overloadpacket.__name__
        if args and operation.endswith("_") and (name := self._names.get(id(args[0]))):
            known = {"normal_": args[1:3], "fill_": (*args[1:2], 0.0), "zero_": (0.0, 0.0)}
            mean, std = known.get(operation, (1.0, 1.0))
            self.found[name] = None if mean and std else (float(mean), float(std))
        return func(*args, **(kwargs or {}))
