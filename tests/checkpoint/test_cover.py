"""Claims about checkpoint/cover.py, held against a count of every element."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from dtmega.checkpoint.cover import MAX_CUT_DIMS, cover

Box = tuple[tuple[int, ...], tuple[int, ...]]


def cut(box: Box, times: int, numbers: random.Random) -> Iterator[Box]:
    """The box in pieces, each cut once more along some dim as long as there is one to cut."""
    offsets, sizes = box
    dims = [d for d, n in enumerate(sizes) if n > 1]
    if not times or not dims:
        yield box
        return
    d = numbers.choice(dims)
    at = numbers.randrange(1, sizes[d])
    for start, size in ((0, at), (at, sizes[d] - at)):
        moved = (*offsets[:d], offsets[d] + start, *offsets[d + 1 :])
        yield from cut((moved, (*sizes[:d], size, *sizes[d + 1 :])), times - 1, numbers)


def counted(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    count = torch.zeros(shape, dtype=torch.int64)
    for offsets, sizes in boxes:
        count[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] += 1
    return bool((count == 1).all())


def changed(boxes: list[Box], numbers: random.Random) -> list[Box]:
    """Without one, with one twice, or with one grown or moved by an element."""
    i = numbers.randrange(len(boxes))
    offsets, sizes = boxes[i]
    d = numbers.randrange(len(sizes))
    shifted = (*offsets[:d], max(0, offsets[d] + numbers.choice([-1, 1])), *offsets[d + 1 :])
    grown = (*sizes[:d], sizes[d] + 1, *sizes[d + 1 :])
    other = numbers.choice([[], [boxes[i], boxes[i]], [(shifted, sizes)], [(shifted, grown)], [(offsets, grown)]])
    return [*boxes[:i], *other, *boxes[i + 1 :]]


@pytest.mark.parametrize("shape", [(7,), (5, 4), (4, 3, 5), (3, 1, 2, 4), (1,)])
def test_boxes_cover_a_tensor_exactly_where_each_element_is_in_one_of_them(shape: tuple[int, ...]):
    numbers, answers = random.Random(0), []
    for _ in range(60):
        whole = list(cut(((0,) * len(shape), shape), numbers.randrange(4), numbers))
        assert cover(shape, whole)
        boxes = changed(whole, numbers)
        inside = all(o + n <= of for box in boxes for o, n, of in zip(*box, shape, strict=True))
        answers.append(cover(shape, boxes))
        assert answers[-1] == (inside and counted(shape, boxes)), boxes
    assert False in answers


def test_a_number_is_covered_by_one_box_and_by_no_other_count():
    assert [cover((), [((), ())] * n) for n in range(3)] == [False, True, False]


@pytest.mark.parametrize("n_cut", [MAX_CUT_DIMS, MAX_CUT_DIMS + 1])
def test_each_dim_that_is_cut_doubles_the_work_so_there_are_at_most_8(n_cut: int):
    halves = list(cut(((0,) * 10, (2,) * n_cut + (1,) * (10 - n_cut)), n_cut, random.Random(0)))
    if n_cut == 8:
        assert cover((2,) * 8 + (1, 1), halves)
    else:
        with pytest.raises(ValueError, match="expected a tensor cut along at most 8 dims, got 9"):
            cover((2,) * 9 + (1,), halves)
