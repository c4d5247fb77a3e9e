"""Compare the speed of two ways to generate text, in tokens/s.

    OMP_NUM_THREADS=1 python benchmarks/generate.py [--config bloom.toml] [--prompt 64] [--tokens 128] [--repeat 3]
    OMP_NUM_THREADS=1 python benchmarks/generate.py --together 8

One process generates greedily, with the random weights of a configuration. With one prompt, the two ways are to keep
keys and values in a cache, and to compute all tokens again for each new token. With several prompts, whose lengths go
from `--prompt` down to half of it, the two ways are to generate all texts together, and one by one. The two ways take
turns, and the median of each way's CPU seconds counts. If the generated tokens differ, the script prints a message.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Mapping

import torch

from dtmega import config, families
from dtmega.models.generate import Sampling, generate, generate_together
from dtmega.models.initial import init_weights
from dtmega.models.model import Model


def built(name: str) -> Model:
    cfg = families.resolve(config.load(["--config", name]))
    model = families.build(cfg)
    init_weights(model, cfg.run.seed)
    model.init_buffers(cfg.run.seed)
    return model


def measured(ways: Mapping[str, Callable[[], object]], repeat: int) -> dict[str, float]:
    """The median CPU seconds of each way, by name."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    said: dict[str, object] = {}
    for _ in range(repeat):
        for name, way in ways.items():
            began = time.process_time()
            said[name] = way()
            seconds[name].append(time.process_time() - began)
    first, second = said.values()
    if first != second:
        print("the two samples are not the same", file=sys.stderr)
    return {name: statistics.median(found) for name, found in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="bloom.toml")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the prompt, of the longest one")
    parser.add_argument("--tokens", type=int, default=128, help="tokens that are drawn")
    parser.add_argument("--together", type=int, default=1, help="prompts")
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    model = built(args.config)
    generator = torch.Generator().manual_seed(0)
    n = args.together
    lengths = torch.linspace(args.prompt, args.prompt // 2, n).int().tolist()
    prompts = [torch.randint(model.cfg.vocab_size, (length,), generator=generator).tolist() for length in lengths]
    kept = Sampling(model.cfg.vocab_size, frozenset(), temperature=0)
    again = dataclasses.replace(kept, uses_cache=False)
    one_by_one = {"kept": kept, "computed again": again} if n == 1 else {"one by one": kept}
    ways: dict[str, Callable[[], object]] = {
        name: lambda sampling=sampling: [generate(model, prompt, args.tokens, sampling) for prompt in prompts]
        for name, sampling in one_by_one.items()
    }
    if n > 1:
        ways = {"together": lambda: generate_together(model, prompts, args.tokens, kept), **ways}
    found = measured(ways, args.repeat)
    print(f"| tokens/s | {' | '.join(found)} | |")
    print("| --- | --- | --- | --- |")
    fast, slow = (n * args.tokens / seconds for seconds in found.values())
    what = f"{args.config}, {f'{n} times ' if n > 1 else ''}{args.tokens} tokens behind {args.prompt}"
    print(f"| {what} | {fast:.0f} | {slow:.0f} | {fast / slow:.1f} x |")


if __name__ == "__main__":
    main()
