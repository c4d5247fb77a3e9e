"""Room data/preparing/sentences.py, on Python's own library and on texts that are made to be hard."""

from __future__ import annotations

from itertools import groupby, islice

import pytest

from dtmega.data.objectives.denoising.cut import LONGEST_SENTENCE
from dtmega.data.preparing import corpus, sentences
from dtmega.data.preparing.sentences import BLOCKS, PROSE
from dtmega.data.tokenizers.load import load_tokenizer

WORDPIECE = load_tokenizer("stdlib-wordpiece")


def kind_of(name: str) -> str:
    return PROSE if name.startswith(corpus.TOPICS) else BLOCKS


@pytest.fixture(scope="module")
def some() -> dict[str, str]:
    """Every twentieth document, and some with the longest lines and blocks of the library."""
    long = ("html/entities.py", "locale.py", f"{corpus.TOPICS}operator-summary", f"{corpus.TOPICS}strings")
    texts = dict(corpus.documents())
    return dict(islice(texts.items(), 0, None, 20)) | {name: texts[name] for name in long if name in texts}


def test_abbreviations_initials_and_numbers_end_no_sentence():
    text = 'Dr. Smith paid $3.50, i.e. too much, to J. R. Tolkien. "Really?" she asked. See Fig. 3 for it. Yes!'
    assert [sentence.strip() for sentence in sentences.prose(text)] == [
        "Dr. Smith paid $3.50, i.e. too much, to J. R. Tolkien.",
        '"Really?" she asked.',
        "See Fig. 3 for it.",
        "Yes!",
    ]


def test_a_block_is_the_lines_between_blank_lines(some):
    compared = 0
    for name, text in some.items():
        groups = groupby(text.split("\n"), key=lambda line: bool(line.strip()))
        expected = [WORDPIECE.encode("\n".join(lines)) for is_text, lines in groups if is_text]
        if max(map(len, expected)) <= LONGEST_SENTENCE:
            assert sentences.encode(text, BLOCKS, WORDPIECE) == expected, name
            compared += 1
    assert compared > 20


def test_the_sentences_of_a_document_are_its_words_in_order(some):
    for name, text in some.items():
        found = sentences.encode(text, kind_of(name), WORDPIECE)
        assert [i for ids in found for i in ids] == WORDPIECE.encode(text), name


def test_no_sentence_is_empty_or_longer_than_megatron_takes(some):
    lengths = [len(ids) for name, text in some.items() for ids in sentences.encode(text, kind_of(name), WORDPIECE)]
    assert 1 <= min(lengths) <= max(lengths) <= 512


def test_a_long_block_is_cut_at_line_ends_as_late_as_it_may():
    line = "x = 1 " * 66 + "y z"  # 200 tokens
    found = sentences.encode("\n".join([line] * 5), BLOCKS, WORDPIECE)
    assert [len(ids) for ids in found] == [400, 400, 200]


def test_a_block_of_the_most_tokens_is_not_cut_and_one_of_more_after_as_many():
    assert [len(ids) for ids in sentences.encode("x\n" * 512, BLOCKS, WORDPIECE)] == [512]
    assert [len(ids) for ids in sentences.encode("x\n" * 513, BLOCKS, WORDPIECE)] == [512, 1]


def test_a_long_line_is_cut_before_a_word():
    words = ["unhappiness"] * 400
    text = "x\n" + " ".join(words) + "\ny"
    x, *found, y = sentences.encode(text, BLOCKS, WORDPIECE)
    word = WORDPIECE.encode("unhappiness")
    assert LONGEST_SENTENCE % len(word) > 0
    assert (x, y) == (WORDPIECE.encode("x"), WORDPIECE.encode("y"))
    assert [i for ids in found for i in ids] == word * 400
    most = LONGEST_SENTENCE // len(word) * len(word)
    assert [len(ids) for ids in found[:-1]] == [most] * (len(found) - 1)


def test_a_line_without_words_is_cut_anyway():
    assert [len(ids) for ids in sentences.encode("x" * 1000, BLOCKS, load_tokenizer("bytes"))] == [512, 488]


@pytest.mark.parametrize("blank", ["\n", " ", ""])
def test_a_text_without_paragraphs_is_read_in_portions_that_end_at_blanks(blank):
    text = f"{'a' * 60_000}{blank}" * 5
    portions = list(sentences._portions(text))
    assert "".join(portions) == text
    assert max(map(len, portions)) <= 100_000
    if blank:
        assert portions[:-1] == [f"{'a' * 60_000}{blank}"] * (len(portions) - 1)


@pytest.mark.parametrize("text", ["", " \n\n\t\n", "\u3000"])
@pytest.mark.parametrize("kind", [PROSE, BLOCKS])
def test_a_text_without_words_has_no_sentences(text, kind):
    assert sentences.encode(text, kind, WORDPIECE) == []
