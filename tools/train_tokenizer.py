"""Make dtmega/data/tokenizers/stdlib-8k.tiktoken: a byte-level BPE vocabulary of 8,192 from the text of Python's own
library.

    pip install -e .[data] && python tools/train_tokenizer.py        (two seconds)

The shipped file was made with CPython 3.11.7 and tokenizers 0.23.3. Another Python has another text, so other merges.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from dtmega.data.preparing import corpus
from dtmega.data.tokenizers.load import PATTERN, STDLIB_8K

VOCAB_SIZE = 8192


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE with `vocab_size - 1` tokens.

    Ids 0 to 255 are the bytes, then come the merges in the order of training. The last id of the vocabulary is free for
    end-of-document, which the loader adds.

    Raises:
        ValueError: the texts are too short for that many merges.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size - 1:
        raise ValueError(f"expected text for {vocab_size - 1} tokens, got {tokenizer.get_vocab_size()}")
    return tokenizer


def pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    """The pre-tokenizer that does what tiktoken does: split by PATTERN, then write each byte as a character."""
    cut = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    return pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def export(tokenizer: Tokenizer) -> bytes:
    """The vocabulary as the content of a .tiktoken file: a line `BASE64 RANK` for each token.

    tiktoken merges the pair with the lowest rank first. Ids follow the order of training, so they are the ranks.
    """
    to_byte = byte_level_alphabet()
    by_id = sorted((i, bytes(to_byte[char] for char in token)) for token, i in tokenizer.get_vocab().items())
    return b"".join(b"%s %d\n" % (base64.b64encode(token), i) for i, token in by_id)


def byte_level_alphabet() -> dict[str, int]:
    """Character -> byte, for the printable characters by which byte-level BPE writes bytes (GPT-2 `encoder.py`)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def main(path: Path = STDLIB_8K) -> None:
    texts = [text for _, text in corpus.documents()]
    path.write_bytes(export(train(texts, VOCAB_SIZE)))
    print(f"{path}: {VOCAB_SIZE - 1} ranks from {len(texts)} documents, {sum(map(len, texts)) / 1e6:.1f} M characters")


if __name__ == "__main__":
    main()
