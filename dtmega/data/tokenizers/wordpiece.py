"""WordPiece, BERT's kind of vocabulary: a vocab.txt with one token per line. A token's id is its line number, from 0.

Text is split at blanks, and around each punctuation mark and each Chinese character. Each word is then cut, from the
left, into the longest tokens that fit; a token that continues a word begins with "##". A word that cannot be cut in
this way becomes a single [UNK]. Blanks, line ends and indentation are lost.

The ids are the same as in transformers' BertTokenizer. One difference from google-research/bert is known: that code
lowercases a capital sigma at the end of a word to ς, but this code lowercases it to σ.
"""

from __future__ import annotations

from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from dtmega.data.tokenizers.huggingface import from_huggingface
from dtmega.data.tokenizers.tokenizer import CLS, MASK, PAD, SEP, Tokenizer, digest, read

STDLIB_WORDPIECE = Path(__file__).with_name("stdlib-wordpiece.txt")
UNKNOWN = "[UNK]"
REQUIRED = (PAD, UNKNOWN, CLS, SEP, MASK)  # in the order of Google's files
CONTINUES = "##"
MAX_WORD_CHARS = 100  # longer words become [UNK]; `max_input_chars_per_word` in google-research/bert, tokenization.py


def load(spec: str) -> Tokenizer:
    """The tokenizer for a spec that names a vocab.txt.

    Raises:
        ValueError: the file is missing or malformed.
    """
    tokenizer, fingerprint = load_wordpiece(spec)
    return from_huggingface(spec, tokenizer, SEP, fingerprint)


def load_wordpiece(spec: str) -> tuple[tokenizers.Tokenizer, str]:
    """The tokenizer and the fingerprint for a spec that names a vocab.txt.

    Raises:
        ValueError: the file is missing or malformed.
    """
    kind, colon, path = spec.partition(":")
    file = Path(path) if colon else STDLIB_WORDPIECE
    tokens = parse(file, read(file))
    lower = kind == "bert"
    fingerprint = digest(b"lower" if lower else b"cased", "\n".join(tokens).encode())
    return make_tokenizer(tokens, lower), fingerprint


def parse(path: Path, content: bytes) -> list[str]:
    """Read the tokens of a vocab.txt, in the order of their ids.

    Args:
        path: path of the file, for messages.
        content: bytes of the file.

    Raises:
        ValueError: the file is not UTF-8, lists a token twice, or lacks a special token.
    """
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}:{line}: expected UTF-8, got byte {content[error.start]:#04x}") from None
    # Do not use splitlines(): it would split at U+2028 and similar characters, which are tokens in multilingual
    # vocabularies.
    tokens = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
    lines: dict[str, int] = {}
    for number, token in enumerate(tokens, 1):
        if token in lines:
            raise ValueError(f"{path}:{number}: expected each token once, got {token!r:.80}, as in line {lines[token]}")
        lines[token] = number
    missing = [name for name in REQUIRED if name not in lines]
    if missing:
        raise ValueError(f"{path}: expected a token per line, {', '.join(REQUIRED)} among them; missing {missing[0]}")
    return tokens


def make_tokenizer(tokens: list[str], lower: bool) -> tokenizers.Tokenizer:
    """A tokenizer equal to BERT's, except that no text becomes a special id, not even "[MASK]".

    Args:
        tokens: tokens of the vocabulary, in the order of their ids.
        lower: whether to lowercase the text and strip its accents, as for the uncased models.
    """
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(
        models.WordPiece(
            vocabulary,
            unk_token=UNKNOWN,
            max_input_chars_per_word=MAX_WORD_CHARS,
            continuing_subword_prefix=CONTINUES,
        )
    )
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower, strip_accents=lower)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix=CONTINUES)
    return tokenizer


def tokenizer_json(tokenizer: tokenizers.Tokenizer) -> str:
    """The content of a tokenizer.json that puts [CLS] and [SEP] around each text, as BERT's own file does."""
    exported = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    exported.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in REQUIRED])
    exported.post_processor = processors.TemplateProcessing(
        single=f"{CLS} $A {SEP}",
        pair=f"{CLS} $A {SEP} $B:1 {SEP}:1",
        special_tokens=[(name, exported.token_to_id(name)) for name in (CLS, SEP)],
    )
    return exported.to_str()
