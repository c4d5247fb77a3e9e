"""[data] order: the samples of a run of Megatron-LM's, Megatron-DeepSpeed's or megatron-core's, token for token."""

from __future__ import annotations

import contextlib
import functools
import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dtmega import config, train
from dtmega.checkpoint import resume
from dtmega.checkpoint.state import State
from dtmega.data.indexed_files.dataset import IndexedDataset
from dtmega.data.indexed_files.writer import IndexedWriter
from dtmega.data.megatron import blend as megatron_blend
from dtmega.data.megatron import index as megatron_index
from dtmega.data.megatron import order
from dtmega.data.megatron.index import OrderSettings, epochs_of, index_of
from dtmega.data.megatron.order import FORKS, wanted_samples
from dtmega.data.objectives import known
from dtmega.data.objectives.keys import READS
from dtmega.data.objectives.next_token import NEXT_TOKEN
from dtmega.data.text import open_text
from tests import megatron_order
from tests.megatron_order import Run
from tests.resumed import Training, train_all

FORK_NAMES = [*FORKS]
rng = np.random.RandomState(5)
SIZES = [0, *rng.randint(1, 30, 60).tolist(), 0, 0, 170, 1]
SEED, S = 77, 7


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write(folder: Path, name: str, sizes: list[int], per_document: int = 1) -> tuple[str, list[list[int]]]:
    """A corpus of sequences of random ids, so many of them a document; its prefix, and the sequences."""
    ids = np.random.RandomState(len(sizes)).randint(1, 250, sum(sizes)).tolist()
    sequences = []
    for size in sizes:
        sequences.append([ids.pop() for _ in range(size)])
    with IndexedWriter(folder / name, np.dtype("<u2")) as writer:
        for i in range(0, len(sizes), per_document):
            document = sequences[i : i + per_document]
            writer.add([t for s in document for t in s], [len(s) for s in document])
    return str(folder / name), sequences


def asked(dataset: IndexedDataset, n: int, cutoff: float, part: tuple[int, int] = (0, 65)) -> OrderSettings:
    return OrderSettings(dataset, part, n, S, SEED, cutoff)


# ------------------------------------------------------------------------------------------------------------ indices


def test_the_three_indices_are_the_originals_to_the_integer_on_both_sides_of_each_cutoff(tmp_path, monkeypatch):
    monkeypatch.setattr(megatron_index, "SEQUENCES_AT_ONCE", 7)
    monkeypatch.setattr(megatron_index, "CHUNK", 5)
    dataset = IndexedDataset(write(tmp_path, "a", SIZES)[0])
    epoch = (sum(SIZES) - 1) // S
    # 1 to 4 epochs; the last one with 79, 80, 94, 95 and 100 % of its samples.
    counts = [1, epoch, epoch + 1, *(2 * epoch + int(x * epoch) + d for x in (0.8, 0.95) for d in (-1, 0, 1, 2))]
    seen = set()
    for fork in FORK_NAMES:
        for n in [*counts, 3 * epoch]:
            wanted = asked(dataset, n, FORKS[fork].cutoff)
            found = index_of(wanted)
            seen.add((fork, epochs_of(wanted).last_apart))
            expected = Run(fork, S, SEED).indices(SIZES, (0, 65), n)
            assert [array.tolist() for array in found] == [*expected], (fork, n)
    assert seen == {(fork, apart) for fork in FORK_NAMES for apart in (True, False)}


def test_samples_that_end_with_the_last_token_need_no_further_epoch(tmp_path):
    sizes = [1, 40, 60, 40]  # 20 S + 1 tokens
    dataset = IndexedDataset(write(tmp_path, "a", sizes)[0])
    for n in (20, 21):
        found = index_of(asked(dataset, n, 0.8, (0, 4)))
        assert [array.tolist() for array in found] == [*Run("megatron-lm", S, SEED).indices(sizes, (0, 4), n)]


def test_a_part_of_a_corpus_has_its_own_sequences(tmp_path):
    dataset = IndexedDataset(write(tmp_path, "a", SIZES)[0])
    found = index_of(asked(dataset, 150, 0.8, (20, 41)))
    assert [array.tolist() for array in found] == [*Run("megatron-lm", S, SEED).indices(SIZES, (20, 41), 150)]


def test_a_long_order_is_made_once_in_a_file_and_is_the_same(tmp_path, monkeypatch):
    dataset = IndexedDataset(write(tmp_path, "a", SIZES)[0])
    short = index_of(asked(dataset, 500, 0.8))
    monkeypatch.setattr(megatron_index, "LONG", 1)
    first = index_of(asked(dataset, 500, 0.8))
    monkeypatch.setattr(megatron_index, "_document_index", None)  # is not called again
    second = index_of(asked(dataset, 500, 0.8))
    for one, two, three in zip(short, first, second, strict=True):
        np.testing.assert_array_equal(one, two)
        np.testing.assert_array_equal(one, three)
        assert one.dtype == two.dtype
    assert short.digest() == first.digest()
    assert len(list((tmp_path / "cache").rglob("megatron-order-*.bin"))) == 1


def test_the_digest_tells_orders_apart(tmp_path):
    dataset = IndexedDataset(write(tmp_path, "a", SIZES)[0])
    one, two = index_of(asked(dataset, 500, 0.8)), index_of(asked(dataset, 500, 0.8)._replace(seed=SEED + 1))
    assert one.digest() != two.digest()
    wide = one._replace(samples=one.samples.astype(np.int64), shuffle=one.shuffle.astype(np.int64))
    assert wide.digest() == one.digest()


@pytest.mark.parametrize("fork", FORK_NAMES)
def test_documents_are_split_with_the_rounding_of_each(fork):
    run = Run(fork, S, SEED)
    for weights in [(969.0, 30.0, 1.0), (333.0, 333.0, 334.0), (1.0, 1.0, 1.0), (98.0, 2.0, 0.0), (0.9, 0.05, 0.05)]:
        for size in (3, 100, 200, 1729, 10**9 + 7):
            assert FORKS[fork].split(size, weights) == run.split(size, weights)


def test_the_roundings_differ():
    ours = {name: fork.split(200, (333.0, 333.0, 334.0)) for name, fork in FORKS.items()}
    assert ours["megatron-lm"] == ours["megatron-deepspeed"] == [(0, 66), (66, 133), (133, 200)]
    assert ours["megatron-core"] == [(0, 67), (67, 133), (133, 200)]


# -------------------------------------------------------------------------------------------------------------- blend


WEIGHTS = {
    "one": [1.0],
    "equal": [1.0, 1.0, 1.0],
    "ties": [2.0, 1.0, 1.0, 4.0],
    "rare": [0.7, 0.2999, 0.0001],
    "many": (1.0 / np.arange(1, 48)).tolist(),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_the_greedy_blend_gone_through_in_stretches_is_that_from_the_beginning(name, monkeypatch):
    monkeypatch.setattr(megatron_blend, "MIN_STRETCH", 10)
    shares = np.array(WEIGHTS[name]) / np.sum(WEIGHTS[name])
    for n in (1, 9, 500, 2003):
        expected = [corpus for corpus, _ in megatron_order.greedy(shares.tolist(), n)]
        assert megatron_blend.greedy(shares, n).tolist() == expected


def test_counts_that_are_guessed_wrong_are_put_right(monkeypatch):
    monkeypatch.setattr(megatron_blend, "MIN_STRETCH", 10)
    shares = np.array([0.5, 0.3, 0.15, 0.05])
    honest = megatron_blend._guess_counts

    def wrong(weights, firsts):
        counts = honest(weights, firsts)
        counts[1:, 0] -= 3
        counts[1:, 3] += 3
        return counts

    monkeypatch.setattr(megatron_blend, "_guess_counts", wrong)
    expected = [corpus for corpus, _ in megatron_order.greedy(shares.tolist(), 1000)]
    assert megatron_blend.greedy(shares, 1000).tolist() == expected


def test_a_long_blend_is_made_once_in_a_file_and_places_are_found_anywhere_in_it(monkeypatch):
    monkeypatch.setattr(megatron_blend, "LONG", 1)
    monkeypatch.setattr(megatron_blend, "COUNT_EVERY", 16)
    parts = [_Counted(999) for _ in range(3)]
    blend = megatron_blend.MegatronBlend(parts, [0.5, 0.3, 0.2], 300)
    monkeypatch.setattr(megatron_blend, "greedy", None)  # is not called again
    again = pickle.loads(pickle.dumps(blend))
    expected = megatron_order.greedy([0.5, 0.3, 0.2], 300)
    assert [again.locate(g) for g in range(300)] == expected
    assert [blend[g] for g in range(300)] == [("sample", i) for _, i in expected]
    for g in (-1, 300):
        with pytest.raises(IndexError, match=f"sample {g} of the 300"):
            blend.locate(g)


class _Counted:
    """A corpus of so many samples."""

    n_tokens = 1
    n_samples = 1.0

    def __init__(self, n: int) -> None:
        self.n = n
        self.dataset = SimpleNamespace(prefix="small")

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, g: int) -> tuple[str, int]:
        return ("sample", g)


def test_a_blend_that_takes_more_of_a_corpus_than_there_is_is_refused():
    megatron_blend.MegatronBlend([_Counted(5), _Counted(5)], [0.5, 0.5], 10)
    with pytest.raises(ValueError, match=r"small: the blend of 10 samples takes 5 of its 4"):
        megatron_blend.MegatronBlend([_Counted(5), _Counted(4)], [0.5, 0.5], 10)


# --------------------------------------------------------------------------------------------------------- whole runs


def keys_of(fork: str, **more: Any) -> list[str]:
    keys = {
        "model.vocab_size": 257,
        "data.tokenizer": "bytes",
        "data.seq_len": S,
        "data.order": fork,
        "data.num_workers": 0,
        "run.seed": SEED,
        "batch.micro_batch_size": 2,
        "batch.global_batch_size": 4,
        "train.steps": 60,
        "eval.interval": 25,
        "eval.steps": 2,
        **{name.replace("__", "."): value for name, value in more.items()},
    }
    words = [word for k, v in keys.items() for word in (f"--{k}", v if isinstance(v, str) else json.dumps(v))]
    return ["--config", "bloom.toml", *words]


def opened(fork: str, **more: Any):
    return open_text(config.load(keys_of(fork, **more)), NEXT_TOKEN)


def read(samples: Any, n: int) -> list[list[int]]:
    return [samples[g].tolist() for g in range(n)]


@pytest.mark.parametrize("fork", FORK_NAMES)
@pytest.mark.parametrize("split", ["969, 30, 1", "333,333,334"])
def test_every_sample_of_each_split_of_one_corpus_is_the_originals(tmp_path, fork, split):
    sizes = [*SIZES, *rng.randint(1, 9, 935).tolist()]
    # Five sequences are a document, and none of the three originals asks.
    prefix, sequences = write(tmp_path, "a", sizes, per_document=5)
    text = opened(fork, data__path=prefix, data__split=split)
    run = Run(fork, S, SEED)
    numbers = megatron_order.wanted(240, 60, 25, 2, 4)
    assert numbers == (240, 24, 8)
    parts = run.split(len(sizes), [float(weight) for weight in split.split(",")])
    for name, part, n in zip(("train", "valid", "test"), parts, numbers, strict=True):
        indices = run.indices(sizes, part, n)
        assert read(text.samples(name), n) == [run.read(sequences, indices, g) for g in range(n)]


@pytest.mark.parametrize("fork", FORK_NAMES)
def test_every_sample_of_a_blend_is_the_originals(tmp_path, fork):
    corpora = [write(tmp_path, name, rng.randint(1, 40, n).tolist()) for name, n in (("a", 41), ("b", 30), ("c", 90))]
    weights = [3.0, 1.1, 2.0]
    prefixes = [prefix for prefix, _ in corpora]
    text = opened(fork, data__path=prefixes, data__weights=weights, data__split="80,15,5")
    run = Run(fork, S, SEED)
    for k, (name, n) in enumerate((("train", 240), ("valid", 24), ("test", 8))):
        sizes = [[len(sequence) for sequence in sequences] for _, sequences in corpora]
        numbers = run.asked(weights, n)
        parts = [run.split(len(each), [80.0, 15.0, 5.0])[k] for each in sizes]
        indices = [run.indices(*each) for each in zip(sizes, parts, numbers, strict=True)]
        expected = [run.read(corpora[c][1], indices[c], i) for c, i in run.blend(weights, n)]
        assert read(text.samples(name), n) == expected
    again = pickle.loads(pickle.dumps(text.rows("train")))
    assert again[range(9)]["tokens"].equal(text.rows("train")[range(9)]["tokens"])


def test_a_weight_for_one_corpus_is_a_blend_of_one_which_asks_for_more(tmp_path):
    prefix, sequences = write(tmp_path, "a", SIZES)
    run = Run("megatron-lm", S, SEED)
    for weights, n in (([], 400), ([2.0], 402)):
        text = opened("megatron-lm", data__path=[prefix], data__weights=weights, data__split="1,0,0", train__steps=100)
        indices = run.indices(SIZES, (0, 65), n)
        assert read(text.samples("train"), 400) == [run.read(sequences, indices, g) for g in range(400)]


def test_groups_have_ranges_of_sequences_and_each_validation_set_the_number_of_all(tmp_path):
    prefix, sequences = write(tmp_path, "a", SIZES)
    sets = [f"first: 1 0:0.5 {prefix}", f"both: 1 0:0.5 {prefix}, 2 0.5:0.9 {prefix}"]
    mixtures = {"data__train": f"TRAIN: 1 0:0.7 {prefix}", "data__validation": sets, "data__split": "969,30,1"}
    text = opened("megatron-deepspeed", **mixtures)
    run = Run("megatron-deepspeed", S, SEED)
    whole = run.indices(SIZES, (0, 46), 240)  # round(0.7 * 65)
    assert read(text.samples("train"), 240) == [run.read(sequences, whole, g) for g in range(240)]
    half = run.indices(SIZES, (0, 32), 24)  # round(0.5 * 65), to even
    assert read(text.samples("first"), 24) == [run.read(sequences, half, g) for g in range(24)]
    asked_of = run.asked([1.0, 2.0], 24)
    indices = [run.indices(SIZES, (0, 32), asked_of[0]), run.indices(SIZES, (32, 58), asked_of[1])]
    expected = [run.read(sequences, indices[c], i) for c, i in run.blend([1.0, 2.0], 24)]
    assert read(text.samples("both"), 24) == expected


def test_a_file_that_megatron_has_merged_is_read_although_its_document_index_is_lost(tmp_path):
    prefix, sequences = write(tmp_path, "a", SIZES)
    content = Path(f"{prefix}.idx").read_bytes()
    index = content[34 : 34 + 12 * len(SIZES)]
    header = content[:26] + (1).to_bytes(8, "little")  # one entry of the document index, 0
    Path(f"{prefix}.idx").write_bytes(header + index + bytes(8))
    text = opened("megatron-lm", data__path=prefix, data__split="1,0,0")
    run = Run("megatron-lm", S, SEED)
    indices = run.indices(SIZES, (0, 65), 240)
    assert read(text.samples("train"), 240) == [run.read(sequences, indices, g) for g in range(240)]
    with pytest.raises(ValueError, match=r"document index from 0 to 65.*have lost it"):
        opened("auto", data__path=prefix, data__split="1,0,0")


@contextlib.contextmanager
def _noted(folder: Path):
    """The tokens and sample numbers of every step, in a file of this rank."""
    seen: list[tuple[Any, Any]] = []
    honest = train.train_step

    def noting(run: Any, batch: Any) -> Any:
        ids, tokens = (torch.cat([m[key] for m in batch.microbatches]) for key in ("sample_ids", "tokens"))
        seen.append((ids, tokens))
        return honest(run, batch)

    train.train_step = noting
    yield
    train.train_step = honest
    torch.save(seen, folder / f"seen-{torch.distributed.get_rank()}.pt")


def test_a_run_and_one_on_two_data_ranks_train_on_the_originals_samples(tmp_path):
    prefix, sequences = write(tmp_path, "a", SIZES)
    keys = {
        "model.vocab_size": 257,
        "model.hidden_size": 8,
        "model.n_layers": 1,
        "model.n_heads": 1,
        "run.device": "cpu",
        "run.seed": SEED,
        "data.path": prefix,
        "data.tokenizer": "bytes",
        "data.seq_len": S,
        "data.split": "1,0,0",
        "data.order": "megatron-deepspeed",
        "data.num_workers": 0,
        "batch.micro_batch_size": 2,
        "batch.global_batch_size": 4,
        "train.steps": 5,
        "optim.warmup": 0,
        "eval.sample_tokens": 0,
        "checkpoint.final": False,
        "compile.enable": False,
    }
    run = Run("megatron-deepspeed", S, SEED)
    indices = run.indices(SIZES, (0, 65), 20)
    expected = [run.read(sequences, indices, g)[:-1] for g in range(20)]
    runs = [Training(n, keys, tmp_path / str(n), functools.partial(_noted, tmp_path / str(n))) for n in (1, 2)]
    train_all(runs)
    for n in (1, 2):
        files = [torch.load(tmp_path / str(n) / f"seen-{rank}.pt") for rank in range(n)]
        found = {
            int(i): t for steps in files for ids, tokens in steps for i, t in zip(ids, tokens.tolist(), strict=True)
        }
        assert [found[g] for g in range(20)] == expected


# ------------------------------------------------------------------------------------------- what an order depends on


def wanted(**more: Any) -> dict[str, int]:
    return wanted_samples(config.load(keys_of("megatron-lm", **more)))


def test_the_numbers_of_samples_are_the_originals():
    assert wanted() == dict(zip(("train", "valid", "test"), megatron_order.wanted(240, 60, 25, 2, 4), strict=True))
    # 1003 samples are 250 whole steps of 4.
    by_samples = wanted(train__steps=0, train__samples=1003)
    assert by_samples == {"train": 1003, "valid": (250 // 25 + 1) * 2 * 4, "test": 8}
    # 2 steps of 2, and 24 of 4: a ramp-up counts (megatron/training.py update_train_iters).
    ramp = wanted(train__steps=0, train__samples=100, batch__rampup=[2, 2, 4])
    assert ramp == {"train": 100, "valid": (26 // 25 + 1) * 2 * 4, "test": 8}
    assert wanted(data__order_samples=1003) == by_samples
    assert wanted(eval__interval=0)["valid"] == 8


@pytest.mark.parametrize(
    "keys",
    [
        {"train__steps": 0, "train__tokens": 10_000},
        {"batch__rampup": [2, 2, 8]},
        {"data__order_samples": 239},
    ],
)
def test_a_run_of_which_nobody_knows_how_long_the_originals_was_is_refused(keys):
    with pytest.raises(ValueError, match=r"\[data\] order_samples"):
        wanted(**keys)


def test_a_number_of_samples_without_an_order_is_refused():
    with pytest.raises(ValueError, match=r"order_samples=5 would not be read"):
        config.Data(order_samples=5)


def in_order(**train: int) -> config.Config:
    """A configuration that follows Megatron's order."""
    return config.validate({"data": {"order": "megatron-lm"}, "train": train}, "test")


def test_an_order_that_depends_on_the_number_of_samples_is_refused_with_epochs():
    with pytest.raises(ValueError, match=r"expected epochs=0, got 2 \(\[train\] samples, \[train\] epochs\)"):
        order.check(in_order(epochs=2), NEXT_TOKEN)


@pytest.mark.parametrize("objective", [known.objective(name) for name in READS if name != "next-token"])
def test_an_order_that_depends_on_a_compiled_generator_is_refused_with_that_reason(objective):
    with pytest.raises(
        ValueError, match=r"\[data\] order = 'megatron-lm' .*(compiled helper|generator|another rule|no record)"
    ):
        order.check(in_order(steps=1), objective)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"data__path": ["a", "a"]}, "a weight for each of 2 paths"),
        ({"data__path": ["a"] * 255, "data__weights": [1.0] * 255, "data__split": "1,0,0"}, "at most 254 corpora"),
        (
            {"data__path": ["a", "few"], "data__weights": [1.0, 1.0], "data__split": "90,6,4"},
            r"few: expected sequences for 'valid', got 0 of 3",
        ),
        ({"data__path": "few", "data__split": "1,999,0"}, r"few: expected sequences for 'train', got 0 of 3"),
        ({"data__path": "few", "data__order": "megatron-core"}, r"expected sequences for 'valid', got 0 of 3"),
        ({"data__path": "none", "data__split": "1,0,0"}, "no tokens in sequences"),
    ],
)
def test_what_the_originals_would_not_start_with_is_refused(tmp_path, monkeypatch, keys, message):
    monkeypatch.chdir(tmp_path)
    for name, sizes in {"a": SIZES, "few": [9, 9, 9], "none": [0, 0]}.items():
        write(tmp_path, name, sizes)
    with pytest.raises(ValueError, match=message):
        opened(
            **{"fork": "megatron-lm", "data__split": "998,1,1"}
            | {k.replace("data__order", "fork"): v for k, v in keys.items()}
        )


def test_a_split_without_sequences_is_left_out_as_theirs_is(tmp_path):
    prefix, _ = write(tmp_path, "few", [90, 90, 90])
    text = opened("megatron-lm", data__path=prefix, data__split="969,30,1")
    assert text.splits["valid"] is None
    assert f"'valid' has no sequences of {prefix}, and is left out" in text.notes


def test_another_order_or_number_of_samples_is_another_run(tmp_path):
    prefix, _ = write(tmp_path, "a", SIZES)
    keys = {"data__path": prefix, "data__split": "1,0,0"}
    before = opened("megatron-lm", **keys).identity
    cfg = config.load(keys_of("megatron-lm", **keys))
    state = json.loads(State.of(cfg.model_dump(), identity=before).model_dump_json())
    checkpoint: Any = SimpleNamespace(path="step-00000001", manifest=SimpleNamespace(state=state))
    shorter = {"train__steps": 50, "data__order_samples": 240}
    resume.check_same(checkpoint, config.load(keys_of("megatron-lm", **keys, **shorter)), before)
    assert opened("megatron-lm", **keys, **shorter).identity == before
    for fork, more in (("auto", {}), ("megatron-deepspeed", {}), ("megatron-lm", {"train__steps": 61})):
        after = opened(fork, **keys, **more).identity
        with pytest.raises(ValueError, match=r"on other data: .*\[data\] order"):
            resume.check_same(checkpoint, config.load(keys_of(fork, **keys, **more)), after)


# ------------------------------------------------------------------------------------------------------------- caches


def save(stem: str, indices: Any) -> None:
    doc_idx, sample_idx, shuffle_idx = indices
    np.save(f"{stem}_doc_idx.npy", np.array(doc_idx, np.int32))
    np.save(f"{stem}_sample_idx.npy", np.array(sample_idx, np.int32))
    np.save(f"{stem}_shuffle_idx.npy", np.array(shuffle_idx, np.uint32))


ALONE = {"data__split": "1,0,0"}


def test_a_cache_whose_name_fits_is_used_as_it_is(tmp_path):
    prefix, sequences = write(tmp_path, "a", SIZES)
    computed = opened("megatron-deepspeed", data__path=prefix, **ALONE).identity
    run = Run("megatron-deepspeed", S, SEED)
    indices = run.indices(SIZES, (0, 65), 240)
    stem = f"{prefix}_train_indexmap_240ns_{S}sl_{SEED}s"
    save(stem, indices)
    same = opened("megatron-deepspeed", data__path=prefix, **ALONE)
    assert same.identity == computed
    assert f"{prefix}: the order of 'train' is that of {stem}_*.npy" in same.notes
    # One that nobody would compute.
    indices = (indices[0], indices[1], indices[2][::-1])
    save(stem, indices)
    text = opened("megatron-deepspeed", data__path=prefix, **ALONE)
    for samples in (text.samples("train"), pickle.loads(pickle.dumps(text.samples("train")))):
        assert read(samples, 240) == [run.read(sequences, indices, g) for g in range(240)]
    assert {key for key in computed if computed[key] != text.identity[key]} == {"digest of the order"}


def test_a_cache_of_a_group_has_its_name(tmp_path):
    prefix, _ = write(tmp_path, "a", SIZES)
    stem = f"{prefix}_MINE_indexmap_240ns_{S}sl_{SEED}s"
    save(stem, Run("megatron-deepspeed", S, SEED).indices(SIZES, (0, 65), 240))
    text = opened("megatron-deepspeed", data__train=f"MINE: 1 0:1 {prefix}", data__split="969,30,1")
    assert f"{prefix}: the order of 'MINE' is that of {stem}_*.npy" in text.notes


def test_a_cache_of_another_name_is_said_with_both_names_and_the_order_is_computed(tmp_path):
    prefix, sequences = write(tmp_path, "a", SIZES)
    run = Run("megatron-lm", S, SEED)
    indices = run.indices(SIZES, (0, 65), 240)
    stem = f"{prefix}_train_indexmap_"
    save(f"{stem}241ns_{S}sl_{SEED}s", indices)
    text = opened("megatron-lm", data__path=prefix, **ALONE)
    names = f"expected {stem}240ns_{S}sl_{SEED}s_*.npy, there is {stem}241ns_{S}sl_{SEED}s_*.npy"
    assert f"{prefix}: the order of 'train' is computed: {names}" in text.notes
    Path(f"{stem}241ns_{S}sl_{SEED}s_doc_idx.npy").rename(f"{stem}240ns_{S}sl_{SEED}s_doc_idx.npy")
    (note,) = opened("megatron-lm", data__path=prefix, **ALONE).notes[1:]
    assert f"expected {stem}240ns_{S}sl_{SEED}s_sample_idx.npy, there is" in note
    assert read(text.samples("train"), 240) == [run.read(sequences, indices, g) for g in range(240)]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d, s, h: ([*d[:-1], 65], s, h), "doc_idx.npy: expected sequences 0 to 64, .* got 65"),
        (lambda d, s, h: (d, s, [*h[:-1], len(h)]), "shuffle_idx.npy: expected numbers below"),
        (lambda d, s, h: (d, [[len(d), 0], *s[1:]], h), "sample_idx.npy: expected entries of"),
        (lambda d, s, h: (d, s[:-1], h), r"expected indices of shapes"),
        (lambda d, s, h: (d, s[:200], h[:199]), "expected 240 samples or more, got 199"),
    ],
)
def test_a_damaged_cache_is_refused_by_name(tmp_path, damage, message):
    prefix, _ = write(tmp_path, "a", SIZES)
    indices = Run("megatron-lm", S, SEED).indices(SIZES, (0, 65), 240)
    save(f"{prefix}_train_indexmap_240ns_{S}sl_{SEED}s", damage(*indices))
    with pytest.raises(ValueError, match=message):
        opened("megatron-lm", data__path=prefix, **ALONE)


def test_a_cache_that_asks_for_code_or_is_no_array_is_refused(tmp_path):
    prefix, _ = write(tmp_path, "a", SIZES)
    stem = f"{prefix}_train_indexmap_240ns_{S}sl_{SEED}s"
    save(stem, Run("megatron-lm", S, SEED).indices(SIZES, (0, 65), 240))
    np.save(f"{stem}_doc_idx.npy", np.array([Path("/")], object), allow_pickle=True)
    with pytest.raises(ValueError, match=r"doc_idx.npy: expected an array of numbers"):
        opened("megatron-lm", data__path=prefix, **ALONE)
    Path(f"{stem}_doc_idx.npy").write_bytes(b"\x93NUMPY")
    with pytest.raises(ValueError, match=r"doc_idx.npy: expected an array of numbers"):
        opened("megatron-lm", data__path=prefix, **ALONE)


def describe(folder: Path, name: str, **changes: Any) -> str:
    """A cache of megatron-core's, without its arrays; what stands before their names."""
    folder.mkdir(parents=True, exist_ok=True)
    description = {
        "class": "GPTDataset",
        "dataset_path": "elsewhere/a",
        "num_samples": 240,
        "index_split": "train",
        "random_seed": SEED,
        "sequence_length": S,
        "split": "1,0,0",
        "split_matrix": [[0, 1.0], None, None],
        "tokenizer": {"class": "GPT2BPETokenizer"},
    }
    stem = f"{folder}/{name}-GPTDataset-train"
    Path(f"{stem}-description.txt").write_text(json.dumps(description | changes, indent=4))
    return stem


def test_a_described_cache_of_megatron_core_is_used_where_its_description_fits(tmp_path):
    prefix, sequences = write(tmp_path, "a", SIZES)
    run = Run("megatron-core", S, SEED)
    indices = run.indices(SIZES, (0, 65), 240)
    reversed_order = (indices[0], indices[1], indices[2][::-1])
    folder = Path(prefix, "cache", "GPTDataset_indices")
    describe(folder, "0abc", num_samples=241)
    text = opened("megatron-core", data__path=prefix, **ALONE)
    assert any("computed: expected" in note and "0abc-GPTDataset-train-description.txt" in note for note in text.notes)
    assert read(text.samples("train"), 240) == [run.read(sequences, indices, g) for g in range(240)]
    stem = describe(folder, "1abc")
    for name, values in zip(("document", "sample", "shuffle"), reversed_order, strict=True):
        np.save(f"{stem}-{name}_index.npy", np.array(values, np.uint32 if name == "shuffle" else np.int32))
    text = opened("megatron-core", data__path=prefix, **ALONE)
    assert f"{prefix}: the order of 'train' is that of {stem}-*.npy" in text.notes
    assert read(text.samples("train"), 240) == [run.read(sequences, reversed_order, g) for g in range(240)]
    # Where each split has data of its own, a description has no matrix.
    describe(folder, "1abc", split=None, split_matrix=None)
    apart = {"data__train": f"train: 1 0:1 {prefix}", "data__split": "969,30,1"}
    assert read(opened("megatron-core", **apart).samples("train"), 9) == read(text.samples("train"), 9)
    half = opened("megatron-core", **apart | {"data__train": f"train: 1 0:0.5 {prefix}"})
    assert half.notes == [note for note in half.notes if "the order of" not in note]
    Path(f"{stem}-description.txt").unlink()
    Path(f"{folder}/0abc-GPTDataset-train-description.txt").unlink()
    text = opened("megatron-core", data__path=prefix, **ALONE)
    assert any("without a description" in note for note in text.notes)
