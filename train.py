"""Entry point in a copy of the repository: `torchrun train.py --config bloom.toml`. The program is dtmega/train.py."""

import sys

from dtmega.cli import entry

# The processes that load data import this file too, but must not train.
if __name__ == "__main__":
    entry.train(sys.argv[1:])
