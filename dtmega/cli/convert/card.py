"""An export's text files: a model card, and files copied from the directory that the weights come from.

    README.md           a model card that lists the data, steps, losses and licence; for weights that were only
                        converted, the source directory's README.md, if it exists
    README-source.md    the source directory's README.md, if README.md is a model card
    LICENSE, NOTICE     unchanged copies of the source directory's files

A card is meant to be published, so it shows only the last part of each path. Untrusted text is truncated and escaped,
so that it cannot act as Markdown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dtmega import __version__
from dtmega.checkpoint.reader import Checkpoint
from dtmega.checkpoint.state import Progress, State
from dtmega.config import Data, mixtures
from dtmega.files.console import counted, printable
from dtmega.files.regular import read_regular
from dtmega.interop.hf.files.export import GENERATION, TOKENIZER
from dtmega.report import record

CARD = "README.md"
SOURCE_CARD = "README-source.md"
TERMS = ("LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "NOTICE.txt", "USE_POLICY.md")
MAX_TEXT_BYTES = 2**20  # a larger README or licence is left out
MAX_CHARACTERS = 200  # a longer name or value is truncated
MAX_ITEMS = 20  # the card lists at most this many corpora, and at most this many losses
FRONT_MATTER = re.compile(r"\A---[ \t\r]*\n(.*?)^---[ \t\r]*$", re.DOTALL | re.MULTILINE)
LICENCE = re.compile(r"^license:[ \t]*[\"']?([A-Za-z0-9.+_-]{1,64})[\"']?[ \t\r]*$", re.MULTILINE)
# Keys of metrics.jsonl: loss, val_loss, test_loss, and val_NAME_loss for an additional validation set.
LOSS = re.compile(r"loss|test_loss|val_(?:(.+)_)?loss")
SPLITS = {"loss": "training", "val": "validation", "test": "test"}  # first part of a loss key -> split


class Row(NamedTuple):
    """A row of the card's table.

    Attributes:
        title: name of the fact, such as "tokenizer".
        text: the fact in Markdown, with untrusted text escaped by `code`.
    """

    title: str
    text: str


def rows_of_run(checkpoint: Checkpoint, state: State, data: Data, path: str) -> tuple[Row, ...]:
    """Rows about the training run that wrote a dtmega checkpoint, including the run's losses.

    Args:
        state: the checkpoint's state.
        data: the training run's [data] section.
        path: path of the checkpoint or of the run directory, as the user gave it.
    """
    rows = [Row("written from", f"{code(Path(path).name)}, {counted(state.progress.step, 'step')}")]
    if state.progress == Progress():
        return tuple(rows)
    rows += [
        Row("data", _listed(code(Path(prefix).name) for prefix in _corpora(data))),
        Row("tokenizer", code(Path(data.tokenizer).name)),
        *rows_of_progress(state.progress, data.seq_len),
        Row("recipe", _recipe(state.config)),
    ]
    record_of_run = _record_beside(checkpoint, path)
    if record_of_run is not None:
        rows += _losses(record_of_run, state.progress.step)
    return tuple(rows)


def rows_of_progress(progress: Progress, seq_len: int) -> list[Row]:
    """The row about the length of training.

    Args:
        seq_len: number of tokens in a sequence; 0 if unknown.
    """
    samples = counted(progress.samples, "sequence")
    if seq_len:
        samples += f" of {counted(seq_len, 'token')}: {counted(progress.samples * seq_len, 'token')}"
    return [Row("training", f"{counted(progress.step, 'step')}, {samples}")]


def texts(directory: Path | None, rows: Sequence[Row], *, name: str) -> dict[str, bytes]:
    """The text files that an export stores next to the weights: file name -> content.

    The result also includes the directory's `tokenizer.json` and `generation_config.json`. The exporter keeps this
    generation_config.json unless the export's tokenizer.json differs from the directory's.

    Args:
        directory: Hugging Face directory that the weights came from; None if unknown.
        rows: facts about the training; empty for weights that were only converted.
        name: name of the export.
    """
    contents = _texts_of(directory) if directory is not None else {}
    only_converted = not rows
    if CARD in contents and only_converted:
        return contents

    licence = _licence(contents.get(CARD, b""))
    licence_text = f"{code(licence)}, according to the source's README" if licence else "not known"
    terms = [code(file) for file in TERMS if file in contents]
    if terms:
        licence_text += f"; {_listed(terms)} of the source beside this file"
    all_rows = [*rows, Row("licence", licence_text)]
    if CARD in contents:
        contents[SOURCE_CARD] = contents[CARD]
        all_rows.append(Row("source", f"{code(SOURCE_CARD)} is the source's own README"))
    contents[CARD] = _card(name, licence, all_rows).encode()
    return contents


def _card(name: str, licence: str, rows: Sequence[Row]) -> str:
    """The text of a model card: front matter for model hubs, followed by a table.

    Args:
        name: name of the export.
        licence: identifier of the licence; '' if unknown.
    """
    front_matter = ["---", "library_name: transformers", "---"]
    if licence:
        front_matter.insert(-1, f"license: {licence}")
    table = ["| | |", "| --- | --- |"]
    for row in rows:
        table.append(f"| {row.title} | {row.text} |")
    lines = [
        *front_matter,
        "",
        f"# {heading(name)}",
        "",
        f"Weights in the form of Hugging Face's transformers, written by dtmega {__version__}.",
        "",
        *table,
        "",
        "Not recorded: what the data may be used for, and what the model is fit for.",
        "",
    ]
    return "\n".join(lines)


def code(written: Any) -> str:
    """Format untrusted text as Markdown code for a table cell: escaped, on one line, and truncated."""
    shown = printable(str(written)[:MAX_CHARACTERS]).replace("`", "'").replace("|", "¦")
    return f"`{shown}`" if shown.strip() else "(empty)"


def heading(written: str) -> str:
    """Format untrusted text as a heading, without characters that have a special meaning in Markdown."""
    return re.sub(r"[^\w .,+-]", "_", printable(written[:MAX_CHARACTERS]))


def _texts_of(directory: Path) -> dict[str, bytes]:
    """Read the files that an export copies or compares. Returns a mapping from file name to content.

    READMEs and licences larger than MAX_TEXT_BYTES are left out.
    """
    contents: dict[str, bytes] = {}
    for file in (CARD, *TERMS, GENERATION, TOKENIZER):
        path = directory / file
        if path.is_file() and (file == TOKENIZER or path.stat().st_size <= MAX_TEXT_BYTES):
            contents[file] = read_regular(path)
    return contents


def _licence(readme: bytes) -> str:
    """The licence identifier in a model card's front matter; '' if the identifier is missing or is not a plain word."""
    front_matter = FRONT_MATTER.match(readme.decode("utf-8", "replace"))
    licence = LICENCE.search(front_matter[1]) if front_matter else None
    return licence[1] if licence else ""


def _corpora(data: Data) -> list[str]:
    """The prefixes of the corpora that the model was trained on."""
    if data.train:
        return [share.prefix for share in mixtures.parse(data.train).shares]
    return data.paths


def _recipe(config: Mapping[str, Mapping[str, Any]]) -> str:
    """The main keys of a run's recipe, with their values. Keys missing from the configuration are left out."""
    keys = ("optim.name", "optim.lr", "optim.schedule", "batch.global_batch_size", "precision.params", "run.seed")
    texts: list[str] = []
    for name in keys:
        section, _, key = name.partition(".")
        if key in config.get(section, {}):
            texts.append(f"{name} {code(config[section][key])}")
    return ", ".join(texts)


def _record_beside(checkpoint: Checkpoint, path: str) -> record.Record | None:
    """The metrics of the run that wrote the checkpoint; None if there is no metrics.jsonl.

    The file is in the directory that the user named, or in the run directory that contains the checkpoint.
    """
    for directory in (Path(path), Path(checkpoint.path).parent.parent):
        if (directory / "metrics.jsonl").is_file():
            return record.read(directory / "metrics.jsonl")
    return None


def _losses(run_record: record.Record, last_step: int) -> list[Row]:
    """Rows of the card's table with the last value of each loss up to the checkpoint's step.

    Args:
        last_step: the checkpoint's step; the run may have continued after this step.
    """
    rows: list[Row] = []
    for key, series in run_record.series.items():
        match = LOSS.fullmatch(key)
        n_until = int((series.steps <= last_step).sum())
        if match is None or n_until == 0:
            continue
        split = SPLITS[key.partition("_")[0]]
        value, step = series.values[n_until - 1], series.steps[n_until - 1]
        validation_set = f" on {code(match[1])}" if match[1] else ""
        rows.append(Row(f"{split} loss", f"{value:.4f} after step {step:,}{validation_set}"))
    return rows[:MAX_ITEMS]


def _listed(names: Iterable[str]) -> str:
    """Join the first MAX_ITEMS names and append the number of names left out."""
    all_names = list(names)
    more = f" and {len(all_names) - MAX_ITEMS} more" if len(all_names) > MAX_ITEMS else ""
    return ", ".join(all_names[:MAX_ITEMS]) + more
