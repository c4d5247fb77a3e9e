"""Text <-> token ids. A spec is one string that names a vocabulary; every process loads it for itself from that string.

    stdlib-8k              shipped: byte-level BPE, 8,192 ids, trained on Python's library by tools/train_tokenizer.py
    stdlib-wordpiece       shipped: 8,192 WordPieces, cased, trained on the same text by tools/train_wordpiece.py
    bytes                  the 256 bytes, then end-of-document
    bert:PATH              a local vocab.txt of WordPieces, text in lower case and without accents; [SEP] ends documents
    bert-cased:PATH        the same, text as it is
    PATH.tiktoken          local ranks (a base64 token and its rank per line), then end-of-document
    PATH.json              a Hugging Face tokenizer.json (eos_token beside it counts)
    gpt2, cl100k_base ...  tiktoken's own, which it downloads

Text is always ordinary: a document that spells "<|endoftext|>" or "[MASK]" never makes the special id.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import tiktoken
import tokenizers

from dtmega.data import tokenizer_trial, wordpiece
from dtmega.strangers import check_not_a_pointer, dangling, download, read_object

# cl100k_base's rule, written so that tiktoken and Hugging Face's `tokenizers` both read it: contractions; words with
# one mark before them; digits by three; punctuation with its newlines; blank lines; indentation but for its last blank.
PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
# GPT-2's rule. A .tiktoken file does not carry one, and GPT-2's ids mean what they should under this one only.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
GPT2_RANKS = 50_256

EOD = "<|endoftext|>"
HF_EODS = (EOD, "</s>", "<eos>", "<|end_of_text|>", "<|im_end|>", "<｜end▁of▁sentence｜>", "[EOS]", wordpiece.SEP)
STDLIB_8K = Path(__file__).with_name("stdlib-8k.tiktoken")
STDLIB_WORDPIECE = Path(__file__).with_name("stdlib-wordpiece.txt")
SHIPPED_WORDPIECES = "stdlib-wordpiece"
WORDPIECES = ("bert", "bert-cased")  # before ":" and the path of a vocab.txt

# tiktoken's regex engine overflows its stack (Rust panics) on about a million blanks in a row, so text is cut there.
BLANKS = re.compile(r"\s{100000}")


@dataclass(frozen=True)
class Tokenizer:
    """A loaded vocabulary. It does not pickle: give another process the spec (`name`).

    Attributes:
        name: the spec it was loaded from.
        vocab_size: ids are in [0, vocab_size); `[model] vocab_size` may be larger.
        eod_id: end of document, which `encode` never returns.
        fingerprint: 12 hex digits, equal for equal vocabularies.
        encode: text -> ids.
        encode_all: the same for each of several texts, on all cores where a library does that.
        decode: ids in [0, vocab_size) -> text; bytes that are no UTF-8 become U+FFFD.
        special_ids: all that stand for no text, so `encode` never returns one; [UNK] stands for some.
        continuing_ids: those that go on within a word ("##ing"); none in a vocabulary that does not tell.
        cls_id, sep_id, mask_id: of [CLS], [SEP], [MASK]; None where there is none.
        pad_id: of [PAD] or <pad>; None where there is none.
        bos_id, eos_id: of [BOS], [EOS], which Megatron's T5 has; None where there is none.
        sentinel_ids: of <extra_id_0>, <extra_id_1>, ..., as many as there are.
    """

    name: str
    vocab_size: int
    eod_id: int
    fingerprint: str
    encode: Callable[[str], list[int]]
    encode_all: Callable[[Sequence[str]], list[list[int]]]
    decode: Callable[[Sequence[int]], str]
    special_ids: frozenset[int]
    continuing_ids: frozenset[int] = field(default=frozenset(), repr=False)
    cls_id: int | None = None
    sep_id: int | None = None
    mask_id: int | None = None
    pad_id: int | None = None
    bos_id: int | None = None
    eos_id: int | None = None
    sentinel_ids: tuple[int, ...] = ()


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer that `spec` names, see above.

    Raises:
        ValueError: unknown spec, missing or malformed file, or tiktoken could not download.
    """
    if is_wordpiece(spec):
        tokenizer, fingerprint = load_wordpiece(spec)
        return _from_huggingface(spec, tokenizer, wordpiece.SEP, fingerprint)
    if spec.endswith(".json"):
        return _from_json(spec)
    return _from_encoding(spec, *load_encoding(spec))


def is_wordpiece(spec: str) -> bool:
    """Tell whether a spec names a vocab.txt."""
    return spec == SHIPPED_WORDPIECES or spec.startswith(tuple(f"{kind}:" for kind in WORDPIECES))


def load_wordpiece(spec: str) -> tuple[tokenizers.Tokenizer, str]:
    """The tokenizer of a spec that names a vocab.txt, and its fingerprint; errors as above."""
    kind, _, path = spec.partition(":")
    file = STDLIB_WORDPIECE if spec == SHIPPED_WORDPIECES else Path(path)
    tokens = wordpiece.parse(file, _read(file))
    lower = kind == "bert"
    fingerprint = _digest(b"lower" if lower else b"cased", "\n".join(tokens).encode())
    return wordpiece.make_tokenizer(tokens, lower), fingerprint


def load_encoding(spec: str) -> tuple[tiktoken.Encoding, str]:
    """The ranks and the pattern of a spec of byte-level BPE, and their fingerprint; errors as above."""
    if spec == "stdlib-8k":
        return _from_ranks_file(spec, STDLIB_8K)
    if spec == "bytes":
        return _from_ranks(spec, {bytes([i]): i for i in range(256)}, r"[\s\S]{1,256}", b"bytes")
    if spec.endswith(".tiktoken"):
        return _from_ranks_file(spec, Path(spec))
    if spec in tiktoken.list_encoding_names():
        return _from_tiktoken_name(spec)
    raise ValueError(f"unknown tokenizer '{spec}'{_meant(spec)}")


def _meant(spec: str) -> str:
    """The end of a message about a spec that names no vocabulary: what to write instead."""
    path = Path(spec)
    folder = path if path.is_dir() else path.parent
    saved = f"AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}')"
    if spec and path.is_dir():
        if (path / "tokenizer.json").exists():
            return f", which is a folder: say {path / 'tokenizer.json'}"
        return f", which is a folder without a tokenizer.json; transformers may make one: {saved}"
    if path.suffix == ".model" and path.is_file():
        return f", a file of SentencePiece; transformers may make a tokenizer.json of it, which is read here: {saved}"
    if path.suffix == ".txt" and path.is_file():
        return f": a vocab.txt of WordPieces is bert:{spec}, or bert-cased:{spec} where it has capital letters"
    return (
        f"; expected stdlib-8k, stdlib-wordpiece, bytes, bert:PATH or bert-cased:PATH of a vocab.txt, a path to a "
        f".tiktoken file or a tokenizer.json, or one of tiktoken's: {', '.join(tiktoken.list_encoding_names())}"
        f"{download(spec)}"
    )


def _from_ranks_file(spec: str, path: Path) -> tuple[tiktoken.Encoding, str]:
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
    missing = [i for i in range(256) if bytes([i]) not in ranks]
    if missing:
        raise ValueError(f"{path}: expected all 256 single bytes among the tokens, missing {missing[:8]}")
    return _from_ranks(spec, ranks, GPT2_PATTERN if len(ranks) == GPT2_RANKS else PATTERN, content)


def _from_ranks(spec: str, ranks: dict[bytes, int], pattern: str, content: bytes) -> tuple[tiktoken.Encoding, str]:
    encoding = tiktoken.Encoding(
        spec, pat_str=pattern, mergeable_ranks=ranks, special_tokens={EOD: len(ranks)}, explicit_n_vocab=len(ranks) + 1
    )
    return encoding, _digest(pattern.encode(), content)


def _from_tiktoken_name(spec: str) -> tuple[tiktoken.Encoding, str]:
    try:
        encoding = tiktoken.get_encoding(spec)
    except Exception as error:  # whatever the network stack of the day raises
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
        return [i for start, end in pairwise(cuts) for i in encoding.encode_ordinary(text[start:end])]

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
    content = _read(Path(spec))
    tokenizer_trial.check(spec, _digest(content))
    loaded = tokenizers.Tokenizer.from_buffer(content)
    vocabulary = loaded.get_vocab(with_added_tokens=True)
    eods = [token for token in (*_eos_token(Path(spec)), *HF_EODS) if token in vocabulary]
    if not eods:
        raise ValueError(
            f"{spec}: expected an end-of-document token, the eos_token of a tokenizer_config.json beside it or one of "
            f"{', '.join(HF_EODS)}; found none"
        )
    loaded.no_truncation()
    loaded.no_padding()
    return _from_huggingface(spec, loaded, eods[0], _digest(content))


def _from_huggingface(spec: str, loaded: tokenizers.Tokenizer, eod: str, fingerprint: str) -> Tokenizer:
    loaded.encode_special_tokens = True  # special tokens' names inside a document are text

    def encode_all(texts: Sequence[str]) -> list[list[int]]:
        # Fast: without the offsets into the text, which take a third of the time.
        with _refusals(spec):
            return [found.ids for found in loaded.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode(text: str) -> list[int]:
        return encode_all([text])[0]

    def decode(ids: Sequence[int]) -> str:
        with _refusals(spec):
            return loaded.decode(list(ids), skip_special_tokens=False)

    vocabulary = loaded.get_vocab(with_added_tokens=True)
    by_name = {name: vocabulary.get(name) for name in (wordpiece.CLS, wordpiece.SEP, wordpiece.MASK, wordpiece.PAD)}
    for name, i in by_name.items():
        if i is not None and i in encode(f" {name} "):
            raise ValueError(f"{spec}: expected a pre_tokenizer that cuts marks off words; text {name} becomes id {i}")
    added = {i for i, token in loaded.get_added_tokens_decoder().items() if token.special}
    known = {i for i in by_name.values() if i is not None}
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
    """Make one kind of error of those of the library: a bare Exception, and a panic, which is none."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ValueError(f"{spec}: the tokenizer refuses this text: {error}") from None
        raise


def _sentinels(vocabulary: dict[str, int]) -> tuple[int, ...]:
    """The ids of T5's marks for hidden spans, up to the first number that is missing."""
    found: list[int] = []
    while (i := vocabulary.get(f"<extra_id_{len(found)}>")) is not None:
        found.append(i)
    return tuple(found)


def _eos_token(path: Path) -> list[str]:
    """A special token as the directory of a model has it: a string, or a token written out."""
    try:
        token = read_object(path.with_name("tokenizer_config.json")).get("eos_token")
    except ValueError:
        return []
    token = token.get("content") if isinstance(token, dict) else token
    return [token] if isinstance(token, str) else []


def _read(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"tokenizer {path}: expected a file, got '{error.strerror}'{dangling(path)}{download(str(path.parent))}"
        ) from None
    check_not_a_pointer(content, path)
    return content


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]
