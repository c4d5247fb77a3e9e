"""Room data/tokenizers/tokenizer_json.py: Hugging Face's tokenizers library is the reader, ours the truth."""

import base64
import random
import sys
from itertools import islice

import pytest
import tiktoken
import tokenizers

from dtmega.data.preparing import corpus
from dtmega.data.tokenizers.load import load_encoding, load_tokenizer
from dtmega.data.tokenizers.tokenizer import EOD
from dtmega.data.tokenizers.tokenizer_json import to_json

# Where the two regular expression engines, or the two orders of merging, could part.
ALPHABET = "aab cde'stSTlLrRvVe0123  \t\n\r.,|<>_é漢字🙂ſK\u3000\u2028\u0085"
CL100K_DIGITS = r"\p{N}{1,3}+"


def hugging_face(text: str, special_is_text: bool = True) -> tokenizers.Tokenizer:
    loaded = tokenizers.Tokenizer.from_str(text)
    loaded.encode_special_tokens = special_is_text
    return loaded


def random_texts(n: int, alphabet: str) -> list[str]:
    rng = random.Random(0)
    return ["".join(rng.choices(alphabet, k=rng.randrange(1, 60))) for _ in range(n)]


def different(spec: str, texts: list[str]) -> list[str]:
    """Texts whose ids are not the same in both."""
    ours, theirs = load_tokenizer(spec), hugging_face(to_json(spec)).encode_batch(texts, add_special_tokens=False)
    return [text for text, encoding in zip(texts, theirs, strict=True) if encoding.ids != ours.encode(text)]


def write_ranks(path, tokens: list[bytes]) -> str:
    """A .tiktoken file: the bytes and these tokens, in a random order of ranks."""
    tokens = list(dict.fromkeys([bytes([i]) for i in range(256)] + tokens))
    random.Random(1).shuffle(tokens)
    path.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(token), i) for i, token in enumerate(tokens)))
    return str(path)


@pytest.mark.parametrize("spec", ["stdlib-8k", "bytes"])
def test_the_library_of_python_gets_the_same_ids(spec):
    assert different(spec, [text for _, text in islice(corpus.documents(), 4, None, 29)]) == []


@pytest.mark.parametrize("spec", ["stdlib-8k", "bytes"])
def test_words_digits_blanks_marks_and_scripts_in_any_order_get_the_same_ids(spec):
    edges = [" " * 9_999, "\n" * 999, "\t x" * 99, "0123456789" * 9, "I'LL don'T ſ'ſ", "\r\n \r\n", f"a{EOD}b", ""]
    assert different(spec, random_texts(3000, ALPHABET) + edges) == []


def test_every_fiftieth_character_of_unicode_gets_the_same_ids():
    characters = [chr(i) for i in range(0, sys.maxunicode + 1, 50) if not 0xD800 <= i < 0xE000]
    assert different("stdlib-8k", [f"a{c}b 1{c}2 {c}. \n{c} '{c}'{c}s" for c in characters]) == []


def test_ranks_that_no_training_made_get_the_same_ids(tmp_path):
    words = [word.encode() for word in random_texts(400, "abc ")]
    tokens = [word[i : i + n] for word in words for i in (0, 1) for n in (2, 3, 4, 6) if len(word) > 7]
    spec = write_ranks(tmp_path / "random.tiktoken", tokens)
    assert '"ignore_merges":true' in to_json(spec)  # some are no pair of tokens, and found as whole pieces only
    assert different(spec, random_texts(5000, "aabc ")) == []


def test_texts_that_are_encoded_together_get_the_ids_that_each_gets_in_the_library(tmp_path):
    (tmp_path / "tokenizer.json").write_text(to_json("stdlib-8k"))
    texts = [*random_texts(200, ALPHABET), f"a{EOD}b", "", "x" * 5000]
    theirs = hugging_face(to_json("stdlib-8k"))
    expected = [theirs.encode(text, add_special_tokens=False).ids for text in texts]
    for spec in ("stdlib-8k", str(tmp_path / "tokenizer.json")):
        tokenizer = load_tokenizer(spec)
        assert [list(ids) for ids in tokenizer.encode_all(texts)] == expected
        assert [tokenizer.encode(text) for text in texts] == expected


@pytest.mark.parametrize("spec", ["stdlib-8k", "bytes"])
def test_ids_decode_to_the_text_and_the_last_id_is_the_special_token(spec):
    ours, theirs = load_tokenizer(spec), hugging_face(to_json(spec))
    text = "Straße 12345\n\n\tdef f(x):\n        return x  # 漢字 🙂"
    assert theirs.decode(ours.encode(text)) == text
    assert (theirs.get_vocab_size(), theirs.token_to_id(EOD)) == (ours.vocab_size, ours.eod_id)


def test_the_special_token_spelled_in_a_text_is_special_there_unless_asked_otherwise():
    ours, text = load_tokenizer("stdlib-8k"), to_json("stdlib-8k")
    assert ours.eod_id in hugging_face(text, special_is_text=False).encode(f"a {EOD} b").ids
    assert hugging_face(text).encode(f"a {EOD} b").ids == ours.encode(f"a {EOD} b")


def test_a_name_of_tiktoken_keeps_its_rule_for_digits_and_the_gaps_between_its_ids(monkeypatch):
    ranks = load_encoding("stdlib-8k")[0]._mergeable_ranks
    special = {"<|fim_prefix|>": 9001, EOD: 9000, "<|endofprompt|>": 9020}
    encoding = tiktoken.Encoding(
        "cl100k_base", pat_str=rf"\p{{L}}+|{CL100K_DIGITS}|[\s\S]", mergeable_ranks=ranks, special_tokens=special
    )
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: encoding)
    theirs = hugging_face(to_json("cl100k_base"))
    assert {token: theirs.token_to_id(token) for token in special} == special
    assert different("cl100k_base", random_texts(1000, ALPHABET + "0123456789")) == []


def test_a_tokenizer_json_is_given_back_as_it_is(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(to_json("bytes"), encoding="utf-8")
    assert to_json(str(path)) == path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("missing.json", "missing.json: expected a file"),
        ("missing.tiktoken", "missing.tiktoken: expected a file"),
        ("gpt3", "unknown tokenizer 'gpt3'"),
    ],
)
def test_what_is_no_tokenizer_is_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        to_json(spec)
