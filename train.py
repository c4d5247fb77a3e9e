"""`torchrun train.py --config bloom.toml` in a copy of the repository; the story itself is dtmega/train.py."""

import sys

from dtmega.cli import entry

# The processes that read data import this file, too, but nothing of the trainer.
if __name__ == "__main__":
    entry.train(sys.argv[1:])
