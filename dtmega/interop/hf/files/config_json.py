"""Reads a directory's config.json, which may be malicious, and makes a transformers config."""

from __future__ import annotations

import copy
import functools
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dtmega.files.untrusted_json import dangling, download, read_object
from dtmega.interop.hf.files.tensors import TensorFiles, has_weights, other_weights

NAME = "config.json"
ADAPTERS = "adapter_config.json"  # in a folder of adapters, which has no config.json
# Keys that choose an implementation. Some of these keys can name code that transformers would download, as in
# "attn_implementation": "owner/repository". Without these keys, transformers chooses a built-in implementation.
IMPLEMENTATION = re.compile(
    r".*_implementation(_internal|_autoset)?|use_kernels|kernel_config|fusion_config|base_model_.*_plan"
)
AUTO_MAP = re.compile("auto_map")
# Keys that count modules of one kind. Each of these modules has at least one tensor.
COUNT = re.compile(r"(.*_)?(layers?|blocks?|experts?|depths?)")
# Config keys and module attributes that hold rates of dropout or other random noise in training.
NOISE = re.compile("drop|jitter")
# Counts up to this value are not compared with the files. The deepest published models have about 100 layers.
PLAUSIBLE = 1000


def read_plain(directory: str | Path) -> dict[str, Any]:
    """Read config.json without `auto_map`, and check that building a model from the content is safe.

    `auto_map` names code beside config.json. This code is never run: the model of transformers, or of dtmega, with this
    model_type is built instead (`own_code` tells the user so).

    Raises:
        ValueError: the file is missing, is not a JSON object, or has no model_type; the file refers to weights
            elsewhere; or the file specifies more layers (experts, blocks) than there are stored tensors.
            transformers would build these layers one by one until memory runs out.
    """
    file = Path(directory, NAME)
    if not file.exists():
        if not Path(directory).is_dir():
            raise ValueError(f"{directory} is not a folder with a {NAME}{download(str(directory))}")
        if Path(directory, ADAPTERS).exists():
            raise ValueError(
                f"{directory} holds adapters of peft ({ADAPTERS}), not a model: add them to the weights of their base "
                f"first, PeftModel.from_pretrained(BASE, DIR).merge_and_unload().save_pretrained(OUT), and name OUT"
            )
        instead = "" if any(Path(directory).glob("*.safetensors")) else other_weights(Path(directory))
        raise ValueError(f"{directory} has no {NAME}{dangling(file)}{instead}")
    plain = read_object(file)
    kind = plain.get("model_type")
    if not isinstance(kind, str):
        raise ValueError(f"{file} has model_type={kind!r:.80}; expected the name of a family, such as 'llama'")
    n_tensors: int | None = None
    for key, value in _walk(plain):
        if key in ("transformers_weights", "configuration_files") and value:
            raise ValueError(f"{file} has {key}={value!r:.80}: expected a directory whose files have the usual names")
        largest = max((n for n in (value if isinstance(value, list) else [value]) if type(n) is int), default=0)
        if largest > PLAUSIBLE and COUNT.fullmatch(key):
            n_tensors = _count_tensors(directory) if n_tensors is None else n_tensors
            if largest > n_tensors:
                raise ValueError(f"{file} has {key}={largest}, but {n_tensors} tensors are stored beside it")
    return _without(AUTO_MAP, plain)


def own_code(directory: str | Path) -> str:
    """A remark on the code that a directory's config.json names; '' if it names none.

    Raises:
        ValueError: the file is missing or is not a JSON object.
    """
    file = Path(directory, NAME)
    has_code = any(AUTO_MAP.fullmatch(key) for key, _ in _walk(read_object(file)))
    return f"{file} has auto_map, code of its own: custom (remote) code is not run" if has_code else ""


def make_config(directory: str | Path, plain: dict[str, Any]) -> Any:
    """Make a transformers config from the content of config.json, without keys that choose an implementation.

    Args:
        directory: path of the directory, which becomes the config's `name_or_path`.
        plain: content of the directory's config.json, from `read_plain`.

    Raises:
        ValueError: transformers refuses config.json.
    """
    try:
        made = _config_of(json.dumps(_without(IMPLEMENTATION, plain)))
    except Exception as error:  # each family checks its keys in its own way
        code = own_code(directory)
        raise ValueError(f"{Path(directory, NAME)}: {error}{code and f' ({code})'}") from None
    config = copy.deepcopy(made)
    config.name_or_path = str(directory)
    return config


@functools.lru_cache(maxsize=8)  # a run reads one config.json several times at startup
def _config_of(content: str) -> Any:
    """Make a transformers config from the content of a config.json. Callers must copy the config before changing it."""
    import transformers

    # AutoConfig applies its own rules to the content, but reads only directories. So write the content to a temporary
    # directory.
    with tempfile.TemporaryDirectory() as cleaned:
        Path(cleaned, NAME).write_text(content, encoding="utf-8")
        return transformers.AutoConfig.from_pretrained(cleaned)


def _count_tensors(directory: str | Path) -> int:
    return len(TensorFiles(directory).tensors) if has_weights(directory) else 0


def _walk(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of all objects in a JSON value, at every depth."""
    if isinstance(value, dict):
        for key, inside in value.items():
            yield key, inside
            yield from _walk(inside)
    elif isinstance(value, list):
        for inside in value:
            yield from _walk(inside)


def _without(keys: re.Pattern[str], value: Any) -> Any:
    """A copy of a JSON value without the keys that a pattern matches, at any depth."""
    if isinstance(value, dict):
        return {key: _without(keys, inside) for key, inside in value.items() if not keys.fullmatch(key)}
    return [_without(keys, inside) for inside in value] if isinstance(value, list) else value
