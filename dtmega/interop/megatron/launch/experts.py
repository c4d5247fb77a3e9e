"""Set the keys for experts from a command's flags, and refuse each flag whose effect a `moe` would not reproduce.

Source: `transformer/moe/router.py` and `transformer/moe/moe_utils.py` of megatron-core 0.7 to 0.19.
"""

from __future__ import annotations

import ast
from typing import Any

from dtmega.interop.megatron.launch.command import Command
from dtmega.interop.megatron.launch.draft import Draft, as_number
from dtmega.interop.megatron.launch.expert_flags import EXPERTS, FORKS

EXPERTS_FLAG = "--num-experts"
NO_EXPERTS = (["0"], ["1"])  # flag values of a model without experts; 1 is the default in the DeepSpeed forks
LAYOUT_FLAGS = ("--expert-model-parallel-size", "--expert-tensor-parallel-size")
FREQUENCY, BALANCE, COEFFICIENT = "--moe-layer-freq", "--moe-router-load-balancing-type", "--moe-aux-loss-coeff"
LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss")  # balance types that do not change the choice of experts
MAX_PATTERN = 10_000  # maximum length of a list of layers


def has_experts(command: Command) -> bool:
    """True if a command's model has experts."""
    return command.values.get(EXPERTS_FLAG, ["0"]) not in NO_EXPERTS


def has_experts_of_fork(command: Command) -> bool:
    """True if a command's flags select experts as a DeepSpeed fork implements them."""
    given = command.values
    names = {"--deepspeed", "--deepspeed_config", *(name for flag in FORKS for name in flag.names)}
    return has_experts(command) and (len(given[EXPERTS_FLAG]) > 1 or bool(names & {*given}))


def set_experts(draft: Draft) -> None:
    """Set the keys for experts. If the model is not a moe, leave out all flags for experts."""
    if draft.family == "moe":
        steps = (_set_dense_layers, _set_shared_experts, _set_weights, _set_bias, _set_groups, _set_balance)
        for step in (*steps, _check_counted_tokens, _check_layout):
            step(draft)
        return
    for name in (*(name for flag in EXPERTS for name in flag.names), *LAYOUT_FLAGS):
        if name in draft.command.values:
            draft.open.pop(name, None)
            draft.notes[name] = f"a setting of {EXPERTS_FLAG}"
    draft.notes.pop(EXPERTS_FLAG, None)
    draft.keys.pop("mesh.ep", None)
    if has_experts_of_fork(draft.command):
        reason = "the forks for DeepSpeed have other experts: a number for each of some layers, and a capacity"
        draft.refuse(EXPERTS_FLAG, reason)
    elif has_experts(draft.command):
        draft.refuse(EXPERTS_FLAG, "experts are built in a moe only, which has rotary positions")


def layers_with_experts(pattern: str, n_layers: int) -> list[int]:
    """Convert the value of --moe-layer-freq to a list with one entry per layer: 1 with experts, 0 without experts.

    Args:
        pattern: value of the flag, either a number N if every N-th layer has experts, beginning with the first layer,
            or a Python list that may use + and *, such as ([0]*3+[1]*58).
        n_layers: number of layers.

    Raises:
        ValueError: the pattern is neither a positive number nor a list with one entry per layer.
    """
    every = as_number(pattern)
    if isinstance(every, int) and every > 0:
        return [int(layer % every == 0) for layer in range(n_layers)]
    try:
        layers = _value(ast.parse(pattern.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{pattern:.80}") from error
    if not isinstance(layers, list) or len(layers) != n_layers:
        raise ValueError(f"{pattern:.80}")
    return layers


def _value(node: ast.expr) -> Any:
    """Evaluate an expression that consists of numbers, lists of numbers, + and *."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        return [_value(item) for item in node.elts]
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add | ast.Mult):
        raise ValueError(ast.dump(node))
    left, right = _value(node.left), _value(node.right)
    if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
        return left + right
    is_repeated = isinstance(node.op, ast.Mult) and isinstance(left, list) and type(right) is int
    if is_repeated and len(left) * right <= MAX_PATTERN:
        return left * right
    raise ValueError(ast.dump(node))


def _set_dense_layers(draft: Draft) -> None:
    n_layers = draft.number("num-layers")
    if draft.unknown(FREQUENCY):
        draft.lack("model.dense_layers", draft.unknown(FREQUENCY), FREQUENCY)
    elif isinstance(n_layers, int) and FREQUENCY in draft.command.values:
        try:
            layers = layers_with_experts(draft.value("moe-layer-freq") or "", n_layers)
        except ValueError:
            draft.refuse(FREQUENCY, f"expected a number above 0, or a list with 0 or 1 for each of {n_layers} layers")
            return
        n_dense = layers.index(1) if 1 in layers else n_layers
        if n_dense == n_layers or layers != [0] * n_dense + [1] * (n_layers - n_dense):
            draft.refuse(FREQUENCY, "only the first layers can be without experts ([model] dense_layers)")
        elif n_dense:
            draft.keys["model.dense_layers"] = n_dense


def _set_shared_experts(draft: Draft) -> None:
    """Set the number of shared experts. Megatron's flag gives the total width of all shared experts."""
    flag = "--moe-shared-expert-intermediate-size"
    if flag not in draft.command.values:
        return
    together = draft.number("moe-shared-expert-intermediate-size")
    width = draft.keys.get("model.expert_ffn_hidden_size") or draft.keys.get("model.ffn_hidden_size")
    if draft.unknown(flag) or not isinstance(together, int) or not width:
        draft.lack("model.shared_experts", draft.unknown(flag) or "expected a number, and a width of experts", flag)
    elif together % width:
        draft.refuse(flag, f"shared experts are as wide as the others: expected a multiple of {width}")
    elif together:
        draft.keys["model.shared_experts"] = together // width


def _set_weights(draft: Draft) -> None:
    """Set the kind of expert scores, and whether to normalize each token's weights.

    The softmax of the k largest logits equals the k largest values of the softmax of all logits, divided by their sum.
    With --moe-router-pre-softmax, Megatron does not divide by the sum. Sigmoids are always divided by their sum, unless
    k is 1.
    """
    flag = "--moe-router-score-function"
    scores = draft.value("moe-router-score-function")
    if draft.unknown(flag) or scores not in ("softmax", "sigmoid"):
        draft.lack("model.router_scores", draft.unknown(flag) or "expected softmax or sigmoid", flag)
        return
    is_sigmoid = scores == "sigmoid"
    if is_sigmoid:
        draft.keys["model.router_scores"] = scores
    is_divided = draft.number("moe-router-topk") != 1 if is_sigmoid else not draft.has("moe-router-pre-softmax")
    if not is_divided:
        draft.keys["model.normalize_weights"] = False
    if is_sigmoid and draft.has("moe-router-pre-softmax"):
        draft.notes["--moe-router-pre-softmax"] = "read with softmax only"
    if draft.number("moe-router-topk-scaling-factor") == 0:
        del draft.keys["model.routed_scale"]
        draft.notes["--moe-router-topk-scaling-factor"] = "0 is no factor"


def _set_bias(draft: Draft) -> None:
    """Set the router's bias, which balances the experts without a loss."""
    flag, rate_flag = "--moe-router-enable-expert-bias", "--moe-router-bias-update-rate"
    if flag not in draft.command.values:
        if rate_flag in draft.command.values:
            draft.notes[rate_flag] = f"read with {flag} only"
        return
    if draft.value("moe-router-score-function") != "sigmoid":
        draft.refuse(flag, "Megatron has it with --moe-router-score-function sigmoid only")
        return
    draft.keys["model.router_bias"] = True
    rate = draft.number("moe-router-bias-update-rate")
    if draft.unknown(rate_flag) or rate is None:
        draft.lack("model.router_bias_rate", draft.unknown(rate_flag) or "expected a number", rate_flag)
    elif rate_flag in draft.command.values:
        draft.keys["model.router_bias_rate"] = float(rate)


def _set_groups(draft: Draft) -> None:
    """Set the groups of experts.

    Megatron's score of a group is the sum of the k / groups_per_token largest scores in the group; dtmega always sums
    the two largest scores.
    """
    flag, all_flag = "--moe-router-group-topk", "--moe-router-num-groups"
    if flag not in draft.command.values:
        if all_flag in draft.command.values:
            draft.notes[all_flag] = f"read with {flag} only"
        return
    names = ("moe-router-group-topk", "moe-router-num-groups", "moe-router-topk")
    chosen, groups, k = (draft.number(name) for name in names)
    if not (isinstance(chosen, int) and isinstance(groups, int) and isinstance(k, int) and chosen > 0):
        draft.refuse(flag, draft.unknown(flag) or draft.unknown(all_flag) or f"expected numbers, also as {all_flag}")
    elif chosen == groups:
        draft.notes[flag] = draft.notes[all_flag] = "a token may use the experts of all groups"
    elif k // chosen != 2:
        reason = f"Megatron compares groups by the sum of their {k // chosen} largest scores, here it is always 2"
        draft.refuse(flag, reason)
    elif draft.value("moe-router-score-function") == "softmax" and not draft.has("moe-router-pre-softmax"):
        draft.refuse(flag, "without --moe-router-pre-softmax, Megatron compares groups by logits, not by scores")
    else:
        draft.keys |= {"model.expert_groups": groups, "model.groups_per_token": chosen}


def _set_balance(draft: Draft) -> None:
    """Set the weight of the balance loss.

    dtmega's loss for a document equals Megatron's loss for a sequence if each sequence is one document and each token
    has a label. Megatron's loss for a microbatch is also equal if a microbatch is one sequence. Both losses count the
    experts with the largest scores, regardless of bias and groups. Before core 0.13, Megatron counted the experts that
    tokens used.
    """
    unknown = draft.unknown(BALANCE) or draft.unknown(COEFFICIENT)
    kinds = draft.command.values.get(BALANCE) or ["aux_loss"]
    weights = [as_number(text) for text in draft.command.values.get(COEFFICIENT) or ["0"] * len(kinds)]
    blamed = BALANCE if BALANCE in draft.command.values else COEFFICIENT
    if unknown or len(weights) != len(kinds) or None in weights:
        draft.lack("model.balance_loss", unknown or "expected a coefficient for each type", COEFFICIENT)
        return
    total = 0.0
    for kind, weight in zip(kinds, weights, strict=True):
        if kind == "none" or (kind in LOSSES and not weight):
            continue
        reason = _difference(draft, kind)
        if reason:
            draft.refuse(blamed, reason)
            return
        total += weight or 0.0
    if total:
        draft.keys["model.balance_loss"] = total
    if total and "aux_loss" in kinds and BALANCE in draft.command.values:
        draft.notes[BALANCE] = (
            "a microbatch is one sequence, so that this is seq_aux_loss (before core 0.9, each tp and cp rank had "
            "the loss of its part of the sequence)"
        )


def _difference(draft: Draft, kind: str) -> str:
    """The difference between one of Megatron's balance types and a moe's balance loss; '' if they do not differ."""
    if kind not in LOSSES:
        return f"{kind} chooses experts by what else is in a microbatch, so that the layout would change the choice"
    if kind == "global_aux_loss":
        return "it counts over the microbatches so far: balance_loss counts each document, router_bias the global batch"
    if kind == "aux_loss" and draft.number("micro-batch-size") != 1:
        return (
            "it counts over a microbatch, so that the layout would change the gradients: balance_loss counts each "
            "document, as seq_aux_loss or --micro-batch-size 1 would each sequence"
        )
    if draft.value("moe-token-dispatcher-type") == "alltoall_seq" and draft.value("tensor-model-parallel-size") != "1":
        return "with alltoall_seq, each tensor-parallel rank counts its part of the sequence"
    if draft.has("reset-attention-mask"):
        return "with --reset-attention-mask, balance_loss counts each document, Megatron's loss each sequence"
    return ""


def _check_counted_tokens(draft: Draft) -> None:
    """Refuse masked labels if experts are balanced: Megatron counts tokens with masked labels; dtmega does not."""
    balances = ("model.balance_loss", "model.router_z_loss", "model.router_bias")
    if draft.has("eod-mask-loss") and any(draft.keys.get(key) for key in balances):
        draft.refuse("--eod-mask-loss", "balance counts the tokens with a label here, and all tokens in Megatron")


def _check_layout(draft: Draft) -> None:
    """Refuse a launch script whose experts have a different tensor-parallel size than its other layers."""
    flag = "--expert-tensor-parallel-size"
    tp = draft.value("tensor-model-parallel-size")
    if flag in draft.command.values and draft.value("expert-tensor-parallel-size") != tp:
        draft.refuse(flag, f"tp cuts experts, too: expected {tp}, the value of --tensor-model-parallel-size")
