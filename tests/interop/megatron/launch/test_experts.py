"""Megatron's flags for experts, against its formulas, its example scripts and Python's own lists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli
import torch
from torch import Tensor, nn

from dtmega import config, families
from dtmega.config.families.moe import MoEKeys
from dtmega.data.objectives.next_token import NEXT_TOKEN
from dtmega.data.objectives.routed import with_router_losses
from dtmega.interop.megatron.launch.experts import layers_with_experts
from dtmega.interop.megatron.launch.flags import by_name
from dtmega.interop.megatron.launch.translate import translate
from dtmega.models.routing import Router, report, texts_of
from tests.interop.megatron.launch.test_open import GPT, LLAMA, keys_of, opened

# A whole mixture of 3 layers: experts have a width of 160, as dense layers.
MOE = f"{LLAMA} --num-experts 16 --moe-router-topk 4"
# The parts of Megatron-LM's examples/mixtral/train_mixtral_8x7b_distributed.sh (commit d98e8a64) that bash computes.
MIXTRAL = r"""#!/bin/bash
CHECKPOINT_PATH=$1
DATA_PATH=$3
MODEL_ARGS=(
    --use-mcore-models
    --disable-bias-linear
    --seq-length 4096
    --max-position-embeddings 32768
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --init-method-std 0.01
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --normalization RMSNorm
    --position-embedding-type rope
    --swiglu
    --untie-embeddings-and-output-weights
    --group-query-attention
    --num-query-groups 8
    --no-masked-softmax-fusion
    --no-position-embedding
    --rotary-base 1000000
)
MOE_ARGS=(
    --num-experts 8
    --moe-router-topk 2
    --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 1e-2
    --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall
    --overlap-param-gather
    --overlap-grad-reduce
)
TRAINING_ARGS=(
    --micro-batch-size 1 --global-batch-size 256 --lr 1e-4 --train-iters 500000 --lr-decay-iters 320000
    --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 0.1 --lr-warmup-iters 500 --clip-grad 1.0 --bf16
)
MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 4
    --expert-model-parallel-size 8
    --use-distributed-optimizer
    --sequence-parallel
)
torchrun --nproc_per_node 8 pretrain_gpt.py ${MODEL_ARGS[@]} ${MOE_ARGS[@]} ${TRAINING_ARGS[@]} \
    ${MODEL_PARALLEL_ARGS[@]} --data-path $DATA_PATH --vocab-size 32000 --save $CHECKPOINT_PATH
"""
# Megatron-LM's examples/post_training/modelopt/conf/Qwen/Qwen3-30B-A3B.sh: the flags of the model. The file leaves out
# the epsilon of RMSNorm, the size of the vocabulary and dropout.
QWEN3 = (
    "pretrain_gpt.py --micro-batch-size 1 --bf16 --no-masked-softmax-fusion --disable-bias-linear "
    "--untie-embeddings-and-output-weights --position-embedding-type rope --no-rope-fusion --normalization RMSNorm "
    "--swiglu --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 "
    "--group-query-attention --num-query-groups 4 --kv-channels 128 --qk-layernorm --num-experts 128 "
    "--moe-ffn-hidden-size 768 --moe-router-topk 8 --moe-router-dtype fp32 --moe-aux-loss-coeff 1e-3 "
    "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss --seq-length 4096 "
    "--max-position-embeddings 40960 --make-vocab-size-divisible-by 1187 --use-mcore-models --rotary-percent 1.0 "
    "--rotary-base 1000000 --no-bias-swiglu-fusion --sequence-parallel --norm-epsilon 1e-6 --vocab-size 151936 "
    "--attention-dropout 0 --hidden-dropout 0 --global-batch-size 8 --lr 1e-5 --train-iters 10 --data-path data/a"
)

# The flags for experts in arguments.py and transformer_config.py of Megatron-LM, from core 0.7 to 0.19.
NAMED = """
    expert-model-parallel-size expert-tensor-parallel-size inference-moe-token-dispatcher-type moe-apply-probs-on-input
    moe-aux-loss-coeff moe-deepep-num-sms moe-enable-deepep moe-enable-routing-replay moe-expert-capacity-factor
    moe-expert-rank-capacity-factor moe-extended-tp moe-ffn-hidden-size moe-flex-dispatcher-backend
    moe-flex-dispatcher-num-sms moe-grouped-gemm moe-hybridep-num-blocks-permute moe-hybridep-num-blocks-unpermute
    moe-hybridep-num-sms moe-hybridep-num-sms-preprocessing moe-hybridep-pad-uneven-dispatch-inputs moe-input-jitter-eps
    moe-latent-size moe-layer-freq moe-layer-recompute moe-mlp-glu-interleave-size moe-ncclep-static-shape
    moe-ncclep-zero-copy moe-pad-expert-input-to-capacity moe-pad-experts-for-cuda-graph-inference moe-paged-stash
    moe-paged-stash-buffer-size-factor-cpu moe-paged-stash-buffer-size-factor-cuda moe-paged-stash-page-size
    moe-per-layer-logging moe-permute-fusion moe-permute-fusion-into-hybridep moe-router-bias-update-rate
    moe-router-dtype moe-router-enable-expert-bias moe-router-force-biased moe-router-force-load-balancing
    moe-router-fusion moe-router-group-topk moe-router-load-balancing-type moe-router-num-groups
    moe-router-padding-for-fp8 moe-router-padding-for-quantization moe-router-pre-softmax
    moe-router-quantile-balancing-ema moe-router-score-function moe-router-topk moe-router-topk-limited-devices
    moe-router-topk-scaling-factor moe-shared-expert-gate moe-shared-expert-glu-interleave-size
    moe-shared-expert-intermediate-size moe-shared-expert-overlap moe-single-grouped-bias moe-single-grouped-weight
    moe-token-dispatcher-type moe-token-drop-policy moe-token-dropping moe-upcycling-granularity
    moe-use-legacy-grouped-gemm moe-use-upcycling moe-z-loss-coeff num-experts
    overlap-dispatch-backward-with-experts-wgrad overlap-moe-expert-parallel-comm use-grouped-gemm-for-shared-expert
"""


def test_every_flag_for_experts_has_a_row() -> None:
    assert [name for name in NAMED.split() if f"--{name}" not in by_name()] == []


def model_of(line: str) -> MoEKeys:
    """The model of a command that leaves nothing open."""
    translation = translate(line)
    assert translation.open == []
    model = config.validate(tomli.loads(translation.toml), "the translation").model
    assert isinstance(model, MoEKeys)
    return model


def n_parameters(model: MoEKeys) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in families.of(model).build(model).parameters())


def test_mixtrals_launch_script_is_its_configuration_with_the_layout(tmp_path: Path) -> None:
    script = tmp_path / "train_mixtral_8x7b_distributed.sh"
    script.write_text(MIXTRAL)
    translation = translate(str(script), {"1": "runs/mixtral", "3": "data/a"})
    assert translation.open == []
    found = config.validate(tomli.loads(translation.toml), "the translation")
    shipped = config.load(["--config", "mixtral-8x7b.toml"]).model
    theirs = {"init_std": 0.01, "balance_loss": 0.01, "pad_vocab_to_multiple": 128}
    assert found.model == shipped.model_copy(update=theirs)
    assert isinstance(found.model, MoEKeys)
    assert n_parameters(found.model) == 46_702_792_704
    assert (found.mesh.pp, found.mesh.ep, found.mesh.tp, found.batch.micro_batch_size) == (4, 8, 1, 1)
    left = [line.split(":")[0] for line in translation.left_out if "--moe" in line]
    assert left == [
        "--moe-router-load-balancing-type aux_loss",
        "--moe-grouped-gemm",
        "--moe-token-dispatcher-type alltoall",
    ]


def test_a_published_qwen3_with_experts_is_its_configuration() -> None:
    found = model_of(QWEN3)
    shipped = config.load(["--config", "qwen3-30b-a3b.toml"]).model
    assert found == shipped.model_copy(update={"pad_vocab_to_multiple": 1187})
    assert n_parameters(found) == 30_532_122_624


def theirs_weights(logits: Tensor, k: int, flags: dict[str, str], bias: Tensor) -> Tensor:
    """The weight of each token's experts, [N, E], 0 for those that it does not use.

    Source: `topk_routing_with_score_function` and `group_limited_topk` of megatron-core 0.16.1, moe_utils.py.
    """
    n_groups, group_topk = int(flags.get("num-groups", 0)), int(flags.get("group-topk", 0))

    def compute_topk(scores: Tensor) -> Tensor:
        if not group_topk:
            return torch.topk(scores, k, dim=1).indices
        group_scores = scores.view(len(scores), n_groups, -1).topk(k // group_topk, dim=-1)[0].sum(dim=-1)
        group_idx = torch.topk(group_scores, k=group_topk, dim=-1, sorted=False)[1]
        group_mask = torch.zeros_like(group_scores).scatter_(1, group_idx, 1)
        n_in_group = scores.shape[1] // n_groups
        score_mask = group_mask.unsqueeze(-1).expand(len(scores), n_groups, n_in_group).reshape(len(scores), -1)
        return torch.topk(scores.masked_fill(~score_mask.bool(), float("-inf")), k=k, dim=-1)[1]

    if "score-function" in flags:
        scores = torch.sigmoid(logits)
        indices = compute_topk(scores + bias if "enable-expert-bias" in flags else scores)
        scores = scores.gather(1, indices)
        probs = scores / (scores.sum(dim=-1, keepdim=True) + 1e-20) if k > 1 else scores
    elif "pre-softmax" in flags:
        scores = torch.softmax(logits, dim=-1)
        indices = compute_topk(scores)
        probs = scores.gather(1, indices)
    else:
        indices = compute_topk(logits)
        probs = torch.softmax(logits.gather(1, indices), dim=-1)
    if "topk-scaling-factor" in flags:
        probs = probs * float(flags["topk-scaling-factor"])
    return torch.zeros_like(logits).scatter(1, indices, probs)


SIGMOID = {"score-function": "sigmoid"}
GROUPS = {"num-groups": "4", "group-topk": "2"}


@pytest.mark.parametrize(
    ("k", "flags"),
    [
        (2, {}),
        (2, {"pre-softmax": ""}),
        (1, {"pre-softmax": ""}),
        (3, {"topk-scaling-factor": "2.5"}),
        (3, SIGMOID),
        (1, SIGMOID),
        (3, {**SIGMOID, "pre-softmax": ""}),
        (3, {**SIGMOID, "enable-expert-bias": ""}),
        (4, {"pre-softmax": "", **GROUPS}),
        (5, {**SIGMOID, **GROUPS, "enable-expert-bias": "", "topk-scaling-factor": "2.5"}),
        (3, {**SIGMOID, "num-groups": "2", "group-topk": "2"}),
    ],
)
def test_a_tokens_experts_and_weights_are_those_of_megatrons_formula(k: int, flags: dict[str, str]) -> None:
    written = " ".join(f"--moe-router-{name} {value}" for name, value in flags.items())
    cfg = model_of(f"{LLAMA} --num-experts 16 --moe-router-topk {k} {written}")
    router = Router(cfg)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 200, cfg.hidden_size, generator=generator)
    bias = torch.randn(16, generator=generator) * 0.1
    nn.init.normal_(router.weight, std=0.1, generator=generator)
    if router.bias is not None:
        router.bias += bias
    found = router(x)
    dense = torch.zeros(200, 16).scatter(1, found.experts, found.weights)
    expected = theirs_weights(x[0] @ router.weight.t(), k, flags, bias)
    torch.testing.assert_close(dense, expected, rtol=1e-5, atol=1e-7)


def seq_aux_loss(logits: Tensor, k: int, coefficient: float, scores_of: str) -> Tensor:
    """Megatron's loss of one layer for sequences, [S, B, E].

    Source: `_apply_seq_aux_loss` in router.py, `compute_routing_scores_for_aux_loss` and
    `switch_load_balancing_loss_func` in moe_utils.py of megatron-core 0.16.1.
    """
    seq_length, bsz, n_experts = logits.shape
    logits = logits.reshape(-1, n_experts)
    scores = logits.softmax(-1) if scores_of == "softmax" else logits.sigmoid()
    if scores_of == "sigmoid":
        scores = scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)
    routing_map = torch.zeros_like(logits).scatter(1, scores.topk(k, dim=1).indices, 1)
    scores, routing_map = scores.reshape(seq_length, -1), routing_map.reshape(seq_length, -1)
    loss = torch.sum(scores.sum(dim=0) * routing_map.sum(dim=0))
    return loss * (n_experts * coefficient / (k * seq_length * seq_length)) / bsz


def z_loss(logits: Tensor, coefficient: float) -> Tensor:
    """Megatron's z-loss of one layer. Source: `z_loss_func` in moe_utils.py of megatron-core 0.16.1."""
    return torch.mean(torch.square(torch.logsumexp(logits, dim=-1))) * coefficient


@pytest.mark.parametrize(
    ("flags", "scores"),
    [
        ("--micro-batch-size 2 --moe-router-load-balancing-type seq_aux_loss", "softmax"),
        ("--micro-batch-size 2 --moe-router-load-balancing-type seq_aux_loss", "sigmoid"),
        # A microbatch of one sequence is a sequence.
        ("--micro-batch-size 1 --moe-router-load-balancing-type aux_loss", "softmax"),
        ("--micro-batch-size 1", "softmax"),
        ("--micro-batch-size 1 --moe-router-enable-expert-bias", "sigmoid"),
        ("--micro-batch-size 1 --moe-router-num-groups 4 --moe-router-group-topk 2", "sigmoid"),
    ],
)
def test_the_losses_of_routers_are_megatrons_with_its_coefficients(flags: str, scores: str) -> None:
    line = f"{MOE} {flags} --moe-aux-loss-coeff 0.25 --moe-z-loss-coeff 1e-3 --moe-router-score-function {scores}"
    cfg = model_of(line)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 20, cfg.hidden_size, generator=generator)
    labels = torch.zeros(3, 20, dtype=torch.int64)
    sums = {"balance": torch.zeros(()), "router_z": torch.zeros(())}
    expected = torch.zeros(())
    for _ in range(cfg.n_layers):
        router = Router(cfg)
        nn.init.normal_(router.weight, std=0.1, generator=generator)
        if router.bias is not None:
            nn.init.normal_(router.bias, generator=generator)
        logits = (x @ router.weight.t()).transpose(0, 1)
        expected += seq_aux_loss(logits, 4, 0.25, scores) + z_loss(logits, 1e-3)
        found = report(router(x), texts_of(labels, None, None, cfg), True, router.steered)
        sums["balance"] += found.balance
        sums["router_z"] += found.z
    objective = with_router_losses(cfg, NEXT_TOKEN)
    counts = objective.counts({"labels": labels})
    parts = [one.weight * sums[one.name] / counts[one.per] for one in objective.sums if one.name in sums]
    torch.testing.assert_close(torch.stack(parts).sum(), expected)


@pytest.mark.parametrize(
    ("pattern", "n_layers"),
    [
        ("([0]*3+[1]*58)", 61),
        ("[0]+[1]*2", 3),
        ("([1]*3+[0]*1)*3", 12),
        ("[0, 1, 1]", 3),
        ("([0]+[1]*(2))", 3),
    ],
)
def test_a_list_of_layers_is_pythons(pattern: str, n_layers: int) -> None:
    assert layers_with_experts(pattern, n_layers) == eval(pattern)


def test_every_nth_layer_has_experts_beginning_with_the_first() -> None:
    # get_gpt_decoder_block_spec in gpt_layer_specs.py: 1 if (i % moe_layer_freq == 0) else 0.
    assert layers_with_experts("2", 5) == [1, 0, 1, 0, 1]


@pytest.mark.parametrize(
    "pattern", ["", "0", "-1", "2.0", "[1]*9", "[1]*999999999", "f()", "[x]*3", "'a'*3", "[1]*[3]", "(" * 500]
)
def test_what_is_no_list_of_layers_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError):
        layers_with_experts(pattern, 3)


@pytest.mark.parametrize(
    ("flags", "keys"),
    [
        ("--moe-layer-freq [0]*1+[1]*2", {"dense_layers": 1}),
        ("--moe-layer-freq '([0]*1+[1]*2)'", {"dense_layers": 1}),
        ("--moe-layer-freq 1", {"dense_layers": None}),
        ("--moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 64", {"shared_experts": 2}),
        ("--moe-shared-expert-intermediate-size 160", {"shared_experts": 1, "expert_ffn_hidden_size": None}),
        (
            "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-2",
            {"router_bias": True, "router_bias_rate": 0.01},
        ),
        ("--moe-router-bias-update-rate 1e-2", {"router_bias": None, "router_bias_rate": None}),
        ("--moe-router-num-groups 4", {"expert_groups": None}),
        ("--moe-router-topk-scaling-factor 0", {"routed_scale": None}),
        ("--moe-router-load-balancing-type none --moe-aux-loss-coeff 1e-2", {"balance_loss": None}),
        ("--moe-router-load-balancing-type global_aux_loss", {"balance_loss": None}),
        (
            "--moe-router-load-balancing-type seq_aux_loss global_aux_loss --moe-aux-loss-coeff 1e-3 0",
            {"balance_loss": 1e-3},
        ),
    ],
)
def test_flags_for_experts_are_keys(flags: str, keys: dict[str, Any]) -> None:
    assert opened(f"{MOE} {flags}") == []
    found = keys_of(f"{MOE} {flags}")
    assert {key: found.get(f"model.{key}") for key in keys} == keys


def test_without_a_width_of_its_own_an_expert_has_that_of_a_gated_layer() -> None:
    # validate_args in megatron/training/arguments.py: 8/3 D in multiples of 64, here 256.
    line = f"{MOE.replace('--ffn-hidden-size 160', '')} --moe-shared-expert-intermediate-size 512"
    assert keys_of(line)["model.shared_experts"] == 2
    assert model_of(line).expert_ffn == 256


REFUSED = {
    "--moe-layer-freq 2": "only the first layers can be without experts",
    "--moe-layer-freq [0,0,0]": "only the first layers can be without experts",
    "--moe-layer-freq [0,1]": "a list with 0 or 1 for each of 3 layers",
    "--moe-layer-freq $LAYERS": "$LAYERS is not known",
    "--num-experts $E": "$E is not known",
    "--moe-router-topk $K": "$K is not known",
    "--moe-shared-expert-intermediate-size 100": "expected a multiple of 160",
    "--moe-shared-expert-gate": "shared experts have no gate",
    "--moe-router-score-function sqrtsoftplus": "expected softmax or sigmoid",
    "--moe-router-enable-expert-bias": "sigmoid only",
    "--moe-router-group-topk 4 --moe-router-num-groups 8 --moe-router-pre-softmax": "the sum of their 1 largest",
    "--moe-router-group-topk 2 --moe-router-num-groups 4": "compares groups by logits",
    "--moe-router-group-topk 2": "expected numbers, also as --moe-router-num-groups",
    "--moe-router-load-balancing-type sinkhorn": "the layout would change the choice",
    "--moe-router-load-balancing-type quantile_balancing": "the layout would change the choice",
    "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 1e-2": "over the microbatches so far",
    "--micro-batch-size 2 --moe-aux-loss-coeff 1e-2": "it counts over a microbatch",
    "--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 1": "a coefficient for each type",
    "--moe-aux-loss-coeff 1e-2 --reset-attention-mask": "Megatron's loss each sequence",
    "--moe-aux-loss-coeff 1e-2 --eod-mask-loss": "all tokens in Megatron",
    "--moe-z-loss-coeff 1e-3 --eod-mask-loss": "all tokens in Megatron",
    "--moe-aux-loss-coeff 1e-2 --moe-token-dispatcher-type alltoall_seq --tensor-model-parallel-size 2": "its part of",
    "--moe-expert-capacity-factor 1.25": "over a microbatch",
    "--moe-input-jitter-eps 1e-2": "a router has no noise",
    "--moe-use-upcycling": "experts that begin as copies",
    "--moe-latent-size 64": "the width of the hidden state",
    "--moe-router-topk-limited-devices 2": "Megatron's layout",
    "--moe-router-force-load-balancing": "random routing",
    "--expert-tensor-parallel-size 1 --tensor-model-parallel-size 2": "expected 2",
    "--multi-latent-attention --q-lora-rank 8": "latent attention is not translated",
    "--mtp-num-layers 1": "one token at each place",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_a_flag_that_a_moe_cannot_follow_is_refused_by_name(flags: str) -> None:
    lines = opened(f"{MOE} {flags}")
    assert len(lines) == 1, lines
    assert REFUSED[flags] in lines[0]
    assert lines[0].split()[0] in flags


@pytest.mark.parametrize(
    "flags",
    [
        "--moe-grouped-gemm --moe-permute-fusion --moe-token-dispatcher-type flex --moe-enable-deepep",
        "--moe-router-dtype fp32 --moe-per-layer-logging --moe-shared-expert-overlap --moe-layer-recompute",
        "--expert-tensor-parallel-size 2 --tensor-model-parallel-size 2 --moe-extended-tp",
        "--moe-expert-capacity-factor -1 --overlap-moe-expert-parallel-comm --delay-wgrad-compute",
    ],
)
def test_what_only_makes_experts_faster_leaves_nothing_open(flags: str) -> None:
    assert opened(f"{MOE} {flags}") == []


def test_experts_are_divided_over_the_ranks_of_the_flag() -> None:
    assert keys_of(f"{MOE} --expert-model-parallel-size 4")["mesh.ep"] == 4
    assert "mesh.ep" not in keys_of(MOE)


def test_a_model_without_experts_ignores_their_flags_as_megatron_does() -> None:
    # A script may give them to a dense model. 1 is the default of the forks for DeepSpeed.
    flags = "--moe-router-topk 4 --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3 --expert-model-parallel-size 2"
    for line in (GPT, LLAMA, f"{LLAMA} --num-experts 1"):
        assert opened(f"{line} {flags} --moe-input-jitter-eps 1e-2") == []
        assert keys_of(f"{line} {flags}") == keys_of(line)


@pytest.mark.parametrize(
    "flags",
    [
        "--num-experts 64 --topk 1 --moe-loss-coeff 0.01 --moe-expert-parallel-size 64",
        "--num-experts 32 64 --expert-interval 2",
        "--num-experts 64 --ep-world-size 8 --mlp-type residual",
        "--num-experts 64 --deepspeed --use-tutel --create-moe-param-group",
    ],
)
@pytest.mark.parametrize("line", [GPT, LLAMA])
def test_experts_of_the_forks_for_deepspeed_are_refused_by_name(line: str, flags: str) -> None:
    (refused,) = opened(f"{line} {flags}")
    assert refused.startswith(f"--num-experts {'32 64' if '32 64' in flags else '64'}")
    assert "the forks for DeepSpeed have other experts" in refused
    assert "model.n_experts" not in keys_of(f"{line} {flags}")
