"""The number of ids that the tokenizer of a checkpoint has; its embedding has rows of padding behind them."""

from __future__ import annotations

from typing import Any

from dtmega import config
from dtmega.data.denoising.sentinels import marks
from dtmega.data.tokenizer import Tokenizer
from dtmega.megatron.folder import Contents


def padded(contents: Contents, asked: config.Model | None) -> config.Model | None:
    """The model that the user names, with as many ids as the embedding has rows.

    Raises:
        ValueError: the arguments say another number of rows.
    """
    said = contents.args.get("padded_vocab_size")
    if said not in (None, contents.rows):
        raise ValueError(
            f"{contents.path} has padded_vocab_size={said!r:.80}, but an embedding of {contents.rows} rows"
        )
    if asked is None:
        return None
    return asked.model_copy(update={"vocab_size": contents.rows, "pad_vocab_to_multiple": 1})


def ids(contents: Contents, tokenizer: Tokenizer) -> int:
    """The ids that a tokenizer gives this model, with those that a T5 has behind its own."""
    n_sentinels = contents.args.get("vocab_extra_ids")
    if type(n_sentinels) is not int or n_sentinels < 1:
        return tokenizer.vocab_size
    return tokenizer.vocab_size + marks(tokenizer, n_sentinels).n_added


def unpadded(model: config.Model, contents: Contents, n_ids: int) -> tuple[config.Model, tuple[str, ...]]:
    """The model with its vocabulary and as many rows of padding as there are, and what to say of it.

    Args:
        model: with as many ids as its embedding has rows.
        n_ids: of the tokenizer, by the user; 0: not said.

    Raises:
        ValueError: more ids than rows, or other ids than the files say.
    """
    rows = model.vocab_size
    said = contents.vocab_size
    if said and n_ids and said != n_ids:
        raise ValueError(f"{contents.path} is of a tokenizer with {said} ids, got {n_ids} (--vocab-size, --tokenizer)")
    size = said or n_ids
    if size > rows:
        raise ValueError(
            f"{contents.path} has an embedding of {rows} rows, too few for {size} ids (--vocab-size, --tokenizer, "
            f"--config)"
        )
    if not size:
        kept = f"vocabulary: the padded size {rows} is kept, as nothing says how many ids there are (--vocab-size)"
        return model, (kept,)
    sizes = {"vocab_size": size, "pad_vocab_to_multiple": _multiple(contents.args, size, rows)}
    return model.model_copy(update=sizes), ()


def _multiple(args: dict[str, Any], size: int, rows: int) -> int:
    """The number of which the rows are the least multiple that holds `size`; that of the run, where it fits."""
    divisor = args.get("make_vocab_size_divisible_by")
    ranks = args.get("tensor_model_parallel_size", args.get("model_parallel_size"))
    if type(divisor) is int and type(ranks) is int and divisor > 0 and ranks > 0:
        multiple = divisor * ranks
        if -(-size // multiple) * multiple == rows:
            return multiple
    return 1 if size == rows else rows
