"""Small random models of transformers, with batches and what one process computes from them: the truth of HF tests."""

from __future__ import annotations

import copy
import functools
import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

NO_DROPOUT = ("resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout", "attention_dropout", "hidden_dropout")
NO_DROPOUT += ("dropout_rate", "hidden_dropout_prob", "attention_probs_dropout_prob", "residual_dropout")
_SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
_GQA = {**_SIZES, "num_key_value_heads": 2}
_BIASED = {"attention_bias": True, "mlp_bias": True}
_OPT = {"hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
_T5 = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
_GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0}
_MPT = {"d_model": 96, "n_layers": 2, "max_seq_len": 64}
_XGLM = {"d_model": 64, "ffn_dim": 96, "num_layers": 2, "attention_heads": 4, "max_position_embeddings": 64}
_GPT_NEO = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
# name -> (model class, config class, keys); the first part of a name is the family
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bloom": ("BloomForCausalLM", "BloomConfig", {"hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _GPT2),
    "llama": ("LlamaForCausalLM", "LlamaConfig", _GQA),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**_GQA, "sliding_window": 6}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _GQA),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_GQA, "head_dim": 24}),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _SIZES),
    "opt": ("OPTForCausalLM", "OPTConfig", {**_OPT, "word_embed_proj_dim": 64}),
    "bert": ("BertForMaskedLM", "BertConfig", _SIZES),
    "t5": ("T5ForConditionalGeneration", "T5Config", _T5),
}
VARIANTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bloom post-layernorm": (
        *MODELS["bloom"][:2],
        {**MODELS["bloom"][2], "apply_residual_connection_post_layernorm": True},
    ),
    "bloom base": ("BloomModel", "BloomConfig", MODELS["bloom"][2]),
    "gpt2 upcast": (*MODELS["gpt2"][:2], {**_GPT2, "reorder_and_upcast_attn": True, "attn_implementation": "eager"}),
    "llama eager, biased": (*MODELS["llama"][:2], {**_GQA, **_BIASED, "attn_implementation": "eager"}),
    "llama classifier": ("LlamaForSequenceClassification", "LlamaConfig", {**_GQA, "pad_token_id": 1}),
    "llama padding_idx": (*MODELS["llama"][:2], {**_GQA, "pad_token_id": 70}),
    "gpt_neox sequential": (*MODELS["gpt_neox"][:2], {**_SIZES, "use_parallel_residual": False}),
    "opt projected, post-layernorm": (
        *MODELS["opt"][:2],
        {**_OPT, "word_embed_proj_dim": 32, "do_layer_norm_before": False},
    ),
    "bert base": ("BertModel", "BertConfig", _SIZES),
    "bert decoder": ("BertLMHeadModel", "BertConfig", {**_SIZES, "is_decoder": True}),
    "t5 gated": (*MODELS["t5"][:2], {**_T5, "feed_forward_proj": "gated-gelu"}),
    "t5 encoder": ("T5EncoderModel", "T5Config", _T5),
    "gptj": ("GPTJForCausalLM", "GPTJConfig", {**_GPT2, "rotary_dim": 8}),
    # Of four blocks of heads each has two for each of two ranks.
    "codegen": ("CodeGenForCausalLM", "CodeGenConfig", {**_GPT2, "n_head": 16, "rotary_dim": 2}),
    "mpt": ("MptForCausalLM", "MptConfig", {**_MPT, "n_heads": 6, "attn_config": {"clip_qkv": 1.0}}),
    "xglm": ("XGLMForCausalLM", "XGLMConfig", {**_XGLM, "pad_token_id": 1}),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", _GPT2),
    "gpt_bigcode multi-head": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", {**_GPT2, "multi_query": False}),
    "stablelm": ("StableLmForCausalLM", "StableLmConfig", {**_GQA, "use_qkv_bias": True}),
    "stablelm parallel, norms": (
        "StableLmForCausalLM",
        "StableLmConfig",
        {**_GQA, "use_parallel_residual": True, "qk_layernorm": True},
    ),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", _GQA),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**_GQA, "pad_token_id": 0}),
    # Between head and loss: a soft cap, which their logits here come near to, a divisor, a factor.
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**_GQA, "head_dim": 16, "final_logit_softcapping": 3.0, "sliding_window": 6},
    ),
    "granite": (
        "GraniteForCausalLM",
        "GraniteConfig",
        {**_GQA, "logits_scaling": 0.3, "embedding_multiplier": 5.0, "residual_multiplier": 0.7, "pad_token_id": None},
    ),
    "cohere": ("CohereForCausalLM", "CohereConfig", {**_GQA, "logit_scale": 0.7, "pad_token_id": 0}),
}
# For the trainer only. The kinds of layers differ, so that a stage must look them up by the number in the whole model.
_SLIDING = {**_GQA, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
_KINDS = {**_GQA, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
TRAINED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen2 sliding": (*MODELS["qwen2"][:2], _SLIDING),
    "mamba": ("MambaForCausalLM", "MambaConfig", {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8}),
    "gpt_neo": ("GPTNeoForCausalLM", "GPTNeoConfig", {**_GPT_NEO, "max_position_embeddings": 64}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**_GQA, "head_dim": 16}),
    # Each kind of layer has its own mask, and its own rotation.
    "gemma3_text": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**_KINDS, "head_dim": 16}),
    "olmo": ("OlmoForCausalLM", "OlmoConfig", {**_GQA, "clip_qkv": 0.5}),
    "olmo3": ("Olmo3ForCausalLM", "Olmo3Config", {**_KINDS}),
    "phi": ("PhiForCausalLM", "PhiConfig", _SIZES),
    "cohere2": ("Cohere2ForCausalLM", "Cohere2Config", {**_KINDS, "logit_scale": 0.7, "pad_token_id": 0}),
    "starcoder2": ("Starcoder2ForCausalLM", "Starcoder2Config", {**_GQA, "sliding_window": 6}),
    "glm": ("GlmForCausalLM", "GlmConfig", {**_GQA, "head_dim": 16, "pad_token_id": 0}),
    "glm4": ("Glm4ForCausalLM", "Glm4Config", {**_GQA, "head_dim": 16, "pad_token_id": 0}),
    # Every second layer rotates nothing.
    "smollm3": ("SmolLM3ForCausalLM", "SmolLM3Config", {**_GQA, "no_rope_layer_interval": 2, "pad_token_id": 0}),
    "exaone4": ("Exaone4ForCausalLM", "Exaone4Config", _KINDS),
    "ernie4_5": ("Ernie4_5ForCausalLM", "Ernie4_5Config", {**_GQA, "head_dim": 16}),
    "apertus": ("ApertusForCausalLM", "ApertusConfig", {**_GQA, "head_dim": 16}),
    "arcee": ("ArceeForCausalLM", "ArceeConfig", _GQA),
}
_EXPERTS = {**_GQA, "intermediate_size": 48, "num_experts_per_tok": 2, "pad_token_id": None}
# Mixtures: the hub has their experts one by one, the model has them stacked.
MIXTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**_EXPERTS, "num_local_experts": 4, "sliding_window": 6}),
    "olmoe": ("OlmoeForCausalLM", "OlmoeConfig", {**_EXPERTS, "num_experts": 6, "num_experts_per_tok": 3}),
    # Whose first layer has none.
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**_EXPERTS, "num_experts": 4, "moe_intermediate_size": 24, "head_dim": 16, "mlp_only_layers": [0]},
    ),
}
_LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "v_head_dim": 16, "qk_nope_head_dim": 16}
_GROUPS = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "n_shared_experts": 1, "first_k_dense_replace": 1}
# Of its experts those are chosen that a stored vector, which is no parameter, makes come out first.
MIXTURES["deepseek_v3"] = (
    "DeepseekV3ForCausalLM",
    "DeepseekV3Config",
    {**_EXPERTS, **_LATENT, **_GROUPS, "num_key_value_heads": 4, "moe_intermediate_size": 24},
)
# A model with another model in it, which initialises its values in its own way.
NESTED: dict[str, Any] = {
    "text_config": {**_GQA, "vocab_size": 131, "head_dim": 16},
    "vision_config": {**_SIZES, "hidden_size": 48, "image_size": 28, "patch_size": 14},
    "mm_tokens_per_image": 4,
}
# transformers imports a model when it is asked for; once here, and not on every rank.
for _model_class, _, _ in (MODELS | VARIANTS | TRAINED | MIXTURES).values():
    getattr(transformers, _model_class)


@dataclass(frozen=True)
class Case:
    """A model and a batch: vocabulary of `vocab` tokens, sequences of `length`, with padding or not."""

    name: str
    vocab: int = 131
    tied: bool = True
    length: int = 12
    padded: bool = True
    kv_heads: int | None = None

    @property
    def family(self) -> str:
        return self.name.split()[0]


def plain(case: Case) -> Any:
    """The model as transformers makes it, without dropout; the same values whatever was drawn before."""
    torch.manual_seed(0)
    model_class, config_class, keys = (MODELS | VARIANTS | TRAINED | MIXTURES)[case.name]
    keys = dict(keys)
    attention = keys.pop("attn_implementation", None)
    if case.kv_heads:
        keys["num_key_value_heads"] = case.kv_heads
    config = getattr(transformers, config_class)(vocab_size=case.vocab, tie_word_embeddings=case.tied, **keys)
    for key in NO_DROPOUT:
        if hasattr(config, key):
            setattr(config, key, 0.0)
    options = {"attn_implementation": attention} if attention else {}
    return getattr(transformers, model_class)._from_config(config, **options)


def build(case: Case) -> Any:
    """The same, biases and norms not left at 0 and 1."""
    return copy.deepcopy(_built(case))


@functools.cache
def _built(case: Case) -> Any:
    """transformers takes longer to make a model than it takes to copy it."""
    model = plain(case)
    # OPT's attention is nearly even with small weights, and gradients of its queries what is left of large numbers.
    noise = 0.1 if case.family == "opt" else 0.05
    with torch.no_grad():
        for name, p in model.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            p.add_(torch.randn(p.shape, generator=generator) * (0.2 if p.ndim < 2 else noise))
        for name, stored in stored_buffers(model).items():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            stored.copy_(torch.randn(stored.shape, generator=generator))
    return model.train()


def stored_buffers(model: Any) -> dict[str, Tensor]:
    """What `save_pretrained` saves and no optimizer has."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {name: tensor for name, tensor in model.state_dict().items() if name not in parameters}


def batch(case: Case) -> dict[str, Tensor]:
    """Two rows; with padding one ends early and one begins late. Some labels do not count, in each row as many."""
    generator = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(3, case.vocab, (2, 2, case.length), generator=generator)
    labels[:, ::4] = -100
    found = {"input_ids": tokens, "labels": labels}
    if case.padded:
        found["attention_mask"] = torch.ones_like(tokens)
        found["attention_mask"][0, -3:] = 0
        found["attention_mask"][1, :2] = 0
    if case.name.endswith("classifier"):
        found["labels"] = torch.tensor([0, 1])
    elif case.name.split()[-1] in ("base", "encoder"):
        del found["labels"]
    return found


def forward(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(loss, logits or hidden state) with transformers' own loss where it has one."""
    out = model(**inputs)
    if "labels" in inputs:
        return out.loss, out.logits.detach()
    weights = torch.randn(out[0].shape, generator=torch.Generator().manual_seed(2))
    return (out[0] * weights).square().mean(), out[0].detach()


def steps(model: Any, inputs: dict[str, Tensor], losses: int = 1) -> None:
    """Three of AdamW with clipping; eps is large enough that a gradient which is 0 but for rounding stays none."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    for _ in range(3):
        optimizer.zero_grad()
        rows = [{k: v[i : i + 1] for k, v in inputs.items()} for i in range(2)] if losses == 2 else [inputs]
        for row in rows:
            (forward(model, row)[0] / losses).backward()
        # Of lists of DTensors torch takes seconds to find out how they are cut.
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False)
        optimizer.step()


@torch.no_grad()
def generated(model: Any, case: Case) -> Tensor:
    """Eight greedy tokens behind a prompt that tp does not divide, of which one row is padded on the left."""
    inputs = batch(Case(case.name, vocab=case.vocab, length=9))
    del inputs["labels"]
    inputs["attention_mask"][0] = 1
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 1, "eos_token_id": None}
    return model.eval().generate(**inputs, **options)


def truth(case: Case, rows_apart: bool, stepping: bool = True) -> dict[str, Any]:
    """The results of one process.

    Args:
        rows_apart: True if the loss is the mean of the rows' losses, as data ranks have it.
        stepping: True to have the parameters after three steps, too.
    """
    inputs, found = batch(case), {}
    model = build(case)
    rows = [{k: v[i : i + 1] for k, v in inputs.items()} for i in range(2)] if rows_apart else [inputs]
    results = [forward(model, row) for row in rows]
    for loss, _ in results:
        (loss / len(rows)).backward()
    found["losses"] = [loss.detach() for loss, _ in results]
    found["logits"] = [logits for _, logits in results]
    found["gradients"] = {n: p.grad for n, p in model.named_parameters(remove_duplicate=False)}
    if not stepping:
        return found
    model = build(case)
    steps(model, inputs, losses=len(rows))
    found["stepped"] = {n: p.detach() for n, p in model.named_parameters(remove_duplicate=False)}
    return found


def saved(cases: list[Case]) -> dict[Case, str]:
    """Directories as `save_pretrained` makes them, the weights in several files."""
    found = {}
    for case in cases:
        found[case] = str(Path(_folder().name, f"{zlib.crc32(repr(case).encode())}"))
        build(case).save_pretrained(found[case], max_shard_size="100KB")
    return found


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


def truths(cases: list[Case], rows_apart: bool, stepped: Sequence[Case] | None = None) -> str:
    """A file of {case: truth}, so that each is computed once and not on every rank.

    Args:
        cases: the models and batches.
        rows_apart: True if the loss is the mean of the rows' losses.
        stepped: cases with the parameters after three steps; all of them if None.
    """
    path = Path(_folder().name, f"{zlib.crc32(repr((cases, rows_apart, stepped)).encode())}.pt")
    found = {case: truth(case, rows_apart, stepping=stepped is None or case in stepped) for case in cases}
    torch.save(found, path)
    return str(path)
