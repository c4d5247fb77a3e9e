"""Split documents into the sentences that make up BERT's samples.

    prose     sentences that `sentencex` finds by rules and a list of English abbreviations
    blocks    for source code, where "." does not end a sentence: the text between two blank lines is one "sentence"

No sentence has more than LONGEST_SENTENCE tokens: a longer sentence is cut at its line ends, and a line that is still
too long is cut between words. Megatron would skip every document with a longer sentence: in the source code of
Python's standard library, it would skip 108 of the 685 documents, and with them 45 % of the tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from sentencex import segment  # pyright: ignore[reportAttributeAccessIssue]

from dtmega.data.indexed_files.record import LONGEST_SENTENCE
from dtmega.data.tokenizers.tokenizer import Tokenizer

PROSE, BLOCKS = "prose", "blocks"
PARAGRAPH_END = re.compile(r"\n[ \t\r\f]*\n")
# Text is passed to sentencex in portions, because sentencex's search for quotes takes time quadratic in the length of
# a paragraph: 37 s for 7 million characters.
PORTION_CHARS = 100_000


def encode(text: str, kind: str, tokenizer: Tokenizer) -> list[list[int]]:
    """The token ids of each sentence of a document, in order; sentences without tokens are left out.

    Args:
        text: the document.
        kind: PROSE or BLOCKS.
        tokenizer: tokenizer that encodes the sentences.
    """
    texts = prose(text) if kind == PROSE else PARAGRAPH_END.split(text)
    sentences: list[list[int]] = []
    for sentence, ids in zip(texts, tokenizer.encode_all(texts), strict=True):
        sentences += _short(sentence, list(map(int, ids)), tokenizer)
    return sentences


def prose(text: str) -> list[str]:
    """The sentences of an English text, some with blanks at the start or end."""
    sentences: list[str] = []
    for portion in _portions(text):
        sentences += segment("en", portion)
    return sentences


def _portions(text: str) -> Iterator[str]:
    """Cut a text into portions of at most PORTION_CHARS.

    A portion ends at a line end if possible, at a blank if a line is too long, and inside a word if a word is too long.
    """
    start = 0
    while len(text) - start > PORTION_CHARS:
        stop = start + PORTION_CHARS
        ends = (text.rfind(blank, start, stop) + 1 for blank in ("\n", " "))
        end = next((end for end in ends if end), stop)
        yield text[start:end]
        start = end
    yield text[start:]


def _short(sentence: str, sentence_ids: list[int], tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Yield the ids of a sentence; a sentence longer than LONGEST_SENTENCE is cut into pieces of whole lines."""
    if len(sentence_ids) <= LONGEST_SENTENCE:
        if sentence_ids:
            yield sentence_ids
        return
    lines: list[int] = []  # ids of the lines collected for the next piece
    for line in sentence.splitlines(keepends=True):
        ids = tokenizer.encode(line)
        if lines and len(lines) + len(ids) > LONGEST_SENTENCE:
            yield from _cut(lines, tokenizer)
            lines = []
        lines += ids
    yield from _cut(lines, tokenizer)


def _cut(ids: list[int], tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Cut ids into pieces of at most LONGEST_SENTENCE tokens, between words if possible."""
    start = 0
    while len(ids) - start > LONGEST_SENTENCE:
        stop = start + LONGEST_SENTENCE
        # Cut at the last place where a word starts. A word that is longer than a piece is cut in the middle.
        words = (i for i in range(stop, start, -1) if ids[i] not in tokenizer.continuing_ids)
        end = next(words, stop)
        yield ids[start:end]
        start = end
    if start < len(ids):
        yield ids[start:]
