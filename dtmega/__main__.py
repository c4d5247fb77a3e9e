"""`python -m dtmega {tokenize, generate, convert, inspect, verify-plan}`: what is done before and after training."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli

from dtmega import config, job, output
from dtmega.data import tokenize

if TYPE_CHECKING:
    from dtmega.checkpoint.dcp import Checkpoint


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m dtmega", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    table: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]] = {
        "tokenize": ("text files -> .bin/.idx", tokenize.add_arguments, tokenize.main),
        "generate": ("sample from a run's last checkpoint", _generate_arguments, _generate),
        "convert": ("weights to and from Hugging Face's format", _convert_arguments, _convert),
        "inspect": ("what a checkpoint holds, whether it is intact, how two differ", _inspect_arguments, _inspect),
        "verify-plan": ("is the sharding plan of a Hugging Face model right?", _verify_arguments, _verify),
    }
    for name, (line, add_arguments, _) in table.items():
        add_arguments(commands.add_parser(name, help=line, description=line))
    args = parser.parse_args(argv)
    try:
        return table[args.command][2](args)
    except ValueError as error:
        output.say(f"dtmega {args.command}: {error}")
        return getattr(error, "exit_code", job.REFUSED)


def _generate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--run",
        required=True,
        metavar="PATH",
        help="a run directory, such as runs/bloom (its newest checkpoint), or the folder of one checkpoint",
    )
    parser.add_argument("--prompt", required=True, help="text to go on from")
    parser.add_argument("--tokens", type=int, default=128, help="how many to draw (default 128)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 = always the most probable (default 0.8)")
    parser.add_argument("--top-k", type=int, default=50, help="draw from the k most probable; 0 = all (default 50)")
    parser.add_argument("--seed", type=int, default=0, help="another seed, another sample (default 0)")


def _generate(args: argparse.Namespace) -> int:
    # Imported here so that `tokenize` starts without torch.
    from dtmega import mesh, models
    from dtmega.checkpoint.hf import load
    from dtmega.checkpoint.resume import open_checkpoint
    from dtmega.checkpoint.weights import Weights
    from dtmega.data.tokenizer import load_tokenizer
    from dtmega.models.generate import generate

    checkpoint = open_checkpoint(args.run)
    is_run = Path(args.run, "config.toml").is_file()
    cfg = run_config(Path(args.run)) if is_run else recorded_config(checkpoint)
    tokenizer = load_tokenizer(cfg.data.tokenizer)
    model = models.build(models.described(cfg.model).model).to(mesh.pick_device(cfg.run.device))
    model.init_buffers(cfg.run.seed)
    named = ((model.full_name(name), parameter) for name, parameter in model.named_parameters())
    load(Weights(checkpoint), named, cfg.model.padded_vocab_size)
    new = generate(
        model,
        tokenizer.encode(args.prompt),
        args.tokens,
        vocab_size=tokenizer.vocab_size,
        eod_id=tokenizer.eod_id,
        seed=args.seed,
        temperature=args.temperature,
        top_k=args.top_k,
    )
    print(args.prompt + tokenizer.decode(new))
    return 0


def _inspect_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="a checkpoint's folder or URL, or a run directory (its newest)")
    parser.add_argument("other", nargs="?", help="another one: print the differences; exit code 1 if there are any")
    parser.add_argument("--quick", action="store_true", help="do not read the tensors to verify their digests")


def _inspect(args: argparse.Namespace) -> int:
    from dtmega.checkpoint import inspect

    return inspect.main(args.checkpoint, args.other, verify=not args.quick)


def _convert_arguments(parser: argparse.ArgumentParser) -> None:
    pair: dict[str, Any] = {"nargs": 2, "required": True, "metavar": ("FORMAT", "PATH")}
    parser.add_argument("--from", dest="source", help="hf, dtmega (a checkpoint or a run) or dcp, and where", **pair)
    parser.add_argument("--to", dest="target", help="dtmega or hf, and where", **pair)
    parser.add_argument("--config", default="", help="a TOML whose [model] the weights are of (needed for dcp)")
    parser.add_argument("--prefix", default="", help="dcp: what stands before the parameters' names, such as 'model.'")
    parser.add_argument(
        "--tokenizer", default="", help="to hf: tokenizer.json or what to make one of (default: the source's)"
    )
    parser.add_argument(
        "--original", default="", help="name = 'hf': where the directory of [model] path is, if it has moved"
    )
    parser.add_argument("--dtype", default="", help="to hf: torch's name of another dtype to write")


def _convert(args: argparse.Namespace) -> int:
    import torch
    import torch.distributed as dist

    from dtmega import mesh, models
    from dtmega.checkpoint import convert
    from dtmega.data.tokenizer import load_tokenizer
    from dtmega.data.tokenizer_json import to_json
    from dtmega.models.bloom import HF_KEYS

    def shapes(model: config.Model) -> dict[str, tuple[int, ...]]:
        with torch.device("meta"):
            built = models.build(model)
        return {built.full_name(name): tuple(p.shape) for name, p in built.named_parameters()}

    world = convert.World()
    if mesh.world_size() > 1:
        mesh.start(torch.device("cpu"), mesh.resolve(config.Mesh(), mesh.world_size()))
        world = convert.World(mesh.rank(), mesh.world_size(), lambda: dist.barrier() and None)

    def tokenizer(spec: str) -> tuple[str, int]:
        return to_json(spec), load_tokenizer(spec).eod_id

    convert.main(args, HF_KEYS, shapes, models.described, tokenizer, world)
    if world.size > 1:
        mesh.stop()
    return job.DONE


def _verify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, help="a model directory with config.json; weights are not needed")
    parser.add_argument("--tp", type=int, default=2, help="ranks; started here unless torchrun did (default 2)")
    parser.add_argument("--no-sequence-parallel", action="store_true", help="plain tensor parallelism")
    parser.add_argument("--generic", action="store_true", help="a model without a plan computes on DTensors")


def _verify(args: argparse.Namespace) -> int:
    from dtmega.plans.hf import command

    return command.verify_directory(
        args.directory, args.tp, sequence_parallel=not args.no_sequence_parallel, generic=args.generic
    )


def run_config(run_dir: Path) -> config.Config:
    """The configuration a run was started with.

    Raises:
        ValueError: its config.toml is no configuration.
    """
    path = run_dir / "config.toml"
    return config.validate(tomli.loads(path.read_text(encoding="utf-8")), str(path))


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
    sys.exit(main(sys.argv[1:]))
