"""Tokenizers turn text into token ids and back.

A spec is a string that names a vocabulary. Every process loads its own tokenizer from the spec.

    stdlib-8k              shipped: byte-level BPE, 8,192 ids, trained on Python's library by tools/train_tokenizer.py
    stdlib-wordpiece       shipped: 8,192 WordPieces, cased, trained on Python's library by tools/train_wordpiece.py
    bytes                  the 256 bytes, then end-of-document
    bert:PATH              a local vocab.txt of WordPieces; text is lowercased and stripped of accents; [SEP] is
                           end-of-document
    bert-cased:PATH        like bert:PATH, but the text keeps its case and accents
    PATH.tiktoken          a local file of ranks (a base64 token and its rank per line), then end-of-document
    PATH.json              a Hugging Face tokenizer.json; end-of-document is the `eos_token` in the
                           tokenizer_config.json next to this file, or the first token of HF_EODS in the vocabulary
    gpt2, cl100k_base ...  tiktoken's own vocabularies, which tiktoken downloads

Text never becomes a special id, even if a document contains "<|endoftext|>" or "[MASK]". A tokenizer.json may come from
a stranger, so a child process with limits encodes and decodes with it (`tokenizer_child.py`).
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import tiktoken

from dtmega import rooms
from dtmega.data.tokenizers.tokenizer import EOD, Tokenizer, digest, read
from dtmega.files.untrusted_json import download

# cl100k_base's rule, written so that both tiktoken and Hugging Face's `tokenizers` can read it. In order: contractions;
# words with the space or mark before them; up to three digits; punctuation with the newlines after it; blank lines;
# indentation except its last blank, which belongs to the next word.
PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
# GPT-2's rule. A .tiktoken file does not store a rule, and GPT-2's ranks give GPT-2's ids only with this rule.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
GPT2_RANKS = 50_256

STDLIB_8K = Path(__file__).with_name("stdlib-8k.tiktoken")
WORDPIECES = ("bert", "bert-cased")  # used as "bert:PATH", with the path of a vocab.txt

# tiktoken's regex engine overflows its stack (a Rust panic) on about a million blanks in a row, so text is cut inside
# long runs of blanks.
BLANKS = re.compile(r"\s{100000}")


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer that a spec names; the docstring of this file lists the specs.

    Raises:
        ValueError: the spec is unknown, its file is missing or malformed, or a download by tiktoken failed.
    """
    if is_wordpiece(spec):
        return rooms.wordpiece().load(spec)
    if spec.endswith(".json"):
        return rooms.confined_tokenizer().load(spec)
    return _from_encoding(spec, *load_encoding(spec))


def is_wordpiece(spec: str) -> bool:
    """True if a spec names a vocab.txt of WordPieces."""
    return spec == "stdlib-wordpiece" or spec.startswith(tuple(f"{kind}:" for kind in WORDPIECES))


def load_encoding(spec: str) -> tuple[tiktoken.Encoding, str]:
    """The byte-level BPE encoding (ranks and pattern) that a spec names, and its fingerprint.

    Raises:
        ValueError: the spec is unknown, its file is missing or malformed, or a download by tiktoken failed.
    """
    if spec == "stdlib-8k":
        return _from_ranks_file(spec, STDLIB_8K)
    if spec == "bytes":
        return _from_ranks(spec, {bytes([i]): i for i in range(256)}, r"[\s\S]{1,256}", b"bytes")
    if spec.endswith(".tiktoken"):
        return _from_ranks_file(spec, Path(spec))
    if spec in tiktoken.list_encoding_names():
        return _from_tiktoken_name(spec)
    raise ValueError(f"unknown tokenizer '{spec}'{_advice(spec)}")


def _advice(spec: str) -> str:
    """Suffix for the message about an unknown spec; the suffix suggests other specs."""
    path = Path(spec)
    folder = path if path.is_dir() else path.parent
    saved = f"AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}')"
    if spec and path.is_dir():
        if (path / "tokenizer.json").exists():
            return f", which is a folder: expected {path / 'tokenizer.json'}"
        return f", which is a folder without a tokenizer.json; transformers may make one: {saved}"
    if path.suffix == ".model" and path.is_file():
        return f", a SentencePiece file, which is not read here; transformers may make a tokenizer.json of it: {saved}"
    if path.suffix == ".txt" and path.is_file():
        return f": a vocab.txt of WordPieces is bert:{spec}, or bert-cased:{spec} where it has capital letters"
    return (
        f"; expected stdlib-8k, stdlib-wordpiece, bytes, bert:PATH or bert-cased:PATH of a vocab.txt, a path to a "
        f".tiktoken file or a tokenizer.json, or one of tiktoken's: {', '.join(tiktoken.list_encoding_names())}"
        f"{download(spec)}"
    )


def _from_ranks_file(spec: str, path: Path) -> tuple[tiktoken.Encoding, str]:
    """The encoding and the fingerprint of a .tiktoken file.

    Raises:
        ValueError: a line is malformed, the ranks are not 0 to n - 1, or one of the 256 bytes has no token.
    """
    content = read(path)
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            try:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
            except ValueError:
                raise ValueError(f"{path}:{number}: expected a base64 token and its rank, got {line[:80]!r}") from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"{path}: expected each rank from 0 to {len(ranks) - 1} once")
    # Without all 256 bytes, some texts could not be encoded.
    missing = [i for i in range(256) if bytes([i]) not in ranks]
    if missing:
        raise ValueError(f"{path}: expected all 256 single bytes among the tokens, missing {missing[:8]}")
    # A .tiktoken file lacks the pattern that its ranks were trained with. A file with exactly as many ranks as GPT-2 is
    # assumed to be GPT-2's.
    pattern = GPT2_PATTERN if len(ranks) == GPT2_RANKS else PATTERN
    return _from_ranks(spec, ranks, pattern, content)


def _from_ranks(spec: str, ranks: dict[bytes, int], pattern: str, content: bytes) -> tuple[tiktoken.Encoding, str]:
    encoding = tiktoken.Encoding(
        spec, pat_str=pattern, mergeable_ranks=ranks, special_tokens={EOD: len(ranks)}, explicit_n_vocab=len(ranks) + 1
    )
    return encoding, digest(pattern.encode(), content)


def _from_tiktoken_name(spec: str) -> tuple[tiktoken.Encoding, str]:
    try:
        encoding = tiktoken.get_encoding(spec)
    except Exception as error:  # the network libraries raise errors of many kinds
        raise ValueError(
            f"tiktoken could not download '{spec}' ({type(error).__name__}); without a network, pass a local .tiktoken "
            f"file or a tokenizer.json"
        ) from None
    return encoding, digest(spec.encode(), str(encoding.n_vocab).encode())


def _from_encoding(spec: str, encoding: tiktoken.Encoding, fingerprint: str) -> Tokenizer:
    def encode(text: str) -> list[int]:
        cuts = [0, *(match.end() for match in BLANKS.finditer(text)), len(text)]
        if len(cuts) == 2:
            return encoding.encode_ordinary(text)
        ids: list[int] = []
        for start, end in pairwise(cuts):
            ids += encoding.encode_ordinary(text[start:end])
        return ids

    def decode(ids: Sequence[int]) -> str:
        return encoding.decode(list(ids), errors="replace")

    return Tokenizer(
        name=spec,
        vocab_size=encoding.n_vocab,
        eod_id=encoding.eot_token,
        fingerprint=fingerprint,
        encode=encode,
        encode_all=lambda texts: [encode(text) for text in texts],
        decode=decode,
        special_ids=frozenset(encoding._special_tokens.values()),
    )
