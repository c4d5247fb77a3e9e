"""Claims about models/layers.py."""

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dtmega import config
from dtmega.config.families.bloom import BloomKeys
from dtmega.config.families.gpt import GPTKeys
from dtmega.interop import stored
from dtmega.models.bloom import Bloom
from dtmega.models.gpt import GPT
from dtmega.models.initial import init_weights
from dtmega.models.layers import MLP, FusedAttention, KeyedDropout, MixedLayerNorm, gelu
from dtmega.models.model import Model
from dtmega.ops.attention_rule import alibi_slopes, attention_rule
from tests.models import test_bert, test_bloom_definition, test_t5
from tests.ops import test_key_value_cache

PLACES = torch.arange(96).repeat(4, 1)


def dropped(x: torch.Tensor, sample_ids: list[int], places: torch.Tensor) -> torch.Tensor:
    site = KeyedDropout(0.1)
    site.key.fill_(1234)
    return site(x, torch.tensor(sample_ids), places)


def test_a_dropout_mask_is_the_same_when_batch_and_sequence_are_cut_in_any_order():
    x = torch.ones(4, 96, 32)
    whole = dropped(x, [5, 6, 7, 2**40], PLACES)
    assert torch.equal(dropped(x[2:, 48:], [7, 2**40], PLACES[2:, 48:]), whole[2:, 48:])
    slices = torch.cat([torch.arange(24), torch.arange(72, 96)])
    assert torch.equal(dropped(x[:, slices], [5, 6, 7, 2**40], PLACES[:, slices]), whole[:, slices])


def test_dropout_in_evaluation_is_the_identity():
    site = KeyedDropout(0.5).eval()
    x = torch.ones(1, 2, 3)
    assert site(x, None, PLACES[:1, :2]) is x


def attended(
    scaling: bool, dtype: torch.dtype, dropout: float, size: float = 1.0, documents: bool = False
) -> list[torch.Tensor]:
    """The output of the 24th layer's attention and the gradient of its input, for queries and keys of this size."""
    cfg = BloomKeys(hidden_size=32, n_heads=2, vocab_size=9, attention_dropout=dropout, query_key_layer_scaling=scaling)
    attention = FusedAttention(cfg, number=24)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.normal_(generator=generator).mul_(0.1)
        rows = attention.qkv.bias.unflatten(0, (2, 3, 16))
        rows[:, :2] = size
    x = (0.1 * torch.randn(1, 70, 32, generator=generator)).to(dtype).requires_grad_()
    places = torch.arange(70)[None]
    ids = places // 30 if documents else None
    rule = attention_rule(places, causal=True, document_ids=ids, slopes=alibi_slopes(2), fused=False)
    out = attention.to(dtype)(x, rule, torch.arange(2, dtype=torch.int32), torch.tensor([7]))
    out.square().sum().backward()
    assert x.grad is not None
    return [out.detach(), x.grad]


@pytest.mark.parametrize(
    ("dropout", "documents"),
    [(0.0, False), (0.0, True), (0.1, False)],
    ids=["a kernel", "documents", "the plain formula"],
)
def test_query_key_layer_scaling_changes_nothing_but_rounding(dropout: float, documents: bool):
    scaled, plain = (attended(on, torch.float32, dropout, documents=documents) for on in (True, False))
    for ours, theirs in zip(scaled, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_query_key_layer_scaling_keeps_products_in_float16_that_would_be_infinite():
    # 16 channels x 80 x 80 = 102,400 is more than 65,504; Megatron's are divided by 24 sqrt(16).
    infinite, _ = attended(False, torch.float16, 0.1, size=80.0)
    assert infinite.isnan().any()
    assert all(found.isfinite().all() for found in attended(True, torch.float16, 0.1, size=80.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_norm_of_the_fp32_stream_rounds_its_output_once(dtype: torch.dtype):
    norm = MixedLayerNorm(64).to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        norm.weight.normal_(generator=generator)
        norm.bias.normal_(generator=generator)
    x = 1000 + torch.randn(5, 64, generator=generator)  # as which float16 would lose half of
    truth = torch.nn.functional.layer_norm(x.double(), (64,), norm.weight.double(), norm.bias.double(), norm.eps)
    assert norm(x).dtype == dtype
    torch.testing.assert_close(norm(x), truth.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-4)


@pytest.mark.parametrize("kind", [Bloom, GPT])
def test_the_stream_is_fp32_from_the_embedding_to_the_last_norm_and_branches_are_not(kind):
    section = {Bloom: BloomKeys, GPT: GPTKeys}[kind]
    model = kind(section(vocab_size=32, hidden_size=16, n_layers=2, n_heads=2, fp32_residual=True)).half()
    init_weights(model, 0)
    model.init_buffers(0)
    seen: dict[str, torch.dtype] = {}
    for name, module in model.named_modules():
        if name in ("layers.0", "layers.1", "layers.1.attn", "layers.1.mlp", "norm"):
            module.register_forward_hook(lambda _, __, out, name=name: seen.__setitem__(name, out.dtype))
    tokens = torch.arange(24).view(2, 12)
    model(tokens, labels=tokens)["lm"].backward()
    stream, branch = ("layers.0", "layers.1"), ("layers.1.attn", "layers.1.mlp", "norm")
    assert seen == dict.fromkeys(stream, torch.float32) | dict.fromkeys(branch, torch.float16)


def test_an_fp32_stream_that_a_norm_would_round_is_refused():
    for keys in ({"apply_residual_connection_post_layernorm": True}, {"name": "bert", "norm": "post"}):
        with pytest.raises(ValueError, match=r"expected fp32_residual=false, got true"):
            config.model_section({"name": "bloom", **keys, "fp32_residual": True}, "here")


def shazeers(name: str, x: torch.Tensor) -> torch.Tensor:
    """Megatron-DeepSpeed's `_GLU`: the first half of the last dim times the activation of the second."""
    x1, x2 = x.chunk(2, dim=-1)
    activation = {"geglu": torch.nn.functional.gelu, "swiglu": torch.nn.functional.silu}
    activation |= {"reglu": torch.nn.functional.relu, "liglu": torch.nn.Identity()}
    return x1 * activation[name](x2)


@pytest.mark.parametrize("name", ["geglu", "swiglu", "reglu", "liglu"])
def test_a_gated_feed_forward_is_the_original_with_values_and_gates_side_by_side(name: str):
    mlp = MLP(BloomKeys(hidden_size=8, n_heads=2, ffn_hidden_size=12, glu=name)).double()
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    halves = torch.cat([torch.arange(0, 24, 2), torch.arange(1, 24, 2)])
    expected = mlp.down(shazeers(name, torch.nn.functional.linear(x, mlp.up.weight[halves], mlp.up.bias[halves])))
    torch.testing.assert_close(mlp(x), expected)


def test_a_gated_model_is_no_directory_of_transformers():
    for family, keys in (("bloom", {}), ("gpt", {}), ("bert", {})):
        model = config.model_section({"name": family, "glu": "geglu", **keys}, "here")
        with pytest.raises(ValueError, match="no gated feed-forward: expected glu='none', got 'geglu'"):
            stored.of(model).export(None, Path("nowhere"), model, None)


def test_a_compiled_gelu_and_its_gradient_are_the_papers_without_a_hyperbolic_tangent():
    operations: list[str] = []

    def look(graph: torch.fx.GraphModule, inputs: object) -> object:
        operations.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    x = torch.linspace(-12, 12, 1001, dtype=torch.float64, requires_grad=True)
    u = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    expected = 0.5 * x * (1 + torch.tanh(u))
    compiled = torch.compile(lambda x: gelu(x, "tanh"), backend=look)
    found = compiled(x)
    torch.testing.assert_close(found, expected)
    one, other = (torch.autograd.grad(y.sum(), x)[0] for y in (found, expected))
    torch.testing.assert_close(one, other)
    assert any("sigmoid" in name for name in operations)
    in_bf16 = x.detach().bfloat16()
    truth = torch.nn.functional.gelu(in_bf16.double(), approximate="tanh").bfloat16()
    torch.testing.assert_close(compiled(in_bf16), truth, rtol=2**-8, atol=1e-6)


FAMILIES: dict[str, Callable[[], tuple[Model, dict[str, torch.Tensor]]]] = {
    "bloom": lambda: (test_bloom_definition.model_of(query_key_layer_scaling=True), test_bloom_definition.batch()),
    "gpt": lambda: (test_key_value_cache.a_gpt(), test_bloom_definition.batch()),
    "llama": lambda: (test_key_value_cache.DECODERS["llama"](), test_bloom_definition.batch()),
    "bert": lambda: (test_bert.small(), test_bert.batch()),
    "t5": lambda: (test_t5.small(**test_t5.MEGATRON), test_t5.batch()),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_marked_as_unseen_has_no_gradient_in_float64_and_the_other_biases_of_attention_have_one(family: str):
    model, batch = FAMILIES[family]()
    model.double()
    marked = model.unseen()
    model(**batch)["lm"].backward()
    biases = {name: p for name, p in model.named_parameters() if re.search(r"\.(qkv|q|k|v)\.bias$", name)}
    assert marked.keys() <= biases.keys()
    assert bool(marked) == (family != "llama")  # which has no biases there
    for name, bias in biases.items():
        assert bias.grad is not None
        size = bias.grad.abs()
        expected = marked.get(name, torch.zeros_like(bias, dtype=torch.bool))
        largest = 1.0 if expected.all() else size.max()
        assert torch.equal(size < 1e-10 * largest, expected), name
