"""`dtmega generate`: what a model makes of a prompt, from a run's last checkpoint or from any one."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from dtmega import config, job
from dtmega.commands.arguments import integer, temperature

if TYPE_CHECKING:
    from dtmega.checkpoint.reader import Checkpoint

SHOWN_BY = ("tokens", "temperature", "top_k", "seed")  # options that are the families'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--run",
        required=True,
        metavar="PATH",
        help="a run directory, such as runs/bloom (its newest checkpoint), or the folder of one checkpoint",
    )
    parser.add_argument("--prompt", required=True, help="text to go on from; for a BERT, with each [MASK] to fill")
    # Each family has its own defaults, and refuses what it does not read (`Show.options`).
    parser.add_argument("--tokens", type=integer(1), help="how many to draw (default 128)")
    parser.add_argument("--temperature", type=temperature, help="0 = always the most probable (default 0.8)")
    parser.add_argument(
        "--top-k", type=integer(0), help="draw from the k most probable, or list them; 0 = all (default 50, or 5)"
    )
    parser.add_argument("--seed", type=integer(0, 2**63 - 1), help="another seed, another sample (default 0)")


def command(args: argparse.Namespace) -> int:
    from dtmega import families, mesh
    from dtmega.checkpoint import manifest
    from dtmega.checkpoint.resume import open_checkpoint, state_of
    from dtmega.checkpoint.weights import Weights, load_weights
    from dtmega.data.tokenizer import load_tokenizer

    checkpoint = open_checkpoint(args.run)
    of_run = Path(args.run, "config.toml")
    # One beside a checkpoint's tensors is a draft by `convert`, which may not know the tokenizer.
    is_run = of_run.is_file() and not Path(args.run, manifest.NAME).exists()
    cfg = config.read(of_run) if is_run else recorded_config(checkpoint)
    family = families.of(cfg.model)
    given = {name: value for name in SHOWN_BY if (value := getattr(args, name)) is not None}
    for name in given.keys() - {*family.show.options}:
        raise ValueError(f"--{name.replace('_', '-')} means nothing to a model of name = '{cfg.model.name}'")
    tokenizer = load_tokenizer(cfg.data.tokenizer)
    described = family.described(cfg.model, state_of(checkpoint).digest)
    model = family.build(described).to(mesh.pick_device(cfg.run.device))
    model.init_buffers(cfg.run.seed)
    named = ((model.full_name(name), parameter) for name, parameter in model.named_parameters())
    load_weights(Weights(checkpoint), named, cfg.model.padded_vocab_size)
    of_data = {key: getattr(cfg.data, key) for key in family.show.reads}
    print(family.show.text(model, tokenizer, args.prompt, **given, **of_data))
    return job.DONE


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
