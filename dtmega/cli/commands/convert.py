"""`dtmega convert`: converts weights between the formats of dtmega, Hugging Face and Megatron.

dtmega convert --from dtmega runs/bloom --to hf export/bloom --dtype bfloat16
dtmega convert --from hf bloom-560m --to dtmega weights/bloom-560m
dtmega convert --from megatron checkpoints --to hf export/gpt
"""

from __future__ import annotations

import argparse
from typing import Any

from dtmega.cli.commands.arguments import integer, local_path, path
from dtmega.cli.commands.endings import explained
from dtmega.distributed import exit_codes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pair: dict[str, Any] = {"nargs": 2, "type": path, "required": True, "metavar": ("FORMAT", "PATH")}
    parser.add_argument(
        "--from",
        dest="source",
        help="format and path of the source; hf, dtmega (a checkpoint or a run), dcp or megatron",
        **pair,
    )
    parser.add_argument("--to", dest="target", help="format and path of the output; dtmega, hf or megatron", **pair)
    parser.add_argument(
        "--config",
        type=local_path,
        default="",
        metavar="FILE",
        help="a TOML whose [model] describes the weights (required for dcp)",
    )
    parser.add_argument(
        "--vocab-size",
        type=integer(1),
        default=0,
        metavar="N",
        help="from megatron: size of the vocabulary without padding",
    )
    parser.add_argument(
        "--average-copies",
        action="store_true",
        help="from megatron: average copies of a tensor that differ between tensor-parallel ranks, instead of refusing",
    )
    parser.add_argument("--prefix", default="", help="from dcp: prefix of the parameters' names, such as 'model.'")
    parser.add_argument(
        "--tokenizer",
        type=local_path,
        default="",
        metavar="SPEC",
        help="to hf, or from megatron: a tokenizer.json, or a name as in [data] tokenizer (default: the source's)",
    )
    parser.add_argument(
        "--original",
        type=path,
        default="",
        metavar="DIR",
        help="from a run on a Hugging Face model, or with frozen weights: the directory that it began with, if it has "
        "moved",
    )
    parser.add_argument(
        "--merge",
        action="store_true",
        help="from a run with adapters: add them to the weights; without this, to hf writes a folder for peft",
    )
    parser.add_argument(
        "--dtype", default="", help="to hf or megatron: float32, float16 or bfloat16 (default: the source's)"
    )
    parser.add_argument(
        "--allow-nonfinite",
        nargs="+",
        default=[],
        metavar="TENSOR",
        help="tensors that may contain NaN or infinity, or overflow in --dtype; without this they are refused",
    )
    parser.add_argument(
        "--format",
        choices=("core", "legacy"),
        default="",
        help="to megatron: core, for the models of megatron-core; legacy, for Megatron-LM's own until 2025 and for "
        "BigScience's (default: core for gpt and llama, else legacy)",
    )
    parser.add_argument(
        "--tp", type=integer(1), default=1, help="to megatron, legacy: tensor-parallel ranks (default %(default)s)"
    )
    parser.add_argument(
        "--pp", type=integer(1), default=1, help="to megatron, legacy: pipeline stages (default %(default)s)"
    )


def command(args: argparse.Namespace) -> int:
    from dtmega.cli.convert.conversion import convert
    from dtmega.distributed.agreement import Refused, Startup

    try:
        convert(args, Startup(program="dtmega convert", explain=lambda error, what: explained(error)))
    except Refused as refused:
        return refused.exit_code
    return exit_codes.DONE
