"""A tokenizer turns text into token ids and back. `load.py` loads one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dtmega.files.regular import read_regular
from dtmega.files.untrusted_json import check_not_a_pointer, dangling, download

EOD = "<|endoftext|>"
PAD, CLS, SEP, MASK = "[PAD]", "[CLS]", "[SEP]", "[MASK]"  # special tokens of BERT's samples


@dataclass(frozen=True)
class Tokenizer:
    """A loaded vocabulary. A `Tokenizer` cannot be pickled: to use it in another process, send its spec (`name`).

    Attributes:
        name: spec that the tokenizer was loaded from.
        vocab_size: exclusive upper bound of the ids; `[model] vocab_size` may be larger.
        eod_id: id of end-of-document, which `encode` never returns.
        fingerprint: digest of 12 hex digits, equal for equal vocabularies.
        encode: function from a text to its ids.
        encode_all: function from several texts to the ids of each text, a list or an array; Hugging Face vocabularies
            use all cores.
        decode: function from ids in [0, vocab_size) to text; bytes that are not UTF-8 become U+FFFD.
        special_ids: ids of special tokens, which `encode` never returns. The id of [UNK] is not included.
        continuing_ids: ids of tokens that continue a word ("##ing"); empty if the vocabulary does not mark them.
        cls_id, sep_id, mask_id: ids of [CLS], [SEP] and [MASK]; None if the vocabulary lacks the token.
        pad_id: id of [PAD] or <pad>; None if the vocabulary has neither.
        first_id: id of the `bos_token` in the tokenizer_config.json next to a tokenizer.json; None if there is none.
        bos_id, eos_id: ids of [BOS] and [EOS], which Megatron's T5 uses; None if the vocabulary lacks the token.
        sentinel_ids: ids of <extra_id_0>, <extra_id_1>, ..., up to the first number that the vocabulary lacks.
    """

    name: str
    vocab_size: int
    eod_id: int
    fingerprint: str
    encode: Callable[[str], list[int]]
    encode_all: Callable[[Sequence[str]], Sequence[list[int] | NDArray[np.uint32]]]
    decode: Callable[[Sequence[int]], str]
    special_ids: frozenset[int]
    continuing_ids: frozenset[int] = field(default=frozenset(), repr=False)
    cls_id: int | None = None
    sep_id: int | None = None
    mask_id: int | None = None
    pad_id: int | None = None
    first_id: int | None = None
    bos_id: int | None = None
    eos_id: int | None = None
    sentinel_ids: tuple[int, ...] = ()


def read(path: Path) -> bytes:
    """The content of a tokenizer file.

    Raises:
        ValueError: the file cannot be read, or is a Git LFS pointer.
    """
    try:
        content = read_regular(path)
    except OSError as error:
        raise ValueError(
            f"tokenizer {path}: expected a file, got '{error.strerror}'{dangling(path)}{download(str(path.parent))}"
        ) from None
    check_not_a_pointer(content, path)
    return content


def digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]
