"""The bfloat16 instructions of this machine's CPU, by which kernels are chosen.

GFLOP/s of one thread, for a product of 2,048 x 512 x 2,048: an AMD EPYC (Zen 4, avx512_bf16) reaches 190 in bfloat16
and 90 in float32, an Intel Xeon with AMX 1,100 and 130.
"""

from __future__ import annotations

import torch

# AMX, which multiplies in tiles. A product whose first factor is transposed runs at half the rate there.
HAS_TILES = torch.cpu._is_amx_tile_supported()
# Every CPU with tiles multiplies bfloat16 in them. Others may have dot products of pairs (avx512_bf16).
HAS_FAST_BFLOAT16 = HAS_TILES or torch.cpu._is_avx512_bf16_supported()
