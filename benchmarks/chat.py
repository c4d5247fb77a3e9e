"""Ask a run the held-out questions of the shipped conversations, for docs/fine-tuning.md.

    python benchmarks/chat.py runs/sft

Counts the answers that end with their turn, and those that are right.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dtmega.data.preparing.conversations import SHIPPED
from dtmega.data.tokenizers.chat import Chat, find_template
from dtmega.distributed.agreement import Startup
from dtmega.inference.trained import open_trained
from dtmega.models.generate import Sampling, generate
from tools.shipped_chat import HELD_OUT

LONGEST = 40  # tokens of an answer


def main(path: str) -> None:
    trained = open_trained(path, None, {}, Startup())
    chat = Chat(trained.tokenizer, find_template(trained.tokenizer), trained.end_ids)
    greedy = Sampling(trained.tokenizer.vocab_size, chat.end_ids, temperature=0.0)
    chat.start()
    ended = right = 0
    for line in SHIPPED.read_text(encoding="utf-8").splitlines()[-HELD_OUT:]:
        question, answer = json.loads(line)["messages"]
        ids = generate(trained.model, chat.ids([question]), LONGEST, greedy)
        ended += len(ids) < LONGEST
        right += trained.tokenizer.decode(ids) == answer["content"]
    chat.close()
    print(f"of {HELD_OUT} answers to questions that no training conversation has, {ended} end and {right} are right")


if __name__ == "__main__":
    main(*sys.argv[1:])
