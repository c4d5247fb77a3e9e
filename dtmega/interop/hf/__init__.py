"""Trains `transformers` models, sharded over ranks; class names, parameter names and file formats do not change.

Only the table of rooms imports this package, so you may skip the package on a first reading.

    families.py      facts about each family, as data
    directory.py     reads the config of a transformers directory, and builds the model
    initial.py       finds the distributions of the family's initial values
    model.py         wraps the transformers model for the trainer, whole or as one pipeline stage
    resolve.py       fills in the configuration keys that the directory determines
    files/           reads and writes transformers directories (config.json, safetensors), also for our own models
    logits.py        head and loss together, without logits of the whole vocabulary
    record.py        the `Family` object, with the methods that the trainer calls; connects model.py with tp/
    tp/              shards a model over tp, and checks that the results do not change; works without the trainer

Read these modules in the order above, then the modules of tp/:

    styles.py, packed.py, experts.py, vocab.py    styles (ways to shard one module) that `plans/styles.py` lacks
    regions.py, dropout.py                        code that runs before, between and after the sharded modules
    plan.py, native.py, generic.py                build a model's style table from families.py, from transformers'
                                                  own plan, or from module names alone
    parallel.py, load.py                          apply the table; load each rank's part of the weights
    tiny.py, verify.py, command.py                compare a small copy of the model, sharded, with an unsharded copy

Use in your own training loop:

    print(plan_for(model, tp=2))                  # shows the style table
    mesh = init_device_mesh("cuda", (4, 2), mesh_dim_names=("dp_shard", "tp"))
    print(verify_plan(model, mesh))               # compares a sharded with an unsharded small copy
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

# Public name -> module of tp/ that defines the name.
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
    """Import a public name's module on first use, because code that only reads a directory does not need tp/."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"dtmega.interop.hf.tp.{_HOMES[name]}"), name)
