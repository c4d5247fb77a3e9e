"""Sources of a conversion, one reader for each word that `--from` takes: weights by our names, and their model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

from dtmega import config, families
from dtmega.checkpoint.resume import open_checkpoint, state_of
from dtmega.checkpoint.weights import Weights, is_hf_folder
from dtmega.cli.convert import card
from dtmega.cli.convert.card import Row
from dtmega.cli.convert.to_checkpoint import Training
from dtmega.data.tokenizers.tokenizer import load_tokenizer
from dtmega.formats.sources import Renamed, Source
from dtmega.formats.whole import check_stored
from dtmega.interop.megatron import folder, recipe, vocabulary
from dtmega.interop.torch_files.dcp import DCPFolder


class Opened(NamedTuple):
    """The source that `--from` names: weights, the model they are of, and a tokenizer.json or the spec of a tokenizer.

    The tokenizer is '' where there is none, or none but that of the directory which the model is of.

    Attributes:
        path: the place where it was found, for the other ranks.
        digest: of the directory that the model was read from; '' where that is not known.
        data: the [data] section that it was trained with; where that is not known, all defaults.
        training: None where there are weights only.
        toml: a configuration to write beside them.
        directory: of transformers, that the weights come from, where that is known and not the model's own.
        rows: what is known of the training, for a model card; none of weights that are only converted.
        notes: lines for the user.
    """

    path: str
    source: Source
    model: config.Model
    tokenizer: str
    digest: str = ""
    data: config.Data = config.Data()
    training: Training | None = None
    toml: str = ""
    directory: Path | None = None
    rows: tuple[Row, ...] = ()
    notes: tuple[str, ...] = ()


def _from_hf(name: str, args: argparse.Namespace) -> Opened:
    path = Path(name)
    asked = _model(args.config) if args.config else None
    source, model = families.open_folder(path, asked)
    tokenizer = path / "tokenizer.json"
    return Opened(name, source, model, str(tokenizer) if tokenizer.exists() else "", directory=path)


def _from_dtmega(name: str, args: argparse.Namespace) -> Opened:
    checkpoint = open_checkpoint(name)
    state = state_of(checkpoint)
    model = config.model_section(state.config.get("model", {}), checkpoint.path)
    tokenizer = state.config.get("data", {}).get("tokenizer", "")
    own = families.of(model).directory and Path(tokenizer) == Path(model.directory, "tokenizer.json")
    data = config.Data.model_validate(state.config.get("data", {}))
    begun_with = getattr(model, "init_from", "")
    return Opened(
        checkpoint.path,
        Weights(checkpoint),
        model,
        "" if own else tokenizer,
        state.digest,
        data,
        directory=Path(begun_with) if begun_with and is_hf_folder(begun_with) else None,
        rows=card.of_run(checkpoint, state, data, name),
    )


def _from_dcp(name: str, args: argparse.Namespace) -> Opened:
    if not args.config:
        raise ValueError("--from dcp needs --config NAME.toml: nothing in such a folder says what model it is of")
    folder = DCPFolder(Path(name))
    names = {name.removeprefix(args.prefix): name for name in folder.tensors if name.startswith(args.prefix)}
    rows = (Row("written from", "a folder of torch.distributed.checkpoint"),)
    return Opened(name, Renamed(folder, names), _model(args.config), "", rows=rows)


def _from_megatron(name: str, args: argparse.Namespace) -> Opened:
    asked = _model(args.config) if args.config else None
    contents = folder.open_folder(Path(name), asked, average=args.average_copies)
    where = str(contents.path)
    padded = vocabulary.with_padded_vocabulary(contents, asked)
    theirs = {**contents.args, "padded_vocab_size": contents.embedding_rows}
    if contents.args or padded is None:
        padded = families.section_of("megatron", contents.weights.tensors, theirs, where, padded)
    check_stored(padded, contents.weights, where)
    n_ids = asked.vocab_size if asked else args.vocab_size
    if args.tokenizer and not n_ids:
        n_ids = vocabulary.count_ids(contents, load_tokenizer(args.tokenizer))
    model, notes = vocabulary.without_padding(padded, contents, n_ids)

    def ours(source: Source) -> Source:
        return families.of(padded).read("megatron", source, padded, where)

    text, sections = recipe.config_of_args(contents.args, model, contents.order if contents.moments else "")
    training = None
    notes += contents.notes
    if contents.moments:
        moments = {kind: ours(source) for kind, source in contents.moments.items()}
        training = Training(moments, contents.progress, contents.updates, contents.loss_scale, sections)
        if args.target[0] == "dtmega":
            notes += (recipe.resume_note(contents.progress, args.target[1]),)
    if args.target[0] == "hf" and not args.tokenizer:
        notes += ("no tokenizer is written: --tokenizer names one",)
    rows = [Row("written from", "a checkpoint of Megatron's")]
    rows += card.of_progress(contents.progress, 0) if contents.progress.step else []
    return Opened(where, ours(contents.weights), model, "", training=training, toml=text, rows=tuple(rows), notes=notes)


def _model(name: str) -> config.Model:
    return config.load(["--config", name]).model


READERS = {"hf": _from_hf, "dtmega": _from_dtmega, "dcp": _from_dcp, "megatron": _from_megatron}
