"""Plans how to shard a `transformers` model: finds a style for every module with parameters, or raises an error."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from dtmega.interop.hf import families
from dtmega.interop.hf.families import Attention, FamilyFacts, Packed, StyleSpec
from dtmega.interop.hf.files.config_json import NOISE
from dtmega.interop.hf.tp.packed import ConvColumn, ConvPacked, ConvRow, MultiQueryColumn, PackedColumn, PackedRow
from dtmega.interop.hf.tp.regions import Counts, EnterHeads, Guard, StackBoundary
from dtmega.interop.hf.tp.styles import NormOfEachHead, Stack
from dtmega.interop.hf.tp.vocab import LogitsHead
from dtmega.plans.base import Style
from dtmega.plans.styles import Column, Enter, KVColumn, Norm, Row, Whole, check_kv_heads
from dtmega.plans.vocabulary import HeadColumns, VocabEmbedding

ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")


@dataclass
class HFPlan:
    """The plan that `parallelize_hf` carries out for a model. Print the plan to see placements and collectives.

    Attributes:
        family: `model_type` of the config.
        tp: number of ranks over which the model is sharded.
        sequence_parallel: whether the hidden state between attention and feed-forward is sharded along the sequence.
        table: style for each module name pattern; an argument of `plans.apply_plan`.
        blocks: names of the modules that FSDP2 wraps one by one.
        head: style of the language model head; None if the model has no linear head.
        parameters: map from each module name pattern to the parameter names of the matching modules.
        native: whether this plan is based on transformers' own plan for the model.
        notes: further lines to print for the user.
    """

    family: str
    tp: int
    sequence_parallel: bool
    table: dict[str, ParallelStyle]
    blocks: list[str]
    head: LogitsHead | None = None
    parameters: dict[str, list[str]] = field(default_factory=dict)
    native: bool = False
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [("module", "placement over tp", "collectives of a forward, and of its backward")]
        for pattern, style in self.table.items():
            placements = {name: _placement(style, name, self.tp) for name in self.parameters[pattern]}
            where = ", ".join(f"{name} {_placement_text(placement)}" for name, placement in placements.items())
            cost = getattr(style, "cost", ("", ""))[self.sequence_parallel]
            if where or cost:
                lines.append((pattern or "(the model)", where, cost))
        module_width = max(len(module) for module, _, _ in lines)
        where_width = max(len(where) for _, where, _ in lines)
        cut = ", sequence parallel" if self.sequence_parallel else ""
        head = f"{self.family}, tp={self.tp}{cut}"
        rows = [f"{a:<{module_width}}  {b:<{where_width}}  {c}".rstrip() for a, b, c in lines]
        return "\n".join([head, *rows, *self.notes])


def _placement(style: ParallelStyle, name: str, tp: int) -> Placement:
    """The placement over tp that a style gives to a parameter."""
    if isinstance(style, Style):
        return style.placed(name, tp) or Replicate()
    return getattr(style, "placements", {}).get(name) or Replicate()


def _placement_text(placement: Placement) -> str:
    if isinstance(placement, Shard) or placement == Replicate():
        return repr(placement).replace("dim=", "")
    return f"Shard({placement.dim}) of each of {placement.split_factor} parts"  # pyright: ignore[reportAttributeAccessIssue]


def family_plan(model: Any, tp: int, sequence_parallel: bool, loss_parallel: bool) -> HFPlan:
    """Make a plan for a model whose family has `styles` in `families.KNOWN`. The model itself is not changed.

    Raises:
        ValueError: `check_sizes` refuses the config, or the family has no style for a module inside a block.
    """
    config = model.config
    facts = families.KNOWN[config.model_type]
    check_sizes(config, facts, tp)
    prefix, base = base_model(model)
    plan = HFPlan(config.model_type, tp, sequence_parallel, {}, [])
    drops = bool(dropouts(model))

    # Each list of blocks is a stack: the sequence is sharded before the first block and gathered after the last.
    stacks: dict[str, Stack] = {}
    for owner, blocks in facts.stacks.items():
        path = joined(owner, blocks)
        if not has(base, owner) or not has(base, path):
            continue
        stack = Stack(sequence_parallel and tp > 1, drops)
        stacks[path] = stack
        plan.table[joined(prefix, owner)] = Guard(stack)
        numbers = [number for number, _ in base.get_submodule(path).named_children()]
        names = [joined(prefix, path, number) for number in numbers]
        plan.blocks += names
        # A single block is both the first and the last block.
        for name in dict.fromkeys((*names[:1], *names[-1:])):
            plan.table[name] = StackBoundary(stack, name == names[0], name == names[-1])

    modules = list(base.named_modules())
    for pattern, spec in facts.styles.items():
        if not matching(modules, pattern):
            continue
        stack = next((stack for path, stack in stacks.items() if pattern.startswith(f"{path}.")), None)
        if stack is not None:
            style = _style_in_stack(spec, stack, facts, config, tp)
        else:
            assert spec == families.VOCAB
            style = VocabEmbedding(Stack())
        plan.table[joined(prefix, pattern)] = style
    add_head(plan, model, loss_parallel)
    add_rest(plan, model)
    return plan


def _style_in_stack(spec: StyleSpec, stack: Stack, facts: FamilyFacts, config: Any, tp: int) -> ParallelStyle:
    """The style of a module inside a stack of blocks."""
    heads = getattr(config, facts.heads)
    kv_heads = (getattr(config, facts.kv_heads) or heads) if facts.kv_heads else heads
    if isinstance(spec, Attention):
        # If there are fewer kv heads than ranks, the kv heads are copied, so every rank has at least one kv head.
        kv_here = max(1, kv_heads // tp)
        counts = {spec.groups: heads // tp // kv_here, spec.kv_heads: kv_here}
        attributes = {name: count for name, count in counts.items() if name is not None}
        return EnterHeads(stack, also=spec.also, alibi=spec.alibi, divide=spec.divide, set=attributes)
    if isinstance(spec, Packed):
        return PackedRow(stack, spec.parts) if spec.by_input else PackedColumn(stack, spec.parts)
    if spec == families.QUERIES_AND_KEYS:
        return Column(stack) if kv_heads == heads else MultiQueryColumn(stack, heads)
    return {
        families.FEED_FORWARD: lambda: Enter(stack),
        families.KV_COLUMN: lambda: KVColumn(kv_heads, stack),
        families.COLUMN: lambda: Column(stack),
        families.ENTERING_COLUMN: lambda: Column(stack).entering(),
        families.ROW: lambda: Row(stack),
        families.CONV_COLUMN: lambda: ConvColumn(stack),
        families.CONV_ROW: lambda: ConvRow(stack),
        families.CONV_PACKED: lambda: ConvPacked(stack),
        families.HEAD_COLUMNS: lambda: HeadColumns(stack),
        families.NORM: lambda: Norm(stack),
        families.HEAD_NORM: lambda: Norm(stack, of_heads=True),
        families.EACH_HEADS_NORM: lambda: NormOfEachHead(stack),
        families.WHOLE: lambda: Whole(stack),
    }[spec]()


def add_head(plan: HFPlan, model: Any, loss_parallel: bool, style: type[LogitsHead] = LogitsHead) -> None:
    """Add a style for the language model head, if the model has a linear head."""
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear):
        plan.head = style(loss_parallel)
        plan.table[next(name for name, module in model.named_modules() if module is head)] = plan.head


def add_rest(plan: HFPlan, model: nn.Module, in_blocks: bool = False) -> None:
    """Add a style for each remaining module that has parameters; the style replicates the module on each rank.

    A module needs no style of its own if other styles already cover all its parameters through ties. For example, BERT
    has a second name for the head's bias.

    Args:
        plan: the plan, which must already have all other styles.
        model: the model.
        in_blocks: whether to also allow modules inside blocks; if not, such a module raises an error.

    Raises:
        ValueError: the plan has no style for a module's parameters.
    """
    # Styles that change a module's inputs or outputs, but not the module's parameters.
    without_parameters = (Guard, StackBoundary, Counts, Enter)
    modules = list(model.named_modules())
    styled_modules: set[str] = set()
    for pattern, style in plan.table.items():
        if not isinstance(style, without_parameters):
            styled_modules |= {name for name, _ in matching(modules, pattern)}
    styled_parameters: set[int] = set()
    for name in styled_modules:
        styled_parameters |= {id(p) for p in model.get_submodule(name).parameters(recurse=False)}
    for name, module in model.named_modules():
        direct_parameters = list(module.parameters(recurse=False))
        if name in styled_modules or all(id(p) in styled_parameters for p in direct_parameters):
            continue
        if not in_blocks and any(f"{name}.".startswith(f"{block}.") for block in plan.blocks):
            raise ValueError(
                f"the plan of '{plan.family}' has no style for the parameters of {name} ({type(module).__name__}): it "
                f"does not know this version of transformers, or an option of the config"
            )
        if name in plan.table:
            raise ValueError(f"{name or type(model).__name__} has parameters of its own, which the plan does not know")
        plan.table[name] = Whole(Stack())


def check(model: Any, device_type: str) -> None:
    """Raise an error if the model's class is not from `transformers`, or if its attention does not work under tp.

    Raises:
        ValueError: the model's code is not from transformers, or the attention implementation does not work under tp or
            on `device_type`.
    """
    config = getattr(model, "config", None)
    module = type(model).__module__  # of a class that `trust_remote_code` has loaded: transformers_modules.…
    if config is None or not module.startswith("transformers."):
        raise ValueError(
            f"expected a model class of transformers, got {module}.{type(model).__name__}: the plans are for the "
            f"library's own code, custom (remote) code can do anything"
        )
    attention = getattr(config, "_attn_implementation", None) or "eager"
    if attention not in ATTENTION:
        raise ValueError(
            f"attn_implementation='{attention}' is not known to work under tp; expected one of {ATTENTION}"
        )
    if device_type == "cpu" and attention.startswith("fl"):
        why = "has no backward" if attention == "flex_attention" else "does not run"
        raise ValueError(f"attn_implementation='{attention}' {why} on a CPU; use 'sdpa' or 'eager'")


def check_sizes(config: Any, facts: FamilyFacts, tp: int) -> None:
    """Raise an error if tp does not divide a size in the config, or if the family's styles do not support a config key.

    Raises:
        ValueError: tp does not divide a size, or a key is not supported; the message names the size or the key.
    """
    heads = getattr(config, facts.heads)
    if heads % tp:
        raise ValueError(f"tp={tp} does not divide {facts.heads}={heads}: {heads} % {tp} = {heads % tp} ([mesh] tp)")
    if heads % (facts.head_blocks * tp):
        raise ValueError(
            f"tp={tp} does not divide {facts.heads}={heads} as '{config.model_type}' stores heads, in "
            f"{facts.head_blocks} blocks of {heads / facts.head_blocks:g} ([mesh] tp)"
        )
    if facts.kv_heads:
        check_kv_heads(getattr(config, facts.kv_heads, None) or heads, tp, facts.kv_heads)
    for key in facts.sizes:
        size = getattr(config, key, None)
        if size and size % tp:
            raise ValueError(f"tp={tp} does not divide {key}={size}: {size} % {tp} = {size % tp} ([mesh] tp)")
    for key, why in facts.refused.items():
        if getattr(config, key, None):
            raise ValueError(f"{key}={getattr(config, key)} of a {config.model_type} config: {why}")


def dropouts(model: Any) -> list[str]:
    """The rates of dropout and other noise in the model's modules, as `name=rate`, without duplicates."""
    rates: dict[str, None] = {}
    for module in model.modules():
        values = {"dropout": module.p} if isinstance(module, nn.Dropout) else vars(module)
        for name, value in values.items():
            if NOISE.search(name) and isinstance(value, float) and value > 0:
                rates[f"{name}={value}"] = None
    return list(rates)


def parameters(plan: HFPlan, model: nn.Module) -> dict[str, list[str]]:
    """Map each module name pattern to the parameter names of the matching modules, without duplicates."""
    names_of: dict[str, list[str]] = {}
    modules = list(model.named_modules())
    for pattern in plan.table:
        names: dict[str, None] = {}
        for _, module in matching(modules, pattern):
            names |= dict.fromkeys(name for name, _ in module.named_parameters(recurse=False))
        names_of[pattern] = list(names)
    return names_of


def base_model(model: Any) -> tuple[str, nn.Module]:
    """The model without its head, as (name, module); ("", model) if the model has no head."""
    prefix = model.base_model_prefix
    return (prefix, getattr(model, prefix)) if prefix and hasattr(model, prefix) else ("", model)


def matching(modules: Iterable[tuple[str, nn.Module]], pattern: str) -> list[tuple[str, nn.Module]]:
    """The named modules whose names match a pattern. In the pattern, `*` stands for one dot-separated component."""
    expression = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
    return [(name, module) for name, module in modules if expression.fullmatch(name)]


def has(module: nn.Module, path: str) -> bool:
    """True if a module has a submodule at `path`; "" is the module itself."""
    return not path or any(name == path for name, _ in module.named_modules())


def joined(*parts: str) -> str:
    """Join components of a module's name with dots, leaving out empty strings."""
    return ".".join(part for part in parts if part)
