"""The tokenizer of an exported model: a tokenizer.json, and the token ids that the model's config.json names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import tokenizers
from tokenizers import AddedToken, processors

from dtmega.config import Data
from dtmega.data.objectives.denoising.sentinels import marks
from dtmega.data.tokenizers.tokenizer import Tokenizer
from dtmega.data.tokenizers.tokenizer_json import to_json


class ExportedTokenizer(NamedTuple):
    """A tokenizer in the format of a transformers model directory.

    Attributes:
        json: text of the tokenizer.json.
        ids: token ids for config.json, keyed by name, such as eos_token_id.
    """

    json: str
    ids: Mapping[str, int]


def of_documents(tokenizer: Tokenizer, data: Data) -> ExportedTokenizer:
    """The tokenizer for models trained on running text.

    End-of-document serves as both BOS and EOS, because in training this token comes before and after each document.
    """
    return ExportedTokenizer(
        to_json(tokenizer.name), {"bos_token_id": tokenizer.eod_id, "eos_token_id": tokenizer.eod_id}
    )


def of_spans(tokenizer: Tokenizer, data: Data) -> ExportedTokenizer:
    """The tokenizer for models trained to restore hidden spans, with the special tokens (sentinels, start, end).

    Tokens that the tokenizer lacked were added after its last id for training. The exported tokenizer appends the end
    token to each text, because in training the encoder's input ended with it.

    Raises:
        ValueError: the tokenizer has too few sentinels, or its ids have gaps, so that a tokenizer.json cannot give the
            added tokens the ids that they had in training.
    """
    mark_ids = marks(tokenizer, data.sentinels)
    names = {i: f"<extra_id_{number}>" for number, i in enumerate(mark_ids.sentinels)}
    names |= {mark_ids.start: "[BOS]", mark_ids.end: "[EOS]"}
    # Add only the special tokens that the tokenizer does not have yet, in ascending order of their ids, because
    # `add_special_tokens` numbers new tokens consecutively.
    added = {i: name for i, name in sorted(names.items()) if i >= tokenizer.vocab_size}
    exported = tokenizers.Tokenizer.from_str(to_json(tokenizer.name))
    exported.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in added.values()])
    for i, name in added.items():
        if exported.token_to_id(name) != i:
            raise ValueError(
                f"tokenizer '{tokenizer.name}' has gaps in its ids: {name} was {i} in training, and tokenizer.json "
                f"would make it {exported.token_to_id(name)} ([data] tokenizer)"
            )
    end = exported.id_to_token(mark_ids.end)
    assert end is not None
    exported.post_processor = processors.TemplateProcessing(single=f"$A {end}", special_tokens=[(end, mark_ids.end)])
    ids = {"eos_token_id": mark_ids.end, "pad_token_id": mark_ids.pad, "decoder_start_token_id": mark_ids.start}
    return ExportedTokenizer(exported.to_str(), ids)
