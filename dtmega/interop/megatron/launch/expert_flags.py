"""The flags for experts in the table of Megatron's flags.

Source: `megatron/training/arguments.py` and `core/transformer/transformer_config.py` of Megatron-LM, core 0.7 to 0.19,
and `megatron/arguments.py` of microsoft/Megatron-DeepSpeed.
"""

from __future__ import annotations

from dtmega.interop.megatron.launch.row import MANY, gone, lost, other, row, same

BY_SCORES = "for softmax and sigmoid; a sigmoid's weights are divided by their sum, except that of a single expert"
AS_FAST = "another way to compute the same"

# Flags that only the DeepSpeed forks have.
FORKS = (
    gone(
        "topk moe-loss-coeff moe-train-capacity-factor moe-eval-capacity-factor moe-min-capacity mlp-type "
        "expert-interval moe-expert-parallel-size ep-world-size",
        1,
        "a setting of --num-experts in the forks for DeepSpeed",
    ),
    gone(
        "create-moe-param-group disable-moe-token-dropping disable-moe-top2-2nd-expert-sampling use-tutel "
        "enable-expert-tensor-parallelism",
        0,
        "a setting of --num-experts in the forks for DeepSpeed",
    ),
)
EXPERTS = (
    row(
        "num-experts",
        MANY,
        "model.n_experts",
        "for moe, which is a llama with experts; 1 is a model without; the forks for DeepSpeed have other experts",
        same=True,
    ),
    same("moe-router-topk", "model.experts_per_token", "2"),
    same("moe-ffn-hidden-size", "model.expert_ffn_hidden_size", why="0 here is Megatron's default, --ffn-hidden-size"),
    other("moe-shared-expert-intermediate-size", 1, "model.shared_experts", "divided by the width of a routed expert"),
    other("moe-layer-freq", 1, "model.dense_layers", "only the first layers can be dense: [0]*3+[1]*58 is 3", "1"),
    other("moe-router-score-function", 1, "model.router_scores model.normalize_weights", BY_SCORES, "softmax"),
    other(
        "moe-router-pre-softmax",
        0,
        "model.normalize_weights",
        "false; without the flag, the softmax of the k largest logits is the weights divided by their sum",
    ),
    same("moe-router-topk-scaling-factor", "model.routed_scale"),
    other(
        "moe-router-num-groups moe-router-group-topk",
        1,
        "model.expert_groups model.groups_per_token",
        "if Megatron, too, takes the best two experts of each group: k / groups per token is 2, rounded down",
    ),
    other("moe-router-enable-expert-bias", 0, "model.router_bias", "with sigmoid, as in Megatron"),
    other("moe-router-bias-update-rate", 1, "model.router_bias_rate", "with --moe-router-enable-expert-bias", "1e-3"),
    other(
        "moe-router-load-balancing-type",
        MANY,
        "model.balance_loss",
        "seq_aux_loss, or aux_loss with --micro-batch-size 1; with a bias or groups, as from core 0.13 on; others "
        "count over a microbatch, so that the layout would change the gradients",
        "aux_loss",
    ),
    other("moe-aux-loss-coeff", MANY, "model.balance_loss", "one coefficient for each type", "0.0"),
    same("moe-z-loss-coeff", "model.router_z_loss"),
    lost(
        "moe-expert-capacity-factor",
        1,
        "Megatron counts capacity over a microbatch, so that the layout would change which tokens are dropped",
        "-1 -1.0",
    ),
    gone("moe-pad-expert-input-to-capacity", 0, "a setting of --moe-expert-capacity-factor"),
    gone("moe-token-drop-policy", 1, "a setting of --moe-expert-capacity-factor"),
    lost("moe-token-dropping", 0, "not built"),
    lost("moe-expert-rank-capacity-factor", 1, "Megatron counts over a rank's tokens, so that the layout would matter"),
    lost("moe-router-topk-limited-devices", 1, "Megatron's layout would change the choice of experts"),
    lost("moe-input-jitter-eps", 1, "a router has no noise"),
    lost("moe-router-force-load-balancing", 0, "random routing, for measurements of speed"),
    lost("moe-router-force-biased", 1, "random routing, for measurements of speed"),
    lost("moe-apply-probs-on-input", 0, "the weights multiply the results of experts"),
    lost("moe-shared-expert-gate", 0, "shared experts have no gate"),
    lost("moe-latent-size", 1, "experts have the width of the hidden state"),
    lost("moe-use-upcycling", 0, "experts that begin as copies of a dense model are not built"),
    gone("moe-upcycling-granularity", 1, "a setting of --moe-use-upcycling"),
    lost("moe-enable-routing-replay", 0, "not built"),
    gone("moe-router-quantile-balancing-ema", 1, "a setting of --moe-router-load-balancing-type quantile_balancing"),
    gone(
        "moe-router-dtype",
        1,
        "the router always computes in float32; Megatron's, without this flag, in the dtype of the parameters",
    ),
    gone(
        "moe-token-dispatcher-type moe-flex-dispatcher-backend moe-deepep-num-sms moe-hybridep-num-sms "
        "moe-flex-dispatcher-num-sms moe-hybridep-num-blocks-permute moe-hybridep-num-blocks-unpermute "
        "moe-hybridep-num-sms-preprocessing inference-moe-token-dispatcher-type moe-paged-stash-page-size "
        "moe-paged-stash-buffer-size-factor-cuda moe-paged-stash-buffer-size-factor-cpu",
        1,
        AS_FAST,
    ),
    gone(
        "moe-grouped-gemm moe-use-legacy-grouped-gemm use-grouped-gemm-for-shared-expert moe-single-grouped-weight "
        "moe-single-grouped-bias moe-permute-fusion moe-permute-fusion-into-hybridep moe-router-fusion "
        "moe-enable-deepep moe-shared-expert-overlap overlap-moe-expert-parallel-comm delay-wgrad-compute "
        "overlap-dispatch-backward-with-experts-wgrad moe-layer-recompute moe-extended-tp moe-paged-stash "
        "moe-hybridep-pad-uneven-dispatch-inputs moe-ncclep-static-shape moe-ncclep-zero-copy "
        "moe-pad-experts-for-cuda-graph-inference inference-moe-disable-fused-quant-kernels",
        0,
        AS_FAST,
    ),
    gone("moe-mlp-glu-interleave-size moe-shared-expert-glu-interleave-size", 1, "the order of rows in a matrix"),
    gone("moe-router-padding-for-fp8 moe-router-padding-for-quantization", 0, "a setting of --fp8-format"),
    gone("moe-per-layer-logging", 0, "metrics.jsonl has the loads of experts"),
    *FORKS,
)
