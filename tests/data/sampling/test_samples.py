"""Samples against Megatron's loops, said again plainly here. In a test corpus each token is its position in .bin."""

import pickle
import struct
from itertools import pairwise

import numpy as np
import pytest

from dtmega.data.indexed_files.dataset import IndexedDataset
from dtmega.data.indexed_files.writer import IndexedWriter
from dtmega.data.sampling.order import document_order, permutation
from dtmega.data.sampling.samples import Samples
from dtmega.ops import keyed

LENGTHS = [5, 0, 31, 1, 7, 2, 0, 12, 3, 1, 9, 4]  # 75 tokens; documents without any, and one longer than some samples


def write_corpus(folder, lengths=LENGTHS, name="corpus"):
    ids = np.arange(sum(lengths))
    with IndexedWriter(folder / name, np.dtype("<i4")) as writer:
        for end, length in zip(np.cumsum(lengths), lengths, strict=True):
            writer.add(ids[end - length : end])
    return str(folder / name)


@pytest.fixture
def corpus(tmp_path):
    return IndexedDataset(write_corpus(tmp_path))


def all_of(dataset, seq_len):
    return Samples(dataset, (0, len(dataset)), seq_len, 7, "train")


def read(samples, n):
    return np.stack([samples[g] for g in range(n)])


def megatron_samples(documents, sizes, starts, seq_len):
    """[n, S + 1] of the documents in this order: `_build_sample_idx` and `GPTDataset.__getitem__`."""
    n = (sum(sizes[d] for d in documents) - 1) // seq_len
    index = [(0, 0)]
    position = offset = 0
    while len(index) <= n:
        remaining = seq_len + 1
        while remaining != 0:
            length = sizes[documents[position]] - offset
            remaining -= length
            if remaining <= 0:
                offset += remaining + length - 1
                remaining = 0
            else:
                position += 1
                offset = 0
        index.append((position, offset))
    samples = []
    for (first, begin), (last, end) in pairwise(index):
        sample = []
        for p in range(first, last + 1):
            a = begin if p == first else 0
            b = end + 1 if p == last else sizes[documents[p]]
            sample.extend(range(starts[documents[p]] + a, starts[documents[p]] + b))
        samples.append(sample)
    return np.array(samples)


@pytest.mark.parametrize("seq_len", [1, 4, 25, 74])
def test_samples_are_those_of_megatrons_loop_over_the_shuffled_documents(corpus, seq_len):
    epochs, n_tokens = 4, corpus.n_tokens
    starts = np.cumsum([0, *LENGTHS])
    documents = [d for e in range(epochs) for d in permutation(len(LENGTHS), f"7/train/0/{e}/documents")]
    stream = megatron_samples(documents, LENGTHS, starts, seq_len)
    order = []
    for epoch in range(epochs):
        inside = [i for i in range(len(stream)) if epoch * n_tokens <= i * seq_len < (epoch + 1) * n_tokens]
        if epoch < epochs - 1:  # the last one's last sample would need a fifth epoch
            order += [inside[keyed.permuted(i, len(inside), f"7/train/0/{epoch}/samples")] for i in range(len(inside))]
    np.testing.assert_array_equal(read(all_of(corpus, seq_len), len(order)), stream[order])


def test_an_epoch_has_each_token_as_input_once(corpus):
    samples = read(all_of(corpus, seq_len=25), 2 * 3)  # 3 x 25 = 75 tokens
    for epoch in (samples[:3], samples[3:]):
        np.testing.assert_array_equal(np.sort(epoch[:, :-1].ravel()), np.arange(75))


def test_each_token_is_input_and_label_equally_often_over_epochs_that_samples_do_not_divide(corpus):
    samples = read(all_of(corpus, seq_len=4), 75)  # 75 x 4 = four epochs of 75 tokens
    np.testing.assert_array_equal(np.bincount(samples[:, :-1].ravel()), np.full(75, 4))


def test_a_sample_does_not_depend_on_what_was_read_before(corpus):
    expected, backwards = read(all_of(corpus, seq_len=4), 200), all_of(corpus, seq_len=4)
    np.testing.assert_array_equal([backwards[g] for g in reversed(range(200))], expected[::-1])


def test_only_the_last_two_epochs_are_kept_and_each_is_ordered_once(corpus, monkeypatch):
    made = []

    def noted(dataset, documents, stream, epoch):
        made.append(epoch)
        return document_order(dataset, documents, stream, epoch)

    monkeypatch.setattr("dtmega.data.sampling.samples.document_order", noted)
    samples = all_of(corpus, seq_len=4)
    read(samples, 75)  # four epochs, and the last token's label is of a fifth
    assert sorted(made) == [0, 1, 2, 3, 4]
    samples[0]
    assert made.count(0) == 2


@pytest.mark.parametrize("g", [-1, -75])
def test_there_is_no_sample_before_the_first(corpus, g):
    with pytest.raises(IndexError, match=f"sample {g}: samples are numbered from 0"):
        all_of(corpus, seq_len=4)[g]


def test_an_unpickled_copy_gives_the_same_samples(corpus):
    samples = Samples(corpus, (2, 8), 4, 7, "valid", corpus=2)
    np.testing.assert_array_equal(read(pickle.loads(pickle.dumps(samples)), 40), read(samples, 40))


def test_seed_split_corpus_and_epoch_have_shuffles_of_their_own(corpus):
    orders = [
        read(Samples(corpus, (0, 12), 25, seed, split, position), 6).tobytes()
        for seed in (1, 2)
        for split in ("train", "valid")
        for position in (0, 1)
    ]
    assert len(set(orders)) == 8
    assert orders[0][: len(orders[0]) // 2] != orders[0][len(orders[0]) // 2 :]


def test_a_permutation_stays_what_it_was():
    # Another numpy, machine or version of this file must not reorder anybody's run.
    assert permutation(10, "1234/train/0/0/documents").tolist() == [0, 1, 6, 7, 5, 9, 4, 3, 8, 2]


def test_a_document_of_several_sequences_stays_together(tmp_path):
    corpus = IndexedDataset(write_corpus(tmp_path, [3, 2, 4, 1, 5, 6, 4]))
    idx = (tmp_path / "corpus.idx").read_bytes()
    documents = [0, 3, 3, 5, 7]  # of 9, 0, 6 and 10 tokens
    idx = idx[:26] + struct.pack("<Q", len(documents)) + idx[34:-64] + np.array(documents, "<i8").tobytes()
    (tmp_path / "corpus.idx").write_bytes(idx)
    samples = read(Samples(IndexedDataset(corpus.prefix), (0, 4), 10, 0, "train"), 40)
    jumps = samples[:, 1:][np.diff(samples) != 1]
    assert set(jumps) == {0, 9, 15}


def test_documents_outside_the_part_are_never_read(corpus):
    samples = read(Samples(corpus, (2, 8), 10, 0, "train"), 40)  # documents 2 to 7 are tokens 5 to 57
    assert set(np.unique(samples)) == set(range(5, 58))


@pytest.mark.parametrize("documents", [(0, 2), (1, 2), (3, 3)])
def test_a_part_shorter_than_one_sample_is_an_error_that_names_file_split_and_keys(corpus, documents):
    with pytest.raises(ValueError, match=r"corpus: .* at least .*6 tokens for 'valid'.*12 documents.*split.*seq_len"):
        Samples(corpus, documents, 5, 0, "valid")


def test_the_shortest_part_is_one_sample_long(corpus):
    assert sorted(Samples(corpus, (0, 2), 4, 0, "train")[0]) == [0, 1, 2, 3, 4]
