"""Hugging Face's folders of BLOOM, to read: safetensors with a config.json. Each rank reads only the part it holds.

The table of names is an argument (`HF_KEYS` of the model): our prefix -> theirs, `{}` for the number of a layer.
Tensors are the same on both sides, the fused q, k, v included; the head is tied to the embedding and is not stored.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtmega import config
from dtmega.checkpoint import Source
from dtmega.hf import config_json
from dtmega.hf.files import TensorFiles
from dtmega.shards import Box, boxes

EMBED, THEIR_HEAD, BASE = "embed.weight", "lm_head.weight", "transformer."
BUFFERS = re.compile(r"(causal_mask|masked_bias)$")  # that old versions of transformers stored
# [model] key -> its names in config.json, today's last; the first one there counts. Defaults are the same in both.
CONFIG_KEYS = {
    "vocab_size": ["vocab_size"],
    "hidden_size": ["n_embed", "hidden_size"],
    "n_layers": ["num_hidden_layers", "n_layer"],
    "n_heads": ["num_attention_heads", "n_head"],
    "layer_norm_eps": ["layer_norm_epsilon"],
    "apply_residual_connection_post_layernorm": ["apply_residual_connection_post_layernorm"],
    "hidden_dropout": ["hidden_dropout"],
    "attention_dropout": ["attention_dropout"],
    "init_std": ["initializer_range"],
}
SIZES = ("vocab_size", "hidden_size", "n_layers", "n_heads")  # without a default
FREE = ("hidden_dropout", "attention_dropout", "init_std")  # may differ: they do not change what the weights mean


class HFFolder:
    """The weights of a folder as a `Source`, by our names.

    With or without `transformer.` before the names, as the folder of a bare BloomModel has them. A stored head must be
    the embedding, which each rank checks for the part it reads.

    Attributes:
        tensors: name -> dtype in the file and shape.
        bytes_read: of tensors, by this object.
    """

    def __init__(self, path: str | Path, hf_keys: Mapping[str, str]) -> None:
        """Raises:
        ValueError: what `TensorFiles` refuses; a tensor that is there twice, or not BLOOM's.
        """
        self.path, self._files = Path(path), TensorFiles(path)
        self.tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        self._keys: dict[str, str] = {}
        self._has_head = False
        unknown: list[str] = []
        table = {their: our for our, their in hf_keys.items()}
        for theirs in self._files.tensors:
            if theirs == THEIR_HEAD:
                self._has_head = True
            elif ours := translate(theirs if theirs.startswith(BASE) else BASE + theirs, table):
                self._add(ours, theirs)
            elif not BUFFERS.search(theirs):
                unknown.append(theirs)
        if unknown:
            more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
            raise ValueError(
                f"{self.path} is of another model: it has {', '.join(unknown[:3])}{more}, unknown to BLOOM"
            )
        if self._has_head and EMBED in self.tensors and self._files.tensors[THEIR_HEAD][1] != self.tensors[EMBED][1]:
            raise ValueError(
                f"{self.path}: {THEIR_HEAD} is {list(self._files.tensors[THEIR_HEAD][1])}, {self._not_tied()}"
            )

    def _add(self, name: str, theirs: str) -> None:
        self._files.check_weight(theirs)
        if name in self._keys:
            raise ValueError(f"{self.path}: '{self._keys[name]}' and '{theirs}' are there; expected one for {name}")
        self._keys[name] = theirs
        self.tensors[name] = self._files.tensors[theirs]

    @property
    def bytes_read(self) -> int:
        return self._files.bytes_read

    def _not_tied(self) -> str:
        return "and not the embedding; expected equal ones, since BLOOM's head is tied to its embedding"

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> Tensor:
        """That part (None: all) of a tensor, in the file's dtype.

        Raises:
            ValueError: that part of the embedding is not what the stored head has.
        """
        part = self._files.read(self._keys[name], index)
        if name == EMBED and self._has_head and not torch.equal(self._files.read(THEIR_HEAD, index).to(part), part):
            raise ValueError(f"{self.path}: {THEIR_HEAD} is stored {self._not_tied()}")
        return part


@functools.cache
def pattern(prefix: str) -> re.Pattern[str]:
    """Matches the parameters of a row: the groups are the layer, if it has one, and weight or bias."""
    return re.compile(re.escape(prefix).replace(r"\{\}", r"(\d+)") + r"(weight|bias)")


def translate(name: str, table: Mapping[str, str]) -> str | None:
    """The name by the row of the table (prefix -> prefix) that it has the prefix of; None if there is none."""
    for prefix, other in table.items():
        if match := pattern(prefix).fullmatch(name):
            *layer, suffix = match.groups()
            return other.format(*layer) + suffix
    return None


def model_section(path: str | Path) -> dict[str, Any]:
    """The [model] section that a folder's config.json describes.

    Raises:
        ValueError: no config.json, not of BLOOM, or without a size.
    """
    file = Path(path) / config_json.NAME
    theirs = config_json.read_plain(path)
    if theirs["model_type"] != "bloom":
        raise ValueError(f"{file} has model_type={theirs['model_type']!r}, expected 'bloom' ([model] name)")
    section: dict[str, Any] = {"name": "bloom"}
    for key, names in CONFIG_KEYS.items():
        found = [theirs[name] for name in names if theirs.get(name) is not None]
        if found and key in SIZES and (type(found[0]) is not int or found[0] < 1):
            raise ValueError(f"{file} has {names[-1]}={found[0]!r:.80}, expected a number above 0 ([model] {key})")
        if found:
            section[key] = found[0]
        elif key in SIZES:
            raise ValueError(f"{file} has no '{names[-1]}' ([model] {key})")
    return section


def check_config(path: str | Path, model: config.Model) -> None:
    """Is the folder's model of the shape that [model] asks for?

    Raises:
        ValueError: names each key that differs, with both values.
    """
    section = model_section(path)
    keys = [key for key in CONFIG_KEYS if key not in FREE]
    theirs = {key: section.get(key, config.Model.model_fields[key].default) for key in keys} | {
        "ffn_hidden_size": 4 * model.hidden_size
    }
    ours = {key: getattr(model, key) for key in keys} | {"ffn_hidden_size": model.ffn}
    if wrong := [f"{key}={theirs[key]}, not {ours[key]} ([model] {key})" for key in ours if ours[key] != theirs[key]]:
        raise ValueError(f"{path} is of a model with {'; '.join(wrong)}")


@torch.no_grad()
def load(source: Source, parameters: Iterable[tuple[str, Tensor]], vocab: int) -> None:
    """Fill parameters in place, each rank with the part it holds; of two of one name, both. Casts to their dtype.

    Args:
        parameters: name in the whole model -> DTensor, or a whole tensor.
        vocab: `[model] vocab_size`. Rows of the embedding beyond it are padding, of which there may be more or fewer
            here than in the source; those that the source does not have are filled with zeros.

    Raises:
        ValueError: a parameter that the source does not have, or has in another shape.
    """
    for name, parameter in parameters:
        if name not in source.tensors:
            raise ValueError(f"the weights to start with have no '{name}' ([model] n_layers, [model] init_from)")
        there, here = source.tensors[name][1], tuple(parameter.shape)
        if there != here and not (name == EMBED and len(there) == 2 and there[0] >= vocab and there[1] == here[1]):
            raise ValueError(f"'{name}' is {list(there)} there, {list(here)} here ([model], [model] init_from)")
        for offsets, part in boxes(parameter):
            rows = max(0, min(part.shape[0], there[0] - offsets[0]))
            part[rows:] = 0
            if rows:
                part[:rows].copy_(source.read(name, Box(offsets, part[:rows]).where))
