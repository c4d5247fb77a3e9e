"""Claims about data/text.py: what a run that goes on must find unchanged."""

from __future__ import annotations

import base64
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dtmega import config
from dtmega.checkpoint import resume
from dtmega.checkpoint.state import State
from dtmega.data import default_corpus
from dtmega.data.indexed_files.dataset import IndexedDataset
from dtmega.data.indexed_files.writer import IndexedWriter, text_of
from dtmega.data.objectives.denoising.masked import MASKED, Masked
from dtmega.data.objectives.denoising.span_objectives import SEPARATE_SPANS, SPANS
from dtmega.data.objectives.next_token import NEXT_TOKEN, NextToken
from dtmega.data.objectives.prefixes import PREFIX
from dtmega.data.sampling.samples import Samples
from dtmega.data.text import fingerprint, open_text, repetition_notes
from dtmega.data.tokenizers.load import load_tokenizer

KEYS = ["--config", "bloom.toml", "--data.tokenizer", "bytes", "--data.split", "8,1,1", "--data.seq_len", "32"]


def write(prefix: Path, last: int = 3, n: int = 40_000) -> str:
    prefix.parent.mkdir(exist_ok=True)
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        for _ in range(10):
            writer.add([*range(3, 3 + n // 400)] * 40)
        writer.add([last] * 40)
    return str(prefix)


def test_the_fingerprint_is_of_the_data_and_not_of_its_place_or_name(tmp_path):
    here, there = write(tmp_path / "a" / "text"), write(tmp_path / "b" / "renamed")
    assert fingerprint(here) == fingerprint(there)


def test_the_fingerprint_sees_other_tokens_in_files_of_the_same_size(tmp_path):
    assert fingerprint(write(tmp_path / "a")) != fingerprint(write(tmp_path / "b", last=4))


def test_the_fingerprint_sees_a_longer_file(tmp_path):
    assert fingerprint(write(tmp_path / "a")) != fingerprint(write(tmp_path / "b", n=44_000))


def test_the_fingerprint_sees_documents_that_are_divided_otherwise(tmp_path):
    prefixes = [str(tmp_path / name) for name in ("a", "b")]
    for prefix, documents in zip(prefixes, ([[3, 4], [5]], [[3], [4, 5]]), strict=True):
        with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
            for document in documents:
                writer.add(document)
    assert Path(f"{prefixes[0]}.bin").read_bytes() == Path(f"{prefixes[1]}.bin").read_bytes()
    assert fingerprint(prefixes[0]) != fingerprint(prefixes[1])


# Each part of the identity, and a change after which a run would see other tokens or other masks.
PARTS = {
    "[data] path": ["--data.path", '["{other}", "{same}"]'],
    "[data] tokenizer": ["--data.tokenizer", "{tokenizer}"],
    "[data] weights": ["--data.weights", "[1.0, 2.0]"],
    "[data] seq_len": ["--data.seq_len", "16"],
    "[data] split": ["--data.split", "6,2,2"],
    "[data] eod_mask_loss": ["--data.eod_mask_loss", "true"],
    "[data] reset_position_ids": ["--data.reset_position_ids", "true"],
    "[data] reset_attention_mask": ["--data.reset_attention_mask", "true"],
    "[run] seed": ["--run.seed", "7"],
    "order": [],
}


@pytest.mark.parametrize("part", PARTS)
def test_each_part_of_the_identity_changes_alone_and_then_the_run_is_not_continued(tmp_path, monkeypatch, part):
    same, other = write(tmp_path / "same"), write(tmp_path / "other", last=4)
    ranks = [bytes([i]) for i in range(255, -1, -1)]
    content = [b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(ranks)]
    (tmp_path / "other.tiktoken").write_bytes(b"".join(content))  # as many ids as "bytes" has, in another order
    paths = {"other": other, "same": same, "tokenizer": str(tmp_path / "other.tiktoken")}
    flags = [*KEYS, "--data.path", json.dumps([same, same])]
    cfg = config.load(flags)
    before = open_text(cfg, NEXT_TOKEN).identity
    assert set(before) == set(PARTS)
    state = json.loads(State.of(cfg.model_dump(), identity=before).model_dump_json())  # as a checkpoint has it
    checkpoint = SimpleNamespace(path="step-00000001", manifest=SimpleNamespace(state=state))
    resume.check_same(checkpoint, cfg, open_text(cfg, NEXT_TOKEN).identity)

    if part == "order":
        monkeypatch.setattr(NextToken, "order", NextToken.order + 1)
    change = [word.format(**paths) for word in PARTS[part]]
    after = open_text(config.load([*flags, *change]), NEXT_TOKEN).identity
    assert {key for key in before if before[key] != after[key]} == {part}
    with pytest.raises(ValueError, match=r"number 2, this dtmega in number 3|on other data: " + re.escape(part)):
        resume.check_same(checkpoint, cfg, after)


def test_a_moved_corpus_has_the_same_identity(tmp_path):
    flags = ["--config", "bloom.toml", "--data.tokenizer", "bytes", "--data.split", "8,1,1", "--data.seq_len", "32"]
    flags += ["--data.path"]
    write(tmp_path / "a" / "text")
    before = open_text(config.load([*flags, str(tmp_path / "a" / "text")]), NEXT_TOKEN).identity
    shutil.move(tmp_path / "a", tmp_path / "b")
    assert open_text(config.load([*flags, str(tmp_path / "b" / "text")]), NEXT_TOKEN).identity == before


@pytest.mark.parametrize(("n_bytes", "seen"), [(2**22, 64 * 2), (2**23, 64)])
def test_the_fingerprint_covers_every_byte_up_to_4_mib_and_64_blocks_of_a_larger_file(tmp_path, n_bytes, seen):
    prefix = str(tmp_path / "text")
    Path(f"{prefix}.idx").write_bytes(b"index")
    content = bytearray(n_bytes)
    Path(f"{prefix}.bin").write_bytes(content)
    whole = fingerprint(prefix)
    changes = 0
    for start in range(0, n_bytes, n_bytes // 128):  # two in each block, or one in and one beside it
        with open(f"{prefix}.bin", "r+b") as file:
            file.seek(start)
            file.write(b"1")
            file.flush()
            changes += fingerprint(prefix) != whole
            file.seek(start)
            file.write(b"\0")
    assert changes == seen


def opened(prefix: str, *more: str):
    return open_text(config.load([*KEYS, "--data.path", prefix, *more]), NEXT_TOKEN)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_seed_of_the_run_orders_the_samples_of_each_split(tmp_path, seed):
    prefix = write(tmp_path / "text")
    splits = opened(prefix, "--run.seed", str(seed)).splits
    for split, documents in {"train": (0, 9), "valid": (9, 10), "test": (10, 11)}.items():
        found, expected = splits[split], Samples(IndexedDataset(prefix), documents, 32, seed, split)
        assert [found[g].tolist() for g in range(50)] == [expected[g].tolist() for g in range(50)]


def test_a_vocabulary_holds_all_ids_of_the_tokenizer_and_of_the_text_and_no_fewer(tmp_path):
    prefix = write(tmp_path / "text", last=299)
    assert opened(prefix, "--model.vocab_size", "300").splits["train"] is not None
    with pytest.raises(ValueError, match=r"expected ids in \[0, 299\), got 299"):
        opened(prefix, "--model.vocab_size", "299")
    prefix = write(tmp_path / "text")
    assert opened(prefix, "--model.vocab_size", "257").splits["train"] is not None
    with pytest.raises(ValueError, match="vocab_size=256 is smaller than the 257 ids of tokenizer 'bytes'"):
        opened(prefix, "--model.vocab_size", "256")


def test_the_order_of_samples_has_the_number_that_the_identity_names(tmp_path):
    # Where the second line changes, raise `order` in data/objectives/next_token.py and the number here, so older runs
    # are refused.
    with IndexedWriter(tmp_path / "one", np.dtype(np.uint16)) as one, IndexedWriter(tmp_path / "two", one.dtype) as two:
        for k in range(20):
            one.add([k] * 3)
            two.add([100 + k] * 5)
    text = opened(json.dumps([str(tmp_path / "one"), str(tmp_path / "two")]), "--data.seq_len", "3")
    assert [int(text.samples("train")[g][1]) for g in range(12)] == [109, 14, 108, 5, 100, 105, 2, 112, 115, 3, 102, 7]
    assert text.identity["order"] == 2


def test_a_corpus_that_is_too_small_for_a_split_is_named_to_the_run(tmp_path):
    with IndexedWriter(tmp_path / "small", np.dtype(np.uint16)) as writer:
        writer.add([3] * 100)
    prefixes = [write(tmp_path / "text"), str(tmp_path / "small")]
    _, *notes = opened(json.dumps(prefixes)).notes  # the first is that there is no record
    assert notes == [
        f"'{s}' is blended without {prefixes[1]}: its part has less than one sample" for s in ("valid", "test")
    ]


# ------------------------------------------------------------------------------------------------------------ record


def recorded(prefix: Path, **changes: object) -> str:
    """A text with the record that `tokenize` would leave beside it, but for `changes`."""
    tokenizer = load_tokenizer("bytes")
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        for _ in range(10):
            writer.add([*range(3, 100), tokenizer.eod_id])
        record = json.loads(text_of(tokenizer, writer, append_eod=True))
        writer.about = json.dumps(record | changes)
    return str(prefix)


def test_a_text_made_with_the_tokenizer_it_is_read_with_needs_no_word(tmp_path):
    assert opened(recorded(tmp_path / "text"), "--data.reset_attention_mask", "true").notes == []


@pytest.mark.parametrize("changes", [{"fingerprint": "0123456789ab", "tokenizer": "gpt2"}, {"eod_id": 0}])
def test_a_text_of_another_tokenizer_or_end_of_document_is_refused(tmp_path, changes):
    with pytest.raises(ValueError, match=r"text\.bin was made with tokenizer '(gpt2|bytes)' .* not with 'bytes' "):
        opened(recorded(tmp_path / "text", **changes))


@pytest.mark.parametrize("key", ["eod_mask_loss", "reset_position_ids", "reset_attention_mask"])
def test_ends_of_documents_are_not_looked_for_in_a_text_without_them(tmp_path, key):
    prefix = recorded(tmp_path / "text", append_eod=False)
    assert opened(prefix).notes == []
    with pytest.raises(ValueError, match=rf"no end-of-document ids, which \[data\] {key} looks for.*--append-eod"):
        opened(prefix, f"--data.{key}", "true")


@pytest.mark.parametrize("changes", [{"eod_id": "256"}, {"append_eod": None}])
def test_a_damaged_record_is_named(tmp_path, changes):
    with pytest.raises(ValueError, match=rf"text\.meta\.json: {next(iter(changes))}: "):
        opened(recorded(tmp_path / "text", **changes))


def test_a_record_of_a_later_version_that_says_more_is_read_and_one_of_64_kib_and_more_is_not(tmp_path):
    assert opened(recorded(tmp_path / "text", more="x" * 2**15)).notes == []
    with pytest.raises(ValueError, match=r"text\.meta\.json: expected at most 65,536 bytes"):
        opened(recorded(tmp_path / "text", more="x" * 2**16))


@pytest.mark.parametrize("changes", [None, {"tokens": 7}, {"documents": 7}])
def test_a_text_without_a_record_or_with_that_of_another_is_read_and_one_line_says_so(tmp_path, changes):
    prefixes = [recorded(tmp_path / f"{k}", **(changes or {})) for k in range(3)]
    if changes is None:
        for prefix in prefixes:
            Path(f"{prefix}.meta.json").unlink()
    (note,) = opened(json.dumps(prefixes)).notes
    assert re.fullmatch(rf"{prefixes[0]}\.bin and 2 more: no record of the tokenizer .* taken to be in 'bytes'", note)


@pytest.mark.parametrize("objective", [NEXT_TOKEN, PREFIX, SPANS, SEPARATE_SPANS])
def test_conversations_are_refused_by_each_objective_that_would_learn_their_prompts(tmp_path, objective):
    chat = {"template": "t", "train_on": "assistant", "learned": 1, "refused": {}}
    prefix = recorded(tmp_path / "text", chat=chat, sentences=objective.sentences)
    with pytest.raises(ValueError, match=r'text\.bin holds conversations.*\[data\] objective = "conversations"'):
        open_text(config.load([*KEYS, "--data.path", prefix, "--model.vocab_size", "400"]), objective)


# ------------------------------------------------------------------------------------------------------------ losses


def silent_at_the_end(prefix: Path) -> str:
    """Documents whose last ones are end-of-document ids and nothing else."""
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        for k in range(10):
            writer.add([256] * 50 if k > 7 else [*range(3, 100)])
    return str(prefix)


def test_a_split_that_bears_no_loss_anywhere_is_refused_with_its_name(tmp_path):
    prefix, mask = silent_at_the_end(tmp_path / "text"), ("--data.eod_mask_loss", "true")
    with pytest.raises(
        ValueError, match=r"no token of the \d+ samples that an evaluation reads of 'valid' bears a loss"
    ):
        opened(prefix, *mask)
    with pytest.raises(ValueError, match=r"reads of 'test' bears a loss"):
        opened(prefix, *mask, "--data.split", "8,0,2")
    assert opened(prefix, *mask, "--data.split", "6,4,0").splits["valid"] is not None
    assert opened(prefix).splits["valid"] is not None


@pytest.mark.parametrize("split", ["valid", "test"])
def test_all_samples_that_an_evaluation_reads_are_looked_at_and_no_more(tmp_path, split):
    with IndexedWriter(tmp_path / "text", np.dtype(np.uint16)) as writer:
        writer.add([*range(3, 100)])
        writer.add([256] * 500 + [7] + [256] * 500)
    keys = ["--data.eod_mask_loss", "true", "--data.split", "1,1,0" if split == "valid" else "1,0,1"]
    keys += ["--batch.micro_batch_size", "1", "--batch.global_batch_size", "2"]

    def first_with_a_loss(seed: int) -> int:
        samples = Samples(IndexedDataset(tmp_path / "text"), (1, 2), 32, seed, split)
        return next(g for g in range(99) if (samples[g][:-1] != 256).any())

    seed = next(seed for seed in range(99) if first_with_a_loss(seed) % 2 and first_with_a_loss(seed) > 2)
    first = first_with_a_loss(seed)  # the second of a batch
    keys += ["--run.seed", str(seed)]
    assert opened(str(tmp_path / "text"), *keys, "--eval.steps", str(first // 2 + 1)).splits[split] is not None
    with pytest.raises(ValueError, match=f"no token of the {first // 2 * 2} samples .* '{split}' bears a loss"):
        opened(str(tmp_path / "text"), *keys, "--eval.steps", str(first // 2))


def test_an_empty_split_is_no_evaluation(tmp_path):
    text = opened(silent_at_the_end(tmp_path / "text"), "--data.eod_mask_loss", "true", "--data.split", "100,0,0")
    assert (text.splits["valid"], text.splits["test"]) == (None, None)


@pytest.mark.parametrize(
    ("steps", "note"),
    [
        # 10 % of 11 documents is one of 4,000 tokens, 125 sequences, and the last one has 40 tokens, one sequence.
        (1, ""),
        (2, "eval: 2 steps of 1 sequence, but test has 1: repeats samples ([eval] steps)"),
        (126, "eval: 126 steps of 1 sequence, but valid has 125, test has 1: repeats samples ([eval] steps)"),
    ],
)
def test_an_evaluation_that_is_longer_than_a_split_is_said(tmp_path, steps, note):
    flags = [*KEYS, "--data.path", write(tmp_path / "text"), "--data.split", "9,1,1", "--eval.steps", str(steps)]
    flags += ["--batch.micro_batch_size", "1", "--batch.global_batch_size", "1"]
    cfg = config.load(flags)
    assert repetition_notes(cfg, open_text(cfg, NEXT_TOKEN)) == ([note] if note else [])


# -------------------------------------------------------------------------------------------------------------- BERT

BERT = ["--config", "bloom.toml", "--model.name", "bert", "--data.tokenizer", "stdlib-wordpiece"]
BERT += ["--data.split", "8,1,1", "--data.seq_len", "32", "--batch.global_batch_size", "4"]
# Beside those of every model.
BERT_PARTS = {"[data] short_seq_prob": "0.2", "[data] mask_prob": "0.2", "[data] max_ngram": "2"}


def sentences(prefix: Path, record: bool = True, **changes: object) -> str:
    """Ten documents of nine sentences, with the record that `tokenize` would leave beside them."""
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        for k in range(10):
            writer.add([*range(100 + k, 100 + k + 90)], [10] * 9)
        if record:
            content = json.loads(text_of(load_tokenizer("stdlib-wordpiece"), writer, sentences=True))
            writer.about = json.dumps(content | changes)
    return str(prefix)


def bert(prefix: str, *more: str):
    return open_text(config.load([*BERT, "--data.path", prefix, *more]), MASKED)


@pytest.mark.parametrize("part", BERT_PARTS)
def test_the_identity_of_a_bert_has_what_decides_its_samples_and_masks(tmp_path, part):
    prefix = sentences(tmp_path / "text")
    before = bert(prefix).identity
    own = {key for key in PARTS if "eod_mask_loss" not in key and "reset" not in key} | {*BERT_PARTS}
    assert set(before) == own
    after = bert(prefix, f"--data.{part.removeprefix('[data] ')}", BERT_PARTS[part]).identity
    assert {key for key in before if before[key] != after[key]} == {part}


@pytest.mark.parametrize(("objective", "others"), [(MASKED, NextToken.reads), (NEXT_TOKEN, Masked.reads)])
def test_a_key_of_data_that_the_objective_does_not_read_is_refused(tmp_path, objective, others):
    prefix = sentences(tmp_path / "text") if objective is MASKED else write(tmp_path / "text")
    flags = [*(BERT if objective is MASKED else KEYS), "--data.path", prefix]
    open_text(config.load(flags), objective)
    for key in others:
        value = {"short_seq_prob": "0.2", "mask_prob": "0.2", "max_ngram": "2"}.get(key, "true")
        cfg = config.load([*flags, f"--data.{key}", value])
        with pytest.raises(ValueError, match=rf"^{key}=\w.* means nothing .*\(\[data\] {key}, \[data\] objective, "):
            open_text(cfg, objective)


def test_a_tokenizer_without_the_tokens_of_bert_is_refused_with_its_key(tmp_path):
    prefix = sentences(tmp_path / "text", record=False)
    with pytest.raises(ValueError, match=r"tokenizer 'bytes': .* \[CLS\] is missing; .* \(\[data\] tokenizer\)"):
        bert(prefix, "--data.tokenizer", "bytes")
    assert bert(prefix).rows("train").vocabulary.specials == (2, 3, 4, 0)


def test_a_text_of_documents_is_refused_for_a_bert_and_one_of_sentences_for_others(tmp_path):
    one = "python -m dtmega tokenize --split-sentences"
    with pytest.raises(ValueError, match=rf"text\.bin is not split .* got 11 of 11: .* {one}"):
        bert(write(tmp_path / "text"))
    with pytest.raises(ValueError, match=one):
        bert(sentences(tmp_path / "a", sentences=False))
    assert bert(sentences(tmp_path / "b")).notes == []
    (note,) = bert(sentences(tmp_path / "c", record=False)).notes
    assert "no record of the tokenizer" in note
    causal = [*BERT, "--model.name", "bloom", "--data.path"]
    with pytest.raises(ValueError, match=r"b\.bin is split into sentences.* without --split-sentences"):
        open_text(config.load([*causal, str(tmp_path / "b")]), NEXT_TOKEN)
    assert open_text(config.load([*causal, str(tmp_path / "c")]), NEXT_TOKEN).splits["train"] is not None


def test_a_bert_reads_the_sentences_of_the_default_corpus(tmp_path, monkeypatch):
    asked = []

    def prepared(tokenizer, *, in_sentences):
        asked.append((tokenizer.name, in_sentences))
        return sentences(tmp_path / "text", record=False)

    monkeypatch.setattr(default_corpus, "prepare", prepared)
    assert bert("stdlib").notes == []
    assert asked == [("stdlib-wordpiece", True)]


def test_a_bert_reads_its_samples_again_after_an_epoch_of_them(tmp_path):
    cfg = config.load([*BERT, "--data.path", sentences(tmp_path / "text"), "--eval.steps", "2"])
    text = open_text(cfg, MASKED)
    held = text.samples("valid").n_samples
    assert 2 <= held < 8  # one document of 90 tokens, of which a sample has 29 or fewer
    each = "2 steps of 4 sequences"
    assert repetition_notes(cfg, text) == [
        f"eval: {each}, but valid has {held}, test has {held}: repeats samples ([eval] steps)"
    ]


def test_the_samples_of_a_bert_have_the_number_that_the_identity_names(tmp_path):
    # Where the row changes, raise `order` in data/objectives/denoising/masked.py and the number here, so older runs are
    # refused.
    text = bert(sentences(tmp_path / "text"))
    row = [2, *range(124, 134), 3, 104, 105, 106, 4, 4, *range(109, 113), 4, 114, 115, 4, *range(117, 123), 3]
    assert text.rows("train")[range(1, 2)]["tokens"].tolist() == [row]
    assert text.identity["order"] == 1
