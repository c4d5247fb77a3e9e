"""Digests against SplitMix64 in Python's integers. tests/fsdp/test_exact.py has them on all layouts."""

from __future__ import annotations

import struct

import torch

from dtmega.fsdp.digests import Digest, first_keys, of_weights
from dtmega.ops import keyed
from dtmega.ops.fixed_point import PIECE

CPU = torch.device("cpu")
WORD = 2**64


def splitmix(x: int) -> int:
    """Output of SplitMix64 in the state x (Steele, Lea, Flood 2014)."""
    x = (x + 0x9E3779B97F4A7C15) % WORD
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % WORD
    return x ^ (x >> 31)


def summed(name: str, numbers: list[int], words: list[int]) -> int:
    total = 0
    for number, word in zip(numbers, words, strict=True):
        total += splitmix((splitmix(number) ^ word % WORD) + keyed.key64(name))
    return total % WORD


def test_a_digest_of_weights_is_the_sum_of_hashes_of_name_number_and_bits():
    weights = {"a": torch.randn(3, 5, generator=torch.Generator().manual_seed(0)), "b": -torch.rand(7)}
    expected = 0
    for name, weight in weights.items():
        words = [struct.unpack("<i", struct.pack("<f", value))[0] for value in weight.flatten().tolist()]
        expected += summed(name, [*range(len(words))], words)
    assert int(of_weights(weights, CPU)) % WORD == expected % WORD


def test_a_large_weight_has_the_digest_of_its_elements_in_order():
    weight = torch.arange(3 * (PIECE // 2 + 1), dtype=torch.float32).view(3, -1)
    words = weight.view(torch.int32).flatten()
    some = [0, 1, PIECE // 2, PIECE // 2 + 1, PIECE, weight.numel() - 1]
    for number in some:
        changed = weight.clone()
        changed.view(-1)[number] += 1
        word = int(changed.view(torch.int32).flatten()[number])
        difference = int(of_weights({"a": changed}, CPU)) - int(of_weights({"a": weight}, CPU))
        assert difference % WORD == (summed("a", [number], [word]) - summed("a", [number], [int(words[number])])) % WORD


def test_a_digest_of_gradients_is_the_sum_of_hashes_of_name_piece_place_and_integer():
    digest = Digest(first_keys(CPU))
    digest.add("a", 0, torch.tensor([5, -(2**62), 0]))
    digest.add("a", 1, torch.tensor([5]))
    expected = summed("a/0", [0, 1, 2], [5, -(2**62), 0]) + summed("a/1", [0], [5])
    assert int(digest.total) % WORD == expected % WORD
