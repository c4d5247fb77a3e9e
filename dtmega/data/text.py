"""What a run reads: the tokenizer and the samples of each split, checked whole before anything starts."""

from __future__ import annotations

from typing import NamedTuple

from dtmega.config import Config
from dtmega.data.corpus import prepare_stdlib
from dtmega.data.indexed import IndexedDataset, check_token_ids
from dtmega.data.samples import Blend, Samples, build_samples, fingerprint
from dtmega.data.tokenizer import Tokenizer, load_tokenizer


class Text(NamedTuple):
    """What there is to read, per split, and the vocabulary it is written in."""

    tokenizer: Tokenizer
    splits: dict[str, Samples | Blend | None]
    fingerprint: str

    def samples(self, split: str) -> Samples | Blend:
        found = self.splits[split]
        assert found is not None
        return found


def open_text(cfg: Config) -> Text:
    """Tokenizer and data of the configuration; builds the default corpus on first use.

    Raises:
        ValueError: no such tokenizer or data, damaged files, ids outside the vocabulary, less than one sample.
    """
    tokenizer = load_tokenizer(cfg.data.tokenizer)
    if tokenizer.vocab_size > cfg.model.vocab_size:
        raise ValueError(
            f"vocab_size={cfg.model.vocab_size} is smaller than the {tokenizer.vocab_size} ids of tokenizer "
            f"'{cfg.data.tokenizer}' ([model] vocab_size, [data] tokenizer)"
        )
    prefixes = [prepare_stdlib(tokenizer) if path == "stdlib" else path for path in cfg.data.paths]
    for prefix in prefixes:
        check_token_ids(IndexedDataset(prefix), cfg.model.vocab_size)
    return Text(tokenizer, build_samples(cfg.data, prefixes, cfg.run.seed), fingerprint(prefixes))
