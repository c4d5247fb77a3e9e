"""Make dtmega/data/tokenizers/stdlib-wordpiece.txt: 8,192 WordPieces from the text of Python's own library, cased.

    python tools/train_wordpiece.py        (half a minute)

The shipped file was made with CPython 3.11.7 and tokenizers 0.23.3; another Python has another text, so other pieces.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import trainers

from dtmega.data.preparing import corpus
from dtmega.data.tokenizers import wordpiece
from dtmega.data.tokenizers.wordpiece import STDLIB_WORDPIECE

VOCAB_SIZE = 8192


def train(texts: list[str], vocab_size: int) -> list[str]:
    """Train WordPiece; return the tokens in the order of their ids.

    First come the tokens of `wordpiece.REQUIRED`, then all characters, then the characters that continue a word, then
    the merges.

    Raises:
        ValueError: the texts are too short for that many tokens.
    """
    tokenizer = wordpiece.make_tokenizer(list(wordpiece.REQUIRED), lower=False)
    # By itself the trainer numbers characters in the order of a hash table, which differs from process to process, and
    # breaks ties by these numbers. Special tokens get ids in the given order, so passing the characters as special
    # tokens makes the result reproducible.
    in_order = [*wordpiece.REQUIRED, *alphabet(words(texts))]
    trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=in_order, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"expected text for {vocab_size} tokens, got {tokenizer.get_vocab_size()}")
    by_token = tokenizer.get_vocab()
    return sorted(by_token, key=by_token.__getitem__)


def words(texts: Iterable[str]) -> set[str]:
    """The distinct words and punctuation marks of the texts."""
    tokenizer = wordpiece.make_tokenizer(list(wordpiece.REQUIRED), lower=False)
    unique_words: set[str] = set()
    for text in texts:
        normalized = tokenizer.normalizer.normalize_str(text)
        unique_words.update(word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normalized))
    return unique_words


def alphabet(words: Iterable[str]) -> list[str]:
    """All characters of the words, then those after the first of a word, with the prefix of a continuation."""
    anywhere: set[str] = set()
    continuing: set[str] = set()
    for word in words:
        anywhere.update(word)
        continuing.update(word[1:])
    return [*sorted(anywhere), *(f"{wordpiece.CONTINUES}{character}" for character in sorted(continuing))]


def main(path: Path = STDLIB_WORDPIECE) -> None:
    texts = [text for _, text in corpus.documents()]
    path.write_text("".join(f"{token}\n" for token in train(texts, VOCAB_SIZE)), encoding="utf-8")
    print(f"{path}: {VOCAB_SIZE} WordPieces from {len(texts)} documents, {sum(map(len, texts)) / 1e6:.1f} M characters")


if __name__ == "__main__":
    main()
