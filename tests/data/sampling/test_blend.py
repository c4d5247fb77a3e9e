"""Blends: every corpus at its share of every prefix, however long; the splits of the corpora."""

import pickle
from fractions import Fraction

import numpy as np
import pytest

from dtmega.config import Data
from dtmega.data.indexed_files.dataset import IndexedDataset
from dtmega.data.objectives.next_token import NEXT_TOKEN
from dtmega.data.sampling.blend import Blend, deal, huffman
from dtmega.data.sampling.samples import Samples
from dtmega.data.sampling.splits import Splits, build_samples, parts_of, split_documents
from tests.data.sampling.test_samples import LENGTHS, read, write_corpus


def megatron_split(weights, size):
    splits = [weight / sum(weights) for weight in weights]
    index = [0]
    for i, split in enumerate(splits):
        index.append(index[i] + int(round(split * float(size))))  # noqa: RUF046
    diff = index[-1] - size
    for i in range(1, len(index)):
        index[i] -= diff
    return [(index[0], index[1]), (index[1], index[2]), (index[2], index[3])]


def test_documents_are_split_with_megatrons_rounding():
    for weights in [(969.0, 30.0, 1.0), (1.0, 1.0, 1.0), (0.9, 0.05, 0.05), (98.0, 2.0, 0.0), (1.0, 0.0, 0.0)]:
        for size in [0, 1, 2, 3, 5, 10, 33, 100, 1729, 10**9 + 7]:
            assert split_documents(size, weights) == megatron_split(weights, size)


def two_parts(tmp_path):
    """Corpora of 75 and 150 tokens with S = 5: 15 and 30 samples in an epoch."""
    prefixes = [write_corpus(tmp_path), write_corpus(tmp_path, LENGTHS * 2, "twice")]
    return [Samples(IndexedDataset(prefix), (0, 12 * (k + 1)), 5, 7, "train", k) for k, prefix in enumerate(prefixes)]


# In percent: a few languages have most of the text, and some next to none, as in BLOOM's ROOTS corpus.
LANGUAGES = """
30.04 16.2 12.9 10.8 10.8 4.9 4.6 2.7 1.5 1.2 1.1 0.7 0.5 0.4 0.3 0.15 0.15 0.1 0.09 0.08 0.07 0.06 0.05 0.02 0.01 7e-3
4e-3 2e-3 1e-3 8e-4 7e-4 6e-4 5e-4 4e-4 3e-4 2e-4 1e-4 9e-5 8e-5 7e-5 6e-5 5e-5 4e-5 3e-5 2e-5 1e-5
"""
MIXTURES = {
    "3": [0.7, 0.2, 0.1],
    "46 languages": [float(percent) for percent in LANGUAGES.split()],
    "300": [1.03**k for k in range(300)],
}


@pytest.mark.parametrize("name", MIXTURES)
def test_every_corpus_is_within_one_sample_of_its_share_at_every_prefix_and_gives_its_samples_in_order(name):
    weights = MIXTURES[name]
    shares = np.array(weights) / sum(weights)
    counts = np.zeros(len(weights), np.int64)
    tree = huffman(weights)
    for g in range(20_000):
        corpus, sample = deal(tree, g)
        assert sample == counts[corpus]
        counts[corpus] += 1
        assert np.abs(counts - (g + 1) * shares).max() < 1


def test_no_mixture_is_off_by_more_than_the_fibonacci_numbers_allow():
    rng = np.random.default_rng(0)
    bound = 1.7  # half of 1 + 1 + 1/2 + 1/3 + 1/5 + 1/8 + ...
    for _ in range(20):
        weights = rng.random(8) ** rng.uniform(0.5, 6)
        tree, counts = huffman(weights.tolist()), np.zeros(8)
        for g in range(1000):
            counts[deal(tree, g)[0]] += 1
            assert np.abs(counts - (g + 1) * weights / weights.sum()).max() < bound


def test_a_corpus_of_one_in_a_trillion_has_its_share_after_a_quadrillion_samples():
    tree = huffman([1, 10**12 - 1])
    for g in (10**12, 10**15, 10**18 + 12345):
        corpus, sample = deal(tree, g)
        given = g - sample if corpus == 1 else sample
        assert abs(given - Fraction(g, 10**12)) < 1


def test_a_blend_without_weights_reads_all_corpora_at_the_same_pace(tmp_path):
    samples = read(Blend(two_parts(tmp_path), []), 45)  # 15 + 30: one epoch of both
    np.testing.assert_array_equal(np.bincount(samples[:, :-1].ravel()), [2] * 75 + [1] * 75)


def test_a_blend_has_the_tokens_of_all_its_corpora_and_no_sample_before_the_first(tmp_path):
    blend = Blend(two_parts(tmp_path), [3, 1])
    assert blend.n_tokens == 75 + 150
    with pytest.raises(IndexError, match="sample -1: samples are numbered from 0"):
        blend[-1]


def test_an_unpickled_copy_of_a_deep_blend_gives_the_same_samples(tmp_path):
    (part, _) = two_parts(tmp_path)
    blend = Blend([part] * 900, [2.0**k for k in range(900)])  # each corpus has more than all before it
    np.testing.assert_array_equal(read(pickle.loads(pickle.dumps(blend)), 20), read(blend, 20))


def data(**keys):
    return Data(**{"seq_len": 5, "split": "8,4,0"} | keys)


def splits(cfg: Data, prefixes: list[str], seed: int) -> Splits:
    return build_samples(NEXT_TOKEN, cfg, parts_of(cfg, [IndexedDataset(prefix) for prefix in prefixes]), seed)


def test_each_corpus_is_split_by_document_and_then_blended(tmp_path):
    prefixes = [write_corpus(tmp_path), write_corpus(tmp_path, LENGTHS * 2, "twice")]
    built = splits(data(path=prefixes, weights=[1.0, 1.0]), prefixes, seed=3)
    parts = [
        Samples(IndexedDataset(prefix), ((0, 8), (0, 16))[k], 5, 3, "train", k) for k, prefix in enumerate(prefixes)
    ]
    expected = Blend(parts, [0.5, 0.5])
    np.testing.assert_array_equal(read(built.samples["train"], 60), read(expected, 60))


@pytest.mark.parametrize("corpora", [1, 2])
def test_each_split_has_its_own_documents_and_shuffle(tmp_path, corpora):
    prefixes = [write_corpus(tmp_path, LENGTHS, f"{k}") for k in range(corpora)]
    built = splits(data(path=prefixes, split="1,1,2"), prefixes, seed=4)
    for split, documents in {"train": (0, 3), "valid": (3, 6), "test": (6, 12)}.items():
        parts = [Samples(IndexedDataset(prefix), documents, 5, 4, split, k) for k, prefix in enumerate(prefixes)]
        np.testing.assert_array_equal(read(built.samples[split], 20), read(Blend(parts, []), 20))


def test_a_part_with_weight_0_is_none(tmp_path):
    built = splits(data(), [write_corpus(tmp_path)], seed=3)
    assert [name for name, samples in built.samples.items() if samples is None] == ["test"]


def test_a_split_that_leaves_a_part_without_documents_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"for 'valid', got 0 tokens in 0 of 12 documents"):
        splits(data(split="969,30,1"), [write_corpus(tmp_path, [100] * 12)], seed=3)


def test_a_corpus_too_small_for_a_split_is_left_out_of_it_and_named_and_the_others_keep_their_samples(tmp_path):
    prefixes = [write_corpus(tmp_path, lengths, f"{k}") for k, lengths in enumerate([LENGTHS, [31, 2], LENGTHS])]
    built = splits(data(path=prefixes, weights=[1, 9, 3], split="2,1,0"), prefixes, seed=3)
    parts = [Samples(IndexedDataset(prefixes[k]), (8, 12), 5, 3, "valid", k) for k in (0, 2)]
    np.testing.assert_array_equal(read(built.samples["valid"], 20), read(Blend(parts, [1, 3]), 20))
    assert built.notes == [f"'valid' is blended without {prefixes[1]}: its part has less than one sample"]


def test_a_blend_with_a_corpus_that_has_nothing_to_train_on_is_an_error(tmp_path):
    prefixes = [write_corpus(tmp_path), write_corpus(tmp_path, [2], "small")]
    with pytest.raises(ValueError, match=r"small: .* for 'train'"):
        splits(data(path=prefixes), prefixes, seed=3)


def test_an_empty_corpus_is_an_error_that_names_the_file(tmp_path):
    with pytest.raises(ValueError, match=r"corpus: .* for 'train', got 0 tokens in 0 of 0 documents"):
        splits(data(), [write_corpus(tmp_path, [])], seed=3)
