"""Prefix language models: what is given, what bears a loss, and how much."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from dtmega import config, families
from dtmega.config import Data
from dtmega.data.indexed_files.dataset import IndexedDataset
from dtmega.data.objectives.keys import check_keys
from dtmega.data.objectives.next_token import NEXT_TOKEN
from dtmega.data.objectives.prefixes import PREFIX, PrefixRows, PrefixSample, PrefixSamples, prefixes, weights
from dtmega.data.objectives.rows import IGNORED
from dtmega.data.sampling.samples import Samples
from dtmega.ops.attention_rule import attention_rule
from tests.data.sampling.test_samples import write_corpus

EOD, S = 0, 23


class Drawn:
    """Endless samples of small numbers, of which EOD is one."""

    def __getitem__(self, g: int) -> PrefixSample:
        generator = np.random.RandomState(g)
        return PrefixSample(generator.randint(0, 9, S + 1), int(generator.randint(2**31)))


def rows_of(indices: range, **keys: bool) -> dict[str, Tensor]:
    return PrefixRows(Drawn(), Data(objective="prefix-lm", **keys), EOD)[indices]  # pyright: ignore


def documents(row: Tensor) -> Iterator[tuple[int, int]]:
    """The first token of each document of a row, and its end of document, or the row's length."""
    start = 0
    for i, token in enumerate(row.tolist()):
        if token == EOD:
            yield start, i
            start = i + 1
    if start < len(row):
        yield start, len(row)


def originals(tokens: Tensor, prefix: Tensor, per_document: bool) -> tuple[Tensor, Tensor]:
    """attention [B, S, S] and loss mask [B, S] of `get_ltor_masks_and_position_ids`, with --loss-on-targets-only."""
    allowed = torch.tril(torch.ones(len(tokens), S, S)).bool()
    bears_loss = torch.ones(len(tokens), S).bool()
    for b, row in enumerate(tokens):
        if per_document:
            for start, end in documents(row):
                index = start + int(prefix[b, start : end + 1].sum())
                allowed[b, end + 1 :, : end + 1] = False
                allowed[b, start:index, start:index] = True
                bears_loss[b, start:index] = False
        else:
            index = int(prefix[b].sum())
            allowed[b, :index, :index] = True
            bears_loss[b, :index] = False
    return allowed, bears_loss


@pytest.mark.parametrize("per_document", [True, False])
def test_attention_and_loss_are_masked_as_in_the_original(per_document: bool):
    rows = rows_of(range(100), reset_attention_mask=per_document)
    allowed, bears_loss = originals(rows["tokens"], rows["prefix"], per_document)
    rule = attention_rule(rows["places"], causal=True, document_ids=rows.get("document_ids"), prefix=rows["prefix"])
    b = torch.arange(100)[:, None, None]
    i = torch.arange(S)[:, None]
    assert torch.equal(rule.allowed(b, i, torch.arange(S)), allowed)
    assert torch.equal(rows["labels"] != IGNORED, bears_loss)


def test_each_length_of_a_prefix_comes_as_often_as_the_others():
    # `get_prefix_indices`: randint, both ends included, from a document's first token to its end of document.
    ends = np.zeros((30_000, 6), bool)
    ends[:, 3] = True
    drawn = prefixes(ends, np.arange(30_000, dtype=np.uint64))
    for first, last, n_lengths in ((0, 4, 4), (4, 6, 3)):
        lengths = Counter(drawn[:, first:last].sum(axis=1).tolist())
        expected = 30_000 / n_lengths
        assert sorted(lengths) == list(range(n_lengths))
        assert all(abs(n - expected) < 5 * expected**0.5 for n in lengths.values())
    both = np.corrcoef(drawn[:, :4].sum(axis=1), drawn[:, 4:].sum(axis=1))[0, 1]
    assert abs(both) < 5 / 30_000**0.5


def test_a_prefix_is_a_function_of_the_sample_alone(tmp_path):
    dataset = IndexedDataset(write_corpus(tmp_path))
    samples = PrefixSamples(dataset, (0, 10), S, 1234, "train")
    rows = PrefixRows(samples, Data(objective="prefix-lm"), EOD)
    whole = rows[range(8)]
    for g in range(8):
        assert torch.equal(rows[range(g, g + 1)]["prefix"][0], whole["prefix"][g])
    assert np.array_equal(samples[3].tokens, Samples(dataset, (0, 10), S, 1234, "train")[3])
    others = [PrefixSamples(dataset, (0, 10), S, *of)[3].key for of in ((1234, "valid"), (7, "train"))]
    assert len({samples[3].key, samples[4].key, *others}) == 4


def test_weights_and_their_divisor_are_the_originals():
    rows = rows_of(range(4), reweight_positions=True)
    # pretrain_prefix_lm.py: arange(S, 0, -1) / (S + 1) * 2, times the loss mask, and the loss by its sum.
    original = torch.arange(S, 0, -1, dtype=torch.float) / (S + 1) * 2
    torch.testing.assert_close(rows["label_weights"], original.expand(4, S))
    torch.testing.assert_close(torch.from_numpy(weights(S)), original)
    masked = original * (rows["labels"] != IGNORED)
    assert PREFIX.counts(rows)["tokens"] == pytest.approx(masked.sum().item(), rel=1e-6)
    del rows["label_weights"]
    assert PREFIX.counts(rows)["tokens"] == (rows["labels"] != IGNORED).sum()


def of(**keys: dict[str, object]) -> config.Config:
    return config.validate({"train": {"steps": 1}, **keys}, "test")


@pytest.mark.parametrize("name", ["bloom", "gpt", "llama"])
def test_a_decoder_is_trained_for_it_where_the_configuration_says_so(name: str):
    assert families.objective(of(model={"name": name})) is NEXT_TOKEN
    assert families.objective(of(model={"name": name}, data={"objective": "prefix-lm"})) is PREFIX


@pytest.mark.parametrize("name", ["bert", "hf"])
def test_other_models_are_not(name: str):
    with pytest.raises(ValueError, match=f"name = '{name}' is not trained with objective = 'prefix-lm'"):
        families.objective(of(model={"name": name}, data={"objective": "prefix-lm"}))


def test_weights_by_position_are_refused_without_it():
    with pytest.raises(ValueError, match="reweight_positions=True means nothing"):
        check_keys(Data(reweight_positions=True), NEXT_TOKEN)
