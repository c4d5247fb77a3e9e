"""Writes adapters as a folder that the library peft loads onto a transformers model: `PeftModel.from_pretrained`.

OUT/adapter_config.json          rank, alpha, and the layers that have adapters
OUT/adapter_model.safetensors    base_model.model.LAYER.lora_A.weight [r, in] and lora_B.weight [out, r]

Every LAYER is the name of a module of the transformers model. peft computes W + (lora_alpha / r) B A, as dtmega does.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtmega import config
from dtmega.files import atomic
from dtmega.formats.format import Format
from dtmega.formats.sources import Source
from dtmega.formats.whole import Build, tensor_names
from dtmega.interop.hf.files.write import TensorSpec, header, to_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


class TheirLayer(NamedTuple):
    """A linear layer of a transformers model that computes what one of dtmega's layers does, or a part of it.

    Attributes:
        layer: name of dtmega's layer.
        rows: output features of that layer, in the order of the transformers layer; empty for all of them in order.
    """

    layer: str
    rows: tuple[slice, ...] = ()


TheirLayers = dict[str, TheirLayer]


class Adapters(NamedTuple):
    """The adapters of a run, as stored.

    Attributes:
        stored: source of the adapters' parameters.
        layers: names of dtmega's layers with adapters.
        lora: section [lora] of the run.
        base: path of the run's base.
        transposed: names of the layers whose weights are stored as [in, out].
    """

    stored: Source
    layers: tuple[str, ...]
    lora: config.Lora
    base: str
    transposed: tuple[str, ...]


def layers_of(
    form: Format, model: config.Model, build: Build, layers: Collection[str]
) -> tuple[TheirLayers, list[str]]:
    """The layers of a transformers model that compute what layers of one of dtmega's models do.

    Args:
        form: format in which transformers stores the model.
        model: the [model] section.
        build: function that builds the whole model.
        layers: names of dtmega's layers with adapters.

    Returns:
        The layers by their module names, and the names of all modules with weights.

    Raises:
        ValueError: transformers joins several of dtmega's layers into one, for which there is no adapter of the rank.
    """
    theirs = tensor_names(form, model, build).translation.theirs
    found: TheirLayers = {}
    modules: list[str] = []
    for name, assembly in theirs.items():
        module, _, kind = name.rpartition(".")
        if kind != "weight":
            continue
        modules.append(module)
        names = sorted({run.tensor.removesuffix(".weight") for run in assembly.runs})
        if not set(names) & set(layers):
            continue
        if len(names) > 1:
            raise ValueError(f"'{module}' of transformers joins {', '.join(names)}, whose adapters differ (--merge)")
        rows = tuple(slice(run.start, run.start + run.rows) for run in assembly.runs)
        found[module] = TheirLayer(names[0], rows)
    return found, modules


def write_peft(
    folder: Path,
    adapters: Adapters,
    theirs: Mapping[str, TheirLayer],
    modules: Collection[str],
    other_files: Mapping[str, bytes],
) -> None:
    """Write a folder of adapters, either completely or not at all.

    Args:
        folder: output folder, new or empty.
        adapters: the adapters.
        theirs: the layers of the transformers model that get adapters, by module name.
        modules: names of all modules of the transformers model.
        other_files: contents of further files, by name.

    Raises:
        ValueError: the folder exists and is not empty.
        OSError: a file cannot be written.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"{folder} exists already; expected a new folder, or an empty one")
    tensors: dict[str, Tensor] = {}
    for name, their_layer in theirs.items():
        a = adapters.stored.read(f"{their_layer.layer}.lora_a")
        b = adapters.stored.read(f"{their_layer.layer}.lora_b")
        rows = [b[part] for part in their_layer.rows]
        tensors[f"base_model.model.{name}.lora_A.weight"] = a.contiguous()
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.cat(rows) if rows else b.contiguous()
    temporary = folder.absolute().with_name(f".tmp-{folder.name}")
    atomic.remove_folder(temporary)
    temporary.mkdir(parents=True)
    for file, content in {**other_files, CONFIG: to_json(_config(adapters, theirs, modules))}.items():
        with atomic.created(temporary / file) as stream:
            stream.write(content)
    with atomic.created(temporary / WEIGHTS) as stream:
        stream.write(header([TensorSpec(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]))
        for tensor in tensors.values():
            stream.write(tensor.flatten().view(torch.uint8).numpy())
    atomic.sync_folder(temporary)
    os.rename(temporary, folder)
    atomic.sync_folder(folder.absolute().parent)


def _config(adapters: Adapters, theirs: Mapping[str, TheirLayer], modules: Collection[str]) -> dict[str, Any]:
    """The contents of adapter_config.json."""
    transposed = [layer.layer in adapters.transposed for layer in theirs.values()]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapters.base,
        "r": adapters.lora.rank,
        "lora_alpha": adapters.lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": targets(list(theirs), modules),
        "fan_in_fan_out": any(transposed),
        "bias": "none",
        "inference_mode": True,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
    }


def targets(layers: Sequence[str], modules: Iterable[str]) -> list[str]:
    """The value of `target_modules`: last parts of names if these name the same layers, otherwise whole names.

    Args:
        layers: names of the layers with adapters.
        modules: names of all modules of the transformers model.
    """
    ends = sorted({name.rpartition(".")[2] for name in layers})
    meant = [name for name in modules if name.rpartition(".")[2] in ends]
    return ends if sorted(meant) == sorted(layers) else list(layers)
