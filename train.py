"""`torchrun train.py --config bloom.toml` in a copy of the repository; the story itself is dtmega/train.py."""

import sys

from dtmega.train import main, run_and_leave

__all__ = ["main", "run_and_leave"]

if __name__ == "__main__":
    run_and_leave(sys.argv[1:])
