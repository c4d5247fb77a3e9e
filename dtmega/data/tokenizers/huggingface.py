"""Vocabularies of Hugging Face's `tokenizers` library."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import tokenizers

from dtmega.data.tokenizers.tokenizer import CLS, MASK, PAD, SEP, Tokenizer

MARKS = (CLS, SEP, MASK, PAD)
TRIED = tuple(f" {mark} " for mark in MARKS)  # the only texts that `from_huggingface` encodes


def from_huggingface(spec: str, loaded: tokenizers.Tokenizer, eod: str, fingerprint: str) -> Tokenizer:
    """The tokenizer that encodes in this process with a vocabulary of the `tokenizers` library.

    Args:
        spec: spec of the tokenizer.
        loaded: the vocabulary. This function encodes only `TRIED` with it.
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
    by_name = {name: vocabulary.get(name) for name in MARKS}
    for (name, i), text in zip(by_name.items(), TRIED, strict=True):
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
        cls_id=by_name[CLS],
        sep_id=by_name[SEP],
        mask_id=by_name[MASK],
        pad_id=vocabulary.get("<pad>") if by_name[PAD] is None else by_name[PAD],
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
