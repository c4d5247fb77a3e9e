"""`dtmega {train, tokenize, generate, convert, ...}`: a run, and what is done before and after it.

Also `python -m dtmega COMMAND`, and on several processes `torchrun --nproc-per-node N -m dtmega train ...`. All
commands but `train` are modules of `commands/`. Whatever ends one early is one line on stderr and an exit code.
"""

from __future__ import annotations

import sys
from io import TextIOWrapper
from typing import NoReturn

from dtmega.cli import commands, entry
from dtmega.cli.commands import endings
from dtmega.distributed import process
from dtmega.files import console


def run() -> NoReturn:
    """Do what the command line says, and end this process with the exit code."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a sample in letters that the terminal does not have
    if sys.argv[1:2] == ["train"]:
        entry.train(sys.argv[2:])
    entry.tell_of_faults()
    process.leave(main(sys.argv[1:]))  # Python's own exit would write again what could not be written


def main(argv: list[str]) -> int:
    """The exit code of a command other than `train`."""
    args = commands.parse(argv)
    try:
        code = commands.module_of(args.command).command(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever reads our output has left, as `| head` does
        return endings.BROKEN
    except endings.NothingWritten as stopped:
        message, code = endings.explained(stopped.error)
        message += f"; nothing was written to {args.output}"
    except (ValueError, OSError, KeyboardInterrupt) as error:
        message, code = endings.explained(error)
    console.say(f"dtmega {args.command}: {message}")
    process.tell_agent(message)
    return code


if __name__ == "__main__":
    run()
