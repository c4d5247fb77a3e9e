"""`dtmega from-megatron`: translates a Megatron command, or a launch script that contains one, into TOML on stdout.

dtmega from-megatron pretrain_gpt.sh
dtmega from-megatron 'pretrain_bert.py --num-layers 24 --hidden-size 1024 --num-attention-heads 16'
"""

from __future__ import annotations

import argparse

from dtmega.distributed import exit_codes
from dtmega.files import console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        help="a launch script, which is read but never run, or a command in quotes",
    )


def command(args: argparse.Namespace) -> int:
    from dtmega.interop.megatron.translate import translate

    translation = translate(args.source)
    print(translation.toml, end="")
    for line in translation.left_out:
        console.say(f"not carried over: {line}")
    return exit_codes.DONE
