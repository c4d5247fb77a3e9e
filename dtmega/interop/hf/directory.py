"""Makes a model of a `transformers` directory: the configuration, the model, its memory, and the initial values."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from dtmega.files import optional_imports
from dtmega.interop.hf import families
from dtmega.interop.hf.files import config_json
from dtmega.interop.hf.initial import draws_of

LONGROPE = "longrope"  # a value of rope_type


def read_config(path: str) -> Any:
    """Load a directory's configuration as a transformers config object.

    Raises:
        ValueError: transformers is not installed; config.json is missing; or the model that config.json describes is
            not a causal language model, is not implemented in transformers, or has quantised weights.
    """
    with optional_imports.needed("hf", "[model] name = 'hf'"):
        import transformers
    if not path:
        raise ValueError("name = 'hf' needs a directory with config.json ([model] path)")
    try:
        plain = config_json.read_plain(path)
    except ValueError as error:
        raise ValueError(f"{error} ([model] path)") from None
    file, kind = Path(path, config_json.NAME), plain["model_type"]
    if kind not in transformers.CONFIG_MAPPING:
        code = config_json.own_code(path)
        raise ValueError(
            f"{file} has model_type={kind!r:.80}; expected a model of transformers {transformers.__version__}"
            f"{code and f' ({code})'} ([model] path)"
        )
    if "quantization_config" in plain:
        # Quantised tensors are not the weights themselves: an fp8 weight has to be multiplied by its scales first.
        raise ValueError(f"{file} says that weights are quantised (quantization_config): not trainable ([model] path)")
    try:
        hf_config = config_json.make_config(path, plain)
    except ValueError as error:
        raise ValueError(f"{error} ([model] path)") from None
    # BERT and similar families are causal language models only if config.json has `is_decoder` = true.
    decoder = getattr(hf_config, "is_decoder", True) or hf_config.model_type in families.ALWAYS_CAUSAL
    if not decoder or hf_config.is_encoder_decoder or type(hf_config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"model_type '{kind}' of {file} is not a causal language model, which is what the trainer trains; "
            f"dtmega.plans.parallelize_hf cuts it for a loop of your own ([model] path)"
        )
    return hf_config


def build(hf_config: Any) -> Any:
    """Build the model that a config describes, in fp32 and without dropout or other noise."""
    from transformers import AutoModelForCausalLM

    hf_config = copy.deepcopy(hf_config)
    for key in dropouts(hf_config):
        setattr(hf_config, key, 0.0)
    with _NothingDrawnOnMeta():
        return AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)


class _NothingDrawnOnMeta(TorchFunctionMode):
    """A torch mode that skips the draws of initial values for tensors on meta.

    torch would spend more time on these draws than on the rest of the build. Initial values on other devices are drawn
    as usual.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.nn.init.normal_, torch.nn.init.kaiming_uniform_, torch.nn.init.uniform_):
            tensor = kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


def dropouts(hf_config: Any) -> dict[str, float]:
    """A config's rates of dropout and other noise (for example, jitter on a router's input), keyed by config key."""
    return {key: p for key, p in hf_config.to_dict().items() if config_json.NOISE.search(key) and isinstance(p, float)}


def initial_values(path: str) -> dict[str, tuple[float, float]]:
    """The distribution from which the family draws each parameter's initial values.

    Returns:
        (mean, std) for each parameter, keyed by parameter name, as in `draws_of`.

    Raises:
        ValueError: `draws_of` finds no distribution for a parameter.
    """
    with torch.device("meta"):
        draws = draws_of(build(read_config(path)))
    distributions: dict[str, tuple[float, float]] = {}
    for name, distribution in draws.items():
        if distribution is None:
            raise ValueError(
                f"initial values for '{name}' of {path} cannot be drawn alike on every layout, because its family has "
                f"its own code for them. Start from weights, which transformers can make: AutoModelForCausalLM."
                f"from_config(AutoConfig.from_pretrained(DIR)).save_pretrained(DIR) ([model] path, [model] init_from)"
            )
        distributions[name] = distribution
    return distributions


@torch.no_grad()
def materialize(model: Any, device: str | torch.device) -> None:
    """Allocate a model that is on meta, then compute the buffers that no file holds.

    Ties are kept. Parameters get memory but no values.
    """
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(parameter, []).append((module, name))
    # `to_empty` gives each module that holds a tied parameter a parameter of its own, so restore the ties.
    model.to_empty(device=device)
    for (first, first_name), *others in owners.values():
        for module, name in others:
            module.register_parameter(name, first.get_parameter(first_name))
    # transformers does not initialise modules or parameters whose flag `_is_hf_initialized` is True. Set the flag on
    # every parameter, and on every module without buffers: `initialize_weights` then draws nothing and computes only
    # buffers.
    for parameter in model.parameters():
        parameter._is_hf_initialized = True
    for module in model.modules():
        module._is_hf_initialized = not list(module.buffers(recurse=False))
    model.initialize_weights()


def parameters_of(hf_config: Any) -> list[dict[str, Any]]:
    """A config's `rope_parameters`, followed by the nested dict (if any) for each kind of layer."""
    rope = getattr(hf_config, "rope_parameters", None)
    if not isinstance(rope, dict):
        return []
    return [rope, *(of_kind for of_kind in rope.values() if isinstance(of_kind, dict))]


def original_length(hf_config: Any) -> int | None:
    """The number of tokens above which a conversation has other frequencies; None if the length changes nothing."""
    ropes = parameters_of(hf_config)
    lengths = [rope["original_max_position_embeddings"] for rope in ropes if rope.get("rope_type") == LONGROPE]
    return min(lengths, default=None)


def experts_of(model: nn.Module) -> list[nn.Module]:
    """The experts modules of a model, if their transformers class supports experts on other ranks."""
    return [module for module in model.modules() if hasattr(module, "_is_expert_parallel")]


def allow_views() -> None:
    """Silence FSDP2's warning about blocks that return a view, as in OPT; no family changes the view in place."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
