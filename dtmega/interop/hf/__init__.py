"""Trains and cuts models of `transformers`, whose classes, parameter names and files stay as they are.

This package is an annex: `dtmega/families.py` is the only module of the core that imports it, and a first reader may
skip it.

    families.py      facts about each family, as data
    directory.py     the configuration and the model of a directory DIR; initial.py: the family's initial values
    model.py         that model for the trainer, whole or as one stage of a pipeline
    resolve.py       the keys of a configuration that DIR decides
    files/           directories of transformers: config.json, safetensors, export; also for our own models
    names/           names of our own families' weights and keys in such directories
    record.py        the family record: the methods that the trainer calls; joins model.py and tp/
    tp/              cuts a model over ranks, and proves that the results stay the same; works without the trainer

Read them in that order, and then in tp/:

    styles.py, packed.py, experts.py, vocab.py    how one module is cut: styles in addition to `plans/styles.py`
    regions.py, dropout.py, logits.py             what happens before, between and after the cut modules
    plan.py, native.py, generic.py                the table of styles for a model: from our rows, from transformers' own
                                                  plan, or without either
    parallel.py, load.py                          apply the table, and let each rank read its part of the files
    tiny.py, verify.py, command.py                compare a small cut clone of the model with an uncut one

In a training loop of your own:

    print(plan_for(model, tp=2))                  # the table first
    mesh = init_device_mesh("cuda", (4, 2), mesh_dim_names=("dp_shard", "tp"))
    print(verify_plan(model, mesh))               # compares a small cut clone of the model with an uncut one
    model = parallelize_hf(model, mesh)           # then train as usual: loss, backward, clip_grad_norm_, AdamW
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtmega.interop.hf.tp.command import verify_plan
    from dtmega.interop.hf.tp.load import Read, load_hf
    from dtmega.interop.hf.tp.parallel import parallelize_hf, plan_for
    from dtmega.interop.hf.tp.plan import HFPlan
    from dtmega.interop.hf.tp.verify import Verification

__all__ = ["HFPlan", "Read", "Verification", "load_hf", "parallelize_hf", "plan_for", "verify_plan"]

# Public name -> the module of tp/ that defines it.
_HOMES = {
    "HFPlan": "plan",
    "Read": "load",
    "Verification": "verify",
    "load_hf": "load",
    "parallelize_hf": "parallel",
    "plan_for": "parallel",
    "verify_plan": "command",
}


def __getattr__(name: str) -> Any:
    """Import the module of a public name on first use, because reading a directory needs nothing of tp/."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"dtmega.interop.hf.tp.{_HOMES[name]}"), name)
