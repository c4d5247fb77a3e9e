"""Set offloading, recomputation and virtual stages from a command's flags."""

from __future__ import annotations

from dtmega.interop.megatron.launch.draft import Draft

RECOMPUTE_ALL = ("checkpoint-activations", "deepspeed-activation-checkpointing", "activations-checkpoint-method")


def set_layout(draft: Draft) -> None:
    """Set offloading, recomputation and virtual stages."""
    if draft.has("cpu-optimizer"):
        draft.keys["fsdp.cpu_offload"] = True
    if any(draft.has(name) for name in RECOMPUTE_ALL):
        draft.keys["recompute.mode"] = "full"
    elif draft.has("recompute-activations"):
        draft.keys["recompute.mode"] = "selective"
    elif draft.has("recompute-granularity"):
        draft.keys["recompute.mode"] = draft.value("recompute-granularity")
    if draft.value("activations-checkpoint-method") == "block":
        draft.keys["recompute.method"] = "block"
    for name in ("checkpoint-num-layers", "recompute-num-layers", "activations-checkpoint-num-layers"):
        if draft.has(name):
            draft.keys["recompute.layers"] = draft.number(name)
    per_stage = draft.number("num-layers-per-virtual-pipeline-stage")
    n_layers = draft.number("num-layers")
    pp = draft.number("pipeline-model-parallel-size")
    if per_stage and n_layers and pp:
        draft.keys["pipeline.schedule"] = "Interleaved1F1B"
        draft.keys["pipeline.virtual_stages"] = int(n_layers // pp // per_stage)
    if draft.has("num-virtual-stages-per-pipeline-rank"):
        draft.keys["pipeline.schedule"] = "Interleaved1F1B"
        draft.keys["pipeline.virtual_stages"] = draft.number("num-virtual-stages-per-pipeline-rank")
