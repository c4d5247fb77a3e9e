"""The subcommands of `dtmega`, a module each, all of one shape: `commands/NAME.py`, with `_` for a `-` of the name.

    __doc__                 a line, and below it examples, which `--help` shows
    add_arguments(parser)   what the command takes
    command(args) -> int    do it, and return the exit code; whatever ends it early is raised

`__main__.py` says what was raised in one line. A module is imported when its command is named, and imports at its top
what its arguments need only: `--help` and the refusal of an option come without torch.

    arguments.py   types of options, and refusals in one line
    endings.py     line and exit code of what ends a command early
    used.py        which checkpoint of a run, and on which processes
"""

from __future__ import annotations

import argparse
import importlib
from types import ModuleType

from dtmega import __version__
from dtmega.commands.arguments import Parser

# Name -> its line of help.
COMMANDS = {
    "train": "a run: `train --help` lists its keys",  # whose options are the keys of config/: it never comes here
    "tokenize": "text files -> .bin/.idx",
    "merge": "several .bin/.idx -> one",
    "generate": "sample from a run's last checkpoint, or from any one",
    "evaluate": "a run's scores on tasks of lm-evaluation-harness",
    "convert": "weights to and from Hugging Face's format",
    "inspect": "what a checkpoint holds, whether it is intact, how two differ",
    "verify-plan": "is the sharding plan of a Hugging Face model right?",
    "from-megatron": "a Megatron command or launch script -> a TOML",
    "report": "a run as one page: curves, layout, sample; several are compared",
    "groups": "the ranks of every group of a mesh, as Megatron lists them",
}


FIRST = """A first hour:
  dtmega train --config bloom.toml
  dtmega report runs/bloom
  dtmega generate runs/bloom --prompt "def "

`dtmega COMMAND --help` has the options of a command, and examples."""


def module_of(name: str) -> ModuleType:
    """The module of a command."""
    return importlib.import_module(f"dtmega.commands.{name.replace('-', '_')}")


def parse(argv: list[str]) -> argparse.Namespace:
    """`command` and its arguments; ends the process with code 2 where one of them cannot be."""
    form = argparse.RawDescriptionHelpFormatter
    about = "Train a model, and do what comes before and after it."
    parser = Parser(prog="dtmega", description=about, epilog=FIRST, formatter_class=form)
    parser.add_argument("--version", action="version", version=f"dtmega {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, line in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=line, description=line, formatter_class=form)
        if argv[:1] == [name] != ["train"]:
            module_of(name).add_arguments(subparser)
            subparser.epilog = "\n  ".join(["examples:", *examples(name)])
    return parser.parse_args(argv)


def examples(name: str) -> list[str]:
    """The command lines in the docstring of a command's module."""
    lines = (module_of(name).__doc__ or "").splitlines()[1:]
    return [line for line in lines if line]
