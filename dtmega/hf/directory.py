"""A directory of `transformers` as the trainer finds it: config.json, the model made of it, and initial values."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from dtmega import extras
from dtmega.hf import families
from dtmega.hf.files import config_json
from dtmega.hf.initial import draws_of


def read_config(path: str) -> Any:
    """The configuration that transformers makes of a directory.

    Raises:
        ValueError: transformers is missing, no directory with config.json, or not of a causal language model of its
            own.
    """
    with extras.needed("hf", "[model] name = 'hf'"):
        import transformers
    if not path:
        raise ValueError("name = 'hf' needs a directory with config.json ([model] path)")
    try:
        plain = config_json.read_plain(path)
    except ValueError as error:
        raise ValueError(f"{error} ([model] path)") from None
    file, kind = Path(path, config_json.NAME), plain["model_type"]
    if kind not in transformers.CONFIG_MAPPING:
        raise ValueError(
            f"{file} has model_type={kind!r:.80}; expected a model of transformers {transformers.__version__} "
            f"([model] path)"
        )
    if "quantization_config" in plain:
        # Its tensors are not what their names say: an fp8 weight is to be multiplied by another tensor.
        raise ValueError(f"{file} is of quantised weights (quantization_config), which are not trained ([model] path)")
    try:
        theirs = config_json.make_config(path, plain)
    except ValueError as error:
        raise ValueError(f"{error} ([model] path)") from None
    # BERT and its like have causal heads too, where config.json says so.
    decoder = getattr(theirs, "is_decoder", True) or theirs.model_type in families.ALWAYS_CAUSAL
    if not decoder or theirs.is_encoder_decoder or type(theirs) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"model_type '{kind}' of {file} is not a causal language model, which is what the trainer trains; "
            f"dtmega.plans.parallelize_hf cuts it for a loop of your own ([model] path)"
        )
    return theirs


def build(theirs: Any) -> Any:
    """The model, with values not yet initialised, in fp32, without dropout and other noise."""
    from transformers import AutoModelForCausalLM

    theirs = copy.deepcopy(theirs)
    for key in dropouts(theirs):
        setattr(theirs, key, 0.0)
    return AutoModelForCausalLM.from_config(theirs, dtype=torch.float32)


def dropouts(theirs: Any) -> dict[str, float]:
    """Keys that say how much is dropped, or disturbed (the hidden state that a router sees)."""
    return {key: p for key, p in theirs.to_dict().items() if config_json.NOISE.search(key) and isinstance(p, float)}


def initial_values(path: str) -> dict[str, tuple[float, float]]:
    """(mean, std) of each parameter's normal distribution, as the family draws it.

    Raises:
        ValueError: it draws one in another way.
    """
    with torch.device("meta"):
        found = draws_of(build(read_config(path)))
    for name, drawn in found.items():
        if drawn is None:
            raise ValueError(
                f"'{name}' of {path} has initial values that are not drawn alike on every layout: its family has code "
                f"of its own for them. Start with weights, which transformers makes so: AutoModelForCausalLM."
                f"from_config(AutoConfig.from_pretrained(DIR)).save_pretrained(DIR) ([model] path, [model] init_from)"
            )
    return {name: drawn for name, drawn in found.items() if drawn is not None}
