"""Saved states of a run: complete or not there, verified on read, and never unpickled.

    manifest.py   what a checkpoint says about itself: JSON, with a digest of every block of bytes
    files.py      the file operations it is made of, on a disk or under a URL
    reader.py     a finished one to read, verified on the way
    dcp.py        tensors of any layout to and from it, on torch.distributed.checkpoint
    run.py        the checkpoints of a run as it goes: save, publish, keep the newest
    resume.py     where a run goes on, and whether it may
    found.py      where it writes and what it goes on from: claimed by one rank, seen by all

Other people's formats and what users do by hand:

    weights.py    weights to start from, whoever saved them
    inspect.py    `python -m dtmega inspect`
    convert.py    `python -m dtmega convert`
    hf.py         Hugging Face folders of BLOOM in, hf_export.py out
    hf_copy.py    a model of transformers back to a directory
    hf_write.py   the safetensors of both
    foreign.py    plain DCP folders, read as data by inert.py and torch_save.py

What all of these share is `Source`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor


class Source(Protocol):
    """Named tensors that can be read in parts, wherever they are stored.

    Attributes:
        tensors: name -> dtype and whole shape.
    """

    @property
    def tensors(self) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]: ...

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> Tensor:
        """That part (None: all) of a tensor, in host memory."""
        ...
