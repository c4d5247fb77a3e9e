"""Model weights from any `Source` that uses dtmega's names: each rank reads its own shards."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from dtmega import config
from dtmega.checkpoint import changes
from dtmega.checkpoint.base import Digesting, open_base
from dtmega.checkpoint.manifest import Damaged
from dtmega.checkpoint.reader import Checkpoint
from dtmega.checkpoint.resume import open_checkpoint, state_of
from dtmega.checkpoint.sources import BY_TOKEN, Slices, Source
from dtmega.files.untrusted_json import download
from dtmega.ops.shards import Box, boxes

# Keys of [model] that may differ between a run and the checkpoint that supplies the run's initial weights.
FREE_FOR_NEW_RUN = ("init_from", "init_std", "pad_vocab_to_multiple")


class Weights:
    """The weights in a checkpoint (its tensors under `model/`), as a `Source` whose names lack this prefix."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    @property
    def tensors(self) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Name of each weight -> (dtype, shape)."""
        tensors = self.checkpoint.tensors
        return {name.removeprefix("model/"): tensors[name] for name in tensors if name.startswith("model/")}

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> Tensor:
        return self.checkpoint.read(f"model/{name}", index)


class Merged:
    """The weights of a run whose checkpoints hold only trained parameters, as a `Source` of whole weights.

    Frozen weights come from the base. An adapter is added to its layer's weight: W + (alpha / r) B A, in fp32. A frozen
    tensor that is read as a whole is compared with its digest; `verify` compares tensors that are read in slices.

    Args:
        checkpoint: checkpoint of the run.
        base: weights of the base.
        path: path of the base.
        vocab: value of [model] vocab_size.

    Attributes:
        layers: names of the layers with adapters.
    """

    def __init__(self, checkpoint: Checkpoint, base: Source, path: str, vocab: int) -> None:
        self.checkpoint, self.path = checkpoint, path
        state = state_of(checkpoint)
        assert state.base is not None
        self.base = state.base
        self._frozen = Digesting(base, vocab, self.base.digests)
        lora = config.Lora.model_validate(state.config.get("lora", {}))
        self._scale = lora.alpha / lora.rank if lora.rank else 0.0
        self._stored = Weights(checkpoint)
        endings = [name for name in self._stored.tensors if name.endswith(".lora_a")]
        self.layers = tuple(name.removesuffix(".lora_a") for name in endings)
        self.tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for name, (dtype, shape) in base.tensors.items():
            if name in self._stored.tensors:
                self.tensors[name] = self._stored.tensors[name]
            else:
                self.tensors[name] = (torch.float32 if self._layer(name) else dtype, shape)

    def read(self, name: str, index: Slices | None = None) -> Tensor:
        if name in self._stored.tensors:
            return self._stored.read(name, index)
        weight = self._frozen.read(name, index)
        if weight.shape == self.tensors[name][1]:
            self.verify([name])
        if not (layer := self._layer(name)):
            return weight
        sides = index or (slice(None),) * 2
        outputs, inputs = sides[::-1] if layer in self.base.transposed else sides
        a = self._stored.read(f"{layer}.lora_a", (slice(None), inputs)).float()
        b = self._stored.read(f"{layer}.lora_b", (outputs, slice(None))).float()
        update = self._scale * (b @ a)
        return weight.float() + (update.t() if layer in self.base.transposed else update)

    def verify(self, counted: Collection[str], group: dist.ProcessGroup | None = None) -> None:
        """Compare the tensors read from the base with the digests in the checkpoint.

        The arguments are the same as for `Digesting.digests`.

        Raises:
            ValueError: the tensors do not come from the base of the run.
        """
        frozen = [name for name in counted if name in self.base.digests]
        self.base.check(self._frozen.digests(frozen, group), self.path)

    def _layer(self, name: str) -> str:
        """The name of the layer whose adapter changes the tensor `name`; '' if no adapter changes the tensor."""
        layer = name.removesuffix(".weight")
        return layer if f"{layer}.lora_a" in self._stored.tensors else ""


def whole_weights(
    checkpoint: Checkpoint,
    model: config.Model,
    weights_of: Callable[[config.Model], Source | None],
    base_path: str = "",
) -> Source:
    """All weights of a checkpoint's model, even if the checkpoint holds only trained parameters.

    Args:
        checkpoint: checkpoint to read.
        model: [model] section, with the current path of the model's directory.
        weights_of: function `weights` of `interop/stored.py`, which opens the base.
        base_path: current path of the base; '' if the base has not moved.

    Raises:
        ValueError: the base is missing or belongs to a different model.
    """
    state = state_of(checkpoint)
    if state.base is None:
        return Weights(checkpoint)
    path, base = open_base(state.base, model, state.config["model"], base_path, weights_of)
    return Merged(checkpoint, base, path, model.vocab_size)


def is_hf_folder(path: str) -> bool:
    """Return True if a folder holds a Hugging Face model rather than a checkpoint or a run."""
    return any(Path(path).glob("*.safetensors")) or Path(path, "config.json").exists()


def open_checkpoint_weights(
    model: config.Model, weights_of: Callable[[config.Model], Source | None], digest: str = ""
) -> Source:
    """Open the checkpoint that `[model] init_from` names; check that its weights fit the other keys of [model].

    Args:
        model: [model] section of the run.
        weights_of: function `weights` of `interop/stored.py`, which opens the base of a checkpoint with frozen weights.
        digest: digest of the directory from which the model is read; '' if there is no such directory.

    Raises:
        ValueError: `[model] init_from` names no checkpoint, or names a checkpoint of a different model.
        Damaged: the checkpoint is not intact.
    """
    try:
        checkpoint = open_checkpoint(model.init_from)
    except Damaged:
        raise
    except ValueError as error:
        raise ValueError(
            f"{error}, nor a folder of Hugging Face's ([model] init_from){download(model.init_from)}"
        ) from None
    state = state_of(checkpoint)
    for change in changes.differing("model", state.config.get("model", {}), model):
        if changes.kind_of("model", change.key) == "refused" and change.key not in FREE_FOR_NEW_RUN:
            raise ValueError(
                f"{checkpoint.path} is of a model with {change.key}={change.was}, not {change.now} "
                f"([model] init_from, [model] {change.key})"
            )
    if digest != state.digest:
        raise ValueError(
            f"{checkpoint.path} is of a model whose config.json has the digest '{state.digest}', not '{digest}' "
            f"([model] init_from, [model] path)"
        )
    # The [model] section in the checkpoint names the base. The run's own `init_from` names the checkpoint itself.
    own = model.model_copy(update={"init_from": state.config.get("model", {}).get("init_from", "")})
    return whole_weights(checkpoint, own, weights_of, state.config.get("lora", {}).get("base_path", ""))


@torch.no_grad()
def load_weights(source: Source, parameters: Iterable[tuple[str, Tensor]], vocab: int) -> None:
    """Fill parameters in place, casting weights to the parameters' dtypes. Each rank fills its own shards.

    Args:
        source: weights, under their names in the whole model.
        parameters: pairs (name in the whole model, tensor or DTensor). If a name appears twice, both tensors are
            filled.
        vocab: value of `[model] vocab_size`. Tensors in BY_TOKEN may have padding rows after the first `vocab` rows,
            and the source may have more or fewer padding rows. Rows that the source lacks are filled with zeros.

    Raises:
        ValueError: the source lacks a parameter or holds a parameter in a different shape.
    """
    for name, parameter in parameters:
        if name not in source.tensors:
            raise ValueError(f"the weights to start with have no '{name}' ([model] n_layers, [model] init_from)")
        source_shape = source.tensors[name][1]
        shape = tuple(parameter.shape)
        differs_in_padding_only = name in BY_TOKEN and source_shape[1:] == shape[1:] and source_shape[0] >= vocab
        if source_shape != shape and not differs_in_padding_only:
            raise ValueError(f"'{name}' is {list(source_shape)} there, {list(shape)} here ([model], [model] init_from)")
        for offsets, part in boxes(parameter):
            # Number of rows in this shard that exist in the source; the remaining rows are padding.
            rows = max(0, min(part.shape[0], source_shape[0] - offsets[0]))
            part[rows:] = 0
            if rows:
                part[:rows].copy_(source.read(name, Box(offsets, part[:rows]).where))
