"""Megatron's flags, one row each: the key that it became here, or the reason why there is none.

They are those of Megatron-LM's and BigScience's Megatron-DeepSpeed's `megatron/arguments.py` that a pre-training uses,
with the defaults of there. `docs/from-megatron.md` is this table for readers; `translate.py` reads it.
"""

from __future__ import annotations

from typing import NamedTuple

MANY = -1


class Flag(NamedTuple):
    """One flag.

    Attributes:
        names: as it is written; older names of the same follow.
        n_values: how many it takes; MANY: all up to the next flag.
        default: Megatron's, as it is written on a command line; None where it has none, and for switches.
        keys: of the configuration that say the same; none: it is not carried over.
        why: how the key differs, or why there is none.
        same: the value is that of the one key, so that translating it is copying it.
    """

    names: tuple[str, ...]
    n_values: int
    default: str | None
    keys: tuple[str, ...]
    why: str = ""
    same: bool = False


def _same(names: str, key: str, default: str | None = None, why: str = "") -> Flag:
    return Flag(tuple(f"--{name}" for name in names.split()), 1, default, (key,), why, same=True)


def _switch(name: str, key: str, why: str = "") -> Flag:
    """A switch that sets a key to true."""
    return Flag((f"--{name}",), 0, None, (key,), why, same=True)


def _other(names: str, n_values: int, keys: str, why: str, default: str | None = None) -> Flag:
    """A flag whose value is not that of one key (`translate.py`). Names, and keys, are separated by blanks."""
    return Flag(tuple(f"--{name}" for name in names.split()), n_values, default, tuple(keys.split()), why)


def _gone(names: str, n_values: int, why: str) -> Flag:
    return _other(names, n_values, "", why)


FLAGS: dict[str, tuple[Flag, ...]] = {
    "Model": (
        _same("num-layers encoder-num-layers", "model.n_layers", why="of t5 layers of the encoder"),
        _same("decoder-num-layers", "model.n_decoder_layers", why="0 here is their default, as many as the encoder"),
        _same("hidden-size", "model.hidden_size"),
        _same("ffn-hidden-size", "model.ffn_hidden_size", why="0 here is their default, 4 D"),
        _same("num-attention-heads", "model.n_heads"),
        _same(
            "kv-channels", "model.kv_channels", why="0 here is their default, D / H, which other families have always"
        ),
        _other("max-position-embeddings", 1, "model.max_position_embeddings", "ALiBi has no positions to count"),
        _other(
            "position-embedding-type",
            1,
            "model.name",
            "alibi is bloom, absolute is gpt, bert and t5; a GPT with rotary positions is not built",
            "absolute",
        ),
        _other("embed-layernorm", 0, "model.name", "bloom always has it, no other family has"),
        _same("layernorm-epsilon", "model.layer_norm_eps", "1e-5", "of t5 norm_eps"),
        _switch("apply-residual-connection-post-layernorm", "model.apply_residual_connection_post_layernorm"),
        _same("init-method-std", "model.init_std", "0.02"),
        _gone("init-method-xavier-uniform", 0, "no published run of the family starts so"),
        _same("attention-dropout", "model.attention_dropout", "0.1"),
        _same("hidden-dropout", "model.hidden_dropout", "0.1"),
        _other(
            "make-vocab-size-divisible-by",
            1,
            "model.pad_vocab_to_multiple",
            "times their tensor-parallel size, to have as many rows; rows beyond V never enter the softmax here",
            "128",
        ),
        _other("pad-vocab-size-to", 1, "model.vocab_size", "they train the rows of padding, so they count"),
        _other(
            "no-bias-gelu-fusion",
            0,
            "model.gelu",
            "fused, theirs is the approximation by tanh; with this flag erf, which bloom and gpt have not; "
            "of BERT's head it is erf in both cases; of t5 the key is activation",
        ),
        _same("glu-activation", "model.glu"),
        _switch("fp32-residual-connection", "model.fp32_residual"),
        _other(
            "no-query-key-layer-scaling",
            0,
            "model.query_key_layer_scaling",
            "on in theirs without this flag; it changes products in float16 only, so it is carried over with --fp16; "
            "t5 has none",
        ),
        _gone("attention-softmax-in-fp32", 0, "always so"),
        _gone("bert-no-binary-head", 0, "a BERT has its sentence-order head"),
        _gone("bias-gelu-fusion", 0, "their default since 2020; before, the feed-forward was erf: say gelu yourself"),
        _gone("openai-gelu onnx-safe", 0, "other ways to write the two GELUs that are here"),
        _gone("mup mup-coord-check", 0, "not built"),
        _gone("task", 1, "a classifier: export the model, then transformers' BertForSequenceClassification"),
    ),
    "Batch and length": (
        _same("seq-length encoder-seq-length", "data.seq_len"),
        _same("decoder-seq-length", "data.decoder_seq_len"),
        _same("micro-batch-size", "batch.micro_batch_size"),
        _same("global-batch-size", "batch.global_batch_size", why="without it they take one micro-batch a data rank"),
        _other("rampup-batch-size", 3, "batch.rampup", "the same three numbers"),
        _same("train-iters", "train.steps"),
        _same("train-samples", "train.samples"),
        _same("train-tokens", "train.tokens"),
        _same("kill-switch-path", "train.kill_switch"),
        _other(
            "skip-train-iteration-range", MANY, "train.skip_steps", "101-200 is [101, 200]; samples are consumed here"
        ),
        _same("exit-interval", "train.exit_interval"),
        _same("exit-duration-in-mins", "train.exit_duration_min"),
        _gone(
            "curriculum-learning",
            0,
            "lengths that grow break token counts, the pipeline's buffers and 'batch n is a function of its number'",
        ),
        _gone("batch-size", 1, "theirs of old, per model replica: use --micro-batch-size and --global-batch-size"),
    ),
    "Optimizer": (
        _other("optimizer", 1, "optim.name", "their adam is AdamW", "adam"),
        _same("sgd-momentum", "optim.momentum", "0.9"),
        _same("lr", "optim.lr"),
        _same("min-lr", "optim.min_lr", "0.0"),
        _same("lr-decay-style", "optim.schedule", "linear", "update 1 has a rate above 0 here"),
        _other("lr-decay-iters lr-decay-samples lr-decay-tokens", 1, "optim.decay optim.unit", "its unit is a key"),
        _other(
            "lr-warmup-iters lr-warmup-samples",
            1,
            "optim.warmup optim.unit",
            "its unit is a key; beside --lr-decay-tokens the tokens of these samples",
        ),
        _same("lr-warmup-fraction", "optim.warmup_fraction"),
        _gone("warmup", 1, "theirs of old: use --lr-warmup-fraction"),
        _same("weight-decay", "optim.weight_decay", "0.01"),
        _same("end-weight-decay", "optim.weight_decay"),
        _same("start-weight-decay", "optim.start_weight_decay"),
        _same("weight-decay-incr-style", "optim.weight_decay_schedule", "constant"),
        _same("clip-grad", "optim.clip_grad", "1.0"),
        _same("adam-beta1", "optim.beta1", "0.9"),
        _same("adam-beta2", "optim.beta2", "0.999"),
        _same("adam-eps", "optim.eps", "1e-8"),
        _gone("use-bnb-optimizer", 0, "moments are fp32, sharded over the data ranks"),
        _other("cpu-optimizer", 0, "fsdp.cpu_offload", "shards and moments in host memory"),
        _gone("cpu_torch_adam", 0, "AdamW is torch's everywhere"),
        _gone("override-lr-scheduler", 0, "always so: the configuration counts, what changed is printed"),
        _gone("override-opt_param-scheduler", 0, "always so: the configuration counts, what changed is printed"),
        _gone("use-checkpoint-lr-scheduler", 0, "start with the config.toml that the run has written"),
    ),
    "Numbers": (
        _other("bf16 fp16", 0, "precision.params", "fp32 master weights, as theirs"),
        _gone("loss-scale", 1, "the scale is always dynamic"),
        _same("initial-loss-scale", "precision.initial_loss_scale", "4294967296"),
        _same("min-loss-scale", "precision.min_loss_scale", "1.0"),
        _same("loss-scale-window", "precision.loss_scale_window", "1000"),
        _same("hysteresis", "precision.hysteresis", "2"),
        _other("accumulate-allreduce-grads-in-fp32", 0, "precision.reduce", "float32 is the default"),
        _gone("fp16-lm-cross-entropy", 0, "the loss is fp32 always"),
        _same("seed", "run.seed", "1234"),
        _gone("data-parallel-random-init", 0, "initial values are a function of the seed and the name"),
        _gone("use-cpu-initialization lazy-mpu-init", 0, "each rank draws the values that it holds, on any device"),
        _gone("no-bias-dropout-fusion no-masked-softmax-fusion masked-softmax-fusion", 0, "torch.compile fuses"),
        _gone("abort-on-unmet-fused-kernel-constraints", 0, "there are no kernels with such constraints"),
    ),
    "Layout": (
        _same("tensor-model-parallel-size", "mesh.tp", "1"),
        _same("pipeline-model-parallel-size", "mesh.pp", "1"),
        _same(
            "pipeline-model-parallel-split-rank",
            "pipeline.split",
            why="0 here balances both stacks over all stages by their cost",
        ),
        _other(
            "num-layers-per-virtual-pipeline-stage",
            1,
            "pipeline.virtual_stages pipeline.schedule",
            "stages a rank, L / pp / theirs, with the interleaved schedule",
        ),
        _gone("model-parallel-size", 1, "theirs of old: use --tensor-model-parallel-size"),
        _gone("pp-partition-method", 1, "stages are balanced by cost, or listed in [pipeline] stages"),
        _other("sequence-parallel", 0, "mesh.sequence_parallel", "the default with tp"),
        _other(
            "checkpoint-activations deepspeed-activation-checkpointing recompute-activations",
            0,
            "recompute.mode",
            "'full'; their --recompute-activations is 'selective'",
        ),
        _other("recompute-granularity", 1, "recompute.mode", "full or selective"),
        _same("recompute-method", "recompute.method", "uniform"),
        _other(
            "checkpoint-num-layers recompute-num-layers",
            1,
            "recompute.layers",
            "layers of a unit, or first layers",
            "1",
        ),
        _gone(
            "distribute-checkpointed-activations", 0, "what is kept of a block is cut over tp by sequence parallelism"
        ),
        _gone("sync-tp-duplicated-parameters", 0, "copies are compared to the bit ([train] drift_interval)"),
        _gone(
            "DDP-impl distributed-backend local_rank", 1, "FSDP2; nccl on GPUs, gloo on CPUs; torchrun says the rank"
        ),
        _gone("use-contiguous-buffers-in-ddp deallocate-pipeline-outputs", 0, "torch's affair"),
        _gone("no-scatter-gather-tensors-in-pipeline", 0, "stages hand on their part of the sequence"),
        _gone("deepspeed", 0, "FSDP2 cuts parameters, gradients and moments over [mesh] dp_shard"),
        _gone("deepspeed_config zero-stage", 1, "FSDP2 cuts parameters, gradients and moments over [mesh] dp_shard"),
    ),
    "Data": (
        _other("data-path", MANY, "data.path data.weights", "a prefix, or weights and prefixes in turn"),
        _same("split", "data.split", "969, 30, 1", "by document; with [data] order rounded as theirs, by sequence"),
        _other("tokenizer-type", 1, "data.tokenizer", "with the files that the next rows name"),
        _other("vocab-file", 1, "data.tokenizer", "a WordPiece vocab.txt is bert:FILE or bert-cased:FILE"),
        _other("merge-file", 1, "data.tokenizer", "with GPT2BPETokenizer: tiktoken's gpt2"),
        _other("tokenizer-name-or-path", 1, "data.tokenizer", "the tokenizer.json of a local directory"),
        _same("vocab-extra-ids", "data.sentinels", why="of t5; [model] vocab_size counts them"),
        _same("short-seq-prob", "data.short_seq_prob", "0.1"),
        _same("mask-prob", "data.mask_prob", "0.15"),
        _switch("eod-mask-loss", "data.eod_mask_loss"),
        _switch("reset-position-ids", "data.reset_position_ids", "not with ALiBi, which theirs ignores in silence"),
        _switch("reset-attention-mask", "data.reset_attention_mask", "theirs ignores it in silence for GPT and BLOOM"),
        _gone("loss-on-targets-only", 0, "always so with [data] objective = 'prefix-lm', as of pretrain_prefix_lm.py"),
        _switch("reweight-loss-based-on-position-frequency", "data.reweight_positions"),
        _same("num-workers", "data.num_workers", "2"),
        _gone("valid-num-workers", 1, "evaluations read in the trainer"),
        _gone("data-impl", 1, "said by the files themselves: those of mmap, and the older ones of lazy and cached"),
        _gone("mmap-warmup", 0, "the kernel reads ahead"),
        _gone("dataloader-type", 1, "single; its order is here with [data] order, else one of dtmega's own"),
        _other(
            "train-weighted-split-paths", MANY, "data.train", "the same string: 'NAME: WEIGHT START:END PREFIX, ...'"
        ),
        _other("valid-weighted-split-paths", MANY, "data.validation", "the same strings, a set each"),
        _other("test-weighted-split-paths", MANY, "data.test", "the same string; one set"),
        _other("train-weighted-split-paths-path", 1, "data.train", "what the file says, which is read here"),
        _other("valid-weighted-split-paths-path", 1, "data.validation", "what the file says, which is read here"),
        _other("test-weighted-split-paths-path", 1, "data.test", "what the file says, which is read here"),
        Flag(
            ("broadcast_data",),
            0,
            None,
            (),
            "no flag: each rank reads, and a hash at the start says they read the same",
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
        _gone("tensorboard-log-interval tensorboard-queue-size", 1, "each step, written at once"),
        _gone("codecarbon-dir log-level log-level-replica", 1, "not built"),
        _gone(
            "log-timers-to-tensorboard log-batch-size-to-tensorboard log-validation-ppl-to-tensorboard "
            "no-log-learnig-rate-to-tensorboard no-log-loss-scale-to-tensorboard",
            0,
            "what metrics.jsonl has, TensorBoard has",
        ),
        _other("save", 1, "checkpoint.dir", "the run's directory too has a place for them"),
        _other("load", 1, "checkpoint.resume", "'auto' goes on from the newest of its own; theirs are converted first"),
        _same("save-interval", "checkpoint.interval"),
        _gone("no-save-optim no-save-rng no-load-rng", 0, "a checkpoint is whole, and no generator has a state"),
        _other("finetune no-load-optim", 0, "model.init_from", "weights to start with"),
        _gone("universal-checkpoint", 0, "every checkpoint resumes on every layout"),
        _gone("inference", 0, "dtmega generate"),
    ),
    "tools/preprocess_data.py": (
        _gone("input json-keys output-prefix workers append-eod", MANY, "the same options of dtmega tokenize"),
        _gone("split-sentences", 0, "the same option of dtmega tokenize"),
        _gone("dataset-impl", 1, "mmap"),
    ),
}


def by_name() -> dict[str, Flag]:
    """Every flag by each of its names."""
    return {name: flag for group in FLAGS.values() for flag in group for name in flag.names}
