"""Fills in config keys from a transformers directory, and detects later changes to the directory's config.json."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch

from dtmega import config
from dtmega.interop.hf import families
from dtmega.interop.hf.directory import build, dropouts, read_config
from dtmega.interop.hf.files import config_json
from dtmega.interop.hf.files.tensors import has_weights
from dtmega.interop.hf.model import blocks_of, longest

# Keys of config.json that do not affect the results of a training run.
KEYS_WITHOUT_EFFECT = ("transformers_version", "architectures", "dtype", "torch_dtype", "use_cache", "_name_or_path")


def resolve(cfg: config.Config) -> config.Config:
    """Fill in the sizes and the tokenizer from the directory that [model] path names.

    Raises:
        ValueError: the directory is missing, contains custom code or does not hold a causal language model; a
            configured size contradicts config.json; or a key asks for a feature that a transformers model lacks.
    """
    directory = cfg.model.directory
    hf_config = read_config(directory)
    try:
        values = sizes(directory)
    except ValueError:
        raise
    except Exception as error:  # from transformers' code, or because the model is not a plain decoder
        raise ValueError(
            f"{directory}/config.json: '{hf_config.model_type}' is not a decoder that the trainer can train: "
            f"{type(error).__name__}: {error} ([model] path)"
        ) from None
    for key, value in values.items():
        if key in cfg.model.model_fields_set and getattr(cfg.model, key) != value:
            raise ValueError(
                f"[model] {key}={getattr(cfg.model, key)}, but {directory}/config.json gives {value}; "
                f"leave it out ([model] {key})"
            )
    if getattr(hf_config.get_text_config(), "output_router_logits", False):
        raise ValueError(
            f"{directory}/config.json has output_router_logits=true: transformers then adds a loss of routers, "
            f"a product of means over a microbatch, which would change with the layout; it is not part of the loss "
            f"here. Set it to false (router_aux_loss_coef alone changes nothing) ([model] path)"
        )
    max_length = longest(hf_config)
    if max_length and cfg.data.seq_len > max_length:
        key = next(key for key in families.POSITION_KEYS if getattr(hf_config, key, None))
        raise ValueError(
            f"seq_len={cfg.data.seq_len} is more than the {key}={max_length} of {directory} ([data] seq_len)"
        )
    for key in ("reset_position_ids", "reset_attention_mask"):
        if getattr(cfg.data, key):
            raise ValueError(f"[data] {key} is not for name = 'hf': the model computes positions and masks itself")
    sections: dict[str, config.Section] = {"model": cfg.model.model_copy(update=values)}
    if "tokenizer" not in cfg.data.model_fields_set:
        tokenizer = Path(directory, "tokenizer.json")
        if not tokenizer.is_file():
            raise ValueError(
                f"{directory} has no tokenizer.json: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) may "
                f"make one; or name another with [data] tokenizer"
            )
        sections["data"] = cfg.data.model_copy(update={"tokenizer": str(tokenizer)})
    return cfg.model_copy(update=sections)


def notes(model: config.Model) -> list[str]:
    """Messages for the user about differences between training and config.json, and about missing weights."""
    directory = model.directory
    lines = [code] if (code := config_json.own_code(directory)) else []
    if drops := [f"{key}={p}" for key, p in dropouts(read_config(directory)).items() if p > 0]:
        lines.append(f"{directory}: without its dropout ({', '.join(drops)})")
    if not model.init_from and not has_weights(directory):
        lines.append(f"{directory} has no weights: initial values are drawn from [run] seed")
    return lines


def sizes(directory: str) -> dict[str, int]:
    """The values of the [model] keys that a directory determines, keyed by [model] key.

    Raises:
        ValueError: `read_config` refuses the directory, or the model stores a tensor whose dtype is not floating-point.
    """
    hf_config = read_config(directory)
    with torch.device("meta"):
        hf = build(hf_config)
    for name, tensor in hf.state_dict().items():
        if not tensor.is_floating_point():
            raise ValueError(
                f"{directory}: '{name}' is {str(tensor.dtype).removeprefix('torch.')}, and stored numbers are expected "
                f"to be floats ([model] path)"
            )
    blocks = list(blocks_of(hf).children())
    feed_forward = next((getattr(hf_config, k) for k in families.FEED_FORWARD_KEYS if hasattr(hf_config, k)), 0)
    return {
        "vocab_size": hf_config.vocab_size,
        "hidden_size": hf_config.hidden_size,
        "n_layers": len(blocks),
        "n_heads": getattr(hf_config, "num_attention_heads", 0),  # Mamba has no heads
        "ffn_hidden_size": feed_forward or 0,
    }


def digest(directory: str) -> str:
    """A digest of config.json, without the keys that do not affect training."""
    values = {k: v for k, v in config_json.read_plain(directory).items() if k not in KEYS_WITHOUT_EFFECT}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def reread_directory(model: config.Model, trained: str) -> config.Model:
    """Read the sizes from the directory again and return the [model] section with these sizes.

    Args:
        model: the [model] section of the training run, with resolved sizes.
        trained: value of `digest` for the directory at the time of training; '' if unknown.

    Raises:
        ValueError: `sizes` refuses the directory, or config.json has changed since training.
    """
    values = sizes(model.directory)
    today = digest(model.directory)
    if trained not in ("", today):
        raise ValueError(
            f"{model.directory}/config.json has changed since training: its digest is {today}, expected {trained} "
            f"([model] path)"
        )
    return model.model_copy(update=values)
