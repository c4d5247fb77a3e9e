"""BERT's pairs against Megatron's loops, said again plainly, on sentences as long as those of Python's library."""

from __future__ import annotations

import os
import pickle
from collections import Counter

import numpy as np
import pytest

from dtmega.config import Data
from dtmega.data import cache_dir
from dtmega.data.indexed_files.dataset import IndexedDataset
from dtmega.data.objectives.denoising import cut
from dtmega.data.objectives.denoising.cut import Targets, cut_table
from dtmega.data.objectives.denoising.masked import MASKED
from dtmega.data.objectives.denoising.pairs import PairSamples, lay_out
from dtmega.data.sampling.blend import Blend
from dtmega.data.sampling.splits import build_samples, parts_of
from tests.library import SPECIALS, is_likely, library, samples_of, usable, write

S = 96
TARGETS = Targets(S - 3, 0.1, "7/train/0")


@pytest.fixture(scope="module")
def numbered(tmp_path_factory) -> IndexedDataset:
    """Each token is its place in the .bin, and the special ones of BERT are among the first document's."""
    return write(tmp_path_factory.mktemp("pairs") / "numbered", library(), numbered=True)


def write_one(folder, lengths):
    """One document of such sentences."""
    return write(folder / "one", [[[0] * length for length in lengths]], numbered=True)


# --------------------------------------------------------------------------------------------------------------- cut


def megatron_cut(dataset: IndexedDataset, documents: tuple[int, int]) -> list[list[int]]:
    """`build_mapping_impl`, with the targets of `cut.py` for those of its generator."""
    found = []
    for document in range(*documents):
        first, last = dataset.document_index[document : document + 2].tolist()
        sizes = dataset.sizes[first:last].tolist()
        if len(sizes) < 2 or max(sizes) > 512 or min(sizes) < 1:
            continue
        start, n_tokens, n_sentences, remaining = first, 0, 0, len(sizes)
        target = int(TARGETS.lengths_at(np.array([first]))[0])
        for sentence in range(first, last):
            n_tokens += int(dataset.sizes[sentence])
            n_sentences += 1
            remaining -= 1
            if (n_tokens >= target and remaining > 1 and n_sentences >= 2) or remaining == 0:
                found.append([start, sentence + 1, target])
                start, n_tokens, n_sentences = sentence + 1, 0, 0
                target = int(TARGETS.lengths_at(np.array([start]))[0])
    return found


@pytest.mark.parametrize("chunk", [1, 300, 1 << 20])
@pytest.mark.parametrize("long", [1, 1 << 20])
def test_documents_are_cut_as_in_megatrons_loop_in_memory_and_in_a_file(numbered, tmp_path, monkeypatch, chunk, long):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cut, "CHUNK", chunk)
    monkeypatch.setattr(cut, "LONG", long)
    for documents in ((0, len(numbered.document_index) - 1), (2, 20)):
        assert cut_table(numbered, documents, TARGETS).tolist() == megatron_cut(numbered, documents)
    assert len([*cache_dir().glob("pairs-*.bin")]) == (2 if long == 1 else 0)


def test_a_table_in_a_file_is_made_once_and_mapped(numbered, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cut, "LONG", 1)
    cut_table(numbered, (2, 20), TARGETS)
    (path,) = cache_dir().glob("pairs-*.bin")
    os.utime(path, ns=(0, 0))
    again = cut_table(numbered, (2, 20), TARGETS)
    assert path.stat().st_mtime_ns == 0
    assert isinstance(again.base, np.memmap)
    others = [(2, 21), TARGETS], [(2, 20), TARGETS._replace(longest=50)], [(2, 20), TARGETS._replace(stream="8")]
    for documents, targets in others:
        cut_table(numbered, documents, targets)
    assert len([*cache_dir().glob("pairs-*.bin")]) == 4
    os.utime(f"{numbered.prefix}.idx", ns=(0, 0))  # as if the text had been made anew
    cut_table(numbered, (2, 20), TARGETS)
    assert path.stat().st_mtime_ns != 0


def test_without_room_for_the_file_the_table_is_kept_in_memory_and_that_is_said(numbered, tmp_path, monkeypatch, capfd):
    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cut, "LONG", 1)
    monkeypatch.setattr(os, "fsync", full)
    assert cut_table(numbered, (2, 20), TARGETS).tolist() == megatron_cut(numbered, (2, 20))
    assert "No space left on device: the table of samples is kept in the memory" in capfd.readouterr().err


def test_so_many_targets_are_short_as_asked_for_and_these_are_uniform():
    found = TARGETS._replace(short_seq_prob=0.3).lengths_at(np.arange(40_000))
    short = found[found < S - 3]
    assert is_likely(len(short), 40_000, 0.3 * (S - 5) / (S - 4))  # a uniform one may be the longest, too
    counts = Counter(short.tolist())
    assert [*sorted(counts)] == [*range(2, S - 3)]
    assert all(is_likely(n, 40_000, 0.3 / (S - 4)) for n in counts.values())
    assert set(TARGETS._replace(short_seq_prob=0.0).lengths_at(np.arange(1000)).tolist()) == {S - 3}


# ------------------------------------------------------------------------------------------------------------- epochs


def test_each_sentence_of_a_usable_document_is_in_one_sample_of_each_epoch(numbered):
    samples = samples_of(numbered, S)
    first = numbered.first_token(np.arange(len(numbered.document_index)))
    expected = [i for d, document in enumerate(library()) if usable(document) for i in range(first[d], first[d + 1])]
    n = samples.n_samples
    for epoch in range(2):
        read = np.concatenate([samples[g].tokens for g in range(epoch * n, (epoch + 1) * n)])
        assert np.sort(read).tolist() == expected
    assert samples.n_tokens == len(expected)


def test_tokens_that_are_not_read_are_counted_and_the_run_is_told_why(numbered):
    unread = sum(len(s) for document in library() if not usable(document) for s in document)
    assert samples_of(numbered, S).note == (
        f"'train': {unread:,} tokens of {numbered.prefix} are not read, in documents of fewer than two sentences, or "
        "with one that is empty or longer than 512 tokens"
    )
    assert PairSamples(numbered, (1, 3), S, 0.1, 7, "train").note == ""


def test_each_epoch_seed_split_and_corpus_has_its_own_order(numbered):
    def order(*stream):
        samples = PairSamples(numbered, (2, 20), S, 0.0, *stream)
        return [int(samples[g].tokens[0]) for g in range(2 * samples.n_samples)]

    whole = [order(seed, split, k) for seed in (1, 2) for split in ("train", "valid") for k in (0, 1)]
    half = len(whole[0]) // 2
    assert len({tuple(one[:half]) for one in whole} | {tuple(one[half:]) for one in whole}) == 16
    assert len({tuple(sorted(one[:half])) for one in whole}) == 1


def test_an_objective_makes_the_samples_of_each_part_with_its_own_draws(numbered):
    data = Data(path=[numbered.prefix] * 2, weights=[1.0, 1.0], seq_len=S, short_seq_prob=0.5, split="1,1,0")
    built = build_samples(MASKED, data, parts_of(data, [IndexedDataset(path) for path in data.paths]), seed=3)
    n_documents = len(numbered.document_index) - 1
    notes = []
    for split, documents in (("train", (0, n_documents // 2)), ("valid", (n_documents // 2, n_documents))):
        parts = [PairSamples(numbered, documents, S, 0.5, 3, split, corpus) for corpus in range(2)]
        found, expected = built.samples[split], Blend(parts, [1, 1])
        assert found is not None
        assert found.n_samples == parts[0].n_samples + parts[1].n_samples
        for g in range(40):
            assert found[g].tokens.tolist() == expected[g].tokens.tolist()
            assert found[g][1:] == expected[g][1:]
        notes += [part.note for part in parts]
    assert built.notes == notes


def test_a_sample_stays_what_it_is_wherever_it_is_read(numbered):
    samples = samples_of(numbered, S)
    copy = pickle.loads(pickle.dumps(samples))
    for g in (40, 3, 10**12):
        one, other = samples[g], copy[g]
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one[1:] == other[1:]


def test_a_file_of_unusable_documents_or_too_short_a_sequence_is_refused(numbered, tmp_path):
    with pytest.raises(ValueError, match=r"numbered: expected a document of at least 2 sentences for 'valid'"):
        PairSamples(numbered, (0, 1), S, 0.1, 7, "valid")
    with pytest.raises(ValueError, match=r"seq_len=4 has no room .* expected at least 5 \(\[data\] seq_len\)"):
        samples_of(numbered, 4)
    assert lay_out([samples_of(numbered, 5)[0]], 5, SPECIALS).tokens.shape == (1, 5)
    with pytest.raises(IndexError, match="sample -1: samples are numbered from 0"):
        _ = samples_of(numbered, S)[-1]


# -------------------------------------------------------------------------------------------------------------- pairs


def test_the_first_segment_ends_after_any_of_its_sentences_equally_often(tmp_path):
    lengths = [3, 1, 4, 2, 5]
    samples = samples_of(write_one(tmp_path, lengths), S)
    assert samples.n_samples == 1
    ends = Counter(samples[g].n_first for g in range(2000))
    assert set(ends) == {3, 4, 8, 10}
    assert all(is_likely(n, 2000, 1 / 4) for n in ends.values())
    two = samples_of(write_one(tmp_path, [3, 1]), S)
    assert {two[g].n_first for g in range(20)} == {3}


def parts(pairs, b):
    """(first, second) of a sample, read as a reader of its tokens would; all else is where it should be."""
    row = pairs.tokens[b].tolist()
    n_first, n_second = ((pairs.segments[b] == k).sum() for k in (1, 2))
    first, second = row[1 : 1 + n_first], row[2 + n_first : 2 + n_first + n_second]
    n_padding = len(row) - n_first - n_second - 3
    whole = [SPECIALS.cls, *first, SPECIALS.sep, *second, SPECIALS.sep, *[SPECIALS.pad] * n_padding]
    assert row == whole
    assert pairs.segments[b].tolist() == [0, *[1] * n_first, 0, *[2] * n_second, 0, *[0] * n_padding]
    assert pairs.types[b].tolist() == [0] * (n_first + 2) + [1] * (n_second + 1) + [0] * n_padding
    assert pairs.padding[b].tolist() == [False] * (len(row) - n_padding) + [True] * n_padding
    return first, second


def megatron_lengths(n_first: int, n_second: int, target: int) -> tuple[int, int]:
    """`truncate_segments`, but for the side."""
    while n_first + n_second > target:
        if n_first > n_second:
            n_first -= 1
        else:
            n_second -= 1
    return n_first, n_second


def test_a_pair_is_two_neighbours_in_the_order_that_its_label_says_cut_to_its_target(numbered):
    samples = samples_of(numbered, S)
    n = samples.n_samples
    read = [samples[g] for g in range(n)]
    pairs = lay_out(read, S, SPECIALS)
    n_cut = n_from_the_front = 0
    for b, sample in enumerate(read):
        first, second = parts(pairs, b)
        assert len(sample.tokens) > sample.n_first > 0
        earlier, later = sample.tokens[: sample.n_first].tolist(), sample.tokens[sample.n_first :].tolist()
        whole = (later, earlier) if pairs.swapped[b] else (earlier, later)
        assert (len(first), len(second)) == megatron_lengths(*map(len, whole), sample.target)
        for found, before in zip((first, second), whole, strict=True):
            place = found[0] - before[0]  # of the first token that is left
            assert found == before[place : place + len(found)]
            n_cut += len(before) - len(found)
            n_from_the_front += place
    assert is_likely(int(pairs.swapped.sum()), n, 1 / 2)
    assert n_cut > 2000
    assert is_likely(n_from_the_front, n_cut, 1 / 2)
    assert (~pairs.padding).sum(1).max() == S
    assert (~pairs.padding).sum(1).min() < S / 2


def test_what_is_drawn_for_a_sample_is_drawn_anew_in_each_epoch(tmp_path):
    samples = samples_of(write_one(tmp_path, [40, 30, 50, 60]), S, short_seq_prob=0.0)
    assert samples.n_samples == 1
    pairs = lay_out([samples[g] for g in range(40)], S, SPECIALS)
    assert len({tuple(row) for row in pairs.tokens.tolist()}) > 35


def test_a_pair_does_not_depend_on_what_it_is_laid_out_with(numbered):
    samples = samples_of(numbered, S)
    together = lay_out([samples[g] for g in range(30)], S, SPECIALS)
    for g in (0, 7, 29):
        alone = lay_out([samples[g]], S, SPECIALS)
        assert all((a[0] == b[g]).all() for a, b in zip(alone, together, strict=True))
