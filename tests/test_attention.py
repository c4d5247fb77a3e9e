"""Claims about attention.py; the truth is the textbook formula in fp64."""

import pytest
import torch
from torch import Tensor

from dtmega import attention as A

H = 6


def textbook(q: Tensor, k: Tensor, v: Tensor, position: Tensor, allowed: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(K) + slope (pos_j - pos_i)) v, with everything written out."""
    bias = A.alibi_slopes(H).double()[:, None, None] * (position[:, None, None, :] - position[:, None, :, None])
    scores = q @ k.mT / q.shape[-1] ** 0.5 + bias
    return scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ v


def qkv(s: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(s)
    return [torch.randn(2, H, s, 16, dtype=torch.float64, generator=generator).to(dtype) for _ in range(3)]


def packed(s: int) -> tuple[Tensor, Tensor]:
    """Two rows of documents with different boundaries: their ids and the positions inside them."""
    starts = torch.zeros(2, s, dtype=torch.long)
    starts[0, 3::17] = 1
    starts[1, 5::11] = 1
    ids = starts.cumsum(1)
    place = torch.arange(s).expand(2, s)
    return ids, place - (place * starts).cummax(1).values


def causal(s: int) -> Tensor:
    return torch.ones(s, s, dtype=torch.bool).tril()


def test_slopes_are_those_of_megatron():
    assert A.alibi_slopes(12).tolist() == pytest.approx(
        [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625, 0.70711, 0.35355, 0.17678, 0.08839], 1e-4
    )
    slopes = A.alibi_slopes(112)
    seen = [slopes[i].item() for i in (0, 1, 64, 65, 111)]
    assert seen == pytest.approx([0.917004, 0.840896, 0.957603, 0.878126, 0.016317], 1e-4)


@pytest.mark.parametrize("s", [1, 7, 64, 100, 256, 301])
def test_chunks_give_the_textbook_result(s):
    q, k, v = qkv(s)
    out = A.attention(q, k, v, A.causal_alibi(A.alibi_slopes(H).double(), s))
    torch.testing.assert_close(out, textbook(q, k, v, torch.arange(s)[None], causal(s)), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("s", [7, 100, 256])
def test_documents_do_not_see_each_other(s):
    q, k, v = qkv(s)
    ids, _ = packed(s)
    out = A.attention(q, k, v, A.causal_alibi(A.alibi_slopes(H).double(), s, document_ids=ids))
    allowed = causal(s) & (ids[:, None, :, None] == ids[:, None, None, :])
    torch.testing.assert_close(out, textbook(q, k, v, torch.arange(s)[None], allowed), atol=1e-12, rtol=1e-12)


def test_a_packed_document_is_attended_as_if_it_stood_alone():
    q, k, v = qkv(100)
    ids, positions = packed(100)
    out = A.attention(q, k, v, A.causal_alibi(A.alibi_slopes(H).double(), 100, positions, ids))
    alone = slice(3 + 17, 3 + 2 * 17)  # the third document of row 0
    q1, k1, v1 = (x[:1, :, alone] for x in (q, k, v))
    expected = A.attention(q1, k1, v1, A.causal_alibi(A.alibi_slopes(H).double(), 17))
    torch.testing.assert_close(out[:1, :, alone], expected, atol=1e-12, rtol=1e-12)


def test_position_ids_are_what_distances_are_measured_with():
    q, k, v = qkv(100)
    _, positions = packed(100)
    out = A.attention(q, k, v, A.causal_alibi(A.alibi_slopes(H).double(), 100, positions))
    torch.testing.assert_close(out, textbook(q, k, v, positions, causal(100)), atol=1e-12, rtol=1e-12)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("documents", [False, True])
def test_the_gpu_kernel_is_given_the_same_bias_and_mask(documents):
    s = 100
    q, k, v = qkv(s)
    ids, positions = packed(s) if documents else (None, None)
    slopes = A.alibi_slopes(H).double()
    expected = A.attention(q, k, v, A.causal_alibi(slopes, s, positions, ids))
    mask = A._block_mask(s, ids, torch.device("cpu"))
    out = A.attention(q, k, v, A.Bias(slopes, (), mask, positions))
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)


def test_no_bias_of_all_pairs_is_stored():
    bias = A.causal_alibi(A.alibi_slopes(H), 1024)
    storages = {chunk.untyped_storage().data_ptr(): chunk.untyped_storage().nbytes() for chunk in bias.chunks}
    assert list(storages.values()) == [H * 256 * 1024 * 4]


def test_bf16_attention_keeps_the_bias_exact():
    s = 1024
    q, k, v = qkv(s, torch.bfloat16)
    expected = textbook(q.double(), k.double(), v.double(), torch.arange(s)[None], causal(s))
    out = A.attention(q, k, v, A.causal_alibi(A.alibi_slopes(H), s)).double()
    assert (out - expected).norm() / expected.norm() < 4e-3  # a bias rounded to bf16 gives 1e-1


def dropout(p: float, heads: Tensor, samples: Tensor) -> A.Dropout:
    return A.Dropout(p, torch.tensor(77, dtype=torch.int32), heads, samples)


HEADS, SAMPLES = torch.arange(H, dtype=torch.int32), torch.tensor([11, 12])


def test_dropped_probabilities_are_the_textbook_ones_masked_and_rescaled():
    s, p = 200, 0.25
    q, k, _ = qkv(s)
    identity = torch.eye(s, dtype=torch.float64).expand(2, H, s, s)  # as values: the output is the probabilities
    bias = A.causal_alibi(A.alibi_slopes(H), s)
    dropped = A.attention(q, k, identity, bias, dropout(p, HEADS, SAMPLES))
    full = A.attention(q, k, identity, bias, dropout(0.0, HEADS, SAMPLES))
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], full[kept] / (1 - p))
    share = kept[:, :, causal(s)].double().mean().item()
    assert share == pytest.approx(1 - p, abs=0.005)


def test_the_mask_of_a_head_and_sample_does_not_depend_on_who_computes_it():
    s = 200
    q, k, v = qkv(s)
    bias = A.causal_alibi(A.alibi_slopes(H).double(), s)
    whole = A.attention(q, k, v, bias, dropout(0.1, HEADS, SAMPLES))
    part = A.causal_alibi(A.alibi_slopes(H).double()[2:4], s)
    mine = A.attention(q[1:, 2:4], k[1:, 2:4], v[1:, 2:4], part, dropout(0.1, HEADS[2:4], SAMPLES[1:]))
    torch.testing.assert_close(mine, whole[1:, 2:4], atol=1e-14, rtol=0)
