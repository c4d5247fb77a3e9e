"""Choose the family of a command's model and set the [model] keys that depend on several flags."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from dtmega.interop.megatron.core_forms import windows
from dtmega.interop.megatron.launch.command import Command
from dtmega.interop.megatron.launch.draft import Draft, as_number
from dtmega.interop.megatron.launch.experts import has_experts, has_experts_of_fork

# Script -> family of the trained model, unless the flags select another family.
FAMILY_OF_SCRIPT = {
    "pretrain_gpt": "gpt",
    "pretrain_gpt2": "gpt",
    "pretrain_prefix_lm": "gpt",
    "pretrain_bert": "bert",
    "pretrain_t5": "t5",
}
# [model] keys that no flag sets, with the values that every T5 in Megatron has.
THEIR_T5: Mapping[str, Any] = MappingProxyType(
    {
        "positions": "learned",
        "norm": "layer",
        "bias": True,
        "scale_head": False,
        "scale_scores": True,
        "init": "normal",
    }
)
LLAMAS = ("llama", "moe")  # families with Llama's attention
ROTARY = ("rotary", "rope")
ABSOLUTE = ("absolute", "learned_absolute")
# Llama 3.1's scaling of rotary frequencies. Source: megatron-core, `rotary_pos_embedding.py`, _apply_scaling.
ROPE_SCALING = {"rope_low_freq_factor": 1.0, "rope_high_freq_factor": 4.0, "rope_original_length": 8192}
# Query-key layer scaling was on by default until Megatron-LM's commit 94a3749f87 of 2 November 2023. A command with a
# flag in UNTIL_2023 is older than this commit, because an earlier commit removed the flag; a command with a flag in
# SINCE_2023 is newer, because a later commit added the flag. The DeepSpeed forks never changed the default.
UNTIL_2023 = (
    *("--checkpoint-activations", "--checkpoint-num-layers", "--activations-checkpoint-method", "--batch-size"),
    *("--model-parallel-size", "--data-impl", "--mmap-warmup", "--DDP-impl", "--scattered-embeddings", "--warmup"),
)
SINCE_2023 = (
    *("--use-legacy-models", "--attention-backend", "--overlap-param-gather", "--ckpt-format", "--rotary-base"),
    *("--mock-data", "--log-throughput", "--deterministic-mode", "--calculate-per-token-loss", "--decoupled-lr"),
    *("--no-mmap-bin-files", "--no-create-attention-mask-in-dataloader", "--cross-entropy-loss-fusion"),
    *("--use-dist-ckpt", "--dist-ckpt-format", "--log-progress"),
)
OF_LLAMA = (
    *("--group-query-attention", "--num-query-groups", "--rotary-base", "--use-rope-scaling", "--window-size"),
    "--window-attn-skip-freq",
)
FOR_DEEPSPEED = (
    *("--deepspeed", "--deepspeed_config", "--zero-stage", "--no-pipeline-parallel", "--ds-sequence-parallel-size"),
    *("--embed-layernorm", "--pad-vocab-size-to", "--kill-switch-path", "--sync-tp-duplicated-parameters"),
    *("--train-weighted-split-paths", "--train-weighted-split-paths-path", "--glu-activation", "--valid-num-workers"),
)
# Value of --original -> whether query-key layer scaling is on by default.
SCALES_BY_DEFAULT = {"megatron-lm": True, "megatron-deepspeed": True, "megatron-core": False}


def positions_of(command: Command) -> str:
    """The position embedding that a command's flags select: absolute, rope, alibi, none, or any other value."""
    values = command.values.get("--position-embedding-type")
    kind = values[0] if values else "absolute"
    if "--use-rotary-position-embeddings" in command.values:
        kind = "rope"
    elif "--no-position-embedding" in command.values and kind in ABSOLUTE:
        kind = "none"
    if kind in ROTARY:
        return "rope"
    return "absolute" if kind in ABSOLUTE else kind


def family_of(command: Command) -> str:
    """The family of a command's model.

    Raises:
        ValueError: the script trains a model that dtmega does not have.
    """
    if command.script not in FAMILY_OF_SCRIPT:
        known = ", ".join(f"{name}.py" for name in FAMILY_OF_SCRIPT)
        raise ValueError(f"{command.script}.py trains a model that is not built here; expected one of {known}")
    family = FAMILY_OF_SCRIPT[command.script]
    if family != "gpt":
        return family
    is_mixture = has_experts(command) and not has_experts_of_fork(command)
    of_positions = {"alibi": "bloom", "rope": "moe" if is_mixture else "llama"}
    return of_positions.get(positions_of(command), "gpt")


def set_model(draft: Draft) -> None:
    """Set the run's directory and the [model] keys, except for the vocabulary."""
    draft.keys["model.name"] = draft.family
    draft.keys["run.dir"] = f"runs/{draft.family}"
    if "max_position_embeddings" in draft.fields_of("model"):
        _set_length(draft)
    _check_positions(draft)
    _check_parts(draft)
    _set_gelu(draft)
    if draft.family in LLAMAS:
        _set_llama(draft)
    elif draft.family == "t5":
        draft.keys |= {f"model.{key}": value for key, value in THEIR_T5.items()}
    if draft.has("swiglu") and draft.family not in LLAMAS:
        _set_swiglu(draft)
    if draft.has("untie-embeddings-and-output-weights") and draft.family not in LLAMAS:
        if "tied" in draft.fields_of("model") and draft.family != "t5":
            draft.keys["model.tied"] = False
        else:
            draft.refuse("--untie-embeddings-and-output-weights", f"a {draft.family} has one weight for both")
    _set_scaling(draft)


def _set_length(draft: Draft) -> None:
    if draft.has("max-position-embeddings"):
        if draft.unknown("--max-position-embeddings"):
            draft.lack(
                "model.max_position_embeddings",
                draft.unknown("--max-position-embeddings"),
                "--max-position-embeddings",
            )
        else:
            draft.keys["model.max_position_embeddings"] = draft.number("max-position-embeddings")


def _check_positions(draft: Draft) -> None:
    """Refuse a position embedding or an embedding LayerNorm that does not fit the family."""
    kind = positions_of(draft.command)
    expected = {"bloom": "alibi", "llama": "rope", "moe": "rope"}.get(draft.family, "absolute")
    if kind != expected:
        name = "rotary" if kind == "rope" else kind
        draft.refuse(_positions_flag(draft), f"{name} positions in a {draft.family} are not built")
    is_bloom = draft.family == "bloom"
    if draft.has("embed-layernorm") and not is_bloom:
        draft.refuse("--embed-layernorm", f"a {draft.family} has none")
    if is_bloom and not draft.has("embed-layernorm"):
        draft.refuse(
            "--position-embedding-type", "without --embed-layernorm; a bloom has a LayerNorm after its embedding"
        )


def _check_parts(draft: Draft) -> None:
    """Refuse norms, biases, and flags for attention or rotary positions that do not fit the family."""
    family, is_llama = draft.family, draft.family in LLAMAS
    norm = (draft.value("normalization") or "").lower()
    if norm != ("rmsnorm" if is_llama else "layernorm"):
        if draft.has("normalization"):
            draft.refuse("--normalization", f"a {family} does not have it")
        else:
            _refuse_positions(draft, "--normalization RMSNorm", "a llama has RMSNorm")
    if draft.has("disable-bias-linear") != is_llama:
        if is_llama:
            _refuse_positions(draft, "--disable-bias-linear", "a llama has no biases")
        else:
            draft.refuse("--disable-bias-linear", f"a {family} has biases")
    if not is_llama:
        for flag in OF_LLAMA:
            if flag in draft.command.values:
                draft.refuse(flag, f"a {family} has none")
    width = draft.number("kv-channels") if draft.has("kv-channels") else None
    size, heads = draft.number("hidden-size"), draft.number("num-attention-heads")
    if family != "t5" and width and size and heads and width * heads == size:
        # The given head width equals the default, D / H.
        draft.keys.pop("model.kv_channels", None)
        draft.open.pop("--kv-channels", None)
        draft.read.add("--kv-channels")


def _refuse_positions(draft: Draft, flag: str, reason: str) -> None:
    """Refuse rotary positions: only a llama has them, and the command lacks a flag that every llama needs."""
    name = _positions_flag(draft)
    before = draft.open.get(name)
    more = f"{before.reason}; " if before else "rotary positions are built in a llama only: "
    draft.refuse(name, f"{more}without {flag}, and {reason}")


def _positions_flag(draft: Draft) -> str:
    """The flag that selects the command's position embedding."""
    names = ("--use-rotary-position-embeddings", "--no-position-embedding", "--position-embedding-type")
    return next((name for name in names if name in draft.command.values), names[-1])


def _set_gelu(draft: Draft) -> None:
    """Set the feed-forward's GELU. Megatron's fused GELU is the tanh approximation."""
    is_erf = draft.has("no-bias-gelu-fusion") and not draft.has("openai-gelu")
    gelu = "erf" if is_erf else "tanh"
    if draft.family == "bert":
        draft.keys["model.gelu"] = gelu
    elif draft.family == "t5":
        draft.keys["model.activation"] = f"gelu_{gelu}"
    elif is_erf and draft.family not in LLAMAS and not (draft.has("swiglu") or draft.has("glu-activation")):
        draft.refuse("--no-bias-gelu-fusion", f"a {draft.family} has the GELU with tanh")


def _set_swiglu(draft: Draft) -> None:
    """Set the keys for a SwiGLU feed-forward in a family other than llama and moe."""
    if "glu" not in draft.fields_of("model"):
        draft.refuse("--swiglu", f"a {draft.family} has no gated feed-forward with SiLU")
        return
    draft.keys["model.glu"] = "swiglu"
    _set_gated_width(draft)


def _set_gated_width(draft: Draft) -> None:
    """Set the width of a gated feed-forward. Megatron's default is 8/3 D, rounded down to a multiple of 64."""
    size = draft.number("hidden-size")
    if not draft.has("ffn-hidden-size") and size:
        # Source: validate_args in megatron/training/arguments.py.
        draft.keys["model.ffn_hidden_size"] = int((4 * size * 2 / 3) / 64) * 64


def _set_llama(draft: Draft) -> None:
    """Refuse flags that do not fit a llama, and set the keys of a llama or moe."""
    if draft.has("swiglu"):
        _set_gated_width(draft)
    else:
        _refuse_positions(draft, "--swiglu", "the feed-forward of a llama is gated")
    draft.keys["model.tied"] = not draft.has("untie-embeddings-and-output-weights")
    for flag, key in (("rotary-base", "rope_theta"), ("num-query-groups", "n_kv_heads")):
        if draft.unknown(f"--{flag}"):
            draft.lack(f"model.{key}", draft.unknown(f"--{flag}"), f"--{flag}")
    base = draft.number("rotary-base")
    if base is not None and draft.has("rotary-base"):
        draft.keys["model.rope_theta"] = float(base)
    groups = draft.number("num-query-groups")
    if groups is not None and (draft.has("group-query-attention") or draft.has("num-query-groups")):
        draft.keys["model.n_kv_heads"] = groups
    if draft.has("use-rope-scaling"):
        draft.keys |= {f"model.{key}": value for key, value in ROPE_SCALING.items()}
        draft.keys["model.rope_factor"] = draft.number("rope-scaling-factor")
    _set_windows(draft)
    for name in ("attention-dropout", "hidden-dropout"):
        flag = f"--{name}"
        if draft.number(name) == 0:
            draft.open.pop(flag, None)
            draft.read.add(flag)
        else:
            written = "" if draft.has(name) else f", Megatron's default, is {draft.value(name)}"
            draft.refuse(flag, f"a llama has no dropout{written}")


def _set_windows(draft: Draft) -> None:
    """Set a llama's attention window, and the layers that have the window."""
    if not draft.has("window-size"):
        return
    size, frequency = (draft.value(name) for name in ("window-size", "window-attn-skip-freq"))
    n_layers = draft.number("num-layers")
    for flag, key in (("--window-size", "window"), ("--window-attn-skip-freq", "window_layers")):
        if draft.unknown(flag):
            draft.lack(f"model.{key}", draft.unknown(flag), flag)
            return
    numbers = [as_number(text) for text in (size or "").strip("()").split(",")]
    every = None if frequency is None else as_number(frequency)
    try:
        keys = windows(numbers, frequency if every is None else every, int(n_layers or 0))
    except ValueError:
        draft.refuse("--window-size", "expected two numbers, and as --window-attn-skip-freq one, not a list")
        return
    draft.keys |= {f"model.{key}": value for key, value in keys.items() if value}


def _set_scaling(draft: Draft) -> None:
    """Set query-key layer scaling, which has an effect in float16 only."""
    if not draft.has("fp16") or "query_key_layer_scaling" not in draft.fields_of("model"):
        return
    if draft.has("no-query-key-layer-scaling") or draft.has("apply-query-key-layer-scaling"):
        scales: bool | None = draft.has("apply-query-key-layer-scaling")
    else:
        scales = _scales_by_default(draft)
    if scales is None:
        draft.refuse(
            "--fp16",
            "query-key layer scaling was the default until November 2023, and no flag tells the time: give --original",
        )
    if scales is not False:
        draft.keys["model.query_key_layer_scaling"] = True


def _scales_by_default(draft: Draft) -> bool | None:
    """True if the command's fork and version use query-key layer scaling by default; None if the default is unknown."""
    if draft.original:
        return SCALES_BY_DEFAULT[draft.original]
    written = {*draft.command.values, *draft.command.names.values()}
    if written & {*FOR_DEEPSPEED}:
        return True
    is_old, is_new = bool(written & {*UNTIL_2023}), bool(written & {*SINCE_2023})
    return None if is_old == is_new else is_old
