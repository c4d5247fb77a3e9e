"""The arguments of `dtmega COMMAND`: what each takes, and a refusal in one line that names it.

The bounds of a value stand beside its option, so that no command has to look at them again.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from typing import Any, NoReturn

from dtmega import config
from dtmega.data.sentences import BLOCKS, PROSE
from dtmega.data.text_files import BLANK_LINES, KINDS

SHOWN_BY = ("tokens", "temperature", "top_k", "seed")  # options of `generate` that are the families'


class Parser(argparse.ArgumentParser):
    """Argparse's, which would print ten lines of usage before the one that matters."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    """The type of an option that takes whole numbers from `low` to `high`."""
    expected = f"a whole number of {low} or more" if high is None else f"a whole number from {low} to {high}"

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"expected {expected}, got '{text}'")
        return value

    return read


def temperature(text: str) -> float:
    """0, or what logits in fp32 can be divided by without overflow."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if value != 0 and not 1e-6 <= value <= 1e6:
        raise argparse.ArgumentTypeError(f"expected 0, or a number from 1e-6 to 1e6, got '{text}'")
    return value


def prefix(text: str) -> str:
    """A prefix, which `.bin` and `.idx` are put behind, so not a folder."""
    if os.path.basename(text) in ("", ".", ".."):
        raise argparse.ArgumentTypeError(
            f"expected a prefix such as data/mine, for data/mine.bin and .idx, got '{text}'"
        )
    return text


def cut(text: str) -> str | int:
    """The places to cut a text into documents at: blank lines, or every so many tokens."""
    try:
        return BLANK_LINES if text == BLANK_LINES else integer(1)(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"expected {BLANK_LINES} or a number of tokens, got '{text}'") from None


def parse(argv: list[str]) -> argparse.Namespace:
    """`command` and its arguments; ends the process with code 2 where one of them cannot be."""
    table = {
        "train": ("a run: `train --help` lists its keys", _nothing),
        "tokenize": ("text files -> .bin/.idx", _tokenize),
        "merge": ("several .bin/.idx -> one", _merge),
        "generate": ("sample from a run's last checkpoint, or from any one", _generate),
        "convert": ("weights to and from Hugging Face's format", _convert),
        "inspect": ("what a checkpoint holds, whether it is intact, how two differ", _inspect),
        "verify-plan": ("is the sharding plan of a Hugging Face model right?", _verify_plan),
        "from-megatron": ("a Megatron command or launch script -> a TOML", _from_megatron),
        "groups": ("the ranks of every group of a mesh, as Megatron lists them", _groups),
    }
    parser = Parser(prog="dtmega", description="Train a model, and do what comes before and after it.")
    commands = parser.add_subparsers(dest="command", required=True, metavar=f"{{{','.join(table)}}}")
    for name, (line, add_arguments) in table.items():
        add_arguments(commands.add_parser(name, help=line, description=line))
    return parser.parse_args(argv)


def _nothing(parser: argparse.ArgumentParser) -> None:
    """`train` has its options from config.py, and never comes here."""


def _tokenize(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help=f"files, globs, folders (every {', '.join(KINDS)} below, by name; text also .gz, .zst), or - for stdin",
    )
    parser.add_argument(
        "--tokenizer", required=True, metavar="SPEC", help="stdlib-8k, stdlib-wordpiece, bert:VOCAB, gpt2, a file"
    )
    parser.add_argument(
        "--output", required=True, type=prefix, metavar="PREFIX", help="writes PREFIX.bin and PREFIX.idx"
    )
    parser.add_argument("--json-key", default="text", metavar="KEY", help="JSON key or parquet column (%(default)s)")
    parser.add_argument("--append-eod", action="store_true", help="close each document with the end-of-document id")
    parser.add_argument(
        "--split-documents",
        type=cut,
        metavar="WHERE",
        help="cut each .txt, else one document, at its blank lines (blank-lines) or every N tokens (a number)",
    )
    parser.add_argument(
        "--split-sentences",
        nargs="?",
        const=PROSE,
        choices=(PROSE, BLOCKS),
        help="for BERT: a sequence is a sentence of prose (the default), or a block of code between blank lines",
    )
    parser.add_argument("--kind", choices=("txt", "jsonl"), help="read all input as this (by suffix; - as txt)")
    parser.add_argument(
        "--workers", type=integer(1), default=_n_cpus(), metavar="N", help="processes (%(default)s, all there are)"
    )
    parser.add_argument(
        "--strict", action="store_true", help="stop at the first malformed record instead of skipping it"
    )


def _merge(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--input", nargs="+", required=True, metavar="PREFIX", help="the parts in their order; globs, by name"
    )
    parser.add_argument(
        "--output", required=True, type=prefix, metavar="PREFIX", help="writes PREFIX.bin and PREFIX.idx"
    )


def _n_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--run",
        required=True,
        metavar="PATH",
        help="a run directory, such as runs/bloom (its newest checkpoint), or the folder of one checkpoint",
    )
    parser.add_argument("--prompt", required=True, help="text to go on from; for a BERT, with each [MASK] to fill")
    # Each family has its own defaults, and refuses what it does not read (`Show.options`).
    parser.add_argument("--tokens", type=integer(1), help="how many to draw (default 128)")
    parser.add_argument("--temperature", type=temperature, help="0 = always the most probable (default 0.8)")
    parser.add_argument(
        "--top-k", type=integer(0), help="draw from the k most probable, or list them; 0 = all (default 50, or 5)"
    )
    parser.add_argument("--seed", type=integer(0, 2**63 - 1), help="another seed, another sample (default 0)")


def _convert(parser: argparse.ArgumentParser) -> None:
    pair: dict[str, Any] = {"nargs": 2, "required": True, "metavar": ("FORMAT", "PATH")}
    parser.add_argument(
        "--from", dest="source", help="hf, dtmega (a checkpoint or a run), dcp or megatron, and where", **pair
    )
    parser.add_argument("--to", dest="target", help="dtmega, hf or megatron, and where", **pair)
    parser.add_argument("--config", default="", help="a TOML whose [model] the weights are of (needed for dcp)")
    parser.add_argument(
        "--vocab-size", type=integer(1), default=0, help="from megatron: ids of the tokenizer, without rows of padding"
    )
    parser.add_argument(
        "--average-copies",
        action="store_true",
        help="from megatron: where the tensor-parallel ranks' copies of a tensor have drifted apart, take their mean",
    )
    parser.add_argument("--prefix", default="", help="dcp: what stands before the parameters' names, such as 'model.'")
    parser.add_argument(
        "--tokenizer", default="", help="to hf: tokenizer.json or what to make one of (default: the source's)"
    )
    parser.add_argument(
        "--original", default="", help="where the directory of the run's [model] path is, if it has moved"
    )
    parser.add_argument("--dtype", default="", help="to hf, megatron: torch's name of another dtype to write")
    parser.add_argument("--tp", type=integer(1), default=1, help="to megatron: tensor-parallel ranks (%(default)s)")
    parser.add_argument("--pp", type=integer(1), default=1, help="to megatron: pipeline stages (%(default)s)")


def _inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="a checkpoint's folder or URL, or a run directory (its newest)")
    parser.add_argument("other", nargs="?", help="another one: print the differences; exit code 1 if there are any")
    parser.add_argument("--quick", action="store_true", help="do not read the tensors to verify their digests")


def _verify_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", help="a model directory with config.json; weights are not needed")
    parser.add_argument("--tp", type=integer(1), default=2, help="ranks; started here unless torchrun did (default 2)")
    parser.add_argument("--no-sequence-parallel", action="store_true", help="plain tensor parallelism")
    parser.add_argument("--generic", action="store_true", help="a model without a plan computes on DTensors")


def _from_megatron(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        help="a launch script's file, read and never run, or 'pretrain_bert.py --num-layers 24 ...' in quotes",
    )


def _groups(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--world", type=integer(1), required=True, metavar="N", help="processes")
    for axis, info in config.Mesh.model_fields.items():
        if info.annotation is int or axis == "cp":
            parser.add_argument(
                f"--mesh.{axis}", dest=axis, type=integer(-1), default=info.default, metavar="N", help=info.description
            )
