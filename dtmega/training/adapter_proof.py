"""A proof, where a run starts, that each of its adapters learns."""

from __future__ import annotations

import dataclasses

import torch

from dtmega import config, families, rooms
from dtmega.mesh import World
from dtmega.models.lora import attach, targets
from dtmega.models.lora import proof as lora_proof
from dtmega.models.model import Model
from dtmega.training import choices
from dtmega.training.random_text import blank_to_text


def prove(cfg: config.Config, world: World, whole: Model) -> None:
    """Verify that every adapter learns. The check uses a small copy of the model, sharded over tp like the model.

    Raises:
        ValueError: an adapter of the copy does not learn.
    """
    family, tp = families.of(cfg.model), world.tp.size()
    lora = cfg.lora.model_copy(update={"targets": lora_proof.everywhere(targets(whole, cfg.lora.targets))})
    length = {"seq_len": 8 * tp, "decoder_seq_len": 8 * tp}
    # Each rank has the clone's whole sequences and all its experts, so that the ranks need not have the same tokens.
    whole_of = {"data": cfg.data.model_copy(update=length), "mesh": cfg.mesh.model_copy(update={"cp": 1, "ep": 1})}
    with torch.device("meta"):
        small, clone = family.clone(cfg.model_copy(update=whole_of), tp)
        attach(clone, lora.model_copy(update={"base": "float32"}))
    alone = dataclasses.replace(world, sizes={**world.sizes, "cp": 1})
    family.cut(small, clone, alone)
    if choices.multiplies_on_amx(cfg, world):
        rooms.amx_products().multiply_on_amx(clone)
    family.allocate(small, clone, alone, world.device)
    clone.move_buffers(world.device)
    rows = families.objective(cfg).blank(small.data, 2)
    text = blank_to_text(rows, small.model.vocab_size)
    missing = lora_proof.unlearning(clone, {name: row.to(world.device) for name, row in text.items()})
    if missing:
        raise ValueError(lora_proof.refusal(missing))
