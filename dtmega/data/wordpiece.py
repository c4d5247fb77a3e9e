"""WordPiece, the vocabulary of BERT: a vocab.txt with one token per line, whose line (from 0) is its id.

Text is cut at blanks and at each mark and Chinese character, a word into the longest tokens from its left; what goes on
within a word begins with "##". A word with no such parts is one [UNK]. Blanks, line ends and indentation are lost.
Ids are those of transformers' BertTokenizer. One difference from google-research/bert is known: there a capital sigma
at the end of a word becomes ς in lower case, here σ.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

UNKNOWN = "[UNK]"
PAD, CLS, SEP, MASK = "[PAD]", "[CLS]", "[SEP]", "[MASK]"
REQUIRED = (PAD, UNKNOWN, CLS, SEP, MASK)  # in the order of Google's files
CONTINUES = "##"
MAX_WORD_CHARS = 100  # a longer word is [UNK]: `max_input_chars_per_word` of google-research/bert `tokenization.py`


def parse(path: Path, content: bytes) -> list[str]:
    """The tokens of a vocab.txt, by id.

    Raises:
        ValueError: no UTF-8, a token twice, a special token missing.
    """
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}:{line}: expected UTF-8, got byte {content[error.start]:#04x}") from None
    # Not splitlines(): vocabularies of many languages have tokens that are line ends of Unicode.
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


def make_tokenizer(tokens: list[str], lower: bool) -> Tokenizer:
    """The tokenizer of a vocabulary, equal to BERT's; a text that spells a special token is text.

    Args:
        lower: as the uncased models: lower case, no accents.
    """
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(
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


def tokenizer_json(tokenizer: Tokenizer) -> str:
    """The text of a tokenizer.json. Like those of BERT it puts [CLS] and [SEP] around what it is given."""
    whole = Tokenizer.from_str(tokenizer.to_str())
    whole.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in REQUIRED])
    whole.post_processor = processors.TemplateProcessing(
        single=f"{CLS} $A {SEP}",
        pair=f"{CLS} $A {SEP} $B:1 {SEP}:1",
        special_tokens=[(name, whole.token_to_id(name)) for name in (CLS, SEP)],
    )
    return whole.to_str()
