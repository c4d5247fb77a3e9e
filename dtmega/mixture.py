"""Mixtures of corpora as keys of [data] write them: a name, then parts of corpora with their weights.

    validation = ["wiki=data/wiki", "mix: 0.3 0:0.95 data/a, 0.7 0.5:1 data/b"]

The second form is that of Megatron-DeepSpeed's --train-weighted-split-paths (`parse_data_paths` in its
`megatron/arguments.py`): 0.5:1 is the second half of a corpus's documents. The first form is one corpus, whole.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

FORM = "'NAME=PREFIX' or 'NAME: WEIGHT START:END PREFIX, ...'"
NAMED = re.compile(r"([\w.-]+)(=|:)(.*)", re.DOTALL)


class Share(NamedTuple):
    """A part of a corpus in a mixture.

    Attributes:
        weight: positive; only its ratio to the others counts.
        start, end: which documents, as fractions of them.
        prefix: of PREFIX.bin and PREFIX.idx.
    """

    weight: float
    start: float
    end: float
    prefix: str

    def documents(self, n: int) -> tuple[int, int]:
        """The (start, stop) of n documents; Python's rounding, half to even, as of `get_split_by_range_`."""
        return round(self.start * float(n)), round(self.end * float(n))


class Mixture(NamedTuple):
    """Parts of corpora under one name."""

    name: str
    shares: tuple[Share, ...]

    @property
    def weights(self) -> list[float]:
        return [share.weight for share in self.shares]


def parse(written: str) -> Mixture:
    """The mixture that is written so.

    Raises:
        ValueError: it has neither of the two forms.
    """
    named = NAMED.fullmatch(written)
    if named is None:
        raise ValueError(f"expected {FORM}, such as 'wiki={written}', got '{written}'")
    name, sign, rest = named.groups()
    if sign == "=":
        if not rest:
            raise ValueError(f"expected {FORM}, got '{written}'")
        return Mixture(name, (Share(1.0, 0.0, 1.0, rest),))
    return Mixture(name, tuple(_share(part) for part in rest.split(",")))


def _share(written: str) -> Share:
    """The share that is written so.

    Raises:
        ValueError: these are not a weight, a range and a prefix.
    """
    try:
        weight_text, bounds, prefix = written.split()
        start, end = map(float, bounds.split(":"))
        weight = float(weight_text)
    except ValueError:
        raise ValueError(f"expected WEIGHT START:END PREFIX between the commas, got '{written.strip()}'") from None
    if not (0 < weight < math.inf and 0 <= start < end <= 1):
        raise ValueError(f"expected WEIGHT > 0 and 0 <= START < END <= 1, got '{written.strip()}'")
    return Share(weight, start, end, prefix)
