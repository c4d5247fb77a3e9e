"""Table of Megatron's flags: each row lists the keys that replace a flag, or gives the reason why there is no key.

The table has the flags for pre-training with their defaults, from `megatron/arguments.py` in Megatron-LM and in
BigScience's Megatron-DeepSpeed. The other modules here read the table, and `docs/from-megatron.md` shows it to users.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

MANY = -1  # value of n_values for a flag that takes all words up to the next flag


class Flag(NamedTuple):
    """A command-line flag of Megatron.

    Attributes:
        names: name of the flag, or names of several flags that share the row, as written on a command line.
        n_values: number of values that the flag takes; MANY for all words up to the next flag.
        default: Megatron's default, as written on a command line; None for switches and for flags without a default.
        keys: keys of the configuration that replace the flag; empty if the flag is not carried over.
        why: difference between the key and the flag, or reason why there is no key.
        same: whether the flag has a single key with the same value, so that the translation copies the value.
        changes: whether a run without the flag would compute different results. The configuration is then
            refused until the user has decided about the flag.
        neutral: values for which a flag with `changes` has no effect.
        other_names: names in other versions and forks, each as other name -> name of the flag.
    """

    names: tuple[str, ...]
    n_values: int
    default: str | None
    keys: tuple[str, ...]
    why: str = ""
    same: bool = False
    changes: bool = False
    neutral: tuple[str, ...] = ()
    other_names: Mapping[str, str] = {}


def _row(names: str, n_values: int, keys: str = "", why: str = "", default: str | None = None, **marks: Any) -> Flag:
    """A row of the table.

    Args:
        names: names of the flags, separated by blanks. A bar separates several names of the same flag.
        n_values: number of values that each flag takes.
        keys: keys of the configuration, separated by blanks.
        why: remark for the reader.
        default: Megatron's default.
        **marks: further attributes of the row.
    """
    written: list[str] = []
    other_names: dict[str, str] = {}
    for group in names.split():
        first, *others = (f"--{name}" for name in group.split("|"))
        written += [first, *others]
        other_names |= dict.fromkeys(others, first)
    return Flag(tuple(written), n_values, default, tuple(keys.split()), why, other_names=other_names, **marks)


def _same(names: str, key: str, default: str | None = None, why: str = "") -> Flag:
    """A flag whose value is copied to one key."""
    return _row(names, 1, key, why, default, same=True)


def _switch(name: str, key: str, why: str = "") -> Flag:
    """A switch that sets a key to true."""
    return _row(name, 0, key, why, same=True)


def _other(names: str, n_values: int, keys: str, why: str, default: str | None = None) -> Flag:
    """A flag that another module in this folder translates to keys."""
    return _row(names, n_values, keys, why, default)


def _gone(names: str, n_values: int, why: str) -> Flag:
    """A flag that is not carried over and does not change what a run computes."""
    return _row(names, n_values, why=why)


def _lost(names: str, n_values: int, why: str, neutral: str = "") -> Flag:
    """A flag that changes what a run computes and is not carried over. Neutral values are separated by blanks."""
    return _row(names, n_values, why=why, changes=True, neutral=tuple(neutral.split()))


FLAGS: dict[str, tuple[Flag, ...]] = {
    "Model": (
        _same("num-layers|encoder-num-layers", "model.n_layers", why="for t5, the layers of the encoder"),
        _same(
            "decoder-num-layers", "model.n_decoder_layers", why="0 here is Megatron's default, as many as the encoder"
        ),
        _same("hidden-size", "model.hidden_size"),
        _same("ffn-hidden-size", "model.ffn_hidden_size", why="0 here is Megatron's default, 4 D"),
        _same("num-attention-heads", "model.n_heads"),
        _same(
            "kv-channels",
            "model.kv_channels",
            why="0 here is Megatron's default, D / H, which families other than llama and t5 always have",
        ),
        _other("max-position-embeddings", 1, "model.max_position_embeddings", "ALiBi has no limit on positions"),
        _other(
            "position-embedding-type",
            1,
            "model.name",
            "alibi is bloom, rope is llama, absolute is gpt, bert or t5; other pairs are not built",
            "absolute",
        ),
        _other(
            "use-rotary-position-embeddings no-position-embedding",
            0,
            "model.name",
            "llama; a model without any positions is not built",
        ),
        _other("rotary-base|rope-theta", 1, "model.rope_theta", "for llama", "10000"),
        _other("use-rope-scaling", 0, "model.rope_factor", "Llama 3.1's scaling of low frequencies; for llama"),
        _other("rope-scaling-factor", 1, "model.rope_factor", "with --use-rope-scaling", "8.0"),
        _lost("rotary-percent", 1, "rotary positions turn every channel of a head", "1 1.0 1.00"),
        _lost("rotary-interleaved", 0, "rotary positions turn the two halves of a head, as in Llama"),
        _lost("rotary-seq-len-interpolation-factor", 1, "not built", "1"),
        _lost("rope-type", 1, "only rope is built", "rope"),
        _other("swiglu", 0, "model.name model.glu", "llama has it; for gpt and bloom the key is glu"),
        _other("normalization", 1, "model.name", "RMSNorm is llama, LayerNorm every other family", "LayerNorm"),
        _other("group-query-attention", 0, "model.n_kv_heads", "for llama"),
        _other("num-query-groups|num-key-value-heads", 1, "model.n_kv_heads", "for llama", "1"),
        _other("untie-embeddings-and-output-weights", 0, "model.tied", "for gpt and llama"),
        _other("disable-bias-linear", 0, "model.name", "llama has no biases, every other family has them"),
        _lost("add-qkv-bias", 0, "llama has no biases"),
        _switch("qk-layernorm", "model.qk_norm", "for llama"),
        _other("window-size", 1, "model.window", "for llama: the tokens before a token that it sees, and 1 for itself"),
        _other("window-attn-skip-freq", 1, "model.window_layers", "with --window-size N,0: all but every N-th layer"),
        _lost("apply-layernorm-1p", 0, "the weights of norms are stored as they are, without the 1"),
        _lost("squared-relu quick-geglu enable-gpt-oss", 0, "not built"),
        _lost("softmax-type", 1, "not built", "vanilla"),
        _lost("activation-func-clamp-value glu-linear-offset", 1, "not built"),
        _lost("num-experts", 1, "experts are not translated; name = 'moe' has them", "1"),
        _lost("kd", 0, "distillation is not built"),
        _lost("retro-add-retriever", 0, "retrieval is not built"),
        _other("embed-layernorm", 0, "model.name", "bloom always has it, other families never do"),
        _same(
            "layernorm-epsilon|norm-epsilon",
            "model.layer_norm_eps",
            "1e-5",
            "for t5 the key is norm_eps, for llama rms_norm_eps",
        ),
        _switch("apply-residual-connection-post-layernorm", "model.apply_residual_connection_post_layernorm"),
        _same("init-method-std", "model.init_std", "0.02"),
        _lost("init-method-xavier-uniform", 0, "no published run of these families starts this way"),
        _same("attention-dropout", "model.attention_dropout", "0.1"),
        _same("hidden-dropout", "model.hidden_dropout", "0.1"),
        _other(
            "make-vocab-size-divisible-by",
            1,
            "model.pad_vocab_to_multiple",
            "times Megatron's tensor-parallel size, for the same number of rows; rows beyond V never enter the softmax",
            "128",
        ),
        _other(
            "pad-vocab-size-to",
            1,
            "model.vocab_size",
            "Megatron trains the rows of padding, so they are part of the vocabulary",
        ),
        _other("vocab-size", 1, "model.vocab_size", "the size without padding"),
        _other(
            "no-bias-gelu-fusion",
            0,
            "model.gelu",
            "Megatron's fused GELU is the approximation with tanh; this flag selects erf, which bloom and gpt do not "
            "have; BERT's head always has erf; for t5 the key is activation",
        ),
        _same("glu-activation", "model.glu"),
        _switch("fp32-residual-connection", "model.fp32_residual"),
        _other(
            "no-query-key-layer-scaling apply-query-key-layer-scaling",
            0,
            "model.query_key_layer_scaling",
            "it matters in float16 only, so it is carried over with --fp16; on by default until November 2023, off "
            "since; if the other flags do not tell the time, --original does; t5 and llama have no such key",
        ),
        _gone("attention-softmax-in-fp32", 0, "always on"),
        _lost("bert-no-binary-head", 0, "a BERT always has its sentence-order head"),
        _gone(
            "bias-gelu-fusion",
            0,
            "Megatron's default since 2020; before that, the feed-forward had erf: set [model] gelu yourself",
        ),
        _gone("openai-gelu onnx-safe", 0, "other ways to compute the two forms of GELU that are here"),
        _lost("mup", 0, "not built"),
        _gone("mup-coord-check", 0, "a setting of --mup"),
        _gone("mup-attn-mult mup-input-mult mup-output-mult", 1, "a setting of --mup"),
        _gone("attention-backend transformer-impl", 1, "attention is chosen by device and rule"),
        _gone(
            "use-flash-attn use-flash-attn-v1 use-flash-attn-v2 use-flash-attn-triton use-mcore-models "
            "use-legacy-models export-force-local-attention no-bias-swiglu-fusion no-rope-fusion "
            "apply-rope-fusion cross-entropy-loss-fusion no-persist-layer-norm",
            0,
            "another way to compute the same",
        ),
        _gone("spec", MANY, "another way to compute the same"),
        _lost(
            "task",
            1,
            "classifiers are not built: export the model, and use transformers' BertForSequenceClassification",
        ),
    ),
    "Batch and length": (
        _same("seq-length|encoder-seq-length", "data.seq_len"),
        _same("decoder-seq-length", "data.decoder_seq_len"),
        _same("micro-batch-size", "batch.micro_batch_size"),
        _same(
            "global-batch-size", "batch.global_batch_size", why="Megatron's default is one micro-batch per data rank"
        ),
        _other("rampup-batch-size", 3, "batch.rampup", "the same three numbers"),
        _same("train-iters", "train.steps"),
        _same("train-samples", "train.samples"),
        _same("train-tokens", "train.tokens"),
        _same("kill-switch-path", "train.kill_switch"),
        _other(
            "skip-train-iteration-range",
            MANY,
            "train.skip_steps",
            "101-200 is [101, 200]; the samples of these steps are consumed here",
        ),
        _same("exit-interval", "train.exit_interval"),
        _same("exit-duration-in-mins", "train.exit_duration_min"),
        _lost("step-batch-size-schedule", MANY, "only --rampup-batch-size is built"),
        _lost("calculate-per-token-loss", 0, "the loss of a step is the mean over its tokens"),
        _lost("gas", 1, "old name of a number of microbatches: use --global-batch-size"),
        _lost("no-train", 1, "use [eval] only"),
        _lost(
            "curriculum-learning",
            0,
            "growing lengths break token counts, the pipeline's buffers and the rule that batch n depends on n alone",
        ),
        _lost("batch-size", 1, "old name, per model replica: use --micro-batch-size and --global-batch-size"),
    ),
    "Optimizer": (
        _other("optimizer", 1, "optim.name", "Megatron's adam is AdamW", "adam"),
        _same("sgd-momentum", "optim.momentum", "0.9"),
        _same("lr", "optim.lr"),
        _same("min-lr", "optim.min_lr", "0.0"),
        _other(
            "lr-decay-style",
            1,
            "optim.schedule",
            "inverse-square-root is inverse-sqrt, WSD is wsd; update 1 already has a rate above 0 here",
            "linear",
        ),
        _other(
            "lr-decay-iters lr-decay-samples lr-decay-tokens",
            1,
            "optim.decay optim.unit",
            "the unit has a key of its own",
        ),
        _other(
            "lr-warmup-iters lr-warmup-samples lr-warmup-tokens",
            1,
            "optim.warmup optim.unit",
            "the unit has a key of its own; a warm-up in another unit than the decay is converted to it",
        ),
        _same("lr-warmup-fraction", "optim.warmup_fraction"),
        _other("warmup", 1, "optim.warmup_fraction", "old name of --lr-warmup-fraction"),
        _lost("lr-warmup-init", 1, "a warm-up begins at 0", "0 0.0"),
        _other("lr-wsd-decay-style", 1, "optim.schedule", "linear is wsd, the others are not built", "exponential"),
        _other("lr-wsd-decay-iters lr-wsd-decay-samples", 1, "optim.wsd_decay", "in the unit of the decay"),
        _lost("decoupled-lr decoupled-min-lr", 1, "see [optim] lr_factors for a rate of one's own for a parameter"),
        _same("weight-decay", "optim.weight_decay", "0.01"),
        _same("end-weight-decay", "optim.weight_decay"),
        _same("start-weight-decay", "optim.start_weight_decay"),
        _same("weight-decay-incr-style", "optim.weight_decay_schedule", "constant"),
        _same("clip-grad", "optim.clip_grad", "1.0"),
        _same("adam-beta1", "optim.beta1", "0.9"),
        _same("adam-beta2", "optim.beta2", "0.999"),
        _same("adam-eps", "optim.eps", "1e-8"),
        _lost("use-bnb-optimizer", 0, "moments are fp32 and sharded over the data ranks"),
        _other("cpu-optimizer", 0, "fsdp.cpu_offload", "shards and moments in host memory"),
        _gone("cpu_torch_adam", 0, "AdamW is always torch's"),
        _gone("override-lr-scheduler", 0, "always on: the configuration counts, and what changed is printed"),
        _gone("override-opt_param-scheduler", 0, "always on: the configuration counts, and what changed is printed"),
        _gone(
            "use-checkpoint-lr-scheduler use-checkpoint-opt_param-scheduler no-load-lr-state",
            0,
            "start with the config.toml that the run wrote",
        ),
    ),
    "Numbers": (
        _other("bf16 fp16", 0, "precision.params", "with fp32 master weights, as in Megatron"),
        _other(
            "loss-scale", 1, "precision.params", "with --fp16 the scale is always dynamic, so a fixed one is refused"
        ),
        _lost("fp8-format", 1, "not built"),
        _gone("fp8-amax-compute-algo fp8-amax-history-len", 1, "a setting of --fp8-format"),
        _gone("fp8-param-gather", 0, "a setting of --fp8-format"),
        _other("grad-reduce-in-bf16", 0, "precision.reduce", "bfloat16"),
        _gone("disable-bf16-reduced-precision-matmul deterministic-mode", 0, "sums are float32, in a fixed order"),
        _same("initial-loss-scale", "precision.initial_loss_scale", "4294967296"),
        _same("min-loss-scale", "precision.min_loss_scale", "1.0"),
        _same("loss-scale-window", "precision.loss_scale_window", "1000"),
        _same("hysteresis", "precision.hysteresis", "2"),
        _other("accumulate-allreduce-grads-in-fp32", 0, "precision.reduce", "float32 is the default"),
        _lost("fp16-lm-cross-entropy", 0, "the loss is always fp32"),
        _same("seed", "run.seed", "1234"),
        _gone("data-parallel-random-init", 0, "initial values are a function of the seed and the parameter's name"),
        _gone(
            "use-cpu-initialization lazy-mpu-init",
            0,
            "each rank draws only the values that it holds, the same on any device",
        ),
        _gone(
            "no-bias-dropout-fusion no-masked-softmax-fusion masked-softmax-fusion", 0, "torch.compile fuses operations"
        ),
        _gone("abort-on-unmet-fused-kernel-constraints", 0, "no kernel here has such constraints"),
    ),
    "Layout": (
        _same("tensor-model-parallel-size|model-parallel-size", "mesh.tp", "1"),
        _same("context-parallel-size|ds-sequence-parallel-size", "mesh.cp", "1"),
        _same("pipeline-model-parallel-size|pipe-parallel-size", "mesh.pp", "1"),
        _same(
            "pipeline-model-parallel-split-rank",
            "pipeline.split",
            why="0 here balances both stacks over all stages by cost",
        ),
        _other(
            "num-layers-per-virtual-pipeline-stage",
            1,
            "pipeline.virtual_stages pipeline.schedule",
            "stages per rank, L / pp / the flag's value, with the interleaved schedule",
        ),
        _gone("pp-partition-method", 1, "stages are balanced by cost, or listed in [pipeline] stages"),
        _other("sequence-parallel", 0, "mesh.sequence_parallel", "the default with tp"),
        _other(
            "checkpoint-activations deepspeed-activation-checkpointing recompute-activations",
            0,
            "recompute.mode",
            "'full'; --recompute-activations is 'selective'",
        ),
        _other("recompute-granularity", 1, "recompute.mode", "full or selective"),
        _same("recompute-method", "recompute.method", "uniform"),
        _other("activations-checkpoint-method", 1, "recompute.mode recompute.method", "'full', and uniform or block"),
        _other(
            "checkpoint-num-layers recompute-num-layers activations-checkpoint-num-layers",
            1,
            "recompute.layers",
            "layers of a unit (uniform), or the first layers of a stage (block)",
            "1",
        ),
        _gone(
            "distribute-checkpointed-activations",
            0,
            "with sequence parallelism, what a block keeps is already cut over tp",
        ),
        _gone("sync-tp-duplicated-parameters", 0, "copies are compared bit by bit ([train] drift_interval)"),
        _gone(
            "DDP-impl distributed-backend local_rank", 1, "FSDP2; nccl on GPUs, gloo on CPUs; torchrun sets the rank"
        ),
        _gone("use-contiguous-buffers-in-ddp deallocate-pipeline-outputs", 0, "handled by torch"),
        _gone("no-scatter-gather-tensors-in-pipeline", 0, "stages always send their part of the sequence"),
        _gone("deepspeed", 0, "FSDP2 cuts parameters, gradients and moments over [mesh] dp_shard"),
        _other(
            "deepspeed_config",
            1,
            "precision.initial_loss_scale precision.loss_scale_window precision.min_loss_scale precision.hysteresis "
            "optim.clip_grad",
            "fp16: initial_scale_power, loss_scale_window, min_loss_scale, hysteresis; gradient_clipping; a file that "
            "the script writes, or that lies in its folder, is read",
        ),
        _gone("zero-stage", 1, "FSDP2 cuts parameters, gradients and moments over [mesh] dp_shard"),
        _gone(
            "zero-allgather-bucket-size zero-reduce-bucket-size data-parallel-sharding-strategy",
            1,
            "FSDP2 cuts parameters, gradients and moments over [mesh] dp_shard",
        ),
        _gone(
            "zero-contigious-gradients zero-reduce-scatter use-distributed-optimizer overlap-grad-reduce "
            "overlap-param-gather use-megatron-fsdp init-model-with-meta-device use-nccl-ub fsdp-double-buffer "
            "fsdp-manual-registration delay-grad-reduce align-grad-reduce",
            0,
            "FSDP2 cuts parameters, gradients and moments over [mesh] dp_shard, and overlaps communication",
        ),
        _gone(
            "expert-model-parallel-size moe-expert-parallel-size",
            1,
            "an axis that dtmega's mesh does not have; the layout does not change what a run computes",
        ),
        _gone("no-pipeline-parallel", 0, "[mesh] pp is 1"),
        _gone(
            "no-async-tensor-model-parallel-allreduce no-gradient-accumulation-fusion tp-comm-overlap "
            "no-contiguous-buffers-in-local-ddp checkpoint-in-cpu contigious-checkpointing partition-activations "
            "synchronize-each-layer manual-gc no-check-for-nan-in-loss-and-grad use-ring-exchange-p2p",
            0,
            "another way to compute the same",
        ),
        _gone("empty-unused-memory-level distributed-timeout-minutes manual-gc-interval", 1, "has no effect on sums"),
        _gone(
            "moe-aux-loss-coeff moe-z-loss-coeff moe-eval-capacity-factor moe-train-capacity-factor moe-min-capacity "
            "moe-ffn-hidden-size moe-loss-coeff moe-router-dtype moe-router-load-balancing-type moe-router-topk "
            "moe-token-dispatcher-type",
            1,
            "a setting of --num-experts",
        ),
        _gone(
            "moe-grouped-gemm moe-permute-fusion moe-per-layer-logging create-moe-param-group "
            "disable-moe-token-dropping",
            0,
            "a setting of --num-experts",
        ),
        _gone(
            "hidden-size-teacher num-layers-teacher num-attention-heads-teacher kd-beta-ce kd-alpha-ce kd-temp "
            "load-teacher",
            1,
            "a setting of --kd",
        ),
        _gone("retro-project-dir retro-workdir", 1, "a setting of --retro-add-retriever"),
    ),
    "Data": (
        _other("data-path", MANY, "data.path data.weights", "a prefix, or weights and prefixes in turn"),
        _same(
            "split",
            "data.split",
            "969, 30, 1",
            "by document; with [data] order by sequence, and rounded as in Megatron",
        ),
        _other("tokenizer-type", 1, "data.tokenizer", "together with the files of the next rows"),
        _other("vocab-file", 1, "data.tokenizer", "a WordPiece vocab.txt is bert:FILE or bert-cased:FILE"),
        _other("merge-file", 1, "data.tokenizer", "with GPT2BPETokenizer: tiktoken's gpt2"),
        _other(
            "tokenizer-name-or-path|tokenizer-model", 1, "data.tokenizer", "the tokenizer.json of a local directory"
        ),
        _gone("tiktoken-pattern", 1, "a tiktoken file has its pattern beside it"),
        _lost("mock-data", 0, "random tokens in place of a corpus: name one in [data] path"),
        _lost("train-data-path valid-data-path test-data-path", MANY, "write a mixture in [data] train"),
        _lost("data-args-path per-split-data-args-path", 1, "write the corpora into [data] path"),
        _gone("data-cache-path", 1, "caches lie in the run's directory"),
        _gone("no-mmap-bin-files no-create-attention-mask-in-dataloader no-data-sharding", 0, "not needed"),
        _same("vocab-extra-ids", "data.sentinels", why="for t5; [model] vocab_size includes them"),
        _same("short-seq-prob", "data.short_seq_prob", "0.1"),
        _same("mask-prob", "data.mask_prob", "0.15"),
        _switch("eod-mask-loss", "data.eod_mask_loss"),
        _switch(
            "reset-position-ids", "data.reset_position_ids", "not with ALiBi, for which Megatron silently ignores it"
        ),
        _switch("reset-attention-mask", "data.reset_attention_mask", "Megatron silently ignores it for GPT and BLOOM"),
        _gone(
            "loss-on-targets-only",
            0,
            "always on with [data] objective = 'prefix-lm', which pretrain_prefix_lm.py becomes",
        ),
        _switch("reweight-loss-based-on-position-frequency", "data.reweight_positions"),
        _same("num-workers", "data.num_workers", "2"),
        _gone("valid-num-workers", 1, "the trainer itself reads evaluation batches"),
        _gone("data-impl", 1, "the files themselves say it: those of mmap, and the older ones of lazy and cached"),
        _gone("mmap-warmup", 0, "the kernel reads ahead"),
        _lost(
            "dataloader-type",
            1,
            "only single is built; [data] order reproduces its order, otherwise dtmega has its own",
            "single",
        ),
        _other(
            "train-weighted-split-paths", MANY, "data.train", "the same string: 'NAME: WEIGHT START:END PREFIX, ...'"
        ),
        _other("valid-weighted-split-paths", MANY, "data.validation", "the same strings, one validation set each"),
        _other("test-weighted-split-paths", MANY, "data.test", "the same string; only one test set"),
        _other("train-weighted-split-paths-path", 1, "data.train", "the contents of the file"),
        _other("valid-weighted-split-paths-path", 1, "data.validation", "the contents of the file"),
        _other("test-weighted-split-paths-path", 1, "data.test", "the contents of the file"),
        Flag(
            ("broadcast_data",),
            0,
            None,
            (),
            "no flag: each rank reads the data itself, and a hash at the start checks that they read the same",
        ),
    ),
    "Evaluation, logs, checkpoints": (
        _switch("eval-only", "eval.only"),
        _same("eval-interval", "eval.interval", "1000"),
        _same("eval-iters", "eval.steps", "100"),
        _same("log-interval", "log.interval", "100"),
        _switch("log-params-norm", "log.params_norm"),
        _switch("log-num-zeros-in-grad", "log.num_zeros"),
        _other("tensorboard-dir", 1, "log.tensorboard run.dir", "always on, in tensorboard/ of the run's directory"),
        _gone("tensorboard-log-interval tensorboard-queue-size", 1, "every step is written at once"),
        _gone(
            "codecarbon-dir log-level log-level-replica logging-level timing-log-level timing-log-option "
            "profile-step-start profile-step-end wandb-project wandb-exp-name wandb-save-dir wandb-entity",
            1,
            "see [log] and [profile]",
        ),
        _gone("profile-ranks", MANY, "see [profile]"),
        _gone(
            "log-throughput log-memory-to-tensorboard log-optimizer-states-to-tensorboard nvtx-ranges profile "
            "use-pytorch-profiler log-progress log-straggler no-log-loss-scale-to-tensorboard "
            "log-world-size-to-tensorboard",
            0,
            "see [log] and [profile]",
        ),
        _gone(
            "log-timers-to-tensorboard log-batch-size-to-tensorboard log-validation-ppl-to-tensorboard "
            "no-log-learnig-rate-to-tensorboard",
            0,
            "TensorBoard gets everything that metrics.jsonl gets",
        ),
        _other("save", 1, "checkpoint.dir", "by default checkpoints are in the run's directory"),
        _other(
            "load",
            1,
            "checkpoint.resume",
            "'auto' resumes from the run's own newest checkpoint; Megatron's are converted first",
        ),
        _same("save-interval", "checkpoint.interval"),
        _gone(
            "no-save-optim no-save-rng no-load-rng",
            0,
            "a checkpoint is always complete, and there are no generators with a state",
        ),
        _other("finetune no-load-optim", 0, "model.init_from", "the weights to start from"),
        _gone(
            "universal-checkpoint async-save use-dist-ckpt auto-detect-ckpt-format",
            0,
            "every checkpoint resumes on any layout",
        ),
        _gone("ckpt-format dist-ckpt-format non-persistent-save-interval", 1, "every checkpoint resumes on any layout"),
        _gone("use-checkpoint-args", 0, "convert writes the configuration of a checkpoint"),
        _lost("reset-iteration", 0, "start a new run with [model] init_from"),
        _gone("inference", 0, "use dtmega generate"),
    ),
    "tools/preprocess_data.py": (
        _gone("input json-keys output-prefix workers append-eod", MANY, "the same options of dtmega tokenize"),
        _gone("split-sentences", 0, "the same option of dtmega tokenize"),
        _gone("dataset-impl", 1, "mmap"),
    ),
}


def by_name() -> dict[str, Flag]:
    """Map each flag name to a row of the table. Other names of the same flag map to the same row."""
    return {name: flag for group in FLAGS.values() for flag in group for name in flag.names}


def first_name(name: str) -> str:
    """The first name of a flag in the table; the given name if the flag is not in the table."""
    flag = by_name().get(name)
    return name if flag is None else flag.other_names.get(name, name)
