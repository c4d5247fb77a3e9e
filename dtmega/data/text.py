"""The data of a run: the tokenizer and the samples of each split, checked whole before anything starts."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import xxhash

from dtmega.config import Config, Data
from dtmega.data import record
from dtmega.data.blend import BY_DOCUMENT, CorpusPart, SplitRule, Splits, build_samples, parts_of, parts_of_mixture
from dtmega.data.corpus import prepare_stdlib
from dtmega.data.indexed import IndexedDataset
from dtmega.data.loader import bears_loss
from dtmega.data.megatron.order import FORKS, digest_of_order, ordered, wanted_samples
from dtmega.data.objectives import NEXT_TOKEN, Objective, check_keys
from dtmega.data.rows import Rows
from dtmega.data.samples import AnySamples
from dtmega.data.token_ids import check_token_ids
from dtmega.data.tokenizer import Tokenizer, load_tokenizer
from dtmega.output import counted

SAMPLED_BYTES, SAMPLES = 2**16, 64


class Text(NamedTuple):
    """The samples of each split, and the vocabulary they are written in.

    Attributes:
        objective, data: how it is read.
        splits: "train", "valid", "test", and the sets of [data] validation by their names; None: there is none.
        identity: TOML key -> digest or value of all that decides which tokens and which dropout step n sees. A run that
            goes on must find it unchanged.
        notes: lines that the run should show once.
    """

    objective: Objective
    data: Data
    tokenizer: Tokenizer
    splits: dict[str, AnySamples | None]
    identity: dict[str, Any]
    notes: list[str]

    @property
    def evaluated(self) -> list[str]:
        """The splits of `splits` that validation goes through, in order."""
        sets = (one.name for one in self.data.validation_sets)
        return ["valid", *(name for name in sets if name != "valid")]

    def samples(self, split: str) -> AnySamples:
        found = self.splits[split]
        assert found is not None
        return found

    def rows(self, split: str) -> Rows:
        return self.objective.rows(self.samples(split), self.data, self.tokenizer)


def open_text(cfg: Config, objective: Objective) -> Text:
    """Open the tokenizer and the data of the configuration; builds the default corpus on first use.

    Raises:
        ValueError: keys of another objective, no such tokenizer or data, damaged files, ids outside the vocabulary or
            of another one, less than one sample, or nothing to evaluate in a split that has a weight.
    """
    check_keys(cfg.data, objective)
    check_order(cfg.data, objective)
    tokenizer = load_tokenizer(cfg.data.tokenizer)
    objective.check(tokenizer, cfg.data)
    check_vocabulary(cfg, objective, tokenizer)
    corpora = Corpora(cfg, objective, tokenizer)
    follows = cfg.data.order != "auto"
    parts = parts_read(cfg.data, corpora, FORKS[cfg.data.order].rule if follows else BY_DOCUMENT)
    splits = ordered(cfg, parts) if follows else build_samples(objective, cfg.data, parts, cfg.run.seed)
    unknown = corpora.without_record
    notes = [*([record.unrecorded(unknown, tokenizer)] if unknown else []), *splits.notes]
    same = identity(cfg, objective, tokenizer, [part.dataset.prefix for part in parts["train"]])
    if follows:
        same |= order_identity(cfg, splits)
    text = Text(objective, cfg.data, tokenizer, splits.samples, same, notes)
    check_losses(text, cfg)
    return text


def check_order(data: Data, objective: Objective) -> None:
    """Refuse an order of Megatron's that cannot be followed.

    Raises:
        ValueError: says why.
    """
    if data.order != "auto" and objective.not_in_megatrons_order:
        raise ValueError(
            f"[data] order = '{data.order}' is one of models that are trained on {NEXT_TOKEN.aim}, not on "
            f"{objective.aim}: {objective.not_in_megatrons_order}; expected 'auto'"
        )


def check_vocabulary(cfg: Config, objective: Objective, tokenizer: Tokenizer) -> None:
    """Check that the model has a row for every id of a sample.

    Raises:
        ValueError: it has not.
    """
    n_own = tokenizer.vocab_size
    n_added = objective.n_added(tokenizer, cfg.data)
    if n_own + n_added <= cfg.model.vocab_size:
        return
    added = f" and {n_added} marks that it lacks: {n_own} + {n_added} = {n_own + n_added}" if n_added else ""
    key = ", [data] sentinels" if n_added else ""
    raise ValueError(
        f"vocab_size={cfg.model.vocab_size} is smaller than the {n_own} ids of tokenizer "
        f"'{cfg.data.tokenizer}'{added}: take the model's own tokenizer, or raise the size, "
        f"where it is not that of a [model] path ([model] vocab_size, [data] tokenizer{key})"
    )


def parts_read(data: Data, corpora: Corpora, rule: SplitRule) -> dict[str, list[CorpusPart]]:
    """The parts of corpora that each split has."""
    mixture = data.train_mixture
    if mixture is None:
        parts = parts_of(data, [corpora.open(path) for path in data.paths], rule)
    else:
        parts = {"train": parts_of_mixture(mixture, corpora.open, rule)}
        if data.test_mixture:
            parts["test"] = parts_of_mixture(data.test_mixture, corpora.open, rule)
    return parts | {one.name: parts_of_mixture(one, corpora.open, rule) for one in data.validation_sets}


class Corpora:
    """The files that a configuration names, each opened and checked once.

    Attributes:
        without_record: prefixes of files that nothing says to be in this tokenizer.
    """

    def __init__(self, cfg: Config, objective: Objective, tokenizer: Tokenizer) -> None:
        self._cfg, self._objective, self._tokenizer = cfg, objective, tokenizer
        self._opened: dict[str, IndexedDataset] = {}
        self.without_record: list[str] = []

    def open(self, path: str) -> IndexedDataset:
        """The data set of a prefix, or the default corpus where the path is 'stdlib'.

        Raises:
            ValueError: it is missing or damaged, or cannot be read as the configuration says.
        """
        if path not in self._opened:
            made_here = path == "stdlib"
            sentences = self._objective.sentences
            prefix = prepare_stdlib(self._tokenizer, in_sentences=sentences) if made_here else path
            dataset = IndexedDataset(prefix, by_sequence=self._cfg.data.order != "auto")
            if not self._has_record(dataset, made_here):
                self.without_record.append(prefix)
            self._opened[path] = dataset
        return self._opened[path]

    def _has_record(self, dataset: IndexedDataset, made_here: bool) -> bool:
        """Check a file against the configuration; False where nothing says in which tokenizer it is.

        Raises:
            ValueError: ids outside the vocabulary, another tokenizer, sentences where documents are read, or the
                reverse.
        """
        cfg, objective, tokenizer = self._cfg, self._objective, self._tokenizer
        # The record first: ids outside the vocabulary are most often another tokenizer's, which it names.
        has_record = made_here or record.check_tokenizer(dataset, cfg.data, tokenizer)
        n_ids = tokenizer.vocab_size if objective.n_added(tokenizer, cfg.data) else cfg.model.vocab_size
        check_token_ids(dataset, n_ids)
        if not made_here:
            record.check_sentences(dataset, objective.sentences)
        return has_record


def check_losses(text: Text, cfg: Config) -> None:
    """Check that a token bears a loss in what an evaluation reads of the validation and of the test split.

    As a rule the first sample that is looked at has one. Without any, the mean would be of nothing.

    Raises:
        ValueError: names the split, and why.
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
                f"([eval] steps={cfg.eval.steps}, [data] {settings}): split the documents otherwise, or give '{split}' "
                f"weight 0 for no evaluation"
            )


def read_again(cfg: Config, text: Text) -> list[str]:
    """The line to say if an evaluation is longer than a split that it reads."""
    wanted = cfg.eval.steps * cfg.batch.global_batch_size
    held = {name: int(part.n_samples) for name in (*text.evaluated, "test") if (part := text.splits[name])}
    short = [f"{name} has {n:,}" for name, n in held.items() if n < wanted]
    if not short:
        return []
    each = counted(cfg.batch.global_batch_size, "sequence")
    return [f"eval: {counted(cfg.eval.steps, 'step')} of {each}, and {', '.join(short)}: read again ([eval] steps)"]


def identity(cfg: Config, objective: Objective, tokenizer: Tokenizer, prefixes: list[str]) -> dict[str, Any]:
    """`Text.identity`. Place and name of the files do not count."""
    same = ("weights", "seq_len", "split", *objective.reads)
    mixture = cfg.data.train_mixture
    shares = {"[data] train": [list(share[:3]) for share in mixture.shares]} if mixture else {}
    return {
        "[data] path": [fingerprint(prefix) for prefix in prefixes],
        "[data] tokenizer": tokenizer.fingerprint,
        **{f"[data] {key}": getattr(cfg.data, key) for key in same},
        **shares,
        "[run] seed": cfg.run.seed,
        "order": objective.order,
    }


def order_identity(cfg: Config, splits: Splits) -> dict[str, Any]:
    """The order of samples that is followed, and what it depends on beside seed, data and length."""
    train = splits.samples["train"]
    assert train is not None
    return {
        "[data] order": cfg.data.order,
        "[data] order_samples": wanted_samples(cfg)["train"],
        "digest of the order": digest_of_order(train),
    }


def fingerprint(prefix: str) -> str:
    """16 hex digits of the sizes of .idx and .bin and of SAMPLES blocks spread over each: quick for terabytes.

    Of a file up to SAMPLES x SAMPLED_BYTES = 4 MiB that is all. Of a larger one, what lies between the blocks can
    change unseen: 200,000 tokens of 20 million did. It tells one data set from another, and does not find damage.
    """
    digest = xxhash.xxh3_64()
    for suffix in (".idx", ".bin"):
        size = os.path.getsize(prefix + suffix)
        digest.update(f"{suffix} {size} ".encode())
        last = max(0, size - SAMPLED_BYTES)
        with open(prefix + suffix, "rb") as file:
            for start in sorted({last * i // (SAMPLES - 1) for i in range(SAMPLES)}):
                file.seek(start)
                digest.update(file.read(SAMPLED_BYTES))
    return digest.hexdigest()
