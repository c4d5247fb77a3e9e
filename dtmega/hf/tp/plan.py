"""The table of a model of `transformers`: refuse first, then find a style for every module with parameters."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from dtmega.hf import families
from dtmega.hf.families import Attention, Known, Packed, Word
from dtmega.hf.files.config_json import NOISE
from dtmega.hf.tp.packed import ConvColumn, ConvPacked, ConvRow, MultiQueryColumn, PackedColumn, PackedRow
from dtmega.hf.tp.regions import Counts, EnterHeads, Guard, StackBoundary
from dtmega.hf.tp.styles import NormOfEachHead, Stack
from dtmega.hf.tp.vocab import LogitsHead
from dtmega.plans.base import Style
from dtmega.plans.styles import Column, Enter, KVColumn, Norm, Row, Whole, check_kv_heads
from dtmega.plans.vocabulary import HeadColumns, VocabEmbedding

ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")


@dataclass
class HFPlan:
    """A plan of `parallelize_hf` for a model: print it.

    Attributes:
        family: `config.model_type`.
        table: module pattern -> style; what `plans.apply_plan` takes.
        blocks: names of the modules that FSDP2 wraps one by one.
        head: the style of the head to the vocabulary, if there is one.
        parameters: module pattern -> names of the parameters that it has.
        native: it is the plan that transformers brings.
        notes: what else there is to know.
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
            where = ", ".join(f"{name} {_said(placement)}" for name, placement in placements.items())
            cost = getattr(style, "cost", ("", ""))[self.sequence_parallel]
            if where or cost:
                lines.append((pattern or "(the model)", where, cost))
        widths = [max(len(line[i]) for line in lines) for i in range(2)]
        cut = ", sequence parallel" if self.sequence_parallel else ""
        head = f"{self.family}, tp={self.tp}{cut}"
        rows = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}".rstrip() for a, b, c in lines]
        return "\n".join([head, *rows, *self.notes])


def _placement(style: ParallelStyle, name: str, tp: int) -> Placement:
    found = style.placement(name, tp) if isinstance(style, Style) else getattr(style, "placements", {}).get(name)
    return found or Replicate()


def _said(placement: Placement) -> str:
    if isinstance(placement, Shard) or placement == Replicate():
        return repr(placement).replace("dim=", "")
    return f"Shard({placement.dim}) of each of {placement.split_factor} parts"  # pyright: ignore[reportAttributeAccessIssue]


def family_plan(model: Any, tp: int, sequence_parallel: bool, loss_parallel: bool) -> HFPlan:
    """The plan of a model whose family is in `families.KNOWN`, with words; nothing of the model is changed.

    Raises:
        ValueError: what `check` refuses; a module of a block that the family has no word for.
    """
    config = model.config
    known = families.KNOWN[config.model_type]
    check_sizes(config, known, tp)
    prefix, base = base_model(model)
    plan = HFPlan(config.model_type, tp, sequence_parallel, {}, [])

    # Each list of blocks is a stack: its sequence is cut before the first of them and whole again behind the last.
    stacks: dict[str, Stack] = {}
    for owner, blocks in known.stacks.items():
        path = joined(owner, blocks)
        if not has(base, owner) or not has(base, path):
            continue
        stack = Stack(sequence_parallel and tp > 1)
        stacks[path] = stack
        add_guard(plan, model, stack, joined(prefix, owner))
        numbers = [number for number, _ in base.get_submodule(path).named_children()]
        names = [joined(prefix, path, number) for number in numbers]
        plan.blocks += names
        for name in dict.fromkeys((*names[:1], *names[-1:])):  # of one block both are the same
            plan.table[name] = StackBoundary(stack, name == names[0], name == names[-1])

    for pattern, word in known.words.items():
        if next(matching(base, pattern), None) is None:
            continue
        stack = next((found for path, found in stacks.items() if pattern.startswith(f"{path}.")), None)
        plan.table[joined(prefix, pattern)] = _style(word, stack, known, config, tp)
    add_head(plan, model, loss_parallel)
    add_rest(plan, model)
    return plan


def _style(word: Word, stack: Stack | None, known: Known, config: Any, tp: int) -> ParallelStyle:
    heads = getattr(config, known.heads)
    kv_heads = (getattr(config, known.kv_heads) or heads) if known.kv_heads else heads
    if isinstance(word, Attention):
        assert stack is not None
        kv_here = max(1, kv_heads // tp)
        counts = {word.groups: heads // tp // kv_here, word.kv_heads: kv_here}
        named = {name: count for name, count in counts.items() if name is not None}
        return EnterHeads(stack, also=word.also, alibi=word.alibi, divide=word.divide, set=named)
    if isinstance(word, Packed):
        assert stack is not None
        return PackedRow(stack, word.parts) if word.by_input else PackedColumn(stack, word.parts)
    if word == families.QUERIES_AND_KEYS:
        assert stack is not None
        return Column(stack) if kv_heads == heads else MultiQueryColumn(stack, heads)
    if word == families.FEED_FORWARD:
        assert stack is not None
        return Enter(stack)
    if word == families.KV_COLUMN:
        assert stack is not None
        return KVColumn(kv_heads, stack)
    if word == families.VOCAB:
        return VocabEmbedding(Stack())
    assert stack is not None
    return {
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
    }[word]()


def add_guard(plan: HFPlan, model: Any, stack: Stack, owner: str) -> None:
    plan.table[owner] = Guard(stack, bool(dropouts(model)))


def add_head(plan: HFPlan, model: Any, loss_parallel: bool, style: type[LogitsHead] = LogitsHead) -> None:
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear):
        plan.head = style(loss_parallel)
        plan.table[next(name for name, module in model.named_modules() if module is head)] = plan.head


def add_rest(plan: HFPlan, model: nn.Module, in_blocks: bool = False) -> None:
    """Add every other module with parameters: whole, if it stands outside of the blocks, or `in_blocks` too.

    A parameter tied to one that has a style (BERT's second name for the head's bias) follows that one.
    """
    hooks = (Guard, StackBoundary, Counts, Enter)
    named = {n for pattern, s in plan.table.items() if not isinstance(s, hooks) for n, _ in matching(model, pattern)}
    styled = {id(p) for name in named for p in model.get_submodule(name).parameters(recurse=False)}
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if name in named or not own or all(id(p) in styled for p in own):
            continue
        if not in_blocks and any(f"{name}.".startswith(f"{block}.") for block in plan.blocks):
            raise ValueError(
                f"the plan of '{plan.family}' has no word for the parameters of {name} ({type(module).__name__}): this "
                f"version of transformers, or an option of the config, is not one it knows"
            )
        if name in plan.table:
            raise ValueError(f"{name or type(model).__name__} has parameters of its own, which the plan does not know")
        plan.table[name] = Whole(Stack())


def check(model: Any, device_type: str) -> None:
    """Refuse, before anything is done, what is not a model of `transformers` or cannot compute under tp.

    Raises:
        ValueError: code from elsewhere, an attention implementation that cannot work.
    """
    config = getattr(model, "config", None)
    module, auto_map = type(model).__module__, getattr(config, "auto_map", None)
    if config is None or not module.startswith("transformers.") or auto_map:
        raise ValueError(
            f"expected a model class of transformers, got {module}.{type(model).__name__}"
            + (f" with auto_map={auto_map}" if auto_map else "")
            + ": the plans are for the library's own code, custom (remote) code can do anything"
        )
    attention = getattr(config, "_attn_implementation", None) or "eager"
    if attention not in ATTENTION:
        raise ValueError(
            f"attn_implementation='{attention}' is not known to work under tp; expected one of {ATTENTION}"
        )
    if device_type == "cpu" and attention.startswith("fl"):
        why = "has no backward" if attention == "flex_attention" else "does not run"
        raise ValueError(f"attn_implementation='{attention}' {why} on a CPU; use 'sdpa' or 'eager'")


def check_sizes(config: Any, known: Known, tp: int) -> None:
    heads = getattr(config, known.heads)
    if heads % tp:
        raise ValueError(f"tp={tp} does not divide {known.heads}={heads}: {heads} % {tp} = {heads % tp} ([mesh] tp)")
    if heads % (known.head_blocks * tp):
        raise ValueError(
            f"tp={tp} does not divide {known.heads}={heads} as '{config.model_type}' stores heads, in "
            f"{known.head_blocks} blocks of {heads / known.head_blocks:g} ([mesh] tp)"
        )
    if known.kv_heads:
        check_kv_heads(getattr(config, known.kv_heads, None) or heads, tp, known.kv_heads)
    for key in known.sizes:
        size = getattr(config, key, None)
        if size and size % tp:
            raise ValueError(f"tp={tp} does not divide {key}={size}: {size} % {tp} = {size % tp} ([mesh] tp)")
    for key, why in known.refused.items():
        if getattr(config, key, None):
            raise ValueError(f"{key}={getattr(config, key)} of a {config.model_type} config: {why}")


def dropouts(model: Any) -> list[str]:
    """Attributes of the model's modules that drop or disturb something in training, as `name=p`."""
    found: dict[str, None] = {}
    for module in model.modules():
        values = {"dropout": module.p} if isinstance(module, nn.Dropout) else vars(module)
        for name, value in values.items():
            if NOISE.search(name) and isinstance(value, float) and value > 0:
                found[f"{name}={value}"] = None
    return list(found)


def parameters(plan: HFPlan, model: nn.Module) -> dict[str, list[str]]:
    """The names of the parameters of the modules of each pattern."""
    return {
        pattern: list({n: None for _, m in matching(model, pattern) for n, _ in m.named_parameters(recurse=False)})
        for pattern in plan.table
    }


def base_model(model: Any) -> tuple[str, nn.Module]:
    """(name, module) of the model without its head; ("", itself) if it has none."""
    prefix = model.base_model_prefix
    return (prefix, getattr(model, prefix)) if prefix and hasattr(model, prefix) else ("", model)


def matching(model: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Module]]:
    expression = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
    return ((name, module) for name, module in model.named_modules() if expression.fullmatch(name))


def has(module: nn.Module, path: str) -> bool:
    return not path or any(name == path for name, _ in module.named_modules())


def joined(*parts: str) -> str:
    return ".".join(part for part in parts if part)
