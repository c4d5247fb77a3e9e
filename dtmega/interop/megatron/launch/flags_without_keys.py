"""The flags without a key here, for parts of Megatron that dtmega does not have: models, optimizers, services, kernels.

A name that ends with `*` stands for all flags that begin like it and have no row of their own.

Source: `megatron/training/arguments.py` and the classes that it reads flags from, of Megatron-LM in August 2026 (commit
d98e8a64), and `megatron/arguments.py` of BigScience's and deepspeedai's Megatron-DeepSpeed (8387ae17, 4efb479d).
"""

from __future__ import annotations

from dtmega.interop.megatron.launch.row import MANY, gone, lost

AS_FAST = "another way to compute the same"

NOT_BUILT = (
    lost(
        "qk-l2-norm qk-clip attention-output-gate is-hybrid-model enable-mhc-connections use-mup perform-rl-step sft "
        "fim-data mos random-ltd use-kitchen-attention embedding-weights-in-fp32 freeze-all-layers "
        "ddp-reduce-scatter-with-fp32-accumulation",
        0,
        "not built",
    ),
    lost(
        "experimental-attention-variant linear-attention-freq hybrid-layer-pattern hybrid-override-pattern "
        "heterogeneous-layers-config-path heterogeneous-layers-config-encoded-json no-rope-freq num-experts-switch "
        "te-precision-config-file kitchen-config-file kitchen-recipe-number yaml-cfg noise-density "
        "mean-noise-span-length logits-load-dir phase-transition-iterations train-data-exact-num-epochs",
        1,
        "not built",
    ),
    lost("mrope-section", MANY, "not built"),
    lost("embedding-init-method-std", 1, "the embedding begins like every other matrix, by [model] init_std"),
    lost("sample-rate", 1, "every document is read", "1 1.0"),
    lost("data-efficiency-curriculum-learning", 0, "batch n depends on n alone"),
    lost("dataloader-inter-document-masking", 0, "see [data] reset_attention_mask and reset_position_ids"),
    lost(
        "train-idx-path train-desc-path train-doc-idx-path train-sample-idx-path train-shuffle-idx-path",
        1,
        "[data] order computes Megatron's order of samples itself",
    ),
    lost("repeated-dataloader", 0, "see [train] epochs"),
    lost("apply-wd-to-qk-layernorm", 0, "norms have no weight decay"),
    lost("no-weight-decay-cond-type", 1, "norms have no weight decay"),
    lost(
        "main-grads-dtype main-params-dtype exp-avg-dtype exp-avg-sq-dtype megatron-fsdp-main-params-dtype "
        "megatron-fsdp-main-grads-dtype megatron-fsdp-grad-comm-dtype",
        1,
        "sums of gradients, masters and moments are float32",
        "fp32 auto",
    ),
    lost("output-logit-dtype", 1, "the loss is computed from float32", "fp32"),
    lost("fp8-e4m3 fp8-hybrid", 0, "not built"),
    lost("fp4-format", 1, "not built"),
    lost("moe-dispatch-fwd-dtype moe-combine-bwd-dtype", 1, "tokens are sent as they are", "bf16"),
    lost("eval-global-batch-size", 1, "[eval] steps counts the global batches of training"),
    lost("full-validation multiple-validation-sets", 0, "see [eval] steps and [data] validation"),
    lost("validation-set-names", MANY, "see [data] validation"),
    lost("ckpt-step override-ckpt-iteration load-tag", 1, "name the folder of the checkpoint in [checkpoint] resume"),
    lost("pretrained-checkpoint", 1, "convert the checkpoint, then name the result in [model] init_from"),
    lost("load-main-params-from-ckpt", 0, "convert takes the float32 masters if the files have them"),
)
NO_EFFECT = (
    gone(
        "dsa-* linear-* mhc-* gdp-* mamba-* disable-mamba-mem-eff-path no-dsa-indexer-* disable-dsa-indexer-*",
        MANY,
        "a setting of --experimental-attention-variant, --enable-mhc-connections or --hybrid-layer-pattern",
    ),
    gone("qk-clip-alpha qk-clip-threshold", 1, "a setting of --qk-clip"),
    gone("mtp-hsm", 0, "a setting of --mtp-num-layers"),
    gone("mup-*", 1, "a setting of --use-mup"),
    gone("rl-* no-rl-* grpo-* langrl-env-config refit-method", MANY, "a setting of --perform-rl-step"),
    gone("muon-* lion-*", MANY, "a setting of --optimizer, of which only adam and sgd are translated"),
    gone("sft-*", 1, "a setting of --sft"),
    gone("fim-*", 1, "a setting of --fim-data"),
    gone("num-experts-teacher", MANY, "a setting of --kd"),
    gone("logits-load-* logits-save-*", MANY, "a setting of --logits-load-dir, or a by-product of a run"),
    gone("kitchen-* fp4-* fp8-* no-fp8-wgrad disable-fp8-wgrad", MANY, "a setting of --fp8-format or --fp4-format"),
    gone(
        "first-last-layers-bf16 reuse-grad-buf-for-mxfp8-param-ag keep-fp8-transpose-cache",
        0,
        "a setting of --fp8-format or --fp4-format",
    ),
    gone("num-layers-at-start-in-bf16 num-layers-at-end-in-bf16", 1, "a setting of --fp8-format or --fp4-format"),
    gone(
        "yarn-* no-yarn-* relative-attention-num-buckets relative-attention-max-distance",
        MANY,
        "a setting of --position-embedding-type yarn or relative",
    ),
    gone("retro-*", MANY, "a setting of --retro-add-retriever"),
    gone(
        "biencoder-* ict-* retriever-* indexer-* bert-load titles-data-path query-in-block-prob use-one-sent-docs "
        "evidence-data-path block-data-path embedding-path output-bert-embeddings bert-embedder-type",
        MANY,
        "for Megatron's models of retrieval",
    ),
    gone(
        "num-classes img-dim img-h img-w num-channels patch-dim classes-fraction data-per-class-fraction head-lr-mult "
        "vision-* swin-backbone-type mask-type mask-factor iter-per-epoch dino-*",
        MANY,
        "for Megatron's models of vision",
    ),
    gone(
        "inference-* no-inference-* max-tokens-to-oom flash-decode use-legacy-static-engine enable-chunked-prefill "
        "num-speculative-tokens decode-only-cuda-graphs use-same-sampling-seed-across-dp-ranks mlp-chunks-for-prefill "
        "nccl-all-reduce-for-prefill symmetric-ar-type ds-inference",
        MANY,
        "for inference: use dtmega generate",
    ),
    gone(
        "otel-* one-logger-* no-one-logger app-tag-* straggler-* disable-straggler-on-startup workload-inspector-* "
        "run-workload-inspector-server moe-routing-trace-* pytorch-profiler-* record-memory-history record-shapes "
        "memory-snapshot-path profile_steps profile-backward log-path log-memory-interval log-device-memory-used "
        "log-max-attention-logit log-energy config-logger-dir dump-param-to-param-group-map "
        "no-barrier-with-level-1-timing disable-log-loss-scale-to-tensorboard "
        "save-params-interval save-activations-interval save-tokens-per-expert-interval save-wgrads-interval "
        "save-dgrads-interval",
        MANY,
        "see [log] and [profile]",
    ),
    gone(
        "exit-signal exit-signal-handler exit-signal-handler-for-dataloader exit-signal-handler-for-training",
        MANY,
        "SIGTERM, SIGUSR1, SIGUSR2 and Ctrl-C always save and end the run",
    ),
    gone(
        "inprocess-* ft-* enable-ft-package calc-ft-timeouts adlr-autoresume adlr-autoresume-interval",
        MANY,
        "a job that hangs or fails ends with a report, and the same command continues it",
    ),
    gone(
        "rerun-mode error-injection-* fault-injector-* check-for-spiky-loss check-for-large-grads test-mode "
        "result-rejected-tracker-filename gpu-sniff-test-interval check-weight-hash-across-dp-replicas-interval",
        MANY,
        "see [train] drift_interval and skip_spikes, and dtmega replay",
    ),
    gone("start-eval-at-iter", 1, "validation begins after the first [eval] interval"),
    gone("eval-micro-batch-size", 1, "sums over a batch do not depend on its microbatches"),
    gone("decrease-batch-size-if-needed", 0, "the global batch never follows the number of ranks"),
    gone(
        "ckpt-* no-ckpt-* disable-ckpt-* dist-ckpt-* distrib-optim-* non-persistent-* async-* replication "
        "replication-jump replication-factor verify-integrity use-persistent-ckpt-worker "
        "no-strict-fsdp-dtensor-load disable-strict-fsdp-dtensor-load no-save-tokenizer-assets "
        "disable-save-tokenizer-assets",
        MANY,
        "every checkpoint is verified, and resumes on any layout",
    ),
    gone("save-retain-interval", 1, "[checkpoint] keep = 0 keeps every checkpoint"),
    gone(
        "exit-on-missing-checkpoint use-mp-args-from-checkpoint-args no-initialization "
        "no-use-tokenizer-model-from-checkpoint-args disable-use-tokenizer-model-from-checkpoint-args",
        0,
        "see [checkpoint] resume",
    ),
    gone(
        "tokenizer-* no-tokenizer-* disable-tokenizer-* tiktoken-* null-tokenizer-* trust-remote-code chat-template "
        "use-gigatoken allow-ambiguous-pad-tokens",
        MANY,
        "the corpus is tokenized already; remote code never runs",
    ),
    gone(
        "num-dataset-builder-threads object-storage-cache-path per-dataset-sequences-path mid-level-dataset-surplus "
        "aml-data-download-path use-dataset-only",
        1,
        "caches lie in the run's directory",
    ),
    gone(
        "dataloader-fast-cache-load dataloader-defer-npy-index-mmap enable-msc disable-msc return-data-index",
        0,
        "not needed",
    ),
    gone(
        "pipeline-model-parallel-layout decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers",
        1,
        "stages are balanced by cost, or listed in [pipeline] stages",
    ),
    gone(
        "account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split standalone-embedding-stage",
        0,
        "stages are balanced by cost, or listed in [pipeline] stages",
    ),
    gone("enable-zbh1-pipeline enable-zbh1-exact-semantics", 0, "see [pipeline] schedule"),
    gone(
        "outer-dp-sharding-strategy num-distributed-optimizer-instances",
        1,
        "see [mesh] dp_replicate and dp_shard",
    ),
    gone("use-tp-pp-dp-mapping enable-full-sharding-in-hsdp", 0, "see [mesh] dp_replicate and dp_shard"),
    gone(
        "tensor-parallel-num-weight-shards expert-tensor-parallel-num-weight-shards gtp-* cp-comm-type "
        "hierarchical-context-parallel-sizes hybrid-context-parallel max-seqlen-per-dp-cp-rank "
        "pipeline-model-parallel-comm-backend microbatch-group-size-per-virtual-pipeline-stage "
        "overlap-p2p-communication overlap-p2p-communication-warmup-flush no-overlap-p2p-communication "
        "tp-comm-* no-tp-comm-* disable-tp-comm-* ddp-* overlap-param-gather-with-optimizer-step "
        "no-align-param-gather no-align-grad-reduce disable-align-grad-reduce use-torch-fsdp2 "
        "torch-fsdp2-no-reshard-after-forward megatron-fsdp-* fsdp-db-use-persist-buf-on-alloc-fail "
        "no-use-layer-wise-param-layout disable-symmetric-registration create-all-gather-group "
        "no-gradient-reduce-div-fusion suggested-communication-unit-size fake-process-group nccl-* "
        "high-priority-* disable-gloo-process-groups use-sharp sharp-enabled-group "
        "distributed-timeout-seconds-after-init flight-recorder-* no-flight-recorder-* disable-flight-recorder-* "
        "force-ds-sequence-parallel ds-sequence-parallel-fpdt ds-sequence-parallel-fpdt-chunk-size "
        "ds-sequence-parallel-fpdt-offloading deepscale deepscale_config deepspeed_mpi remote-device use-pin-memory",
        MANY,
        "see [mesh], [fsdp] and [pipeline]; another way to send the same",
    ),
    gone(
        "distribute-saved-activations cpu-offloading-* fine-grained-* offload-modules min-offloaded-tensor-size "
        "delay-offload-until-cuda-graph delta-offload-bytes-across-pp-ranks activation-offload-fraction "
        "mlp-chunks-for-training scattered-embeddings split-transformers memory-centric-tiled-linear tile-factor",
        MANY,
        "see [recompute]; another way to compute the same in less memory",
    ),
    gone(
        "use-precision-aware-optimizer optimizer-cuda-graph optimizer-offload-fraction "
        "use-torch-optimizer-for-cpu-offload overlap-cpu-optimizer-d2h-h2d no-pin-cpu-grads no-pin-cpu-params "
        "ds_fused_adam",
        MANY,
        AS_FAST,
    ),
    gone(
        "cross-entropy-fusion-impl ep-overlap-early-attn-memory-release defer-embedding-wgrad-compute "
        "wgrad-deferral-limit flash-attention-version use-fused-weighted-squared-relu fused-residual-rmsnorm "
        "use-transformer-engine-op-fuser use-grouped-gemm-for-dense-mlp moe-use-grouped-tensor cuda-graph-* "
        "enable-cuda-graph external-cuda-graph no-clone-scatter-output-in-embedding "
        "disable-clone-scatter-output-in-embedding batch-invariant-mode batch-invariant-backend "
        "use-te-activation-func disable-jit-fuser disable-mem-efficient-ln use-flash-attn-builder te-rng-tracker "
        "enable-experimental no-manual-gc-eval disable-manual-gc-eval train-sync-interval",
        MANY,
        AS_FAST,
    ),
)
