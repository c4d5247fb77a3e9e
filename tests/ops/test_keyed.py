"""Randomness without state: claims about keyed.py."""

import hashlib
import math
from collections import Counter

import numpy as np
import pytest
import torch

from dtmega.ops import keyed


def lowbias32(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    return x ^ x >> 16


def test_mix_is_the_published_hash_in_unsigned_arithmetic():
    numbers = [0, 1, 2, 12345, 2**31 - 1, 2**31, 2**32 - 1]
    lanes = torch.tensor(np.array(numbers, dtype=np.uint32).view(np.int32))
    assert keyed.mix(lanes).numpy().view(np.uint32).tolist() == [lowbias32(n) for n in numbers]


def test_fold_uses_the_upper_half_of_an_index():
    index = torch.tensor([7, 7 + 2**32, 7 + 2**40])
    assert len(set(keyed.fold(index).tolist())) == 3


def splitmix64(seed: int, n: int) -> list[int]:
    """The first n outputs, as https://prng.di.unimi.it/splitmix64.c has them."""
    found = []
    for _ in range(n):
        seed = (seed + 0x9E3779B97F4A7C15) % 2**64
        z = (seed ^ seed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        found.append(z ^ z >> 31)
    return found


def test_draws_are_the_outputs_of_the_published_generator_for_each_key_and_name():
    assert splitmix64(1234567, 2) == [6457827717110365317, 3203168211198807973]  # published
    keys = np.array([5, 2**64 - 1], np.uint64)
    for name in ("a", "b"):
        # The seed is the generator's hash of key and name: its first output, if its step is taken back before.
        seeds = [splitmix64(((k ^ keyed.key64(name)) - 0x9E3779B97F4A7C15) % 2**64, 1)[0] for k in keys.tolist()]
        assert keyed.draws(keys[:, None], name, np.arange(9)).tolist() == [splitmix64(seed, 9) for seed in seeds]
    assert keyed.draws(keys[:1], "a", np.array([3]))[0] == keyed.draws(keys, "a", np.full(2, 3))[0]


def test_uniform_numbers_are_from_0_to_less_than_1_and_integers_below_n():
    drawn = np.array([0, 2**63, 2**64 - 1], np.uint64)
    assert keyed.uniform(drawn).tolist() == [0.0, 0.5, 1 - 2.0**-53]
    assert keyed.below(drawn, 7).tolist() == [0, 3, 6]
    assert keyed.below(drawn, np.array([1, 2**32, 2**32])).tolist() == [0, 2**31, 2**32 - 1]


def test_normal_values_do_not_depend_on_their_neighbours_or_the_shape():
    whole = keyed.normal(3, "w", torch.arange(10_000))
    assert torch.equal(keyed.normal(3, "w", torch.arange(4567, 4592).view(5, 5)).flatten(), whole[4567:4592])


def test_normal_values_beyond_32_bits_do_not_depend_on_what_is_drawn_with_them():
    numbers = [7, 2**31, 2**32 - 1, 2**32, 2**32 + 7, 2**40 + 7]
    together = keyed.normal(3, "w", torch.tensor(numbers))
    assert together.tolist() == [keyed.normal(3, "w", torch.tensor([number])).item() for number in numbers]
    assert len(set(together.tolist())) == len(numbers)


def test_normal_values_do_not_depend_on_the_number_of_threads():
    index = torch.arange(300_001)
    one = keyed.normal(3, "w", index)
    torch.set_num_threads(2)
    try:
        assert torch.equal(keyed.normal(3, "w", index), one)
    finally:
        torch.set_num_threads(1)


def test_normal_is_the_inverse_normal_distribution_of_the_hash():
    index = torch.arange(1 << 16)
    hashed = keyed.mix(keyed.mix(keyed.fold(index) ^ keyed.key(5, "n")) ^ keyed.key(5, "n#"))
    uniform = (hashed.double() + 2**31 + 0.5) / 2**32
    torch.testing.assert_close(keyed.normal(5, "n", index).double(), torch.special.ndtri(uniform), atol=1e-6, rtol=1e-6)


def test_normal_values_stay_what_they_were():
    # Another version of this file, or of torch, must not change with what values anybody's run starts.
    values = keyed.normal(1234, "embed.weight", torch.arange(1 << 16))
    assert hashlib.sha256(values.numpy().tobytes()).hexdigest() == (
        "30d9756049dfd743168027ad9096f7856642b27cd3464f86d8112d3c9372f0a0"
    )


def test_a_tensor_and_an_array_of_numpy_have_the_same_normal_values():
    lanes = torch.arange(-(2**31), 2**31, 32749, dtype=torch.int64).to(torch.int32)  # a CPU takes arrays, a GPU tensors
    of_array = keyed._normal(lanes.numpy(), 5, -7)
    assert np.array_equal(keyed._normal(lanes, 5, -7).numpy(), of_array)


def test_normal_has_the_moments_of_a_standard_normal():
    n = 1 << 20
    x = keyed.normal(1, "moments", torch.arange(n)).double()
    five_sigma = 5 / math.sqrt(n)
    assert abs(x.mean()) < five_sigma
    assert abs(x.square().mean() - 1) < five_sigma * math.sqrt(2)
    assert abs(x.pow(4).mean() - 3) < five_sigma * math.sqrt(96)
    assert abs((x[1:] * x[:-1]).mean()) < five_sigma


def test_another_seed_or_name_gives_other_values():
    index = torch.arange(1000)
    a, b, c = (keyed.normal(s, n, index) for s, n in ((1, "a"), (2, "a"), (1, "b")))
    assert torch.stack([a, b, c]).corrcoef().sub(torch.eye(3)).abs().max() < 0.2


def test_keep_drops_the_share_it_is_told_and_neighbours_are_independent():
    p, rows, columns = 0.1, 4096, 1024
    mask = keyed.keep(p, keyed.mix(torch.arange(rows, dtype=torch.int32)), torch.arange(columns, dtype=torch.int32))
    centred = mask.double() - (1 - p)
    five_sigma = 5 / math.sqrt(rows * columns)
    assert abs(centred.mean()) < five_sigma * math.sqrt(p * (1 - p))
    for neighbours in (centred[:, 1:] * centred[:, :-1], centred[1:] * centred[:-1]):
        assert abs(neighbours.mean() / (p * (1 - p))) < five_sigma


def test_keep_with_probability_zero_keeps_everything():
    assert keyed.keep(0.0, torch.arange(100, dtype=torch.int32), torch.arange(100, dtype=torch.int32)).all()


def test_keep_drops_the_lowest_of_all_hashes_and_no_more_than_the_share_of_them():
    # The hash of 0 is 0, the first of the upper half of the signed numbers.
    zero = torch.zeros(1, dtype=torch.int32)
    assert keyed.keep(0.5, zero, zero).all()
    assert not keyed.keep(0.5 + 2**-32, zero, zero).any()


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 9, 10, 1000, 1024, 1025])
def test_a_permutation_without_a_table_reaches_each_number_once(n):
    assert sorted(keyed.permuted(i, n, "seed") for i in range(n)) == list(range(n))


def test_permutations_of_different_names_are_uniform_over_all_orders():
    orders = Counter(tuple(keyed.permuted(i, 4, f"{name}") for i in range(4)) for name in range(4800))
    assert len(orders) == 24
    chi_square = sum((seen - 200) ** 2 / 200 for seen in orders.values())
    assert chi_square < 49.7  # 23 degrees of freedom: one in a thousand


def test_places_that_are_neighbours_go_far_apart():
    n = 10**12
    places = [keyed.permuted(i, n, "seed") for i in range(2000)]
    steps = np.abs(np.diff(places)) / n
    assert abs(steps.mean() - 1 / 3) < 0.02  # as for uniform and independent places
    assert steps.min() < 0.01 < 0.9 < steps.max()


def test_a_permutation_stays_what_it_was():
    # Another version of this file must not reorder anybody's run.
    assert [keyed.permuted(i, 10, "1234/train/0/0/samples") for i in range(10)] == [7, 8, 6, 4, 5, 9, 2, 3, 0, 1]
