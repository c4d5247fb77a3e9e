"""The sources of a conversion: one reader for each format that `--from` accepts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dtmega import config, families
from dtmega.checkpoint.reader import Checkpoint
from dtmega.checkpoint.resume import open_checkpoint, state_of
from dtmega.checkpoint.sources import Source, check_stored
from dtmega.checkpoint.weights import Merged, Weights, is_hf_folder, whole_weights
from dtmega.cli.convert import card, recognise
from dtmega.cli.convert.card import Row
from dtmega.cli.convert.to_checkpoint import Training
from dtmega.data.indexed_files.record import END_IDS
from dtmega.data.tokenizers.load import load_tokenizer
from dtmega.interop import stored
from dtmega.interop.formats.sources import Renamed
from dtmega.interop.hf.files import config_json
from dtmega.interop.hf.files.peft import Adapters
from dtmega.interop.megatron import folder, recipe, vocabulary
from dtmega.interop.torch_files.dcp import DCPFolder


class ConversionSource(NamedTuple):
    """The weights that `--from` names, and everything known about these weights.

    Attributes:
        path: path of the checkpoint or directory that rank 0 found; all other ranks open this path.
        weights: the tensors, under dtmega's names.
        model: the [model] section.
        tokenizer: path of a tokenizer.json, or a tokenizer spec; '' if there is no tokenizer, or if a run used the
            tokenizer.json in its [model] path.
        digest: digest of the directory that the model was read from; '' if unknown.
        data: the training run's [data] section; the defaults if the weights do not come from a run.
        training: training state, from which a run can resume; None if the source has only weights.
        toml: TOML text of a configuration to write next to a checkpoint; '' to write no configuration.
        directory: Hugging Face directory that the weights come from; None if unknown. If the model has a directory of
            its own ([model] path), the conversion uses that directory instead.
        rows: facts about the training, for a model card; empty for weights that were only converted.
        notes: lines to print for the user.
        adapters: the run's LoRA adapters, which `weights` merges into the layers; None if the run has no adapters.
        end_ids: ids of the tokens that end a turn in the run's training conversations.
    """

    path: str
    weights: Source
    model: config.Model
    tokenizer: str
    digest: str = ""
    data: config.Data = config.Data()
    training: Training | None = None
    toml: str = ""
    directory: Path | None = None
    rows: tuple[Row, ...] = ()
    notes: tuple[str, ...] = ()
    adapters: Adapters | None = None
    end_ids: Sequence[int] = ()


def _from_hf(name: str, args: argparse.Namespace) -> ConversionSource:
    path = Path(name)
    configured = _model(args.config) if args.config else None
    weights, model = recognise.open_folder(path, configured)
    tokenizer = path / "tokenizer.json"
    notes = (code,) if (code := config_json.own_code(path)) else ()
    tokenizer_name = str(tokenizer) if tokenizer.exists() else ""
    return ConversionSource(name, weights, model, tokenizer_name, directory=path, notes=notes)


def _from_dtmega(name: str, args: argparse.Namespace) -> ConversionSource:
    checkpoint = open_checkpoint(name)
    state = state_of(checkpoint)
    model = config.model_section(state.config.get("model", {}), checkpoint.path)
    tokenizer = state.config.get("data", {}).get("tokenizer", "")
    is_models_own = families.of(model).directory and Path(tokenizer) == Path(model.directory, "tokenizer.json")
    data = config.Data.model_validate(state.config.get("data", {}))
    init_from = getattr(model, "init_from", "")
    is_moved = args.original and families.of(model).directory
    now = model.model_copy(update={"path": args.original}) if is_moved else model
    base_path = "" if is_moved else args.original
    weights = whole_weights(checkpoint, now, stored.weights, base_path)
    return ConversionSource(
        checkpoint.path,
        weights,
        model,
        "" if is_models_own else tokenizer,
        state.digest,
        data,
        directory=Path(init_from) if init_from and is_hf_folder(init_from) else None,
        rows=card.rows_of_run(checkpoint, state, data, name),
        adapters=_adapters(checkpoint, weights),
        end_ids=state.identity.get(END_IDS, []),
    )


def _adapters(checkpoint: Checkpoint, weights: Source) -> Adapters | None:
    """The adapters of a run; None if the run has no adapters."""
    if not isinstance(weights, Merged) or not weights.layers:
        return None
    lora = config.Lora.model_validate(state_of(checkpoint).config["lora"])
    return Adapters(Weights(checkpoint), weights.layers, lora, weights.path)


def _from_dcp(name: str, args: argparse.Namespace) -> ConversionSource:
    if not args.config:
        raise ValueError("--from dcp needs --config NAME.toml, since such a folder does not describe its model")
    dcp_folder = DCPFolder(Path(name))
    names = {key.removeprefix(args.prefix): key for key in dcp_folder.tensors if key.startswith(args.prefix)}
    rows = (Row("written from", "a folder of torch.distributed.checkpoint"),)
    return ConversionSource(name, Renamed(dcp_folder, names), _model(args.config), "", rows=rows)


def _from_megatron(name: str, args: argparse.Namespace) -> ConversionSource:
    configured = _model(args.config) if args.config else None
    contents = folder.open_folder(Path(name), configured, average=args.average_copies)
    where = str(contents.path)
    # The stored embedding has padding rows, so `vocab_size` must count these rows while the checkpoint is read.
    padded = vocabulary.with_padded_vocabulary(contents, configured)
    their_args = {**contents.args, "padded_vocab_size": contents.embedding_rows}
    if contents.args or padded is None:
        padded = recognise.section_of(contents.program, contents.weights.tensors, their_args, where, padded)
    check_stored(padded, contents.weights, where)
    n_ids = configured.vocab_size if configured else args.vocab_size
    if args.tokenizer and not n_ids:
        n_ids = vocabulary.count_ids(contents, load_tokenizer(args.tokenizer))
    model, notes = vocabulary.without_padding(padded, contents, n_ids)

    def ours(source: Source) -> Source:
        return stored.of(padded).read(contents.program, source, padded, where)

    order = contents.order if contents.moments else ""
    text, sections = recipe.config_of_args(contents.args, model, order)
    training = None
    notes += contents.notes
    if contents.moments:
        moments = {kind: ours(source) for kind, source in contents.moments.items()}
        training = Training(moments, contents.progress, contents.updates, contents.loss_scale, sections)
        if args.target[0] == "dtmega":
            notes += (recipe.resume_note(contents.progress, args.target[1]),)
    if args.target[0] == "hf" and not args.tokenizer:
        notes += ("no tokenizer is written: name one with --tokenizer",)
    rows = [Row("written from", "a Megatron checkpoint")]
    if contents.progress.step:
        rows += card.rows_of_progress(contents.progress, 0)
    weights = ours(contents.weights)
    return ConversionSource(where, weights, model, "", training=training, toml=text, rows=tuple(rows), notes=notes)


def _model(name: str) -> config.Model:
    """The [model] section of the configuration that `--config` names."""
    return config.load(["--config", name]).model


READERS = {"hf": _from_hf, "dtmega": _from_dtmega, "dcp": _from_dcp, "megatron": _from_megatron}
