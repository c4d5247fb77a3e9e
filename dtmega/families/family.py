"""The interface of a model family for training (`Family`), and the checks that all families share.

Each family has a record that implements the interface, in a file of this folder or outside of dtmega
(docs/adding-a-model.md). The interface for files of other programs is `interop.stored.Stored`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from dtmega import config
from dtmega.data.objectives.objective import Objective
from dtmega.mesh import World
from dtmega.models.model import Model
from dtmega.models.show import Show
from dtmega.ops.cost import Piece


class Family(Protocol):
    """The interface through which all other code uses a model family.

    Attributes:
        keys: class of the [model] section, for a family from outside of dtmega. Its default of `name` names the
            family; the classes of dtmega's own families stand in `config/`.
        libraries: libraries, in addition to torch, whose versions must be the same on all ranks.
        directory: whether the model is read from the directory that [model] path names.
        objectives: value of [data] objective -> name of a training objective (`data/objectives/known.py`). The default
            value is "auto".
        show: kind of sample that is shown at the end of training.
        exact: execution modes for which benchmarks/exact.py has shown bit-identical results on all layouts ([run]
            exact): "eager" or "compiled" blocks, and "tp with pp".
        dtypes: values of [precision] params that the family supports in training. float16 requires heads that multiply
            their gradients by the loss scale (`Model.expect`).
    """

    @property
    def keys(self) -> type[config.Model]: ...

    @property
    def libraries(self) -> tuple[str, ...]: ...

    @property
    def directory(self) -> bool: ...

    @property
    def objectives(self) -> Mapping[str, str]: ...

    @property
    def show(self) -> Show: ...

    @property
    def exact(self) -> tuple[str, ...]: ...

    @property
    def dtypes(self) -> tuple[str, ...]: ...

    def resolve(self, cfg: config.Config) -> config.Config:
        """Complete the configuration with the values that only the family can determine.

        Raises:
            ValueError: the configuration sets keys that the family would ignore or does not support.
        """
        ...

    def digest(self, model: config.Model) -> str:
        """A digest of the configuration in the model's directory; '' for a family without directories."""
        ...

    def reread_directory(self, model: config.Model, trained: str) -> config.Model:
        """Update a checkpoint's [model] section from the current contents of the model's directory.

        Args:
            model: [model] section that the checkpoint stores.
            trained: result of `digest` when the model was trained; '' if the digest is not known.

        Raises:
            ValueError: the directory no longer exists or its configuration has changed since training.
        """
        ...

    def has_weights(self, model: config.Model) -> bool:
        """Whether a new run starts with weights from elsewhere (`interop/stored.py`), not with values from the seed."""
        ...

    def notes(self, model: config.Model) -> list[str]:
        """Notes for the user, printed when a run starts."""
        ...

    def build(self, model: config.Model) -> Model:
        """Build the whole model on the default device, which may be meta. The parameters have no values yet."""
        ...

    def clone(self, cfg: config.Config, tp: int) -> tuple[config.Config, Model]:
        """Build a small copy of the model on the default device; tp can shard both alike. Return (config, model)."""
        ...

    def complete(self, model: config.Model, objective: Objective) -> Objective:
        """Add the further sums that the model returns, such as an expert model's balance loss, to an objective."""
        ...

    def pieces(self, whole: Model) -> list[Piece]:
        """List a whole model's pieces (embedding, each layer, head) in pipeline order, with the costs of each piece."""
        ...

    def check(self, cfg: config.Config, sizes: Mapping[str, int]) -> None:
        """Refuse a mesh or settings that the model cannot run with.

        Raises:
            ValueError: the model cannot run with the mesh or the settings. The message states the equation that does
                not hold and the keys to change.
        """
        ...

    def attends_by_heads(self, cfg: config.Config, sizes: Mapping[str, int]) -> bool:
        """Return True if attention under cp exchanges heads, False if attention gathers keys and values.

        Raises:
            ValueError: [mesh] cp_form has a value that does not fit the model's heads.
        """
        ...

    def cut(self, cfg: config.Config, stage: Model, world: World) -> list[str]:
        """Shard a meta stage over tp. Return the names of the parameters whose gradients must be summed over tp."""
        ...

    def allocate(self, cfg: config.Config, stage: Model, world: World, device: torch.device) -> None:
        """Allocate a stage that was sharded on meta, and set up ties and buffers. Parameter values remain undefined."""
        ...

    def boundary(self, cfg: config.Config, sizes: Mapping[str, int], whole: Model, after: str) -> dict[str, Tensor]:
        """Build meta tensors like those that a stage sends to the next stage: name -> tensor with this rank's shape.

        Args:
            cfg: configuration of the run.
            sizes: resolved size of each mesh axis.
            whole: whole model.
            after: name of the stage's last piece.
        """
        ...


def hidden_state(cfg: config.Config, parts: int, length: str) -> Tensor:
    """Make a meta tensor with the shape and dtype of the hidden state between two stages, [B, S / parts, D].

    Args:
        cfg: configuration of the run.
        parts: number of ranks over which the sequence is sharded.
        length: key of [data] that holds S.
    """
    shape = (cfg.batch.micro_batch_size, cfg.data.lengths[length] // parts, cfg.model.hidden_size)
    dtype = "float32" if getattr(cfg.model, "fp32_residual", False) else cfg.precision.params
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


def check_units(cfg: config.Config, whole: Model) -> None:
    """Refuse to recompute several layers as one unit if the model does not run its layers through `Model.run_layers`.

    Raises:
        ValueError: [recompute] configures units of several layers, which the model does not support.
    """
    if cfg.recompute.method == "uniform" and cfg.recompute.layers > 1 and not whole.runs_layers:
        raise ValueError(
            f"name='{cfg.model.name}' runs its layers in a way of its own: expected layers=1 or method='block', got "
            f"layers={cfg.recompute.layers} ([recompute] layers, [recompute] method)"
        )
