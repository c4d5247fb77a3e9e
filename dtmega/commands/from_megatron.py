"""`dtmega from-megatron`: a Megatron command, or a launch script with one, -> a TOML on stdout.

dtmega from-megatron pretrain_gpt.sh
dtmega from-megatron 'pretrain_bert.py --num-layers 24 --hidden-size 1024 --num-attention-heads 16'
"""

from __future__ import annotations

import argparse

from dtmega import job, output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        help="file of a launch script, which is read but never run, or a command in quotes",
    )


def command(args: argparse.Namespace) -> int:
    from dtmega.megatron.translate import translate

    translation = translate(args.source)
    print(translation.toml, end="")
    for line in translation.left_out:
        output.say(f"not carried over: {line}")
    return job.DONE
