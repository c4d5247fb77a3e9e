"""Loads weights from safetensors into a model that was sharded on meta. Each rank reads only its own shards.

with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
parallelize_hf(model, mesh)
print(load_hf(model, directory, "cuda"))     # Read(bytes=..., of=...)
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dtmega.interop.hf.directory import materialize
from dtmega.interop.hf.files import theirs
from dtmega.models.ties import aliases
from dtmega.ops.shards import boxes


class Read(NamedTuple):
    """The share of the stored weights that this rank has read.

    Attributes:
        bytes: number of bytes that this rank read.
        of: number of bytes that the files hold for this model.
    """

    bytes: int
    of: int


@torch.no_grad()
def load_hf(model: Any, directory: Path | str, device: str | torch.device) -> Read:
    """Allocate a model that is on meta, then load its parameters from the directory's safetensors.

    Each rank reads only its own shards.

    Args:
        model: `transformers` model, unsharded or sharded by `parallelize_hf`.
        directory: directory with the safetensors.
        device: device for this rank's parameters and buffers.

    Returns:
        The number of bytes that this rank has read, and the number of bytes that the files hold for the model.

    Raises:
        ValueError: `theirs.open_weights` refuses the directory.
    """
    materialize(model, device)
    folder = theirs.open_weights(directory, model)
    parameters = [(names[0], parameter) for parameter, names in aliases(model)]
    stored_buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in folder.tensors]
    for name, tensor in [*parameters, *stored_buffers]:
        for box in boxes(tensor):
            box.part.copy_(folder.read(name, box.where))
    n_bytes = sum(math.prod(shape) * dtype.itemsize for dtype, shape in folder.tensors.values())
    return Read(folder.bytes_read, n_bytes)
