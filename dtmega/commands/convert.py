"""`dtmega convert`: weights from one house into another.

dtmega convert --from dtmega runs/bloom --to hf export/bloom --dtype bfloat16
dtmega convert --from hf bloom-560m --to dtmega weights/bloom-560m
dtmega convert --from megatron checkpoints --to hf export/gpt
"""

from __future__ import annotations

import argparse
from typing import Any

from dtmega import job
from dtmega.commands.arguments import integer
from dtmega.commands.endings import explained


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pair: dict[str, Any] = {"nargs": 2, "required": True, "metavar": ("FORMAT", "PATH")}
    parser.add_argument(
        "--from", dest="source", help="hf, dtmega (a checkpoint or a run), dcp or megatron, and where", **pair
    )
    parser.add_argument("--to", dest="target", help="dtmega, hf or megatron, and where", **pair)
    parser.add_argument("--config", default="", help="a TOML whose [model] the weights are of (needed for dcp)")
    parser.add_argument(
        "--vocab-size", type=integer(1), default=0, help="from megatron: ids of the tokenizer, without rows of padding"
    )
    parser.add_argument(
        "--average-copies",
        action="store_true",
        help="from megatron: where the tensor-parallel ranks' copies of a tensor have drifted apart, take their mean",
    )
    parser.add_argument("--prefix", default="", help="dcp: what stands before the parameters' names, such as 'model.'")
    parser.add_argument(
        "--tokenizer", default="", help="to hf: tokenizer.json or what to make one of (default: the source's)"
    )
    parser.add_argument(
        "--original", default="", help="where the directory of the run's [model] path is, if it has moved"
    )
    parser.add_argument(
        "--dtype", default="", help="to hf, megatron: float32, float16 or bfloat16 (default: the source's)"
    )
    parser.add_argument(
        "--allow-nonfinite",
        nargs="+",
        default=[],
        metavar="TENSOR",
        help="tensors that may hold NaN and infinities, or overflow in --dtype; any other tensor is refused for them",
    )
    parser.add_argument("--tp", type=integer(1), default=1, help="to megatron: tensor-parallel ranks (%(default)s)")
    parser.add_argument("--pp", type=integer(1), default=1, help="to megatron: pipeline stages (%(default)s)")


def command(args: argparse.Namespace) -> int:
    from dtmega.convert.conversion import convert
    from dtmega.startup import Refused, Startup

    try:
        convert(args, Startup(program="dtmega convert", explain=lambda error, what: explained(error)))
    except Refused as refused:
        return refused.exit_code
    return job.DONE
