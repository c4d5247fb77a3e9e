"""planning/counting/kernels.py: what attention keeps, against torch's fused kernel of a CPU, and FLOPs, by hand."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dtmega.planning.counting import kernels
from dtmega.planning.counting.recorder import Recorder
from tests.planning.test_recorder import GPU, recording

CPU = torch.device("cpu")
N_ROWS, N_HEADS, N_TOKENS, SIZE = 2, 4, 24, 16


@contextlib.contextmanager
def on_gpu(tp: int = 1) -> Iterator[Recorder]:
    """A recorder on a fake GPU with its kernels."""
    with recording() as recorder, kernels.without_values(tp):
        yield recorder


def queries(device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Queries, keys or values as a block makes them."""
    projected = torch.zeros(N_ROWS, N_TOKENS, N_HEADS, SIZE, device=device, dtype=dtype)
    return projected.transpose(1, 2).requires_grad_()


def kept_bytes(device: torch.device, masked: bool) -> list[int]:
    """Bytes of each storage that attention keeps for backward."""
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage
        return tensor

    mask = torch.ones(N_ROWS, 1, N_TOKENS, N_TOKENS, dtype=torch.bool, device=device) if masked else None
    q, k, v = (queries(device) for _ in range(3))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=not masked)
    return sorted(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("masked", [False, True])
def test_attention_keeps_for_backward_what_a_fused_kernel_keeps(masked: bool):
    with on_gpu():
        here = kept_bytes(GPU, masked)
    assert here == kept_bytes(CPU, masked)


def test_a_compiled_block_attends_by_the_fused_kernel():
    with on_gpu() as recorder:
        attend = torch.compile(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))
        attend(*(queries(GPU) for _ in range(3)))
        names = [work.operator for work in recorder.works if work.flops]
    assert names == ["dtmega_planning.attention"]


def test_causal_attention_computes_two_products_of_the_visible_pairs_and_backward_five():
    with on_gpu() as recorder:
        q, k, v = (queries(GPU, torch.bfloat16) for _ in range(3))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))
        flops = [work.flops for work in recorder.works if work.flops]
    pairs = N_ROWS * N_HEADS * N_TOKENS * (N_TOKENS + 1) // 2
    assert flops == [2 * 2 * pairs * SIZE, 5 * 2 * pairs * SIZE]


def test_scores_are_built_where_no_fused_kernel_takes_the_queries():
    with on_gpu() as recorder:
        q, k, v = (queries(GPU, torch.float64) for _ in range(3))
        F.scaled_dot_product_attention(q, k, v, is_causal=True)
        names = {work.operator for work in recorder.works}
    assert "aten._safe_softmax" in names or "aten._softmax" in names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rank_computes_the_rows_of_its_share_of_the_experts(dtype: torch.dtype):
    with on_gpu(tp=2) as recorder:
        rows = torch.empty(48, 32, device=GPU, dtype=dtype)
        matrices = torch.empty(3, 32, 16, device=GPU, dtype=dtype)
        ends = torch.empty(3, device=GPU, dtype=torch.int32)
        out = torch.ops.aten._grouped_mm(rows, matrices, ends)
        (flops,) = (work.flops for work in recorder.works if work.flops)
    assert (out.shape, out.dtype) == ((48, 16), dtype)
    assert flops == 2 * 48 * 32 * 16 // 2
