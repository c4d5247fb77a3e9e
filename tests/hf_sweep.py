"""`python tests/hf_sweep.py`: every family of interop/hf/families.py on more layouts and options than CI has time for.

Prints the table of deviations in docs/hugging-face.md and exits 1 if one is too large. About ten minutes on two cores.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dtmega.plans import verify_plan
from tests import hf_models, ranks
from tests.hf_models import MODELS, Case
from tests.interop.hf.tp import test_plan as claims

# name -> sizes and names of the mesh, with sequence parallelism or not
LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[str, ...], bool]] = {
    "tp 2": ((2,), ("tp",), False),
    "tp 2, sp": ((2,), ("tp",), True),
    "tp 4, sp": ((4,), ("tp",), True),
    "dp_shard 2 x tp 2, sp": ((2, 2), ("dp_shard", "tp"), True),
    "dp_replicate 2 x tp 2, sp": ((2, 1, 2), ("dp_replicate", "dp_shard", "tp"), True),
}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# Families with a plan of transformers' own: the part of its class names before `Config` and `ForCausalLM`.
NATIVE = ("Olmo", "Olmo2", "Olmo3", "Phi3", "Phi", "Starcoder2", "Gemma", "Gemma2", "Gemma3", "Cohere", "Cohere2")
NATIVE += ("Glm", "Glm4", "SmolLM3", "Granite", "Exaone4", "Ernie4_5", "Arcee", "Mixtral", "Olmoe", "Qwen3Moe")


def cases(name: str) -> list[Case]:
    choices = itertools.product((128, 129, 131), (True, False), (12, 13), (True, False))
    return [Case(name, *choice) for choice in choices]


def deviations(layout: str, paths: dict[str, str]) -> dict[str, dict[str, float]]:
    """Family -> worst loss, logits, gradient of all cases."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")
    shape, names, sequence_parallel = LAYOUTS[layout]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    found: dict[str, dict[str, float]] = {}
    for name, path in paths.items():
        worst = found.setdefault(name, {"loss": 0.0, "logits": 0.0, "gradient": 0.0})
        for case, truth in torch.load(path, weights_only=False).items():
            for what, error in claims.deviations(case, mesh, sequence_parallel, truth, stepping=False).items():
                kind = what.split()[0]
                worst[kind] = max(worst[kind], error)
    return found


def native() -> dict[str, float]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    found = {}
    for name in NATIVE:
        config = getattr(transformers, name + ("TextConfig" if name == "Gemma3" else "Config"))
        model = getattr(transformers, f"{name}ForCausalLM")(
            config(vocab_size=131, **SIZES, num_key_value_heads=2, **TOKENS)
        )
        found[name] = max(verify_plan(model, mesh).errors.values())
    return found


def main() -> int:
    worst: dict[tuple[str, str], dict[str, float]] = {}
    for apart in (False, True):
        paths = {name: hf_models.truths(cases(name), rows_apart=apart) for name in MODELS}
        for layout, (shape, names, _) in LAYOUTS.items():
            if (len(names) > 1) is apart:
                n = torch.Size(shape).numel()
                results: list[Any] = ranks.run(n, deviations, layout, paths, timeout_s=1800)
                for name in MODELS:
                    worst[name, layout] = {k: max(r[name][k] for r in results) for k in results[0][name]}
    print("| family | " + " | ".join(LAYOUTS) + " |")
    print("|" + " --- |" * (len(LAYOUTS) + 1))
    for name in MODELS:
        cells = [f"{worst[name, layout]['loss']:.0e} / {worst[name, layout]['gradient']:.0e}" for layout in LAYOUTS]
        print(f"| {name} | " + " | ".join(cells) + " |")
    brought = ranks.run(2, native, timeout_s=600)[0]
    print("\nplans of transformers' own, tp 2:", ", ".join(f"{name} {error:.0e}" for name, error in brought.items()))
    losses = all(w["loss"] <= claims.LOSS for w in worst.values())
    gradients = all(max(w["logits"], w["gradient"]) <= claims.GRADIENT for w in worst.values())
    return 0 if losses and gradients and max(brought.values()) <= claims.GRADIENT else 1


if __name__ == "__main__":
    sys.exit(main())
