"""Claims about attention.py; the truth is the textbook formula in fp64, over all pairs."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.autograd.graph import saved_tensors_hooks
from transformers.models.t5.modeling_t5 import T5Attention

from dtmega.ops import attention as A
from dtmega.ops import attention_rule as R
from dtmega.ops.attention_rule import AttentionRule, alibi_slopes, attention_rule
from dtmega.ops.block_mask import block_mask
from dtmega.ops.cpu.attention import attention_cpu
from tests.ops.test_attention_rule import Largest

H = 6
SLOPES = alibi_slopes(H).double()
FLEX_IN_EAGER = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that short sequences have several."""
    monkeypatch.setitem(R.CHUNK_QUERIES, "cpu", 64)


def textbook(q: Tensor, k: Tensor, v: Tensor, added: Tensor | float, allowed: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(K) + added) v over the allowed pairs, with everything written out."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5 + added
    probabilities = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    return torch.where(allowed.any(-1, keepdim=True), probabilities, 0.0) @ v


def distances(queries: Tensor, keys: Tensor) -> Tensor:
    """[B, 1, S, T]"""
    return keys[:, None, None, :] - queries[:, None, :, None]


def qkv(s: int, dtype: torch.dtype = torch.float64, n_keys: int = 0, shared_by: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(s)
    shapes = [(2, H, s, 16)] + 2 * [(2, H // shared_by, n_keys or s, 16)]
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]


def in_order(s: int) -> Tensor:
    return torch.arange(s).repeat(2, 1)


def causal_alibi(s: int, document_ids: Tensor | None = None, slopes: Tensor = SLOPES, **keywords: Any) -> AttentionRule:
    return attention_rule(in_order(s), causal=True, document_ids=document_ids, slopes=slopes, **keywords)


def packed(s: int) -> Tensor:
    """Two rows of documents with different boundaries: their ids."""
    starts = torch.zeros(2, s, dtype=torch.long)
    starts[0, 3::17] = 1
    starts[1, 5::11] = 1
    return starts.cumsum(1)


def padded(s: int) -> Tensor:
    """Two rows with different numbers of tokens: padding has a number of its own."""
    return -(in_order(s) >= torch.tensor([[s - 1], [s // 2]])).long()


def causal(s: int) -> Tensor:
    return torch.ones(s, s, dtype=torch.bool).tril()


@FLEX_IN_EAGER
@pytest.mark.parametrize("flex", [False, True])
def test_a_soft_cap_bounds_scores_before_the_bias_is_added(flex: bool):
    q, k, v = qkv(100)
    capped = 0.5 * torch.tanh(q @ k.mT / q.shape[-1] ** 0.5 / 0.5)
    biased = capped + SLOPES[:, None, None] * distances(in_order(100), in_order(100))
    expected = biased.masked_fill(~causal(100), -torch.inf).softmax(-1) @ v
    rule = causal_alibi(100)
    if flex:
        rule = rule._replace(strip=None, block_mask=block_mask(rule))
    torch.testing.assert_close(A.attention(q, k, v, rule, softcap=0.5), expected, rtol=1e-10, atol=1e-10)


@FLEX_IN_EAGER
@pytest.mark.parametrize("kernel", ["chunks", "products", "flex", "formula"])
def test_values_may_be_narrower_than_keys(kernel: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(A, "attention_cpu", attention_cpu)
    dtype, bound = (torch.bfloat16, 2e-2) if kernel == "products" else (torch.float64, 1e-6)
    q, k, v = qkv(100, dtype, shared_by=2)
    inputs = q, k, v[..., :10].clone()
    if kernel != "flex":  # whose backward needs a GPU
        inputs = q.requires_grad_(), k.requires_grad_(), inputs[2].requires_grad_()
    added = SLOPES[:, None, None] * distances(in_order(100), in_order(100))
    expected = textbook(*(x.double() for x in inputs), added, causal(100))
    rule = causal_alibi(100)
    if kernel == "flex":
        rule = rule._replace(strip=None, block_mask=block_mask(rule))
    found = [A.attention(*inputs, rule, softcap=1e6 if kernel == "formula" else None)]
    truth = [expected]
    if kernel != "flex":
        weights = torch.randn_like(expected)
        found += torch.autograd.grad((found[0] * weights).sum(), inputs)
        truth += torch.autograd.grad((expected * weights).sum(), inputs)
    for ours, theirs in zip(found, truth, strict=True):
        assert ours.shape == theirs.shape
        assert (ours.double() - theirs.double()).norm() / theirs.double().norm() < bound


@pytest.mark.parametrize("s", [1, 7, 64, 100, 256, 301])
def test_chunks_give_the_textbook_result(s):
    q, k, v = qkv(s)
    added = SLOPES[:, None, None] * distances(in_order(s), in_order(s))
    expected = textbook(q, k, v, added, causal(s))
    torch.testing.assert_close(A.attention(q, k, v, causal_alibi(s)), expected, atol=1e-12, rtol=1e-12)


S, T = 150, 90
WEIGHT = torch.randn(8, H, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
PLACES = {
    "in order": torch.arange(S),
    "in order from 9": torch.arange(9, S + 9),
    "two slices": torch.cat([torch.arange(40), torch.arange(200, S + 160)]),
}
RULES = {
    "bidirectional": (),
    "causal": ("causal",),
    "ALiBi": ("slopes",),
    "BLOOM": ("causal", "slopes"),
    "BLOOM in documents": ("causal", "slopes", "documents"),
    "window": ("window",),
    "Mistral": ("causal", "window"),
    "prefix": ("causal", "prefix"),
    "prefix in documents": ("causal", "prefix", "documents"),
    "BERT": ("padding",),
    "T5's encoder": ("padding", "table"),
    "T5's decoder": ("causal", "table"),
    "everything": ("causal", "window", "prefix", "documents", "slopes", "table"),
}


def said_twice(words: tuple[str, ...], queries: Tensor, keys: Tensor) -> tuple[dict[str, Any], Tensor, Tensor]:
    """A rule as keywords of `attention_rule`, and over all pairs: what is added [B, H, S, T], what is allowed."""
    ids = packed(S) if "documents" in words else padded(S)
    has_ids = "documents" in words or "padding" in words
    has_keys = keys is not queries
    n_keys = keys.shape[1]
    key_ids = ids.flip(1)[:, :n_keys] if has_keys else ids
    prefix = in_order(n_keys) < torch.tensor([[20], [70]])
    both_ways = "causal" not in words
    keywords: dict[str, Any] = {
        "causal": "causal" in words,
        "window": 25 if "window" in words else 0,
        "prefix": prefix if "prefix" in words else None,
        "slopes": SLOPES if "slopes" in words else None,
        "table": WEIGHT[R.distance_buckets(8, 20, both_ways)].T if "table" in words else None,
        "document_ids": ids if has_ids else None,
        "key_places": keys if has_keys else None,
        "key_document_ids": key_ids if has_ids and has_keys else None,
    }
    distance = distances(queries, keys)
    allowed = distance <= 0 if "causal" in words else torch.ones_like(distance, dtype=torch.bool)
    if "prefix" in words:
        allowed = allowed | prefix[:, None, None, :]
    if "window" in words:
        allowed = allowed & (distance > -25) & (distance < 25)
    if has_ids:
        allowed = allowed & (ids[:, None, :, None] == key_ids[:, None, None, :])
    added = torch.zeros(2, H, S, n_keys, dtype=torch.float64)
    if "slopes" in words:
        added = added + SLOPES[:, None, None] * distance
    if "table" in words:
        bucket = T5Attention._relative_position_bucket(distance, both_ways, 8, 20)
        added = added + WEIGHT[bucket].movedim(-1, 2).squeeze(1)
    return keywords, added, allowed


HOW = [(kernel, places) for kernel in ("chunks", "formula") for places in (*PLACES, "cross")]
HOW += [("FlexAttention", "two slices"), ("FlexAttention", "cross")]
# FlexAttention takes half a second in eager, and what reads the keys of others is in the rule, not in the kernel.
CROSS_IN_FLEX = ("everything", "BLOOM in documents", "T5's encoder")
EVERY_CASE = [
    pytest.param(words, *how, marks=pytest.mark.full if rare else ())
    for words in RULES
    for how in HOW
    for rare in [how == ("FlexAttention", "cross") and words not in CROSS_IN_FLEX]
]


@FLEX_IN_EAGER
@pytest.mark.parametrize(("words", "kernel", "places"), EVERY_CASE)
def test_every_kernel_gives_the_textbook_result_under_every_rule(words, places, kernel):
    queries = PLACES["in order" if places == "cross" else places].repeat(2, 1)
    keys = in_order(T) if places == "cross" else queries
    keywords, added, allowed = said_twice(RULES[words], queries, keys)
    rule = attention_rule(queries, **keywords)
    if kernel == "FlexAttention":
        rule = rule._replace(strip=None, block_mask=block_mask(rule))
    q, k, v = qkv(S, n_keys=keys.shape[1], shared_by=3)
    nothing = dropout(0.0, HEADS, SAMPLES) if kernel == "formula" else None
    out = A.attention(q, k, v, rule, nothing)
    closeness = 1e-6 if kernel == "formula" else 1e-11  # its scores are in fp32
    torch.testing.assert_close(out, textbook(q, k, v, added, allowed), atol=closeness, rtol=closeness)


@pytest.mark.parametrize("places", [*PLACES, "cross"])
@pytest.mark.parametrize("words", ["bidirectional", "BLOOM", "BLOOM in documents", "prefix", "BERT", "everything"])
def test_gradients_are_those_of_the_textbook(words, places):
    queries = PLACES["in order" if places == "cross" else places].repeat(2, 1)
    keys = in_order(T) if places == "cross" else queries
    without_table = tuple(word for word in RULES[words] if word != "table")
    keywords, added, allowed = said_twice(without_table, queries, keys)
    inputs = [x.requires_grad_() for x in qkv(S, n_keys=keys.shape[1], shared_by=2)]
    out = A.attention(*inputs, attention_rule(queries, **keywords))
    expected = textbook(*inputs, added, allowed)
    weights = torch.randn_like(out)
    ours, truth = (torch.autograd.grad((x * weights).sum(), inputs) for x in (out, expected))
    torch.testing.assert_close(ours, truth, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("places", PLACES)
def test_a_table_of_relative_places_learns_as_in_the_textbook(places):
    queries = PLACES[places].repeat(2, 1)
    weight = WEIGHT.clone().requires_grad_()
    inputs = [x.requires_grad_() for x in qkv(S)]
    rule = attention_rule(queries, document_ids=padded(S), table=weight[R.distance_buckets(8, 20, True)].T)
    bucket = T5Attention._relative_position_bucket(distances(queries, queries), True, 8, 20)
    allowed = padded(S)[:, None, :, None] == padded(S)[:, None, None, :]
    expected = textbook(*inputs, weight[bucket].movedim(-1, 2).squeeze(1), allowed)
    # Two layers share the rule.
    out = A.attention(*inputs, rule) + A.attention(*inputs, rule)
    weights = torch.randn_like(out)
    ours, truth = (torch.autograd.grad((x * weights).sum(), [weight, *inputs]) for x in (out, 2 * expected))
    torch.testing.assert_close(ours, truth, atol=1e-4, rtol=1e-4)  # its scores are in fp32


def test_a_packed_document_is_attended_as_if_it_stood_alone():
    q, k, v = qkv(100)
    out = A.attention(q, k, v, causal_alibi(100, packed(100)))
    alone = slice(3 + 17, 3 + 2 * 17)  # the third document of row 0
    expected = A.attention(*(x[:1, :, alone] for x in (q, k, v)), causal_alibi(17))
    torch.testing.assert_close(out[:1, :, alone], expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("documents", [False, True])
def test_the_bias_is_megatrons_slope_times_the_place_of_the_key(documents):
    # Megatron-DeepSpeed `ParallelTransformerLayer._build_alibi_tensor`: [H, 1, S], whatever the position ids are.
    s = 100
    q, k, v = qkv(s)
    ids = packed(s)
    allowed = causal(s) & (ids[:, None, :, None] == ids[:, None, None, :]) if documents else causal(s)
    expected = textbook(q, k, v, SLOPES[:, None, None] * torch.arange(s), allowed)
    out = A.attention(q, k, v, causal_alibi(s, ids if documents else None))
    torch.testing.assert_close(out, expected, atol=1e-11, rtol=1e-11)


LONG: dict[str, dict[str, Any]] = {
    "a strip": {"causal": True, "slopes": alibi_slopes(H)},
    "documents": {"causal": True, "slopes": alibi_slopes(H), "document_ids": packed(512)},
    "padding": {"document_ids": padded(512)},
    "two slices": {"causal": True, "slopes": alibi_slopes(H), "places": in_order(512) + 512 * (in_order(512) >= 256)},
}


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("case", LONG)
def test_no_tensor_of_all_pairs_is_made_and_none_that_a_kernel_needs_is_kept_for_backward(case, drops, monkeypatch):
    s, chunk = 512, 32
    monkeypatch.setitem(R.CHUNK_QUERIES, "cpu", chunk)
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    inputs = [x.requires_grad_() for x in qkv(s, torch.float32)]
    keywords = dict(LONG[case])
    places = keywords.pop("places", in_order(s))
    drop = dropout(0.1, HEADS, SAMPLES) if drops else None
    with Largest() as largest, saved_tensors_hooks(pack, lambda x: x):
        rule = attention_rule(places, **keywords)
        out = A.attention(*inputs, rule, drop)
        out.sum().backward()
    assert largest.elements <= 2 * H * chunk * s
    if not drops:  # the formula keeps its probabilities, chunk by chunk
        strip = 0 if rule.strip is None else rule.strip.untyped_storage().nbytes()
        assert sum(kept.values()) - strip < 10 * out.nbytes


def test_a_compiled_block_takes_in_the_gpu_kernel_without_a_warning():
    q, k, v = qkv(64, torch.float32)
    mask = block_mask(attention_rule(in_order(64), causal=True))

    def block(q: Tensor) -> Tensor:
        return A._flex_kernel("cuda")(q, k, v, block_mask=mask)

    torch._dynamo.reset()
    with torch.no_grad():
        out = torch.compile(block, backend="eager", fullgraph=True)(q)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out, expected)
    assert A._flex_kernel("cuda") is not A._flex_kernel("cpu")


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own doing
@pytest.mark.parametrize("kernel", ["chunks", "FlexAttention"])
def test_a_compiled_block_takes_each_batchs_rule_without_being_compiled_again(kernel):
    compilations = 0

    def counting(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        nonlocal compilations
        compilations += 1
        return graph.forward

    torch._dynamo.reset()
    block = torch.compile(A.attention, backend=counting, fullgraph=True)
    q, k, v = qkv(100, torch.float32)
    q.requires_grad_(kernel == "chunks")  # on a CPU FlexAttention has no gradient
    slopes = alibi_slopes(H)
    for ids in (packed(100), padded(100)):
        rule = causal_alibi(100, ids, slopes)
        if kernel == "FlexAttention":
            rule = rule._replace(strip=None, block_mask=block_mask(rule))
        out = block(q, k, v, rule)
        torch.testing.assert_close(out, A.attention(q, k, v, causal_alibi(100, ids, slopes)), atol=1e-5, rtol=1e-5)
    assert compilations == 1


def test_bf16_attention_keeps_the_bias_exact():
    s = 1024
    q, k, v = qkv(s, torch.bfloat16)
    added = SLOPES[:, None, None] * distances(in_order(s), in_order(s))
    expected = textbook(q.double(), k.double(), v.double(), added, causal(s))
    out = A.attention(q, k, v, causal_alibi(s, slopes=alibi_slopes(H))).double()
    assert (out - expected).norm() / expected.norm() < 4e-3  # a bias rounded to bf16 gives 1e-1


def dropout(p: float, heads: Tensor, samples: Tensor) -> A.Dropout:
    return A.Dropout(p, torch.tensor(77, dtype=torch.int32), heads, samples)


HEADS, SAMPLES = torch.arange(H, dtype=torch.int32), torch.tensor([11, 12])


def test_dropped_probabilities_are_the_textbook_ones_masked_and_rescaled():
    s, p = 200, 0.25
    q, k, _ = qkv(s)
    identity = torch.eye(s, dtype=torch.float64).expand(2, H, s, s)  # as values: the output is the probabilities
    rule = causal_alibi(s, slopes=alibi_slopes(H))
    dropped = A.attention(q, k, identity, rule, dropout(p, HEADS, SAMPLES))
    full = A.attention(q, k, identity, rule, dropout(0.0, HEADS, SAMPLES))
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], full[kept] / (1 - p))
    share = kept[:, :, causal(s)].double().mean().item()
    assert share == pytest.approx(1 - p, abs=0.005)


def test_the_mask_of_a_head_and_sample_does_not_depend_on_who_computes_it():
    s = 200
    q, k, v = qkv(s)
    whole = A.attention(q, k, v, causal_alibi(s), dropout(0.1, HEADS, SAMPLES))
    part = attention_rule(in_order(s)[1:], causal=True, slopes=SLOPES[2:4])
    mine = A.attention(q[1:, 2:4], k[1:, 2:4], v[1:, 2:4], part, dropout(0.1, HEADS[2:4], SAMPLES[1:]))
    torch.testing.assert_close(mine, whole[1:, 2:4], atol=1e-14, rtol=0)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("drops", [False, True])
def test_slices_of_a_sequence_attend_to_all_keys_as_the_whole_does(documents, drops):
    # A rank of two holds the slices 0 and 3, the other 1 and 2; one of them has the keys in the order they came in.
    s = 200
    q, k, v = qkv(s, torch.float32)
    ids = packed(s)
    drop = dropout(0.2, HEADS, SAMPLES) if drops else None
    slices = torch.arange(s).view(4, 50)
    slopes = alibi_slopes(H)
    whole = A.attention(q, k, v, causal_alibi(s, ids if documents else None, slopes), drop)
    for mine, keys in (
        (slices[[0, 3]].flatten(), slices[[0, 3, 1, 2]].flatten()),
        (slices[1:3].flatten(), slices.flatten()),
    ):
        rule = attention_rule(
            mine.repeat(2, 1),
            causal=True,
            slopes=slopes,
            document_ids=ids[:, mine] if documents else None,
            key_places=keys.repeat(2, 1),
            key_document_ids=ids[:, keys] if documents else None,
        )
        out = A.attention(q[:, :, mine], k[:, :, keys], v[:, :, keys], rule, drop)
        torch.testing.assert_close(out, whole[:, :, mine], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("width", "fused"), [(256, True), (257, False)])
def test_only_heads_of_at_most_256_channels_run_in_flex_attention(width: int, fused: bool, monkeypatch):
    places = torch.arange(8)[None]
    rule = attention_rule(places, causal=True)
    masked = rule._replace(strip=None, block_mask=block_mask(rule))
    q, k, v = torch.randn(3, 1, 2, 8, width).unbind()
    calls: list[Tensor] = []

    def flex(q: Tensor, *_: Any) -> Tensor:
        calls.append(q)
        return q

    monkeypatch.setattr(A, "_flex", flex)
    # A soft cap needs the plain formula, as a learned bias does, wherever FlexAttention does not run.
    out = A.attention(q, k, v, masked, softcap=3.0)
    assert len(calls) == fused
    if not fused:
        torch.testing.assert_close(out, A.attention(q, k, v, rule, softcap=3.0))


def test_flex_attention_is_compiled_so_that_backward_leaves_its_inputs_as_they_are(monkeypatch):
    donates: list[bool] = []
    monkeypatch.setattr(torch, "compile", lambda *_, **__: lambda: donates.append(functorch_config.donated_buffer))
    A._compiled_flex.cache_clear()
    A._compiled_flex()()
    A._compiled_flex.cache_clear()
    assert donates == [False]
