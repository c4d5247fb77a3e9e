"""`dtmega generate`: samples text from the model in a run's checkpoint, to continue prompts or hold a conversation.

dtmega generate runs/bloom --prompt "def " --prompt "class "
dtmega generate runs/bloom --step 200 --prompt - < prompt.txt
dtmega generate runs/bloom --prompts lines.txt --batch-size 16
dtmega generate runs/sft --chat --prompt "What is 4 + 3?"
dtmega generate runs/sft --chat --interactive
torchrun --nproc-per-node 2 -m dtmega generate runs/bloom --mesh.tp 2 --prompt "def "
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtmega.cli.commands.arguments import integer, local_path, number, path, temperature
from dtmega.cli.commands.conversation import Conversation, print_on_first, talk
from dtmega.cli.commands.used import add_checkpoint_options, open_run, startup_of
from dtmega.distributed import exit_codes

if TYPE_CHECKING:
    from dtmega.data.tokenizers.chat import Chat
    from dtmega.inference.trained import TrainedModel

# Options that only some model families read. A family refuses any option that it does not read.
SAMPLE_OPTIONS = ("tokens", "temperature", "top_k", "top_p", "seed")
SEPARATOR = "---"  # line between the samples of two prompts
STDIN = "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path",
        type=path,
        nargs="?",
        metavar="RUN",
        help="a run directory, such as runs/bloom (its newest checkpoint), or the folder of one checkpoint",
    )
    parser.add_argument(
        "--run",
        type=path,
        metavar="PATH",
        help="the same as RUN; not under torchrun, which takes it for an option of its own",
    )
    add_checkpoint_options(parser)
    parser.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="text to continue, or - for stdin; for a BERT a text with [MASK] to fill. Can be repeated",
    )
    parser.add_argument(
        "--prompts", type=local_path, metavar="FILE", help="a file with one prompt per line, or - for stdin"
    )
    parser.add_argument(
        "--batch-size",
        type=integer(1),
        default=8,
        metavar="N",
        help="prompts computed at a time; more is faster and takes more memory (default %(default)s)",
    )
    parser.add_argument("--interactive", action="store_true", help="answer each line of stdin, as one more prompt")
    parser.add_argument(
        "--chat",
        action="store_true",
        help="take each prompt for a message of a user, and print the answer; lines of --interactive are the messages "
        "of one conversation",
    )
    parser.add_argument(
        "--chat-template",
        type=local_path,
        metavar="FILE",
        help="with --chat: a template instead of the tokenizer's own, the one that the model was trained with",
    )
    # Each family has its own defaults and refuses options that it does not read (`Show.options`).
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
    from dtmega.distributed.agreement import Refused
    from dtmega.inference.trained import settle_as_rank_0

    sample_options = {name: value for name in SAMPLE_OPTIONS if (value := getattr(args, name)) is not None}
    try:
        startup = startup_of("dtmega generate")
        with startup.step("options"):
            _check_arguments(args)
        with startup.step("prompts") as step:
            if startup.rank == 0:
                step.send = _prompts(args)
        trained = open_run(args.path or args.run, args, startup)
        with startup.step("options of the model"):
            _check_sample_options(sample_options, trained)
            chat = _start_chat(args, trained, startup.rank) if args.chat else None
    except Refused as refused:
        return refused.exit_code
    options = {**sample_options, **families.sample_options(trained.cfg)}
    if startup.size > 1:
        options["settle"] = settle_as_rank_0

    def sample(prompts: list[str]) -> list[str]:
        if chat is not None:
            return Conversation(trained, chat, options).first_answers(prompts)
        return trained.show.texts(trained.model, trained.tokenizer, prompts, **options)

    try:
        _print_samples(sample, step.received, args.batch_size)
        if args.interactive:
            talk((lambda line: sample([line])[0]) if chat is None else Conversation(trained, chat, options))
    finally:
        if chat is not None:
            chat.close()
    return exit_codes.DONE


def _check_arguments(args: argparse.Namespace) -> None:
    """Check that the options name exactly one run and either give a prompt or start a conversation.

    Raises:
        ValueError: the options name no run or two runs, give no prompt, or give a chat template without `--chat`.
    """
    if (args.path is None) == (args.run is None):
        raise ValueError("expected one run: dtmega generate RUN, or --run PATH")
    if not args.prompt and not args.prompts and not args.interactive:
        raise ValueError("there is no prompt: --prompt TEXT, --prompt - for stdin, or --interactive")
    if args.chat_template and not args.chat:
        raise ValueError("a template is for conversations: expected --chat with --chat-template")


def _check_sample_options(sample_options: Mapping[str, Any], trained: TrainedModel) -> None:
    """Check that the model's family reads each of the given options.

    Raises:
        ValueError: an option has no meaning for the model.
    """
    for name in sample_options.keys() - {*trained.show.options}:
        option = f"--{name.replace('_', '-')}"
        raise ValueError(f"{option} means nothing to a model of name = '{trained.cfg.model.name}'")


def _start_chat(args: argparse.Namespace, trained: TrainedModel, rank: int) -> Chat:
    """Make the `Chat` with the template that the command line names, or else with the tokenizer's own template.

    Rank 0 also starts the process that runs the template.

    Raises:
        ValueError: the model does not continue text, there is no template, the template cannot be read, or
            transformers is not installed.
    """
    from dtmega.data.tokenizers.chat import Chat, find_template
    from dtmega.models.show import CONTINUATION

    if trained.show is not CONTINUATION:
        raise ValueError(f"--chat means nothing to a model of name = '{trained.cfg.model.name}'")
    chat = Chat(trained.tokenizer, find_template(trained.tokenizer, args.chat_template), trained.end_ids)
    if rank == 0:
        chat.start()
    return chat


def _prompts(args: argparse.Namespace) -> list[str]:
    """The prompts given with --prompt, followed by the prompts in the file given with --prompts.

    Raises:
        ValueError: the --prompts file is not UTF-8 or has no prompt.
        OSError: the file cannot be read.
    """
    prompts = [sys.stdin.read() if prompt == STDIN else prompt for prompt in args.prompt or []]
    if args.prompts:
        prompts += _lines(args.prompts)
    return prompts


def _lines(file: str) -> list[str]:
    """The non-empty lines of a file, or of stdin.

    Raises:
        ValueError: the text is not UTF-8, or all lines are empty.
        OSError: the file cannot be read.
    """
    try:
        text = sys.stdin.read() if file == STDIN else Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: {error} (--prompts)") from None
    lines = [line for line in text.split("\n") if line.strip()]
    if not lines:
        raise ValueError(f"{file} has no line with a prompt (--prompts)")
    return lines


def _print_samples(sample: Callable[[list[str]], list[str]], prompts: list[str], batch_size: int) -> None:
    """Print a sample for each prompt, `batch_size` prompts at a time.

    Args:
        sample: function that returns one sample per prompt of a batch.
        prompts: all prompts.
        batch_size: number of prompts to compute together.

    Raises:
        ValueError: a prompt cannot be continued; the message begins with the failed batch, as in "prompts 9 to 16: ".
    """
    before = ""
    for first in range(0, len(prompts), batch_size):
        batch = prompts[first : first + batch_size]
        try:
            texts = sample(batch)
        except ValueError as error:
            raise ValueError(f"{_numbers(first, batch)}{error}") from None
        for text in texts:
            print_on_first(before + text)
            before = f"{SEPARATOR}\n"


def _numbers(first: int, batch: Sequence[str]) -> str:
    """The start of an error message about a batch, such as "prompts 9 to 16: "; "" if the batch has only one prompt."""
    return f"prompts {first + 1} to {first + len(batch)}: " if len(batch) > 1 else ""
