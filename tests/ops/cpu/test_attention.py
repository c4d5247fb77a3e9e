"""Claims about ops/cpu/attention.py; the truth is the textbook formula in fp64 on the same bfloat16 numbers."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dtmega.ops import attention as A
from dtmega.ops import attention_rule as R
from dtmega.ops.attention_rule import alibi_slopes, attention_rule
from dtmega.ops.cpu import attention as C
from tests.ops.test_attention import (
    HEADS,
    PLACES,
    RULES,
    SAMPLES,
    H,
    S,
    T,
    dropout,
    in_order,
    qkv,
    said_twice,
    textbook,
)

SLOPES = alibi_slopes(H)
# Shares of the memory of q, k, v and the result.
PROBABILITIES_MADE_AGAIN = 0.0
PROBABILITIES_KEPT = 9.0
# Scores of a product: of some heads that share one of k, or of both samples.
ONE_GROUP = 2 * 64 * S
BOTH_SAMPLES = 12 * 64 * S


@pytest.fixture(autouse=True)
def in_small_parts_of_dirty_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Several chunks, products and pieces of a few hundred scores; memory that nobody has written is NaN."""
    monkeypatch.setattr(A, "attention_cpu", C.attention_cpu)
    monkeypatch.setitem(R.CHUNK_QUERIES, "cpu", 64)
    monkeypatch.setattr(C, "SHORT_CHUNK", 40)
    monkeypatch.setattr(C, "PRODUCT_SCORES", ONE_GROUP)
    monkeypatch.setattr(C, "CACHED_SCORES", 1000)
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def relative(x: Tensor, truth: Tensor) -> float:
    return ((x.double() - truth).norm() / truth.norm()).item()


@pytest.mark.parametrize("places", [*PLACES, "cross"])
@pytest.mark.parametrize("words", RULES)
def test_results_and_gradients_are_the_textbooks_but_for_the_rounding_of_bfloat16(words, places, monkeypatch):
    queries = PLACES["in order" if places == "cross" else places].repeat(2, 1)
    keys = in_order(T) if places == "cross" else queries
    keywords, added, allowed = said_twice(RULES[words], queries, keys)
    inputs = [x.requires_grad_() for x in qkv(S, torch.bfloat16, n_keys=keys.shape[1], shared_by=3)]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    expected = textbook(wide[0], wide[1], wide[2], added, allowed)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    truth = torch.autograd.grad(expected, wide, weights.double())
    sees_none = ~allowed.any(-1).expand(2, H, S)
    for share, size in ((PROBABILITIES_MADE_AGAIN, ONE_GROUP), (PROBABILITIES_KEPT, BOTH_SAMPLES)):
        monkeypatch.setattr(C, "KEPT_SHARE", share)
        monkeypatch.setattr(C, "PRODUCT_SCORES", size)
        q, k, v = inputs
        out = A.attention(q, k, v, attention_rule(queries, **keywords))
        ours = torch.autograd.grad(out, inputs, weights)
        assert out.dtype == torch.bfloat16
        assert relative(out, expected) < 5e-3  # the results alone, rounded: 2e-3
        assert [relative(x, y) < 6e-3 for x, y in zip(ours, truth, strict=True)] == [True] * 3
        assert (out[sees_none] == 0).all()
        assert (ours[0][sees_none] == 0).all()


def settings(rule: R.AttentionRule) -> tuple[Any, ...]:
    """What the operators take beside tensors and scale, without dropout."""
    return (*rule[: R.N_TENSORS], None, None, None, rule.causal, rule.window, 0.0)


@pytest.mark.parametrize("words", ["BLOOM in documents", "BERT", "Mistral"])
def test_dropped_are_the_probabilities_that_the_plain_formula_drops(words, monkeypatch):
    monkeypatch.setattr(C, "KEPT_SHARE", PROBABILITIES_KEPT)  # but for dropout
    queries = in_order(S)
    keywords, _, _ = said_twice(RULES[words], queries, queries)
    rule = attention_rule(queries, **keywords)
    drop = dropout(0.3, HEADS, SAMPLES)
    inputs = [x.requires_grad_() for x in qkv(S, torch.bfloat16, shared_by=2)]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    weights = torch.randn(2, H, S, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    results = []
    for q, k, v in (inputs, wide):
        out = A.attention(q, k, v, rule, drop)
        results.append((out, *torch.autograd.grad(out, (q, k, v), weights.to(out.dtype))))
    errors = [relative(x, y) for x, y in zip(*results, strict=True)]
    assert max(errors) < 8e-3, errors


def test_probabilities_are_kept_where_they_take_no_more_memory_than_q_k_v_and_the_result(monkeypatch):
    monkeypatch.setitem(R.CHUNK_QUERIES, "cpu", 256)
    monkeypatch.setattr(C, "SHORT_CHUNK", 128)
    monkeypatch.setattr(C, "CACHED_SCORES", 2**18)
    kept = {}
    for n in (256, 512):
        q, k, v = (torch.zeros(2, 8, n, 64, dtype=torch.bfloat16) for _ in range(3))
        rule = attention_rule(torch.arange(n).expand(2, -1), causal=True)
        _, _, probabilities = C.attention_cpu(q, k, v, 0.125, *settings(rule))
        kept[n] = probabilities.numel()
    # Two chunks of queries, of which the first sees half of the keys.
    assert kept == {256: 2 * 8 * 128 * (128 + 256), 512: 0}


def test_a_sample_and_a_head_have_the_same_numbers_whatever_else_is_in_the_batch():
    q, k, v = (torch.cat([x, x.flip(0)]) for x in qkv(100, torch.bfloat16))
    places = torch.arange(100).expand(4, -1)
    several = A.attention(q, k, v, attention_rule(places, causal=True, slopes=SLOPES))
    rule = attention_rule(places[:1], causal=True, slopes=SLOPES[2:4])
    one = A.attention(q[:1, 2:4], k[:1, 2:4], v[:1, 2:4], rule)
    torch.testing.assert_close(one, several[:1, 2:4], atol=0, rtol=0)


def test_scores_far_apart_and_a_scale_do_not_overflow():
    q, k, v = qkv(100, torch.bfloat16)
    scale = 40.0
    rule = attention_rule(in_order(100), causal=True, slopes=SLOPES)
    out = A.attention(q, k, v, rule, scale=scale)
    added = SLOPES.double()[:, None, None] * (torch.arange(100) - torch.arange(100)[:, None])
    allowed = torch.ones(100, 100, dtype=torch.bool).tril()
    # Scores of hundreds, as products that bfloat16 rounds.
    scores = (q @ k.mT).double() * scale + added
    expected = scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ v.double()
    assert relative(out, expected) < 5e-3


def test_no_number_is_denormal(monkeypatch):
    monkeypatch.setattr(C, "CACHED_SCORES", 2**14)
    seen: list[bool] = []

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.is_floating_point():
                seen.append(bool(((out != 0) & (out.abs() < torch.finfo(out.dtype).tiny)).any()))
            return out

    q, k, v = qkv(256, torch.bfloat16)
    rule = attention_rule(in_order(256), causal=True, slopes=SLOPES)
    fields = settings(rule)
    with Watched():
        out, *found = C.attention_cpu._init_fn(q, k, v, 0.25, *fields)
        C.attention_cpu_backward._init_fn(out, q, k, v, *found, 0.25, *fields)
    assert len(seen) > 100
    assert not any(seen)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own doing
def test_a_compiled_block_with_the_split_of_its_projection_has_the_gradients_of_the_eager_one():
    rule = attention_rule(in_order(S), causal=True, slopes=SLOPES)

    def block(qkv: Tensor, rule: R.AttentionRule) -> Tensor:
        q, k, v = qkv.unflatten(-1, (-1, 3, 16)).transpose(1, 2).unbind(3)
        return A.attention(q, k, v, rule).transpose(1, 2).flatten(2)

    generator = torch.Generator().manual_seed(1)
    fused = torch.randn(2, S, H * 3 * 16, generator=generator).bfloat16().requires_grad_()
    weights = torch.randn(2, S, H * 16, generator=generator).bfloat16()
    torch._dynamo.reset()
    found = []
    for form in (block, torch.compile(block, backend="aot_eager", fullgraph=True)):
        out = form(fused, rule)
        found.append((out, torch.autograd.grad(out, fused, weights)[0]))
    torch.testing.assert_close(found[1], found[0], atol=0, rtol=0)
    assert not found[0][1].isnan().any()


def test_the_operators_keep_torchs_contract():
    q, k, v = (x[:, :, :9] for x in qkv(12, torch.bfloat16, shared_by=2))
    fields = settings(attention_rule(in_order(9), causal=True, slopes=SLOPES))
    torch.use_deterministic_algorithms(False)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(C.attention_cpu, (q, k, v, 0.25, *fields), test_utils=tests)
    out, *found = C.attention_cpu(q, k, v, 0.25, *fields)
    torch.library.opcheck(C.attention_cpu_backward, (out, q, k, v, *found, 0.25, *fields), test_utils=tests)
