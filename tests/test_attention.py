"""Claims about attention.py; the truth is the textbook formula in fp64."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode

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


def packed(s: int) -> Tensor:
    """Two rows of documents with different boundaries: their ids."""
    starts = torch.zeros(2, s, dtype=torch.long)
    starts[0, 3::17] = 1
    starts[1, 5::11] = 1
    return starts.cumsum(1)


def within(ids: Tensor) -> Tensor:
    """[B, S] -> [B, 1, S, S]: what a query of a document may see."""
    return causal(ids.shape[1]) & (ids[:, None, :, None] == ids[:, None, None, :])


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
    q, k, v = (x.requires_grad_() for x in qkv(s))
    ids = packed(s)
    out = A.attention(q, k, v, A.causal_alibi(A.alibi_slopes(H).double(), s, ids))
    expected = textbook(q, k, v, torch.arange(s)[None], within(ids))
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
    weights = torch.randn_like(out)
    gradients, truth = (torch.autograd.grad((x * weights).sum(), (q, k, v)) for x in (out, expected))
    torch.testing.assert_close(gradients, truth, atol=1e-11, rtol=1e-11)


def test_a_packed_document_is_attended_as_if_it_stood_alone():
    q, k, v = qkv(100)
    out = A.attention(q, k, v, A.causal_alibi(A.alibi_slopes(H).double(), 100, packed(100)))
    alone = slice(3 + 17, 3 + 2 * 17)  # the third document of row 0
    q1, k1, v1 = (x[:1, :, alone] for x in (q, k, v))
    expected = A.attention(q1, k1, v1, A.causal_alibi(A.alibi_slopes(H).double(), 17))
    torch.testing.assert_close(out[:1, :, alone], expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("documents", [False, True])
def test_the_bias_is_megatrons_slope_times_the_place_of_the_key(documents):
    # Megatron-DeepSpeed `ParallelTransformerLayer._build_alibi_tensor`: [H, 1, S], whatever the position ids are.
    s = 100
    q, k, v = qkv(s)
    alibi = A.alibi_slopes(H).double()[:, None, None] * torch.arange(s).expand(H, -1)[:, None]
    ids = packed(s)
    allowed = within(ids) if documents else causal(s)
    scores = (q @ k.mT / q.shape[-1] ** 0.5 + alibi).masked_fill(~allowed, -torch.inf)
    out = A.attention(q, k, v, A.causal_alibi(A.alibi_slopes(H).double(), s, ids if documents else None))
    torch.testing.assert_close(out, scores.softmax(-1) @ v, atol=1e-11, rtol=1e-11)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("s", [100, 128, 300])
@pytest.mark.parametrize("documents", [False, True])
def test_the_gpu_kernel_is_given_the_same_bias_and_mask(s, documents):
    q, k, v = qkv(s)
    ids = packed(s) if documents else None
    slopes = A.alibi_slopes(H).double()
    expected = A.attention(q, k, v, A.causal_alibi(slopes, s, ids))
    mask = A._causal_block_mask(s, torch.device("cpu")) if ids is None else A.document_block_mask(ids)
    out = A.attention(q, k, v, A.Bias(slopes, (), None, mask))
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)


def test_a_gpu_gets_a_mask_of_blocks_of_its_documents_or_of_causality(monkeypatch):
    monkeypatch.setattr(A, "_causal_block_mask", lambda seq_len, device: (seq_len, device.type))
    ids = packed(300)
    with FakeTensorMode():  # the GPU need not be there
        slopes = torch.empty(H, device="cuda")
    assert A.causal_alibi(slopes, 300).block_mask == (300, "cuda")
    documents = A.causal_alibi(slopes, 300, ids).block_mask
    assert documents is not None
    assert torch.equal(documents.kv_indices, A.document_block_mask(ids).kv_indices)


def random_documents(s: int, mean_length: float) -> Tensor:
    generator = torch.Generator().manual_seed(s)
    return (torch.rand(3, s, generator=generator) < 1 / mean_length).long().cumsum(1)


@pytest.mark.parametrize("s", [1, 100, 128, 300, 512, 1000])
@pytest.mark.parametrize("mean_length", [1, 30, 200, 10**9])
def test_blocks_from_document_boundaries_are_those_that_torch_finds_by_looking_at_all_pairs(s, mean_length):
    ids = random_documents(s, mean_length)

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (ids[b, i] == ids[b, j])

    ours, theirs = A.document_block_mask(ids), create_block_mask(mask_mod, 3, None, s, s, device="cpu")
    assert (ours.seq_lengths, ours.BLOCK_SIZE) == (theirs.seq_lengths, theirs.BLOCK_SIZE)
    for kind in ("kv", "full_kv", "q", "full_q"):
        for name in (f"{kind}_num_blocks", f"{kind}_indices"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


class Largest(TorchDispatchMode):
    """Remembers how many elements the largest result of an operation had."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        found = [x.numel() for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, Tensor)]
        self.elements = max(self.elements, *found, 0)
        return out


def test_a_document_mask_for_the_gpu_looks_at_no_pair_of_tokens():
    s = 2048
    ids = random_documents(s, 200)
    with Largest() as largest:
        A.document_block_mask(ids)
    assert largest.elements <= 3 * s


def test_attention_within_documents_keeps_no_mask_for_backward():
    s = 512
    bias = A.causal_alibi(A.alibi_slopes(H), s, packed(s))
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        q, k, v = (x.requires_grad_() for x in qkv(s, torch.float32))
        out = A.attention(q, k, v, bias)
    del kept[bias.chunks[0].untyped_storage().data_ptr()]
    assert sum(kept.values()) < 10 * out.nbytes < 2 * H * s * s * 4


def test_a_compiled_block_takes_in_the_gpu_kernel_without_a_warning():
    q, k, v = qkv(64, torch.float32)
    mask = A._causal_block_mask(64, torch.device("cpu"))

    def block(q: Tensor) -> Tensor:
        return A._flex_kernel("cuda")(q, k, v, block_mask=mask)

    torch._dynamo.reset()
    with torch.no_grad():
        out = torch.compile(block, backend="eager", fullgraph=True)(q)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out, expected)
    assert A._flex_kernel("cuda") is not A._flex_kernel("cpu")


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
