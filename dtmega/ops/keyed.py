"""Randomness as a function: a counter-based hash of (seed, name, global index) instead of a generator with a state.

Without a state, a mask or an initial value is equal on all layouts, does not change when it is recomputed, and
need not be stored in a checkpoint. The hash uses integers, and the normal values use only correctly rounded operations,
so the bits do not depend on the device, the number of threads, or where an element lies in a tensor.

The functions for hashes and normal values accept tensors or numpy arrays, because numpy is twice as fast as torch on a
CPU.
"""

from __future__ import annotations

import hashlib
import math
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Numbers = TypeVar("Numbers", Tensor, NDArray[Any])
BLOCK = 2**15  # number of normal values that a CPU thread computes at a time, so that temporaries stay in the cache


class Dropout(NamedTuple):
    """Dropout of attention probabilities, with a mask that depends on (key, sample, head, query and key positions)."""

    p: float
    key: Tensor  # int32 scalar, different for each dropout site
    head_ids: Tensor  # [H] int32, global indices of the heads on this rank
    sample_ids: Tensor  # [B] int64


def key(seed: int, name: str) -> int:
    """A signed 32-bit key for all random numbers that are drawn under `name`."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=4).digest(), "little", signed=True)


def mix(x: Numbers) -> Numbers:
    """Bijective hash of int32 lanes: "lowbias32" (Wellons, "Prospecting for Hash Functions", 2018)."""
    # int32 has no logical shift, so a mask removes the copies of the sign bit. x itself is not changed.
    first = x >> 16
    first &= 0xFFFF
    first ^= x
    first *= 0x7FEB352D
    second = first >> 15
    second &= 0x1FFFF
    second ^= first
    second *= 0x846CA68B - 2**32
    third = second >> 16
    third &= 0xFFFF
    third ^= second
    return third


def fold(index: Tensor) -> Tensor:
    """Hash int64 to int32. All 64 bits affect the result; numbers below 2^32 keep their low 32 bits."""
    return (index ^ mix((index >> 32).to(torch.int32))).to(torch.int32)


def keep(p: float, rows: Numbers, columns: Numbers) -> Numbers:
    """Dropout mask [..., C], True with probability 1 - p, from hashed row keys [...] and column indices [C], int32."""
    # Hashes are uniform in [-2^31, 2^31), so a fraction p of all hashes lies below p 2^32 - 2^31.
    hashed = mix(rows[..., None] ^ mix(columns))
    return hashed >= round(p * 2**32) - 2**31


def attention_rows(key: Tensor, sample_ids: Tensor, head_ids: Tensor, query_places: Tensor) -> Tensor:
    """Row keys [B, H, C] for the dropout mask (`keep`) of attention probabilities.

    Args:
        key: key of the dropout site, int32 scalar.
        sample_ids: global indices of the samples, [B] int64.
        head_ids: global indices of the heads, [H] int32.
        query_places: positions of the queries, [B, C] int32.
    """
    rows = mix(fold(sample_ids) ^ key)[:, None, None] ^ head_ids[:, None]
    return mix(mix(rows) ^ query_places[:, None])


# Number of Feistel rounds. Four rounds make a permutation pseudo-random (Luby, Rackoff 1988), but a small n needs more.
ROUNDS = 8


def permuted(i: int, n: int, name: str) -> int:
    """The number to which a permutation of 0 to n - 1 maps i. The permutation depends only on (n, name).

    A Feistel network permutes all two-digit numbers in base ceil(sqrt(n)), i.e. n numbers or slightly more.
    A result outside 0 to n - 1 goes through the network again until it lies in this range. The resulting mapping is
    still a permutation (Black, Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
    """
    assert 0 <= i < n
    base = math.isqrt(n - 1) + 1
    while True:
        high, low = divmod(i, base)
        for r in range(ROUNDS):
            drawn = hashlib.blake2b(f"{name}/{r}/{low}".encode(), digest_size=8).digest()
            high, low = low, (high + int.from_bytes(drawn, "little")) % base
        i = high * base + low
        if i < n:
            return i


def key64(name: str) -> int:
    """A 64-bit key, in [0, 2**64), for all random bits that `draws` computes with it."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def draws(keys: NDArray[np.uint64], name: str, index: NDArray[np.integer]) -> NDArray[np.uint64]:
    """64 uniform bits for each pair of a key and an index.

    The bits are output number `index` of SplitMix64 (Steele, Lea, Flood 2014, "Fast Splittable Pseudorandom Number
    Generators"), seeded with a hash of key and name. The bits therefore depend only on key, index and name.

    Args:
        keys, index: arrays that broadcast, each with at least one dim, because numpy warns of overflows in scalars.
        name: purpose of the bits; draws for different purposes are independent.
    """
    seeds = _mix64(keys ^ np.uint64(key64(name)))
    return _mix64(seeds + (index.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))


def _mix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's bijective 64-bit hash: Stafford's variant 13 of MurmurHash3's finalizer."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniform(drawn: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Numbers in [0, 1) from the upper 53 of the 64 bits."""
    return (drawn >> np.uint64(11)).astype(np.float64) * 2.0**-53


def below(drawn: NDArray[np.uint64], n: NDArray[np.integer] | int) -> NDArray[np.int64]:
    """Integers in [0, n) from the upper 32 bits; n <= 2**32. Each integer has probability 1 / n to within 2**-32."""
    return (((drawn >> np.uint64(32)) * np.asarray(n).astype(np.uint64)) >> np.uint64(32)).astype(np.int64)


def normal(seed: int, name: str, index: Tensor) -> Tensor:
    """Standard normal values in fp32, one for each global element index in `index` (int64, any shape, >= 0).

    Each value is the quantile of a hashed uniform number, computed with Wichura's PPND7 (Applied Statistics 37, 1988,
    AS 241) to an accuracy of 1e-7. The logarithm in the formula is computed from a series, because library logarithms
    differ in the last bit between devices, and between a tensor's vectorised part and its tail.
    """
    if index.numel() == 0:
        return torch.empty(index.shape, dtype=torch.float32, device=index.device)
    flat = index.reshape(-1)
    # `fold` does not change numbers below 2^32 (the upper half is 0 and hashes to 0), so a cast is enough.
    folded = flat.to(torch.int32) if int(flat.max()) < 2**32 else fold(flat)
    keys = key(seed, name), key(seed, name + "#")
    if index.device.type != "cpu":
        return _normal(folded, *keys).view(index.shape)
    values = torch.empty(index.shape, dtype=torch.float32)
    numbers = folded.numpy()
    flat_values = values.view(-1).numpy()

    def draw(start: int) -> None:
        flat_values[start : start + BLOCK] = _normal(numbers[start : start + BLOCK], *keys)

    starts = range(0, len(numbers), BLOCK)
    n_threads = min(torch.get_num_threads(), len(starts))
    if n_threads == 1:
        for start in starts:
            draw(start)
    else:
        with ThreadPoolExecutor(n_threads) as pool:
            list(pool.map(draw, starts))  # list() re-raises an error from any thread
    return values


def _normal(folded: Numbers, first_key: int, second_key: int) -> Numbers:
    """Normal values [n] fp32 for folded element indices [n] int32.

    The values are computed in fp64 and rounded to fp32 at the end. Every operation is rounded correctly, so all devices
    get the same bits.
    """
    hashed = mix(mix(folded ^ first_key) ^ second_key)
    library = _library(folded)
    u = _cast(hashed, library.float64)
    u += 2**31 + 0.5
    u *= 2.0**-32  # in (0, 1), symmetric about 1/2
    q = u - 0.5
    values = _cast(_central(q), library.float32)
    # The outer 15 % of the values need ten times as much arithmetic, so only these values go through `_outer`.
    outer = _places(abs(q) > 0.425)
    values[outer] = _cast(_outer(u[outer]), library.float32)
    return values


def _library(x: Numbers) -> ModuleType:
    return torch if isinstance(x, Tensor) else np


def _cast(x: Numbers, dtype: Any) -> Numbers:
    return x.to(dtype) if isinstance(x, Tensor) else x.astype(dtype)


def _places(mask: Numbers) -> Numbers:
    """The indices where a mask [n] is True."""
    return mask.nonzero().squeeze(1) if isinstance(mask, Tensor) else np.flatnonzero(mask)


def _central(q: Numbers) -> Numbers:
    """The standard normal quantile of the probability 1/2 + q, for |q| <= 0.425."""
    r = 0.180625 - q * q
    # fmt: off
    above = _polynomial(r, 3.3871327179e0, 5.0434271938e1, 1.5929113202e2, 5.9109374720e1)
    below = _polynomial(r, 1.0, 1.7895169469e1, 7.8757757664e1, 6.7187563600e1)
    # fmt: on
    above *= q
    above /= below
    return above


def _outer(u: Numbers) -> Numbers:
    """The standard normal quantile of the probability u, for |u - 1/2| > 0.425."""
    library = _library(u)
    t = library.sqrt(-_log(library.minimum(u, 1 - u)))
    t -= 1.6
    tail = _polynomial(t, 1.4234372777e0, 2.7568153900e0, 1.3067284816e0, 1.7023821103e-1)
    tail /= _polynomial(t, 1.0, 7.3700164250e-1, 1.2021132975e-1)
    return library.where(u < 0.5, -tail, tail)


def _polynomial(x: Numbers, *coefficients: float) -> Numbers:
    """Horner's rule. Sum and product are separate operations: a fused multiply-add would change the last bit."""
    y = x * coefficients[-1]
    for c in coefficients[-2:0:-1]:
        y += c
        y *= x
    y += coefficients[0]
    return y


def _log(x: Numbers) -> Numbers:
    """Natural logarithm of positive, normal fp64 values to 1e-7: x = m 2^e, log m = 2 atanh((m - 1) / (m + 1))."""
    library = _library(x)
    bits = x.view(library.int64)
    exponent = bits >> 52
    exponent -= 1022
    mantissa = bits & (2**52 - 1)
    mantissa |= 1022 << 52
    m = mantissa.view(library.float64)  # in [1/2, 1)
    s = m - 0.75
    s /= m + 0.75  # |s| <= 1/5
    log_m = _polynomial(s * s, *(2.0 / k for k in range(1, 17, 2)))
    log_m *= s
    log_m -= 0.2876820724517809  # log 3/4
    e = _cast(exponent, library.float32)
    e *= 0.6931471805599453  # log 2; in fp32 as in the first version, because the bits must not change
    log_m += e
    return log_m
