"""The interface of a model family, and the checks that all families share.

families.py has one record for each family and is the only file that contains the families' names.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from dtmega import config
from dtmega.data.objectives.objective import Objective
from dtmega.data.tokenizers.exported import ExportedTokenizer
from dtmega.data.tokenizers.tokenizer import Tokenizer
from dtmega.formats.format import Format
from dtmega.formats.sources import Source
from dtmega.mesh import World
from dtmega.models.model import Model
from dtmega.models.show import Show
from dtmega.ops.cost import Piece


class Family(Protocol):
    """The interface through which all other code uses a model family.

    Attributes:
        libraries: libraries, in addition to torch, whose versions must be the same on all ranks.
        directory: whether the model is read from the directory that [model] path names.
        formats: name of a program in `convert` -> formats in which the program stores the family's models. A program
            with several classes for these models has several formats.
        objectives: value of [data] objective -> training objective that the family supports. The default key is "auto".
        show: kind of sample that is shown at the end of training.
        exact: execution modes for which benchmarks/exact.py has shown bit-identical results on all layouts ([run]
            exact): "eager" or "compiled" blocks, and "tp with pp".
        dtypes: values of [precision] params that the family supports in training. float16 requires heads that multiply
            their gradients by the loss scale (`Model.expect`).
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
    def exact(self) -> tuple[str, ...]: ...

    @property
    def dtypes(self) -> tuple[str, ...]: ...

    def resolve(self, cfg: config.Config) -> config.Config:
        """Complete the configuration with the values that only the family can determine.

        Raises:
            ValueError: the configuration sets keys that the family would ignore or does not support.
        """
        ...

    def digest(self, model: config.Model) -> str:
        """A digest of the configuration in the model's directory; '' for a family without directories."""
        ...

    def reread_directory(self, model: config.Model, trained: str) -> config.Model:
        """Update a checkpoint's [model] section from the current contents of the model's directory.

        Args:
            model: [model] section that the checkpoint stores.
            trained: result of `digest` when the model was trained; '' if the digest is not known.

        Raises:
            ValueError: the directory no longer exists or its configuration has changed since training.
        """
        ...

    def notes(self, model: config.Model) -> list[str]:
        """Notes for the user, printed when a run starts."""
        ...

    def build(self, model: config.Model) -> Model:
        """Build the whole model on the default device, which may be meta. The parameters have no values yet."""
        ...

    def clone(self, cfg: config.Config, tp: int) -> tuple[config.Config, Model]:
        """Build a small copy of the model on the default device; tp can shard both alike. Return (config, model)."""
        ...

    def complete(self, model: config.Model, objective: Objective) -> Objective:
        """Add the further sums that the model returns, such as an expert model's balance loss, to an objective."""
        ...

    def pieces(self, whole: Model) -> list[Piece]:
        """List a whole model's pieces (embedding, each layer, head) in pipeline order, with the costs of each piece."""
        ...

    def check(self, cfg: config.Config, sizes: Mapping[str, int]) -> None:
        """Refuse a mesh or settings that the model cannot run with.

        Raises:
            ValueError: the model cannot run with the mesh or the settings. The message states the equation that does
                not hold and the keys to change.
        """
        ...

    def attends_by_heads(self, cfg: config.Config, sizes: Mapping[str, int]) -> bool:
        """Return True if attention under cp exchanges heads, False if attention gathers keys and values.

        Raises:
            ValueError: [mesh] cp_form has a value that does not fit the model's heads.
        """
        ...

    def cut(self, cfg: config.Config, stage: Model, world: World) -> list[str]:
        """Shard a meta stage over tp. Return the names of the parameters whose gradients must be summed over tp."""
        ...

    def allocate(self, cfg: config.Config, stage: Model, world: World, device: torch.device) -> None:
        """Allocate a stage that was sharded on meta, and set up ties and buffers. Parameter values remain undefined."""
        ...

    def boundary(self, cfg: config.Config, sizes: Mapping[str, int], whole: Model, after: str) -> dict[str, Tensor]:
        """Build meta tensors like those that a stage sends to the next stage: name -> tensor with this rank's shape.

        Args:
            cfg: configuration of the run.
            sizes: resolved size of each mesh axis.
            whole: whole model.
            after: name of the stage's last piece.
        """
        ...

    def weights(self, model: config.Model) -> Source | None:
        """The weights that a new run starts with, under dtmega's names; None if initial values come from the seed.

        Raises:
            ValueError: the folder that [model] init_from or path names has no usable weights or has the weights of a
                different model.
            Damaged: [model] init_from names a checkpoint that is not intact.
        """
        ...

    def folder(self, path: Path, model: config.Model) -> Source:
        """The weights in a directory saved by transformers, with the names converted to dtmega's names.

        Raises:
            ValueError: config.json does not agree with the [model] section, or the tensors belong to a different model.
        """
        ...

    def their_model(self, model: config.Model, layers: Collection[str]) -> Any:
        """Describe the transformers model onto which peft loads the adapters of the given layers (a `TheirModel`).

        Raises:
            ValueError: transformers joins several of the layers into one layer or does not have this model.
        """
        ...

    def read(self, program: str, source: Source, model: config.Model, where: str) -> Source:
        """The weights that a different program has stored, with the names converted to dtmega's names.

        Args:
            program: name of the program, a key of `formats`.
            source: tensors of a whole model, under the program's names; padding rows of the vocabulary are dropped.
            model: [model] section of the configuration.
            where: path of the source, for error messages.

        Raises:
            ValueError: a tensor is missing, is unknown, or has the wrong shape. Reading from the returned source also
                raises a ValueError if several copies of one parameter differ.
        """
        ...

    def vocabulary(self, tokenizer: Tokenizer, data: config.Data) -> ExportedTokenizer:
        """Convert the tokenizer to the form that an exported directory stores.

        Args:
            tokenizer: tokenizer of the model.
            data: [data] section with which the model was trained.

        Raises:
            ValueError: tokenizer.json cannot express the tokenizer.
        """
        ...

    def as_stored(self, program: str, source: Source, model: config.Model) -> tuple[dict[str, Any], Source]:
        """Convert a model to the format of a different program.

        Args:
            program: name of the program, a key of `formats`.
            source: tensors of the whole model, under dtmega's names.
            model: [model] section of the configuration.

        Returns:
            The program's configuration, and the tensors under the program's names. The tensors have no vocabulary
            padding, and each tied tensor appears only once.

        Raises:
            ValueError: the program does not support the model, or the source holds a different model.
        """
        ...

    def export(self, source: Source, folder: Path, model: config.Model, tokenizer: str | None, **options: Any) -> None:
        """Write weights as a directory that transformers can load. All ranks call this method together.

        Args:
            source: tensors of the whole model, under dtmega's names.
            folder: directory to write.
            model: [model] section of the configuration.
            tokenizer: content of tokenizer.json; None to export the tokenizer in the model's own directory, if that
                directory has a tokenizer.
            options: options of `hf.files.export.export`.

        Raises:
            ValueError: the format cannot express the model, or the weights belong to a different model. Nothing is
                written.
            OSError: a file cannot be written.
        """
        ...


def hidden_state(cfg: config.Config, parts: int, length: str) -> Tensor:
    """Make a meta tensor with the shape and dtype of the hidden state between two stages, [B, S / parts, D].

    Args:
        cfg: configuration of the run.
        parts: number of ranks over which the sequence is sharded.
        length: key of [data] that holds S.
    """
    shape = (cfg.batch.micro_batch_size, cfg.data.lengths[length] // parts, cfg.model.hidden_size)
    dtype = "float32" if getattr(cfg.model, "fp32_residual", False) else cfg.precision.params
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


def check_units(cfg: config.Config, whole: Model) -> None:
    """Refuse to recompute several layers as one unit if the model does not run its layers through `Model.run_layers`.

    Raises:
        ValueError: [recompute] configures units of several layers, which the model does not support.
    """
    if cfg.recompute.method == "uniform" and cfg.recompute.layers > 1 and not whole.runs_layers:
        raise ValueError(
            f"name='{cfg.model.name}' runs its layers in a way of its own: expected layers=1 or method='block', got "
            f"layers={cfg.recompute.layers} ([recompute] layers, [recompute] method)"
        )
