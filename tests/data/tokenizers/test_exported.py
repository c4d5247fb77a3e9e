"""exported.py: the vocabulary of an exported model has the ids of training, also those behind the tokenizer's."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers

from dtmega.config import Data
from dtmega.data.objectives.denoising.sentinels import marks
from dtmega.data.tokenizers.exported import of_documents, of_spans
from dtmega.data.tokenizers.load import load_tokenizer
from dtmega.data.tokenizers.tokenizer_json import to_json

TEXT = "def f(x): return x"


@pytest.mark.parametrize("spec", ["stdlib-8k", "stdlib-wordpiece", "bytes"])
def test_text_with_hidden_spans_has_the_ids_of_training_and_an_end(spec: str):
    tokenizer = load_tokenizer(spec)
    known = marks(tokenizer, 7)
    json, ids = of_spans(tokenizer, Data(sentinels=7))
    theirs = tokenizers.Tokenizer.from_str(json)
    first, last = known.sentinels[0], known.sentinels[6]
    found = theirs.encode(f"{TEXT}<extra_id_0>{TEXT}<extra_id_6>").ids
    assert found == [*tokenizer.encode(TEXT), first, *tokenizer.encode(TEXT), last, known.end]
    assert theirs.token_to_id("<extra_id_7>") is None
    assert ids == {"eos_token_id": known.end, "pad_token_id": known.pad, "decoder_start_token_id": known.start}
    assert theirs.get_vocab_size() == tokenizer.vocab_size + known.n_added


def test_a_vocabulary_of_running_text_is_the_tokenizers_whose_end_of_document_begins_and_ends():
    tokenizer = load_tokenizer("stdlib-8k")
    assert of_documents(tokenizer, Data()) == (to_json("stdlib-8k"), {"bos_token_id": 8191, "eos_token_id": 8191})


def test_a_tokenizer_with_gaps_in_its_ids_is_refused(tmp_path: Path):
    words = {"a": 0, "<|endoftext|>": 1, "b": 5}
    with_gaps = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a"))
    with_gaps.add_special_tokens(["<|endoftext|>"])
    with_gaps.save(str(tmp_path / "gaps.json"))
    with pytest.raises(ValueError, match=r"gaps in its ids: <extra_id_0> was 6 in training, .* would make it 3"):
        of_spans(load_tokenizer(str(tmp_path / "gaps.json")), Data(sentinels=2))
