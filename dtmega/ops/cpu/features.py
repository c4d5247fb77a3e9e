"""Products in bfloat16 that this machine's CPU is fast at: by them kernels are chosen where no key says which.

One thread, 2,048 x 512 x 2,048: an AMD EPYC (Zen 4, avx512_bf16) makes 190 GFLOP/s of them for 90 in float32, an Intel
Xeon with AMX 1,100 for 130.
"""

from __future__ import annotations

import torch

# Tiles (AMX). A product runs at half its rate there where its first factor is transposed.
HAS_TILES = torch.cpu._is_amx_tile_supported()
# Every CPU with tiles multiplies bfloat16 in them; others have dot products of pairs (avx512_bf16).
HAS_FAST_BFLOAT16 = HAS_TILES or torch.cpu._is_avx512_bf16_supported()
