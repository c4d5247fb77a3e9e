"""`dtmega tokenize`: turns text files into a corpus in Megatron's format, `.bin/.idx`.

dtmega tokenize --input texts --tokenizer stdlib-8k --output data/mine
dtmega tokenize --input play.txt --split-documents blank-lines --tokenizer gpt2 --output data/play
dtmega tokenize --input 'corpus/*.jsonl.gz' --tokenizer DIR/tokenizer.json --append-eod --output data/corpus
dtmega tokenize --input big.jsonl --tokenizer gpt2 --output data/mine --part 3/12
dtmega tokenize --chat --input chat.jsonl --tokenizer DIR/tokenizer.json --output data/chat
"""

from __future__ import annotations

import argparse
import os

from dtmega.cli.commands.arguments import encoding, integer, local_path, part, places_to_cut, prefix, role
from dtmega.cli.commands.endings import write_output
from dtmega.data.preparing import conversations, tokenize
from dtmega.data.preparing.input_files import KINDS
from dtmega.data.preparing.sentences import BLOCKS, PROSE
from dtmega.data.tokenizers.chat import TURNS
from dtmega.data.tokenizers.rendering import ALL, ASSISTANT, LAST


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--input",
        type=local_path,
        nargs="+",
        required=True,
        metavar="PATH",
        help=f"files, globs, folders (their {', '.join(KINDS)} files, by path; text also .gz, .zst), or - for stdin",
    )
    parser.add_argument(
        "--tokenizer",
        type=local_path,
        required=True,
        metavar="SPEC",
        help="stdlib-8k, stdlib-wordpiece, bert:VOCAB, a tiktoken name (gpt2), or a file",
    )
    parser.add_argument(
        "--output", required=True, type=prefix, metavar="PREFIX", help="write PREFIX.bin and PREFIX.idx"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace PREFIX.bin and PREFIX.idx if they exist")
    parser.add_argument(
        "--part",
        type=part,
        metavar="I/N",
        help="tokenize part I (from 0) of N into PREFIX.part-I-of-N, unless it is there; dtmega merge joins the parts",
    )
    parser.add_argument(
        "--json-key",
        metavar="KEY",
        help="JSON key or parquet column of the text (default text), or of the list of messages (default: found)",
    )
    parser.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document token")
    parser.add_argument(
        "--prepend-bos", action="store_true", help="begin each document with the tokenizer's own bos_token"
    )
    parser.add_argument(
        "--split-documents",
        type=places_to_cut,
        metavar="WHERE",
        help="cut .txt files, one document each, at blank lines (blank-lines) or every N tokens (a number)",
    )
    parser.add_argument(
        "--split-sentences",
        nargs="?",
        const=PROSE,
        choices=(PROSE, BLOCKS),
        help="for BERT: one sequence per sentence (prose, the default), or per block between blank lines (blocks)",
    )
    parser.add_argument(
        "--kind",
        choices=("txt", "jsonl"),
        help="format of all files, whatever their suffix (default: by suffix; stdin is txt)",
    )
    parser.add_argument(
        "--encoding",
        type=encoding,
        default="utf-8",
        metavar="NAME",
        help="encoding of the text: latin-1, cp1252, utf-16, gb18030, ... (default %(default)s)",
    )
    parser.add_argument(
        "--workers",
        type=integer(1),
        default=_n_cpus(),
        metavar="N",
        help="processes (default: one per CPU, here %(default)s)",
    )
    parser.add_argument(
        "--strict", action="store_true", help="stop at the first malformed record instead of skipping it with a warning"
    )
    _add_chat_arguments(parser)


def _add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("conversations")
    group.add_argument(
        "--chat",
        action="store_true",
        help="a line of JSON is a conversation: messages, conversations (ShareGPT), prompt and completion, or "
        "instruction and output",
    )
    group.add_argument(
        "--chat-template",
        type=local_path,
        metavar="FILE",
        help="the tokenizer's chat template with {%% generation %%} markers, which must make the same text; or any "
        f"template if the tokenizer has none ({TURNS}: the shipped one, which dtmega's own tokenizers have)",
    )
    group.add_argument(
        "--train-on",
        choices=(ALL, ASSISTANT, LAST),
        help="the turns that bear loss: all text, each of the assistant (the default), or its last",
    )
    group.add_argument(
        "--roles",
        nargs="+",
        type=role,
        metavar="NAME=ROLE",
        help="roles by the names that the records have for them, such as bot=assistant",
    )
    group.add_argument(
        "--skip-empty",
        action="store_true",
        help="leave out and count conversations without a token to learn, which otherwise are an error",
    )


def command(args: argparse.Namespace) -> int:
    """Tokenize the input.

    Raises:
        ValueError: an option conflicts with `--chat` or needs `--chat`.
    """
    if not args.chat:
        _refuse(args, ("chat_template", "train_on", "roles", "skip_empty"), "without --chat")
        return write_output(tokenize.write, args)
    _refuse(args, ("append_eod", "prepend_bos", "split_documents", "split_sentences"), "with --chat")
    args.train_on = args.train_on or ASSISTANT
    args.roles = dict(args.roles or [])
    return write_output(conversations.write, args)


def _refuse(args: argparse.Namespace, names: tuple[str, ...], when: str) -> None:
    """Refuse options that do not apply.

    Raises:
        ValueError: the command line gives an option in `names`.
    """
    for name in names:
        if getattr(args, name):
            raise ValueError(f"--{name.replace('_', '-')} means nothing {when}")


def _n_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
