"""Check that the stored boxes of a tensor cover each element exactly once."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

MAX_CUT_DIMS = 8

Sizes = tuple[int, ...]


def cover(shape: Sizes, boxes: Sequence[tuple[Sizes, Sizes]]) -> bool:
    """Return True if each element of a tensor is in exactly one box. The time is linear in the number of boxes.

    Only the dims along which the tensor is split count. Each corner of a box gets a sign: the product, over these dims,
    of +1 if the corner is at the box's lower end and -1 if it is at the upper end.

    Let c be the number of boxes that hold an element, as a function of the element's position. The signed corners of
    all boxes together are the mixed difference of c and therefore determine c. Consequently, the boxes cover the
    tensor exactly once if and only if their signed corners add up to the signed corners of the whole tensor.

    Args:
        shape: shape of the tensor.
        boxes: offsets and sizes of each box, one number per dim of the tensor. No box is empty.

    Raises:
        ValueError: the tensor is split along more than MAX_CUT_DIMS dims; each of these dims doubles the work.
    """
    cut = []
    for d, n in enumerate(shape):
        if any((offsets[d], sizes[d]) != (0, n) for offsets, sizes in boxes):
            cut.append(d)
    if len(cut) > MAX_CUT_DIMS:
        raise ValueError(f"expected a tensor cut along at most {MAX_CUT_DIMS} dims, got {len(cut)}")
    whole_tensor = ((0,) * len(shape), shape)
    # Add the corners of the boxes and subtract the corners of the whole tensor. All corners cancel if the boxes cover
    # the tensor exactly once.
    signed_boxes = [*((1, box) for box in boxes), (-1, whole_tensor)]
    corners: Counter[Sizes] = Counter()
    for sign, (offsets, sizes) in signed_boxes:
        for ends in itertools.product((0, 1), repeat=len(cut)):
            corner = tuple(offsets[d] + end * sizes[d] for d, end in zip(cut, ends, strict=True))
            corners[corner] += sign * (-1) ** sum(ends)
    return not any(corners.values())
