"""BERT's objective: hidden words, and the order of two segments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dtmega.config import Data
from dtmega.data.indexed_files.dataset import IndexedDataset
from dtmega.data.objectives.denoising.masking import Vocabulary, hide
from dtmega.data.objectives.denoising.pairs import PairSamples, Specials, lay_out
from dtmega.data.objectives.keys import READS
from dtmega.data.objectives.objective import labelled
from dtmega.data.objectives.rows import IGNORED, Rows, blank_rows, numbers
from dtmega.data.objectives.sums import Sum
from dtmega.data.sampling.samples import AnySamples
from dtmega.data.tokenizers.tokenizer import Tokenizer


class Masked:
    """BERT's objective: a loss for predicting masked tokens, plus a loss for predicting the order of two segments.

    The first loss is averaged over the masked tokens, and the second loss over the sequences.
    """

    sums = (
        Sum("lm", "tokens"),
        Sum("order", "sequences"),
        Sum("order_right", "sequences", weight=0.0),
    )
    aim = "masked tokens and the order of sentences"
    reads = READS["masked"]
    sentences = True
    conversations = False
    not_in_megatrons_order = "Megatron's samples depend on random draws in a compiled helper"
    prompt_is_prefix = False
    order = 1

    def counts(self, microbatch: Mapping[str, Tensor]) -> dict[str, float]:
        return {"tokens": labelled(microbatch), "sequences": len(microbatch["labels"])}

    def check(self, tokenizer: Tokenizer, data: Data) -> None:
        specials(tokenizer)

    def n_added(self, tokenizer: Tokenizer, data: Data) -> int:
        return 0

    def samples(
        self, dataset: IndexedDataset, documents: tuple[int, int], data: Data, seed: int, split: str, corpus: int
    ) -> PairSamples:
        return PairSamples(dataset, documents, data.seq_len, data.short_seq_prob, seed, split, corpus)

    def rows(self, samples: AnySamples, data: Data, tokenizer: Tokenizer) -> MaskedRows:
        ids = np.arange(tokenizer.vocab_size)
        ordinary = ids[~np.isin(ids, [*tokenizer.special_ids])]
        return MaskedRows(
            samples, data, Vocabulary(specials(tokenizer), np.array(sorted(tokenizer.continuing_ids)), ordinary)
        )

    def blank(self, data: Data, n_rows: int) -> dict[str, Tensor]:
        rows = blank_rows(n_rows, data.seq_len)
        rows["labels"][:, round(data.mask_prob * data.seq_len) :] = IGNORED
        rows["token_types"] = torch.zeros_like(rows["tokens"])
        rows["swapped"] = torch.zeros_like(rows["sample_ids"])
        rows["document_ids"] = torch.zeros_like(rows["tokens"])
        return rows


@dataclass(frozen=True)
class MaskedRows(Rows):
    """Rows of masked segment pairs, with the hidden tokens as labels. Additional tensors:

    token_types   int64 [B, S]  1 in the second segment and at the [SEP] that ends it, 0 elsewhere
    swapped       int64 [B]     1 if the sample's first segment is the later segment of the text
    document_ids  int64 [B, S]  1 at padding, 0 elsewhere
    """

    samples: AnySamples
    data: Data
    vocabulary: Vocabulary

    def __getitem__(self, indices: range) -> dict[str, Tensor]:
        pairs = lay_out([self.samples[g] for g in indices], self.data.seq_len, self.vocabulary.specials)
        masked = hide(pairs, self.vocabulary, self.data.mask_prob, self.data.max_ngram)
        labels = np.where(masked.hidden, pairs.tokens, IGNORED)
        tokens = torch.from_numpy(masked.tokens)
        return {
            "tokens": tokens,
            "labels": torch.from_numpy(labels),
            **numbers(indices, tokens),
            "token_types": torch.from_numpy(pairs.types),
            "swapped": torch.from_numpy(pairs.swapped.astype(np.int64)),
            "document_ids": torch.from_numpy(pairs.padding.astype(np.int64)),
        }


def specials(tokenizer: Tokenizer) -> Specials:
    """The ids of the special tokens in BERT's samples.

    Raises:
        ValueError: the vocabulary lacks one of these tokens.
    """
    ids = {
        "[CLS]": tokenizer.cls_id,
        "[SEP]": tokenizer.sep_id,
        "[MASK]": tokenizer.mask_id,
        "[PAD]": tokenizer.pad_id,
    }
    for name, i in ids.items():
        if i is None:
            raise ValueError(
                f"tokenizer '{tokenizer.name}': expected {', '.join(ids)} in its vocabulary, {name} is missing; take "
                f"stdlib-wordpiece or bert:PATH of a vocab.txt ([data] tokenizer)"
            )
    return Specials(*(i for i in ids.values() if i is not None))


MASKED = Masked()
