"""The command line `dtmega {train, tokenize, generate, convert, ...}`.

`python -m dtmega COMMAND` is equivalent to `dtmega COMMAND`. To train with several processes, use `torchrun
--nproc-per-node N -m dtmega train ...`. Each command except `train` is a module in `commands/`. If an error ends a
command, the command prints the error as one line on stderr and exits with a code other than 0.
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
    """Run the command given on the command line, then exit with its exit code."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # escape any character that the terminal cannot show
    if sys.argv[1:2] == ["train"]:
        entry.train(sys.argv[2:])
    entry.tell_of_faults()
    process.leave(main(sys.argv[1:]))  # Python's own exit would try to flush a broken stdout again


def main(argv: list[str]) -> int:
    """Run a command other than `train`. Returns the exit code."""
    args = commands.parse(argv)
    try:
        code = commands.module_of(args.command).command(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of our output has exited, as `| head` does
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
