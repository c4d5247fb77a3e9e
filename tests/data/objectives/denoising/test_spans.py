"""T5's data: spans as T5 and transformers hide them, and as Megatron's T5 does; each against the published code."""

from __future__ import annotations

import math
import pickle
from collections import Counter
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from numpy.typing import NDArray
from torch import Tensor

from dtmega import config
from dtmega.config import Batch, Data
from dtmega.config.families.t5 import T5Keys
from dtmega.data.indexed_files.dataset import IndexedDataset
from dtmega.data.loader import TrainBatches
from dtmega.data.objectives.denoising import merged_spans, separate_spans
from dtmega.data.objectives.denoising.cut import Targets, cut_table
from dtmega.data.objectives.denoising.masked import MASKED
from dtmega.data.objectives.denoising.merged_spans import counts_of_longest
from dtmega.data.objectives.denoising.sentinels import Marks, marks
from dtmega.data.objectives.denoising.span_objectives import SEPARATE_SPANS, SPANS
from dtmega.data.objectives.denoising.spans import SpanSample
from dtmega.data.objectives.keys import check_keys
from dtmega.data.objectives.objective import Objective
from dtmega.data.objectives.rows import IGNORED, Rows
from dtmega.data.text import open_text
from dtmega.data.tokenizers.load import load_tokenizer
from dtmega.models.initial import init_weights
from dtmega.models.t5 import T5
from dtmega.ops import keyed
from tests.library import TOKENIZER, is_likely, library, write

S, T, N = 128, 40, 60
DATA = Data(seq_len=S, decoder_seq_len=T, num_workers=0)
MARKS = marks(TOKENIZER, DATA.sentinels)
V = TOKENIZER.vocab_size + MARKS.n_added
BOTH = pytest.mark.parametrize("objective", [SPANS, SEPARATE_SPANS], ids=["merged", "separate"])


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> IndexedDataset:
    return write(tmp_path_factory.mktemp("spans") / "library", library())


def rows_of(dataset: IndexedDataset, objective: Objective, **keys: Any) -> Any:
    data = DATA.model_copy(update=keys)
    samples = objective.samples(dataset, (0, len(dataset.document_index) - 1), data, 7, "train", 0)
    return objective.rows(samples, data, TOKENIZER)


def texts(rows: Any, indices: range) -> list[list[int]]:
    return [rows.samples[g].tokens.tolist() for g in indices]


def unpadded(batch: dict[str, Tensor], b: int) -> tuple[list[int], list[int], list[int]]:
    """The sequences of a sample: the encoder's, what the decoder has said before, and what it is to say."""
    text = batch["document_ids"][b] == 0
    decoder_text = batch["decoder_document_ids"][b] == 0
    for kept in (text, decoder_text):  # padding is at the end
        assert kept.tolist() == sorted(kept.tolist(), reverse=True)
    return (
        batch["tokens"][b][text].tolist(),
        batch["decoder_tokens"][b][decoder_text].tolist(),
        batch["labels"][b][decoder_text].tolist(),
    )


# -------------------------------------------------------------------------------------------------------- both forms


@BOTH
def test_what_is_read_and_what_is_said_make_the_text_again(dataset, objective):
    rows = rows_of(dataset, objective)
    batch = rows[range(N)]
    touching = 0
    for b, text in enumerate(texts(rows, range(N))):
        read, before, said = unpadded(batch, b)
        assert said[-1] == MARKS.end
        assert before == [MARKS.start, *said[:-1]]
        found: list[int] = []
        n_spans = 0
        for token in read if objective is SEPARATE_SPANS else read[:-1]:
            if token not in MARKS.sentinels:
                found.append(token)
                continue
            # Sentinels come in the order of their places, on both sides.
            assert token == MARKS.sentinels[n_spans]
            start = said.index(token)
            n_spans += 1
            end = said.index(MARKS.sentinels[n_spans]) if MARKS.sentinels[n_spans] in said else len(said) - 1
            assert end > start + 1
            found += said[start + 1 : end]
        assert found == text
        assert len(said) == len([t for t in said if t < TOKENIZER.vocab_size]) + n_spans + 1
        touching += sum(a in MARKS.sentinels and b in MARKS.sentinels for a, b in pairwise(read))
        if objective is SPANS:
            assert read[-1] == MARKS.end
    assert (touching > 3) is (objective is SEPARATE_SPANS)


@BOTH
def test_padding_bears_no_loss_and_is_a_document_of_its_own(dataset, objective):
    batch = rows_of(dataset, objective)[range(3, 3 + N)]
    padding, decoder_padding = batch["document_ids"] == 1, batch["decoder_document_ids"] == 1
    assert ((batch["labels"] == IGNORED) == decoder_padding).all()
    assert (batch["tokens"][padding] == MARKS.pad).all()
    assert (batch["decoder_tokens"][decoder_padding] == MARKS.pad).all()
    assert decoder_padding.any()
    assert padding.any() == (objective is SEPARATE_SPANS)
    assert batch["sample_ids"].tolist() == [*range(3, 3 + N)]
    for name, length in (("places", S), ("decoder_places", T)):
        assert batch[name].tolist() == [[*range(length)]] * N
    assert all(tensor.dtype == torch.int64 and tensor.is_contiguous() for tensor in batch.values())
    assert objective.counts(batch) == {"tokens": int((~decoder_padding).sum())}


@BOTH
def test_the_rows_of_a_sample_depend_on_no_rank_microbatch_or_worker(dataset, objective):
    rows = rows_of(dataset, objective)

    def read(rows: Rows, micro: int, rank: int, world: int) -> dict[int, list[Any]]:
        batch = Batch(micro_batch_size=micro, global_batch_size=16)
        steps = TrainBatches(rows, DATA, batch, rank, world, start_sample=32)
        found = {}
        for microbatch in (microbatch for _ in range(2) for microbatch in next(steps).microbatches):
            for b, g in enumerate(microbatch["sample_ids"].tolist()):
                found[g] = [tensor[b].tolist() for tensor in microbatch.values()]
        return found

    whole = read(rows, 16, 0, 1)
    in_worker = pickle.loads(pickle.dumps(rows))
    assert read(in_worker, 2, 0, 2) | read(in_worker, 1, 1, 2) == whole
    assert [tensor[0].tolist() for tensor in rows[range(40, 41)].values()] == whole[40]


@BOTH
def test_spans_are_other_ones_in_the_next_epoch(dataset, objective):
    rows = rows_of(dataset, objective, seq_len=1024, decoder_seq_len=250)
    n = math.ceil(rows.samples.n_samples)
    first, second = (rows[range(e * n, (e + 1) * n)]["labels"].tolist() for e in range(2))
    assert len({tuple(row) for row in first} & {tuple(row) for row in second}) <= n // 20


@BOTH
def test_a_model_reads_the_rows_as_they_are_and_padding_changes_nothing(dataset, objective):
    model = T5(T5Keys(vocab_size=V, hidden_size=16, n_layers=1, n_heads=2, ffn_hidden_size=24))
    init_weights(model, seed=0)
    model.init_buffers(seed=0)
    batch = rows_of(dataset, objective, seq_len=24, decoder_seq_len=12)[range(6)]
    whole = model(**batch)["lm"]
    whole.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    alone = 0.0
    for b in range(6):
        read, before, said = (torch.tensor([ids]) for ids in unpadded(batch, b))
        alone += model(tokens=read, decoder_tokens=before, labels=said, sample_ids=batch["sample_ids"][b : b + 1])["lm"]
    torch.testing.assert_close(whole, alone, rtol=1e-6, atol=0)


# ------------------------------------------------------------------------------------------------- T5, transformers


def published_lengths(inputs_length: int, noise_density: float, mean_noise_span_length: float) -> tuple[int, int]:
    """`compute_input_and_target_lengths` of run_t5_mlm_flax.py."""

    def _tokens_length_to_inputs_length_targets_length(tokens_length):
        num_noise_tokens = round(tokens_length * noise_density)
        num_nonnoise_tokens = tokens_length - num_noise_tokens
        num_noise_spans = round(num_noise_tokens / mean_noise_span_length)
        return num_nonnoise_tokens + num_noise_spans + 1, num_noise_tokens + num_noise_spans + 1

    tokens_length = inputs_length
    while _tokens_length_to_inputs_length_targets_length(tokens_length + 1)[0] <= inputs_length:
        tokens_length += 1
    return tokens_length, _tokens_length_to_inputs_length_targets_length(tokens_length)[1]


@pytest.mark.parametrize(("noise_density", "mean"), [(0.15, 3.0), (0.15, 2.0), (0.3, 4.5), (0.45, 8.0)])
def test_texts_are_as_long_as_the_published_code_makes_them(noise_density, mean):
    for seq_len in range(32, 1025, 31):
        counts = counts_of_longest(seq_len, noise_density, mean)
        assert (counts.n_tokens, counts.n_decoder_tokens) == published_lengths(seq_len, noise_density, mean)
        assert counts.n_encoder_tokens <= seq_len
    assert counts_of_longest(512, 0.15, 3.0) == (568, 85, 28)


def published_mask(length: int, noise_density: float, mean: float, key: int) -> NDArray[np.int8]:
    """`random_spans_noise_mask` of run_t5_mlm_flax.py, with our draws for its shuffles."""
    num_noise_tokens = int(np.round(length * noise_density))
    num_nonnoise_tokens = length - num_noise_tokens
    num_noise_tokens = min(max(num_noise_tokens, 1), length - 1)
    num_noise_spans = int(np.round(min(num_noise_tokens, num_nonnoise_tokens) / mean))
    num_noise_spans = max(num_noise_spans, 1)

    def _random_segmentation(num_items, num_segments, name):
        mask_indices = np.arange(num_items - 1) < (num_segments - 1)
        drawn = keyed.draws(np.array([key], np.uint64), name, np.arange(num_items - 1))
        shuffled = np.empty_like(mask_indices)
        shuffled[np.argsort(drawn)] = mask_indices
        first_in_segment = np.pad(shuffled, [[1, 0]])
        segment_id = np.cumsum(first_in_segment)
        _, segment_length = np.unique(segment_id, return_counts=True)
        return segment_length

    noise_span_lengths = _random_segmentation(num_noise_tokens, num_noise_spans, "hidden")
    nonnoise_span_lengths = _random_segmentation(num_nonnoise_tokens, num_noise_spans, "text")
    interleaved = np.reshape(np.stack([nonnoise_span_lengths, noise_span_lengths], axis=1), [num_noise_spans * 2])
    span_starts = np.cumsum(interleaved)[:-1]
    span_start_indicator = np.zeros((length,), dtype=np.int8)
    span_start_indicator[span_starts] = True
    return np.equal(np.cumsum(span_start_indicator) % 2, 1).astype(np.int8)


def published_filter(input_ids: NDArray[Any], mask_indices: NDArray[np.int8]) -> NDArray[Any]:
    """`create_sentinel_ids` and `filter_input_ids` there, of one text, with our ids for its sentinels."""
    start_indices = mask_indices - np.roll(mask_indices, 1) * mask_indices
    start_indices[0] = mask_indices[0]
    sentinel_ids = np.where(start_indices != 0, np.cumsum(start_indices), start_indices).astype(np.int64)
    sentinel_ids = np.where(sentinel_ids != 0, np.array([0, *MARKS.sentinels])[sentinel_ids], 0)
    sentinel_ids -= mask_indices - start_indices
    input_ids_full = np.where(sentinel_ids != 0, sentinel_ids, input_ids)
    return np.concatenate([input_ids_full[input_ids_full >= 0], [MARKS.end]])


@pytest.mark.parametrize("keys", [{}, {"mask_prob": 0.4, "mean_span": 2.0, "decoder_seq_len": 130}], ids=str)
def test_merged_spans_are_those_of_the_published_code(dataset, keys):
    rows = rows_of(dataset, SPANS, **keys)
    batch = rows[range(N)]
    for b in range(N):
        sample = rows.samples[b]
        mask = published_mask(len(sample.tokens), rows.data.mask_prob, rows.data.mean_span, sample.key)
        read, _, said = unpadded(batch, b)
        assert read == published_filter(sample.tokens, mask).tolist()
        assert said == published_filter(sample.tokens, 1 - mask).tolist()


def test_each_cut_into_pieces_comes_as_often_as_the_others():
    keys = np.arange(12_000, dtype=np.uint64) * np.uint64(7919)
    found = Counter(map(tuple, merged_spans._pieces(5, 3, keys, "text").tolist()))
    assert set(found) == {(1, 1, 3), (1, 3, 1), (3, 1, 1), (1, 2, 2), (2, 1, 2), (2, 2, 1)}
    assert all(is_likely(n, 12_000, 1 / 6) for n in found.values())


def test_each_token_is_in_one_sample_of_an_epoch(tmp_path):
    numbered = write(tmp_path / "numbered", [[[0] * 700], [[0] * 900]], numbered=True)
    rows = rows_of(numbered, SPANS, seq_len=30, decoder_seq_len=10)
    length = counts_of_longest(30, 0.15, 3.0).n_tokens
    n = 1600 // length
    found = sorted(token for text in texts(rows, range(n + 1)) for token in text)
    counts = Counter(found)
    assert len(found) == (n + 1) * length
    assert set(counts) == {*range(1600)}  # the last sample goes on in the next epoch
    assert sum(count - 1 for count in counts.values()) == (n + 1) * length - 1600


# --------------------------------------------------------------------------------------------------- Megatron's T5


def test_sentences_are_cut_as_in_megatrons_loop_and_cut_off_at_their_target(dataset):
    targets = Targets(S - 2, 0.1, "7/train/0", fewest=1)
    expected = []
    for document in range(len(dataset.document_index) - 1):
        first, last = dataset.document_index[document : document + 2].tolist()
        sizes = dataset.sizes[first:last].tolist()
        # `build_mapping_impl`: one sentence will do, and of one alone the length does not count.
        if not sizes or (len(sizes) > 1 and max(sizes) > 512) or min(sizes) < 1:
            continue
        start, n_tokens, remaining = first, 0, len(sizes)
        for sentence in range(first, last):
            target = int(targets.lengths_at(np.array([start]))[0])
            n_tokens += int(dataset.sizes[sentence])
            remaining -= 1
            if (n_tokens >= target and remaining > 1) or remaining == 0:
                expected.append([start, sentence + 1, target])
                start, n_tokens = sentence + 1, 0
    assert cut_table(dataset, (0, len(dataset.document_index) - 1), targets).tolist() == expected

    rows = rows_of(dataset, SEPARATE_SPANS)
    by_start = {}
    for first, end, target in expected:
        begin, stop = dataset.tokens_before(np.array([first, end])).tolist()
        by_start[begin] = dataset.tokens[begin:stop][:target].tolist()
    assert rows.samples.n_samples == len(expected)
    found = texts(rows, range(len(expected)))
    assert sorted(found) == sorted(by_start.values())
    assert rows.samples.n_tokens == sum(map(len, found))
    n_all = sum(len(s) for document in library() for s in document)
    assert f"'train': {n_all - sum(map(len, found)):,} tokens of" in rows.samples.note


def megatron_sample(tokens: list[int], key: int, sentinels: list[int]) -> tuple[list[int], list[int], list[int]]:
    """`create_masked_lm_predictions` in T5's style and `pad_and_convert_to_numpy`, with our draws for its generator."""
    cand_indexes: list[list[int]] = []
    for i, token in enumerate(tokens):
        if cand_indexes and token in TOKENIZER.continuing_ids:
            cand_indexes[-1].append(i)
        else:
            cand_indexes.append([i])
    num_to_predict = max(1, round(len(tokens) * 0.15))
    ngram_indexes = [[cand_indexes[idx : idx + n] for n in range(1, 11)] for idx in range(len(cand_indexes))]
    index = np.arange(len(cand_indexes))
    order = np.argsort(keyed.draws(np.array([key], np.uint64), "order", index))
    shares = keyed.uniform(keyed.draws(np.array([key], np.uint64), "n", index))
    n_hidden = 0
    masked_spans: list[list[int]] = []
    covered_indexes: set[int] = set()
    for word in order.tolist():
        if n_hidden >= num_to_predict:
            break
        # The inverse of a geometric distribution's 1 - 0.8^n.
        n = min(math.floor(math.log1p(-shares[word]) / math.log(0.8)) + 1, 10)
        index_set = [*chain.from_iterable(ngram_indexes[word][n - 1])]
        n -= 1
        while n_hidden + len(index_set) > num_to_predict:
            if n == 0:
                break
            index_set = [*chain.from_iterable(ngram_indexes[word][n - 1])]
            n -= 1
        if n_hidden + len(index_set) > num_to_predict or covered_indexes & {*index_set}:
            continue
        covered_indexes |= {*index_set}
        n_hidden += len(index_set)
        masked_spans.append(index_set)
    t5_input, t5_decoder_in, t5_decoder_out = [], [MARKS.start], []
    start_index = 0
    for flag, span in zip(sentinels, sorted(masked_spans, key=lambda span: span[0]), strict=False):
        t5_decoder_in += [flag, *(tokens[i] for i in span)]
        t5_decoder_out += [flag, *(tokens[i] for i in span)]
        t5_input += [*tokens[start_index : span[0]], flag]
        start_index = span[-1] + 1
    return [*t5_input, *tokens[start_index:]], t5_decoder_in, [*t5_decoder_out, MARKS.end]


def test_separate_spans_are_those_of_megatrons_loop(dataset):
    rows = rows_of(dataset, SEPARATE_SPANS)
    n = rows.samples.n_samples
    batch = rows[range(n)]
    for b in range(n):
        sample = rows.samples[b]
        assert unpadded(batch, b) == megatron_sample(sample.tokens.tolist(), sample.key, [*MARKS.sentinels])


def test_spans_have_so_many_words_as_a_geometric_distribution_with_the_rest_at_its_end():
    drawn = keyed.uniform(keyed.draws(np.arange(40_000, dtype=np.uint64), "n", np.zeros(1, np.int64)))
    found = Counter(separate_spans._drawn_lengths(drawn, 10).tolist())
    assert set(found) == {*range(1, 11)}
    assert all(is_likely(found[n], 40_000, 0.2 * 0.8 ** (n - 1)) for n in range(1, 10))
    assert is_likely(found[10], 40_000, 0.8**9)
    assert set(separate_spans._drawn_lengths(drawn, 1).tolist()) == {1}


def test_a_span_without_a_sentinel_or_room_in_the_decoder_stays_text():
    generator = np.random.default_rng(0)
    samples = [SpanSample(generator.integers(100, 8000, 126), 7919 * key) for key in range(N)]
    continuing = np.zeros(0, np.int64)
    limits = separate_spans.Limits(mask_prob=0.15, max_span=10, sentinels=100, room=128)
    free = separate_spans.hide(samples, continuing, limits)
    assert (free.hidden.sum(1) == 19).all()
    few = separate_spans.hide(samples, continuing, limits._replace(sentinels=3))
    assert (few.begins.sum(1) == 3).all()
    assert not (few.hidden & ~free.hidden).any()
    n_said = (free.hidden.sum(1) + free.begins.sum(1) + 1).tolist()
    for room in (*(min(n_said) + k for k in range(4)), 12):
        small = separate_spans.hide(samples, continuing, limits._replace(room=room))
        said = small.hidden.sum(1) + small.begins.sum(1) + 1
        assert said.max() == room
        same = np.array(n_said) <= room
        assert (small.hidden[same] == free.hidden[same]).all()
        assert ((said == room) | (said == room - 1) | same).all()  # a last place alone holds no span


# ------------------------------------------------------------------------------------------------ ids and refusals


def load_with(folder: Path, *tokens: str):
    ids = {token: i for i, token in enumerate(("</s>", "a", "b", *tokens))}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="a"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(folder / "tokenizer.json"))
    return load_tokenizer(str(folder / "tokenizer.json"))


def test_marks_are_the_tokenizers_own_or_the_ids_behind_its_last(tmp_path):
    own = load_with(tmp_path, "<pad>", *(f"<extra_id_{n}>" for n in (3, 2, 1, 0)))
    assert marks(own, 3) == Marks((7, 6, 5), start=3, end=0, pad=3, n_added=0)
    with pytest.raises(ValueError, match=r"sentinels=5 is more than the 4 that .* to <extra_id_3> \(\[data\] sent"):
        marks(own, 5)
    assert marks(load_with(tmp_path, "[EOS]", "[BOS]", "<pad>"), 2) == Marks((6, 7), start=4, end=3, pad=5, n_added=2)
    assert marks(load_with(tmp_path), 2) == Marks((3, 4), start=0, end=0, pad=0, n_added=2)
    bytes_alone = load_tokenizer("bytes")
    assert marks(bytes_alone, 2) == Marks((257, 258), start=256, end=256, pad=256, n_added=2)
    # Megatron's `_BertWordPieceTokenizer` adds [BOS], [EOS] and then its sentinels.
    assert marks(TOKENIZER, 2) == Marks((8194, 8195), start=8192, end=8193, pad=TOKENIZER.pad_id or 0, n_added=4)
    some = load_with(tmp_path, "[BOS]", "[CLS]", "[PAD]")
    assert marks(some, 1) == Marks((7,), start=3, end=6, pad=5, n_added=2)


FLAGS = ["--config", "bloom.toml", "--data.seq_len", "32", "--data.decoder_seq_len", "16", "--data.split", "1,0,0"]


def test_the_vocabulary_of_the_model_holds_the_marks_and_that_of_the_text_does_not(dataset, tmp_path):
    prefix = str(write(tmp_path / "text", [[[8191] * 99]]).prefix)
    flags = [*FLAGS, "--data.path", prefix, "--data.sentinels", "10", "--model.vocab_size"]
    text = open_text(config.load([*flags, "8202"]), SPANS)
    assert text.rows("train")[range(8)]["tokens"].max() <= 8201
    with pytest.raises(
        ValueError,
        match=r"vocab_size=8201 is smaller than the 8192 ids of tokenizer 'stdlib-8k' and 10 marks that it lacks: "
        r"8192 \+ 10 = 8202: .* \(\[model\] vocab_size, \[data\] tokenizer, \[data\] sentinels\)",
    ):
        open_text(config.load([*flags, "8201"]), SPANS)
    prefix = str(write(tmp_path / "marked", [[[8192] * 99]]).prefix)
    with pytest.raises(ValueError, match=r"expected ids in \[0, 8192\), got 8192"):
        open_text(config.load([*flags, "8202", "--data.path", prefix]), SPANS)


@pytest.mark.parametrize(
    ("objective", "keys", "message"),
    [
        (
            SPANS,
            {"seq_len": 512, "decoder_seq_len": 113},
            r"decoder_seq_len=113 has no room for the 85 tokens in 28 spans that are hidden of 568, a sentinel for "
            r"each span and an end: 85 \+ 28 \+ 1 = 114 \(\[data\] decoder_seq_len, \[data\] seq_len, "
            r"\[data\] mask_prob, \[data\] mean_span\)",
        ),
        (SPANS, {"seq_len": 512, "sentinels": 27}, r"sentinels=27 are too few .* expected 28 .*\[data\] mean_span\)"),
        (SPANS, {"seq_len": 2}, r"seq_len=2 has no room for a token, a sentinel and an end: expected at least 3"),
        (
            SEPARATE_SPANS,  # 0.15 x 510 = 76 tokens, (1 - 0.8^10) / 0.2 = 4.46 words in a span
            {"seq_len": 512, "decoder_seq_len": 94},
            r"decoder_seq_len=94 .* 76 tokens in 18 spans .* 510, .*: 76 \+ 18 \+ 1 = 95 \(.*\[data\] max_span\)",
        ),
        (SEPARATE_SPANS, {"seq_len": 512, "sentinels": 17}, r"sentinels=17 are too few .* expected 18 "),
    ],
)
def test_what_cannot_hold_a_sample_is_refused_with_its_equation(objective, keys, message):
    with pytest.raises(ValueError, match=message):
        objective.check(TOKENIZER, Data(**keys))


@pytest.mark.parametrize(
    ("objective", "keys"),
    [
        (SPANS, {"seq_len": 512, "decoder_seq_len": 114, "sentinels": 28}),
        (SPANS, {"seq_len": 512}),
        (SPANS, {"seq_len": 3, "decoder_seq_len": 3}),
        (SEPARATE_SPANS, {"seq_len": 512, "decoder_seq_len": 95, "sentinels": 18}),
        (SEPARATE_SPANS, {"seq_len": 512}),
        (SEPARATE_SPANS, {"seq_len": 4, "decoder_seq_len": 3}),
    ],
)
def test_what_just_holds_a_sample_is_accepted(dataset, objective, keys):
    data = Data(**keys)
    objective.check(TOKENIZER, data)
    batch = rows_of(dataset, objective, **{"decoder_seq_len": 0, **keys})[range(4)]
    assert list(batch["tokens"].shape) == [4, data.seq_len]
    assert list(batch["labels"].shape) == [4, data.decoder_length]
    assert all(unpadded(batch, b)[2][-1] == MARKS.end or data.sentinels != 100 for b in range(4))


@pytest.mark.parametrize(
    ("objective", "key", "value"),
    [
        (SPANS, "max_span", 3),
        (SPANS, "short_seq_prob", 0.0),
        (SEPARATE_SPANS, "mean_span", 2.0),
        (SEPARATE_SPANS, "max_ngram", 2),
        (MASKED, "decoder_seq_len", 9),
        (MASKED, "sentinels", 9),
    ],
)
def test_a_key_of_another_objective_is_refused(objective, key, value):
    check_keys(Data(), objective)
    with pytest.raises(
        ValueError, match=rf"^{key}={value} means nothing to a model that is trained on {objective.aim}"
    ):
        check_keys(Data(**{key: value}), objective)


@pytest.mark.parametrize(
    ("objective", "name", "read", "said"),
    [
        (
            SPANS,
            "auto",
            [*range(3096, 3105), MARKS.sentinels[0], *range(3107, 3127), MARKS.sentinels[1], MARKS.end],
            [MARKS.sentinels[0], 3105, 3106, MARKS.sentinels[1], 3127, 3128, 3129, MARKS.end],
        ),
        (
            SEPARATE_SPANS,
            "separate-spans",
            [*range(3235, 3250), MARKS.sentinels[0], *range(3254, 3265)],
            [MARKS.sentinels[0], *range(3250, 3254), MARKS.end],
        ),
    ],
)
def test_the_identity_of_a_run_has_what_decides_its_spans(tmp_path, objective, name, read, said):
    sentences = [[*range(n, n + 11)] for n in range(100, 4000, 11)]
    prefix = str(write(tmp_path / "text", [sentences[n : n + 9] for n in range(0, len(sentences), 9)]).prefix)
    flags = [*FLAGS, "--data.path", prefix, "--data.tokenizer", "stdlib-wordpiece", "--model.vocab_size", str(V)]
    text = open_text(config.load([*flags, "--data.objective", name]), objective)
    decides = ("path", "tokenizer", "weights", "seq_len", "split", *objective.reads)
    assert set(text.identity) == {"[run] seed", "order", *(f"[data] {key}" for key in decides)}
    # Where the row changes, raise `order` in data/objectives/denoising/span_objectives.py and the number here, so older
    # runs are refused.
    found, _, labels = unpadded(text.rows("train")[range(1)], 0)
    assert (found, labels) == (read, said)
    assert text.identity["order"] == 1
