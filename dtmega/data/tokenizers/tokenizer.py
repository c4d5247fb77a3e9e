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
import dataclasses
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import tiktoken
import tokenizers
from numpy.typing import NDArray

from dtmega.data.tokenizers import tokenizer_child, wordpiece
from dtmega.files.regular import read_regular
from dtmega.files.untrusted_json import check_not_a_pointer, dangling, download, read_object

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

EOD = "<|endoftext|>"
HF_EODS = (EOD, "</s>", "<eos>", "<|end_of_text|>", "<|im_end|>", "<｜end▁of▁sentence｜>", "[EOS]", wordpiece.SEP)
STDLIB_8K = Path(__file__).with_name("stdlib-8k.tiktoken")
STDLIB_WORDPIECE = Path(__file__).with_name("stdlib-wordpiece.txt")
SHIPPED_WORDPIECES = "stdlib-wordpiece"
WORDPIECES = ("bert", "bert-cased")  # used as "bert:PATH", with the path of a vocab.txt

# tiktoken's regex engine overflows its stack (a Rust panic) on about a million blanks in a row, so text is cut inside
# long runs of blanks.
BLANKS = re.compile(r"\s{100000}")


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


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer that a spec names; the docstring of this file lists the specs.

    Raises:
        ValueError: the spec is unknown, its file is missing or malformed, or a download by tiktoken failed.
    """
    if is_wordpiece(spec):
        tokenizer, fingerprint = load_wordpiece(spec)
        return _from_huggingface(spec, tokenizer, wordpiece.SEP, fingerprint)
    if spec.endswith(".json"):
        return _from_json(spec)
    return _from_encoding(spec, *load_encoding(spec))


def is_wordpiece(spec: str) -> bool:
    """True if a spec names a vocab.txt of WordPieces."""
    return spec == SHIPPED_WORDPIECES or spec.startswith(tuple(f"{kind}:" for kind in WORDPIECES))


def load_wordpiece(spec: str) -> tuple[tokenizers.Tokenizer, str]:
    """The tokenizer and the fingerprint for a spec that names a vocab.txt.

    Raises:
        ValueError: the file is missing or malformed.
    """
    kind, _, path = spec.partition(":")
    file = STDLIB_WORDPIECE if spec == SHIPPED_WORDPIECES else Path(path)
    tokens = wordpiece.parse(file, _read(file))
    lower = kind == "bert"
    fingerprint = _digest(b"lower" if lower else b"cased", "\n".join(tokens).encode())
    return wordpiece.make_tokenizer(tokens, lower), fingerprint


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
    content = _read(path)
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
    return encoding, _digest(pattern.encode(), content)


def _from_tiktoken_name(spec: str) -> tuple[tiktoken.Encoding, str]:
    try:
        encoding = tiktoken.get_encoding(spec)
    except Exception as error:  # the network libraries raise errors of many kinds
        raise ValueError(
            f"tiktoken could not download '{spec}' ({type(error).__name__}); without a network, pass a local .tiktoken "
            f"file or a tokenizer.json"
        ) from None
    return encoding, _digest(spec.encode(), str(encoding.n_vocab).encode())


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


def _from_json(spec: str) -> Tokenizer:
    """The tokenizer in a Hugging Face tokenizer.json.

    Raises:
        ValueError: the file is missing, is malformed, or has no end-of-document token.
    """
    content = _read(Path(spec))
    tokenizer_child.check(spec, _digest(content))
    loaded = tokenizers.Tokenizer.from_buffer(content)
    vocabulary = loaded.get_vocab(with_added_tokens=True)
    eods = [token for token in (*_named_token(Path(spec), "eos_token"), *HF_EODS) if token in vocabulary]
    if not eods:
        raise ValueError(
            f"{spec}: expected an end-of-document token, the eos_token of a tokenizer_config.json beside it or one of "
            f"{', '.join(HF_EODS)}; found none"
        )
    loaded.no_truncation()
    loaded.no_padding()
    child = tokenizer_child.TokenizerChild(spec, content)
    tokenizer = dataclasses.replace(
        _from_huggingface(spec, loaded, eods[0], _digest(content)),
        encode=lambda text: child.encode_all([text])[0].tolist(),
        encode_all=child.encode_all,
        decode=child.decode,
    )
    firsts = [vocabulary[token] for token in _named_token(Path(spec), "bos_token") if token in vocabulary]
    return dataclasses.replace(tokenizer, first_id=next(iter(firsts), None))


def _from_huggingface(spec: str, loaded: tokenizers.Tokenizer, eod: str, fingerprint: str) -> Tokenizer:
    """The tokenizer that encodes in this process with a vocabulary of the `tokenizers` library.

    Args:
        spec: spec of the tokenizer.
        loaded: the vocabulary. This function encodes only `tokenizer_child.TRIED` with it.
        eod: name of the end-of-document token.
        fingerprint: digest of the vocabulary.
    """
    loaded.encode_special_tokens = True  # a special token's name inside a document is ordinary text

    def encode_all(texts: Sequence[str]) -> list[list[int]]:
        # The "fast" variant saves a third of the time, because it does not compute offsets into the text.
        with _refusals(spec):
            encodings = loaded.encode_batch_fast(list(texts), add_special_tokens=False)
            return [encoding.ids for encoding in encodings]

    def encode(text: str) -> list[int]:
        return encode_all([text])[0]

    def decode(ids: Sequence[int]) -> str:
        with _refusals(spec):
            return loaded.decode(list(ids), skip_special_tokens=False)

    # Some pre_tokenizers leave "[MASK]" in one piece, so text could become the special id.
    vocabulary = loaded.get_vocab(with_added_tokens=True)
    by_name = {name: vocabulary.get(name) for name in tokenizer_child.MARKS}
    for (name, i), text in zip(by_name.items(), tokenizer_child.TRIED, strict=True):
        if i is not None and i in encode(text):
            raise ValueError(f"{spec}: expected a pre_tokenizer that cuts marks off words; text {name} becomes id {i}")
    added = {i for i, token in loaded.get_added_tokens_decoder().items() if token.special}
    known = {i for i in by_name.values() if i is not None}
    # The file may mark [UNK] as special, but ordinary text can still be encoded as [UNK].
    unknown = vocabulary.get(getattr(loaded.model, "unk_token", None) or "")
    prefix = getattr(loaded.model, "continuing_subword_prefix", None)
    continuing = {i for token, i in vocabulary.items() if token.startswith(prefix)} if prefix else set()
    return Tokenizer(
        name=spec,
        vocab_size=max(vocabulary.values()) + 1,
        eod_id=vocabulary[eod],
        fingerprint=fingerprint,
        encode=encode,
        encode_all=encode_all,
        decode=decode,
        special_ids=frozenset(added | known | {vocabulary[eod]}) - {unknown},
        continuing_ids=frozenset(continuing),
        cls_id=by_name[wordpiece.CLS],
        sep_id=by_name[wordpiece.SEP],
        mask_id=by_name[wordpiece.MASK],
        pad_id=vocabulary.get("<pad>") if by_name[wordpiece.PAD] is None else by_name[wordpiece.PAD],
        bos_id=vocabulary.get("[BOS]"),
        eos_id=vocabulary.get("[EOS]"),
        sentinel_ids=_sentinels(vocabulary),
    )


@contextmanager
def _refusals(spec: str) -> Iterator[None]:
    """Turn the library's errors into ValueErrors: bare Exceptions, and Rust panics, which are not Exceptions."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ValueError(f"{spec}: the tokenizer refuses this text: {error}") from None
        raise


def _sentinels(vocabulary: dict[str, int]) -> tuple[int, ...]:
    """The ids of <extra_id_0>, <extra_id_1>, ..., up to the first number that the vocabulary lacks."""
    ids: list[int] = []
    while (i := vocabulary.get(f"<extra_id_{len(ids)}>")) is not None:
        ids.append(i)
    return tuple(ids)


def _named_token(path: Path, role: str) -> list[str]:
    """Return a list with the name of a tokenizer's `eos_token` or `bos_token`; [] if no token has this role.

    A tokenizer_config.json next to the tokenizer.json stores the token either as a name, or as an object with the name
    under `content`.
    """
    try:
        token = read_object(path.with_name("tokenizer_config.json")).get(role)
    except ValueError:
        return []
    token = token.get("content") if isinstance(token, dict) else token
    return [token] if isinstance(token, str) else []


def _read(path: Path) -> bytes:
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


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]
