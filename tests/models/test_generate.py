"""generate.py: from which distribution each token is drawn, where a sample ends, and what a decoder's is made of."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dtmega.config.families.bloom import BloomKeys
from dtmega.models.generate import Sampling, answer, generate
from dtmega.models.model import Model
from tests import plain_bloom
from tests.models.test_bloom_definition import V, leaves, model_of

PROMPT, VOCAB = [1, 2, 3], 120  # of the tokenizer, whose model has more rows
GREEDY = Sampling(50, frozenset([10]), temperature=0)


@pytest.mark.parametrize(
    ("keys", "temperature", "top_k", "top_p"),
    [
        ({}, 0.8, 50, 1.0),
        ({"temperature": 2.0, "top_k": 3}, 2.0, 3, 1.0),
        ({"temperature": 0.5, "top_k": 0}, 0.5, VOCAB, 1.0),
        ({"temperature": 1.0, "top_k": 1000}, 1.0, VOCAB, 1.0),
        ({"temperature": 2.0, "top_k": 0, "top_p": 0.6}, 2.0, VOCAB, 0.6),
        ({"temperature": 2.0, "top_k": 10, "top_p": 0.7}, 2.0, 10, 0.7),
        ({"temperature": 2.0, "top_p": 1e-9}, 2.0, 50, 1e-9),
    ],
    ids=["defaults", "few", "all", "more than all", "most of all", "most of a few", "only one"],
)
def test_tokens_are_drawn_from_the_softmax_over_the_most_probable(monkeypatch, keys, temperature, top_k, top_p):
    model, drawn = model_of(), list[Tensor]()
    honest = torch.multinomial

    def multinomial(p: Tensor, n: int, *, generator: torch.Generator) -> Tensor:
        drawn.append(p.clone())
        return honest(p, n, generator=generator)

    monkeypatch.setattr(torch, "multinomial", multinomial)
    new = generate(model, PROMPT, 5, Sampling(VOCAB, frozenset([V - 1]), seed=9, **keys))
    assert model.training
    assert len(new) == len(drawn) == 5
    weights, generator = leaves(dict(model.named_parameters())), torch.Generator().manual_seed(9)
    for i, p in enumerate(drawn):
        logits = plain_bloom.logits(model.cfg, weights, torch.tensor([PROMPT + new[:i]]))[0, -1, :VOCAB]
        best = logits.argsort(descending=True)[:top_k]
        expected = torch.zeros(VOCAB, dtype=torch.float64)
        of_best = (logits[best] / temperature).softmax(-1)
        n_needed = next(n for n in range(1, len(best) + 1) if n == len(best) or of_best[:n].sum() >= top_p)
        expected[best[:n_needed]] = of_best[:n_needed]
        torch.testing.assert_close(p.double(), expected, rtol=1e-4, atol=1e-7)
        assert honest(p, 1, generator=generator).item() == new[i]  # one generator for all of the sample


class Counting(Model):
    """A model after whose token t comes t + 1, for certain; it has `longest` positions."""

    def __init__(self, longest: int | None) -> None:
        super().__init__()
        self.cfg, self.longest = BloomKeys(), longest
        self.parameter = nn.Parameter(torch.zeros(()))
        self.lengths: list[int] = []

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        assert not self.training
        self.lengths.append(tokens.shape[1])
        return 9.0 * torch.nn.functional.one_hot(tokens + 1, 100)


@pytest.mark.parametrize("how", [{"temperature": 0}, {"top_k": 1}], ids=str)
@pytest.mark.parametrize(
    ("prompt", "n", "longest", "new"),
    [
        ([1], 3, None, [2, 3, 4]),
        ([1], 0, None, []),
        ([7], 9, None, [8, 9]),  # then comes the end of the document
        ([1, 2], 9, 4, [3, 4]),
        ([1, 2, 3], 9, 4, [4]),
        ([1, 2], 1, 4, [3]),
    ],
)
def test_a_sample_ends_after_n_tokens_before_the_end_of_document_and_where_positions_end(
    how: dict[str, Any], prompt: list[int], n: int, longest: int | None, new: list[int]
):
    model = Counting(longest).eval()
    assert generate(model, prompt, n, Sampling(50, frozenset([10, 30]), seed=1, **how)) == new
    assert not model.training
    assert max(model.lengths, default=0) <= (longest or 64)


def test_a_sample_on_several_ranks_ends_where_positions_that_they_can_share_end():
    model = Counting(7)
    sampling = Sampling(50, frozenset([40]), multiple=3, temperature=0)
    assert generate(model, [1], 9, sampling) == [2, 3, 4, 5, 6]
    assert {length % 3 for length in model.lengths} == {0}


def test_a_prompt_of_nothing_or_of_all_positions_is_refused():
    with pytest.raises(ValueError, match=r"the prompt has no tokens.*--prompt"):
        generate(Counting(None), [], 3, GREEDY)
    with pytest.raises(ValueError, match=r"the prompt has 4 tokens, and the model positions for 4$"):
        generate(Counting(4), [1, 2, 3, 4], 3, GREEDY)


class Answering(Counting):
    """The same after what a decoder has said, if that is told of what the encoder has made of [1, 2, 3]."""

    def forward(
        self,
        tokens: Tensor,
        decoder_tokens: Tensor | None = None,
        document_ids: Tensor | None = None,
        decoder_document_ids: Tensor | None = None,
        encoded: Tensor | None = None,
        *,
        places: Tensor,
    ) -> Any:
        assert document_ids is not None
        assert document_ids[0].tolist() == [0] * 3 + [1] * (tokens.shape[1] - 3)
        if decoder_tokens is None:
            self.encodings.append(tokens[0].tolist())
            return {"encoded": tokens * 10}
        assert encoded is not None
        assert encoded[0, :3].tolist() == [10, 20, 30]
        assert decoder_document_ids is not None
        assert not decoder_document_ids.any()
        return super().forward(decoder_tokens, places)

    def __init__(self, longest: int | None) -> None:
        super().__init__(longest)
        self.encodings: list[list[int]] = []


@pytest.mark.parametrize(
    ("start", "n", "longest", "new"),
    [(1, 3, None, [2, 3, 4]), (7, 9, None, [8, 9]), (1, 9, 4, [2, 3, 4, 5]), (1, 0, None, [])],
)
def test_a_decoder_answers_up_to_an_end_a_length_or_the_last_position_and_the_encoder_reads_once(
    start: int, n: int, longest: int | None, new: list[int]
):
    model = Answering(longest)
    assert answer(model, [1, 2, 3], n, GREEDY, start_id=start, pad_id=77) == new
    assert model.training
    assert model.encodings == [[1, 2, 3, *[77] * ((longest or 64) - 3)]]
    assert max(model.lengths, default=0) <= (longest or 64)


def test_what_an_encoder_reads_may_fill_its_positions_and_no_more():
    marks = {"start_id": 1, "pad_id": 77}
    assert answer(Answering(3), [1, 2, 3], 1, GREEDY, **marks) == [2]
    with pytest.raises(ValueError, match=r"the prompt has 3 tokens, and the model positions for 2$"):
        answer(Answering(3), [1, 2, 3], 1, dataclasses.replace(GREEDY, multiple=2), **marks)
    with pytest.raises(ValueError, match=r"the prompt has no tokens"):
        answer(Answering(3), [], 1, GREEDY, **marks)
