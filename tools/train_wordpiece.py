"""Make dtmega/data/tokenizers/stdlib-wordpiece.txt: 8,192 WordPieces from the text of Python's own library, cased.

    python tools/train_wordpiece.py        (half a minute)

The shipped file was made with CPython 3.11.7 and tokenizers 0.23.3; another Python has other text, so other pieces.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import trainers

from dtmega.data.preparing import corpus
from dtmega.data.tokenizers import wordpiece
from dtmega.data.tokenizers.tokenizer import STDLIB_WORDPIECE

VOCAB_SIZE = 8192


def train(texts: list[str], vocab_size: int) -> list[str]:
    """The tokens by id: those of `wordpiece.REQUIRED`, the characters, the same within a word, then the merges.

    Raises:
        ValueError: the texts are too few for so many.
    """
    tokenizer = wordpiece.make_tokenizer(list(wordpiece.REQUIRED), lower=False)
    # The trainer numbers characters within words in the order of a hash table, another one in each process, and breaks
    # ties by these numbers. What it is told first keeps its place.
    first = [*wordpiece.REQUIRED, *alphabet(words(texts))]
    trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=first, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"expected text for {vocab_size} tokens, got {tokenizer.get_vocab_size()}")
    by_token = tokenizer.get_vocab()
    return sorted(by_token, key=by_token.__getitem__)


def words(texts: Iterable[str]) -> set[str]:
    """Each word or mark of the texts."""
    tokenizer = wordpiece.make_tokenizer(list(wordpiece.REQUIRED), lower=False)
    clean, cut = tokenizer.normalizer.normalize_str, tokenizer.pre_tokenizer.pre_tokenize_str
    return {word for text in texts for word, _ in cut(clean(text))}


def alphabet(words: Iterable[str]) -> list[str]:
    """Each character, then each that goes on within a word."""
    anywhere = {character for word in words for character in word}
    within = {character for word in words for character in word[1:]}
    return [*sorted(anywhere), *(f"{wordpiece.CONTINUES}{character}" for character in sorted(within))]


def main(path: Path = STDLIB_WORDPIECE) -> None:
    texts = [text for _, text in corpus.documents()]
    path.write_text("".join(f"{token}\n" for token in train(texts, VOCAB_SIZE)), encoding="utf-8")
    print(f"{path}: {VOCAB_SIZE} WordPieces from {len(texts)} documents, {sum(map(len, texts)) / 1e6:.1f} M characters")


if __name__ == "__main__":
    main()
