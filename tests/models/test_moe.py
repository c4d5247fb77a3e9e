"""models/moe.py against transformers' mixtures: numbers, and weights both ways."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

from dtmega import config, families
from dtmega.__main__ import main as command
from dtmega.cli.convert import to_checkpoint
from dtmega.config.families.moe import MoEKeys
from dtmega.distributed import exit_codes
from dtmega.interop.formats import moe as names
from dtmega.interop.formats.whole import as_theirs
from dtmega.models import experts, routing
from dtmega.models.generate import Sampling, generate
from dtmega.models.moe import Mixture, MoE
from dtmega.ops import cost
from dtmega.ops.key_value_cache import KeyValueCache
from dtmega.training.checks import check
from dtmega.training.recompute import recompute
from tests.interop.hf.files.test_ours import Memory
from tests.models import test_llama
from tests.models.test_llama import S, V, batch, error

OURS: dict[str, Any] = {"vocab_size": V, "hidden_size": 48, "n_layers": 2, "n_heads": 6, "n_kv_heads": 2}
THEIRS: dict[str, Any] = {
    **{"vocab_size": V, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6},
    **{"num_key_value_heads": 2, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 256},
    **{"attn_implementation": "eager"},
}
QWEN3: dict[str, Any] = {"num_experts": 8, "moe_intermediate_size": 24, "intermediate_size": 64, "head_dim": 16}


def qwen3(**keys: Any) -> tuple[Any, Any, dict[str, Any]]:
    theirs = Qwen3MoeForCausalLM(Qwen3MoeConfig(**THEIRS, **QWEN3, **keys))
    ours = {"n_experts": 8, "expert_ffn_hidden_size": 24, "ffn_hidden_size": 64, "kv_channels": 16, "qk_norm": True}
    ours |= {"normalize_weights": keys.get("norm_topk_prob", False)}
    return names.QWEN3, theirs, ours | {"dense_layers": len(keys.get("mlp_only_layers", []))}


def mixtral() -> tuple[Any, Any, dict[str, Any]]:
    theirs = MixtralConfig(**THEIRS, num_local_experts=4, intermediate_size=40, sliding_window=20)
    ours = {"n_experts": 4, "expert_ffn_hidden_size": 40, "window": 20, "rope_theta": 1e6}
    return names.MIXTRAL, MixtralForCausalLM(theirs), ours


def deepseek(q_lora_rank: int | None) -> tuple[Any, Any, dict[str, Any]]:
    theirs = DeepseekV3Config(
        **THEIRS | {"num_key_value_heads": 6},
        **{"intermediate_size": 64, "moe_intermediate_size": 24, "n_routed_experts": 8, "n_shared_experts": 2},
        **{"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1},
        **{"kv_lora_rank": 20, "q_lora_rank": q_lora_rank},
        **{"qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 12},
    )
    ours = {"n_experts": 8, "expert_ffn_hidden_size": 24, "ffn_hidden_size": 64, "shared_experts": 2}
    ours |= {"expert_groups": 4, "groups_per_token": 2, "routed_scale": 2.5, "dense_layers": 1}
    ours |= {"router_scores": "sigmoid", "router_bias": True, "n_kv_heads": 0}
    ours |= {"kv_latent_size": 20, "q_latent_size": q_lora_rank or 0, "rotary_channels": 6}
    return names.DEEPSEEK, DeepseekV3ForCausalLM(theirs), ours | {"kv_channels": 16, "v_channels": 12}


KINDS = {
    "Mixtral": mixtral,
    "Qwen3-MoE": lambda: qwen3(norm_topk_prob=True),
    "Qwen3-MoE with a dense layer, weights as they are": lambda: qwen3(mlp_only_layers=[0]),
    "DeepSeek-V3": lambda: deepseek(28),
    "DeepSeek-V3 with queries from the hidden state": lambda: deepseek(None),
}


def small(cfg: MoEKeys) -> MoE:
    model = test_llama.small(cfg)
    assert isinstance(model, MoE)
    return model


def pair(kind: str) -> tuple[MoE, Any, Any]:
    """The same weights in both, and the format of the second."""
    form, theirs, keys = KINDS[kind]()
    ours = small(MoEKeys(**OURS | keys, max_position_embeddings=256))
    with torch.no_grad():
        for _, bias in ours.stored_buffers():
            bias.normal_(std=0.3)
        tensors = {name: tensor.detach() for name, tensor in ours.stored_tensors()}
        theirs.load_state_dict(as_module(ours, form, tensors))
    return ours, theirs, form


def as_module(ours: MoE, form: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors by the names and shapes of transformers' modules, which stack and join experts."""
    source = as_theirs(Memory(tensors), form, ours.cfg, families.of(ours.cfg).build)
    found = {name: source.read(name) for name in source.tensors}
    result = {name: t for name, t in found.items() if ".experts." not in name}
    result = {name.replace("block_sparse_moe", "mlp"): t for name, t in result.items()}
    for layer, block in ours.layers.items():
        if block.mixture is None:
            continue
        prefix = f"layers.{layer}.mixture.experts."
        theirs = f"model.layers.{layer}.mlp.experts."
        result[f"{theirs}gate_up_proj"] = torch.cat([tensors[f"{prefix}gate"], tensors[f"{prefix}up"]], dim=1)
        result[f"{theirs}down_proj"] = tensors[f"{prefix}down"]
    return result


@pytest.mark.parametrize("kind", KINDS)
def test_logits_loss_and_every_gradient_equal_those_of_transformers(kind: str):
    ours, theirs, form = pair(kind)
    tokens, labels = batch()
    logits = theirs(tokens).logits
    assert error(ours(tokens), logits) < 1e-5
    loss = ours(tokens, labels)["lm"]
    truth = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    assert loss.item() == pytest.approx(truth.item(), rel=1e-6)
    loss.backward()
    truth.backward()
    found = as_module(ours, form, gradients(ours) | dict(ours.stored_buffers()))
    expected = gradients(theirs) | {name: t for name, t in theirs.state_dict().items() if name.endswith("bias")}
    assert found.keys() == expected.keys()
    assert {name: e for name, grad in expected.items() if not (e := error(found[name], grad)) < 1e-5} == {}


@pytest.mark.parametrize("kind", KINDS)
def test_a_directory_is_the_same_bit_for_bit_after_reading_and_writing_it(kind: str, tmp_path: Path):
    _, theirs, _ = pair(kind)
    theirs.save_pretrained(tmp_path / "theirs")
    there, back = str(tmp_path / "ours"), str(tmp_path / "back")
    assert command(["convert", "--from", "hf", str(tmp_path / "theirs"), "--to", "dtmega", there]) == exit_codes.DONE
    assert command(["convert", "--from", "dtmega", there, "--to", "hf", back]) == exit_codes.DONE
    again = AutoModelForCausalLM.from_pretrained(back)
    assert type(again) is type(theirs)
    expected = theirs.state_dict()
    assert {name for name, t in again.state_dict().items() if not torch.equal(t, expected[name])} == set()
    stored = json.loads((Path(back) / "config.json").read_text())
    assert stored["num_experts_per_tok"] == 2


def test_a_directory_says_that_it_has_no_capacity_and_has_the_logits_that_generation_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    ours = small(MoEKeys(**OURS, n_experts=4, capacity_factor=0.5))
    there, back = str(tmp_path / "ours"), str(tmp_path / "back")
    to_checkpoint.write(there, Memory({name: p.detach() for name, p in ours.named_parameters()}), ours.cfg)
    assert command(["convert", "--from", "dtmega", there, "--to", "hf", back]) == exit_codes.DONE
    assert "[model] capacity_factor=0.5 is not in the folder" in capsys.readouterr().out
    tokens, labels = batch()
    logits = AutoModelForCausalLM.from_pretrained(back)(tokens).logits
    assert error(ours(tokens), logits) < 1e-5
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    assert abs(ours(tokens, labels)["lm"].item() / loss.item() - 1) > 1e-4


def test_the_feed_forward_of_deepseek_v3_is_that_of_transformers():
    theirs = DeepseekV3MoE(
        DeepseekV3Config(
            **{"hidden_size": 48, "moe_intermediate_size": 24, "n_routed_experts": 16, "n_shared_experts": 2},
            **{"num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
        )
    )
    keys: dict[str, Any] = {"n_experts": 16, "experts_per_token": 3, "expert_ffn_hidden_size": 24, "shared_experts": 2}
    keys |= {"expert_groups": 4, "groups_per_token": 2, "routed_scale": 2.5}
    cfg = MoEKeys(hidden_size=48, n_heads=6, router_scores="sigmoid", router_bias=True, **keys)
    ours = Mixture(cfg)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in [*ours.parameters(), *ours.buffers()]:
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
        theirs.load_state_dict(of_deepseek(dict(ours.named_parameters()) | dict(ours.named_buffers())))
    x = torch.randn(2, 40, 48, generator=generator)
    of_ours, of_theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, truth = ours(of_ours, None)[0], theirs(of_theirs)
    assert error(out, truth) < 1e-5
    out.square().sum().backward()
    truth.square().sum().backward()
    found, expected = of_deepseek(gradients(ours)), gradients(theirs)
    assert found.keys() == expected.keys()
    found["x"], expected["x"] = of_ours.grad, of_theirs.grad  # pyright: ignore[reportArgumentType]
    assert {name: e for name, grad in expected.items() if not (e := error(found[name], grad)) < 1e-5} == {}


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def of_deepseek(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A mixture's tensors by the names of transformers' DeepseekV3MoE."""
    renamed = {
        "gate.weight": tensors["router.weight"],
        "experts.gate_up_proj": torch.cat([tensors["experts.gate"], tensors["experts.up"]], 1),
        "experts.down_proj": tensors["experts.down"],
    }
    for name in ("gate", "up", "down"):
        renamed[f"shared_experts.{name}_proj.weight"] = tensors[f"shared.{name}.weight"]
    if "router.bias" in tensors:
        renamed["gate.e_score_correction_bias"] = tensors["router.bias"]
    return renamed


def naive(module: experts.Experts, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """A loop over tokens; number E is no expert."""
    rows = []
    for token, numbers, factors in zip(x.flatten(0, 1), chosen, weights, strict=True):
        parts = []
        for e, factor in zip(numbers.tolist(), factors, strict=True):
            # Number E counts for nothing, whichever expert computes it.
            number, counts = e % len(module.gate), float(e < len(module.gate))
            inner = F.silu(module.gate[number] @ token) * (module.up[number] @ token)
            parts.append(counts * factor * (module.down[number] @ inner))
        rows.append(torch.stack(parts).sum(0))
    return torch.stack(rows).view(x.shape)


@pytest.mark.parametrize(
    "chosen",
    [
        *([[2, 0], [2, 1], [0, 2]], [[3, 1]], [[1, 0], [1, 0], [1, 0], [1, 0]]),
        *([[4, 2], [4, 4], [1, 4]], [[4, 4], [4, 4]]),
    ],
    ids=[
        *("an expert without tokens", "one token", "all tokens to the same experts"),
        *("pairs without an expert", "no pair has an expert"),
    ],
)
def test_experts_are_a_loop_over_tokens(chosen: list[list[int]]):
    generator = torch.Generator().manual_seed(0)
    module = experts.Experts(4, 8, 12)
    for p in module.parameters():
        nn.init.normal_(p, generator=generator)
    numbers = torch.tensor(chosen)
    x = torch.randn(1, len(chosen), 8, generator=generator, requires_grad=True)
    weights = torch.rand(numbers.shape, generator=generator).masked_fill(numbers == 4, 0.0).requires_grad_()
    inputs = [x, weights, *module.parameters()]
    out, truth = module(x, numbers, weights), naive(module, x, numbers, weights)
    torch.testing.assert_close(out, truth, rtol=1e-5, atol=1e-5)
    found = torch.autograd.grad(out.square().sum(), inputs)
    expected = torch.autograd.grad(truth.square().sum(), inputs)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_of_equal_scores_the_experts_with_smaller_numbers_are_chosen():
    router = routing.Router(MoEKeys(n_experts=64, experts_per_token=3))
    scores = torch.zeros(100, 64)
    scores[:, 40] = 1.0
    assert router.choose(scores).tolist() == [[40, 0, 1]] * 100


BIAS = torch.tensor([0.3, -0.2, 0.1, -0.4])


def better_half(scores: Tensor) -> Tensor:
    """The experts 0 and 1, or 2 and 3."""
    half = scores.unflatten(1, (2, 2)).sum(-1).argmax(1)
    return torch.stack([2 * half, 2 * half + 1], dim=1)


@pytest.mark.parametrize(
    ("keys", "choose"),
    [
        ({}, lambda scores: scores.topk(2).indices),
        ({"router_scores": "sigmoid", "router_bias": True}, lambda scores: (scores + BIAS).topk(2).indices),
        ({"expert_groups": 2}, better_half),
    ],
    ids=["largest scores", "bias", "groups"],
)
def test_the_balance_loss_is_the_closed_form_of_each_document(keys: dict[str, Any], choose: Callable[[Tensor], Tensor]):
    cfg = MoEKeys(n_experts=4, experts_per_token=2, hidden_size=16, n_heads=2, **keys)
    router = routing.Router(cfg)
    if router.bias is not None:
        router.bias += BIAS
    generator = torch.Generator().manual_seed(0)
    nn.init.normal_(router.weight, generator=generator)
    x = torch.randn(2, 10, 16, generator=generator)
    labels = torch.zeros(2, 10, dtype=torch.int64)
    labels[1, 7:] = -100
    documents = torch.tensor([[0] * 4 + [1] * 6, [0] * 7 + [1] * 3])
    found = routing.report(router(x), routing.texts_of(labels, documents, None, cfg), True, router.steered)
    logits = (x @ router.weight.t()).detach().double()
    balance = z = 0.0
    load, of_scores = torch.zeros(4), torch.zeros(4)
    for row, first, end in ((0, 0, 4), (0, 4, 10), (1, 0, 7)):
        here = logits[row, first:end]
        scores = here.sigmoid() if cfg.router_scores == "sigmoid" else here.softmax(-1)
        probabilities = scores / scores.sum(-1, keepdim=True)
        counts = torch.zeros(4)
        for best, used in zip(here.topk(2).indices.tolist(), choose(scores).tolist(), strict=True):
            counts[best] += 1
            load[used] += 1
        f = 4 / (2 * (end - first)) * counts
        balance += (end - first) * (f * probabilities.mean(0)).sum()
        z += here.logsumexp(-1).square().sum()
        of_scores += counts
    assert found.balance.item() == pytest.approx(float(balance), rel=1e-6)
    assert found.z.item() == pytest.approx(float(z), rel=1e-6)
    assert found.load.tolist() == load.tolist()
    assert torch.equal(load, of_scores) is not router.steered


BALANCED: dict[str, Any] = {"n_experts": 4, "router_bias": True, "router_bias_rate": 0.125, "dense_layers": 1}


def test_under_cp_the_documents_of_a_row_are_more_than_the_tokens_of_a_rank(monkeypatch):
    """The second of two ranks has the documents 2 and 3 of the first row, and 0 and 1 of the second."""
    monkeypatch.setattr(routing.functional, "all_reduce", lambda sums, *_: sums)
    ranks: Any = SimpleNamespace(group=SimpleNamespace(size=lambda: 2))
    labels, documents = torch.zeros(2, 2, dtype=torch.int64), torch.tensor([[2, 3], [0, 1]])
    texts = routing.texts_of(labels, documents, ranks, MoEKeys())
    assert len(texts.document.unique()) == 4
    assert texts.length[texts.document].tolist() == [1] * 4


def test_a_router_bias_follows_the_counts_of_one_training_step_and_of_nothing_else():
    model = small(MoEKeys(**OURS | {"n_layers": 3}, **BALANCED))
    recompute(model, config.Recompute(mode="full"))
    tokens, labels = batch()
    labels[0, 50:] = -100
    model(tokens, labels)["lm"].backward()
    model.eval()
    model(tokens, labels)
    model.train()
    counts = model.counts_of_step()
    assert counts.sum(1).tolist() == [0, 2 * (50 + S), 2 * (50 + S)]  # two experts of each labelled token
    model.after_step(counts.clone(), skipped=True)
    biases = dict(model.stored_buffers())
    assert [*biases] == ["layers.1.mixture.router.bias", "layers.2.mixture.router.bias"]
    assert not any(bias.any() for bias in biases.values())
    assert not model.counts_of_step().any()
    model.after_step(torch.tensor([[0.0] * 4, [10, 6, 8, 8], [1, 0, 0, 0]]), skipped=False)
    assert biases["layers.1.mixture.router.bias"].tolist() == [-0.125, 0.125, 0, 0]
    assert biases["layers.2.mixture.router.bias"].tolist() == [-0.125, 0.125, 0.125, 0.125]
    model.requires_grad_(False)
    model.after_step(torch.tensor([[0.0] * 4, [10, 6, 8, 8], [1, 0, 0, 0]]), skipped=False)
    assert biases["layers.1.mixture.router.bias"].tolist() == [-0.125, 0.125, 0, 0]


def test_an_expert_that_no_token_uses_is_named_once():
    loads = routing.Loads()
    assert (loads.unused(), loads.numbers()) == ("", {})
    loads.add(torch.tensor([[0.0, 0, 0], [4, 0, 5]]))
    loads.add(torch.tensor([[0.0, 0, 0], [6, 0, 0]]))
    assert loads.numbers() == {"expert_load_max": 3.0, "expert_load_min": 0.0}
    assert loads.unused().endswith("(each is named once): layer 1: 1")
    loads.add(torch.tensor([[0.0, 0, 0], [6, 0, 0]]))
    assert loads.unused().endswith("layer 1: 2")
    loads.add(torch.tensor([[0.0, 0, 0], [6, 0, 0]]))
    assert loads.unused() == ""


def test_the_extreme_loads_are_of_the_layers_with_experts_in_the_last_step_each_by_its_own_mean():
    loads = routing.Loads()
    loads.add(torch.tensor([[0.0, 0, 0], [9, 0, 0], [0, 9, 0]]))
    loads.add(torch.tensor([[0.0, 0, 0], [6, 3, 3], [30, 45, 15]]))
    assert loads.numbers() == {"expert_load_max": 1.5, "expert_load_min": 0.5}
    loads.add(torch.zeros(3, 3))
    assert loads.numbers() == {}


PUBLISHED = [
    ("mixtral-8x7b", 46_702_792_704, 12_879_925_248),
    ("qwen3-30b-a3b", 30_532_122_624, 3_353_032_704),
    ("deepseek-v3", 671_026_404_352, 671_026_404_352 - (256 - 8) * 58 * 3 * 7168 * 2048),
]
NORMS_OF_HEADS = {"mixtral-8x7b": 0, "qwen3-30b-a3b": 2 * 128, "deepseek-v3": 1536 + 512}  # in each layer


@pytest.mark.parametrize(("name", "parameters", "active"), PUBLISHED)
def test_a_published_mixture_has_its_published_size_and_costs_what_its_active_parameters_cost(
    name: str, parameters: int, active: int
):
    cfg = config.load(["--config", f"{name}.toml"])
    pieces = families.pieces(cfg.model)
    assert cost.n_parameters(pieces) == parameters
    model = cfg.model
    embedding = model.vocab_size * model.hidden_size
    norms = model.hidden_size * (2 * model.n_layers + 1) + NORMS_OF_HEADS[name] * model.n_layers
    assert sum(piece.matmul_flops for piece in pieces) == 6 * (active - embedding - norms)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"dense_layers": 4}, "dense_layers=4 of n_layers=4 leave no layer for experts"),
        ({"expert_groups": 3}, "expected a divisor of n_experts=8"),
        ({"expert_groups": 2, "groups_per_token": 3}, "no more groups per token than groups"),
        ({"experts_per_token": 5, "expert_groups": 2}, "more than the 4 experts that a token may use"),
        ({"router_bias_rate": 0.1}, "without a bias: expected router_bias=true"),
        ({"capacity_factor": -1.0}, "greater than or equal to 0"),
        ({"capacity_factor": 1.0000001}, r"capacity_factor=1.0000001 has more digits .*: expected at most six after"),
        ({"rotary_channels": 4, "v_channels": 8}, "rotary_channels, v_channels would not be read: expected kv_latent"),
        (
            {"kv_latent_size": 8, "rotary_channels": 4, "n_kv_heads": 2},
            "expected n_kv_heads=8 and qk_norm=false",
        ),
        ({"kv_latent_size": 8, "rotary_channels": 3}, "rotary_channels=3: expected an even number above 0 and below"),
        ({"kv_latent_size": 8}, "rotary_channels=0: expected an even number above 0 and below the 32 channels"),
        ({"kv_latent_size": 8, "rotary_channels": 4, "v_channels": 40}, "more than the 32 channels of a head's keys"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(keys: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        MoEKeys(**keys)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"optim": {"name": "muon"}}, r"name='muon' trains matrices, but 'layers.0.mixture.experts.gate' is"),
        ({"lora": {"rank": 2, "targets": ["experts"]}}, "an? Experts with weights .*: experts have no adapters"),
        ({"run": {"exact": True}, "compile": {"enable": True}}, "proved for bloom, llama only"),
    ],
)
def test_what_a_mixture_cannot_be_trained_with_is_refused(keys: dict[str, Any], message: str):
    cfg = config.validate({"model": {"name": "moe"}, "train": {"steps": 1}} | keys, "test")
    axes: tuple[str, ...] = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    with pytest.raises(ValueError, match=message):
        check(cfg, dict.fromkeys(axes, 1), torch.device("cpu"))


@pytest.mark.parametrize("kind", ["Mixtral", "DeepSeek-V3"])
def test_a_cache_gives_the_logits_of_the_whole_sequence(kind: str):
    ours, _, _ = pair(kind)
    ours.eval()
    prompt = batch()[0][0, :5].tolist()
    grown = [*prompt, *generate(ours, prompt, 12, Sampling(V, frozenset(), temperature=0.0))]
    with torch.no_grad():
        logits = ours(torch.tensor([grown]))
    assert logits[0, 4:-1].argmax(-1).tolist() == grown[5:]


def test_a_cache_of_latent_vectors_holds_what_all_heads_share_and_gives_the_logits_of_the_whole_sequence():
    ours, _, _ = pair("DeepSeek-V3")
    ours.eval()
    tokens, places = batch()[0][:, :12], torch.arange(12).expand(len(batch()[0]), -1)
    cache = KeyValueCache()
    with torch.no_grad():
        parts = [ours(tokens[:, s], places=places[:, s], cache=cache) for s in (slice(5), slice(5, 9), slice(9, 12))]
        assert error(torch.cat(parts, 1), ours(tokens)) < 1e-5
    widths = {(latents.shape[1:], rotated.shape[1:]) for latents, rotated in cache._layers}
    assert widths == {((1, 12, 20), (1, 12, 6))}


def test_only_the_layers_with_a_window_forget_in_latent_attention():
    ours, _, _ = pair("DeepSeek-V3")
    ours = small(ours.cfg.model_copy(update={"window": 3, "window_layers": [1]}))
    x = torch.randn(1, 8, ours.cfg.hidden_size, generator=torch.Generator().manual_seed(0))
    other = x.clone()
    other[:, 0] += 1
    rules, rotation = ours.rules_and_rotation(torch.arange(8).unsqueeze(0), None)
    for layer, n_seeing in (("0", 8), ("1", 3)):
        attend = ours.layers[layer].get_submodule("attn")
        change = attend(x, rules, rotation) - attend(other, rules, rotation)
        assert change.abs().amax((0, 2)).nonzero().flatten().tolist() == [*range(n_seeing)]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": 40}}, "scales rotary positions by .*yarn.*, expected rope_type"),
        ({"rope_interleave": False}, "rope_interleave=False, expected True"),
        ({"scoring_func": "softmax"}, "scoring_func='softmax', expected 'sigmoid'"),
        ({"qk_rope_head_dim": "6"}, "qk_rope_head_dim='6', expected a number"),
        ({"q_lora_rank": 2.5}, "q_lora_rank=2.5, expected a number"),
    ],
)
def test_what_latent_attention_does_not_compute_is_refused_in_a_directory(changed: dict[str, Any], message: str):
    _, theirs, form = pair("DeepSeek-V3")
    stored = theirs.config.to_dict() | {"rope_parameters": None} | changed
    with pytest.raises(ValueError, match=message):
        form.section(stored, "config.json")


@pytest.mark.parametrize("keys", [{"kv_latent_size": 0, "rotary_channels": 0, "v_channels": 0}, {"shared_experts": 0}])
def test_a_mixture_that_is_no_deepseek_v3_is_not_written_as_one(keys: dict[str, Any]):
    ours, _, form = pair("DeepSeek-V3")
    with pytest.raises(ValueError, match="DeepSeek-V3 has latent attention and shared experts: expected"):
        form.to_config(ours.cfg.model_copy(update=keys))


def test_all_weights_that_write_to_the_residual_stream_start_smaller_with_more_layers():
    keys = {"shared_experts": 1, "dense_layers": 1, "n_experts": 4, "init_std": 0.5}
    cfg = MoEKeys(vocab_size=V, hidden_size=16, n_layers=8, n_heads=2, **keys)
    with torch.device("meta"):
        model = MoE(cfg)
    writing = ("attn.out.weight", "mlp.down.weight", "shared.down.weight", "experts.down")
    stds = {name: model.init_std(name) for name, parameter in model.named_parameters() if parameter.ndim > 1}
    for ending in writing:
        assert {std for name, std in stds.items() if name.endswith(ending)} == {0.5 / 4}, ending
    assert {std for name, std in stds.items() if not name.endswith(writing)} <= {0.5, None}
