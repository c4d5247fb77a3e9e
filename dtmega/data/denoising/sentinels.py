"""The marks of span corruption: ids that stand for hidden spans, and ids that begin, end and fill sequences.

    found = marks(tokenizer, n_sentinels=100)
    found.sentinels[0]  # stands for the first hidden span of a sample

Sentinels are the tokenizer's own, `<extra_id_0>` and so on, if it has them, else the ids behind its last one. WordPiece
has no marks for the beginning and the end of a text: [BOS] and [EOS] are added if they are missing, before the
sentinels, as Megatron's `_BertWordPieceTokenizer` does. So `[model] vocab_size` may have to be larger than the
tokenizer's.

T5's own tokenizer.json has its sentinels among the pieces of words, so a text that spells "<extra_id_0>" becomes one.
"""

from __future__ import annotations

from itertools import count
from typing import NamedTuple

from dtmega.data.tokenizer import Tokenizer


class Marks(NamedTuple):
    """Ids that stand for no text.

    Attributes:
        sentinels: that of span number 0 first.
        start: what a decoder reads first: [BOS], or padding, as in T5.
        end: of a sequence: [EOS], or end-of-document.
        pad: what fills a sequence up; end-of-document where the tokenizer has nothing for it.
        n_added: so many of these ids are not the tokenizer's, but the ones behind its last.
    """

    sentinels: tuple[int, ...]
    start: int
    end: int
    pad: int
    n_added: int


def marks(tokenizer: Tokenizer, n_sentinels: int) -> Marks:
    """The marks of a vocabulary.

    Raises:
        ValueError: it has sentinels of its own, but not so many.
    """
    own = tokenizer.sentinel_ids
    if 0 < len(own) < n_sentinels:
        raise ValueError(
            f"sentinels={n_sentinels} is more than the {len(own)} that tokenizer '{tokenizer.name}' has, from "
            f"<extra_id_0> to <extra_id_{len(own) - 1}> ([data] sentinels, [data] tokenizer)"
        )
    new = count(tokenizer.vocab_size)
    pad = tokenizer.eod_id if tokenizer.pad_id is None else tokenizer.pad_id
    start = pad if tokenizer.bos_id is None else tokenizer.bos_id
    end = tokenizer.eod_id if tokenizer.eos_id is None else tokenizer.eos_id
    if tokenizer.cls_id is not None:
        start = next(new) if tokenizer.bos_id is None else start
        end = next(new) if tokenizer.eos_id is None else end
    sentinels = own[:n_sentinels] or tuple(next(new) for _ in range(n_sentinels))
    return Marks(sentinels, start, end, pad, n_added=next(new) - tokenizer.vocab_size)
