"""models/bert.py against transformers' two classes: numbers, padding, dropout, files in both directions."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import AttentionInterface
from transformers.models.megatron_bert import modeling_megatron_bert

from dtmega import config, families
from dtmega.__main__ import main as command
from dtmega.checkpoint.weights import load_weights
from dtmega.cli.convert import recognise
from dtmega.config.families.bert import BertKeys
from dtmega.interop import stored
from dtmega.interop.formats.sources import Translated
from dtmega.interop.formats.whole import tensor_names
from dtmega.models import bert
from dtmega.models.initial import init_weights
from tests import plain_bloom
from tests.interop.hf.files.test_ours import Memory

V, S, POSITIONS = 131, 29, 40
SEED = 7
CLASSES = {"bert": "Bert", "megatron-bert": "MegatronBert"}
SIZES = {
    **{"vocab_size": V, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6},
    **{"intermediate_size": 100, "max_position_embeddings": POSITIONS, "layer_norm_eps": 0.1},
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def theirs_in(folder: Path, kind: str, **keys: Any) -> Any:
    """A BERT with no value of a default and no vector of zeros or ones, and its directory."""
    described = getattr(transformers, f"{CLASSES[kind]}Config")(**{**SIZES, **NO_DROPOUT, **keys})
    model = getattr(transformers, f"{CLASSES[kind]}ForPreTraining")(described)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.1)
    model.save_pretrained(folder)
    return model


def ours_in(folder: Path, **keys: Any) -> bert.Bert:
    """The model of ours that a directory describes, with its weights."""
    _, section = recognise.open_folder(folder, None)
    model = bert.Bert(section.model_copy(update=keys))
    load_weights(stored.of(section).folder(folder, section), model.named_parameters(), V)
    model.init_buffers(SEED)
    return model


def batch() -> dict[str, Tensor]:
    """Two samples of pairs, one with padding; of their text 15 % of the tokens have a label, and no token is 0."""
    generator = torch.Generator().manual_seed(3)
    tokens, masked = torch.randint(1, V, (2, 2, S), generator=generator)
    place = torch.arange(S)
    ends = torch.tensor([[S], [20]])
    text = place < ends
    labelled = text & (torch.rand(2, S, generator=generator) < 0.15)
    return {
        "tokens": tokens.where(text, 0),
        "labels": masked.where(labelled, -100),
        "sample_ids": torch.tensor([5, 2**33 + 5]),
        "token_types": (text & (place >= torch.tensor([[11], [9]]))).long(),
        "swapped": torch.tensor([1, 1]),  # of one kind: gradients of two kinds would cancel but for rounding
        "document_ids": (~text).long(),
    }


def asked(x: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inputs that a model needs beside tokens to give logits."""
    return {name: x[name] for name in ("token_types", "document_ids")}


def forward(theirs: Any, x: dict[str, Tensor]) -> Any:
    """Everything that transformers gives for a batch, its loss too."""
    return theirs(
        input_ids=x["tokens"],
        attention_mask=1 - x["document_ids"],
        token_type_ids=x["token_types"],
        labels=x["labels"],
        next_sentence_label=x["swapped"],
    )


def mean_loss(found: dict[str, Tensor], x: dict[str, Tensor]) -> Tensor:
    """The loss of a step on this batch alone: each sum by its count."""
    return found["lm"] / (x["labels"] != -100).sum() + found["order"] / len(x["swapped"])


def errors(ours: bert.Bert, theirs: nn.Module) -> dict[str, float]:
    """Relative errors of the gradients, by our names: the keys' biases alone have none but for rounding."""
    gradients = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    form = stored.of(ours.cfg).form(ours.cfg, "hf")
    (made, _), parameters = tensor_names(form, ours.cfg, families.of(ours.cfg).build)
    truth = Translated(Memory(gradients), {names[0]: made[names[0]] for names in parameters})
    found = {name: p.grad for name, p in ours.named_parameters()}
    assert found.keys() == truth.tensors.keys()
    return {name: ((g - truth.read(name)).norm() / truth.read(name).norm()).item() for name, g in found.items()}


def compare(ours: bert.Bert, theirs: Any) -> None:
    """Loss and every gradient in training."""
    x = batch()
    loss, truth = mean_loss(ours(**x), x), forward(theirs, x).loss
    assert loss.item() == pytest.approx(truth.item(), rel=1e-6)
    loss.backward()
    truth.backward()
    assert {name: e for name, e in errors(ours, theirs).items() if e > 1e-5} == {}


@pytest.mark.parametrize("kind", CLASSES)
def test_logits_loss_and_every_gradient_equal_hugging_face(tmp_path: Path, kind: str):
    theirs, x = theirs_in(tmp_path, kind), batch()
    ours = ours_in(tmp_path)
    compare(ours, theirs)
    truth = forward(theirs, x)
    found = ours(x["tokens"], **asked(x))
    text = x["document_ids"] == 0
    logits = truth.prediction_logits[text]
    assert ((found["logits"][text] - logits).norm() / logits.norm()).item() < 1e-5
    torch.testing.assert_close(found["order"], truth.seq_relationship_logits, rtol=1e-5, atol=1e-5)
    guessed = truth.seq_relationship_logits.argmax(-1)
    for swapped, n_right in ((guessed, len(guessed)), (1 - guessed, 0)):
        order_right = ours(**x | {"swapped": swapped})["order_right"]
        assert order_right.item() == n_right
        assert not order_right.requires_grad


class Masked(nn.Module):
    """Dropout by its definition, at a site."""

    def __init__(self, p: float, site: str, sample_ids: Tensor) -> None:
        super().__init__()
        self.p, self.site, self.sample_ids = p, site, sample_ids

    def forward(self, x: Tensor) -> Tensor:
        keep = plain_bloom.kept(self.p, SEED, self.site, self.sample_ids, *x.shape[1:])
        return torch.where(keep, x / (1 - self.p), 0.0)


def masked_attention(module: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    padding = batch()["document_ids"][:, None, None] == 1
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(padding, -math.inf)
    return (module.dropout(scores.softmax(-1)) @ v).transpose(1, 2), None


@pytest.mark.parametrize("kind", CLASSES)
def test_dropout_in_training_is_of_the_same_sites_and_keys_as_blooms(tmp_path: Path, kind: str):
    theirs, sample_ids = theirs_in(tmp_path, kind), batch()["sample_ids"]
    if kind == "bert":  # the other one has its dropout of probabilities in a module
        AttentionInterface.register("masked", masked_attention)
        theirs.config._attn_implementation = "masked"
    theirs.bert.embeddings.dropout = Masked(0.1, "embed_dropout", sample_ids)
    for i, layer in enumerate(theirs.bert.encoder.layer):
        layer.attention.self.dropout = Masked(0.2, f"layers.{i}.attn.dropout", sample_ids)
        layer.attention.output.dropout = Masked(0.1, f"layers.{i}.attn_dropout", sample_ids)
        layer.output.dropout = Masked(0.1, f"layers.{i}.mlp_dropout", sample_ids)
    ours = ours_in(tmp_path, hidden_dropout=0.1, attention_dropout=0.2)
    compare(ours, theirs)
    with pytest.raises(ValueError, match="sample_ids"):
        ours(batch()["tokens"])


def test_the_feed_forwards_gelu_is_not_the_heads(tmp_path: Path):
    theirs = theirs_in(tmp_path, "megatron-bert")
    for layer in theirs.bert.encoder.layer:
        layer.intermediate.intermediate_act_fn = nn.GELU(approximate="tanh")
    compare(ours_in(tmp_path, gelu="tanh"), theirs)


def test_the_residual_may_be_the_output_of_the_layer_norm(tmp_path: Path, monkeypatch):
    theirs = theirs_in(tmp_path, "megatron-bert")
    added = modeling_megatron_bert.MegatronBertSelfOutput, modeling_megatron_bert.MegatronBertOutput
    norms = {}
    for layer in theirs.bert.encoder.layer:
        norms[layer.attention.output], norms[layer.output] = layer.attention.ln, layer.ln
    for kind in added:
        plain = kind.forward
        monkeypatch.setattr(kind, "forward", lambda self, x, h, plain=plain: plain(self, x, norms[self](h)))
    compare(ours_in(tmp_path, apply_residual_connection_post_layernorm=True), theirs)


def test_padding_changes_nothing_of_the_text_before_it(tmp_path: Path):
    theirs_in(tmp_path, "megatron-bert")
    ours, x = ours_in(tmp_path), batch()
    padded = ours(x["tokens"], **asked(x))
    alone = ours(x["tokens"][1:, :20], token_types=x["token_types"][1:, :20])
    torch.testing.assert_close(padded["logits"][1:, :20], alone["logits"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(padded["order"][1:], alone["order"], rtol=1e-5, atol=1e-5)


def test_rows_that_pad_the_vocabulary_take_no_part(tmp_path: Path):
    theirs_in(tmp_path, "bert")
    x = batch()
    plain, padded = (ours_in(tmp_path, pad_vocab_to_multiple=multiple) for multiple in (1, 64))
    with torch.no_grad():
        padded.get_parameter("head.output.bias")[V:] = 9.0
    assert padded(x["tokens"], **asked(x))["logits"].shape == (2, S, V)
    for name, loss in plain(**x).items():
        torch.testing.assert_close(padded(**x)[name], loss, rtol=1e-6, atol=0)


def small(**keys: Any) -> bert.Bert:
    sizes = {"vocab_size": V, "hidden_size": 48, "n_layers": 2, "n_heads": 6}
    model = bert.Bert(BertKeys(**{**sizes, **keys}))
    init_weights(model, SEED)
    model.init_buffers(SEED)
    return model


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_initial_values_are_megatrons(norm: str):
    model = small(n_layers=8, init_std=0.3, norm=norm)
    std = {"embed": 0.3, "positions": 0.3, "types": 0.3, "attn.qkv": 0.3, "attn.out": 0.075}
    std |= {"mlp.up": 0.3, "mlp.down": 0.075, "head.dense": 0.3, "order.pooler": 0.3, "order.classifier": 0.3}
    drawn = 0
    for name, p in model.named_parameters():
        owner, _, kind = name.removeprefix("layers.3.").rpartition(".")
        if kind == "weight" and owner in std:
            drawn += 1
            truth = plain_bloom.normal(SEED, name, tuple(p.shape)) * std[owner]
            torch.testing.assert_close(p.detach(), truth.float(), rtol=1e-6, atol=1e-6, msg=name)
        if p.ndim == 1:
            assert torch.equal(p, torch.full_like(p, float(kind == "weight"))), name
    assert drawn == len(std)


def kept_bytes(s: int) -> int:
    """Memory that a forward pass keeps for backward, of one long padded sample."""
    model = small(hidden_size=8, n_heads=2, vocab_size=16, max_position_embeddings=s)
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    tokens = torch.ones(1, s, dtype=torch.long)
    padding = (torch.arange(s) >= s - 7).long()[None]
    with saved_tensors_hooks(pack, lambda x: x):
        model(tokens, tokens.where(padding == 0, -100), swapped=torch.tensor([0]), document_ids=padding)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    return sum(n for at, n in kept.items() if at not in weights)


def test_what_a_forward_pass_keeps_grows_with_the_length_and_not_with_its_square():
    short, long = kept_bytes(1024), kept_bytes(2048)
    assert long < 2.1 * short
    assert long < 2048 * 2048  # not even a mask of bytes


def test_only_tokens_with_a_label_go_through_the_head():
    model, x = small(), batch()
    rows = []
    model.get_submodule("head.dense").register_forward_hook(lambda _, args, out: rows.append(out.shape))
    model.get_submodule("head.norm").register_forward_hook(lambda _, args, out: rows.append(out.shape))
    model(**x)
    n = int((x["labels"] != -100).sum())
    assert rows == [(n, 48), (n, 48)]


def test_a_microbatch_may_have_no_label_at_all():
    model, x = small(), batch()
    found = model(**x | {"labels": torch.full_like(x["labels"], -100)})
    assert found["lm"].item() == 0
    (found["lm"] + found["order"]).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert model.get_parameter("head.dense.weight").grad.abs().max() == 0


def test_labels_without_the_order_of_the_segments_are_refused():
    x = batch()
    with pytest.raises(ValueError, match="swapped"):
        small()(x["tokens"], x["labels"])


def test_an_order_that_has_a_normed_residual_already_is_refused():
    section = {"name": "bert", "norm": "post", "apply_residual_connection_post_layernorm": True}
    with pytest.raises(ValueError, match=r"\[model\] norm, \[model\] apply_residual_connection_post_layernorm"):
        config.model_section(section, "test")


# --------------------------------------------------------------------------------------------------------------- files


def convert(source: str, folder: Path, target: str, out: Path) -> int:
    return command(["convert", "--from", source, str(folder), "--to", target, str(out)])


@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("kind", CLASSES)
def test_there_and_back_gives_transformers_its_weights_and_sizes(tmp_path: Path, kind: str, activation: str, capsys):
    drops = {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.2}
    theirs = theirs_in(tmp_path / "theirs", kind, initializer_range=0.05, hidden_act=activation, **drops)
    assert convert("hf", tmp_path / "theirs", "dtmega", tmp_path / "w") == 0
    assert convert("dtmega", tmp_path / "w", "hf", tmp_path / "back") == 0
    again, info = type(theirs).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info.values())
    x = batch()
    assert torch.equal(forward(again.eval(), x).loss, forward(theirs.eval(), x).loss)
    before, after = load_file(tmp_path / "theirs/model.safetensors"), load_file(tmp_path / "back/model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    for name in (*SIZES, *drops, "initializer_range", "hidden_act"):
        assert getattr(again.config, name) == getattr(theirs.config, name), name


@pytest.mark.parametrize("kind", CLASSES)
def test_fine_tuning_starts_from_the_encoder_that_was_exported(tmp_path: Path, kind: str, capsys):
    theirs_in(tmp_path / "theirs", kind)
    ours = ours_in(tmp_path / "theirs")
    assert convert("hf", tmp_path / "theirs", "dtmega", tmp_path / "w") == 0
    assert convert("dtmega", tmp_path / "w", "hf", tmp_path / "out") == 0
    classifier = getattr(transformers, f"{CLASSES[kind]}ForSequenceClassification")
    loaded, info = classifier.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert set(info["missing_keys"]) == {"classifier.weight", "classifier.bias"}
    x = batch()
    mask = {"attention_mask": 1 - x["document_ids"], "token_type_ids": x["token_types"]}
    pooled = loaded.bert(x["tokens"], **mask).pooler_output
    assert ours.order is not None
    order = ours(x["tokens"], **asked(x))["order"]
    torch.testing.assert_close(ours.order.classifier(pooled), order, rtol=1e-5, atol=1e-5)


def test_names_and_buffers_of_old_files_are_read(tmp_path: Path):
    theirs_in(tmp_path, "bert")
    today = ours_in(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for now, then in old.items():
        tensors = {name.replace(now, then): tensor for name, tensor in tensors.items()}
    positions = torch.arange(POSITIONS)[None]
    save_file(tensors | {"bert.embeddings.position_ids": positions}, tmp_path / "model.safetensors")
    again = ours_in(tmp_path)
    assert all(torch.equal(p, again.get_parameter(name)) for name, p in today.named_parameters())


@pytest.mark.parametrize(
    "key",
    [
        {"hidden_act": "relu"},
        {"is_decoder": True},
        {"type_vocab_size": 3},
        {"position_embedding_type": "relative_key"},
        {"tie_word_embeddings": False},
    ],
    ids=lambda key: next(iter(key)),
)
def test_a_bert_that_computes_something_else_is_refused(tmp_path: Path, key: dict[str, Any]):
    ((name, value),) = key.items()
    (tmp_path / "config.json").write_text(json.dumps(transformers.BertConfig().to_dict() | key))
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"{name}={value!r}, expected"):
        recognise.open_folder(tmp_path, None)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"gelu": "tanh"}, r"\[model\] gelu, \[model\] head_gelu"),
        ({"apply_residual_connection_post_layernorm": True}, r"apply_residual_connection_post_layernorm"),
    ],
)
def test_a_bert_that_transformers_cannot_compute_is_not_exported(tmp_path: Path, keys: dict[str, Any], named: str):
    cfg = BertKeys(vocab_size=V, hidden_size=48, n_layers=2, n_heads=6, **keys)
    with pytest.raises(ValueError, match=named):
        stored.of(cfg).export(Memory({}), tmp_path / "out", cfg, None, rank=0, size=1, barrier=int)


def test_a_directory_of_the_other_class_is_refused_by_the_key_that_tells_them_apart(tmp_path: Path):
    theirs_in(tmp_path, "megatron-bert")
    _, section = recognise.open_folder(tmp_path, None)
    post = section.model_copy(update={"norm": "post"})
    with pytest.raises(ValueError, match=r"model_type='megatron-bert', expected 'bert' .*\[model\] norm"):
        recognise.open_folder(tmp_path, post)
