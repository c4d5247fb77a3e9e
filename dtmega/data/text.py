"""A run's data: the tokenizer and the samples of each split, all checked before the run starts."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from dtmega import rooms
from dtmega.config import Config, Data
from dtmega.data import default_corpus
from dtmega.data.indexed_files import record
from dtmega.data.indexed_files.dataset import IndexedDataset
from dtmega.data.indexed_files.token_ids import check_token_ids
from dtmega.data.loader import bears_loss
from dtmega.data.objectives.keys import check_keys
from dtmega.data.objectives.objective import Objective
from dtmega.data.objectives.rows import Rows
from dtmega.data.sampling.blend import (
    BY_DOCUMENT,
    CorpusPart,
    SplitRule,
    build_samples,
    parts_of,
    parts_of_mixture,
)
from dtmega.data.sampling.samples import AnySamples
from dtmega.data.tokenizers.load import load_tokenizer
from dtmega.data.tokenizers.tokenizer import Tokenizer
from dtmega.files.console import counted
from dtmega.files.regular import open_regular

if TYPE_CHECKING:
    from dtmega.data.indexed_files.stored import StoredPair

BLOCK_BYTES, N_BLOCKS = 2**16, 64  # size and number of the blocks that `fingerprint` reads from a file


class Text(NamedTuple):
    """The samples of each split, and the settings that turn the samples into batches.

    Attributes:
        objective: training objective that made the samples.
        data: the configuration's [data] section.
        tokenizer: tokenizer of the samples.
        splits: samples of each split, keyed by name: "train", "valid", "test" and the sets in [data] validation; None
            for a split without samples.
        identity: settings that determine the tokens and the dropout of step n, as a dict from TOML key to value or
            digest. When a run resumes, all these entries must be unchanged.
        notes: lines that the run should show to the user once.
        is_stored: whether some of the tokens are in an object store.
    """

    objective: Objective
    data: Data
    tokenizer: Tokenizer
    splits: dict[str, AnySamples | None]
    identity: dict[str, Any]
    notes: list[str]
    is_stored: bool = False

    @property
    def evaluated(self) -> list[str]:
        """Names of the splits that validation reads, in order."""
        names = [mixture.name for mixture in self.data.validation_sets]
        return ["valid", *(name for name in names if name != "valid")]

    @property
    def compared(self) -> str:
        """Name of the split whose loss selects the best checkpoint; '' if no evaluated split has samples.

        The name is "valid" if that split has samples. Otherwise, it is the alphabetically first name among the
        validation sets with samples.
        """
        with_samples = [name for name in self.evaluated if self.splits.get(name) is not None]
        return "valid" if "valid" in with_samples else min(with_samples, default="")

    def samples(self, split: str) -> AnySamples:
        """The samples of a split; the split must not be empty."""
        samples = self.splits[split]
        assert samples is not None
        return samples

    def samples_in(self, n_epochs: int) -> int:
        """Number of whole samples in the first `n_epochs` epochs of the training data."""
        samples = self.samples("train")
        if self.objective.conversations and isinstance(samples, rooms.conversations().Packs):
            return samples.first_row(n_epochs)
        return int(n_epochs * samples.n_samples)

    def rows(self, split: str) -> Rows:
        """Make the mapping from samples of a split to batch tensors (`Rows`); the split must not be empty."""
        samples = self.samples(split)
        rows = self.objective.rows(samples, self.data, self.tokenizer)
        return rooms.stored_rows().StoredRows(rows, samples) if self.is_stored else rows


def open_text(cfg: Config, objective: Objective) -> Text:
    """Open and check the tokenizer and the data that a configuration names; build the default corpus on first use.

    Args:
        cfg: the run's configuration.
        objective: the run's training objective.

    Raises:
        ValueError: a key belongs to another objective; a tokenizer or data set is missing or damaged; the
            tokenizer and the data set do not belong together; ids are outside the model's vocabulary; or a split with a
            positive weight is too short for a sample or has no labels to evaluate.
    """
    check_keys(cfg.data, objective)
    megatron = rooms.megatron_order() if cfg.data.order != "auto" else None
    if megatron is not None:
        megatron.check(cfg, objective)
    tokenizer = load_tokenizer(cfg.data.tokenizer)
    objective.check(tokenizer, cfg.data)
    check_vocabulary(cfg, objective, tokenizer)
    corpora = Corpora(cfg, objective, tokenizer)
    if megatron is None:
        parts = parts_by_split(cfg.data, corpora, BY_DOCUMENT)
        splits = build_samples(objective, cfg.data, parts, cfg.run.seed)
    else:
        parts = parts_by_split(cfg.data, corpora, megatron.FORKS[cfg.data.order].rule)
        splits = megatron.ordered(cfg, parts)
    notes = [*splits.notes]
    if corpora.without_record:
        notes.insert(0, record.unrecorded(corpora.without_record, tokenizer))
    trained = [part.dataset for part in parts["train"]]
    digests = identity(cfg, objective, tokenizer, trained)
    if megatron is not None:
        digests |= megatron.identity(cfg, splits)
    if objective.conversations:
        digests |= rooms.conversations().identity(corpora.opened, trained)
    is_stored = any(dataset.stored is not None for dataset in corpora.opened)
    text = Text(objective, cfg.data, tokenizer, splits.samples, digests, notes, is_stored)
    check_losses(text, cfg)
    return text


def check_vocabulary(cfg: Config, objective: Objective, tokenizer: Tokenizer) -> None:
    """Check that the model's embedding has a row for every id that can occur in a sample.

    Raises:
        ValueError: `[model] vocab_size` is too small.
    """
    n_ids = tokenizer.vocab_size
    n_added = objective.n_added(tokenizer, cfg.data)
    if n_ids + n_added <= cfg.model.vocab_size:
        return
    added = f" and {n_added} marks that it lacks: {n_ids} + {n_added} = {n_ids + n_added}" if n_added else ""
    key = ", [data] sentinels" if n_added else ""
    raise ValueError(
        f"vocab_size={cfg.model.vocab_size} is smaller than the {n_ids} ids of tokenizer "
        f"'{cfg.data.tokenizer}'{added}: take the model's own tokenizer, or raise the size, "
        f"unless the model is read from a [model] path ([model] vocab_size, [data] tokenizer{key})"
    )


def parts_by_split(data: Data, corpora: Corpora, rule: SplitRule) -> dict[str, list[CorpusPart]]:
    """The corpus parts that each split reads, keyed by split name. The extra validation sets are included.

    The corpora come from [data] path or from the mixtures in [data].
    """
    mixture = data.train_mixture
    if mixture is None:
        parts = parts_of(data, [corpora.open(path) for path in data.paths], rule)
    else:
        parts = {"train": parts_of_mixture(mixture, corpora.open, rule)}
        if data.test_mixture:
            parts["test"] = parts_of_mixture(data.test_mixture, corpora.open, rule)
    for mixture in data.validation_sets:
        parts[mixture.name] = parts_of_mixture(mixture, corpora.open, rule)
    return parts


class Corpora:
    """The corpora that a configuration names, each opened and checked once.

    Attributes:
        without_record: prefixes of corpora whose tokenizer is unknown, because they have no matching .meta.json.
    """

    def __init__(self, cfg: Config, objective: Objective, tokenizer: Tokenizer) -> None:
        self._cfg, self._objective, self._tokenizer = cfg, objective, tokenizer
        self._opened: dict[str, IndexedDataset] = {}
        self.without_record: list[str] = []

    @property
    def opened(self) -> list[IndexedDataset]:
        """The corpora that have been opened."""
        return list(self._opened.values())

    def open(self, path: str) -> IndexedDataset:
        """Open the corpus with the prefix `path`, or the default corpus if `path` is 'stdlib'.

        Raises:
            ValueError: the corpus is missing or damaged, or does not fit the configuration.
        """
        if path not in self._opened:
            is_default = path == "stdlib"
            prefix = self._default_prefix() if is_default else path
            dataset = IndexedDataset(prefix, by_sequence=self._cfg.data.order != "auto")
            if not self._check(dataset, is_default):
                self.without_record.append(prefix)
            self._opened[path] = dataset
        return self._opened[path]

    def _default_prefix(self) -> str:
        """Prepare the default corpus in the form that the objective reads; return its prefix."""
        if self._objective.conversations:
            return rooms.shipped_conversations().prepare_shipped(self._tokenizer)
        return default_corpus.prepare(self._tokenizer, in_sentences=self._objective.sentences)

    def _check(self, dataset: IndexedDataset, is_default: bool) -> bool:
        """Check a corpus against the configuration. Returns False if its tokenizer is unknown.

        Raises:
            ValueError: ids are outside the vocabulary, the text was made with another tokenizer, or the text is not
                in the form (documents, sentences, conversations) that the objective reads.
        """
        cfg, objective, tokenizer = self._cfg, self._objective, self._tokenizer
        # Check .meta.json first: ids outside the vocabulary mostly come from another tokenizer, which this file names.
        has_record = is_default or record.check_tokenizer(dataset, cfg.data, tokenizer)
        # If the objective adds ids after the tokenizer's last id, no text may contain the added ids.
        n_ids = tokenizer.vocab_size if objective.n_added(tokenizer, cfg.data) else cfg.model.vocab_size
        check_token_ids(dataset, n_ids)
        if not is_default:
            record.check_conversations(dataset, objective.conversations)
            record.check_sentences(dataset, objective.sentences)
        return has_record


def check_losses(text: Text, cfg: Config) -> None:
    """Check that the evaluation of every split reads at least one sample with a label.

    Without a label, the mean loss would be 0 / 0. The check is quick, because the first sample usually has a label.

    Raises:
        ValueError: no sample has a label; the message names the split.
    """
    n_samples = cfg.eval.steps * cfg.batch.global_batch_size
    for split in (*text.evaluated, "test"):
        if text.splits[split] is None:
            continue
        rows = text.rows(split)
        if not any(bears_loss(rows, g) for g in range(n_samples)):
            settings = ", ".join(f"{key}={str(getattr(cfg.data, key)).lower()}" for key in text.objective.reads)
            raise ValueError(
                f"[data] split: no token of the {n_samples} samples that an evaluation reads of '{split}' bears a loss "
                f"([eval] steps={cfg.eval.steps}, [data] {settings}): change the split, or give '{split}' weight 0 for "
                f"no evaluation"
            )


def repetition_notes(cfg: Config, text: Text) -> list[str]:
    """A list of one line for the user if any split has fewer samples than an evaluation reads; otherwise []."""
    n_read = cfg.eval.steps * cfg.batch.global_batch_size
    short = []
    for name in (*text.evaluated, "test"):
        samples = text.splits[name]
        if samples and int(samples.n_samples) < n_read:
            short.append(f"{name} has {int(samples.n_samples):,}")
    if not short:
        return []
    each = counted(cfg.batch.global_batch_size, "sequence")
    return [
        f"eval: {counted(cfg.eval.steps, 'step')} of {each}, but {', '.join(short)}: repeats samples ([eval] steps)"
    ]


def identity(cfg: Config, objective: Objective, tokenizer: Tokenizer, datasets: list[IndexedDataset]) -> dict[str, Any]:
    """The content of `Text.identity`. Files are identified by their content, not by their name or folder."""
    keys = ("weights", "seq_len", "split", *objective.reads)
    mixture = cfg.data.train_mixture
    shares = {"[data] train": [list(share[:3]) for share in mixture.shares]} if mixture else {}
    return {
        "[data] path": [fingerprint(dataset.prefix, dataset.stored) for dataset in datasets],
        "[data] tokenizer": tokenizer.fingerprint,
        **{f"[data] {key}": getattr(cfg.data, key) for key in keys},
        **shares,
        "[run] seed": cfg.run.seed,
        "order": objective.order,
    }


def fingerprint(prefix: str, stored: StoredPair | None = None) -> str:
    """Hash the sizes of .idx and .bin, and N_BLOCKS blocks spread over each file, to 16 hex digits.

    Hashing only some blocks is quick even for terabytes. Files of up to N_BLOCKS x BLOCK_BYTES = 4 MiB are read whole.
    In a larger file, changes between the blocks go unnoticed: one test missed a change to 200,000 of 20 million tokens.
    The fingerprint distinguishes one data set from another, but does not detect damage. A data set has the same
    fingerprint on a disk and in an object store.

    Args:
        prefix: path of the two files without their suffixes.
        stored: objects of a data set in an object store; None for files on a disk.

    Raises:
        ValueError: the object store does not answer, or an object has changed.
    """
    digest = xxhash.xxh3_64()
    for suffix in (".idx", ".bin"):
        size = os.path.getsize(prefix + suffix) if stored is None else stored.object(suffix).size
        digest.update(f"{suffix} {size} ".encode())
        last_start = max(0, size - BLOCK_BYTES)
        starts = sorted({last_start * i // (N_BLOCKS - 1) for i in range(N_BLOCKS)})
        if stored is None:
            with open_regular(prefix + suffix) as file:
                for start in starts:
                    file.seek(start)
                    digest.update(file.read(BLOCK_BYTES))
        else:
            for block in stored.read(suffix, [(start, min(start + BLOCK_BYTES, size)) for start in starts]):
                digest.update(block)
    return digest.hexdigest()
