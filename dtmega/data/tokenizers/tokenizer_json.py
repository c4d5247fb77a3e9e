"""Export a tokenizer spec as a Hugging Face `tokenizer.json` that encodes text to the same ids as dtmega.

Two differences remain. dtmega always reads a "<|endoftext|>" or "[MASK]" inside a document as text, but Hugging Face
turns that text into the special id, unless called with `split_special_tokens=True`. And dtmega's byte-level BPE cuts
runs of more than 100,000 blanks (`load.BLANKS`), but Hugging Face does not.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from dtmega.data.tokenizers import wordpiece
from dtmega.data.tokenizers.load import is_wordpiece, load_encoding, load_tokenizer


def to_json(spec: str) -> str:
    """The text of the tokenizer.json for a spec; if the spec names a tokenizer.json, the text of that file.

    Raises:
        ValueError: the spec is unknown, its file is missing or malformed, or a download by tiktoken failed.
    """
    if is_wordpiece(spec):
        return wordpiece.tokenizer_json(wordpiece.load_wordpiece(spec)[0])
    if spec.endswith(".json"):
        load_tokenizer(spec)  # loaded only to check the file
        return Path(spec).read_text(encoding="utf-8")
    encoding, _ = load_encoding(spec)
    ranks, special = encoding._mergeable_ranks, encoding._special_tokens
    alphabet = byte_level_alphabet()

    def spelled(token: bytes) -> str:
        return "".join(alphabet[byte] for byte in token)

    merged = [token for token in sorted(ranks, key=ranks.__getitem__) if len(token) > 1]
    pairs = [pair for token in merged if (pair := last_merge(token, ranks)) is not None]
    bpe = models.BPE(
        # Put special tokens into the vocabulary as well, because their ids may leave gaps, as in cl100k_base.
        vocab={spelled(token): rank for token, rank in ranks.items()} | special,
        merges=[(spelled(a), spelled(b)) for a, b in pairs],
        # A token that no merge produces occurs only as a whole piece of text. tiktoken looks up whole pieces before it
        # merges, and `ignore_merges` makes `tokenizers` look them up first, too.
        ignore_merges=len(pairs) < len(merged),
    )
    tokenizer = Tokenizer(bpe)
    # cl100k_base's rule has a possessive {1,3}+, which the Oniguruma engine would read as a repeated {1,3}. Without the
    # "+", the rule matches the same text: {1,3} is the last part of its alternative, so {1,3} never backtracks.
    pattern = encoding._pat_str.replace("{1,3}+", "{1,3}")
    cut = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    by_id = sorted(special, key=special.__getitem__)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in by_id])
    return tokenizer.to_str()


def last_merge(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes] | None:
    """The two parts that tiktoken merges last to form a token. tiktoken always merges the lowest rank first.

    A token has the same two parts in every text. A span of text becomes one token only if no merge crosses the span's
    borders. So tiktoken merges inside the span as if the token stood alone.

    Returns:
        The left and the right part; None if no sequence of merges produces the token.
    """
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        rank, i = min((ranks.get(a + b, sys.maxsize), i) for i, (a, b) in enumerate(pairwise(parts)))
        if rank == sys.maxsize:
            return None
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts[0], parts[1]


def byte_level_alphabet() -> list[str]:
    """The printable character that byte-level BPE writes for each byte (GPT-2 `encoder.py`, `bytes_to_unicode`)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
