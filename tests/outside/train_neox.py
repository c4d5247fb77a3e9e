"""Train a GPT-NeoX: `torchrun train_neox.py --config neox.toml`, with all options of dtmega's train.py."""

import sys

from neox import RECORD

from dtmega import families
from dtmega.cli import entry

families.register(RECORD)  # in the processes that load data too, which import this file
if __name__ == "__main__":
    entry.train(sys.argv[1:])
