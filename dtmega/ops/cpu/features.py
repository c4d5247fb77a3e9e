"""Flags for the bfloat16 instructions of this machine's CPU, used to choose between kernels.

For a product of 2,048 x 512 x 2,048, one thread of an AMD EPYC (Zen 4, avx512_bf16) reaches 190 GFLOP/s in bfloat16 and
90 in float32. A thread of an Intel Xeon with AMX reaches 1,100 GFLOP/s in bfloat16 and 130 in float32.
"""

from __future__ import annotations

import torch

# AMX multiplies matrices in tiles, but runs at half the rate if the first factor is transposed.
HAS_TILES = torch.cpu._is_amx_tile_supported()
# CPUs with AMX multiply bfloat16 in tiles. Other CPUs may have AVX-512's bfloat16 instructions (avx512_bf16).
HAS_FAST_BFLOAT16 = HAS_TILES or torch.cpu._is_avx512_bf16_supported()
