"""`dtmega {train, tokenize, generate, convert, ...}`: a run, and what is done before and after it.

Also `python -m dtmega COMMAND`, and on several processes `torchrun --nproc-per-node N -m dtmega train ...`.

Whatever ends a command early is one line on stderr and an exit code: 2 for what its user can correct, 1 for what broke
on the way (a full disk), 3 for a damaged checkpoint, 130 for Ctrl-C.
"""

from __future__ import annotations

import argparse
import errno
import sys
from collections.abc import Callable
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from dtmega import arguments, config, job, output
from dtmega.data import merge, tokenize

if TYPE_CHECKING:
    from dtmega.checkpoint.reader import Checkpoint

BROKEN = 1
INTERRUPTED = 130  # as shells say it: 128 + SIGINT
# A path that is not there, not of this kind, or not this user's; other errors are of the machine.
WRONG_PATH = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP, errno.ENAMETOOLONG),
    *(errno.EACCES, errno.EPERM, errno.EROFS),
}


def run() -> NoReturn:
    """Do what the command line says, and end this process with the exit code."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a sample in letters that the terminal does not have
    if sys.argv[1:2] == ["train"]:
        from dtmega import train

        train.command(sys.argv[2:])
    job.leave(main(sys.argv[1:]))  # Python's own exit would write again what could not be written


def main(argv: list[str]) -> int:
    """The exit code of a command other than `train`."""
    args = arguments.parse(argv)
    commands = {
        "tokenize": partial(_written, tokenize.write),
        "merge": partial(_written, merge.write),
        "generate": _generate,
        "convert": _convert,
        "inspect": _inspect,
        "verify-plan": _verify,
        "from-megatron": _from_megatron,
        "groups": _groups,
    }
    try:
        code = commands[args.command](args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever reads our output has left, as `| head` does
        return BROKEN
    except NothingWritten as stopped:
        message, code = _explained(stopped.error)
        message += f"; nothing was written to {args.output}"
    except (ValueError, OSError, KeyboardInterrupt) as error:
        message, code = _explained(error)
    output.say(f"dtmega {args.command}: {message}")
    return code


class NothingWritten(Exception):
    """A command has ended before any of its output stood under its name.

    Attributes:
        error: why.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


def _explained(error: BaseException) -> tuple[str, int]:
    """The line to say of an error, and the exit code."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", INTERRUPTED
    if isinstance(error, OSError):
        path = f"{error.filename}: " if error.filename is not None else ""
        message = path + error.strerror if error.strerror else str(error)
        return message, job.REFUSED if error.errno in WRONG_PATH else BROKEN
    return str(error), getattr(error, "exit_code", job.REFUSED)


def _written(write: Callable[[argparse.Namespace], str], args: argparse.Namespace) -> int:
    try:
        summary = write(args)
    except (ValueError, OSError, KeyboardInterrupt) as error:
        raise NothingWritten(error) from None
    print(summary)
    return job.DONE


def _generate(args: argparse.Namespace) -> int:
    # Imported here so that `tokenize` starts without torch.
    from dtmega import families, mesh
    from dtmega.checkpoint import manifest
    from dtmega.checkpoint.resume import open_checkpoint, state_of
    from dtmega.checkpoint.weights import Weights, load
    from dtmega.data.tokenizer import load_tokenizer

    checkpoint = open_checkpoint(args.run)
    of_run = Path(args.run, "config.toml")
    # One beside a checkpoint's tensors is a draft by `convert`, which may not know the tokenizer.
    is_run = of_run.is_file() and not Path(args.run, manifest.NAME).exists()
    cfg = config.read(of_run) if is_run else recorded_config(checkpoint)
    family = families.of(cfg.model)
    given = {name: value for name in arguments.SHOWN_BY if (value := getattr(args, name)) is not None}
    for name in given.keys() - {*family.show.options}:
        raise ValueError(f"--{name.replace('_', '-')} means nothing to a model of name = '{cfg.model.name}'")
    tokenizer = load_tokenizer(cfg.data.tokenizer)
    described = family.described(cfg.model, state_of(checkpoint).digest)
    model = family.build(described).to(mesh.pick_device(cfg.run.device))
    model.init_buffers(cfg.run.seed)
    named = ((model.full_name(name), parameter) for name, parameter in model.named_parameters())
    load(Weights(checkpoint), named, cfg.model.padded_vocab_size)
    of_data = {key: getattr(cfg.data, key) for key in family.show.reads}
    print(family.show.text(model, tokenizer, args.prompt, **given, **of_data))
    return job.DONE


def _inspect(args: argparse.Namespace) -> int:
    from dtmega.convert import inspect

    return inspect.main(args.checkpoint, args.other, verify=not args.quick)


def _convert(args: argparse.Namespace) -> int:
    from dtmega.convert import command
    from dtmega.startup import Refused, Startup

    startup = Startup(program="dtmega convert", explain=lambda error, what: _explained(error))
    try:
        command.main(args, startup)
    except Refused as refused:
        return refused.exit_code
    return job.DONE


def _verify(args: argparse.Namespace) -> int:
    from dtmega.plans.hf import command

    return command.verify_directory(
        Path(args.directory), args.tp, sequence_parallel=not args.no_sequence_parallel, generic=args.generic
    )


def _from_megatron(args: argparse.Namespace) -> int:
    from dtmega.megatron.translate import translate

    translation = translate(args.source)
    print(translation.toml, end="")
    for line in translation.left:
        output.say(f"not carried over: {line}")
    return job.DONE


def _groups(args: argparse.Namespace) -> int:
    from dtmega import mesh

    sizes = {axis: getattr(args, axis) for axis in mesh.AXES}
    print(mesh.describe(mesh.resolve(config.Mesh.model_construct(**sizes), args.world)))
    return job.DONE


def recorded_config(checkpoint: Checkpoint) -> config.Config:
    """The configuration of the run that saved a checkpoint, as it is recorded there.

    Raises:
        ValueError: it is of weights only, which `convert` has made: nothing says how text becomes tokens.
    """
    from dtmega.checkpoint.resume import state_of

    recorded = state_of(checkpoint).config
    if "data" not in recorded:
        raise ValueError(f"{checkpoint.path} holds weights only, and no tokenizer: name a run, or a checkpoint of one")
    return config.validate(recorded, checkpoint.path)


if __name__ == "__main__":
    run()
