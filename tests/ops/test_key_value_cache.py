"""ops/key_value_cache.py: a sequence given in pieces has the logits and the sample that it has as a whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from dtmega.config.families.gpt import GPTKeys
from dtmega.config.families.hf import TransformersKeys
from dtmega.interop.hf.model import HF
from dtmega.models.generate import Sampling, answer, generate, generate_together
from dtmega.models.gpt import GPT
from dtmega.models.initial import init_weights
from dtmega.models.model import Model
from dtmega.ops.attention import attention
from dtmega.ops.attention_rule import attention_rule
from dtmega.ops.key_value_cache import KeyValueCache
from tests import hf_models
from tests.interop.hf.test_model import ALIKE, DISTINCT, built
from tests.models import test_llama, test_t5
from tests.models.test_bloom_definition import model_of

V = 131
SAMPLING = Sampling(V, frozenset([V - 1]), seed=5)
PROMPTS = [[7], [1, 2, 3], [(11 * i) % 120 for i in range(70)]]


def a_gpt() -> GPT:
    model = GPT(GPTKeys(vocab_size=V, hidden_size=48, n_layers=3, n_heads=6, max_position_embeddings=90, init_std=0.3))
    init_weights(model, 3)
    model.init_buffers(3)
    return model


DECODERS: dict[str, Callable[[], Model]] = {
    "bloom": lambda: model_of(ffn_hidden_size=192),
    "gpt": a_gpt,
    "llama": lambda: test_llama.small(test_llama.section("Qwen3 with windows")),
}
T5S: dict[str, dict[str, Any]] = {"relative": {}, "learned": test_t5.MEGATRON}


def again(sampling: Sampling) -> Sampling:
    """The same, by a model that computes every token again for each."""
    return dataclasses.replace(sampling, uses_cache=False)


@pytest.mark.parametrize("family", DECODERS)
@torch.no_grad()
def test_pieces_of_a_sequence_have_the_logits_of_the_whole_and_no_token_is_computed_twice(family: str):
    model = DECODERS[family]().eval()
    tokens = torch.randint(V, (2, 80), generator=torch.Generator().manual_seed(1))
    documents = (torch.arange(80) >= torch.tensor([[40], [9]])).long()
    given: list[int] = []
    model.blocks()[-1].register_forward_hook(lambda _, __, hidden: given.append(hidden.shape[1]))
    for rows in ({}, {"document_ids": documents}):
        whole = model(tokens, **rows)
        cache = KeyValueCache()
        given.clear()
        for start, stop in ((0, 5), (5, 6), (6, 76), (76, 77), (77, 80)):
            piece = {name: row[:, start:stop] for name, row in rows.items()}
            places = torch.arange(start, stop).expand(2, -1)
            logits = model(tokens[:, start:stop], places=places, cache=cache, **piece)
            torch.testing.assert_close(logits, whole[:, start:stop], rtol=1e-4, atol=1e-4)
        assert given == [5, 1, 70, 1, 3]
        assert cache.length == 80


def formula(q: Tensor, k: Tensor, v: Tensor, window: int, slopes: Tensor) -> Tensor:
    """Attention of all of a sequence with ALiBi in a window."""
    place = torch.arange(q.shape[2])
    distance = place[None, :] - place[:, None]
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5 + slopes[:, None, None] * distance
    return scores.masked_fill((distance > 0) | (distance <= -window), -torch.inf).softmax(-1) @ v


def test_a_window_and_added_numbers_count_from_the_place_of_each_token():
    q, k, v = torch.randn(3, 2, 6, 90, 8, generator=torch.Generator().manual_seed(1)).double()
    slopes = 2.0 ** -torch.arange(1, 7)  # times a distance exact in fp32
    truth = formula(q, k, v, 7, slopes.double())
    cache = KeyValueCache()
    for start, stop in ((0, 3), (3, 4), (4, 88), (88, 90)):
        places = torch.arange(start, stop).expand(2, -1)
        rule = attention_rule(places, causal=True, window=7, slopes=slopes, cache=cache)
        found = attention(*(x[:, :, start:stop] for x in (q, k, v)), rule)
        torch.testing.assert_close(found, truth[:, :, start:stop])


@pytest.mark.parametrize("family", DECODERS)
def test_a_greedy_sample_is_that_of_transformers_with_a_past_and_without(tmp_path: Path, family: str):
    ours = DECODERS[family]()
    test_llama.export(ours, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    theirs_here = HF(TransformersKeys(path=str(tmp_path)))
    theirs_here.hf.load_state_dict(theirs.state_dict())
    greedy = dataclasses.replace(SAMPLING, temperature=0)
    alone = []
    for prompt in PROMPTS:
        new = generate(ours, prompt, 15, greedy)
        alone.append(new)
        assert new == generate(ours, prompt, 15, again(greedy))
        assert new == generate(theirs_here, prompt, 15, greedy) == generate(theirs_here, prompt, 15, again(greedy))
        ends = {"eos_token_id": V - 1, "pad_token_id": V - 1}
        (truth,) = theirs.generate(torch.tensor([prompt]), max_new_tokens=15, do_sample=False, **ends).tolist()
        assert new == [token for token in truth[len(prompt) :] if token != V - 1]
    for model in (ours, theirs_here):
        for sampling in (greedy, again(greedy)):
            assert generate_together(model, PROMPTS, 15, sampling) == alone


@pytest.mark.parametrize("family", DECODERS)
def test_prompts_of_several_lengths_say_together_what_each_says_alone_until_it_ends(family: str):
    model = DECODERS[family]()
    sampling = dataclasses.replace(SAMPLING, temperature=0.5, end_ids=frozenset(range(100, V)))
    prompts = [*PROMPTS, [(7 * i) % 100 for i in range(88)], [5, 6, 7]]  # a GPT has two positions behind 88
    alone = [generate(model, prompt, 12, sampling) for prompt in prompts]
    given: list[tuple[int, int]] = []
    model.blocks()[0].register_forward_hook(lambda _, __, hidden: given.append(tuple(hidden.shape[:2])))
    assert generate_together(model, prompts, 12, sampling) == alone
    assert given == [(5, 88), *[(5, 1)] * (len(given) - 1)]
    assert len({len(new) for new in alone}) > 2


class Kept(Sampling):
    """A sampling that records the logits that each token was drawn from."""

    logits: ClassVar[list[Tensor]] = []

    def draw(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        self.logits.append(logits)
        return super().draw(logits, generator)


@pytest.mark.parametrize("family", DECODERS)
@torch.no_grad()
def test_a_prompt_that_is_a_prefix_has_the_logits_of_training_with_a_past_and_without(family: str):
    model = DECODERS[family]().eval()
    prompts = PROMPTS[1:]
    kept = Kept(V, frozenset(), temperature=0, prompt_is_prefix=True)
    said = [generate(model, prompt, 6, dataclasses.replace(kept, prompt_is_prefix=False)) for prompt in prompts]
    for sampling in (kept, again(kept), dataclasses.replace(kept, multiple=3)):
        kept.logits.clear()
        together = generate_together(model, prompts, 6, sampling)
        assert together != said  # of prompts that are read from left to right
        for i, prompt in enumerate(prompts):
            text = prompt + together[i]
            prefix = torch.arange(len(text)) < len(prompt)
            trained = model(torch.tensor([text]), prefix=prefix.unsqueeze(0))[0]
            for step, logits in enumerate(kept.logits[i :: len(prompts)]):
                torch.testing.assert_close(logits, trained[len(prompt) - 1 + step], rtol=1e-4, atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("family", [*DISTINCT, *ALIKE, *hf_models.MIXTURES])
def test_prompts_of_several_lengths_say_together_what_each_says_alone_in_each_family_of_transformers(
    tmp_path: Path, family: str
):
    model, _ = built(hf_models.Case(family), tmp_path)
    for name, p in model.named_parameters():  # with large biases all prompts would say the same
        if p.dim() == 1:
            torch.nn.init.constant_(p, float(name.endswith("weight")))
    assert model.has_cache
    sampling = Sampling(V, frozenset(), temperature=2.0, top_k=0)
    prompts = [[7], [1, 2, 3], [(11 * i) % 120 for i in range(20)]]
    alone = [generate(model, prompt, 12, sampling) for prompt in prompts]
    assert generate_together(model, prompts, 12, sampling) == alone
    assert len({tuple(new) for new in alone}) > 1


@pytest.mark.parametrize("family", DECODERS)
def test_a_drawn_sample_is_the_same_with_a_past_and_without(family: str):
    model = DECODERS[family]()
    for how in ({"top_k": 0, "top_p": 0.9}, {"temperature": 1.5}):
        sampling = dataclasses.replace(SAMPLING, **how)
        samples = [generate(model, prompt, 15, sampling) for prompt in PROMPTS]
        assert samples == [generate(model, prompt, 15, again(sampling)) for prompt in PROMPTS]
        assert len({tuple(sample) for sample in samples}) == len(PROMPTS)


@pytest.mark.parametrize("kind", T5S)
def test_a_decoder_behind_an_encoder_says_the_same_with_a_past_and_without(kind: str):
    model = test_t5.small(**T5S[kind])
    lengths: list[int] = []
    model.decoder["1"].register_forward_hook(lambda _, __, hidden: lengths.append(hidden.shape[1]))
    endless = dataclasses.replace(SAMPLING, end_ids=frozenset())
    for sampling in (endless, dataclasses.replace(endless, temperature=0)):
        for prompt in PROMPTS[:2]:
            lengths.clear()
            said = answer(model, prompt, 20, sampling, start_id=3, pad_id=0)
            assert lengths == [1] * len(lengths)
            assert said == answer(model, prompt, 20, again(sampling), start_id=3, pad_id=0)
            assert len(said) == 20
