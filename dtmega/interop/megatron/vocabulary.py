"""A checkpoint's vocabulary size: the number of ids in the tokenizer, not counting the embedding's padding rows."""

from __future__ import annotations

from typing import Any

from dtmega import config
from dtmega.data.objectives.denoising.sentinels import marks
from dtmega.data.tokenizers.tokenizer import Tokenizer
from dtmega.interop.megatron.folder import Contents


def with_padded_vocabulary(contents: Contents, model: config.Model | None) -> config.Model | None:
    """The user's model with the padded vocabulary, i.e. one id per embedding row.

    Args:
        contents: contents of the checkpoint.
        model: the [model] section that the user gives; None if the user gives no section.

    Returns:
        The model with the padded vocabulary; None if `model` is None.

    Raises:
        ValueError: the arguments in the files and the embedding give different numbers of rows.
    """
    rows = contents.embedding_rows
    rows_of_args = contents.args.get("padded_vocab_size")
    if rows_of_args not in (None, rows):
        raise ValueError(f"{contents.path} has padded_vocab_size={rows_of_args!r:.80}, but an embedding of {rows} rows")
    if model is None:
        return None
    return model.model_copy(update={"vocab_size": rows, "pad_vocab_to_multiple": 1})


def count_ids(contents: Contents, tokenizer: Tokenizer) -> int:
    """The number of ids in a model with this tokenizer, including the marks and sentinels that a T5 adds."""
    n_sentinels = contents.args.get("vocab_extra_ids")
    if type(n_sentinels) is not int or n_sentinels < 1:
        return tokenizer.vocab_size
    return tokenizer.vocab_size + marks(tokenizer, n_sentinels).n_added


def without_padding(model: config.Model, contents: Contents, n_ids: int) -> tuple[config.Model, tuple[str, ...]]:
    """The model with its true vocabulary size, and notes for the user. The number of embedding rows stays the same.

    Args:
        model: the model with the padded vocabulary, i.e. one id per embedding row.
        contents: contents of the checkpoint.
        n_ids: number of ids in the tokenizer according to the user; 0 if the user gives no number.

    Raises:
        ValueError: there are more ids than rows, or `n_ids` contradicts the number of ids in the files.
    """
    rows = model.vocab_size
    n_ids_of_files = contents.vocab_size
    if n_ids_of_files and n_ids and n_ids_of_files != n_ids:
        raise ValueError(
            f"{contents.path} is of a tokenizer with {n_ids_of_files} ids, got {n_ids} (--vocab-size, --tokenizer)"
        )
    size = n_ids_of_files or n_ids
    if size > rows:
        raise ValueError(
            f"{contents.path} has an embedding of {rows} rows, too few for {size} ids (--vocab-size, --tokenizer, "
            f"--config)"
        )
    if not size:
        note = f"vocabulary: the padded size {rows} is kept, as nothing says how many ids there are (--vocab-size)"
        return model, (note,)
    sizes = {"vocab_size": size, "pad_vocab_to_multiple": _multiple(contents.args, size, rows)}
    return model.model_copy(update=sizes), ()


def _multiple(args: dict[str, Any], size: int, rows: int) -> int:
    """A value of `pad_vocab_to_multiple` that pads `size` ids to `rows` rows; the run's own value is preferred."""
    divisor = args.get("make_vocab_size_divisible_by")
    ranks = args.get("tensor_model_parallel_size", args.get("model_parallel_size"))
    if type(divisor) is int and type(ranks) is int and divisor > 0 and ranks > 0:
        multiple = divisor * ranks
        if -(-size // multiple) * multiple == rows:
            return multiple
    return 1 if size == rows else rows
