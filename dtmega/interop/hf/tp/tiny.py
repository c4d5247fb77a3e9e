"""Builds a small copy of a large model, which tp shards in the same way, and a batch of input for the copy."""

from __future__ import annotations

import copy
import zlib
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtmega.interop.hf.directory import LONGROPE, parameters_of
from dtmega.interop.hf.families import (
    EXPERT_KEYS,
    FEED_FORWARD_KEYS,
    HEAD_KEYS,
    HIDDEN_KEYS,
    KNOWN,
    LAYER_KEYS,
    POSITION_KEYS,
)
from dtmega.interop.hf.files.config_json import NOISE

VOCAB, HEAD_DIM, POSITIONS, WINDOW = 131, 16, 64, 6
SIZES = {"vocab_size": VOCAB, "sliding_window": WINDOW, "rotary_dim": HEAD_DIM // 2}
TOKENS = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


class _Sizes(NamedTuple):
    """The sizes of attention in the small copy.

    Attributes:
        heads: number of query heads.
        kv_heads: number of key/value heads.
        hidden: width of the hidden state.
    """

    heads: int
    kv_heads: int
    hidden: int


def tiny_config(config: Any, tp: int, length: int = POSITIONS) -> Any:
    """A config like `config`, but with two layers (or one layer of each kind), few small heads, and no dropout.

    The new config keeps everything that affects how tp shards the model: whether there are fewer kv heads than query
    heads or ranks, whether the heads' widths add up to the hidden size, ties, biases, norms, and the kind of attention.
    Each rank gets two heads and two experts, so that a wrong order of heads or experts changes the results.

    Args:
        config: the large model's config, which is not changed.
        tp: number of ranks over which the small model will be sharded.
        length: number of tokens that the small model must be able to read.

    Raises:
        ValueError: the config does not give the number of heads (as in Mamba) or the hidden size.
    """
    sizes = _attention_sizes(config, tp)
    new = copy.deepcopy(config)
    _shrink_layers(config, new)
    _put(config, new, HEAD_KEYS, sizes.heads)
    _put(config, new, ("num_key_value_heads",), sizes.kv_heads)
    # Latent attention has several head sizes of its own; leave these sizes unchanged.
    if not getattr(config, "qk_rope_head_dim", None):
        _put(config, new, ("head_dim", "d_kv"), HEAD_DIM)
    _put(config, new, HIDDEN_KEYS, sizes.hidden)
    _put(config, new, (*FEED_FORWARD_KEYS, "moe_intermediate_size"), 2 * sizes.hidden)
    _shrink_experts(config, new, tp)
    _shrink_longrope(new)
    if getattr(config, "word_embed_proj_dim", None):
        is_projected = config.word_embed_proj_dim != _first(config, HIDDEN_KEYS)
        new.word_embed_proj_dim = sizes.hidden // 2 if is_projected else sizes.hidden
    for key, value in SIZES.items():
        _put(config, new, (key,), value)
    _put(config, new, ("n_positions", *POSITION_KEYS), max(length, POSITIONS))
    _put_tokens(config, new)
    for key, value in config.to_dict().items():
        if NOISE.search(key) and isinstance(value, float):
            setattr(new, key, 0.0)
    new.dtype = torch.float32
    return new


def _first(config: Any, keys: tuple[str, ...]) -> Any:
    """The value of the first key in `keys` that a config sets; None if the config sets none of the keys."""
    return next((getattr(config, key) for key in keys if getattr(config, key, None)), None)


def _put(config: Any, new: Any, keys: tuple[str, ...], value: Any) -> None:
    """Set `value` in `new` for each key that `config` sets. Skip properties, which follow from other keys."""
    for key in keys:
        if getattr(config, key, None) and not isinstance(getattr(type(config), key, None), property):
            setattr(new, key, value)


def _attention_sizes(config: Any, tp: int) -> _Sizes:
    heads, hidden = _first(config, HEAD_KEYS), _first(config, HIDDEN_KEYS)
    if not isinstance(heads, int) or not isinstance(hidden, int):
        raise ValueError(
            f"a config of '{config.model_type}' has no number of heads or no hidden size, so no small copy can be "
            f"made (none of {', '.join(HEAD_KEYS)}; {', '.join(HIDDEN_KEYS)})"
        )
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if kv_heads == heads:
        few_kv = few = 2 * tp
    else:
        # If tp divides the model's number of kv heads, tp must divide the small copy's number too. Otherwise kv heads
        # are copied to several ranks, and the small copy has as many kv heads as the model.
        few_kv = tp if kv_heads % tp == 0 else kv_heads
        few = max(2 * few_kv, 2 * tp)
    if facts := KNOWN.get(config.model_type):
        few, few_kv = few * facts.head_blocks, few_kv * facts.head_blocks
    head_dim = getattr(config, "head_dim", None) or getattr(config, "d_kv", None) or hidden // heads
    # If the heads' widths do not add up to the hidden size, they must not add up in the small copy either.
    width = few * HEAD_DIM * (1 if head_dim * heads == hidden else 2)
    return _Sizes(few, few_kv, width)


def _shrink_layers(config: Any, new: Any) -> None:
    """Keep one layer of each kind, and at least two layers."""
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or ()))
    _put(config, new, LAYER_KEYS, max(2, len(kinds)))
    if kinds:
        new.layer_types = kinds if len(kinds) > 1 else kinds * 2


def _shrink_experts(config: Any, new: Any, tp: int) -> None:
    n_experts = _first(config, EXPERT_KEYS)
    per_token = getattr(config, "num_experts_per_tok", None)
    if n_experts and per_token and not getattr(config, "n_group", None):
        # Keep at least two experts for each rank, and more experts than a token uses.
        _put(config, new, EXPERT_KEYS, min(n_experts, tp * max(2, per_token // tp + 1)))
    # The keys below decide which layers are dense. If any layer has experts, the small copy's second layer must
    # have experts.
    _put(config, new, ("first_k_dense_replace",), 1)
    _put(config, new, ("decoder_sparse_step",), min(2, getattr(config, "decoder_sparse_step", 0)))
    _put(config, new, ("mlp_only_layers",), [i for i in getattr(config, "mlp_only_layers", None) or () if i == 0])


def _shrink_longrope(new: Any) -> None:
    """Give each head its share of the factors, and let the original length be that of a window."""
    for rope in parameters_of(new):
        if rope.get("rope_type") != LONGROPE:
            continue
        n_factors = int(HEAD_DIM * rope.get("partial_rotary_factor", 1.0)) // 2
        for key in ("short_factor", "long_factor"):
            factors = rope[key]
            rope[key] = [factors[i * len(factors) // n_factors] for i in range(n_factors)]
        rope["original_max_position_embeddings"] = WINDOW
        _put(new, new, ("original_max_position_embeddings",), WINDOW)


def _put_tokens(config: Any, new: Any) -> None:
    """Replace the special tokens' ids with ids that are in the small vocabulary."""
    for key, value in TOKENS.items():
        if getattr(config, key, None) is not None:
            setattr(new, key, value)
    if getattr(config, "is_encoder_decoder", False):
        new.decoder_start_token_id = TOKENS["decoder_start_token_id"]


def build(model_class: type[Any], config: Any, attention: str) -> Any:
    """Build a model in fp32 with the same values on every rank. Biases are not 0, and norm weights are not 1.

    Args:
        model_class: model class from transformers.
        config: the model's config.
        attention: name of the attention implementation.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class._from_config(copy.deepcopy(config), attn_implementation=attention)
    return without_dropout(perturbed(model).train())


def without_dropout(model: nn.Module) -> Any:
    """Set all dropout rates to 0, even rates that no config key controls.

    With random masks, even a correctly sharded model would give other results.
    """
    for module in model.modules():
        if "drop" in type(module).__name__.lower():
            module.eval()
        for name, value in vars(module).items():
            if NOISE.search(name) and isinstance(value, float):
                setattr(module, name, 0.0)
    return model


@torch.no_grad()
def perturbed(model: nn.Module) -> Any:
    """Add noise to every parameter, seeded by the parameter's name, so that a missing or doubled term shows up."""
    for name, p in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        p.add_(torch.randn(p.shape, generator=generator) * (0.2 if p.ndim < 2 else 0.05))
    return model


def batch(model: Any, length: int, padded: bool, rows: int = 2, seed: int = 3) -> dict[str, Tensor]:
    """A batch of random tokens.

    Args:
        model: the model that will read the batch.
        length: number of tokens per row.
        padded: whether to mask the last three tokens of the first row and the first two tokens of the last row.
        rows: number of rows.
        seed: seed of the tokens.

    Returns:
        input_ids [rows, length], and attention_mask if `padded`. A model with a head also gets labels (every fifth
        label is -100); an encoder-decoder without a head gets decoder_input_ids.
    """
    generator = torch.Generator().manual_seed(seed)
    size = model.config.vocab_size
    inputs = {"input_ids": torch.randint(3, size, (rows, length), generator=generator)}
    if padded:
        mask = torch.ones(rows, length, dtype=torch.int64)
        mask[0, length - 3 :] = 0
        mask[-1, :2] = 0
        inputs["attention_mask"] = mask
    if model.get_output_embeddings() is not None:
        labels = torch.randint(3, size, (rows, length), generator=generator)
        labels[:, ::5] = -100
        inputs["labels"] = labels
    elif model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"].roll(1, dims=1)
    return inputs


def summed_loss(model: Any, tokens: Tensor, labels: Tensor, **rows: Tensor) -> Tensor:
    """The model's loss, summed over the labels. `rows` holds further arguments for the model's forward."""
    logits = model(input_ids=tokens, use_cache=False, **rows).logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def outcome(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Run a forward pass. Return a loss, and the output from which the loss is computed.

    Returns:
        (loss, logits) if the batch has labels; otherwise (the mean over rows of a random linear function of the hidden
        states, the hidden states).
    """
    out = model(**inputs)
    result = out.logits if "labels" in inputs else out[0]
    if "labels" in inputs:
        return out.loss, result.detach()
    weights = torch.randn(result.shape[1:], generator=torch.Generator().manual_seed(5))
    return (result * weights.to(result.device)).sum() / len(result), result.detach()
