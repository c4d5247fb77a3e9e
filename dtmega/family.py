"""The questions that the house asks of a family of models: the protocol, and what every family answers alike.

Its records are the rows of families.py. Nobody but that file knows a family by its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from dtmega import config
from dtmega.cost import Piece
from dtmega.data.exported import ExportedTokenizer
from dtmega.data.objectives import Objective
from dtmega.data.tokenizer import Tokenizer
from dtmega.formats.format import Format
from dtmega.formats.sources import Source
from dtmega.mesh import World
from dtmega.models.model import Model
from dtmega.models.show import Show


class Family(Protocol):
    """The answers that the rest of the house asks of a family.

    Attributes:
        libraries: whose versions all ranks must share, beside torch.
        directory: [model] path names a directory that the model is read from.
        formats: how other programs store it, by the names that `convert` has for them; one for each form there.
        objectives: what it can be trained for, by [data] objective; "auto" without it.
        show: the sample of it that is shown once it is trained.
        dtypes: of [precision] params that it can be trained in. Of float16 each head must know the loss scale.
    """

    @property
    def libraries(self) -> tuple[str, ...]: ...

    @property
    def directory(self) -> bool: ...

    @property
    def formats(self) -> Mapping[str, Sequence[Format]]: ...

    @property
    def objectives(self) -> Mapping[str, Objective]: ...

    @property
    def show(self) -> Show: ...

    @property
    def dtypes(self) -> tuple[str, ...]: ...

    def resolve(self, cfg: config.Config) -> config.Config:
        """The configuration with what only the family knows of it.

        Raises:
            ValueError: keys that it would not read, or cannot honour.
        """
        ...

    def digest(self, model: config.Model) -> str:
        """A digest of what the model's directory says of it; '' where there is none."""
        ...

    def reread_directory(self, model: config.Model, trained: str) -> config.Model:
        """A [model] section that was resolved once, as its directory says it today.

        Args:
            trained: the `digest` of then; '' where it is not known.

        Raises:
            ValueError: no such directory any more, or not the one that was trained.
        """
        ...

    def notes(self, model: config.Model) -> list[str]:
        """Lines that a user of the model should read."""
        ...

    def build(self, model: config.Model) -> Model:
        """The whole model on the default device, meta included, with values not yet initialised."""
        ...

    def pieces(self, whole: Model) -> list[Piece]:
        """The units of a pipeline in order, and what each costs, counted on a whole model."""
        ...

    def check(self, cfg: config.Config, sizes: Mapping[str, int]) -> None:
        """Refuse what the model cannot do on this mesh.

        Raises:
            ValueError: the equation, and the keys to change.
        """
        ...

    def cut(self, cfg: config.Config, stage: Model, world: World) -> list[str]:
        """Cut a stage on meta over tp. Returns names of the parameters whose gradients are sums over tp."""
        ...

    def allocate(self, cfg: config.Config, stage: Model, world: World, device: torch.device) -> None:
        """Give a cut stage on meta memory: ties hold, buffers have their values, parameters none yet."""
        ...

    def boundary(self, cfg: config.Config, sizes: Mapping[str, int], whole: Model, after: str) -> dict[str, Tensor]:
        """The tensors that a stage whose last piece is `after` hands on, by name and on meta: local shapes, dtypes."""
        ...

    def weights(self, model: config.Model) -> Source | None:
        """The weights that a new run starts with, by the names of its parameters; None: values drawn from the seed.

        Raises:
            ValueError: [model] init_from or path names nothing usable, or weights of another model.
            Damaged: a checkpoint that is not intact.
        """
        ...

    def folder(self, path: Path, model: config.Model) -> Source:
        """The weights in a directory of transformers, whose config.json must agree with the [model] section.

        Raises:
            ValueError: it does not, or the tensors are of another model.
        """
        ...

    def read(self, program: str, source: Source, model: config.Model, where: str) -> Source:
        """The weights in a source that has them by the names of another program, by ours.

        Args:
            program: a key of `formats`.
            source: tensors of a whole model; rows of padding in it are left out.
            where: it is; for messages.

        Raises:
            ValueError: a tensor that is missing, has no place, or is of another shape. `read` of what is returned:
                copies of one parameter that differ.
        """
        ...

    def vocabulary(self, tokenizer: Tokenizer, data: config.Data) -> ExportedTokenizer:
        """The vocabulary that goes with such a directory.

        Args:
            data: the section that the model was trained with.

        Raises:
            ValueError: it cannot be said as a tokenizer.json.
        """
        ...

    def as_stored(self, program: str, source: Source, model: config.Model) -> tuple[dict[str, Any], Source]:
        """The configuration of another program that describes a model, and its tensors by the names there.

        Args:
            program: a key of `formats`.
            source: tensors of the whole model by our names.

        Returns:
            The tensors are without padding of the vocabulary, tied ones once.

        Raises:
            ValueError: the program has no such model, or the source is of another one.
        """
        ...

    def export(self, source: Source, folder: Path, model: config.Model, tokenizer: str | None, **options: Any) -> None:
        """Write weights as a directory of transformers; all ranks call it.

        Args:
            tokenizer: the text of a tokenizer.json; None: that of the model's own directory, if it has one.
            options: of `hf.files.export.export`.

        Raises:
            ValueError: before anything is written; a model that the format cannot express, other weights than its.
            OSError: writing failed.
        """
        ...


def hidden_state(cfg: config.Config, parts: int, length: str) -> Tensor:
    """The residual stream [B, S / parts, D] on meta, S being the value of the key `length`."""
    shape = (cfg.batch.micro_batch_size, cfg.data.lengths[length] // parts, cfg.model.hidden_size)
    dtype = "float32" if getattr(cfg.model, "fp32_residual", False) else cfg.precision.params
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


def check_units(cfg: config.Config, whole: Model) -> None:
    """Refuse units of several layers for a model that cannot recompute them together.

    Raises:
        ValueError: layers are to be recomputed several at a time, and the model does not run them by
            `Model.run_layers`.
    """
    if cfg.recompute.method == "uniform" and cfg.recompute.layers > 1 and not whole.runs_layers:
        raise ValueError(
            f"name='{cfg.model.name}' runs its layers in a way of its own: expected layers=1 or method='block', got "
            f"layers={cfg.recompute.layers} ([recompute] layers, [recompute] method)"
        )


def lengths_of(cfg: config.Config, whole: Model) -> dict[str, int]:
    """The lengths of a model's sequences, by their keys.

    Raises:
        ValueError: one is set that it does not have.
    """
    for key in cfg.data.lengths:
        field = config.Data.model_fields[key]
        if key not in whole.lengths and getattr(cfg.data, key) != field.default:
            raise ValueError(
                f"{key}={getattr(cfg.data, key)} means nothing to a model without such sequences: expected "
                f"{field.default}, or another model ([data] {key}, [model] name)"
            )
    return {key: cfg.data.lengths[key] for key in whole.lengths}
