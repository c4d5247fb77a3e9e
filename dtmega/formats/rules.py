"""Rules between the tensors of a model here and those in other people's files: data, read in both directions.

    Rule("layers.{}.attn.out.", "transformer.h.{}.attn.c_proj.", "transpose")
    Rule("layers.{}.attn.qkv.", "transformer.h.{}.attn.c_attn.", "transpose heads")
    Rule("layers.{}.mlp.experts.down", "model.layers.{}.mlp.experts.{}.down_proj.weight", "stack")

A name that ends in a dot is a module, and stands for its weight and its bias; any other is a tensor. `{}` is the number
of a layer. A form is one word or several:

    same        the tensors are equal
    transpose   theirs is [in, out], as in GPT-2's Conv1D; vectors are equal
    concat      the rows of several tensors, equal parts, stand one after the other in the one of the other side
    heads       on one side the rows of q, then those of k, then of v, in three tensors or in one; on the other, in one
                tensor, by head: [groups, (the group's q's, k, v), K]. That is ours, unless ours are several. Where
                two tensors are named, they are k and v.
    stack       theirs are numbered by one more `{}`, and are the entries of ours, [number of them, rows of each, ...];
                with concat, the rows of several of theirs are those of one entry

All of them move whole rows: of a stack those of all entries, one after the other. So a form comes down to runs of rows,
and whoever needs a box of a tensor reads the rows of that box, and no others.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

VIEWS = ("transpose", "stack")  # these change how rows are seen; the other words say which rows are which
FORM_WORDS = ("same", "concat", "heads", *VIEWS)
Shape = tuple[int, ...]
T = TypeVar("T")


class Rule(NamedTuple):
    """One row of a format.

    Attributes:
        ours, theirs: names; at most one side has several.
        form: words of FORM_WORDS, separated by spaces.
    """

    ours: str | tuple[str, ...]
    theirs: str | tuple[str, ...]
    form: str = "same"

    @property
    def words(self) -> set[str]:
        return set(self.form.split())


class Heads(NamedTuple):
    """The numbers of heads of a model: of queries, and of keys and values, each shared by a group of the former."""

    n: int
    n_kv: int


class RowRun(NamedTuple):
    """Rows of a tensor that are rows of one on the other side.

    Attributes:
        at: the first of them here.
        of: name of the tensor there.
        start: the first of them there.
        rows: how many.
    """

    at: int
    of: str
    start: int
    rows: int


class Made(NamedTuple):
    """The making of a tensor from tensors of the other side.

    Attributes:
        shape: of the tensor.
        runs: its rows in order, each once.
        here: how its rows are seen: "", "transpose" (they are columns), or "stack" (all rows of its entries are rows).
        there: likewise of the tensors on the other side.
    """

    shape: Shape
    runs: tuple[RowRun, ...]
    here: str = ""
    there: str = ""


class Directions(NamedTuple):
    """Both directions: our tensors made of theirs, and theirs made of ours."""

    ours: dict[str, Made]
    theirs: dict[str, Made]


def directions(rules: Iterable[Rule], shapes: Mapping[str, Shape], heads: Heads) -> Directions:
    """The rules of a format, worked out for one model.

    Args:
        shapes: of our tensors, by name; all that the model has.
        heads: of the model, for rules with that word.

    Returns:
        In the order of our names, layers by their numbers.

    Raises:
        ValueError: a tensor that no rule names, or part of what one rule joins.
    """
    table = _table(rules)
    used = dict.fromkeys(_match(table, name) for name in sorted(shapes, key=_natural))
    found = Directions({}, {})
    for rule, place in used:
        names = [place.name(pattern) for pattern in _several(rule.ours)]
        if lost := [name for name in names if name not in shapes]:
            raise ValueError(f"'{lost[0]}' is missing, which stands in one rule with the others of {names}")
        _add(found, {name: shapes[name] for name in names}, rule, place, heads)
    return found


def _add(found: Directions, ours: Mapping[str, Shape], rule: Rule, place: _Place, heads: Heads) -> None:
    """The tensors of one rule at one place."""
    stacked = "stack" in rule.words
    here, there = ("stack", "") if stacked else ("", "transpose" if "transpose" in rule.words else "")
    n_dims = 2 if stacked else 1  # of ours, that are its rows
    our_rows = {name: math.prod(shape[:n_dims]) for name, shape in ours.items()}
    total = sum(our_rows.values())
    first = next(iter(ours.values()))
    width = first[n_dims:]
    their_rows = _their_rows(rule, place, total, heads, n_entries=first[0])
    runs = [(0, 0, total)]
    if "heads" in rule.words:
        runs = _by_head(total, heads, 2 in (len(ours), len(their_rows)))
        if len(ours) > 1:  # then the rows of theirs are by head
            runs = [(in_order, by_head, n) for by_head, in_order, n in runs]
    pieces = _cut(runs, our_rows, their_rows)
    for name, shape in ours.items():
        its = (RowRun(row, other, start, n) for mine, row, other, start, n in pieces if mine == name)
        found.ours[name] = Made(shape, _merged(its), here, there)
    their_runs: dict[str, list[RowRun]] = {name: [] for name in their_rows}
    for mine, row, other, start, n in pieces:
        their_runs[other].append(RowRun(start, mine, row, n))
    for name, rows in their_rows.items():
        found.theirs[name] = Made(stored(there, (rows, *width)), _merged(their_runs[name]), there, here)


def _their_rows(rule: Rule, place: _Place, total: int, heads: Heads, n_entries: int) -> dict[str, int]:
    """Name -> rows, as ours count them.

    Args:
        n_entries: of a stack.
    """
    patterns = _several(rule.theirs)
    if "stack" in rule.words:
        names = [place.name(pattern, i) for i in range(n_entries) for pattern in patterns]
        parts: tuple[int, ...] = (1,) * len(names)
    else:
        names = [place.name(pattern) for pattern in patterns]
        by_head = len(patterns) == 3 and "heads" in rule.words
        parts = (heads.n, heads.n_kv, heads.n_kv) if by_head else (1,) * len(patterns)
    if total % sum(parts):
        raise ValueError(f"{total} rows of '{rule.ours}' cannot be cut into {sum(parts)} equal parts")
    share = total // sum(parts)
    return {name: share * part for name, part in zip(names, parts, strict=True)}


def _by_head(total: int, heads: Heads, without_q: bool) -> list[tuple[int, int, int]]:
    """(row where they stand by head, row where q, k and v stand one after the other, how many).

    The first is [groups, (the group's q's, k, v), K], the second [(q, k, v), heads of each, K].
    """
    n_q = 0 if without_q else heads.n
    head_rows, rest = divmod(total, n_q + 2 * heads.n_kv)
    if rest:
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
    """Runs over all rows of a rule, cut where a tensor of either side ends: (ours, row, theirs, row, how many)."""
    pieces = []
    for our_row, their_row, rows in runs:
        at = 0
        while at < rows:
            mine, here = _tensor_at(ours, our_row + at)
            other, there = _tensor_at(theirs, their_row + at)
            n = min(rows - at, ours[mine] - here, theirs[other] - there)
            pieces.append((mine, here, other, there, n))
            at += n
    return pieces


def _tensor_at(rows: Mapping[str, int], row: int) -> tuple[str, int]:
    """The tensor that a row is in, of some that stand one after the other, and its number there."""
    for name, n in rows.items():
        if row < n:
            return name, row
        row -= n
    raise AssertionError(f"{row} rows too many for {rows}")


def _merged(runs: Iterable[RowRun]) -> tuple[RowRun, ...]:
    """The runs in order; those that are neighbours on both sides become one."""
    found: list[RowRun] = []
    for run in sorted(runs):
        if found and found[-1].of == run.of and found[-1].start + found[-1].rows == run.start:
            found[-1] = found[-1]._replace(rows=found[-1].rows + run.rows)
        else:
            found.append(run)
    return tuple(found)


# ------------------------------------------------------------------------------------------------------------ views


def stored(view: str, dims: tuple[T, ...]) -> tuple[T, ...]:
    """A value for each dim of a tensor as it is stored, from one for each dim as rules see it."""
    return dims[::-1] if view == "transpose" else dims


# ------------------------------------------------------------------------------------------------------------ names


def _several(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


class _Place(NamedTuple):
    """A place in a model where a rule applies.

    Attributes:
        layers: numbers that stand for `{}`.
        suffix: weight or bias, or nothing where the rule names a tensor.
    """

    layers: tuple[str, ...]
    suffix: str

    def name(self, pattern: str, *more: int) -> str:
        """The tensor there; `more` are numbers of a stack."""
        return pattern.format(*self.layers, *more) + self.suffix


def _table(rules: Iterable[Rule]) -> list[tuple[re.Pattern[str], Rule]]:
    """Pattern of each of our names -> its rule."""
    found = []
    for rule in rules:
        assert rule.words <= {*FORM_WORDS}, rule
        for name in _several(rule.ours):
            suffix = "(weight|bias)" if name.endswith(".") else "()"
            found.append((re.compile(re.escape(name).replace(r"\{\}", r"(\d+)") + suffix), rule))
    return found


def _match(table: Sequence[tuple[re.Pattern[str], Rule]], name: str) -> tuple[Rule, _Place]:
    """The rule of one of our names, and the place in the model."""
    for pattern, rule in table:
        if match := pattern.fullmatch(name):
            *layers, suffix = match.groups()
            return rule, _Place(tuple(layers), suffix)
    raise ValueError(f"'{name}' is in no rule of the format")


def _natural(name: str) -> list[int | str]:
    return [int(s) if s.isdigit() else s for s in re.split(r"(\d+)", name)]
