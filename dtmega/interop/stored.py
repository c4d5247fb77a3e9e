"""The interface of a model family for files of other programs, which name, store and describe models their own way.

    weights(cfg.model)                                what a new run starts with
    of(model).as_stored("megatron", source, model)    a model in the format of another program

Only [model] init_from, `name = "hf"`, `convert`, `inspect` and exports use this interface. The interface for training
is `families.Family`. Each family has a record, in a file of its own that is opened when its name is asked for: in
formats/ for dtmega's own models, whose formats are data, and in hf/files/ for those of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dtmega import config, families, rooms
from dtmega.checkpoint.sources import Source
from dtmega.checkpoint.weights import is_hf_folder, open_checkpoint_weights
from dtmega.data.tokenizers.tokenizer import Tokenizer

if TYPE_CHECKING:
    from dtmega.data.tokenizers.exported import ExportedTokenizer
    from dtmega.interop.formats.format import Format


class Stored(Protocol):
    """The models of one family in the files of other programs.

    Attributes:
        formats: name of a program in `convert` -> formats in which the program stores the family's models. A program
            with several classes for these models has several formats.
    """

    @property
    def formats(self) -> Mapping[str, Sequence[Format]]: ...

    def form(self, model: config.Model, program: str, kind: str = "") -> Format:
        """The format in which another program stores a model with this [model] section.

        Args:
            model: [model] section of the configuration.
            program: name of the program, a key of `formats`.
            kind: name that the program's stored configuration gives to the family. If several formats fit the section,
                the method returns the format of this kind, or the first of these formats if this kind does not fit.

        Raises:
            ValueError: the program has no model with the values in this section.
        """
        ...

    def weights(self, model: config.Model) -> Source:
        """The weights in the directory of transformers that [model] init_from or path names, under dtmega's names.

        Raises:
            ValueError: the directory has no usable weights or has the weights of a different model.
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


# [model] name -> function that opens the family's record.
BUILT_IN: dict[str, Callable[[], Stored]] = {
    "bloom": lambda: rooms.bloom_formats().STORED,
    "gpt": lambda: rooms.gpt_formats().STORED,
    "llama": lambda: rooms.llama_formats().STORED,
    "moe": lambda: rooms.moe_formats().STORED,
    "bert": lambda: rooms.bert_formats().STORED,
    "t5": lambda: rooms.t5_formats().STORED,
    "hf": lambda: rooms.transformers_files().STORED,
}
_registered: dict[str, Stored] = {}


def register(name: str, record: Stored) -> None:
    """Add the files of a family from outside of dtmega (`families.register`).

    Args:
        name: the family's [model] name.
    """
    _registered[name] = record


def all_families() -> dict[str, Stored]:
    """The record of each family whose files are known, keyed by [model] name."""
    return {name: opened() for name, opened in BUILT_IN.items()} | _registered


def of(model: config.Model) -> Stored:
    """The record of the family that a [model] section belongs to.

    Raises:
        ValueError: the family is not dtmega's own, and nothing is known about its files.
    """
    if model.name in _registered:
        return _registered[model.name]
    if model.name not in BUILT_IN:
        raise ValueError(
            f"how other programs store a model of name = '{model.name}' is not known here: expected one of "
            f"{', '.join(BUILT_IN)}, or a record that interop.stored.register adds ([model] name, [model] init_from)"
        )
    return BUILT_IN[model.name]()


def weights(model: config.Model) -> Source | None:
    """The weights that a new run starts with, under dtmega's names; None if initial values come from the seed.

    Raises:
        ValueError: the folder that [model] init_from or path names has no usable weights or has the weights of a
            different model.
        Damaged: [model] init_from names a checkpoint that is not intact.
    """
    family = families.of(model)
    if not family.has_weights(model):
        return None
    if model.init_from and not is_hf_folder(model.init_from):
        return open_checkpoint_weights(model, weights, family.digest(model))
    return of(model).weights(model)
