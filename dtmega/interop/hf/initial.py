"""Finds the distributions from which a `transformers` family draws initial values.

Runs the family's own initialisation on a meta model and records every draw.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


@torch.no_grad()
def draws_of(hf: Any) -> dict[str, tuple[float, float] | None]:
    """Find the distribution of each parameter's initial values.

    Some families set the padding token's embedding to zero after the draw; the result ignores this step.

    Args:
        hf: whole `transformers` model, on meta.

    Returns:
        (mean, std) for each parameter, keyed by parameter name. For a constant, std is 0; for a normal distribution,
        mean is 0. An entry is None if the parameter is initialised in any other way.
    """
    # transformers skips every module or parameter whose flag `_is_hf_initialized` is True, so clear all flags.
    for tensor in (*hf.modules(), *hf.parameters()):
        tensor._is_hf_initialized = False
    names = {id(parameter): name for name, parameter in hf.named_parameters()}
    with _DrawRecorder(names) as recorder:
        # `initialize_weights` visits children first, so a parameter may be drawn twice. The last draw counts. For
        # example, GPT-2 draws c_proj again, with a smaller std.
        hf.initialize_weights()
    return recorder.draws


class _DrawRecorder(TorchDispatchMode):
    """A dispatch mode that records how parameters are initialised in place.

    Attributes:
        draws: mean and std from each parameter's last initialisation, keyed by parameter name; an entry may be None
            (see `draws_of`).
    """

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self._names = names
        self.draws: dict[str, tuple[float, float] | None] = dict.fromkeys(names.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operation = func.overloadpacket.__name__
        if args and operation.endswith("_") and (name := self._names.get(id(args[0]))):
            distributions = {"normal_": args[1:3], "fill_": (*args[1:2], 0.0), "zero_": (0.0, 0.0)}
            # Record None for a draw whose mean and std are both nonzero, and for any other operation, such as uniform_.
            mean, std = distributions.get(operation, (1.0, 1.0))
            self.draws[name] = None if mean and std else (float(mean), float(std))
        return func(*args, **(kwargs or {}))
