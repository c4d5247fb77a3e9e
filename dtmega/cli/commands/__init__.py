"""The subcommands of `dtmega`, one module per subcommand: `commands/NAME.py`, with `_` for each `-`. A module has:

    __doc__                 a line about the command, followed by the examples that `--help` shows
    add_arguments(parser)   adds the command's options
    command(args) -> int    runs the command and returns the exit code, or raises an error
    TAKES_FLAGS             (optional) options whose value may begin with a dash
    TAKES_KEYS              (optional) True if the command accepts every configuration key; `args.keys` then holds the
                            keys that the command line sets

`__main__.py` prints a command's error on one line. A command's module is imported only if the command line names that
command. A module imports at its top level only the code that its options need, so that `--help` and errors about
options do not wait for torch.

    arguments.py      option types, and one-line error messages
    conversation.py   conversations for `dtmega generate --chat`, and the input loop for `--interactive`
    endings.py        message and exit code of an error that ends a command
    used.py           options that choose a trained model, and a function that loads the model
"""

from __future__ import annotations

import argparse
import importlib
from types import ModuleType

from dtmega import __version__
from dtmega.cli.commands.arguments import Parser, with_joined_values, without_keys

# Command name -> the command's line in `--help`.
COMMANDS = {
    # `train` is here only for the list of commands: config/ defines the options of a run, and __main__.py starts the
    # run.
    "train": "train a model; `dtmega train --help` lists every key of a run",
    "plan": "tell before a run whether it fits on N devices, what it sends, how long it takes; needs no GPU",
    "tokenize": "turn text files into a corpus for training (.bin/.idx)",
    "merge": "join several corpora (.bin/.idx) into one",
    "generate": "sample text from a run's newest checkpoint, or from any other",
    "evaluate": "score a run's checkpoint on tasks of lm-evaluation-harness",
    "convert": "convert weights between dtmega, Hugging Face and Megatron",
    "inspect": "show what a checkpoint holds, verify it, or compare two",
    "replay": "compute steps of a run with [run] exact again, and find the first bit that differs",
    "verify-plan": "check the tensor-parallel plan of a Hugging Face model",
    "from-megatron": "translate a Megatron command or launch script into a TOML file",
    "report": "draw a run as one HTML page with curves, layout and sample; compare several runs",
    "groups": "list the ranks of every process group of a mesh, as Megatron does",
}


FIRST = """Try:
  dtmega train --config bloom.toml
  dtmega report runs/bloom
  dtmega generate runs/bloom --prompt "def "

`dtmega COMMAND --help` lists the options of a command, with examples."""


def module_of(name: str) -> ModuleType:
    """Import the module of a command."""
    return importlib.import_module(f"dtmega.cli.commands.{name.replace('-', '_')}")


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse a command line into `command` and its options. An invalid option ends the process with exit code 2."""
    form = argparse.RawDescriptionHelpFormatter
    about = "Train BLOOM, GPT, Llama, BERT, T5 and Hugging Face models, on one CPU or many GPUs."
    parser = Parser(prog="dtmega", description=about, epilog=FIRST, formatter_class=form)
    parser.add_argument("--version", action="version", version=f"dtmega {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    args = argparse.Namespace()
    for name, line in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=line, description=line, formatter_class=form)
        # Only the named command's module is imported.
        if argv[:1] == [name] != ["train"]:
            module = module_of(name)
            module.add_arguments(subparser)
            argv = with_joined_values(argv, getattr(module, "TAKES_FLAGS", ()))
            if getattr(module, "TAKES_KEYS", False):
                argv, args.keys = without_keys(argv)
            subparser.epilog = "\n  ".join(["examples:", *examples(name)])
    return parser.parse_args(argv, args)


def examples(name: str) -> list[str]:
    """The example command lines in the docstring of a command's module."""
    lines = (module_of(name).__doc__ or "").splitlines()[1:]
    return [line for line in lines if line]
