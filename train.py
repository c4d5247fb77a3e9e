"""`torchrun train.py --config bloom.toml` in a copy of the repository; the story itself is dtmega/train.py."""

import sys

from dtmega.train import command, main

__all__ = ["command", "main"]

if __name__ == "__main__":
    command(sys.argv[1:])
