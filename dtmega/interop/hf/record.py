"""The family record for `[model] name = "hf"`: the methods that the trainer calls on any `transformers` decoder."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor

from dtmega import config, rooms
from dtmega.data.objectives.objective import Objective
from dtmega.families.family import check_units, hidden_state
from dtmega.interop.hf import resolve
from dtmega.interop.hf.directory import allow_views, initial_values, materialize, original_length, read_config
from dtmega.interop.hf.families import DOES_NOT_PACK, EXACT, KNOWN, OVER_CP, OVER_EP, WHOLE_SEQUENCES
from dtmega.interop.hf.files.tensors import has_weights
from dtmega.interop.hf.logits import fuse_loss
from dtmega.interop.hf.model import HF
from dtmega.mesh import World
from dtmega.models import count
from dtmega.models.lengths import attends_by_heads, check_lengths, lengths_of
from dtmega.models.model import Model
from dtmega.models.show import CONTINUATION
from dtmega.ops import host
from dtmega.ops.cost import Piece


class Transformers:
    """The family of all unmodified transformers decoders. [model] path names a directory with the model's config.json.

    `Family` documents each method.
    """

    keys = config.Model
    libraries = ("transformers",)
    directory = True
    objectives: Mapping[str, str] = MappingProxyType({"auto": "next-token", "conversations": "conversations"})
    show = CONTINUATION
    dtypes = ("float32", "bfloat16")
    exact = ("eager", "tp with pp")

    def resolve(self, cfg: config.Config) -> config.Config:
        return resolve.resolve(cfg)

    def digest(self, model: config.Model) -> str:
        return resolve.digest(model.directory)

    def reread_directory(self, model: config.Model, trained: str) -> config.Model:
        return resolve.reread_directory(model, trained)

    def has_weights(self, model: config.Model) -> bool:
        return bool(model.init_from) or has_weights(model.directory)

    def notes(self, model: config.Model) -> list[str]:
        return resolve.notes(model)

    def build(self, model: config.Model) -> Model:
        return HF(model)

    def complete(self, model: config.Model, objective: Objective) -> Objective:
        return objective

    def clone(self, cfg: config.Config, tp: int) -> tuple[config.Config, Model]:
        tiny = rooms.tiny_transformers()
        small = HF(cfg.model, tiny.tiny_config(read_config(cfg.model.directory), tp))
        model = cfg.model.model_copy(update={"vocab_size": tiny.VOCAB})
        return cfg.model_copy(update={"model": model}), small

    def pieces(self, whole: Model) -> list[Piece]:
        return count.pieces(whole)

    def check(self, cfg: config.Config, sizes: Mapping[str, int]) -> None:
        model = cfg.model
        with torch.device("meta"):
            whole = HF(model)
        lengths = lengths_of(cfg, whole)
        check_units(cfg, whole)
        kind = whole.hf.config.model_type
        if cfg.run.exact and kind not in EXACT:
            raise ValueError(
                f"'{kind}' is not proved to keep every bit on all layouts: expected exact = false, or one of "
                f"{', '.join(EXACT)} ([run] exact, [model] path)"
            )
        if not self.has_weights(model):
            initial_values(model.directory)
        # Find the stored buffers that transformers would round to the parameters' dtype. dtmega keeps stored buffers
        # unchanged.
        rounded = [name for name, _ in whole.stored_buffers() if not _always_fp32(whole.hf, name)]
        if rounded and cfg.precision.params != "float32":
            raise ValueError(
                f"'{whole.full_name(rounded[0])}' of '{kind}' is a stored buffer, with which transformers computes in "
                f"the dtype of the parameters; here it stays as it is: expected float32 ([precision] params)"
            )
        if _packs(cfg) and (kind in DOES_NOT_PACK or not whole.takes_positions):
            why = DOES_NOT_PACK.get(kind, "its class takes no positions")
            raise ValueError(f"conversations of '{kind}' cannot share a row: {why}; expected pack=false ([data] pack)")
        _check_lengths_of_rope(whole.hf.config, cfg, sizes)
        if cfg.mesh.ep > 1 and (kind not in OVER_EP or sizes["tp"] > 1):
            raise ValueError(
                f"ep={cfg.mesh.ep} divides experts of {', '.join(OVER_EP)} without tp, not those of '{kind}' with "
                f"tp={sizes['tp']} ([mesh] ep, tp, [model] path)"
            )
        if sizes["cp"] > 1:
            _check_context(whole.hf.config, cfg)
            # cp splits each sequence into two slices per rank, so every length must be divisible by 2 cp. tp adds no
            # condition, hence tp=1: a length that tp does not divide is computed without sequence parallelism.
            check_lengths(cfg, whole, lengths, {**sizes, "tp": 1})
        if sizes["tp"] > 1:
            try:
                rooms.plans_of_transformers().plan_for(whole.hf, sizes["tp"])
            except ValueError as error:
                raise ValueError(f"{error} ([mesh] tp)") from None
        in_stages = [name for name, facts in KNOWN.items() if facts.ends is not None]
        if sizes["pp"] > 1 and kind not in in_stages:
            raise ValueError(
                f"a pipeline needs to know the ends of a model, and '{kind}' is none of {', '.join(in_stages)} "
                f"([mesh] pp)"
            )

    def attends_by_heads(self, cfg: config.Config, sizes: Mapping[str, int]) -> bool:
        n_kv_heads = getattr(read_config(cfg.model.directory), "num_key_value_heads", None) or cfg.model.n_heads
        return attends_by_heads(cfg, cfg.model.n_heads, n_kv_heads, sizes)

    def cut(self, cfg: config.Config, stage: Model, world: World) -> list[str]:
        asks = _packs(cfg) or any(world.sizes[axis] > 1 for axis in ("cp", "pp", "tp"))
        if asks and not stage.is_clone and not host.must_skip("rows are proven at the start of a run, not here"):
            rooms.rows_proof().prove(stage.hf, world.device, _packs(cfg))
        if world.sizes["cp"] > 1:
            by_heads = self.attends_by_heads(cfg, world.sizes)
            ranks = rooms.context_parallel().ContextParallel(world.groups["cp"], by_heads)
            kind = cast("Any", stage.hf).config.model_type
            if not host.must_skip(f"cp of '{kind}' is verified at the start of a run, not here"):
                rooms.context_proof().prove(stage.hf, ranks, world.device)
        if world.tp.size() > 1:
            plans, proven = rooms.plans_of_transformers(), bool(stage.is_clone)
            plans.cut_stage(stage, stage.hf, world.tp, cfg.mesh.sequence_parallel, proven=proven)
        else:
            fuse_loss(stage, stage.hf)
        allow_views()
        if cfg.mesh.ep > 1:
            for module in stage.experts():
                rooms.experts_of_transformers().send_to_experts(module, cfg.mesh.ep)
        return []

    def allocate(self, cfg: config.Config, stage: Model, world: World, device: torch.device) -> None:
        materialize(stage.hf, device)

    def boundary(self, cfg: config.Config, sizes: Mapping[str, int], whole: Model, after: str) -> dict[str, Tensor]:
        # Between stages, the hidden state is not sharded over tp, because sequence parallelism begins and ends within a
        # stack of blocks.
        return {"hidden": hidden_state(cfg, sizes["cp"], "seq_len")}


def _packs(cfg: config.Config) -> bool:
    """True if one sequence of the batch may hold several conversations."""
    return cfg.data.objective == "conversations" and cfg.data.pack


def _check_lengths_of_rope(hf_config: Any, cfg: config.Config, sizes: Mapping[str, int]) -> None:
    """Raise an error if a rank does not know the length of a conversation that decides about rotary frequencies.

    Raises:
        ValueError: rows may be longer than longrope's original length, and cp divides them, or padding lengthens the
            only conversation of a row.
    """
    original = original_length(hf_config)
    if original is None or cfg.data.seq_len <= original:
        return
    cure = "cp=1 ([mesh] cp)" if sizes["cp"] > 1 else "pack=true ([data] pack)"
    if sizes["cp"] > 1 or (cfg.data.objective == "conversations" and not cfg.data.pack):
        raise ValueError(
            f"rope_type='longrope' of '{hf_config.model_type}' chooses frequencies by the length of a whole "
            f"conversation: expected seq_len up to original_max_position_embeddings={original}, got "
            f"seq_len={cfg.data.seq_len} ([data] seq_len), or {cure}"
        )


def _always_fp32(hf: Any, name: str) -> bool:
    """True if transformers keeps this tensor in float32, regardless of the parameters' dtype."""
    return any(part in name.split(".") for part in hf._keep_in_fp32_modules_strict or ())


def _check_context(hf_config: Any, cfg: config.Config) -> None:
    """Raise an error if the model cannot be trained with cp > 1, where each sequence is sharded over the cp ranks.

    Raises:
        ValueError: the family is not in OVER_CP, or a key in the config asks for attention that cp does not support.
    """
    kind = hf_config.model_type
    if kind not in OVER_CP:
        why = f": {WHOLE_SEQUENCES[kind]}" if kind in WHOLE_SEQUENCES else ""
        raise ValueError(
            f"ranks cannot share the sequences of '{kind}'{why}; expected cp=1, or one of {', '.join(OVER_CP)} "
            f"([mesh] cp)"
        )
    if not getattr(hf_config, "is_causal", True) or getattr(hf_config, "use_bidirectional_attention", None):
        raise ValueError(f"'{kind}' attends both ways by its config.json: expected cp=1 ([mesh] cp, [model] path)")


RECORD = Transformers()
