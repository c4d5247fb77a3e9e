"""Megatron's flags: one row per flag, with the configuration key that replaces it or the reason why there is none.

The table has the flags that pre-training uses, with their defaults, from `megatron/arguments.py` of Megatron-LM and of
BigScience's Megatron-DeepSpeed. `translate.py` reads it, and `docs/from-megatron.md` shows it to readers.
"""

from __future__ import annotations

from typing import NamedTuple

MANY = -1  # value of n_values for a flag that takes all words up to the next flag


class Flag(NamedTuple):
    """A flag of Megatron.

    Attributes:
        names: the flag as it is written, followed by its older names.
        n_values: number of values that the flag takes; MANY for all words up to the next flag.
        default: Megatron's default, as written on a command line; None for switches and for flags without a default.
        keys: keys of the configuration that replace the flag; empty if the flag is not carried over.
        why: difference between the key and the flag, or reason why there is no key.
        same: True if the flag has a single key with the same value, so that translating copies the value.
    """

    names: tuple[str, ...]
    n_values: int
    default: str | None
    keys: tuple[str, ...]
    why: str = ""
    same: bool = False


def _same(names: str, key: str, default: str | None = None, why: str = "") -> Flag:
    """A flag whose value is the value of one key. Names are separated by blanks."""
    return Flag(tuple(f"--{name}" for name in names.split()), 1, default, (key,), why, same=True)


def _switch(name: str, key: str, why: str = "") -> Flag:
    """A switch that sets a key to true."""
    return Flag((f"--{name}",), 0, None, (key,), why, same=True)


def _other(names: str, n_values: int, keys: str, why: str, default: str | None = None) -> Flag:
    """A flag that `translate.py` turns into keys in its own way. Names are separated by blanks, and so are keys."""
    return Flag(tuple(f"--{name}" for name in names.split()), n_values, default, tuple(keys.split()), why)


def _gone(names: str, n_values: int, why: str) -> Flag:
    """A flag that is not carried over."""
    return _other(names, n_values, "", why)


FLAGS: dict[str, tuple[Flag, ...]] = {
    "Model": (
        _same("num-layers encoder-num-layers", "model.n_layers", why="for t5, the layers of the encoder"),
        _same(
            "decoder-num-layers", "model.n_decoder_layers", why="0 here is Megatron's default, as many as the encoder"
        ),
        _same("hidden-size", "model.hidden_size"),
        _same("ffn-hidden-size", "model.ffn_hidden_size", why="0 here is Megatron's default, 4 D"),
        _same("num-attention-heads", "model.n_heads"),
        _same(
            "kv-channels",
            "model.kv_channels",
            why="0 here is Megatron's default, D / H, which families other than t5 always have",
        ),
        _other("max-position-embeddings", 1, "model.max_position_embeddings", "ALiBi has no limit on positions"),
        _other(
            "position-embedding-type",
            1,
            "model.name",
            "alibi is bloom, absolute is gpt, bert or t5; a GPT with rotary positions is not built",
            "absolute",
        ),
        _other("embed-layernorm", 0, "model.name", "bloom always has it, other families never do"),
        _same("layernorm-epsilon", "model.layer_norm_eps", "1e-5", "for t5 the key is norm_eps"),
        _switch("apply-residual-connection-post-layernorm", "model.apply_residual_connection_post_layernorm"),
        _same("init-method-std", "model.init_std", "0.02"),
        _gone("init-method-xavier-uniform", 0, "no published run of these families starts this way"),
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
            "no-query-key-layer-scaling",
            0,
            "model.query_key_layer_scaling",
            "on in Megatron without this flag; it matters in float16 only, so it is carried over with --fp16; t5 has "
            "no such key",
        ),
        _gone("attention-softmax-in-fp32", 0, "always on"),
        _gone("bert-no-binary-head", 0, "a BERT always has its sentence-order head"),
        _gone(
            "bias-gelu-fusion",
            0,
            "Megatron's default since 2020; before that, the feed-forward had erf: set [model] gelu yourself",
        ),
        _gone("openai-gelu onnx-safe", 0, "other ways to compute the two forms of GELU that are here"),
        _gone("mup mup-coord-check", 0, "not built"),
        _gone(
            "task",
            1,
            "classifiers are not built: export the model, and use transformers' BertForSequenceClassification",
        ),
    ),
    "Batch and length": (
        _same("seq-length encoder-seq-length", "data.seq_len"),
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
        _gone(
            "curriculum-learning",
            0,
            "growing lengths break token counts, the pipeline's buffers and the rule that batch n depends on n alone",
        ),
        _gone("batch-size", 1, "old name, per model replica: use --micro-batch-size and --global-batch-size"),
    ),
    "Optimizer": (
        _other("optimizer", 1, "optim.name", "Megatron's adam is AdamW", "adam"),
        _same("sgd-momentum", "optim.momentum", "0.9"),
        _same("lr", "optim.lr"),
        _same("min-lr", "optim.min_lr", "0.0"),
        _same("lr-decay-style", "optim.schedule", "linear", "update 1 already has a rate above 0 here"),
        _other(
            "lr-decay-iters lr-decay-samples lr-decay-tokens",
            1,
            "optim.decay optim.unit",
            "the unit has a key of its own",
        ),
        _other(
            "lr-warmup-iters lr-warmup-samples",
            1,
            "optim.warmup optim.unit",
            "the unit has a key of its own; with --lr-decay-tokens, the tokens of these samples",
        ),
        _same("lr-warmup-fraction", "optim.warmup_fraction"),
        _gone("warmup", 1, "old name: use --lr-warmup-fraction"),
        _same("weight-decay", "optim.weight_decay", "0.01"),
        _same("end-weight-decay", "optim.weight_decay"),
        _same("start-weight-decay", "optim.start_weight_decay"),
        _same("weight-decay-incr-style", "optim.weight_decay_schedule", "constant"),
        _same("clip-grad", "optim.clip_grad", "1.0"),
        _same("adam-beta1", "optim.beta1", "0.9"),
        _same("adam-beta2", "optim.beta2", "0.999"),
        _same("adam-eps", "optim.eps", "1e-8"),
        _gone("use-bnb-optimizer", 0, "moments are fp32 and sharded over the data ranks"),
        _other("cpu-optimizer", 0, "fsdp.cpu_offload", "shards and moments in host memory"),
        _gone("cpu_torch_adam", 0, "AdamW is always torch's"),
        _gone("override-lr-scheduler", 0, "always on: the configuration counts, and what changed is printed"),
        _gone("override-opt_param-scheduler", 0, "always on: the configuration counts, and what changed is printed"),
        _gone("use-checkpoint-lr-scheduler", 0, "start with the config.toml that the run wrote"),
    ),
    "Numbers": (
        _other("bf16 fp16", 0, "precision.params", "with fp32 master weights, as in Megatron"),
        _gone("loss-scale", 1, "the scale is always dynamic"),
        _same("initial-loss-scale", "precision.initial_loss_scale", "4294967296"),
        _same("min-loss-scale", "precision.min_loss_scale", "1.0"),
        _same("loss-scale-window", "precision.loss_scale_window", "1000"),
        _same("hysteresis", "precision.hysteresis", "2"),
        _other("accumulate-allreduce-grads-in-fp32", 0, "precision.reduce", "float32 is the default"),
        _gone("fp16-lm-cross-entropy", 0, "the loss is always fp32"),
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
        _same("tensor-model-parallel-size", "mesh.tp", "1"),
        _same("pipeline-model-parallel-size", "mesh.pp", "1"),
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
        _gone("model-parallel-size", 1, "old name: use --tensor-model-parallel-size"),
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
        _other(
            "checkpoint-num-layers recompute-num-layers",
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
        _gone("deepspeed_config zero-stage", 1, "FSDP2 cuts parameters, gradients and moments over [mesh] dp_shard"),
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
        _other("tokenizer-name-or-path", 1, "data.tokenizer", "the tokenizer.json of a local directory"),
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
        _gone("dataloader-type", 1, "single; [data] order reproduces its order, otherwise dtmega has its own"),
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
        _gone("codecarbon-dir log-level log-level-replica", 1, "not built"),
        _gone(
            "log-timers-to-tensorboard log-batch-size-to-tensorboard log-validation-ppl-to-tensorboard "
            "no-log-learnig-rate-to-tensorboard no-log-loss-scale-to-tensorboard",
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
        _gone("universal-checkpoint", 0, "every checkpoint resumes on any layout"),
        _gone("inference", 0, "use dtmega generate"),
    ),
    "tools/preprocess_data.py": (
        _gone("input json-keys output-prefix workers append-eod", MANY, "the same options of dtmega tokenize"),
        _gone("split-sentences", 0, "the same option of dtmega tokenize"),
        _gone("dataset-impl", 1, "mmap"),
    ),
}


def by_name() -> dict[str, Flag]:
    """The flags by name. A flag with several names is listed under each of them."""
    return {name: flag for group in FLAGS.values() for flag in group for name in flag.names}
