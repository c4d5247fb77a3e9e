"""BERT's masks against Megatron's loop and the shares it asks for, on the sentences of Python's library."""

from __future__ import annotations

import pickle
from collections import Counter

import numpy as np
import pytest
import torch

from dtmega.config import Batch, Data
from dtmega.data.loader import TrainBatches, eval_batches
from dtmega.data.objectives.denoising import masking
from dtmega.data.objectives.denoising.masked import MASKED, MaskedRows
from dtmega.data.objectives.denoising.masking import hide
from dtmega.data.objectives.denoising.ngrams import words_of
from dtmega.data.objectives.denoising.pairs import Pairs, lay_out
from dtmega.data.objectives.rows import IGNORED
from dtmega.ops import keyed
from tests.library import SPECIALS, TOKENIZER, is_likely, library, samples_of, write

S = 128
DATA = Data(seq_len=S, num_workers=0)
SPECIAL_IDS = {*TOKENIZER.special_ids}


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> MaskedRows:
    dataset = write(tmp_path_factory.mktemp("masking") / "library", library())
    return MASKED.rows(samples_of(dataset, S), DATA, TOKENIZER)


@pytest.fixture(scope="module")
def pairs(rows) -> Pairs:
    """An epoch before it is masked."""
    return lay_out([rows.samples[g] for g in range(int(rows.samples.n_samples))], S, SPECIALS)


@pytest.fixture(scope="module")
def microbatch(rows, pairs) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in rows[range(len(pairs.tokens))].items()}


def megatron_words(pairs: Pairs, b: int) -> list[list[list[int]]]:
    """The words of each segment, as the places of their tokens (`create_masked_lm_predictions`)."""
    found = []
    for segment in (1, 2):
        words: list[list[int]] = []
        for place in np.flatnonzero(pairs.segments[b] == segment).tolist():
            goes_on = TOKENIZER.decode([int(pairs.tokens[b, place])]).startswith("##")
            if goes_on and words:
                words[-1].append(place)
            else:
                words.append([place])
        found.append(words)
    return found


def test_words_are_those_that_their_marks_tell_and_begin_anew_in_the_second_segment(pairs, rows):
    found = words_of(pairs.tokens, pairs.segments, rows.vocabulary.continuing)
    begun_by_a_rest = 0
    for b in range(len(pairs.tokens)):
        first, second = megatron_words(pairs, b)
        words = [*first, *second]
        n = len(words)
        assert [np.flatnonzero((found.numbers[b] == w) & (pairs.segments[b] > 0)).tolist() for w in range(n)] == words
        assert found.sizes[b].tolist() == [len(word) for word in words] + [0] * (found.sizes.shape[1] - n)
        assert found.in_segment[b, :n].tolist() == [*range(len(first), 0, -1), *range(len(second), 0, -1)]
        begun_by_a_rest += int(pairs.tokens[b, second[0][0]] in TOKENIZER.continuing_ids)
    assert begun_by_a_rest > 5


def megatron_choice(words: list[list[list[int]]], order: list[int], lengths: list[int], to_hide: int) -> set[int]:
    """The places that `create_masked_lm_predictions` hides, if it goes through n-grams in this order, of these lengths.

    An n-gram has no words of two segments, which it may have there.
    """
    grams = [[segment[i : i + 3] for i in range(len(segment))] for segment in words]
    grams = [gram for segment in grams for gram in segment]
    covered: set[int] = set()
    for start in order:
        if len(covered) >= to_hide:
            break
        n = lengths[start]
        places = [place for word in grams[start][:n] for place in word]
        while len(covered) + len(places) > to_hide:
            n -= 1
            if n == 0:
                break
            places = [place for word in grams[start][:n] for place in word]
        if len(covered) + len(places) > to_hide or covered & {*places}:
            continue
        covered |= {*places}
    return covered


def test_hidden_words_are_those_of_megatrons_loop(pairs, microbatch):
    index = np.arange(S)
    order = keyed.draws(pairs.keys[:, None], "order", index)
    share = keyed.uniform(keyed.draws(pairs.keys[:, None], "n", index))
    for b in range(len(pairs.tokens)):
        words = megatron_words(pairs, b)
        left = [n for segment in words for n in range(len(segment), 0, -1)]
        # 1/1, 1/2, 1/3, as far as there are words, of their sum.
        bounds = [np.cumsum([1.0, 1 / 2, 1 / 3][:most]) for most in left]
        lengths = [1 + int((share[b, w] * bound[-1] >= bound).sum()) for w, bound in enumerate(bounds)]
        n_tokens = int((~pairs.padding[b]).sum())
        expected = megatron_choice(
            words, np.argsort(order[b, : len(left)]).tolist(), lengths, max(1, round(0.15 * n_tokens))
        )
        assert {*np.flatnonzero(microbatch["labels"][b] != IGNORED).tolist()} == expected


@pytest.mark.parametrize(("most", "shares"), [(1, [1]), (2, [2 / 3, 1 / 3]), (3, [6 / 11, 3 / 11, 2 / 11])])
def test_n_grams_are_drawn_as_often_as_one_divided_by_their_length(most, shares):
    drawn = keyed.uniform(keyed.draws(np.arange(100, dtype=np.uint64)[:, None], "n", np.arange(200)))
    for max_ngram, in_segment in ((3, most), (most, 9)):
        found = Counter(
            masking._drawn_lengths(drawn, np.full_like(drawn, in_segment, int), max_ngram).flatten().tolist()
        )
        assert set(found) == {*range(1, most + 1)}
        assert most == 1 or all(is_likely(found[n], 20_000, share) for n, share in enumerate(shares, 1))


def test_labels_are_the_tokens_that_are_hidden_and_nothing_else_is_changed(pairs, microbatch):
    labels, tokens = microbatch["labels"], microbatch["tokens"]
    hidden = labels != IGNORED
    assert (labels[hidden] == pairs.tokens[hidden]).all()
    assert (tokens[~hidden] == pairs.tokens[~hidden]).all()
    assert not SPECIAL_IDS & {*labels[hidden].tolist()}
    assert microbatch["swapped"].tolist() == pairs.swapped.tolist()
    assert (microbatch["token_types"] == pairs.types).all()
    assert (microbatch["document_ids"] == pairs.padding).all()
    assert (microbatch["places"] == np.arange(S)).all()
    assert microbatch["sample_ids"].tolist() == [*range(len(tokens))]


def test_of_hidden_tokens_80_percent_are_masks_10_random_ones_and_10_stay(microbatch, rows):
    hidden = microbatch["labels"] != IGNORED
    labels, tokens = microbatch["labels"][hidden], microbatch["tokens"][hidden]
    n = len(labels)
    assert n > 5000
    random = tokens[(tokens != SPECIALS.mask) & (tokens != labels)]
    assert is_likely(int((tokens == SPECIALS.mask).sum()), n, 0.8)
    assert is_likely(len(random), n, 0.1)
    assert not SPECIAL_IDS & {*random.tolist()}
    n_ordinary = TOKENIZER.vocab_size - len(SPECIAL_IDS)
    assert is_likely(
        int((random < TOKENIZER.vocab_size // 4).sum()), len(random), 1 / 4 - len(SPECIAL_IDS) / n_ordinary
    )


def test_so_many_tokens_are_hidden_as_asked_for_as_far_as_words_allow(pairs, rows):
    lengths = (~pairs.padding).sum(1)
    for mask_prob, max_ngram in ((0.15, 3), (0.4, 1)):
        asked = np.maximum(1, np.rint(mask_prob * lengths))
        data = DATA.model_copy(update={"mask_prob": mask_prob, "max_ngram": max_ngram})
        labels = MASKED.rows(rows.samples, data, TOKENIZER)[range(len(lengths))]["labels"].numpy()
        assert ((labels != IGNORED) == hide(pairs, rows.vocabulary, mask_prob, max_ngram).hidden).all()
        hidden = (labels != IGNORED).sum(1)
        assert (hidden <= asked).all()
        assert hidden.sum() > 0.98 * asked.sum()
    short = lengths < 8
    assert short.any()
    assert (asked[lengths * 0.15 < 1] >= 1).all()


def test_masks_are_other_ones_in_the_next_epoch_and_the_same_ones_when_read_again(rows):
    n = int(rows.samples.n_samples)
    first = {tuple(row) for row in rows[range(n)]["tokens"].tolist()}
    again = {tuple(row) for row in rows[range(n)]["tokens"].tolist()}
    second = {tuple(row) for row in rows[range(n, 2 * n)]["tokens"].tolist()}
    assert first == again
    assert len(first & second) < n / 20


def test_a_text_of_words_longer_than_what_is_to_be_hidden_has_no_labels(tmp_path):
    word = TOKENIZER.encode("unpicklable")
    assert len(word) > 2
    samples = samples_of(write(tmp_path / "long", [[word, word]]), 2 * len(word) + 3)
    data = Data(seq_len=2 * len(word) + 3, mask_prob=0.01)
    rows = MASKED.rows(samples, data, TOKENIZER)
    assert (rows[range(8)]["labels"] == IGNORED).all()
    assert MASKED.counts(rows[range(8)]) == {"tokens": 0, "sequences": 8}


# ------------------------------------------------------------------------------------------------------------ batches


def of_samples(steps) -> dict[int, list[list[int]]]:
    """Every row of each sample."""
    found = {}
    for step in steps:
        for microbatch in step.microbatches:
            for b, g in enumerate(microbatch["sample_ids"].tolist()):
                found[g] = [tensor[b].tolist() for tensor in microbatch.values()]
    return found


def batches(rows, micro, rank=0, world=1, steps=2):
    loader = TrainBatches(rows, DATA, Batch(micro_batch_size=micro, global_batch_size=16), rank, world, start_sample=32)
    return [next(loader) for _ in range(steps)]


def test_the_rows_of_a_sample_depend_on_no_rank_microbatch_or_worker(rows):
    whole = of_samples(batches(rows, 16))
    assert [*whole] == [*range(32, 64)]
    in_worker = pickle.loads(pickle.dumps(rows))
    ranks = [of_samples(batches(in_worker, 2, rank, 2)) for rank in range(2)]
    assert ranks[0] | ranks[1] == whole
    assert of_samples(batches(rows, 4)) == whole


def test_rows_are_contiguous_int64(rows):
    for microbatch in batches(rows, 4, steps=1)[0].microbatches:
        assert set(microbatch) == {
            *("tokens", "labels", "sample_ids", "places"),
            *("token_types", "swapped", "document_ids"),
        }
        for name, tensor in microbatch.items():
            assert (tensor.dtype, tensor.is_contiguous()) == (torch.int64, True)
            assert list(tensor.shape) == ([4] if name in ("sample_ids", "swapped") else [4, S])


def test_an_evaluation_has_the_same_samples_and_masks_each_time(rows):
    batch = Batch(micro_batch_size=4, global_batch_size=8)
    first, again = (of_samples(eval_batches(rows, batch, 0, 1, 3)) for _ in range(2))
    assert [*first] == [*range(24)]
    assert first == again
