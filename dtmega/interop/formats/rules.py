"""Rules that translate between our tensors and another program's tensors. Rules are data and apply in both directions.

    Rule("layers.{}.attn.out.", "transformer.h.{}.attn.c_proj.", "transpose")
    Rule("layers.{}.attn.qkv.", "transformer.h.{}.attn.c_attn.", "transpose heads")
    Rule("layers.{}.mlp.experts.down", "model.layers.{}.mlp.experts.{}.down_proj.weight", "stack")

A name that ends in a dot names a module, and stands for the module's weight and bias; any other name names a tensor.
`{}` is a layer number. The third argument is the rule's form, which is one or more of these words:

    same        both tensors are equal
    transpose   the other program's matrix is [in, out], as in GPT-2's Conv1D; vectors are equal
    concat      a tensor on one side concatenates, along the rows, several equally sized tensors of the other side
    heads       one side stores all rows of q, then all rows of k, then all rows of v (in one tensor or in three); the
                other side has one tensor sorted by head: [groups, (the group's q heads, k, v), K]. Our tensor is sorted
                by head, unless the rule names several of our tensors. If a side has two names, the names are k and v; q
                is absent.
    stack       our tensor is [entries, rows per entry, ...], and each of the other program's tensors is one entry; the
                name of an entry has an additional `{}` for the entry's number. With concat, each of our entries
                concatenates, along the rows, several of the other program's tensors

Every form moves whole rows; a stack's rows are numbered consecutively across its entries. A rule is therefore
equivalent to a list of row runs (consecutive rows that stay together), and a reader of a slice reads only its rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

VIEWS = ("transpose", "stack")  # words that redefine a tensor's rows; the other words only reorder rows
FORM_WORDS = ("same", "concat", "heads", *VIEWS)
Shape = tuple[int, ...]
T = TypeVar("T")


class Rule(NamedTuple):
    """A relation between our tensors (or modules) and the other program's tensors (or modules).

    Attributes:
        ours: name of our tensor or module, or a tuple of several names.
        theirs: name of the other program's tensor or module; a tuple of several names only if `ours` is one name.
        form: words of FORM_WORDS, separated by spaces.
    """

    ours: str | tuple[str, ...]
    theirs: str | tuple[str, ...]
    form: str = "same"

    @property
    def words(self) -> set[str]:
        return set(self.form.split())


class Heads(NamedTuple):
    """A model's attention head counts.

    Attributes:
        n: number of query heads.
        n_kv: number of key/value heads, each shared by a group of n / n_kv query heads.
    """

    n: int
    n_kv: int


class RowRun(NamedTuple):
    """Consecutive rows of a tensor that are also consecutive in one tensor on the other side.

    Attributes:
        at: index of the run's first row in the assembled tensor.
        tensor: name of the tensor on the other side.
        start: index of the run's first row in the tensor on the other side.
        rows: number of rows.
    """

    at: int
    tensor: str
    start: int
    rows: int


class Assembly(NamedTuple):
    """The recipe for assembling one tensor from tensors on the other side.

    Attributes:
        shape: shape of the assembled tensor.
        runs: the runs that make up the tensor, in order; together the runs cover each row once.
        view: way of numbering the tensor's rows, either "" (along dim 0), "transpose" (columns count as rows), or
            "stack" (consecutively across the stack's entries).
        source_view: way of numbering the rows of the tensors on the other side.
    """

    shape: Shape
    runs: tuple[RowRun, ...]
    view: str = ""
    source_view: str = ""


class Directions(NamedTuple):
    """The assemblies in both directions (our tensors from theirs, and theirs from ours), keyed by tensor name."""

    ours: dict[str, Assembly]
    theirs: dict[str, Assembly]


def directions(rules: Iterable[Rule], shapes: Mapping[str, Shape], heads: Heads) -> Directions:
    """Apply a format's rules to one model.

    Args:
        shapes: shape of each tensor of our model, keyed by tensor name.
        heads: the model's head counts, for rules with the word "heads".

    Returns:
        Both directions, ordered by our names, with layers sorted by number.

    Raises:
        ValueError: a tensor occurs in no rule, or the model has only some of the tensors that one rule joins.
    """
    table = _table(rules)
    used = dict.fromkeys(_match(table, name) for name in sorted(shapes, key=_natural))
    result = Directions({}, {})
    for rule, place in used:
        names = [place.name(pattern) for pattern in _several(rule.ours)]
        if missing := [name for name in names if name not in shapes]:
            raise ValueError(f"'{missing[0]}' is missing, which one rule joins with the others of {names}")
        _apply(rule, place, {name: shapes[name] for name in names}, heads, result)
    return result


def _apply(rule: Rule, place: _Place, ours: Mapping[str, Shape], heads: Heads, result: Directions) -> None:
    """Apply a rule to one layer or module: add to `result` how to assemble each tensor that the rule names there.

    Args:
        place: layer numbers and suffix, which turn the rule's names into names of tensors.
        ours: shape of each of our tensors in the rule, keyed by tensor name.
    """
    stacked = "stack" in rule.words
    view, source_view = "", ""
    if stacked:
        view = "stack"
    elif "transpose" in rule.words:
        source_view = "transpose"
    # A stack's rows are numbered consecutively across its entries, so the first two dims together count the rows.
    n_row_dims = 2 if stacked else 1
    our_rows = {name: math.prod(shape[:n_row_dims]) for name, shape in ours.items()}
    total = sum(our_rows.values())
    first_shape = next(iter(ours.values()))
    width = first_shape[n_row_dims:]
    their_rows = _their_rows(rule, place, total, heads, n_entries=first_shape[0])
    runs = [(0, 0, total)]
    if "heads" in rule.words:
        runs = _by_head(total, heads, 2 in (len(ours), len(their_rows)))
        if len(ours) > 1:  # the other program's tensor is then sorted by head
            runs = [(in_order, by_head, n) for by_head, in_order, n in runs]
    pieces = _cut(runs, our_rows, their_rows)
    for name, shape in ours.items():
        our_runs = (RowRun(row, other, start, n) for mine, row, other, start, n in pieces if mine == name)
        result.ours[name] = Assembly(shape, _merged(our_runs), view, source_view)
    their_runs: dict[str, list[RowRun]] = {name: [] for name in their_rows}
    for mine, row, other, start, n in pieces:
        their_runs[other].append(RowRun(start, mine, row, n))
    for name, rows in their_rows.items():
        shape = stored_dims(source_view, (rows, *width))
        result.theirs[name] = Assembly(shape, _merged(their_runs[name]), source_view, view)


def _their_rows(rule: Rule, place: _Place, total: int, heads: Heads, n_entries: int) -> dict[str, int]:
    """Count the rows that each of the other program's tensors has before any transpose, keyed by tensor name.

    Args:
        total: number of rows in all our tensors in the rule.
        n_entries: number of entries in our tensor, if the rule is a stack.
    """
    patterns = _several(rule.theirs)
    if "stack" in rule.words:
        names = [place.name(pattern, i) for i in range(n_entries) for pattern in patterns]
        parts: tuple[int, ...] = (1,) * len(names)
    else:
        names = [place.name(pattern) for pattern in patterns]
        parts = (1,) * len(patterns)
        if len(patterns) == 3 and "heads" in rule.words:
            parts = (heads.n, heads.n_kv, heads.n_kv)
    if total % sum(parts):
        raise ValueError(f"{total} rows of '{rule.ours}' cannot be cut into {sum(parts)} equal parts")
    share = total // sum(parts)
    return {name: share * part for name, part in zip(names, parts, strict=True)}


def _by_head(total: int, heads: Heads, without_q: bool) -> list[tuple[int, int, int]]:
    """List the row runs of a fused QKV as (first row in head order, first row in matrix order, number of rows).

    Head order is [groups, (the group's q heads, k, v), K]; matrix order is [(q, k, v), heads of each, K].
    """
    n_q = 0 if without_q else heads.n
    head_rows, remainder = divmod(total, n_q + 2 * heads.n_kv)
    if remainder:
        raise ValueError(f"{total} rows cannot be {n_q} + 2 x {heads.n_kv} heads")
    group = n_q // heads.n_kv * head_rows
    widths = (group, head_rows, head_rows) if group else (head_rows, head_rows)
    runs = []
    by_head = 0
    for i in range(heads.n_kv):
        first = 0
        for width in widths:
            runs.append((by_head, first + i * width, width))
            by_head += width
            first += width * heads.n_kv
    return runs


def _cut(
    runs: list[tuple[int, int, int]], ours: Mapping[str, int], theirs: Mapping[str, int]
) -> list[tuple[str, int, str, int, int]]:
    """Cut runs wherever a tensor on either side ends.

    Args:
        runs: tuples (first row in our tensors, first row in the other program's tensors, number of rows). On each side,
            rows are numbered consecutively across all tensors.
        ours: row counts of our tensors in a rule, keyed by tensor name, in the rule's order.
        theirs: row counts of the other program's tensors in the rule, keyed by tensor name, in the rule's order.

    Returns:
        One tuple per piece: (name of our tensor, first row in our tensor, name of the other program's tensor, first row
        in the other program's tensor, number of rows).
    """
    pieces = []
    for our_row, their_row, rows in runs:
        done = 0
        while done < rows:
            mine, our_start = _tensor_at(ours, our_row + done)
            other, their_start = _tensor_at(theirs, their_row + done)
            n = min(rows - done, ours[mine] - our_start, theirs[other] - their_start)
            pieces.append((mine, our_start, other, their_start, n))
            done += n
    return pieces


def _tensor_at(rows: Mapping[str, int], row: int) -> tuple[str, int]:
    """The tensor that holds row `row` (rows are numbered across all tensors), and the row's index in that tensor."""
    for name, n in rows.items():
        if row < n:
            return name, row
        row -= n
    raise AssertionError(f"{row} rows too many for {rows}")


def _merged(runs: Iterable[RowRun]) -> tuple[RowRun, ...]:
    """Sort row runs and merge row runs that are adjacent on both sides."""
    merged: list[RowRun] = []
    for run in sorted(runs):
        if merged and merged[-1].tensor == run.tensor and merged[-1].start + merged[-1].rows == run.start:
            merged[-1] = merged[-1]._replace(rows=merged[-1].rows + run.rows)
        else:
            merged.append(run)
    return tuple(merged)


# ------------------------------------------------------------------------------------------------------------ views


def stored_dims(view: str, dims: tuple[T, ...]) -> tuple[T, ...]:
    """Reorder a tuple of one value per dim, from the rules' order (rows first) to the stored tensor's order."""
    return dims[::-1] if view == "transpose" else dims


# ------------------------------------------------------------------------------------------------------------ names


def _several(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


class _Place(NamedTuple):
    """The layer or module to which a rule applies: the values that turn the rule's names into names of tensors.

    Attributes:
        layers: the layer numbers that replace `{}`.
        suffix: "weight" or "bias"; '' if the rule names a tensor.
    """

    layers: tuple[str, ...]
    suffix: str

    def name(self, pattern: str, *entry: int) -> str:
        """The tensor's name, from a name in the rule; `entry` is the tensor's number in a stack."""
        return pattern.format(*self.layers, *entry) + self.suffix


def _table(rules: Iterable[Rule]) -> list[tuple[re.Pattern[str], Rule]]:
    """A (pattern, rule) pair for each of our names in the rules; the pattern matches that name in every layer."""
    table = []
    for rule in rules:
        assert rule.words <= {*FORM_WORDS}, rule
        for name in _several(rule.ours):
            suffix = "(weight|bias)" if name.endswith(".") else "()"
            table.append((re.compile(re.escape(name).replace(r"\{\}", r"(\d+)") + suffix), rule))
    return table


def _match(table: Sequence[tuple[re.Pattern[str], Rule]], name: str) -> tuple[Rule, _Place]:
    """The rule for one of our tensors, and the layer numbers and suffix in the tensor's name."""
    for pattern, rule in table:
        if match := pattern.fullmatch(name):
            *layers, suffix = match.groups()
            return rule, _Place(tuple(layers), suffix)
    raise ValueError(f"'{name}' is in no rule of the format")


def _natural(name: str) -> list[int | str]:
    """Sort key that orders the numbers in names by value: layers.9 before layers.10."""
    return [int(s) if s.isdigit() else s for s in re.split(r"(\d+)", name)]
