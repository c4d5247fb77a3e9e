"""Room formats/: rules between our tensors and other people's, each form in both directions and by slice."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dtmega import config, families
from dtmega.checkpoint.sources import BY_TOKEN, check_stored
from dtmega.cli.convert import recognise
from dtmega.config.families.gpt import GPTKeys
from dtmega.interop import stored
from dtmega.interop.formats.format import Format
from dtmega.interop.formats.gpt import HF
from dtmega.interop.formats.rules import Directions, Heads, Rule, directions
from dtmega.interop.formats.sources import Cast, Translated
from dtmega.interop.formats.whole import as_theirs
from dtmega.interop.hf.files import export, ours
from tests.interop.hf.files.test_ours import Memory

H, G, K, D, F, E = 4, 2, 3, 5, 6, 3  # heads, groups of them, width of one, features in, out, experts
Tensors = dict[str, Tensor]


class Counted(Memory):
    """Attributes:
    elements: of all tensors that were read.
    """

    elements = 0

    def read(self, name: str, index: Any = None) -> Tensor:
        part = super().read(name, index)
        self.elements += part.numel()
        return part


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def conv1d() -> tuple[Tensors, Tensors]:
    theirs = drawn(D, F)
    return {"layers.0.out.weight": theirs.T.clone(), "layers.0.out.bias": drawn(F)}, {
        "h.0.c_proj.weight": theirs,
        "h.0.c_proj.bias": drawn(F),
    }


def by_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[groups, (q's, k, v), K] as Megatron-core's linear_qkv has them: group by group."""
    groups = [part.unflatten(0, (G, -1)) for part in (q, k, v)]
    return torch.cat([torch.cat([part[g] for part in groups]) for g in range(G)])


def fused() -> tuple[Tensors, Tensors]:
    """GPT-2's c_attn, [D, q | k | v], and ours, [head, (q, k, v), K]."""
    c_attn, bias = drawn(D, 3 * H * K), drawn(3 * H * K)
    ours = {
        name: torch.stack([part.unflatten(0, (H, K)) for part in rows.split(H * K)], 1).flatten(0, 2)
        for name, rows in (("attn.qkv.weight", c_attn.T), ("attn.qkv.bias", bias))
    }
    return ours, {"c_attn.weight": c_attn, "c_attn.bias": bias}


def three_apart() -> tuple[Tensors, Tensors]:
    """BERT's query, key and value; as many heads of each."""
    parts = [drawn(G * K, D + i)[:, :D] for i in range(3)]
    return {"attn.qkv.weight": by_head(*parts)}, {f"self.{n}.weight": p for n, p in zip("qkv", parts, strict=True)}


def keys_and_values() -> tuple[Tensors, Tensors]:
    """k [G K, D] and v apart here, and in one tensor by head there, [G, (k, v), K, D]: Megatron's attention across."""
    both = torch.randn(G, 2, K, D)
    bias = torch.randn(G, 2, K)
    ours = {f"layers.0.{n}.weight": both[:, i].flatten(0, 1) for i, n in enumerate("kv")}
    ours |= {f"layers.0.{n}.bias": bias[:, i].flatten() for i, n in enumerate("kv")}
    return ours, {"layers.0.kv.weight": both.flatten(0, 2), "layers.0.kv.bias": bias.flatten()}


def grouped(theirs_fused: bool) -> tuple[Tensors, Tensors]:
    """Fewer heads of keys and values: three of one side, one by head of the other."""
    parts = drawn(H * K, D), drawn(G * K, D), drawn(G * K, D) + 1
    apart = {f"layers.1.{n}.weight": p for n, p in zip("qkv", parts, strict=True)}
    joined = {"layers.1.qkv.weight": by_head(*parts)}
    return (apart, joined) if theirs_fused else (joined, apart)


def two_in_one(theirs_fused: bool) -> tuple[Tensors, Tensors]:
    gate, up = drawn(F, D), drawn(F, D) + 1
    apart, joined = {"mlp.gate.weight": gate, "mlp.up.weight": up}, {"mlp.gate_up.weight": torch.cat([gate, up])}
    return (apart, joined) if theirs_fused else (joined, apart)


def experts(*names: str) -> tuple[Tensors, Tensors]:
    """Matrices of these names for each expert, and one tensor that stacks the experts, the names side by side."""
    theirs: Tensors = {}
    entries: list[Tensor] = []
    for i in range(E):
        parts = {f"layers.2.experts.{i}.{name}.weight": drawn(F, D) + i + j / 8 for j, name in enumerate(names)}
        theirs |= parts
        entries.append(torch.cat([*parts.values()]))
    return {"layers.2.mlp.experts": torch.stack(entries)}, theirs


APART = tuple(f"layers.{{}}.{n}." for n in "qkv")
FORMS: dict[str, tuple[Rule, Heads, Callable[[], tuple[Tensors, Tensors]]]] = {
    "transpose": (Rule("layers.{}.out.", "h.{}.c_proj.", "transpose"), Heads(1, 1), conv1d),
    "transpose heads": (Rule("attn.qkv.", "c_attn.", "transpose heads"), Heads(H, H), fused),
    "heads of three": (Rule("attn.qkv.", ("self.q.", "self.k.", "self.v."), "heads"), Heads(G, G), three_apart),
    "heads in groups": (Rule("layers.{}.qkv.", APART, "heads"), Heads(H, G), lambda: grouped(False)),
    "groups in one of theirs": (Rule(APART, "layers.{}.qkv.", "heads"), Heads(H, G), lambda: grouped(True)),
    "heads of two": (Rule(APART[1:], "layers.{}.kv.", "heads"), Heads(H, G), keys_and_values),
    "concat": (Rule("mlp.gate_up.", ("mlp.gate.", "mlp.up."), "concat"), Heads(1, 1), lambda: two_in_one(False)),
    "concat in theirs": (
        Rule(("mlp.gate.", "mlp.up."), "mlp.gate_up.", "concat"),
        Heads(1, 1),
        lambda: two_in_one(True),
    ),
    "stack": (
        Rule("layers.{}.mlp.experts", "layers.{}.experts.{}.w2.weight", "stack"),
        Heads(1, 1),
        lambda: experts("w2"),
    ),
    "stack concat": (
        Rule(
            "layers.{}.mlp.experts", tuple(f"layers.{{}}.experts.{{}}.{n}.weight" for n in ("w1", "w3")), "stack concat"
        ),
        Heads(1, 1),
        lambda: experts("w1", "w3"),
    ),
}


def sides(form: str) -> tuple[Directions, Tensors, Tensors]:
    rule, heads, make = FORMS[form]
    ours, theirs = make()
    return directions([rule], {name: tuple(t.shape) for name, t in ours.items()}, heads), ours, theirs


@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_read_in_both_directions_to_the_bit(form: str):
    (from_theirs, from_ours), ours, theirs = sides(form)
    for made, source, truth in ((from_theirs, theirs, ours), (from_ours, ours, theirs)):
        read = Translated(Memory(source), made)
        assert read.tensors == Memory(truth).tensors
        assert all(torch.equal(read.read(name), tensor) for name, tensor in truth.items())


@pytest.mark.parametrize("form", FORMS)
def test_of_a_form_any_box_is_read_and_nothing_else(form: str):
    (from_theirs, from_ours), ours, theirs = sides(form)
    dice = random.Random(0)
    for made, source, truth in ((from_theirs, theirs, ours), (from_ours, ours, theirs)):
        for _ in range(40):
            name, tensor = dice.choice([*truth.items()])
            spans = [sorted(dice.sample(range(n + 1), 2)) for n in tensor.shape]
            box = tuple(slice(start, stop) for start, stop in spans)
            counted = Counted(source)
            assert torch.equal(Translated(counted, made).read(name, box), tensor[box])
            assert counted.elements == tensor[box].numel()


def test_what_is_read_whole_is_read_at_once():
    (from_theirs, from_ours), ours, theirs = sides("heads in groups")
    source = Memory(theirs)
    Translated(source, from_theirs).read("layers.1.qkv.weight")
    assert source.asked == ["layers.1.k.weight", "layers.1.q.weight", "layers.1.v.weight"]
    source = Memory(ours)
    Translated(source, from_ours).read("layers.1.k.weight")
    assert source.asked == ["layers.1.qkv.weight"] * G  # by head, so two stretches


def test_a_size_beyond_every_stored_dimension_is_refused_and_a_length_is_not():
    stored = Memory({str(i): torch.zeros(3) for i in range(4)})
    check_stored(small("llama", max_position_embeddings=2**24), stored, "FILE")
    for key in ("vocab_size", "hidden_size", "ffn_hidden_size"):
        with pytest.raises(ValueError, match=rf"FILE has {key}={2**52}, but the largest dimension of its tensors is 3"):
            check_stored(small("bloom", n_heads=1, **{key: 2**52}), stored, "FILE")


def test_a_number_that_is_not_finite_is_named_by_its_place_in_the_whole_tensor():
    tensor = torch.ones(4, 3)
    tensor[3, 1] = 7e4
    parts = Cast(Memory({"a": tensor}), "FILE", torch.float16)
    assert torch.equal(parts.read("a", (slice(0, 3), slice(None))), torch.ones(3, 3, dtype=torch.float16))
    with pytest.raises(ValueError, match=r"^FILE: 'a' has 70000.0 at \[3, 1\], which is inf in float16; "):
        parts.read("a", (slice(2, 4), slice(1, None)))


def test_parts_of_several_dtypes_become_one_that_holds_them_all():
    (from_theirs, _), _, theirs = sides("concat")
    theirs["mlp.up.weight"] = theirs["mlp.up.weight"].bfloat16()
    read = Translated(Memory(theirs), from_theirs).read("mlp.gate_up.weight")
    assert torch.equal(read, torch.cat([*(t.float() for t in theirs.values())]))
    assert read.dtype == torch.float32


def test_names_are_in_the_order_of_ours_with_layers_by_number():
    shapes = {f"layers.{i}.up.weight": (2, 2) for i in (10, 9, 0)} | {"embed.weight": (3, 2)}
    rules = [Rule("layers.{}.up.", "h.{}.fc."), Rule("embed.", "wte.")]
    theirs = directions(rules, shapes, Heads(1, 1)).theirs
    assert [*theirs] == ["wte.weight", "h.0.fc.weight", "h.9.fc.weight", "h.10.fc.weight"]


@pytest.mark.parametrize(
    ("rule", "shapes", "message"),
    [
        (Rule("a.", "b."), {"c.weight": (1,)}, "'c.weight' is in no rule of the format"),
        (Rule("a.", "b."), {"a.scale": (1,)}, "'a.scale' is in no rule"),
        (Rule(("a.", "b."), "c.", "concat"), {"b.weight": (1,)}, "'a.weight' is missing"),
        (Rule("a.", ("b.", "c."), "concat"), {"a.weight": (3,)}, "3 rows of 'a.' cannot be cut into 2 equal parts"),
        (Rule("a.", "b.", "heads"), {"a.weight": (3,)}, "3 rows cannot be 2 \\+ 2 x 2 heads"),
    ],
)
def test_tensors_that_do_not_fit_the_rules_are_refused(rule: Rule, shapes: dict[str, tuple[int, ...]], message: str):
    with pytest.raises(ValueError, match=message):
        directions([rule], shapes, Heads(2, 2))


# ------------------------------------------------------------------------------ a GPT-2, whose tensors have all forms


def gpt2(folder: Path) -> Any:
    from tests import hf_models

    model = hf_models.build(hf_models.Case("gpt2"))
    model.save_pretrained(folder)
    return model


@pytest.fixture
def ours_of_gpt2(tmp_path: Path) -> tuple[Any, config.Model, nn.Module]:
    """transformers' model, in tmp_path / "theirs"; its [model] section, and our model on meta."""
    model = gpt2(tmp_path / "theirs")
    _, section = recognise.open_folder(tmp_path / "theirs", None)
    with torch.device("meta"):
        whole = families.of(section).build(section)
    return model, section, whole


def test_a_gpt2_computes_with_our_rows_what_transformers_computes_with_its_own(tmp_path: Path, ours_of_gpt2):
    model, section, whole = ours_of_gpt2
    source = ours.open_weights(tmp_path / "theirs", HF, section, lambda _: whole)
    attention = model.transformer.h[1].attn
    x = torch.eye(section.hidden_size)  # so that each product is one number, without rounding
    qkv = nn.functional.linear(x, source.read("layers.1.attn.qkv.weight"), source.read("layers.1.attn.qkv.bias"))
    ours_by_head = qkv.unflatten(-1, (section.n_heads, 3, section.head_dim)).unbind(2)
    theirs_by_head = [part.unflatten(-1, (section.n_heads, -1)) for part in attention.c_attn(x).chunk(3, dim=-1)]
    assert all(torch.equal(a, b) for a, b in zip(ours_by_head, theirs_by_head, strict=True))
    down = source.read("layers.0.mlp.down.weight")
    x = torch.eye(4 * section.hidden_size)
    theirs = model.transformer.h[0].mlp.c_proj(x)
    assert torch.equal(nn.functional.linear(x, down, source.read("layers.0.mlp.down.bias")), theirs)


@pytest.mark.parametrize("kind", ["as it is", "bare", "with masks and a head"])
def test_a_gpt2_goes_through_our_form_and_back_to_the_bit(tmp_path: Path, ours_of_gpt2, kind: str):
    from transformers import AutoModelForCausalLM

    model, section, whole = ours_of_gpt2
    file = tmp_path / "theirs" / "model.safetensors"
    tensors = load_file(file)
    if kind == "bare":  # as the hub has it
        tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    if kind == "with masks and a head":
        tensors |= {"transformer.h.0.attn.bias": torch.ones(1), "transformer.h.1.attn.masked_bias": torch.ones(1)}
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    source = ours.open_weights(tmp_path / "theirs", HF, section, lambda _: whole)
    assert "head.weight" not in source.tensors
    held = Memory({name: source.read(name).contiguous() for name in source.tensors})
    alone: dict[str, Any] = {"rank": 0, "size": 1, "barrier": lambda: None}
    theirs = as_theirs(held, HF, section, lambda _: whole)
    export.export(theirs, tmp_path / "out", HF.to_config(section), None, None, **alone)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    again, info = loaded
    assert not any(info.values())
    truth = model.state_dict()
    assert again.state_dict().keys() == truth.keys()
    assert all(torch.equal(tensor, truth[name]) for name, tensor in again.state_dict().items())
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")


def test_a_gpt2_that_lacks_a_tensor_or_has_another_form_is_refused_by_their_name(tmp_path: Path, ours_of_gpt2):
    _, section, whole = ours_of_gpt2
    file = tmp_path / "theirs" / "model.safetensors"
    tensors = load_file(file)
    c_fc = tensors.pop("transformer.h.1.mlp.c_fc.weight")
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"has no 'transformer.h.1.mlp.c_fc.weight' in its safetensors files"):
        ours.open_weights(tmp_path / "theirs", HF, section, lambda _: whole)
    save_file(tensors | {"transformer.h.1.mlp.c_fc.weight": c_fc.T.contiguous()}, file)
    with pytest.raises(ValueError, match=r"'transformer.h.1.mlp.c_fc.weight' of .* is \[256, 64\], but .* \[64, 256\]"):
        ours.open_weights(tmp_path / "theirs", HF, section, lambda _: whole)


# ------------------------------------------------------------------------------------- the formats of our own families

OWN = {name: record for name, record in stored.all_families().items() if record.formats}


def small(name: str, **keys: Any) -> config.Model:
    sizes = {"vocab_size": 13, "hidden_size": 16, "n_layers": 2, "n_heads": 4}
    return config.model_section({"name": name, **sizes, **keys}, "test")


@pytest.mark.parametrize("name", OWN)
def test_rows_of_padding_are_of_the_tensors_by_token_and_of_no_others(name: str):
    plain, padded = (families.shapes(small(name, pad_vocab_to_multiple=n)) for n in (1, 8))
    assert {n for n in plain if plain[n] != padded[n]} == {*BY_TOKEN} & plain.keys()
    assert all(padded[n] == (16, *plain[n][1:]) for n in BY_TOKEN if n in plain)


# What a class needs beside the values that all of its models have.
MORE = {"deepseek_v3": {"kv_latent_size": 8, "kv_channels": 6, "rotary_channels": 2, "shared_experts": 1}}
FORMS_OF_OWN = [pytest.param(name, form, id=form.kind) for name, record in OWN.items() for form in record.formats["hf"]]


@pytest.mark.parametrize(("name", "form"), FORMS_OF_OWN)
def test_a_configuration_of_theirs_describes_the_model_that_it_was_written_of(name: str, form: Format):
    model = small(name, **form.implied | MORE.get(form.kind, {}))
    assert OWN[name].form(model, "hf", form.kind) is form
    section = form.section(form.to_config(model), "config.json")
    form.check(form.to_config(model), "config.json", model)
    again = config.model_section({"name": name, **section}, "test")
    assert form.to_config(again) == form.to_config(model)


def test_a_directory_is_of_the_family_that_its_config_json_names(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(
        ValueError, match=r"has model_type='mamba', expected one of .*bloom, .*gpt2.* \(\[model\] name\).* trains it"
    ):
        recognise.open_folder(tmp_path, None)
    gpt2(tmp_path)
    assert recognise.open_folder(tmp_path, None)[1].name == "gpt"


@pytest.mark.parametrize(("key", "value"), [("model_type", "opt"), ("activation_function", "relu")])
def test_what_every_model_of_the_family_has_is_held_against_a_configuration_that_says_otherwise(key: str, value: Any):
    theirs = HF.to_config(GPTKeys())
    del theirs["activation_function"]
    HF.section({**theirs, "architectures": ["GPT2Model"]}, "config.json")
    with pytest.raises(ValueError, match=rf"config.json has {key}={value!r}, expected .* \(\[model\] name\)"):
        HF.section({**theirs, key: value}, "config.json")


def test_what_to_section_adds_is_compared_too():
    form = dataclasses.replace(HF, to_section=lambda theirs: {"z_loss": theirs["z"]})
    theirs = HF.to_config(GPTKeys()) | {"z": 0.5}
    assert form.section(theirs, "config.json")["z_loss"] == 0.5
    with pytest.raises(ValueError, match=r"is of a model with z_loss=0.5, not 0.0 \(\[model\] z_loss\)"):
        form.check(theirs, "config.json", GPTKeys())
    form.check(theirs, "config.json", GPTKeys(z_loss=0.5))
