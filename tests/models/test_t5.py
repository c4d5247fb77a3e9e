"""models/t5.py against transformers' T5 and against Megatron's formula: numbers, dropout, padding, files, sizes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AttentionInterface

from dtmega.checkpoint.weights import load_weights
from dtmega.cli.convert import recognise
from dtmega.config.families.t5 import T5Keys
from dtmega.interop import stored
from dtmega.interop.formats import t5 as t5_names
from dtmega.interop.formats.sources import Translated
from dtmega.interop.formats.whole import tensor_names
from dtmega.interop.hf.files import config_json
from dtmega.interop.hf.files.tensors import TensorFiles
from dtmega.models import count, t5
from dtmega.models.generate import Sampling, answer
from dtmega.models.initial import init_weights
from dtmega.ops import cost
from tests import plain_bloom
from tests.interop.hf.files.test_ours import Memory

V, S, T = 131, 29, 11
SEED = 7
FILES = stored.of(T5Keys())
SIZES = {
    **{"vocab_size": V, "d_model": 48, "d_kv": 16, "d_ff": 100, "num_layers": 3, "num_decoder_layers": 2},
    **{"num_heads": 6, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20},
    "layer_norm_epsilon": 0.1,
}
FORMS: dict[str, dict[str, Any]] = {
    "first": {},
    "v1.1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    # What transformers 5 makes of these words: it ties every T5 that it does not load from two tensors.
    "tied, not scaled": {"tie_word_embeddings": False},
    "scaled, not tied": {"feed_forward_proj": "gated-gelu"},
}
HEADED = ("v1.1", "scaled, not tied")


def theirs_in(folder: Path, form: str, **keys: Any) -> Any:
    """A T5 with no value of a default and no vector of ones, as transformers loads it from its directory."""
    described = transformers.T5Config(**{**SIZES, "dropout_rate": 0.0, **FORMS[form], **keys})
    model = transformers.T5ForConditionalGeneration(described)
    if form in HEADED:  # transformers 5 makes one parameter of both, but reads files with two
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            spread = 0.1 if p.ndim == 1 else 0.03  # larger scores would make one-hots of softmaxes
            p.add_(torch.randn(p.shape, generator=generator) * spread)
    model.save_pretrained(folder)
    return transformers.T5ForConditionalGeneration.from_pretrained(folder).train()


def section_of(folder: Path) -> T5Keys:
    theirs = config_json.read_plain(folder)
    return T5Keys.model_validate({"name": "t5", **t5_names.HF.section(theirs, str(folder), TensorFiles(folder))})


def ours_in(folder: Path, **keys: Any) -> t5.T5:
    """The model of ours that a directory describes, with its weights."""
    section = section_of(folder)
    model = t5.T5(section.model_copy(update=keys))
    load_weights(FILES.folder(folder, section), model.named_parameters(), V)
    model.init_buffers(SEED)
    return model


def batch() -> dict[str, Tensor]:
    """Two samples, of which the second one has padding on both sides."""
    generator = torch.Generator().manual_seed(3)
    place, decoder_place = torch.arange(S), torch.arange(T)
    text, decoder_text = place < torch.tensor([[S], [20]]), decoder_place < torch.tensor([[T], [7]])
    said = torch.randint(1, V, (2, T + 1), generator=generator)
    return {
        "tokens": torch.randint(1, V, (2, S), generator=generator).where(text, 0),
        "decoder_tokens": said[:, :-1].where(decoder_text, 0),
        "labels": said[:, 1:].where(decoder_text, -100),
        "sample_ids": torch.tensor([5, 2**33 + 5]),
        "document_ids": (~text).long(),
        "decoder_document_ids": (~decoder_text).long(),
    }


def forward(theirs: Any, x: dict[str, Tensor]) -> Any:
    return theirs(
        input_ids=x["tokens"],
        attention_mask=1 - x["document_ids"],
        decoder_input_ids=x["decoder_tokens"],
        decoder_attention_mask=1 - x["decoder_document_ids"],
        labels=x["labels"],
    )


def compare(ours: t5.T5, theirs: Any) -> None:
    """Loss and every gradient in training."""
    x = batch()
    loss = ours(**x)["lm"] / (x["labels"] != -100).sum()
    truth = forward(theirs, x).loss
    assert loss.item() == pytest.approx(truth.item(), rel=1e-6)
    loss.backward()
    truth.backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    (made, _), parameters = tensor_names(t5_names.HF, ours.cfg, t5.T5)
    expected = Translated(Memory(gradients), {names[0]: made[names[0]] for names in parameters})
    found = {name: p.grad for name, p in ours.named_parameters()}
    assert found.keys() == expected.tensors.keys()
    errors = {n: ((g - expected.read(n)).norm() / expected.read(n).norm()).item() for n, g in found.items()}
    assert {name: e for name, e in errors.items() if not e < 1e-5} == {}


@pytest.mark.parametrize("form", FORMS)
def test_logits_loss_and_every_gradient_equal_hugging_face(tmp_path: Path, form: str):
    theirs, x = theirs_in(tmp_path, form), batch()
    ours = ours_in(tmp_path)
    compare(ours, theirs)
    found = ours(**{name: rows for name, rows in x.items() if name != "labels"})
    text = x["decoder_document_ids"] == 0
    logits = forward(theirs, x).logits[text]
    assert ((found[text] - logits).norm() / logits.norm()).item() < 1e-5


class Masked(nn.Module):
    """Dropout by its definition, at one site after the other."""

    def __init__(self, *sites: tuple[str, float]) -> None:
        super().__init__()
        self.sites, self.calls = sites, 0

    def forward(self, x: Tensor) -> Tensor:
        site, p = self.sites[self.calls % len(self.sites)]
        self.calls += 1
        keep = plain_bloom.kept(p, SEED, site, batch()["sample_ids"], *x.shape[1:])
        return torch.where(keep, x / (1 - p), 0.0)


def masked_attention(
    module: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, position_bias: Tensor, **__: Any
) -> tuple[Tensor, None]:
    """Scores are not scaled; of the decoder's text nothing asks for padding."""
    keys = batch()["document_ids" if k.shape[2] == S else "decoder_document_ids"][:, None, None] == 0
    if module.is_causal:
        keys = keys & torch.ones(T, T, dtype=torch.bool).tril()
    scores = (q @ k.mT + position_bias).masked_fill(~keys, -math.inf)
    return (module.probabilities(scores.softmax(-1)) @ v).transpose(1, 2), None


@pytest.mark.parametrize("form", FORMS)
def test_dropout_is_at_the_sites_of_hugging_face_and_keyed_by_ours(tmp_path: Path, form: str):
    rates = {"hidden_dropout": 0.1, "attention_dropout": 0.2, "inner_dropout": 0.3}
    theirs = theirs_in(tmp_path, form)
    AttentionInterface.register("masked", masked_attention)
    for stack in ("encoder", "decoder"):
        their_stack = getattr(theirs, stack)
        their_stack.config._attn_implementation = "masked"
        embedded = {"encoder": "embed_dropout", "decoder": "decoder_embed_dropout"}[stack]
        their_stack.dropout = Masked((embedded, 0.1), (f"{stack}_dropout", 0.3))
        for i, block in enumerate(their_stack.block):
            name = f"{stack}.{i}"
            attending = {"attn": block.layer[0]} | ({"cross": block.layer[1]} if stack == "decoder" else {})
            for ours, layer in attending.items():
                layer.dropout = Masked((f"{name}.{ours}_dropout", 0.1))
                inner = layer.SelfAttention if ours == "attn" else layer.EncDecAttention
                inner.probabilities = Masked((f"{name}.{ours}.dropout", 0.2))
            block.layer[-1].dropout = Masked((f"{name}.mlp_dropout", 0.1))
            block.layer[-1].DenseReluDense.dropout = Masked((f"{name}.mlp.dropout", 0.3))
    ours = ours_in(tmp_path, **rates)
    compare(ours, theirs)
    with pytest.raises(ValueError, match="sample_ids"):
        ours(batch()["tokens"], batch()["decoder_tokens"])


def test_padding_changes_nothing_of_the_text_before_it(tmp_path: Path):
    theirs_in(tmp_path, "first")
    ours, x = ours_in(tmp_path), batch()
    padded = ours(**{name: rows for name, rows in x.items() if name != "labels"})
    alone = ours(x["tokens"][1:, :20], x["decoder_tokens"][1:, :7])
    torch.testing.assert_close(padded[1:, :7], alone, rtol=1e-5, atol=1e-5)


def test_greedy_answers_are_those_of_transformers(tmp_path: Path):
    torch.manual_seed(0)  # of transformers' initial values: some models have nothing to say
    theirs = theirs_in(tmp_path, "v1.1").eval()
    nn.init.normal_(theirs.lm_head.weight, generator=torch.Generator().manual_seed(4))  # says more than it is told
    theirs.save_pretrained(tmp_path)
    read = batch()["tokens"][:1]
    ends = {"decoder_start_token_id": 3, "eos_token_id": 5, "pad_token_id": 0, "max_new_tokens": 12}
    (said,) = theirs.generate(read, do_sample=False, **ends).tolist()
    greedy = Sampling(V, frozenset([5]), temperature=0)
    found = answer(ours_in(tmp_path), read[0].tolist(), 12, greedy, start_id=3, pad_id=0)
    assert [3, *found] == said[: len(found) + 1]
    assert len(set(found)) > 1
    assert len(found) == 12 or said[len(found) + 1] == 5


def test_the_encoder_runs_once_for_an_answer():
    model, ran = small(), []
    model.encoder["0"].register_forward_hook(lambda *_: ran.append(1))
    assert len(answer(model, [7, 8, 9], 4, Sampling(V, frozenset([5])), start_id=3, pad_id=0)) > 1
    assert ran == [1]


# ---------------------------------------------------------------------------------------------------------- Megatron's

MEGATRON: dict[str, Any] = {
    **{"positions": "learned", "norm": "layer", "norm_eps": 1e-5, "bias": True, "scale_scores": True},
    **{"scale_head": False, "init": "normal", "activation": "gelu_tanh"},
}


def small(**keys: Any) -> t5.T5:
    """A model with no vector of zeros or ones."""
    sizes = {"vocab_size": V, "hidden_size": 48, "n_layers": 3, "n_decoder_layers": 2, "n_heads": 6}
    model = t5.T5(T5Keys(**{**sizes, **keys}))
    init_weights(model, SEED)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.1)
    model.init_buffers(SEED)
    return model


def megatron(weights: dict[str, Tensor], cfg: T5Keys, x: dict[str, Tensor]) -> Tensor:
    """Logits [B, T, V]: `t5_model.py` and `transformer.py` of Megatron-LM, in fp64, without dropout.

    One embedding and one table of positions for both stacks; LayerNorm first; scores / sqrt(K); a head with a bias.
    """
    heads, width = cfg.n_heads, cfg.hidden_size // cfg.n_heads
    text, decoder_text = x["document_ids"] == 0, x["decoder_document_ids"] == 0

    def linear(name: str, h: Tensor) -> Tensor:
        return h @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(name: str, h: Tensor) -> Tensor:
        centred = h - h.mean(-1, keepdim=True)
        normed = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return normed * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def attention(name: str, asking: Tensor, read: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (
            linear(f"{name}.{part}", h).unflatten(-1, (heads, width)).transpose(1, 2)
            for part, h in (("q", asking), ("k", read), ("v", read))
        )
        scores = (q @ k.mT / width**0.5).masked_fill(~mask, -10_000.0)
        return linear(f"{name}.out", (scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def mlp(name: str, h: Tensor) -> Tensor:
        up = linear(f"{name}.up", h)
        gelu = up * 0.5 * (1 + torch.tanh(0.79788456 * up * (1 + 0.044715 * up * up)))
        return linear(f"{name}.down", gelu)

    def embedded(tokens: Tensor) -> Tensor:
        return weights["embed.weight"][tokens] + weights["positions.weight"][: tokens.shape[1]]

    h = embedded(x["tokens"])
    seen = (text[:, :, None] & text[:, None, :])[:, None]
    for i in range(cfg.n_layers):
        y = norm(f"encoder.{i}.attn_norm", h)
        h = h + attention(f"encoder.{i}.attn", y, y, seen)
        h = h + mlp(f"encoder.{i}.mlp", norm(f"encoder.{i}.mlp_norm", h))
    encoded = norm("encoder_norm", h)
    h = embedded(x["decoder_tokens"])
    causal = (decoder_text[:, :, None] & decoder_text[:, None, :])[:, None] & torch.ones(T, T).tril().bool()
    across = (decoder_text[:, :, None] & text[:, None, :])[:, None]
    for i in range(cfg.decoder_layers):
        y = norm(f"decoder.{i}.attn_norm", h)
        h = h + attention(f"decoder.{i}.attn", y, y, causal)
        h = h + attention(f"decoder.{i}.cross", norm(f"decoder.{i}.cross_norm", h), encoded, across)
        h = h + mlp(f"decoder.{i}.mlp", norm(f"decoder.{i}.mlp_norm", h))
    return norm("decoder_norm", h) @ weights["embed.weight"].T + weights["head.bias"]


def test_by_its_keys_it_is_megatrons_t5(monkeypatch):
    model, x = small(**MEGATRON, max_position_embeddings=40), batch()
    weights = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
    logits = megatron(weights, model.cfg, x)
    truth = F.cross_entropy(logits.flatten(0, 1), x["labels"].flatten(), reduction="sum")
    truth.backward()
    found = model(**x)["lm"]
    found.backward()
    assert found.item() == pytest.approx(truth.item(), rel=1e-6)
    for name, p in model.named_parameters():
        gradient = weights[name].grad
        assert p.grad is not None
        assert gradient is not None
        if name.endswith("k.bias"):  # a softmax does not see it
            assert p.grad.abs().max() < 1e-4
        else:
            assert ((p.grad - gradient).norm() / gradient.norm()).item() < 1e-5, name


def test_a_gate_relu_and_erf_are_those_of_the_formula():
    for keys, act in (({"activation": "relu"}, F.relu), ({"activation": "gelu_erf", "gated": True}, F.gelu)):
        mlp = small(**keys).decoder["1"].get_submodule("mlp")
        assert isinstance(mlp, t5.MLP)
        x = torch.randn(2, 5, 48, generator=torch.Generator().manual_seed(0))
        inner = act(x @ mlp.up.weight.T)
        if mlp.gate is not None:
            inner = act(x @ mlp.gate.weight.T) * (x @ mlp.up.weight.T)
        found = mlp(x, torch.arange(192), None, torch.arange(5).expand(2, 5))
        torch.testing.assert_close(found, inner @ mlp.down.weight.T, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------------------ initial values


@pytest.mark.parametrize("init", ["fan_in", "normal"])
def test_initial_values_are_those_of_the_original(init: str):
    """transformers' `T5PreTrainedModel._init_weights` ; Megatron divides what writes by sqrt(2 L)."""
    keys = {"fan_in": {"kv_channels": 4, "ffn_hidden_size": 100}, "normal": {**MEGATRON, "init_std": 0.3}}[init]
    model = t5.T5(T5Keys(vocab_size=V, hidden_size=48, n_layers=8, n_decoder_layers=2, n_heads=6, **keys))
    init_weights(model, SEED)
    std = {
        "fan_in": {
            **{"embed": 1.0, "encoder_bias": 48**-0.5, "decoder_bias": 48**-0.5},
            **{"q": (48 * 4) ** -0.5, "k": 48**-0.5, "v": 48**-0.5, "out": 24**-0.5},
            **{"up": 48**-0.5, "encoder down": 0.1, "decoder down": 0.1},
        },
        "normal": {
            **{"embed": 0.3, "positions": 0.3, "q": 0.3, "k": 0.3, "v": 0.3, "up": 0.3},
            **{"encoder out": 0.075, "decoder out": 0.15, "encoder down": 0.075, "decoder down": 0.15},
        },
    }[init]
    drawn = set()
    for name, p in model.named_parameters():
        owner, _, kind = name.rpartition(".")
        if p.ndim == 1:
            assert torch.equal(p, torch.full_like(p, float(kind == "weight"))), name
            continue
        stack, last = owner.partition(".")[0], owner.rpartition(".")[2]
        here = f"{stack} {last}" if f"{stack} {last}" in std else last
        drawn.add(here)
        truth = plain_bloom.normal(SEED, name, tuple(p.shape)) * std[here]
        torch.testing.assert_close(p.detach(), truth.float(), rtol=1e-6, atol=1e-6, msg=name)
    assert drawn == std.keys()


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        (
            {"max_position_embeddings": 64},
            r"max_position_embeddings would not be read with positions='relative'",
        ),
        (
            {"positions": "learned", "relative_buckets": 8},
            r"relative_buckets would not be read with positions='learned'",
        ),
        ({"init_std": 0.1}, r"init_std would not be read with .*init='fan_in'"),
        ({"relative_max_distance": 16}, r"expected more than relative_buckets / 2 = 16"),
        ({"n_heads": 6}, r"n_heads=6 does not divide hidden_size=256"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_keys_that_contradict_are_refused(keys: dict[str, Any], named: str):
    with pytest.raises(ValueError, match=named):
        T5Keys(**keys)


# --------------------------------------------------------------------------------------------------------------- files


def exported(folder: Path, out: Path) -> None:
    section = section_of(folder)
    source = FILES.folder(folder, section)
    FILES.export(source, out, section, None, rank=0, size=1, barrier=int)


@pytest.mark.parametrize("proj", t5_names.FEED_FORWARDS)
@pytest.mark.parametrize("form", FORMS)
def test_there_and_back_gives_transformers_its_weights_and_sizes(tmp_path: Path, form: str, proj: str):
    theirs = theirs_in(tmp_path / "theirs", form, feed_forward_proj=proj, dropout_rate=0.2)
    exported(tmp_path / "theirs", tmp_path / "back")
    again, info = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info.values())
    x = batch()
    assert torch.equal(forward(again.eval(), x).loss, forward(theirs.eval(), x).loss)
    before, after = load_file(tmp_path / "theirs/model.safetensors"), load_file(tmp_path / "back/model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    for name in (*SIZES, "dropout_rate", "feed_forward_proj", "scale_decoder_outputs"):
        assert getattr(again.config, name) == getattr(theirs.config, name), name


def test_what_files_of_old_versions_have_twice_or_in_vain_is_read(tmp_path: Path):
    theirs_in(tmp_path, "first")
    today = ours_in(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    words = tensors["shared.weight"]
    old = {name: words.clone() for name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")}
    old["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = torch.ones(8, 6)
    save_file(tensors | old, tmp_path / "model.safetensors")
    again = ours_in(tmp_path)
    assert all(torch.equal(p, again.get_parameter(name)) for name, p in today.named_parameters())


@pytest.mark.parametrize("form", FORMS)
def test_a_directory_tells_apart_whether_the_head_is_the_embedding_and_whether_it_is_scaled(tmp_path: Path, form: str):
    theirs = theirs_in(tmp_path, form)
    _, model = recognise.open_folder(tmp_path, None)
    assert isinstance(model, T5Keys)
    assert model.tied == (theirs.lm_head.weight is theirs.shared.weight)
    assert model.scale_head == theirs.config.scale_decoder_outputs
    other = model.model_copy(update={"tied": not model.tied})
    with pytest.raises(ValueError, match=rf"tied={model.tied}, not {other.tied} \(\[model\] tied\)"):
        recognise.open_folder(tmp_path, other)


def test_a_head_that_is_stored_with_the_values_of_the_embedding_is_tied_to_it(tmp_path: Path):
    theirs_in(tmp_path, "first", tie_word_embeddings=False)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["shared.weight"].clone()}, tmp_path / "model.safetensors")
    again = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path)
    assert again.lm_head.weight is again.shared.weight
    assert section_of(tmp_path).tied


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"positions": "learned"}, r"positions=relative, this model has learned \(\[model\] positions\)"),
        ({"norm": "layer", "bias": True}, r"norm=rms, bias=False, .*\(\[model\] norm, \[model\] bias\)"),
        ({"scale_scores": True}, r"\[model\] scale_scores"),
        ({"gated": True, "activation": "gelu_erf"}, r"\[model\] activation, \[model\] gated"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_t5_that_transformers_cannot_compute_is_not_exported(tmp_path: Path, keys: dict[str, Any], named: str):
    cfg = T5Keys(vocab_size=V, hidden_size=48, n_layers=2, n_heads=6, **keys)
    with pytest.raises(ValueError, match=named):
        FILES.export(Memory({}), tmp_path / "out", cfg, None, rank=0, size=1, barrier=int)


@pytest.mark.parametrize("key", [{"feed_forward_proj": "gated-silu"}, {"is_encoder_decoder": False}])
def test_a_t5_that_computes_something_else_is_refused(tmp_path: Path, key: dict[str, Any]):
    ((name, value),) = key.items()
    (tmp_path / "config.json").write_text(json.dumps(transformers.T5Config().to_dict() | key))
    with pytest.raises(ValueError, match=f"{name}={value!r}, expected"):
        t5_names.HF.section(config_json.read_plain(tmp_path), str(tmp_path))


# --------------------------------------------------------------------------------------------------------------- sizes


def test_flops_are_those_of_the_tokens_that_each_weight_and_each_pair_is_for():
    cfg = T5Keys(vocab_size=V, hidden_size=48, n_layers=3, n_decoder_layers=2, n_heads=6, ffn_hidden_size=100)
    with torch.device("meta"):
        pieces = count.pieces(t5.T5(cfg))
    square, ffn, pairs = 48 * 48, 2 * 48 * 100, 2 * 48
    encoder = 3 * (S * (4 * square + ffn) + S * S * pairs)
    decoder = 2 * (T * (6 * square + ffn) + S * 2 * square + T * T * pairs // 2 + T * S * pairs)
    head = T * 48 * V
    assert cost.flops_per_token(pieces, S, 0.15, T) == pytest.approx(6 * (encoder + decoder + head) / S, abs=4)
