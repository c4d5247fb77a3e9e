"""A small model with all the peculiarities of a large one, and a batch for it: a plan is proven on these."""

from __future__ import annotations

import copy
import zlib
from typing import Any

import torch
from torch import Tensor, nn

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
SIZES = {"vocab_size": VOCAB, "n_positions": POSITIONS, "sliding_window": WINDOW, "rotary_dim": HEAD_DIM // 2}
SIZES |= dict.fromkeys(POSITION_KEYS, POSITIONS)
TOKENS = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


def tiny_config(config: Any, tp: int) -> Any:
    """The configuration with two layers (or one of each kind), few and small heads, and no dropout.

    What decides how tp cuts stays: whether keys have fewer heads than queries and than there are ranks, whether heads
    make up the hidden size, ties, biases, norms, the kind of attention. Two heads a rank show a wrong order of them, as
    do two experts.

    Raises:
        ValueError: a model without heads (Mamba).
    """
    new = copy.deepcopy(config)

    def first(keys: tuple[str, ...]) -> Any:
        return next((getattr(config, key) for key in keys if getattr(config, key, None)), None)

    def put(keys: tuple[str, ...], value: Any) -> None:
        for key in keys:
            if getattr(config, key, None) and not isinstance(getattr(type(config), key, None), property):
                setattr(new, key, value)

    heads, hidden = first(HEAD_KEYS), first(HIDDEN_KEYS)
    if not isinstance(heads, int) or not isinstance(hidden, int):
        raise ValueError(
            f"a plan is proven on a small clone, and a config of '{config.model_type}' has no number of heads or no "
            f"hidden size to make one by (none of {', '.join(HEAD_KEYS)}; {', '.join(HIDDEN_KEYS)})"
        )
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    few_kv = 2 * tp if kv_heads == heads else tp if kv_heads % tp == 0 else kv_heads
    few = few_kv if kv_heads == heads else max(2 * few_kv, 2 * tp)
    if known := KNOWN.get(config.model_type):
        few, few_kv = few * known.head_blocks, few_kv * known.head_blocks
    head_dim = getattr(config, "head_dim", None) or getattr(config, "d_kv", None) or hidden // heads
    small = few * HEAD_DIM * (1 if head_dim * heads == hidden else 2)
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or ()))
    put(LAYER_KEYS, max(2, len(kinds)))
    if kinds:
        new.layer_types = kinds if len(kinds) > 1 else kinds * 2
    put(HEAD_KEYS, few)
    put(("num_key_value_heads",), few_kv)
    if not getattr(config, "qk_rope_head_dim", None):  # latent attention has lengths of its own
        put(("head_dim", "d_kv"), HEAD_DIM)
    put(HIDDEN_KEYS, small)
    put((*FEED_FORWARD_KEYS, "moe_intermediate_size"), 2 * small)
    experts = first(EXPERT_KEYS)
    visited = getattr(config, "num_experts_per_tok", None)
    if experts and visited and not getattr(config, "n_group", None):
        # Two a rank or more, and more than a token visits.
        put(EXPERT_KEYS, min(experts, tp * max(2, visited // tp + 1)))
    # So that the second layer has experts, where any has.
    put(("first_k_dense_replace",), 1)
    put(("decoder_sparse_step",), min(2, getattr(config, "decoder_sparse_step", 0)))
    put(("mlp_only_layers",), [i for i in getattr(config, "mlp_only_layers", None) or () if i == 0])
    if getattr(config, "word_embed_proj_dim", None):
        new.word_embed_proj_dim = small if config.word_embed_proj_dim == hidden else small // 2
    for key, value in SIZES.items():
        put((key,), value)
    for key, value in TOKENS.items():
        if getattr(config, key, None) is not None:
            setattr(new, key, value)
    if getattr(config, "is_encoder_decoder", False):
        new.decoder_start_token_id = TOKENS["decoder_start_token_id"]
    for key, value in config.to_dict().items():
        if NOISE.search(key) and isinstance(value, float):
            setattr(new, key, 0.0)
    new.dtype = torch.float32
    return new


def build(model_class: type[Any], config: Any, attention: str) -> Any:
    """A model in fp32 with the same values on every rank, biases and norms not left at 0 and 1."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class._from_config(copy.deepcopy(config), attn_implementation=attention)
    return without_dropout(perturbed(model).train())


def without_dropout(model: nn.Module) -> Any:
    """Set all dropout to 0, also of modules whose rate is in no key of the config.

    Masks are random, so with them a right cut would look wrong.
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
    """Move every parameter by noise from its name, so that a missing or doubled term shows."""
    for name, p in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        p.add_(torch.randn(p.shape, generator=generator) * (0.2 if p.ndim < 2 else 0.05))
    return model


def batch(model: Any, length: int, padded: bool, rows: int = 2, seed: int = 3) -> dict[str, Tensor]:
    """Tokens [rows, length], where the model takes them labels, some of them -100; `padded` hides ends and starts."""
    generator = torch.Generator().manual_seed(seed)
    size = model.config.vocab_size
    found = {"input_ids": torch.randint(3, size, (rows, length), generator=generator)}
    if padded:
        mask = torch.ones(rows, length, dtype=torch.int64)
        mask[0, length - 3 :] = 0
        mask[-1, :2] = 0
        found["attention_mask"] = mask
    if model.get_output_embeddings() is not None:
        labels = torch.randint(3, size, (rows, length), generator=generator)
        labels[:, ::5] = -100
        found["labels"] = labels
    elif model.config.is_encoder_decoder:
        found["decoder_input_ids"] = found["input_ids"].roll(1, dims=1)
    return found


def outcome(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(loss, logits or hidden states) of a forward; without a loss of the model's, a number that depends on all."""
    out = model(**inputs)
    result = out.logits if "labels" in inputs else out[0]
    if "labels" in inputs:
        return out.loss, result.detach()
    weights = torch.randn(result.shape, generator=torch.Generator().manual_seed(5))
    return (result * weights.to(result.device)).sum(), result.detach()
