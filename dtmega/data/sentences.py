"""The sentences of a document, of which BERT's samples are made.

    prose     sentences as `sentencex` finds them, by rules and a list of English abbreviations
    blocks    of source code: what stands between blank lines, since lines cut at each "." would make nonsense

No sentence has more than LONGEST_SENTENCE tokens: a longer one is cut at its line ends, and a longer line between
words. Megatron would skip the whole document; of Python's library 108 of 685, with 45 % of the tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from sentencex import segment  # pyright: ignore[reportAttributeAccessIssue]

from dtmega.data.record import LONGEST_SENTENCE
from dtmega.data.tokenizer import Tokenizer

PROSE, BLOCKS = "prose", "blocks"
PARAGRAPH_END = re.compile(r"\n[ \t\r\f]*\n")
# The time in which sentencex looks for quotes in a paragraph grows as its square: 37 s for 7 million characters.
PORTION_CHARS = 100_000


def encode(text: str, kind: str, tokenizer: Tokenizer) -> list[list[int]]:
    """The ids of each sentence of a document that has any, in order.

    Args:
        kind: PROSE or BLOCKS.
    """
    found = prose(text) if kind == PROSE else PARAGRAPH_END.split(text)
    return [ids for sentence in found for ids in _short(sentence, tokenizer)]


def prose(text: str) -> list[str]:
    """The sentences of a text, with the blanks around them or without."""
    return [sentence for portion in _portions(text) for sentence in segment("en", portion)]


def _portions(text: str) -> Iterator[str]:
    """Parts of a text of no more than PORTION_CHARS, cut at line ends or else blanks as far as there are any."""
    start = 0
    while len(text) - start > PORTION_CHARS:
        stop = start + PORTION_CHARS
        ends = (text.rfind(blank, start, stop) + 1 for blank in ("\n", " "))
        end = next((end for end in ends if end), stop)
        yield text[start:end]
        start = end
    yield text[start:]


def _short(sentence: str, tokenizer: Tokenizer) -> Iterator[list[int]]:
    """The ids of a sentence, cut where it is longer than LONGEST_SENTENCE."""
    whole = tokenizer.encode(sentence)
    if len(whole) <= LONGEST_SENTENCE:
        if whole:
            yield whole
        return
    lines: list[int] = []
    for line in sentence.splitlines(keepends=True):
        ids = tokenizer.encode(line)
        if lines and len(lines) + len(ids) > LONGEST_SENTENCE:
            yield from _cut(lines, tokenizer)
            lines = []
        lines += ids
    yield from _cut(lines, tokenizer)


def _cut(ids: list[int], tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Parts of no more than LONGEST_SENTENCE, each of which starts with a word if there is one to start with."""
    start = 0
    while len(ids) - start > LONGEST_SENTENCE:
        stop = start + LONGEST_SENTENCE
        words = (i for i in range(stop, start, -1) if ids[i] not in tokenizer.continuing_ids)
        end = next(words, stop)
        yield ids[start:end]
        start = end
    if start < len(ids):
        yield ids[start:]
