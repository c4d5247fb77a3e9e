"""The plan that a model of `transformers` carries itself, in our words: `config.base_model_tp_plan` and `_tp_plan`.

Plain tensor parallelism: the strings say nothing about the sequence. Nobody checked these plans against gradients, so
`parallelize_hf` does, on a small clone, each time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from dtmega.plans.hf import styles
from dtmega.plans.hf.packed import PackedColumn
from dtmega.plans.hf.plan import HFPlan, add_guard, add_head, add_rest, base_model, joined, matching
from dtmega.plans.hf.styles import Stack, Whole
from dtmega.plans.hf.vocab import VocabEmbedding

WORDS: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": lambda: styles.Column(enters=True),
    "rowwise": styles.Row,
    "colwise_gather_output": styles.GatheredColumn,
    "colwise_rep": styles.GatheredColumn,
    "rowwise_split_input": styles.SplitRow,
    "rowwise_rep": styles.SplitRow,
    "packed_colwise": PackedColumn,
    "replicated_with_grad_allreduce": lambda: Whole(of_heads=True),
    "embedding_rowwise": VocabEmbedding,
    "replicate": Whole,
}


def native_plan(model: Any, tp: int, loss_parallel: bool) -> HFPlan:
    """Raises ValueError on a string we have no word for, a bare parameter, heads that tp does not divide."""
    config = model.config
    check_heads(config, tp)
    prefix, _ = base_model(model)
    strings = {joined(prefix, name): string for name, string in config.base_model_tp_plan.items()}
    strings |= type(model)._tp_plan or {}
    plan = HFPlan(config.model_type, tp, False, {}, block_names(model), native=True)
    add_guard(plan, model, Stack(sequence_parallel=False), "")
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if isinstance(embedding, nn.Embedding):
        plan.table[next(name for name, module in model.named_modules() if module is embedding)] = VocabEmbedding()
    for pattern, string in strings.items():
        found = [module for _, module in matching(model, pattern)]
        if string not in WORDS:
            if found or any(True for name, _ in model.named_parameters() if _fits(name, pattern)):
                raise ValueError(
                    f"the plan of transformers for '{config.model_type}' says '{string}' for {pattern}, which we have "
                    f"no word for; known are {', '.join(WORDS)}"
                )
        elif any(_fits(name, pattern) for name, _ in model.named_parameters()):
            raise ValueError(
                f"the plan of transformers says '{string}' for {pattern}, a parameter: we cut modules only"
            )
        elif found and not any(module in (embedding, head) for module in found):
            plan.table[pattern] = WORDS[string]()
    add_head(plan, model, loss_parallel)
    add_rest(plan, model, in_blocks=True)
    plan.notes.append("the plan of transformers itself; without sequence parallelism")
    return plan


def check_heads(config: Any, tp: int) -> None:
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, key, None)
        if heads and heads % tp:
            raise ValueError(f"tp={tp} does not divide {key}={heads}: {heads} % {tp} = {heads % tp} ([mesh] tp)")


def block_names(model: Any) -> list[str]:
    """Names of the modules in the longest list of the model: what FSDP2 wraps."""
    lists = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) > 0}
    if not lists:
        return []
    name = max(lists, key=lambda n: (sum(p.numel() for p in lists[n].parameters()), -len(n)))
    return [f"{name}.{child}" for child, _ in lists[name].named_children()]


def _fits(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(w in ("*", p) for p, w in zip(parts, wanted, strict=True))
