"""The keys of a configuration that a directory of transformers decides, and the check that it did not change."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch

from dtmega import config
from dtmega.hf import families
from dtmega.hf.directory import build, dropouts, read_config
from dtmega.hf.files import config_json
from dtmega.hf.files.tensors import has_weights
from dtmega.hf.model import blocks_of, longest

IDLE = ("transformers_version", "architectures", "dtype", "torch_dtype", "use_cache", "_name_or_path")


def resolve(cfg: config.Config) -> config.Config:
    """The configuration with sizes and tokenizer that the directory of [model] path has.

    Raises:
        ValueError: no such directory, not a causal language model, code of its own, a size that config.json
            contradicts, what the trainer cannot give a model of transformers.
    """
    directory = cfg.model.directory
    theirs = read_config(directory)
    try:
        values = sizes(directory)
    except ValueError:
        raise
    except Exception as error:  # of a family's own code, or what is no plain decoder has not
        raise ValueError(
            f"{directory}/config.json makes no decoder of '{theirs.model_type}' that the trainer can train: "
            f"{type(error).__name__}: {error} ([model] path)"
        ) from None
    for key, value in values.items():
        if key in cfg.model.model_fields_set and getattr(cfg.model, key) != value:
            raise ValueError(
                f"[model] {key}={getattr(cfg.model, key)}, but by {directory}/config.json it is {value}; "
                f"leave it out ([model] {key})"
            )
    if getattr(theirs.get_text_config(), "output_router_logits", False):
        raise ValueError(
            f"{directory}/config.json has output_router_logits=true: transformers then adds a loss of routers, "
            f"a product of means over a microbatch, which would change with the layout; it is not part of the loss "
            f"here. Set it to false (router_aux_loss_coef alone changes nothing) ([model] path)"
        )
    most = longest(theirs)
    if most and cfg.data.seq_len > most:
        key = next(key for key in families.POSITION_KEYS if getattr(theirs, key, None))
        raise ValueError(f"seq_len={cfg.data.seq_len} is more than the {key}={most} of {directory} ([data] seq_len)")
    for key in ("reset_position_ids", "reset_attention_mask"):
        if getattr(cfg.data, key):
            raise ValueError(f"[data] {key} is not for name = 'hf': the model computes positions and masks itself")
    changed: dict[str, config.Section] = {"model": cfg.model.model_copy(update=values)}
    if "tokenizer" not in cfg.data.model_fields_set:
        tokenizer = Path(directory, "tokenizer.json")
        if not tokenizer.is_file():
            raise ValueError(
                f"{directory} has no tokenizer.json: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) may "
                f"make one, [data] tokenizer names another"
            )
        changed["data"] = cfg.data.model_copy(update={"tokenizer": str(tokenizer)})
    return cfg.model_copy(update=changed)


def notes(model: config.Model) -> list[str]:
    """Lines about what the trainer does otherwise than config.json says, or the user might not know."""
    directory = model.directory
    drops = [f"{key}={p}" for key, p in dropouts(read_config(directory)).items() if p > 0]
    found = [f"{directory}: without its dropout ({', '.join(drops)})"] if drops else []
    if not model.init_from and not has_weights(directory):
        found.append(f"{directory} has no weights: initial values are drawn from [run] seed")
    return found


def sizes(directory: str) -> dict[str, int]:
    """Keys of the [model] section that the directory decides.

    Raises:
        ValueError: as `read_config`, or the model has stored what is no float.
    """
    theirs = read_config(directory)
    with torch.device("meta"):
        hf = build(theirs)
    for name, tensor in hf.state_dict().items():
        if not tensor.is_floating_point():
            raise ValueError(
                f"{directory}: '{name}' is {str(tensor.dtype).removeprefix('torch.')}, and stored numbers are expected "
                f"to be floats ([model] path)"
            )
    blocks = list(blocks_of(hf).children())
    feed_forward = next((getattr(theirs, k) for k in families.FEED_FORWARD_KEYS if hasattr(theirs, k)), 0)
    return {
        "vocab_size": theirs.vocab_size,
        "hidden_size": theirs.hidden_size,
        "n_layers": len(blocks),
        "n_heads": getattr(theirs, "num_attention_heads", 0),  # Mamba has none
        "ffn_hidden_size": feed_forward or 0,
    }


def digest(directory: str) -> str:
    """The digest of all that config.json says and a number hangs on."""
    said = {k: v for k, v in config_json.read_plain(directory).items() if k not in IDLE}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:12]


def reread_directory(model: config.Model, trained: str) -> config.Model:
    """The section with what the directory says today.

    Args:
        trained: the `digest` of the directory that was trained; '' where it is not known.

    Raises:
        ValueError: as `resolve`, or config.json is another one.
    """
    values = sizes(model.directory)
    today = digest(model.directory)
    if trained not in ("", today):
        raise ValueError(
            f"{model.directory}/config.json is not what was trained: its digest is {today}, expected {trained} "
            f"([model] path)"
        )
    return model.model_copy(update=values)
