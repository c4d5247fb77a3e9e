"""`dtmega generate`: what a model makes of prompts, or says in a conversation, from any checkpoint of a run.

dtmega generate runs/bloom --prompt "def " --prompt "class "
dtmega generate runs/bloom --step 200 --prompt - < prompt.txt
dtmega generate runs/bloom --prompts lines.txt --batch-size 16
dtmega generate runs/chat --interactive
torchrun --nproc-per-node 2 -m dtmega generate runs/bloom --mesh.tp 2 --prompt "def "
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from io import TextIOWrapper, UnsupportedOperation
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dtmega.cli.commands.arguments import integer, number, temperature
from dtmega.cli.commands.used import add_checkpoint_options, open_run, startup_of
from dtmega.distributed import exit_codes

if TYPE_CHECKING:
    from dtmega.data.tokenizers.chat import Chat, Message
    from dtmega.inference.trained import TrainedModel

Told = TypeVar("Told")

SHOWN_BY = ("tokens", "temperature", "top_k", "top_p", "seed")  # options that are the families'
BETWEEN = "---"  # the samples of several prompts
STDIN = "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path",
        nargs="?",
        metavar="RUN",
        help="a run directory, such as runs/bloom (its newest checkpoint), or the folder of one checkpoint",
    )
    parser.add_argument(
        "--run", metavar="PATH", help="the same as RUN (not under torchrun, which has an option of this name)"
    )
    add_checkpoint_options(parser)
    parser.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="text to continue, or - for stdin; for a BERT a text with [MASK] to fill. Can be repeated",
    )
    parser.add_argument("--prompts", metavar="FILE", help="a file with one prompt per line, or - for stdin")
    parser.add_argument(
        "--batch-size",
        type=integer(1),
        default=8,
        metavar="N",
        help="prompts computed at a time; more is faster and takes more memory (default %(default)s)",
    )
    parser.add_argument(
        "--interactive",
        action="store_true",
        help="read a prompt from each line of stdin; a conversation if the tokenizer has a chat template",
    )
    # Each family has its own defaults, and refuses what it does not read (`Show.options`).
    parser.add_argument("--tokens", type=integer(1), help="tokens to generate at most (default 128)")
    parser.add_argument("--temperature", type=temperature, help="0 = always the most probable token (default 0.8)")
    parser.add_argument(
        "--top-k",
        type=integer(0),
        help="sample from the K most probable tokens (default 50); for a BERT, list K per [MASK] (default 5); 0 = all",
    )
    parser.add_argument(
        "--top-p",
        type=number(0, 1),
        help="sample from the most probable tokens with this total probability; 1 = all (default 1)",
    )
    parser.add_argument("--seed", type=integer(0, 2**63 - 1), help="seed of the sample (default 0)")


def command(args: argparse.Namespace) -> int:
    from dtmega import families
    from dtmega.data.tokenizers.chat import Chat
    from dtmega.distributed.agreement import Refused
    from dtmega.inference.trained import settle_as_rank_0
    from dtmega.models.show import CONTINUATION

    given = {name: value for name in SHOWN_BY if (value := getattr(args, name)) is not None}
    chat = None
    try:
        startup = startup_of("dtmega generate")
        with startup.step("options"):
            if (args.path is None) == (args.run is None):
                raise ValueError("expected one run: dtmega generate RUN, or --run PATH")
            if not args.prompt and not args.prompts and not args.interactive:
                raise ValueError("there is no prompt: --prompt TEXT, --prompt - for stdin, or --interactive")
        with startup.step("prompts") as step:
            if startup.rank == 0:
                step.tell = [*_given(args.prompt or []), *(_lines(args.prompts) if args.prompts else [])]
        trained = open_run(args.path or args.run, args, startup)
        with startup.step("options of the model"):
            for name in given.keys() - {*trained.show.options}:
                option = f"--{name.replace('_', '-')}"
                raise ValueError(f"{option} means nothing to a model of name = '{trained.cfg.model.name}'")
            if args.interactive and trained.show is CONTINUATION:
                chat = Chat.beside(trained.tokenizer)
                if chat is not None and startup.rank == 0:
                    chat.start()
    except Refused as refused:
        return refused.exit_code
    options = {**given, **families.sample_options(trained.cfg)}
    if startup.size > 1:
        options["settle"] = settle_as_rank_0

    def shown(prompts: list[str]) -> list[str]:
        return trained.show.texts(trained.model, trained.tokenizer, prompts, **options)

    before = ""
    for first in range(0, len(step.told), args.batch_size):
        prompts = step.told[first : first + args.batch_size]
        try:
            texts = shown(prompts)
        except ValueError as error:
            raise ValueError(f"{_numbers(first, prompts)}{error}") from None
        for text in texts:
            _print(before + text)
            before = f"{BETWEEN}\n"
    if args.interactive:
        try:
            _talk((lambda line: shown([line])[0]) if chat is None else _Conversation(trained, chat, options))
        finally:
            if chat is not None:
                chat.close()
    return exit_codes.DONE


def _given(prompts: Sequence[str]) -> Iterator[str]:
    """The texts of --prompt; each - is what stdin has."""
    for prompt in prompts:
        yield sys.stdin.read() if prompt == STDIN else prompt


def _lines(file: str) -> list[str]:
    """The lines of a file, or of stdin, but empty ones.

    Raises:
        ValueError: it is not UTF-8, or has none.
        OSError: it cannot be read.
    """
    try:
        text = sys.stdin.read() if file == STDIN else Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: {error} (--prompts)") from None
    lines = [line for line in text.split("\n") if line.strip()]
    if not lines:
        raise ValueError(f"{file} has no line with a prompt (--prompts)")
    return lines


def _numbers(first: int, prompts: Sequence[str]) -> str:
    """Name the prompts that cannot be, as far as they are known, where there are several: prompts 9 to 16."""
    return f"prompts {first + 1} to {first + len(prompts)}: " if len(prompts) > 1 else ""


class _Conversation:
    """Answer one message after the other, each with all that was said before it."""

    def __init__(self, trained: TrainedModel, chat: Chat, options: Mapping[str, Any]) -> None:
        from dtmega.models.generate import Sampling

        options = dict(options)
        self._trained, self._chat = trained, chat
        self._n_tokens = options.pop("tokens", 512)
        self._sampling = Sampling(trained.tokenizer.vocab_size, chat.end_ids, **options)
        self._messages: list[Message] = []

    def __call__(self, text: str) -> str:
        from dtmega.models.generate import generate

        asked = [*self._messages, {"role": "user", "content": text}]
        # One process has the template: limits of time are not the same everywhere.
        ids = _from_first(lambda: self._chat.ids(asked))
        said = generate(self._trained.model, ids, self._n_tokens, self._sampling)
        answer = self._trained.tokenizer.decode(said)
        self._messages = [*asked, {"role": "assistant", "content": answer}]
        return answer


def _talk(answer: Callable[[str], str]) -> None:
    """Answer each line of stdin. One that nothing can be said to is not the end."""
    if isinstance(sys.stdin, TextIOWrapper):
        with suppress(UnsupportedOperation):  # all of it has been read, by --prompt -
            sys.stdin.reconfigure(errors="surrogateescape")  # bytes that are no text become lone surrogates
    while line := _from_first(_read_line):
        text = line.rstrip("\n")
        if not text:
            continue
        try:
            _print(answer(_utf8(text)))
        except ValueError as error:  # the same on all processes
            _print(f"({error})")


def _read_line() -> str:
    """A line with its end; '' where the input ends."""
    if sys.stdin.isatty():
        print("> ", end="", flush=True)
    return sys.stdin.readline()


def _utf8(text: str) -> str:
    """The text.

    Raises:
        ValueError: it has bytes that are no UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        byte = ord(text[error.start]) & 0xFF
        raise ValueError(f"the line is not UTF-8: byte 0x{byte:02x} after {error.start} characters") from None
    return text


def _from_first(read: Callable[[], Told]) -> Told:
    """Read on the first process; all of them return it.

    Raises:
        ValueError: reading has raised it; on all of them.
    """
    from dtmega import mesh

    if mesh.world_size() == 1:
        return read()
    import torch.distributed as dist

    told: list[Any] = [None, None]
    if mesh.rank() == 0:
        try:
            told[0] = read()
        except ValueError as error:
            told[1] = str(error)
    dist.broadcast_object_list(told, src=0)
    found, refused = told
    if refused is not None:
        raise ValueError(refused)
    return found


def _print(text: str) -> None:
    from dtmega import mesh

    if mesh.rank() == 0:
        print(text, flush=True)
