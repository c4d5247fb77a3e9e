"""Tied parameters: one parameter of a model under several names."""

from __future__ import annotations

from torch import nn


def aliases(model: nn.Module) -> list[tuple[nn.Parameter, list[str]]]:
    """List each parameter of a model once, with all its names; a tied parameter has several names."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return list(names.items())
