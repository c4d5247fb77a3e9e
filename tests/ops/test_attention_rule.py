"""Claims about ops/attention_rule.py: slopes, buckets, and what is found out early about blocks and chunks of pairs."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.t5.modeling_t5 import T5Attention

from dtmega.ops import attention_rule as R
from dtmega.ops import block_mask as masks
from dtmega.ops.block_mask import block_mask

H = 6


def random_documents(s: int, mean_length: float) -> Tensor:
    generator = torch.Generator().manual_seed(s)
    return (torch.rand(3, s, generator=generator) < 1 / mean_length).long().cumsum(1)


def in_order(s: int, rows: int = 3) -> Tensor:
    return torch.arange(s).repeat(rows, 1)


def test_slopes_are_those_of_megatron():
    assert R.alibi_slopes(12).tolist() == pytest.approx(
        [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625, 0.70711, 0.35355, 0.17678, 0.08839], 1e-4
    )
    slopes = R.alibi_slopes(112)
    seen = [slopes[i].item() for i in (0, 1, 64, 65, 111)]
    assert seen == pytest.approx([0.917004, 0.840896, 0.957603, 0.878126, 0.016317], 1e-4)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("n_buckets", "furthest"), [(32, 128), (8, 20), (12, 31)])
def test_a_distance_is_in_the_bucket_of_t5(bidirectional, n_buckets, furthest):
    weight = torch.arange(n_buckets * 2.0).view(n_buckets, 2)
    table = weight[R.distance_buckets(n_buckets, furthest, bidirectional)].T
    distances = torch.arange(-furthest - 3, furthest + 4)
    bucket = T5Attention._relative_position_bucket(distances, bidirectional, n_buckets, furthest)
    entries = distances.clamp(-furthest, furthest) + furthest
    assert torch.equal(table[:, entries], weight[bucket].T)


@pytest.mark.parametrize("s", [1, 100, 128, 300, 512, 1000])
@pytest.mark.parametrize("mean_length", [1, 30, 200, 10**9])
def test_blocks_of_causal_documents_are_those_that_torch_finds_by_looking_at_all_pairs(s, mean_length):
    ids = random_documents(s, mean_length)

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (ids[b, i] == ids[b, j])

    ours = block_mask(R.attention_rule(in_order(s), causal=True, document_ids=ids))
    theirs = create_block_mask(mask_mod, 3, None, s, s, device="cpu")
    assert (ours.seq_lengths, ours.BLOCK_SIZE) == (theirs.seq_lengths, theirs.BLOCK_SIZE)
    for kind in ("kv", "full_kv", "q", "full_q"):
        for name in (f"{kind}_num_blocks", f"{kind}_indices"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


def kinds(mask: BlockMask) -> tuple[Tensor, Tensor]:
    """[B, blocks of queries, blocks of keys] each: those that the kernel looks into, and those that it takes whole."""
    listed = (mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices)
    found = []
    for counts, indices in listed:
        assert counts is not None
        assert indices is not None
        is_listed = torch.arange(indices.shape[-1]) < counts[..., None]
        found.append(torch.zeros(indices.shape, dtype=torch.bool).scatter(-1, indices.long(), is_listed)[:, 0])
    return found[0], found[1]


RULES: dict[str, dict[str, Any]] = {
    "nothing forbidden": {},
    "causal": {"causal": True},
    "window": {"window": 150},
    "causal window": {"causal": True, "window": 200},
    "prefix": {"causal": True, "prefix": in_order(600) < torch.tensor([[0], [200], [400]])},
    "documents in a window": {"window": 300, "document_ids": random_documents(600, 250)},
    "padding": {"document_ids": -(in_order(600) >= torch.tensor([[600], [300], [512]])).long()},
}


@pytest.mark.parametrize("places", ["in order", "two slices", "shuffled"])
@pytest.mark.parametrize("rule", RULES)
def test_a_block_is_called_full_or_empty_only_if_it_is(rule, places):
    order = {
        "in order": torch.arange(600),
        "two slices": torch.cat([torch.arange(150), torch.arange(450, 750), torch.arange(2000, 2150)]),
        "shuffled": torch.randperm(600, generator=torch.Generator().manual_seed(0)),
    }
    made = R.attention_rule(order[places].repeat(3, 1), **RULES[rule])
    partial, full = kinds(block_mask(made))
    b, i = torch.arange(3)[:, None, None], torch.arange(600)[:, None]
    pairs = made.allowed(b, i, torch.arange(600)).expand(3, 600, 600)
    blocks = torch.nn.functional.pad(pairs, (0, 40, 0, 40)).unflatten(1, (5, 128)).unflatten(3, (5, 128))
    some, every = blocks.transpose(2, 3).flatten(3).any(-1), blocks.transpose(2, 3).flatten(3).all(-1)
    assert not (partial & full).any()
    assert not (some & ~(partial | full)).any()
    assert not (full & ~every).any()
    if places == "in order" and rule != "documents in a window":
        assert torch.equal(full, every)
        assert torch.equal(partial, some & ~every)


def pairs_by_chunks(rule: R.AttentionRule) -> Tensor:
    """The pairs that a kernel on a CPU computes, [B, S, S]."""
    found = torch.zeros(3, 600, 600, dtype=torch.bool)
    for chunk in rule.chunks():
        bias = rule.bias(chunk)
        found[:, chunk.start : chunk.stop, chunk.first : chunk.last] = True if bias is None else bias[:, 0] == 0
    return found


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_with_another_window_is_the_rule_that_is_made_with_it(rule: str, window: int):
    before = R.attention_rule(in_order(600), **RULES[rule])
    truth = R.attention_rule(in_order(600), **RULES[rule] | {"window": window})
    found = before.with_window(window)
    allowed = truth.allowed(torch.arange(3)[:, None, None], torch.arange(600)[:, None], torch.arange(600))
    assert torch.equal(pairs_by_chunks(found), allowed.expand(3, 600, 600))
    on_gpu = before._replace(block_mask=block_mask(before)).with_window(window)
    assert on_gpu.block_mask is not None
    for ours, theirs in zip(kinds(on_gpu.block_mask), kinds(block_mask(truth)), strict=True):
        assert torch.equal(ours, theirs)


class Largest(TorchDispatchMode):
    """Remembers how many elements the largest result of an operation had."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        found = [x.numel() for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, Tensor)]
        self.elements = max(self.elements, *found, 0)
        return out


def test_a_mask_for_the_gpu_looks_at_no_pair_of_tokens():
    s = 2048
    rule = R.attention_rule(in_order(s), causal=True, document_ids=random_documents(s, 200))
    with Largest() as largest:
        block_mask(rule)
    assert largest.elements <= 3 * s


def test_a_gpu_gets_a_mask_of_blocks_unless_no_kernel_is_wanted(monkeypatch):
    for module, name in ((masks, "block_mask"), (R, "_consecutive"), (R, "_strip")):
        monkeypatch.setattr(module, name, lambda rule, name=name: name)
    with FakeTensorMode():  # the GPU need not be there
        places = torch.zeros(2, 300, dtype=torch.int64, device="cuda")
        kernel, formula = (R.attention_rule(places, causal=True, fused=fused) for fused in (True, False))
    assert (kernel.block_mask, kernel.strip) == ("block_mask", None)
    assert (formula.block_mask, formula.strip) == (None, "_strip")
    assert R.attention_rule(in_order(300), causal=True).strip == "_strip"


@pytest.mark.parametrize("first", [0, 17])
def test_consecutive_places_share_one_strip_of_scores_for_all_chunks(first):
    s = 1024
    rule = R.attention_rule(in_order(s) + first, causal=True, slopes=R.alibi_slopes(H))
    storages = set()
    for chunk in rule.chunks():
        bias = rule.bias(chunk)
        assert bias is not None
        storages.add((bias.untyped_storage().data_ptr(), bias.untyped_storage().nbytes()))
    assert [nbytes for _, nbytes in storages] == [H * 256 * 1024 * 4]


def test_chunks_skip_the_keys_that_no_query_of_theirs_sees(monkeypatch):
    monkeypatch.setitem(R.CHUNK_QUERIES, "cpu", 100)
    spans = [
        [(chunk.first, chunk.last) for chunk in R.attention_rule(in_order(400), **keywords).chunks()]
        for keywords in ({"causal": True}, {"causal": True, "window": 30}, {"window": 30})
    ]
    assert spans[0] == [(0, 100), (0, 200), (0, 300), (0, 400)]
    assert spans[1] == [(0, 100), (71, 200), (171, 300), (271, 400)]
    assert spans[2] == [(0, 129), (71, 229), (171, 329), (271, 400)]


def test_the_chunks_of_a_cpu_are_large_enough_for_its_kernel_and_all_but_the_last_as_large():
    for n_queries in range(384, 5000, 7):
        sizes = {chunk.stop - chunk.start for chunk in list(R.attention_rule(in_order(n_queries, 1)).chunks())[:-1]}
        assert len(sizes) == 1
        assert 192 <= min(sizes) <= 320
