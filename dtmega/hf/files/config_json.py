"""The config.json of a directory of `transformers`: what of it is believed, and the configuration that it makes."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dtmega.hf.files.tensors import TensorFiles, has_weights, other_weights
from dtmega.strangers import dangling, download, read_object

NAME = "config.json"
# Keys that say how to compute. Some name code that transformers downloads ("attn_implementation": "owner/repository").
# Without them it is transformers' own choice.
IMPLEMENTATION = re.compile(
    r".*_implementation(_internal|_autoset)?|use_kernels|kernel_config|fusion_config|base_model_.*_plan"
)
# Keys that count what a model has a list of. Each of these has at least one tensor.
COUNT = re.compile(r"(.*_)?(layers?|blocks?|experts?|depths?)")
# Keys, and attributes of modules, that say how much is dropped or disturbed at random in training.
NOISE = re.compile("drop|jitter")
PLAUSIBLE = 1000  # is not held against the files; the deepest models that are published have a tenth of it


def read_plain(directory: str | Path) -> dict[str, Any]:
    """The content of the file as it stands.

    Raises:
        ValueError: no such file, no JSON object, no model_type, code or weights elsewhere, or more layers (experts,
            blocks) than there are tensors: transformers would build them one by one, until memory ends.
    """
    file = Path(directory, NAME)
    if not file.exists():
        if not Path(directory).is_dir():
            raise ValueError(f"{directory} is not a folder with a {NAME}{download(str(directory))}")
        instead = "" if any(Path(directory).glob("*.safetensors")) else other_weights(Path(directory))
        raise ValueError(f"{directory} has no {NAME}{dangling(file)}{instead}")
    plain = read_object(file)
    kind = plain.get("model_type")
    if not isinstance(kind, str):
        raise ValueError(f"{file} has model_type={kind!r:.80}; expected the name of a family, such as 'llama'")
    stored: int | None = None
    for key, value in _walk(plain):
        if key == "auto_map":
            raise ValueError(f"{file} has auto_map: code of its own, custom (remote) code is not run")
        if key in ("transformers_weights", "configuration_files") and value:
            raise ValueError(f"{file} has {key}={value!r:.80}: expected a directory whose files have the usual names")
        largest = max((n for n in (value if isinstance(value, list) else [value]) if type(n) is int), default=0)
        if largest > PLAUSIBLE and COUNT.fullmatch(key):
            stored = _stored(directory) if stored is None else stored
            if largest > stored:
                raise ValueError(f"{file} has {key}={largest}, but {stored} tensors are stored beside it")
    return plain


def make_config(directory: str | Path, plain: dict[str, Any]) -> Any:
    """The configuration that transformers makes of the file, without keys that choose an implementation.

    Args:
        plain: what `read_plain` gave.

    Raises:
        ValueError: transformers cannot make one of it.
    """
    import transformers

    # AutoConfig reads a directory only, and it has rules of its own for what is in it.
    with tempfile.TemporaryDirectory() as cleaned:
        Path(cleaned, NAME).write_text(json.dumps(_without_implementations(plain)), encoding="utf-8")
        try:
            made: Any = transformers.AutoConfig.from_pretrained(cleaned)
        except Exception as error:  # each family checks its keys in its own way
            raise ValueError(f"{Path(directory, NAME)}: {error}") from None
    made.name_or_path = str(directory)
    return made


def _stored(directory: str | Path) -> int:
    return len(TensorFiles(directory).tensors) if has_weights(directory) else 0


def _walk(value: Any) -> Iterator[tuple[str, Any]]:
    """Keys and values of all objects in a JSON value."""
    for key, inside in value.items() if isinstance(value, dict) else ():
        yield key, inside
        yield from _walk(inside)
    for inside in value if isinstance(value, list) else ():
        yield from _walk(inside)


def _without_implementations(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_implementations(v) for k, v in value.items() if not IMPLEMENTATION.fullmatch(k)}
    return [_without_implementations(v) for v in value] if isinstance(value, list) else value
