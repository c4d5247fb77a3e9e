"""The special tokens ("marks") of span corruption: sentinels for hidden spans, and tokens to begin, end and pad.

    mark_ids = marks(tokenizer, n_sentinels=100)
    mark_ids.sentinels[0]  # stands for the first hidden span of a sample

If the tokenizer has sentinels (`<extra_id_0>` and so on), their ids are used. Otherwise, the sentinels are new ids
after the tokenizer's last id. If a WordPiece vocabulary lacks [BOS] and [EOS], these marks get new ids too, before the
sentinels, as in Megatron's `_BertWordPieceTokenizer`. So `[model] vocab_size` may have to be larger than the
tokenizer's vocabulary.

T5's own tokenizer.json lists its sentinels as ordinary tokens, so the text "<extra_id_0>" is encoded as a sentinel.
"""

from __future__ import annotations

from itertools import count
from typing import NamedTuple

from dtmega.data.tokenizers.tokenizer import Tokenizer


class Marks(NamedTuple):
    """The ids of all marks, the special tokens of span corruption.

    Attributes:
        sentinels: ids of the sentinels; number i stands for hidden span i of a sample.
        start: id that a decoder reads first: [BOS], or the padding id (as in T5) if the tokenizer has no [BOS].
        end: id that ends a sequence: [EOS], or the end-of-document id if the tokenizer has no [EOS].
        pad: id that pads a sequence; the end-of-document id if the tokenizer has no padding id.
        n_added: number of new ids among the marks; new ids follow the tokenizer's last id.
    """

    sentinels: tuple[int, ...]
    start: int
    end: int
    pad: int
    n_added: int


def marks(tokenizer: Tokenizer, n_sentinels: int) -> Marks:
    """The marks for a tokenizer, with `n_sentinels` sentinels.

    Raises:
        ValueError: the tokenizer has sentinels, but fewer than `n_sentinels`.
    """
    known = tokenizer.sentinel_ids
    if 0 < len(known) < n_sentinels:
        raise ValueError(
            f"sentinels={n_sentinels} is more than the {len(known)} that tokenizer '{tokenizer.name}' has, from "
            f"<extra_id_0> to <extra_id_{len(known) - 1}> ([data] sentinels, [data] tokenizer)"
        )
    new_ids = count(tokenizer.vocab_size)
    pad = tokenizer.eod_id if tokenizer.pad_id is None else tokenizer.pad_id
    start = pad if tokenizer.bos_id is None else tokenizer.bos_id
    end = tokenizer.eod_id if tokenizer.eos_id is None else tokenizer.eos_id
    # A vocabulary with [CLS] is a WordPiece vocabulary.
    if tokenizer.cls_id is not None:
        start = next(new_ids) if tokenizer.bos_id is None else start
        end = next(new_ids) if tokenizer.eos_id is None else end
    sentinels = known[:n_sentinels] or tuple(next(new_ids) for _ in range(n_sentinels))
    return Marks(sentinels, start, end, pad, n_added=next(new_ids) - tokenizer.vocab_size)
