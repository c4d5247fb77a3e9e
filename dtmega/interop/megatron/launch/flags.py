"""Table of Megatron's flags: each row lists the keys that replace a flag, or gives the reason why there is no key.

The table has the flags of Megatron-LM and of its two forks for DeepSpeed, from 2019 to 2026, with the defaults in their
arguments files. The modules in this folder read the table, and `docs/from-megatron.md` shows the table.
"""

from __future__ import annotations

from functools import cache

from dtmega.interop.megatron.launch.expert_flags import EXPERTS
from dtmega.interop.megatron.launch.flags_without_keys import NO_EFFECT, NOT_BUILT
from dtmega.interop.megatron.launch.model_flags import MODEL
from dtmega.interop.megatron.launch.row import MANY, Flag, gone, lost, other, same, switch

FLAGS: dict[str, tuple[Flag, ...]] = {
    "Model": MODEL,
    "Experts": EXPERTS,
    "Batch and length": (
        same("seq-length|encoder-seq-length", "data.seq_len"),
        same("decoder-seq-length", "data.decoder_seq_len"),
        same("micro-batch-size", "batch.micro_batch_size"),
        same("global-batch-size", "batch.global_batch_size", why="Megatron's default is one micro-batch per data rank"),
        other("rampup-batch-size", 3, "batch.rampup", "the same three numbers"),
        same("train-iters", "train.steps"),
        same("train-samples", "train.samples"),
        same("train-tokens", "train.tokens"),
        same("kill-switch-path|kill-switch-file", "train.kill_switch"),
        other(
            "skip-train-iteration-range",
            MANY,
            "train.skip_steps",
            "101-200 is [101, 200]; the samples of these steps are consumed here",
        ),
        other("iterations-to-skip", MANY, "train.skip_steps", "the samples of these steps are consumed"),
        same("exit-interval", "train.exit_interval"),
        same("exit-duration-in-mins", "train.exit_duration_min"),
        lost("step-batch-size-schedule", 1, "only --rampup-batch-size is built"),
        gone("calculate-per-token-loss", 0, "the loss of a step is the mean over its tokens"),
        lost("gas", 1, "old name of a number of microbatches: use --global-batch-size"),
        lost("no-train", 1, "use [eval] only"),
        lost(
            "curriculum-learning",
            0,
            "growing lengths break token counts, the pipeline's buffers and the rule that batch n depends on n alone",
        ),
        lost("batch-size", 1, "old name, per model replica: use --micro-batch-size and --global-batch-size"),
    ),
    "Optimizer": (
        other("optimizer", 1, "optim.name", "Megatron's adam is AdamW", "adam"),
        same("sgd-momentum", "optim.momentum", "0.9"),
        same("lr", "optim.lr"),
        same("min-lr", "optim.min_lr", "0.0"),
        other(
            "lr-decay-style",
            1,
            "optim.schedule",
            "inverse-square-root is inverse-sqrt, WSD is wsd; update 1 already has a rate above 0 here",
            "linear",
        ),
        other(
            "lr-decay-iters lr-decay-samples lr-decay-tokens",
            1,
            "optim.decay optim.unit",
            "the unit has a key of its own",
        ),
        other(
            "lr-warmup-iters lr-warmup-samples lr-warmup-tokens",
            1,
            "optim.warmup optim.unit",
            "the unit has a key of its own; a warm-up in another unit than the decay is converted to it",
        ),
        same("lr-warmup-fraction", "optim.warmup_fraction"),
        other("warmup", 1, "optim.warmup_fraction", "old name of --lr-warmup-fraction"),
        lost("lr-warmup-init", 1, "a warm-up begins at 0", "0 0.0"),
        other("lr-wsd-decay-style", 1, "optim.schedule", "linear is wsd, the others are not built", "exponential"),
        other("lr-wsd-decay-iters lr-wsd-decay-samples", 1, "optim.wsd_decay", "in the unit of the decay"),
        lost("decoupled-lr decoupled-min-lr", 1, "see [optim] lr_factors for a rate of one's own for a parameter"),
        same("weight-decay", "optim.weight_decay", "0.01"),
        same("end-weight-decay", "optim.weight_decay"),
        same("start-weight-decay", "optim.start_weight_decay"),
        same("weight-decay-incr-style", "optim.weight_decay_schedule", "constant"),
        same("clip-grad", "optim.clip_grad", "1.0"),
        same("adam-beta1", "optim.beta1", "0.9"),
        same("adam-beta2", "optim.beta2", "0.999"),
        same("adam-eps", "optim.eps", "1e-8"),
        lost("use-bnb-optimizer", 0, "moments are fp32 and sharded over the data ranks"),
        other("cpu-optimizer|optimizer-cpu-offload", 0, "fsdp.cpu_offload", "shards and moments in host memory"),
        gone("cpu_torch_adam", 0, "AdamW is always torch's"),
        gone("override-lr-scheduler", 0, "always on: the configuration counts, and what changed is printed"),
        gone(
            "override-opt_param-scheduler|override-opt-param-scheduler",
            0,
            "always on: the configuration counts, and what changed is printed",
        ),
        gone(
            "use-checkpoint-lr-scheduler use-checkpoint-opt_param-scheduler|use-checkpoint-opt-param-scheduler "
            "no-load-lr-state",
            0,
            "start with the config.toml that the run wrote",
        ),
    ),
    "Numbers": (
        other("bf16 fp16", 0, "precision.params", "with fp32 master weights, as in Megatron"),
        other(
            "loss-scale", 1, "precision.params", "with --fp16 the scale is always dynamic, so a fixed one is refused"
        ),
        lost("fp8-format", 1, "not built"),
        gone("fp8-amax-compute-algo fp8-amax-history-len", 1, "a setting of --fp8-format"),
        gone("fp8-param-gather", 0, "a setting of --fp8-format"),
        other("grad-reduce-in-bf16", 0, "precision.reduce", "bfloat16"),
        gone("disable-bf16-reduced-precision-matmul deterministic-mode", 0, "sums are float32, in a fixed order"),
        same("initial-loss-scale", "precision.initial_loss_scale", "4294967296"),
        same("min-loss-scale", "precision.min_loss_scale", "1.0"),
        same("loss-scale-window", "precision.loss_scale_window", "1000"),
        same("hysteresis", "precision.hysteresis", "2"),
        other("accumulate-allreduce-grads-in-fp32", 0, "precision.reduce", "float32 is the default"),
        lost("fp16-lm-cross-entropy", 0, "the loss is always fp32"),
        same("seed", "run.seed", "1234"),
        gone("data-parallel-random-init", 0, "initial values are a function of the seed and the parameter's name"),
        gone(
            "use-cpu-initialization lazy-mpu-init",
            MANY,
            "each rank draws only the values that it holds, the same on any device",
        ),
        gone(
            "no-bias-dropout-fusion no-masked-softmax-fusion masked-softmax-fusion", 0, "torch.compile fuses operations"
        ),
        gone("abort-on-unmet-fused-kernel-constraints", 0, "no kernel here has such constraints"),
    ),
    "Layout": (
        same("tensor-model-parallel-size|model-parallel-size", "mesh.tp", "1"),
        same("context-parallel-size|ds-sequence-parallel-size", "mesh.cp", "1"),
        same("pipeline-model-parallel-size|pipe-parallel-size", "mesh.pp", "1"),
        same(
            "pipeline-model-parallel-split-rank",
            "pipeline.split",
            why="0 here balances both stacks over all stages by cost",
        ),
        other(
            "num-layers-per-virtual-pipeline-stage",
            1,
            "pipeline.virtual_stages pipeline.schedule",
            "stages per rank, L / pp / the flag's value, with the interleaved schedule",
        ),
        other(
            "num-virtual-stages-per-pipeline-rank",
            1,
            "pipeline.virtual_stages pipeline.schedule",
            "with the interleaved schedule",
        ),
        gone("pp-partition-method", 1, "stages are balanced by cost, or listed in [pipeline] stages"),
        other("sequence-parallel", 0, "mesh.sequence_parallel", "the default with tp"),
        other(
            "checkpoint-activations deepspeed-activation-checkpointing recompute-activations",
            0,
            "recompute.mode",
            "'full'; --recompute-activations is 'selective'",
        ),
        other("recompute-granularity", 1, "recompute.mode", "full or selective"),
        gone("recompute-modules", MANY, "'selective' is the attention of every layer"),
        same("recompute-method", "recompute.method", "uniform"),
        other("activations-checkpoint-method", 1, "recompute.mode recompute.method", "'full', and uniform or block"),
        other(
            "checkpoint-num-layers recompute-num-layers activations-checkpoint-num-layers",
            1,
            "recompute.layers",
            "layers of a unit (uniform), or the first layers of a stage (block)",
            "1",
        ),
        gone(
            "distribute-checkpointed-activations",
            0,
            "with sequence parallelism, what a block keeps is already cut over tp",
        ),
        gone("sync-tp-duplicated-parameters", 0, "copies are compared bit by bit ([train] drift_interval)"),
        gone(
            "DDP-impl distributed-backend local_rank|local-rank",
            1,
            "FSDP2; nccl on GPUs, gloo on CPUs; torchrun sets the rank",
        ),
        gone("use-contiguous-buffers-in-ddp deallocate-pipeline-outputs", 0, "handled by torch"),
        gone("no-scatter-gather-tensors-in-pipeline", 0, "stages always send their part of the sequence"),
        gone("deepspeed", 0, "FSDP2 cuts parameters, gradients and moments over [mesh] dp_shard"),
        other(
            "deepspeed_config",
            1,
            "precision.initial_loss_scale precision.loss_scale_window precision.min_loss_scale precision.hysteresis "
            "optim.clip_grad",
            "fp16: initial_scale_power, loss_scale_window, min_loss_scale, hysteresis; gradient_clipping; a file that "
            "the script writes, or that lies in its folder, is read",
        ),
        gone("zero-stage", 1, "FSDP2 cuts parameters, gradients and moments over [mesh] dp_shard"),
        gone(
            "zero-allgather-bucket-size zero-reduce-bucket-size data-parallel-sharding-strategy",
            1,
            "FSDP2 cuts parameters, gradients and moments over [mesh] dp_shard",
        ),
        gone(
            "zero-contigious-gradients zero-reduce-scatter use-distributed-optimizer overlap-grad-reduce "
            "overlap-param-gather use-megatron-fsdp init-model-with-meta-device use-nccl-ub fsdp-double-buffer "
            "fsdp-manual-registration delay-grad-reduce align-grad-reduce",
            0,
            "FSDP2 cuts parameters, gradients and moments over [mesh] dp_shard, and overlaps communication",
        ),
        same("expert-model-parallel-size", "mesh.ep", "1"),
        other("expert-tensor-parallel-size", 1, "mesh.tp", "tp cuts experts, too, so both sizes must be equal"),
        gone("no-pipeline-parallel", 0, "[mesh] pp is 1"),
        gone(
            "no-async-tensor-model-parallel-allreduce no-gradient-accumulation-fusion tp-comm-overlap "
            "no-contiguous-buffers-in-local-ddp checkpoint-in-cpu contigious-checkpointing partition-activations "
            "synchronize-each-layer manual-gc no-check-for-nan-in-loss-and-grad use-ring-exchange-p2p",
            0,
            "another way to compute the same",
        ),
        gone("empty-unused-memory-level distributed-timeout-minutes manual-gc-interval", 1, "has no effect on sums"),
        gone(
            "hidden-size-teacher num-layers-teacher num-attention-heads-teacher kd-beta-ce kd-alpha-ce kd-temp "
            "load-teacher",
            1,
            "a setting of --kd",
        ),
        gone("retro-project-dir retro-workdir", 1, "a setting of --retro-add-retriever"),
    ),
    "Data": (
        other("data-path", MANY, "data.path data.weights", "a prefix, or weights and prefixes in turn"),
        same(
            "split",
            "data.split",
            "969, 30, 1",
            "by document; with [data] order by sequence, and rounded as in Megatron",
        ),
        other("tokenizer-type", 1, "data.tokenizer", "together with the files of the next rows"),
        other("vocab-file", 1, "data.tokenizer", "a WordPiece vocab.txt is bert:FILE or bert-cased:FILE"),
        other("merge-file", 1, "data.tokenizer", "with GPT2BPETokenizer: tiktoken's gpt2"),
        other("tokenizer-name-or-path|tokenizer-model", 1, "data.tokenizer", "the tokenizer.json of a local directory"),
        gone("tiktoken-pattern", 1, "a tiktoken file has its pattern beside it"),
        lost("mock-data", 0, "random tokens in place of a corpus: name one in [data] path"),
        lost("train-data-path valid-data-path test-data-path", MANY, "write a mixture in [data] train"),
        lost("data-args-path per-split-data-args-path", 1, "write the corpora into [data] path"),
        gone("data-cache-path", 1, "caches lie in the run's directory"),
        gone("no-mmap-bin-files no-create-attention-mask-in-dataloader no-data-sharding", 0, "not needed"),
        same("vocab-extra-ids", "data.sentinels", why="for t5; [model] vocab_size includes them"),
        same("short-seq-prob", "data.short_seq_prob", "0.1"),
        same("mask-prob", "data.mask_prob", "0.15"),
        switch("eod-mask-loss", "data.eod_mask_loss"),
        switch(
            "reset-position-ids", "data.reset_position_ids", "not with ALiBi, for which Megatron silently ignores it"
        ),
        switch("reset-attention-mask", "data.reset_attention_mask", "Megatron silently ignores it for GPT and BLOOM"),
        gone(
            "loss-on-targets-only",
            0,
            "always on with [data] objective = 'prefix-lm', which pretrain_prefix_lm.py becomes",
        ),
        switch("reweight-loss-based-on-position-frequency", "data.reweight_positions"),
        same("num-workers", "data.num_workers", "2"),
        gone("valid-num-workers", 1, "the trainer itself reads evaluation batches"),
        gone("data-impl", 1, "the files themselves say it: those of mmap, and the older ones of lazy and cached"),
        gone("mmap-warmup", 0, "the kernel reads ahead"),
        lost(
            "dataloader-type",
            1,
            "only single is built; [data] order reproduces its order, otherwise dtmega has its own",
            "single",
        ),
        other(
            "train-weighted-split-paths", MANY, "data.train", "the same string: 'NAME: WEIGHT START:END PREFIX, ...'"
        ),
        other("valid-weighted-split-paths", MANY, "data.validation", "the same strings, one validation set each"),
        other("test-weighted-split-paths", MANY, "data.test", "the same string; only one test set"),
        other("train-weighted-split-paths-path", 1, "data.train", "the contents of the file"),
        other("valid-weighted-split-paths-path", 1, "data.validation", "the contents of the file"),
        other("test-weighted-split-paths-path", 1, "data.test", "the contents of the file"),
        Flag(
            ("broadcast_data",),
            0,
            None,
            (),
            "no flag: each rank reads the data itself, and a hash at the start checks that they read the same",
        ),
    ),
    "Evaluation, logs, checkpoints": (
        same("eval-only", "eval.only"),
        switch("skip-train", "eval.only"),
        same("eval-interval", "eval.interval", "1000"),
        same("eval-iters", "eval.steps", "100"),
        same("log-interval", "log.interval", "100"),
        switch("log-params-norm", "log.params_norm"),
        switch("log-num-zeros-in-grad", "log.num_zeros"),
        other("tensorboard-dir", 1, "log.tensorboard run.dir", "always on, in tensorboard/ of the run's directory"),
        gone("tensorboard-log-interval tensorboard-queue-size", 1, "every step is written at once"),
        gone(
            "codecarbon-dir log-level log-level-replica logging-level timing-log-level timing-log-option "
            "profile-step-start profile-step-end wandb-project wandb-exp-name wandb-save-dir wandb-entity",
            1,
            "see [log] and [profile]",
        ),
        gone("profile profile-ranks", MANY, "see [profile]"),
        gone(
            "log-throughput log-memory-to-tensorboard log-optimizer-states-to-tensorboard nvtx-ranges "
            "use-pytorch-profiler log-progress log-straggler no-log-loss-scale-to-tensorboard "
            "log-world-size-to-tensorboard",
            0,
            "see [log] and [profile]",
        ),
        gone(
            "log-timers-to-tensorboard log-batch-size-to-tensorboard log-validation-ppl-to-tensorboard "
            "no-log-learnig-rate-to-tensorboard",
            0,
            "TensorBoard gets everything that metrics.jsonl gets",
        ),
        other(
            "save",
            1,
            "checkpoint.dir checkpoint.keep",
            "by default checkpoints are in the run's directory; Megatron keeps them all, so keep is 0",
        ),
        other(
            "load",
            1,
            "checkpoint.resume",
            "'auto' resumes from the run's own newest checkpoint; Megatron's are converted first",
        ),
        same("save-interval|persistent-save-interval", "checkpoint.interval"),
        gone(
            "no-save-optim no-save-rng no-load-rng",
            0,
            "a checkpoint is always complete, and there are no generators with a state",
        ),
        other("finetune no-load-optim", 0, "model.init_from", "the weights to start from"),
        gone(
            "universal-checkpoint async-save use-dist-ckpt auto-detect-ckpt-format",
            0,
            "every checkpoint resumes on any layout",
        ),
        gone("ckpt-format dist-ckpt-format non-persistent-save-interval", 1, "every checkpoint resumes on any layout"),
        gone("use-checkpoint-args", 0, "convert writes the configuration of a checkpoint"),
        lost("reset-iteration", 0, "start a new run with [model] init_from"),
        gone("inference", 0, "use dtmega generate"),
    ),
    "Not built": NOT_BUILT,
    "No effect on results": NO_EFFECT,
    "tools/preprocess_data.py": (
        gone("input json-keys output-prefix workers append-eod", MANY, "the same options of dtmega tokenize"),
        gone("split-sentences", 0, "the same option of dtmega tokenize"),
        gone("dataset-impl", 1, "mmap"),
    ),
}


@cache
def by_name() -> dict[str, Flag]:
    """Map each flag name to the flag's row in the table. All names of a flag map to the same row."""
    return {name: flag for group in FLAGS.values() for flag in group for name in flag.names}


def row_of(name: str) -> Flag | None:
    """The row of a flag: its own, or that of a name with `*` that the flag begins with; None if there is neither."""
    rows = by_name()
    if name in rows:
        return rows[name]
    return next((flag for start, flag in rows.items() if start[-1] == "*" and name.startswith(start[:-1])), None)


def first_name(name: str) -> str:
    """A flag's main name, which comes first in its table row; the given name if the table lacks the flag."""
    flag = by_name().get(name)
    return name if flag is None else flag.other_names.get(name, name)
