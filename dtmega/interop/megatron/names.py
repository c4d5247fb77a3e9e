"""Tables of Megatron-LM's tensor names, one per family. Each row also states how tensor parallelism shards the tensor.

The tables describe an *unsharded* model: tensor-parallel shards are joined, layers are numbered over all stages, the
heads of a fused QKV are outermost ([H, (q, k, v), K], as in checkpoint version 3), and the vocabulary's padding rows
are included. Readers and writers use these tables. Code that joins or makes shards calls `cut_dim` and `qkv_parts`, so
the code does not depend on the family.

A file nests these names in dicts (`{"language_model": {"encoder": {"layers.0. ..."}}}`) and numbers layers within the
stage. `flat_name` converts a nested name from a file of any version to a name in these tables. Source: Megatron-LM,
February 2022.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal, NamedTuple

from dtmega.interop.formats.rules import Rule

# How tensor parallelism shards a module. "column" shards the outputs, i.e. both the weight and the bias. "row" shards
# the inputs, i.e. only the weight; the bias is replicated. "vocabulary" shards the rows, one per token of the
# vocabulary. "copies" replicates the tensor.
Cut = Literal["column", "row", "vocabulary", "copies"]


class TableRow(NamedTuple):
    """A table row: a naming rule, and how tensor parallelism shards Megatron's tensor.

    Attributes:
        ours: name of dtmega's tensor or module, or a tuple of several names, as in `Rule`.
        theirs: name of Megatron's tensor or module.
        cut: form in which tensor parallelism shards Megatron's tensor or module.
        form: relation between dtmega's tensors and Megatron's tensors, as in `Rule`.
        parts: number of projections fused in each head of Megatron's tensor: 3 for QKV, 2 for keys and values, 1 for
            any other tensor.
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
    """The table rows for a layer, in families that sort their fused QKV by head, as Megatron does."""
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
    """The table rows for a layer in one of T5's stacks. A dtmega T5 has separate modules for q, k and v."""
    ours = f"{stack}.{{}}"
    theirs = f"{stack}.layers.{{}}"
    qkv = tuple(f"{ours}.attn.{name}." for name in "qkv")
    cross_kv = tuple(f"{ours}.cross.{name}." for name in "kv")
    # Megatron names the norm after self-attention, which precedes it. dtmega names it after the sublayer that follows:
    # cross-attention in a decoder, the feed-forward in an encoder.
    between = (TableRow(f"{ours}.mlp_norm.", f"{theirs}.post_attention_layernorm."),)
    if stack == "decoder":
        between = (
            TableRow(f"{ours}.cross_norm.", f"{theirs}.post_attention_layernorm."),
            TableRow(f"{ours}.cross.q.", f"{theirs}.inter_attention.query.", "column"),
            TableRow(cross_kv, f"{theirs}.inter_attention.key_value.", "column", "heads", parts=2),
            TableRow(f"{ours}.cross.out.", f"{theirs}.inter_attention.dense.", "row"),
            TableRow(f"{ours}.mlp_norm.", f"{theirs}.post_inter_attention_layernorm."),
        )
    return (
        TableRow(f"{ours}.attn_norm.", f"{theirs}.input_layernorm."),
        TableRow(qkv, f"{theirs}.self_attention.query_key_value.", "column", "heads", parts=3),
        TableRow(f"{ours}.attn.out.", f"{theirs}.self_attention.dense.", "row"),
        *between,
        *_feed_forward(ours, theirs),
        TableRow(f"{stack}_norm.", f"{stack}.final_layernorm."),
    )


WORDS = TableRow("embed.", "embedding.word_embeddings.", "vocabulary")
POSITIONS = TableRow("positions.", "embedding.position_embeddings.")
FINAL_NORM = TableRow("norm.", "encoder.final_layernorm.")
# The last stage's copy of the embedding. If there are several stages, the logits are computed from this copy.
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
# The stage where the decoder begins has copies of both embeddings. In that stage's file, the copies have the same name,
# `embedding`, as the originals in the first stage's file. This table gives the copies separate names.
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
    """The dim along which tensor parallelism shards a tensor; None if the tensor is replicated.

    Raises:
        ValueError: no family has a tensor of that name.
    """
    row = _row(name)
    if row.cut == "row":
        return 1 if name.endswith("weight") else None
    return None if row.cut == "copies" else 0


def qkv_parts(name: str) -> int:
    """The number of projections (q, k, v) fused in each head of a tensor; 1 if the tensor is not a fused projection.

    Files older than checkpoint version 2 store the rows of a fused projection in a different order within each shard.

    Raises:
        ValueError: no family has a tensor of that name.
    """
    return _row(name).parts


def by_token(name: str) -> bool:
    """True if a tensor has one row per vocabulary token, followed by padding rows.

    Raises:
        ValueError: no family has a tensor of that name.
    """
    return _row(name).cut == "vocabulary"


def _row(name: str) -> TableRow:
    row = _ROWS.get(pattern_of(name))
    if row is None:
        raise ValueError(f"{name!a:.200} is not the name of a tensor in Megatron's GPT, BERT, T5 or BLOOM")
    return row


def pattern_of(name: str) -> str:
    """A tensor's name with `{}` in place of the layer number."""
    return re.sub(r"\.layers\.\d+\.", ".layers.{}.", name)


def _tensors(rows: Iterable[TableRow]) -> dict[str, TableRow]:
    """Map each tensor's name (with `{}` for the layer number) to the tensor's table row."""
    tensors = {}
    for row in rows:
        ends = ("weight", "bias") if row.theirs.endswith(".") else ("",)
        for end in ends:
            tensors[row.theirs + end] = row
    return tensors


_ROWS = _tensors(_ALL_ROWS)


# -------------------------------------------------------------------------------------------------- names in a file


_OLDER_NAMES = (
    (re.compile(r"^language_model\."), ""),
    # Names in files up to Megatron-LM's tag v2.0 of January 2021.
    (re.compile(r"^transformer\."), "encoder."),
    (re.compile(r"(\.layers\.\d+)\.attention\."), r"\1.self_attention."),
    # Names in even older files.
    (re.compile(r"^(word|position|tokentype)_embeddings\."), r"embedding.\1_embeddings."),
)


def flat_name(path: str) -> str:
    """Convert a tensor's name in a file of any version to today's name. Layer numbers stay local to the stage.

    language_model.transformer.layers.0.attention.dense.weight -> encoder.layers.0.self_attention.dense.weight

    Args:
        path: keys of the nested dicts, joined with dots.
    """
    for pattern, today in _OLDER_NAMES:
        path = pattern.sub(today, path)
    return path


def layer_file_prefix(number: int, n_layers: int) -> str | None:
    """The whole-model prefix for tensors in Megatron-DeepSpeed's `layer_NUMBER-model_*`; None if NUMBER has no file.

    The embedding is number 1, the layers are 3 to L + 2, and the last LayerNorm is L + 4. Numbers 2 and L + 3 are
    functions without parameters. The tied head follows the last LayerNorm and has no file.
    """
    if number == 1:
        return "embedding."
    if 3 <= number < 3 + n_layers:
        return f"encoder.layers.{number - 3}."
    return "encoder.final_layernorm." if number == n_layers + 4 else None
