"""Claims about the digests of a base, and about weights that are merged from a base and a checkpoint."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from dtmega import config
from dtmega.checkpoint import base
from dtmega.checkpoint.base import Digesting, part_digest
from dtmega.checkpoint.reader import Checkpoint
from dtmega.checkpoint.resume import open_checkpoint
from dtmega.checkpoint.state import Base
from dtmega.checkpoint.weights import Merged
from dtmega.ops import keyed
from tests.checkpoint.test_reader import store


class InMemory:
    """Tensors as a source."""

    def __init__(self, **stored: Tensor) -> None:
        self.stored = stored
        self.tensors = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in stored.items()}

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> Tensor:
        return self.stored[name][index or ()].clone()


def factor(name: str, dim: int, i: int) -> int:
    key = np.array([keyed.key64(f"{name}/{dim}")], dtype=np.uint64)
    return int(keyed.draws(key, "digest of a base", np.array([i]))[0]) | 1


def by_definition(name: str, tensor: Tensor) -> int:
    """The sum of the docstring, in Python's whole numbers."""
    total = 0
    for place in np.ndindex(*tensor.shape):
        (bits,) = struct.unpack("<i", struct.pack("<f", tensor[place].item()))
        for dim, i in enumerate(place):
            bits *= factor(name, dim, i)
        total += bits
    return total % 2**64


@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 2)])
def test_a_digest_is_the_sum_of_its_definition(shape: tuple[int, ...]):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    assert part_digest("a", tensor, (0,) * tensor.ndim) == by_definition("a", tensor)


def test_the_digests_of_parts_add_up_to_that_of_the_whole_tensor(monkeypatch):
    monkeypatch.setattr(base, "AT_A_TIME", 10)  # of the whole tensor one row at a time
    tensor = torch.randn(7, 6, generator=torch.Generator().manual_seed(0))
    whole = Digesting(InMemory(a=tensor), 9)
    whole.read("a")
    parts = Digesting(InMemory(a=tensor), 9)
    for rows in (slice(0, 3), slice(3, 7)):
        for columns in (slice(0, 2), slice(2, 6)):
            for _ in range(2):  # what is read again counts once
                parts.read("a", (rows, columns))
    assert parts.digests(["a"]) == whole.digests(["a"])
    parts.read("a")
    assert parts.digests(["a"]) == whole.digests(["a"])


def test_only_the_tensors_that_are_named_have_a_digest():
    source = InMemory(a=torch.ones(2, 3), b=torch.ones(4))
    some, every = Digesting(source, 9, ["a"]), Digesting(source, 9)
    for digesting in (some, every):
        for name in ("a", "b"):
            assert torch.equal(digesting.read(name), source.stored[name])
    assert some.digests(["a", "b"]) == every.digests(["a"])
    assert every.digests(["a", "b"]).keys() == {"a", "b"}


def test_a_digest_depends_on_each_value_and_its_place_and_not_on_the_dtype_or_on_rows_of_padding():
    tensor = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    digest = part_digest("a", tensor, (0, 0))
    assert part_digest("a", tensor.float(), (0, 0)) == digest
    others = [tensor.flip(0), tensor.flip(1), tensor.nextafter(torch.ones_like(tensor))]
    assert len({digest, *(part_digest("a", other, (0, 0)) for other in others), part_digest("b", tensor, (0, 0))}) == 5

    padded = Digesting(InMemory(**{"embed.weight": torch.cat([tensor, tensor])}), 4)
    unpadded = Digesting(InMemory(**{"embed.weight": tensor}), 4)
    for source in (padded, unpadded):
        source.read("embed.weight")
    assert padded.digests(["embed.weight"]) == unpadded.digests(["embed.weight"])


def merged(folder: Path, stored_base: InMemory, digests: dict[str, str]) -> tuple[Merged, dict[str, Tensor]]:
    """Weights of a checkpoint with adapters on `plain` and `turned`, whose weight is stored as [in, out]."""
    generator = torch.Generator().manual_seed(1)
    adapters = {
        f"model/{name}.lora_{x}": torch.randn(shape, generator=generator)
        for name, shapes in {"plain": ((2, 6), (8, 2)), "turned": ((2, 6), (8, 2))}.items()
        for x, shape in zip("ab", shapes, strict=True)
    }
    sections = {"lora": config.Lora(rank=2, alpha=6.0).model_dump()}
    path = store(f"{folder}/c", adapters, config=sections, base=Base("there", digests, ("turned",)))
    checkpoint = open_checkpoint(path)
    assert isinstance(checkpoint, Checkpoint)
    return Merged(checkpoint, stored_base, "there", 9), adapters


def a_base() -> tuple[InMemory, dict[str, str]]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"plain.weight": (8, 6), "turned.weight": (6, 8), "other.weight": (4,)}
    source = InMemory(**{name: torch.randn(shape, generator=generator) for name, shape in shapes.items()})
    digesting = Digesting(source, 9)
    for name in shapes:
        digesting.read(name)
    return source, digesting.digests([*shapes])


def test_merged_weights_are_read_in_parts_as_a_whole_also_of_transposed_layers(tmp_path: Path):
    source, digests = a_base()
    weights, adapters = merged(tmp_path, source, digests)
    for name in ("plain", "turned"):
        update = 3.0 * adapters[f"model/{name}.lora_b"] @ adapters[f"model/{name}.lora_a"]
        expected = source.stored[f"{name}.weight"] + (update.t() if name == "turned" else update)
        torch.testing.assert_close(weights.read(f"{name}.weight"), expected)
        part = (slice(2, 5), slice(1, 6))
        torch.testing.assert_close(weights.read(f"{name}.weight", part), expected[part])
    assert torch.equal(weights.read("other.weight"), source.stored["other.weight"])
    assert weights.layers == ("plain", "turned")


def test_merged_weights_of_another_base_are_refused_whether_read_as_a_whole_or_in_parts(tmp_path: Path):
    source, digests = a_base()
    weights, _ = merged(tmp_path, source, digests)
    source.stored["plain.weight"][7, 5] += 1e-3
    for rows in (slice(0, 4), slice(4, 8)):
        weights.read("plain.weight", (rows, slice(0, 6)))
    with pytest.raises(ValueError, match=r"there is not the base of this run: 1 of 1 tensors differ; 'plain\.weight'"):
        weights.verify(["plain.weight"])
    with pytest.raises(ValueError, match="is not the base of this run"):
        weights.read("plain.weight")
