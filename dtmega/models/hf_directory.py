"""What the directory of a model of transformers says: to write one again, or to know that it is still the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from dtmega import config
from dtmega.models import hf


class Described(NamedTuple):
    """Attributes:
    model: the section with what the directory says.
    architecture: the model's class in transformers.
    stored: name of a parameter -> its name in such a directory's files; of tied ones once.
    """

    model: config.Model
    architecture: str
    stored: Mapping[str, str]


def describe(model: config.Model) -> Described:
    """Raises:
    ValueError: as `hf.resolve`, or config.json is not the one that the section's `digest` is of.
    """
    values = hf.sizes(model)
    if model.digest not in ("", values["digest"]):
        raise ValueError(
            f"{model.path}/config.json is not what was trained: its digest is {values['digest']}, expected "
            f"{model.digest} ([model] path)"
        )
    with torch.device("meta"):
        built = hf.HF(model)
    return Described(model.model_copy(update=values), type(built.hf).__name__, _stored(built))


def _stored(built: hf.HF) -> dict[str, str]:
    """As `save_pretrained` calls them, which older versions of transformers and other programs read too.

    Models for which it also computes other tensors (fused experts) keep the names of parameters: from_pretrained of
    transformers 5 reads those of every family.
    """
    from transformers.core_model_loading import revert_weight_conversion

    parameters = {built.full_name(name): parameter.detach() for name, parameter in built.named_parameters()}
    names = {id(tensor): name for name, tensor in revert_weight_conversion(built.hf, parameters).items()}
    if any(id(tensor) not in names for tensor in parameters.values()):
        return {name: name for name in parameters}
    return {name: names[id(tensor)] for name, tensor in parameters.items()}
