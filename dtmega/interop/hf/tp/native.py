"""Makes an `HFPlan` for a model from transformers' own plan: `config.base_model_tp_plan` and `_tp_plan`.

The strings in transformers' plan mean plain tensor parallelism, without sequence parallelism. Nothing else checks that
gradients under these plans equal the gradients of a single process, so `parallelize_hf` checks each plan on a small
copy of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from dtmega.interop.hf.tp.experts import Experts
from dtmega.interop.hf.tp.packed import PackedColumn
from dtmega.interop.hf.tp.plan import HFPlan, add_head, add_rest, base_model, dropouts, joined, matching
from dtmega.interop.hf.tp.regions import Counts, Guard
from dtmega.interop.hf.tp.styles import GatheredColumn, SplitRow, Stack
from dtmega.plans.styles import Column, KVColumn, Row, Whole, check_kv_heads
from dtmega.plans.vocabulary import VocabEmbedding

# String in transformers' plans -> function that makes the corresponding style.
STYLES: dict[str, Callable[[], ParallelStyle]] = {
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
    """Make a plan for a model from the strings in transformers' own plan.

    Args:
        model: `transformers` model, real or on meta.
        tp: number of ranks.
        loss_parallel: whether each rank computes the loss from its columns of the logits.
        rest_whole: whether to replicate a module on every rank if its string in the plan is not in STYLES, or if the
            module cannot be sharded over tp in the string's style. If False, such a module raises an error.

    Raises:
        ValueError: tp does not divide the head count; or `rest_whole` is False, and the plan has a string that STYLES
            lacks or a string for a single parameter.
    """
    config = model.config
    check_heads(config, tp)
    plan = HFPlan(config.model_type, tp, False, {}, block_names(model), native=tp > 1)
    plan.table[""] = Guard(Stack(drops=bool(dropouts(model))))
    embedding = model.get_input_embeddings()
    if isinstance(embedding, nn.Embedding):
        name = next(name for name, module in model.named_modules() if module is embedding)
        plan.table[name] = VocabEmbedding(Stack())
    left_whole = _add_styles(plan, model, rest_whole)
    copy_heads(plan, model)
    add_head(plan, model, loss_parallel)
    add_rest(plan, model, in_blocks=True)
    if tp == 1:
        plan.notes.append("one rank: nothing is cut")
        return plan
    plan.notes.append("the plan of transformers itself; without sequence parallelism")
    if left_whole:
        plan.notes.append(f"whole on every rank, though it says how to cut them: {', '.join(left_whole)}")
    return plan


def _add_styles(plan: HFPlan, model: Any, rest_whole: bool) -> list[str]:
    """Add a style for each string in the model's plan. Return the patterns of modules that are replicated instead."""
    prefix, _ = base_model(model)
    strings = {joined(prefix, name): string for name, string in (model.config.base_model_tp_plan or {}).items()}
    strings |= type(model)._tp_plan or {}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    mixtures = [pattern for pattern, string in strings.items() if string == "moe_tp_experts"]
    left_whole: list[str] = []
    named = list(model.named_modules())
    for pattern, string in strings.items():
        # transformers would shard each expert, so its plan has strings for the experts' parameters. Here each expert
        # stays on one rank, so only the string for the module with all experts is used.
        if pattern.rpartition(".")[0] in mixtures:
            continue
        modules = [module for _, module in matching(named, pattern)]
        is_parameter = any(_fits(name, pattern) for name, _ in model.named_parameters())
        if is_parameter or (modules and string not in STYLES):
            if not rest_whole:
                raise ValueError(_no_style(plan.family, string, pattern, is_parameter))
            left_whole.append(pattern)
            continue
        # The embedding and the head are sharded over the vocabulary, regardless of their strings in the plan.
        if not modules or any(module in (embedding, head) for module in modules):
            continue
        style = STYLES[string]()
        if pattern in mixtures and not _shares(style, modules, plan.tp, rest_whole):
            left_whole.append(pattern)
            continue
        plan.table[pattern] = style
    return left_whole


def _shares(style: Any, experts: list[nn.Module], tp: int, rest_whole: bool) -> bool:
    """True if the experts can be divided among tp ranks; otherwise all experts are replicated on every rank.

    Raises:
        ValueError: the experts cannot be divided among the ranks, and `rest_whole` is False.
    """
    try:
        for module in experts:
            style.check(module, tp)
    except ValueError:
        if not rest_whole:
            raise
        return False
    return True


def _no_style(family: str, string: str, pattern: str, is_parameter: bool) -> str:
    why = "a parameter, and we cut modules only" if is_parameter else "which we have no style for"
    return (
        f"the plan of transformers for '{family}' says '{string}' for {pattern}, {why}; parallelize_hf(..., "
        f"generic=True) leaves it whole on every rank"
    )


def check_heads(config: Any, tp: int) -> None:
    """Raise an error if tp does not divide the head count, or if kv heads can be neither sharded nor copied evenly.

    Raises:
        ValueError: the number of heads or the number of kv heads does not fit tp.
    """
    key = "num_attention_heads"
    heads = getattr(config, key, None)
    if heads and heads % tp:
        raise ValueError(f"tp={tp} does not divide {key}={heads}: {heads} % {tp} = {heads % tp} ([mesh] tp)")
    kv_key = "num_key_value_heads"
    if kv_heads := getattr(config, kv_key, None):
        check_kv_heads(kv_heads, tp, kv_key)


def copy_heads(plan: HFPlan, model: Any) -> None:
    """Copy kv heads if there are fewer kv heads than ranks. Each rank computes the kv head that its queries need.

    Raises:
        ValueError: keys and values do not come from separate linears that are sharded by output features.
    """
    kv_heads, tp = getattr(model.config, "num_key_value_heads", None), plan.tp
    if not kv_heads or kv_heads % tp == 0:
        return
    projections = [name for name in plan.table if name.rpartition(".")[2] in ("k_proj", "v_proj")]
    if not projections or any(type(plan.table[name]) is not Column for name in projections):
        raise ValueError(
            f"tp={tp} does not divide num_key_value_heads={kv_heads}, and the plan of transformers for "
            f"'{plan.family}' has no k_proj and v_proj whose heads could be copied ([mesh] tp)"
        )
    for name in projections:
        plan.table[name] = KVColumn(kv_heads, Stack()).entering()
        # All query heads on a rank share the rank's single kv head.
        plan.table[name.rpartition(".")[0]] = Counts({"num_key_value_groups": model.config.num_attention_heads // tp})


def block_names(model: Any) -> list[str]:
    """Names of the blocks that FSDP2 wraps: the entries of the module list with the most parameters."""
    lists = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) > 0}
    if not lists:
        return []
    name = max(lists, key=lambda n: (sum(p.numel() for p in lists[n].parameters()), -len(n)))
    return [f"{name}.{child}" for child, _ in lists[name].named_children()]


def _fits(name: str, pattern: str) -> bool:
    """True if a parameter's name matches a pattern. In the pattern, `*` stands for one dot-separated component."""
    parts, expected = name.split("."), pattern.split(".")
    return len(parts) == len(expected) and all(e in ("*", p) for p, e in zip(parts, expected, strict=True))
