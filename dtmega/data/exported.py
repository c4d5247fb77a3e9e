"""The vocabulary that goes with an exported model: its tokenizer.json, and the ids that its configuration names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import tokenizers
from tokenizers import AddedToken, processors

from dtmega.config import Data
from dtmega.data.denoising.sentinels import marks
from dtmega.data.tokenizer import Tokenizer
from dtmega.data.tokenizer_json import to_json


class ExportedTokenizer(NamedTuple):
    """A tokenizer as a directory of transformers has it.

    Attributes:
        json: the text of a tokenizer.json.
        ids: those of it that have a name in transformers' configurations: eos_token_id and others.
    """

    json: str
    ids: Mapping[str, int]


def of_documents(tokenizer: Tokenizer, data: Data) -> ExportedTokenizer:
    """The tokenizer for models of running text. In training an end-of-document stands around each document."""
    return ExportedTokenizer(
        to_json(tokenizer.name), {"bos_token_id": tokenizer.eod_id, "eos_token_id": tokenizer.eod_id}
    )


def of_spans(tokenizer: Tokenizer, data: Data) -> ExportedTokenizer:
    """The tokenizer for models of hidden spans, with the marks that training put behind the tokenizer's last id.

    It puts an end behind what it encodes, as the encoder has read it in training.

    Raises:
        ValueError: as `marks`, or a tokenizer whose ids have gaps, behind which tokenizer.json cannot put any.
    """
    known = marks(tokenizer, data.sentinels)
    names = {i: f"<extra_id_{number}>" for number, i in enumerate(known.sentinels)}
    names |= {known.start: "[BOS]", known.end: "[EOS]"}
    added = {i: name for i, name in sorted(names.items()) if i >= tokenizer.vocab_size}
    whole = tokenizers.Tokenizer.from_str(to_json(tokenizer.name))
    whole.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in added.values()])
    for i, name in added.items():
        if whole.token_to_id(name) != i:
            raise ValueError(
                f"tokenizer '{tokenizer.name}' has gaps in its ids: {name} was {i} in training, and tokenizer.json "
                f"would make it {whole.token_to_id(name)} ([data] tokenizer)"
            )
    end = whole.id_to_token(known.end)
    assert end is not None
    whole.post_processor = processors.TemplateProcessing(single=f"$A {end}", special_tokens=[(end, known.end)])
    ids = {"eos_token_id": known.end, "pad_token_id": known.pad, "decoder_start_token_id": known.start}
    return ExportedTokenizer(whole.to_str(), ids)
