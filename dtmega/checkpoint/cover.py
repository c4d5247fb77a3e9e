"""Check that the boxes that a tensor is stored in make the whole tensor, each element once."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

MAX_CUT_DIMS = 8

Sizes = tuple[int, ...]


def cover(shape: Sizes, boxes: Sequence[tuple[Sizes, Sizes]]) -> bool:
    """Tell whether each element of a tensor is in exactly one of the boxes. Linear in their number.

    Boxes cover a whole exactly once if their signed corners add up to those of the whole. The sign of a corner is the
    product of +1 for each dim where it is the lower end, -1 where it is the upper: that is the mixed difference of a
    sum of boxes, which determines the sum.

    Args:
        boxes: (offsets, sizes), as many numbers as the tensor has dims; none is empty.

    Raises:
        ValueError: cut along more than MAX_CUT_DIMS dims, each of which doubles the work.
    """
    cut = [d for d, n in enumerate(shape) if any((offsets[d], sizes[d]) != (0, n) for offsets, sizes in boxes)]
    if len(cut) > MAX_CUT_DIMS:
        raise ValueError(f"expected a tensor cut along at most {MAX_CUT_DIMS} dims, got {len(cut)}")
    whole = ((0,) * len(shape), shape)
    corners: Counter[Sizes] = Counter()
    for sign, (offsets, sizes) in [*((1, box) for box in boxes), (-1, whole)]:
        for ends in itertools.product((0, 1), repeat=len(cut)):
            corner = tuple(offsets[d] + end * sizes[d] for d, end in zip(cut, ends, strict=True))
            corners[corner] += sign * (-1) ** sum(ends)
    return not any(corners.values())
