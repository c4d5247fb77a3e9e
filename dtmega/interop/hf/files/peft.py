"""Writes adapters as a folder that peft's `PeftModel.from_pretrained` loads onto a transformers model.

OUT/adapter_config.json          LoRA rank, alpha, and the layers that have adapters
OUT/adapter_model.safetensors    base_model.model.LAYER.lora_A.weight [r, in] and lora_B.weight [out, r]

Every LAYER is the name of a module in the transformers model. peft computes W + (lora_alpha / r) B A, as dtmega does.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtmega import config
from dtmega.checkpoint.sources import Slices, Source
from dtmega.interop.formats.format import Format
from dtmega.interop.formats.whole import Build, tensor_names
from dtmega.interop.hf.families import NOT_IN_PEFT
from dtmega.interop.hf.files import config_json
from dtmega.interop.hf.files.write import tensor_specs, to_json, write

WEIGHTS = "adapter_model.safetensors"
CAUSAL_LM = "CAUSAL_LM"
# End of the name of a class of transformers -> peft's `task_type`.
TASKS = {
    "ForCausalLM": CAUSAL_LM,
    "LMHeadModel": CAUSAL_LM,
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
    "ForPreTraining": None,
}


class TheirLayer(NamedTuple):
    """A transformers linear layer that corresponds to all or part of a dtmega layer.

    Attributes:
        layer: name of dtmega's layer.
        rows: slices of dtmega's output features that together give the transformers layer's output features, in order;
            empty if both layers have the same features in the same order.
        transposed: whether transformers stores the layer's weight as [in, out].
    """

    layer: str
    rows: tuple[slice, ...] = ()
    transposed: bool = False


class TheirModel(NamedTuple):
    """The transformers model onto which peft loads the adapters.

    Attributes:
        kind: its `model_type`.
        task: peft's `task_type`; None if peft has none for the model's class.
        layers: the linear layers that get adapters, keyed by module name.
        modules: names of all modules.
    """

    kind: str
    task: str | None
    layers: dict[str, TheirLayer]
    modules: list[str]


class Adapters(NamedTuple):
    """A run's stored adapters.

    Attributes:
        stored: source of the adapters' parameters.
        layers: names of dtmega's layers with adapters.
        lora: the run's [lora] section.
        base: path of the run's base model.
    """

    stored: Source
    layers: tuple[str, ...]
    lora: config.Lora
    base: str


def their_model(form: Format, model: config.Model, build: Build, layers: Collection[str]) -> TheirModel:
    """Find the layers of a transformers model that correspond to dtmega's layers with adapters.

    Args:
        form: format in which transformers stores the model.
        model: the [model] section.
        build: function that builds the whole model.
        layers: names of dtmega's layers with adapters.

    Raises:
        ValueError: a transformers layer joins several of dtmega's layers, whose adapters cannot be joined into one
            adapter of the same LoRA rank.
    """
    theirs = tensor_names(form, model, build).translation.theirs
    found: dict[str, TheirLayer] = {}
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
        found[module] = TheirLayer(names[0], rows, assembly.view == "transpose")
    (their_class,) = form.fixed["architectures"]
    task = next(task for ending, task in TASKS.items() if their_class.endswith(ending))
    return TheirModel(form.fixed["model_type"], task, found, modules)


def write_peft(
    folder: Path,
    adapters: Adapters,
    theirs: TheirModel,
    other_files: Mapping[str, bytes],
) -> None:
    """Write a folder of adapters, either completely or not at all.

    Args:
        folder: output folder, new or empty.
        adapters: the adapters.
        theirs: the transformers model.
        other_files: content of each further file, keyed by file name.

    Raises:
        ValueError: peft cannot load the adapter of a layer, or the folder exists and is not empty.
        OSError: a file cannot be written.
    """
    lacking = [name for name in theirs.layers if name.rpartition(".")[2] in NOT_IN_PEFT.get(theirs.kind, ())]
    if lacking:
        more = f" and {len(lacking) - 1} more layers" if len(lacking) > 1 else ""
        raise ValueError(
            f"peft cannot load the adapters of {lacking[0]}{more} of '{theirs.kind}': expected --merge, which adds "
            f"them to the weights (--merge)"
        )
    tensors = _InTheirForm(adapters.stored, theirs.layers)
    files = {**other_files, config_json.ADAPTERS: to_json(_config(adapters, theirs))}
    # peft reads only one weights file, so write all adapters into one file of any size.
    write(
        tensors,
        folder,
        tensor_specs(tensors),
        files,
        rank=0,
        size=1,
        barrier=lambda: None,
        max_file_bytes=sys.maxsize,
        single=WEIGHTS,
    )


class _InTheirForm:
    """The adapters' parameters under peft's names, as a `Source` of whole tensors.

    Args:
        stored: source of the adapters' parameters.
        theirs: the transformers model's layers that get adapters, keyed by module name.
    """

    def __init__(self, stored: Source, theirs: Mapping[str, TheirLayer]) -> None:
        self._stored = stored
        self._parts: dict[str, tuple[str, tuple[slice, ...]]] = {}
        for module, (layer, rows, _) in theirs.items():
            self._parts[f"base_model.model.{module}.lora_A.weight"] = f"{layer}.lora_a", ()
            self._parts[f"base_model.model.{module}.lora_B.weight"] = f"{layer}.lora_b", rows
        self.tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for name, (stored_name, rows) in self._parts.items():
            dtype, shape = stored.tensors[stored_name]
            n_rows = sum(part.stop - part.start for part in rows) if rows else shape[0]
            self.tensors[name] = dtype, (n_rows, *shape[1:])

    def read(self, name: str, index: Slices | None = None) -> Tensor:
        assert index is None
        stored_name, rows = self._parts[name]
        whole = self._stored.read(stored_name)
        return torch.cat([whole[part] for part in rows]) if rows else whole


def _config(adapters: Adapters, theirs: TheirModel) -> dict[str, Any]:
    """The contents of adapter_config.json."""
    return {
        "peft_type": "LORA",
        "task_type": theirs.task,
        "base_model_name_or_path": adapters.base,
        "r": adapters.lora.rank,
        "lora_alpha": adapters.lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": targets(list(theirs.layers), theirs.modules),
        "fan_in_fan_out": any(layer.transposed for layer in theirs.layers.values()),
        "bias": "none",
        "inference_mode": True,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
    }


def targets(layers: Sequence[str], modules: Iterable[str]) -> list[str]:
    """Choose `target_modules`: the last part of each layer's name, or full names if other modules share a last part.

    Args:
        layers: names of the layers with adapters.
        modules: names of all modules of the transformers model.
    """
    ends = sorted({name.rpartition(".")[2] for name in layers})
    meant = [name for name in modules if name.rpartition(".")[2] in ends]
    return ends if sorted(meant) == sorted(layers) else list(layers)
