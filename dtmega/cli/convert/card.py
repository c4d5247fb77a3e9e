"""The texts beside the weights of an export: a model card, and what the directory that they come from says of itself.

    README.md           a model card: data, steps and losses, licence. Of weights that no run has trained since, the
                        README.md of the directory that they come from
    README-source.md    beside a card: that directory's README.md
    LICENSE, NOTICE     that directory's, as they are

What runs and strangers have called things stands in the card as inert text, cut short. Paths are cut to their last
part: a card is made to be published.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dtmega import __version__
from dtmega.checkpoint.reader import Checkpoint
from dtmega.checkpoint.resume import Progress, State
from dtmega.config import Data, mixtures
from dtmega.files.console import counted, printable
from dtmega.interop.hf.files.export import GENERATION, TOKENIZER
from dtmega.report import record

CARD, OF_SOURCE = "README.md", "README-source.md"
TERMS = ("LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "NOTICE.txt", "USE_POLICY.md")
MAX_TEXT_BYTES = 2**20  # of a README or a licence; larger ones are left out
MAX_CHARACTERS = 200  # of a name or a value in the card
MOST = 20  # corpora, or losses
FRONT_MATTER = re.compile(r"\A---[ \t\r]*\n(.*?)^---[ \t\r]*$", re.DOTALL | re.MULTILINE)
LICENCE = re.compile(r"^license:[ \t]*[\"']?([A-Za-z0-9.+_-]{1,64})[\"']?[ \t\r]*$", re.MULTILINE)
# Keys of metrics.jsonl: loss, val_loss, val_NAME_loss of a further set, test_loss.
LOSS = re.compile(r"loss|test_loss|val_(?:(.+)_)?loss")
SPLITS = {"loss": "training", "val": "validation", "test": "test"}  # by what such a key begins with


class Row(NamedTuple):
    """A line of the card's table. `text` is Markdown: what strangers wrote has passed through `code`."""

    title: str
    text: str


def of_run(checkpoint: Checkpoint, state: State, data: Data, path: str) -> tuple[Row, ...]:
    """Rows about the training that led to a checkpoint of ours, with the losses of the run that it lies in.

    Args:
        path: of the checkpoint, or of the run directory, as the user gave it.
    """
    rows = [Row("written from", f"{code(Path(path).name)}, {counted(state.progress.step, 'step')}")]
    if state.progress == Progress():
        return tuple(rows)
    rows += [
        Row("data", _listed(code(Path(prefix).name) for prefix in _corpora(data))),
        Row("tokenizer", code(Path(data.tokenizer).name)),
        *of_progress(state.progress, data.seq_len),
        Row("recipe", _recipe(state.config)),
    ]
    record_of_run = _record_beside(checkpoint, path)
    if record_of_run is not None:
        rows += _losses(record_of_run, state.progress.step)
    return tuple(rows)


def of_progress(progress: Progress, seq_len: int) -> list[Row]:
    """The row about how far a run was.

    Args:
        seq_len: S; 0 where it is not known.
    """
    read = counted(progress.samples, "sequence")
    if seq_len:
        read += f" of {counted(seq_len, 'token')}: {counted(progress.samples * seq_len, 'token')}"
    return [Row("training", f"{counted(progress.step, 'step')}, {read}")]


def texts(directory: Path | None, rows: Sequence[Row], *, name: str) -> dict[str, bytes]:
    """File -> content of all that goes beside an export's weights, and is not of its tokenizer.

    Also `generation_config.json` and `tokenizer.json` of the directory, from which the exporter tells whether the
    export has the directory's own tokenizer.

    Args:
        directory: of transformers, that the weights come from; None: none is known.
        rows: what is known of the training; none of weights that were only converted.
        name: of the export.
    """
    found = _texts_of(directory) if directory is not None else {}
    only_converted = not rows
    if CARD in found and only_converted:
        return found

    licence = _licence(found.get(CARD, b""))
    said = f"{code(licence)}, by the README of the source" if licence else "not known"
    terms = [code(file) for file in TERMS if file in found]
    if terms:
        said += f"; {_listed(terms)} of the source beside this file"
    about = [*rows, Row("licence", said)]
    if CARD in found:
        found[OF_SOURCE] = found[CARD]
        about.append(Row("source", f"{code(OF_SOURCE)} is what it says of itself"))
    found[CARD] = _card(name, licence, about).encode()
    return found


def _card(name: str, licence: str, rows: Sequence[Row]) -> str:
    """The text of a model card: front matter that hubs read, and a table.

    Args:
        licence: a plain word; '' where it is not known.
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
    """Somebody else's text as Markdown code in a cell of a table: inert, on one line and cut short."""
    shown = printable(str(written)[:MAX_CHARACTERS]).replace("`", "'").replace("|", "¦")
    return f"`{shown}`" if shown.strip() else "(empty)"


def heading(written: str) -> str:
    """Somebody else's text as a heading, in letters that mean nothing in Markdown."""
    return re.sub(r"[^\w .,+-]", "_", printable(written[:MAX_CHARACTERS]))


def _texts_of(directory: Path) -> dict[str, bytes]:
    """The files of a directory that an export may carry or has to know; those of people within MAX_TEXT_BYTES."""
    found: dict[str, bytes] = {}
    for file in (CARD, *TERMS, GENERATION, TOKENIZER):
        path = directory / file
        if path.is_file() and (file == TOKENIZER or path.stat().st_size <= MAX_TEXT_BYTES):
            found[file] = path.read_bytes()
    return found


def _licence(readme: bytes) -> str:
    """The licence that the front matter of a model card names; '' where it names none by a plain word."""
    front = FRONT_MATTER.match(readme.decode("utf-8", "replace"))
    named = LICENCE.search(front[1]) if front else None
    return named[1] if named else ""


def _corpora(data: Data) -> list[str]:
    """Prefixes of the corpora that were trained on."""
    if data.train:
        return [share.prefix for share in mixtures.parse(data.train).shares]
    return data.paths


def _recipe(config: Mapping[str, Mapping[str, Any]]) -> str:
    """The keys of a run that a reader of its card asks for first; what its checkpoint does not have is left out."""
    asked = ("optim.name", "optim.lr", "optim.schedule", "batch.global_batch_size", "precision.params", "run.seed")
    said: list[str] = []
    for name in asked:
        section, _, key = name.partition(".")
        if key in config.get(section, {}):
            said.append(f"{name} {code(config[section][key])}")
    return ", ".join(said)


def _record_beside(checkpoint: Checkpoint, path: str) -> record.Record | None:
    """The record of the run directory that was named, or in whose `checkpoints/` the checkpoint lies."""
    for directory in (Path(path), Path(checkpoint.path).parent.parent):
        if (directory / "metrics.jsonl").is_file():
            return record.read(directory / "metrics.jsonl")
    return None


def _losses(found: record.Record, last_step: int) -> list[Row]:
    """The newest losses of the steps up to the checkpoint's."""
    rows: list[Row] = []
    for key, series in found.series.items():
        named = LOSS.fullmatch(key)
        n_until = int((series.steps <= last_step).sum())
        if named is None or n_until == 0:
            continue
        split = SPLITS[key.partition("_")[0]]
        value, step = series.values[n_until - 1], series.steps[n_until - 1]
        on = f" on {code(named[1])}" if named[1] else ""
        rows.append(Row(f"{split} loss", f"{value:.4f} after step {step:,}{on}"))
    return rows[:MOST]


def _listed(names: Iterable[str]) -> str:
    every = list(names)
    more = f" and {len(every) - MOST} more" if len(every) > MOST else ""
    return ", ".join(every[:MOST]) + more
