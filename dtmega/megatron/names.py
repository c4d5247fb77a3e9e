"""Megatron-LM's names of a model's tensors, a table for each family.

The names are those of a *whole* model: shards of tensor parallelism joined, layers numbered over all stages, heads of
a fused QKV outermost ([H, (q, k, v), K], as in checkpoint version 3), padding rows of the vocabulary included. Beside
each name stands how tensor parallelism cuts it. Both directions go by these tables, and so do shards: code that joins
or cuts them asks `cut_dim` and `fused` and knows no family.

A file nests the same names in dicts (`{"language_model": {"encoder": {"layers.0. ..."}}}`) and numbers layers by stage;
`flat_name` brings a path in it, older ones included, to the name here. Source: Megatron-LM of 2022-02.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal, NamedTuple

from dtmega.formats.rules import Rule

# How tensor parallelism cuts a module: its outputs, weight and bias; its inputs, with whole copies of the bias; rows of
# the vocabulary; or nothing, and each rank has a copy.
Cut = Literal["column", "row", "vocabulary", "copies"]


class TableRow(NamedTuple):
    """One name of a table, a rule and what there is to know of shards.

    Attributes:
        ours, theirs, form: as of a `Rule`.
        parts: how many tensors stand side by side in each head of theirs.
    """

    ours: str | tuple[str, ...]
    theirs: str
    cut: Cut = "copies"
    form: str = "same"
    parts: int = 1

    @property
    def rule(self) -> Rule:
        return Rule(self.ours, self.theirs, self.form)


def _block(ours: str, theirs: str) -> tuple[TableRow, ...]:
    """Rows of a layer of a family whose own QKV is by head, too."""
    return (
        TableRow(f"{ours}.attn_norm.", f"{theirs}.input_layernorm."),
        TableRow(f"{ours}.attn.qkv.", f"{theirs}.self_attention.query_key_value.", "column", parts=3),
        TableRow(f"{ours}.attn.out.", f"{theirs}.self_attention.dense.", "row"),
        TableRow(f"{ours}.mlp_norm.", f"{theirs}.post_attention_layernorm."),
        *_feed_forward(ours, theirs),
    )


def _feed_forward(ours: str, theirs: str) -> tuple[TableRow, ...]:
    return (
        TableRow(f"{ours}.mlp.up.", f"{theirs}.mlp.dense_h_to_4h.", "column"),
        TableRow(f"{ours}.mlp.down.", f"{theirs}.mlp.dense_4h_to_h.", "row"),
    )


def _block_of_t5(stack: str) -> tuple[TableRow, ...]:
    """Rows of a layer of one of T5's stacks, whose queries, keys and values are apart here."""
    ours = f"{stack}.{{}}"
    theirs = f"{stack}.layers.{{}}"
    apart = tuple(f"{ours}.attn.{name}." for name in "qkv")
    across = tuple(f"{ours}.cross.{name}." for name in "kv")
    # The norm after attention stands before what comes next: in a decoder attention to the encoder's output.
    between = (TableRow(f"{ours}.mlp_norm.", f"{theirs}.post_attention_layernorm."),)
    if stack == "decoder":
        between = (
            TableRow(f"{ours}.cross_norm.", f"{theirs}.post_attention_layernorm."),
            TableRow(f"{ours}.cross.q.", f"{theirs}.inter_attention.query.", "column"),
            TableRow(across, f"{theirs}.inter_attention.key_value.", "column", "heads", parts=2),
            TableRow(f"{ours}.cross.out.", f"{theirs}.inter_attention.dense.", "row"),
            TableRow(f"{ours}.mlp_norm.", f"{theirs}.post_inter_attention_layernorm."),
        )
    return (
        TableRow(f"{ours}.attn_norm.", f"{theirs}.input_layernorm."),
        TableRow(apart, f"{theirs}.self_attention.query_key_value.", "column", "heads", parts=3),
        TableRow(f"{ours}.attn.out.", f"{theirs}.self_attention.dense.", "row"),
        *between,
        *_feed_forward(ours, theirs),
        TableRow(f"{stack}_norm.", f"{stack}.final_layernorm."),
    )


WORDS = TableRow("embed.", "embedding.word_embeddings.", "vocabulary")
POSITIONS = TableRow("positions.", "embedding.position_embeddings.")
FINAL_NORM = TableRow("norm.", "encoder.final_layernorm.")
# The embedding once more, which the last of several stages has for its logits.
COPY_FOR_HEAD = "word_embeddings_for_head."
TIED_HEAD = TableRow("head.", COPY_FOR_HEAD, "vocabulary")
OWN_HEAD = TableRow("head.", "output_layer.", "vocabulary")

GPT_ROWS = (WORDS, POSITIONS, *_block("layers.{}", "encoder.layers.{}"), FINAL_NORM)
BERT_ROWS = (
    *(WORDS, POSITIONS, TableRow("types.", "embedding.tokentype_embeddings.")),
    *_block("layers.{}", "encoder.layers.{}"),
    FINAL_NORM,
    TableRow("head.dense.", "lm_head.dense."),
    TableRow("head.norm.", "lm_head.layernorm."),
    TableRow("head.output.weight", f"{COPY_FOR_HEAD}weight", "vocabulary"),
    TableRow("head.output.bias", "lm_head.bias", "vocabulary"),
    TableRow("order.pooler.", "pooler.dense."),
    TableRow("order.classifier.", "binary_head."),
)
# The stage where the decoder begins has copies of both embeddings. In its file they stand under `embedding`, as on the
# first stage; here they have a name of their own.
T5_ROWS = (
    *(WORDS, POSITIONS, *_block_of_t5("encoder")),
    TableRow("decoder_embed.", "decoder_embedding.word_embeddings.", "vocabulary"),
    TableRow("decoder_positions.", "decoder_embedding.position_embeddings."),
    *_block_of_t5("decoder"),
    TableRow("head.weight", f"{COPY_FOR_HEAD}weight", "vocabulary"),
    TableRow("head.bias", "lm_head.bias", "vocabulary"),
)
BLOOM_ROWS = (
    *(WORDS, TableRow("embed_norm.", "embedding.word_embeddings.norm.")),
    *_block("layers.{}", "encoder.layers.{}"),
    *(FINAL_NORM, TIED_HEAD),
)
_ALL_ROWS = (*GPT_ROWS, OWN_HEAD, *BERT_ROWS, *T5_ROWS, *BLOOM_ROWS)


# ----------------------------------------------------------------------------------------------------------- shards


def cut_dim(name: str) -> int | None:
    """The dim of a tensor that tensor parallelism cuts; None: each rank has all of it.

    Raises:
        ValueError: no family has a tensor of that name.
    """
    row = _row(name)
    if row.cut == "row":
        return 1 if name.endswith("weight") else None
    return None if row.cut == "copies" else 0


def fused(name: str) -> int:
    """The number of q, k and v that stand side by side in each head of a tensor; 1: it is not of that kind.

    Of these the files of versions below 2 have rows in another order, in each shard.

    Raises:
        ValueError: no family has a tensor of that name.
    """
    return _row(name).parts


def by_token(name: str) -> bool:
    """Tell whether there is a row of the tensor for each token of the vocabulary, and rows of padding behind them.

    Raises:
        ValueError: no family has a tensor of that name.
    """
    return _row(name).cut == "vocabulary"


def _row(name: str) -> TableRow:
    row = _ROWS.get(pattern_of(name))
    if row is None:
        raise ValueError(f"{name!a:.200} is no name of a tensor of Megatron's GPT, BERT, T5 or BLOOM")
    return row


def pattern_of(name: str) -> str:
    """The name with `{}` for the number of its layer."""
    return re.sub(r"\.layers\.\d+\.", ".layers.{}.", name)


def _tensors(rows: Iterable[TableRow]) -> dict[str, TableRow]:
    """Name of each tensor with `{}` for the number of a layer -> its row."""
    found = {}
    for row in rows:
        for end in ("weight", "bias") if row.theirs.endswith(".") else ("",):
            found[row.theirs + end] = row
    return found


_ROWS = _tensors(_ALL_ROWS)


# -------------------------------------------------------------------------------------------------- names in a file


_OLDER = (
    (re.compile(r"^language_model\."), ""),
    # Up to tag v2.0, of January 2021.
    (re.compile(r"^transformer\."), "encoder."),
    (re.compile(r"(\.layers\.\d+)\.attention\."), r"\1.self_attention."),
    # Older still.
    (re.compile(r"^(word|position|tokentype)_embeddings\."), r"embedding.\1_embeddings."),
)


def flat_name(path: str) -> str:
    """The name here of a tensor in a file, given by its keys there joined with dots; its layer's number stays.

    language_model.transformer.layers.0.attention.dense.weight -> encoder.layers.0.self_attention.dense.weight
    """
    for pattern, today in _OLDER:
        path = pattern.sub(today, path)
    return path


def layer_file_prefix(number: int, n_layers: int) -> str | None:
    """The prefix of the names in `layer_NUMBER-model_*` of Megatron-DeepSpeed; None: there is no such file.

    The embedding is 1, layers are from 3 on, the last LayerNorm is 4 behind them; between them stand functions, and
    after it the tied head, which has no file.
    """
    if number == 1:
        return "embedding."
    if 3 <= number < 3 + n_layers:
        return f"encoder.layers.{number - 3}."
    return "encoder.final_layernorm." if number == n_layers + 4 else None
