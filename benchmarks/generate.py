"""How fast a sample is drawn with keys and values kept, and with every token computed again: tokens/s of each.

    OMP_NUM_THREADS=1 python benchmarks/generate.py [--config bloom.toml] [--prompt 64] [--tokens 128] [--repeat 3]

Random weights of a configuration, greedy, one sequence, one process; the two take turns, and of each the median of CPU
seconds counts. Both say the same tokens, or the script says that they do not.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time

import torch

from dtmega import config, families
from dtmega.models.generate import Drawing, generate
from dtmega.models.initial import init_weights
from dtmega.models.model import Model


def built(name: str) -> Model:
    cfg = families.resolve(config.load(["--config", name]))
    model = families.build(cfg)
    init_weights(model, cfg.run.seed)
    model.init_buffers(cfg.run.seed)
    return model


def measured(model: Model, prompt: list[int], n: int, repeat: int) -> dict[str, float]:
    """CPU seconds of a sample of n tokens, by how it is drawn."""
    kept = Drawing(model.cfg.vocab_size, frozenset(), temperature=0)
    ways = {"kept": kept, "again": dataclasses.replace(kept, keeps_past=False)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    said = {}
    for _ in range(repeat):
        for name, drawing in ways.items():
            began = time.process_time()
            said[name] = generate(model, prompt, n, drawing)
            seconds[name].append(time.process_time() - began)
    if said["kept"] != said["again"]:
        print("the two samples are not the same", file=sys.stderr)
    return {name: statistics.median(found) for name, found in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="bloom.toml")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens that are drawn")
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    model = built(args.config)
    prompt = torch.randint(model.cfg.vocab_size, (args.prompt,), generator=torch.Generator().manual_seed(0)).tolist()
    found = measured(model, prompt, args.tokens, args.repeat)
    print("| tokens/s | kept | computed again | |")
    print("| --- | --- | --- | --- |")
    kept, again = (args.tokens / found[name] for name in ("kept", "again"))
    what = f"{args.config}, {args.tokens} tokens behind {args.prompt}"
    print(f"| {what} | {kept:.0f} | {again:.0f} | {kept / again:.1f} x |")


if __name__ == "__main__":
    main()
