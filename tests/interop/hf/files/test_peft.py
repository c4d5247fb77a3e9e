"""Claims about folders of adapters: peft itself loads those of every kind, and what it cannot load is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.utils.save_and_load import set_peft_model_state_dict
from torch import Tensor

from dtmega import config, families
from dtmega.config.families.hf import TransformersKeys
from dtmega.interop import stored
from dtmega.interop.hf.families import LAYER_KEYS, NOT_IN_PEFT
from dtmega.interop.hf.files import peft as peft_files
from dtmega.interop.hf.files.peft import Adapters, TheirModel, write_peft
from dtmega.models import lora
from tests import hf_models, layouts
from tests.checkpoint.test_base import InMemory
from tests.hf_models import Case, transformers

# Adapter or not, weights are of this size.
SIZE = 0.1
_MIXTURE = {"model.name": "moe", "model.hidden_size": 32, "model.n_heads": 4, "model.n_kv_heads": 2}
_MIXTURE |= {"model.n_layers": 2, "model.ffn_hidden_size": 64, "model.n_experts": 4, "model.vocab_size": 64}
_MIXTURE |= {"model.expert_ffn_hidden_size": 32, "model.normalize_weights": True}
_DEEPSEEK = {"model.n_kv_heads": 0, "model.kv_latent_size": 16, "model.kv_channels": 8, "model.rotary_channels": 4}
_DEEPSEEK |= {"model.v_channels": 6, "model.router_scores": "sigmoid", "model.router_bias": True}
_DEEPSEEK |= {"model.shared_experts": 1, "model.dense_layers": 1, "model.q_latent_size": 20}
# Each form in which a family of ours is written.
OURS: dict[str, dict[str, Any]] = {
    **{name: layouts.FAMILIES[name] for name in ("bloom", "gpt", "llama", "t5")},
    "mistral": layouts.FAMILIES["llama"] | {"model.window": 6},
    "qwen3": layouts.FAMILIES["llama"] | {"model.qk_norm": True},
    "bert": layouts.FAMILIES["bert"] | {"model.norm": "post"},
    "megatron-bert": layouts.FAMILIES["bert"] | {"model.norm": "pre"},
    "mixtral": _MIXTURE,
    "qwen3_moe": _MIXTURE | {"model.qk_norm": True},
    "deepseek_v3": _MIXTURE | _DEEPSEEK | {"lora.targets": ["attn.*"]},
}
# Layers stored as [in, out], fused ones, nested kinds of attention, and a mixture.
OF_TRANSFORMERS = ("gpt2", "phi3", "gemma3_text", "olmoe")
_ALL = {**hf_models.MODELS, **hf_models.VARIANTS, **hf_models.TRAINED, **hf_models.MIXTURES}
_OTHERS = [name for name in _ALL if _ALL[name][0].endswith(("ForCausalLM", "LMHeadModel")) and "bert" not in name]
_REFUSED = ("mamba", "qwen3_moe", "deepseek_v3")
EVERY = [
    *OURS,
    *(f"hf {name}" for name in OF_TRANSFORMERS),
    *(
        pytest.param(f"hf {name}", marks=pytest.mark.full)
        for name in _OTHERS
        if name not in (*OF_TRANSFORMERS, *_REFUSED)
    ),
]


def configured(kind: str, **more: Any) -> config.Config:
    if kind.startswith("hf "):
        (path,) = hf_models.saved([Case(kind.removeprefix("hf "), tied=False)]).values()
        keys = {"model.name": "hf", "model.path": path, "data.seq_len": 16}
    else:
        keys = {key: value for key, value in OURS[kind].items() if key.startswith(("model.", "lora."))}
    sections: dict[str, dict[str, Any]] = {"train": {"steps": 1}, "data": {"tokenizer": "bytes"}}
    for key, value in {"lora.rank": 2, "lora.alpha": 6.0, **keys, **more}.items():
        section, _, key = key.partition(".")
        sections.setdefault(section, {})[key] = value
    return families.resolve(config.validate(sections, "test"))


def exported(cfg: config.Config, folder: Path) -> tuple[Adapters, TheirModel]:
    """Write folder/base and folder/merged, without adapters and with them added by hand; the adapters."""
    files, whole = stored.of(cfg.model), families.build(cfg)
    generator = torch.Generator().manual_seed(0)
    drawn: dict[str, Tensor] = {}
    for name, tensor in whole.stored_tensors():
        drawn[whole.full_name(name)] = torch.randn(tensor.shape, generator=generator) * SIZE
    adapters = {name: tensor for name, tensor in drawn.items() if lora.is_adapter(name)}
    base = {name: tensor for name, tensor in drawn.items() if name not in adapters}
    transposed = lora.transposed_layers(whole)
    layers = tuple(name.removesuffix(".lora_a") for name in adapters if name.endswith(".lora_a"))
    merged = dict(base)
    for layer in layers:
        update = 3.0 * adapters[f"{layer}.lora_b"] @ adapters[f"{layer}.lora_a"]
        merged[f"{layer}.weight"] = base[f"{layer}.weight"] + (update.T if layer in transposed else update)
    for name, tensors in (("base", base), ("merged", merged)):
        files.export(InMemory(**tensors), folder / name, cfg.model, None, rank=0, size=1, barrier=lambda: None)
    adapted = Adapters(InMemory(**adapters), layers, cfg.lora, str(folder / "base"))
    return adapted, files.their_model(cfg.model, layers)


# peft asks transformers 5 for what is called otherwise there.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", EVERY)
def test_peft_itself_loads_every_adapter_and_merges_it_to_the_weights_that_merge_writes(kind: str, tmp_path: Path):
    adapters, theirs = exported(configured(kind), tmp_path)
    write_peft(tmp_path / "adapters", adapters, theirs, {})
    (name,) = json.loads((tmp_path / "base" / "config.json").read_text())["architectures"]
    base, merged = (
        getattr(transformers, name).from_pretrained(tmp_path / folder, dtype=torch.float32)
        for folder in ("base", "merged")
    )
    model = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapters"))  # what it does not find is a warning
    assert sum("lora_" in name for name, _ in model.named_parameters()) == 2 * len(theirs.layers)
    expected = merged.state_dict()
    for name, tensor in model.merge_and_unload().state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "more", "words"),
    [
        ("deepseek_v3", {"lora.targets": "linears"}, "layers.0.mlp.down_proj and 5 more layers of 'deepseek_v3'"),
        ("qwen3_moe", {"model.dense_layers": 1}, "layers.0.mlp.down_proj and 2 more layers of 'qwen3_moe'"),
        ("hf qwen3_moe", {}, "layers.0.mlp.gate_proj and 2 more layers of 'qwen3_moe'"),
        ("hf mamba", {"lora.targets": ["out_proj"]}, "layers.0.mixer.out_proj and 1 more layers of 'mamba'"),
    ],
)
def test_what_peft_cannot_load_is_refused_with_merge_as_the_cure(
    kind: str, more: dict[str, Any], words: str, tmp_path: Path
):
    adapters, theirs = exported(configured(kind, **more), tmp_path)
    with pytest.raises(ValueError) as refused:
        write_peft(tmp_path / "adapters", adapters, theirs, {})
    assert words in str(refused.value)
    assert str(refused.value).endswith("expected --merge, which adds them to the weights (--merge)")
    assert not (tmp_path / "adapters").exists()


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_peft_loads_whatever_is_written_for_every_kind_of_transformers(tmp_path: Path):
    """On meta, with the default sizes of each kind and eight layers."""
    wrong = {}
    for kind in transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            made = transformers.AutoConfig.for_model(kind)
            for key in LAYER_KEYS:
                if isinstance(getattr(made, key, None), int) and not isinstance(getattr(type(made), key, 0), property):
                    setattr(made, key, min(8, getattr(made, key)))
            if getattr(made, "layer_types", None):
                made.layer_types = made.layer_types[:8]
            made.save_pretrained(tmp_path)
            model = TransformersKeys(name="hf", path=str(tmp_path), vocab_size=made.vocab_size)
            with torch.device("meta"):
                whole: Any = families.of(model).build(model)
        except Exception:  # no kind that the trainer takes
            continue
        lacks = NOT_IN_PEFT.get(kind, ())
        known = {name: layer for name, layer in lora.linears(whole).items() if name.rpartition(".")[2] not in lacks}
        theirs = stored.of(model).their_model(model, known)
        adapters: dict[str, Tensor] = {}
        for name, layer in known.items():
            adapters[f"{name}.lora_a"] = torch.empty(2, layer.inputs, device="meta")
            adapters[f"{name}.lora_b"] = torch.empty(layer.outputs, 2, device="meta")
        adapted = Adapters(InMemory(**adapters), tuple(known), config.Lora(rank=2), "base")
        settings = peft_files._config(adapted, theirs)
        names = peft_files._InTheirForm(adapted.stored, theirs.layers)
        try:
            with torch.device("meta"):
                loaded = peft.get_peft_model(whole.hf, peft.LoraConfig(**settings))
            result = set_peft_model_state_dict(loaded, {name: names.read(name) for name in names.tensors})
            wrong[kind] = [*result.unexpected_keys, *(name for name in result.missing_keys if "lora_" in name)]
        except Exception as error:
            wrong[kind] = [str(error)]
    assert {kind: names for kind, names in wrong.items() if names} == {}
    assert len(wrong) > 100
