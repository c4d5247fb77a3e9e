"""The plan that a model of `transformers` carries itself, in our words: `config.base_model_tp_plan` and `_tp_plan`.

Plain tensor parallelism: the strings say nothing about the sequence. Nobody checked these plans against gradients, so
`parallelize_hf` does, on a small clone, each time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from dtmega.interop.hf.tp.experts import Experts
from dtmega.interop.hf.tp.packed import PackedColumn
from dtmega.interop.hf.tp.plan import HFPlan, add_guard, add_head, add_rest, base_model, joined, matching
from dtmega.interop.hf.tp.regions import Counts
from dtmega.interop.hf.tp.styles import GatheredColumn, SplitRow, Stack
from dtmega.plans.styles import Column, KVColumn, Row, Whole, check_kv_heads
from dtmega.plans.vocabulary import VocabEmbedding

WORDS: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": lambda: Column(Stack()).entering(),
    "rowwise": lambda: Row(Stack()),
    "colwise_gather_output": GatheredColumn,
    "colwise_rep": GatheredColumn,
    "rowwise_split_input": SplitRow,
    "rowwise_rep": SplitRow,
    "packed_colwise": lambda: PackedColumn(Stack()).entering(),
    "replicated_with_grad_allreduce": lambda: Whole(Stack(), of_heads=True),
    "embedding_rowwise": lambda: VocabEmbedding(Stack()),
    "replicate": lambda: Whole(Stack()),
    "moe_tp_experts": Experts,
}


def native_plan(model: Any, tp: int, loss_parallel: bool, rest_whole: bool = False) -> HFPlan:
    """The plan of a model by the strings that it carries.

    Args:
        rest_whole: what the plan says and we have no word for, or what cannot be cut so, is whole on every rank.

    Raises:
        ValueError: heads that tp does not divide; a string we have no word for or a bare parameter, not `rest_whole`.
    """
    config = model.config
    check_heads(config, tp)
    prefix, _ = base_model(model)
    strings = {joined(prefix, name): string for name, string in (config.base_model_tp_plan or {}).items()}
    strings |= type(model)._tp_plan or {}
    plan = HFPlan(config.model_type, tp, False, {}, block_names(model), native=tp > 1)
    add_guard(plan, model, Stack(), "")
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if isinstance(embedding, nn.Embedding):
        plan.table[next(name for name, module in model.named_modules() if module is embedding)] = VocabEmbedding(
            Stack()
        )
    whole: list[str] = []
    mixtures = [pattern for pattern, string in strings.items() if string == "moe_tp_experts"]
    for pattern, string in strings.items():
        if pattern.rpartition(".")[0] in mixtures:
            continue  # how transformers cuts each expert; here they stay whole, each on one rank
        found = [module for _, module in matching(model, pattern)]
        is_parameter = any(_fits(name, pattern) for name, _ in model.named_parameters())
        if is_parameter or (found and string not in WORDS):
            if not rest_whole:
                raise ValueError(_no_word(config.model_type, string, pattern, is_parameter))
            whole.append(pattern)
        elif found and not any(module in (embedding, head) for module in found):
            style = WORDS[string]()
            if pattern in mixtures and not _shares(style, found, tp, rest_whole):
                whole.append(pattern)
                continue
            plan.table[pattern] = style
    copy_heads(plan, model)
    add_head(plan, model, loss_parallel)
    add_rest(plan, model, in_blocks=True)
    if tp == 1:
        plan.notes.append("one rank: nothing is cut")
        return plan
    plan.notes.append("the plan of transformers itself; without sequence parallelism")
    if whole:
        plan.notes.append(f"whole on every rank, though it says how to cut them: {', '.join(whole)}")
    return plan


def _shares(style: Any, experts: list[nn.Module], tp: int, rest_whole: bool) -> bool:
    """Tell whether tp ranks share these experts; otherwise they are whole on every rank.

    Raises:
        ValueError: they cannot share them, and the experts may not be whole on every rank.
    """
    try:
        for module in experts:
            style.check(module, tp)
    except ValueError:
        if not rest_whole:
            raise
        return False
    return True


def _no_word(family: str, string: str, pattern: str, is_parameter: bool) -> str:
    why = "a parameter, and we cut modules only" if is_parameter else "which we have no word for"
    return (
        f"the plan of transformers for '{family}' says '{string}' for {pattern}, {why}; parallelize_hf(..., "
        f"generic=True) leaves it whole on every rank"
    )


def check_heads(config: Any, tp: int) -> None:
    key = "num_attention_heads"
    heads = getattr(config, key, None)
    if heads and heads % tp:
        raise ValueError(f"tp={tp} does not divide {key}={heads}: {heads} % {tp} = {heads % tp} ([mesh] tp)")
    kv_key = "num_key_value_heads"
    if kv_heads := getattr(config, kv_key, None):
        check_kv_heads(kv_heads, tp, kv_key)


def copy_heads(plan: HFPlan, model: Any) -> None:
    """Copy heads of keys where tp is a multiple of them: each rank computes the one that its heads of queries need.

    Raises:
        ValueError: keys and values are not linears of their own, cut by output features.
    """
    kv_heads, tp = getattr(model.config, "num_key_value_heads", None), plan.tp
    if not kv_heads or kv_heads % tp == 0:
        return
    shared = [name for name in plan.table if name.rpartition(".")[2] in ("k_proj", "v_proj")]
    if not shared or any(type(plan.table[name]) is not Column for name in shared):
        raise ValueError(
            f"tp={tp} does not divide num_key_value_heads={kv_heads}, and the plan of transformers for "
            f"'{plan.family}' has no k_proj and v_proj whose heads could be copied ([mesh] tp)"
        )
    for name in shared:
        plan.table[name] = KVColumn(kv_heads, Stack()).entering()
        # One head of keys for all heads of queries that are here.
        plan.table[name.rpartition(".")[0]] = Counts({"num_key_value_groups": model.config.num_attention_heads // tp})


def block_names(model: Any) -> list[str]:
    """The names of the modules in the longest list of the model: what FSDP2 wraps."""
    lists = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) > 0}
    if not lists:
        return []
    name = max(lists, key=lambda n: (sum(p.numel() for p in lists[n].parameters()), -len(n)))
    return [f"{name}.{child}" for child, _ in lists[name].named_children()]


def _fits(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(w in ("*", p) for p, w in zip(parts, wanted, strict=True))
