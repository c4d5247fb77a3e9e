"""`dtmega from-megatron`: translates a Megatron command, or a launch script that contains one, into TOML on stdout.

dtmega from-megatron pretrain_gpt.sh
dtmega from-megatron tr11-176B-ml.slurm --set SLURM_NNODES=48 --allow-missing --deepspeed_config
dtmega from-megatron 'pretrain_bert.py --num-layers 24 --hidden-size 1024 --num-attention-heads 16'
"""

from __future__ import annotations

import argparse

from dtmega.cli.commands.arguments import path
from dtmega.distributed import exit_codes
from dtmega.files import console, urls

TAKES_FLAGS = ("--allow-missing",)  # options whose value may begin with a dash


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        type=path,
        help="file of a launch script, which is read but never run, or a command in quotes",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="value of a variable that the script does not set; a number as NAME is one of the script's arguments, "
        "# is the number of arguments",
    )
    parser.add_argument(
        "--allow-missing",
        action="append",
        default=[],
        metavar="FLAG",
        help="a flag, or a key as section.key, that the configuration may lack",
    )
    parser.add_argument(
        "--original",
        choices=("megatron-lm", "megatron-deepspeed", "megatron-core"),
        default="",
        help="program that the command is for, if its flags do not tell: megatron-lm is NVIDIA's until November 2023, "
        "megatron-core is NVIDIA's since then",
    )
    parser.add_argument(
        "--command",
        dest="number",
        type=int,
        default=0,
        metavar="N",
        help="number of the command to translate, from 1, if the script runs different ones",
    )


def command(args: argparse.Namespace) -> int:
    from dtmega.interop.megatron.launch.translate import translate

    given: dict[str, str] = {}
    for option in args.set:
        name, equals, value = option.partition("=")
        if not equals or not name:
            raise ValueError(f"--set {option:.80}: expected NAME=VALUE")
        given[name] = value
    if args.number < 0:
        raise ValueError(f"--command {args.number}: expected a number from 1")
    translation = translate(args.source, given, args.allow_missing, args.original, args.number)
    written = (translation.toml, *translation.notes, *translation.left_out, *translation.missing)
    if any(map(urls.holds_credentials, written)):
        raise ValueError("a URL in the command holds credentials: expected them in the environment")
    print(translation.toml, end="")
    for line in translation.notes:
        console.say(line)
    for line in translation.left_out:
        console.say(f"not carried over: {line}")
    for line in translation.missing:
        console.say(f"missing: {line}")
    if translation.open:
        console.say(
            f"{len(translation.open)} settings are open: the configuration is refused until [run] untranslated is empty"
        )
        return exit_codes.FAILED
    return exit_codes.DONE
