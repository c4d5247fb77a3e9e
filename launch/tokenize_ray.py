"""Tokenize on a Ray cluster: each part of the input is a plain task on one CPU, and `dtmega merge` joins the parts.

    pip install -c constraints.txt -e '.[ray]'
    python launch/tokenize_ray.py --parts 64 --input big.jsonl --tokenizer gpt2 --output data/mine

The options but --parts are those of `dtmega tokenize`, and paths must be the same on all nodes. Ray starts a task again
whose process is killed. Parts that are there are skipped, so the same command goes on after a stop. The exit code is
that of the first part that fails, or of the merge.
"""

from __future__ import annotations

import argparse
import os
import sys

import ray

from dtmega.__main__ import main as dtmega


@ray.remote(num_cpus=1, max_retries=3)
def tokenize(folder: str, options: list[str], part: str) -> int:
    """Tokenize one part, such as 3/64, in a process of Ray, and return the exit code."""
    os.chdir(folder)
    return dtmega(["tokenize", *options, "--part", part, "--workers", "1"])


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--parts", type=int, required=True, help="number of parts, at least the number of CPUs")
    parser.add_argument("--output", required=True, help="prefix of the result; a part is PREFIX.part-I-of-N")
    args, options = parser.parse_known_args(argv)
    numbers = range(args.parts)
    options += ["--output", args.output]
    ray.init()
    tasks = [tokenize.remote(os.getcwd(), options, f"{number}/{args.parts}") for number in numbers]
    for code in ray.get(tasks):
        if code:
            return code
    parts = [f"{args.output}.part-{number}-of-{args.parts}" for number in numbers]
    overwrite = [option for option in options if option == "--overwrite"]
    return dtmega(["merge", "--input", *parts, "--output", args.output, *overwrite])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
