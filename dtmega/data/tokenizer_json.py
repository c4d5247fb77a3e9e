"""A spec's vocabulary as a Hugging Face `tokenizer.json`: the same ids for the same text.

Two differences remain, both Hugging Face's defaults. A document that spells "<|endoftext|>" or "[MASK]" makes the
special id there, where here it is text (`split_special_tokens=True` makes it text there too). And byte-level BPE cuts
more than 100,000 blanks in a row here, see `tokenizer.BLANKS`, but not there.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from dtmega.data import wordpiece
from dtmega.data.tokenizer import is_wordpiece, load_encoding, load_tokenizer, load_wordpiece


def to_json(spec: str) -> str:
    """The text of a tokenizer.json; of a spec that is such a file, the file itself.

    Raises:
        ValueError: as `load_tokenizer`.
    """
    if is_wordpiece(spec):
        return wordpiece.tokenizer_json(load_wordpiece(spec)[0])
    if spec.endswith(".json"):
        load_tokenizer(spec)
        return Path(spec).read_text(encoding="utf-8")
    encoding, _ = load_encoding(spec)
    ranks, special = encoding._mergeable_ranks, encoding._special_tokens
    spell = byte_level_alphabet()
    merged = [token for token in sorted(ranks, key=ranks.__getitem__) if len(token) > 1]
    pairs = [pair for token in merged if (pair := last_merge(token, ranks)) is not None]
    bpe = models.BPE(
        # Special tokens stand in the vocabulary too: that alone lets their ids leave gaps, as cl100k_base's do.
        vocab={"".join(spell[byte] for byte in token): rank for token, rank in ranks.items()} | special,
        merges=[("".join(spell[byte] for byte in a), "".join(spell[byte] for byte in b)) for a, b in pairs],
        # A token that no merge makes is found only where it is a whole piece; tiktoken looks pieces up first.
        ignore_merges=len(pairs) < len(merged),
    )
    tokenizer = Tokenizer(bpe)
    # In cl100k_base's rule a possessive {1,3}+, after which nothing can be given back. Oniguruma takes it for a repeat.
    pattern = encoding._pat_str.replace("{1,3}+", "{1,3}")
    cut = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    by_id = sorted(special, key=special.__getitem__)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in by_id])
    return tokenizer.to_str()


def last_merge(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes] | None:
    """The two parts that tiktoken's merging makes `token` of, lowest rank first; None if it never does.

    They are the same in any text. A span ends up as one token only if no merge crossed its borders, and then what
    happened inside it is what happens to the token alone.
    """
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        rank, i = min((ranks.get(a + b, sys.maxsize), i) for i, (a, b) in enumerate(pairwise(parts)))
        if rank == sys.maxsize:
            return None
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts[0], parts[1]


def byte_level_alphabet() -> list[str]:
    """The printable character by which byte-level BPE writes each byte (GPT-2 `encoder.py`, `bytes_to_unicode`)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
