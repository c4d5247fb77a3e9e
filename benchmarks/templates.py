"""Compare the learned tokens of published chat templates with transformers' own mask, for docs/fine-tuning.md.

    pip install --no-deps --target SITE trl==1.16.0
    python benchmarks/templates.py SITE/trl/chat_templates

TRL publishes templates of many models, and beside most of them a training form with {% generation %} markers. Three
conversations go through each. A tokenizer of bytes with the control tokens that a template spells stands for the
model's own.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tokenizers
from transformers import PreTrainedTokenizerFast

from dtmega.data.tokenizers.rendering import ASSISTANT, Renderer

TRAINING = "_training"
CONTROL = re.compile(r"<\|[^|<>'\"\s]+\|?>|<[a-z_]+\|>|<[a-zA-Z]+_[a-zA-Z_]+>|<｜[^｜]+｜>|\[/?[A-Z_]+\]")
USER, ANSWER = "user", "assistant"
CONVERSATIONS = [
    [(USER, "What is 2 + 2?"), (ANSWER, "It is 4.")],
    [(USER, "Hello there"), (ANSWER, "Hi! How can I help?"), (USER, "Name a colour."), (ANSWER, "Blue")],
    [("system", "Be brief."), (USER, "Hello"), (ANSWER, "Hi!"), (USER, "Bye"), (ANSWER, "Goodbye.")],
]


def main(folder: Path) -> None:
    """Print a line for each template that is not used as it is, and the counts of all."""
    counts = Counter[str]()
    for path in sorted(folder.glob("*.jinja")):
        if path.stem.endswith(TRAINING):
            continue
        published = path.read_text(encoding="utf-8")
        counts[_as_published(path.stem, published)] += 1
        twin = path.with_stem(path.stem + TRAINING)
        if twin.exists():
            counts[_marked(twin.stem, twin.read_text(encoding="utf-8"), published)] += 1
    for outcome, n in sorted(counts.items()):
        print(f"{n:3} {outcome}")


def _as_published(name: str, template: str) -> str:
    render = Renderer(_tokenizer(template), None, ASSISTANT)
    causes = [answer.get("cause", "") for answer in map(render, _conversations())]
    print(f"{name}: {causes}" if any(causes) else f"{name}: learned")
    return f"published: {sum(not cause for cause in causes)} of 3 conversations learned"


def _marked(name: str, template: str, published: str) -> str:
    tokenizer = _tokenizer(published + template)
    tokenizer.chat_template = template
    render = Renderer(tokenizer, published, ASSISTANT)
    outcomes = [_compared(tokenizer, render(one), one["messages"]) for one in _conversations()]
    print(f"{name}: {outcomes}")
    refused = sum(outcome.startswith("refused") for outcome in outcomes)
    differing = sum(outcome.startswith("differ") for outcome in outcomes)
    return f"marked: {refused} of 3 conversations refused, {differing} differ from transformers"


def _compared(tokenizer: Any, answer: dict[str, Any], messages: list[dict[str, str]]) -> str:
    """How learned tokens differ from transformers' mask, but for line ends behind the end of a turn."""
    if "ids" not in answer:
        return f"refused: {answer.get('cause', 'the texts differ')}"
    theirs = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    ours = [0] * len(answer["ids"])
    for start, stop in answer["learned"]:
        ours[start:stop] = [1] * (stop - start)
    pairs = zip(answer["ids"], ours, theirs["assistant_masks"], strict=True)
    differing = {tokenizer.decode([token]) for token, mine, other in pairs if mine != other}
    if answer["ids"] != theirs["input_ids"] or differing - {"\n"}:
        return f"differ in {sorted(differing)}"
    return "equal"


def _conversations() -> list[dict[str, Any]]:
    found = []
    for turns in CONVERSATIONS:
        messages = [{"role": role, "content": content} for role, content in turns]
        found.append({"messages": messages, "tools": None})
    return found


def _tokenizer(template: str) -> Any:
    """A tokenizer of bytes, and of the control tokens that a template spells."""
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    control = sorted({*CONTROL.findall(template), "<s>", "</s>"})
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    vocab_size = len(alphabet) + len(control)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=control, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", additional_special_tokens=control
    )
    tokenizer.chat_template = template
    return tokenizer


if __name__ == "__main__":
    main(Path(sys.argv[1]))
