"""The notation for mixtures in [data] train, test and validation: a name, followed by weighted parts of corpora.

    validation = ["wiki=data/wiki", "mix: 0.3 0:0.95 data/a, 0.7 0.5:1 data/b"]

The first form, with `=`, names one whole corpus. The second form, with `:`, lists parts as WEIGHT START:END PREFIX;
0.5:1 is the second half of a corpus's documents. Megatron-DeepSpeed uses the second form in
--train-weighted-split-paths (`parse_data_paths` in its `megatron/arguments.py`).
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from dtmega.files import urls

FORM = "'NAME=PREFIX' or 'NAME: WEIGHT START:END PREFIX, ...'"
NAMED = re.compile(r"([\w.-]+)(=|:)(.*)", re.DOTALL)


class Share(NamedTuple):
    """A part of a corpus in a mixture.

    Attributes:
        weight: positive weight of the part, relative to the mixture's other weights.
        start: start of the document range, as a fraction of the corpus from 0 to 1.
        end: end of the document range, as a fraction of the corpus from 0 to 1.
        prefix: path of the corpus without suffix; the files are PREFIX.bin and PREFIX.idx.
    """

    weight: float
    start: float
    end: float
    prefix: str

    def documents(self, n: int) -> tuple[int, int]:
        """The document range, (start, stop), in a corpus of n documents.

        `start` and `stop` are rounded (halves to even), as in Megatron-DeepSpeed's `get_split_by_range_`.
        """
        return round(self.start * float(n)), round(self.end * float(n))


class Mixture(NamedTuple):
    """A named mixture of parts of corpora."""

    name: str
    shares: tuple[Share, ...]

    @property
    def weights(self) -> list[float]:
        return [share.weight for share in self.shares]


def parse(written: str) -> Mixture:
    """Parse a mixture in either form, NAME=PREFIX or NAME: WEIGHT START:END PREFIX, ...

    Raises:
        ValueError: the text has neither form, or one of its parts is malformed.
    """
    named = NAMED.fullmatch(written)
    if named is None:
        raise ValueError(f"expected {FORM}, such as 'wiki={written}', got '{written}'")
    name, sign, content = named.groups()
    if sign == "=":
        if not content:
            raise ValueError(f"expected {FORM}, got '{written}'")
        return Mixture(name, (Share(1.0, 0.0, 1.0, urls.check(content)),))
    return Mixture(name, tuple(_share(part) for part in content.split(",")))


def _share(written: str) -> Share:
    """Parse WEIGHT START:END PREFIX.

    Raises:
        ValueError: the text has a different form, or a number is out of range.
    """
    try:
        weight_text, bounds, prefix = written.split()
        start, end = map(float, bounds.split(":"))
        weight = float(weight_text)
    except ValueError:
        raise ValueError(f"expected WEIGHT START:END PREFIX between the commas, got '{written.strip()}'") from None
    if not (0 < weight < math.inf and 0 <= start < end <= 1):
        raise ValueError(f"expected WEIGHT > 0 and 0 <= START < END <= 1, got '{written.strip()}'")
    return Share(weight, start, end, urls.check(prefix))
