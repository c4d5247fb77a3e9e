"""The distributions from which a family of `transformers` draws its initial values.

The family's own code initialises a model on meta, and its draws are recorded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


@torch.no_grad()
def draws_of(hf: Any) -> dict[str, tuple[float, float] | None]:
    """The distribution of each parameter's initial values, by name of the parameter.

    Some families set the row of a padding token to zero after the draw; that row is not distinguished from the others.

    Args:
        hf: a whole model of `transformers` on meta.

    Returns:
        Name -> (mean, std) of a normal distribution. At least one of the two is 0; a constant has std 0. The value is
        None for a parameter that is initialised in any other way.
    """
    # transformers does not initialise a module or parameter for which this flag is True.
    for tensor in (*hf.modules(), *hf.parameters()):
        tensor._is_hf_initialized = False
    names = {id(parameter): name for name, parameter in hf.named_parameters()}
    with _DrawRecorder(names) as recorder:
        # This visits children first, so a parameter may be drawn twice, and the last draw counts: GPT-2's layer draws
        # c_proj again, with a smaller std.
        hf.initialize_weights()
    return recorder.draws


class _DrawRecorder(TorchDispatchMode):
    """A mode that records how parameters are initialised in place.

    Attributes:
        draws: name of each parameter -> (mean, std) of its last initialisation; see the result of `draws_of`.
    """

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self._names = names
        self.draws: dict[str, tuple[float, float] | None] = dict.fromkeys(names.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operation = func.overloadpacket.__name__
        if args and operation.endswith("_") and (name := self._names.get(id(args[0]))):
            distributions = {"normal_": args[1:3], "fill_": (*args[1:2], 0.0), "zero_": (0.0, 0.0)}
            # A draw whose mean and std are both nonzero is recorded as None, and so is any other operation (uniform_).
            mean, std = distributions.get(operation, (1.0, 1.0))
            self.draws[name] = None if mean and std else (float(mean), float(std))
        return func(*args, **(kwargs or {}))
