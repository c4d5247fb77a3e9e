"""The model flags in the table of Megatron's flags, without the flags for experts."""

from __future__ import annotations

from dtmega.interop.megatron.launch.row import MANY, gone, lost, other, same, switch

MODEL = (
    same("num-layers|encoder-num-layers", "model.n_layers", why="for t5, the layers of the encoder"),
    same("decoder-num-layers", "model.n_decoder_layers", why="0 here is Megatron's default, as many as the encoder"),
    same("hidden-size", "model.hidden_size"),
    same("ffn-hidden-size", "model.ffn_hidden_size", why="0 here is Megatron's default, 4 D"),
    same("num-attention-heads", "model.n_heads"),
    same(
        "kv-channels",
        "model.kv_channels",
        why="0 here is Megatron's default, D / H, which families other than llama, moe and t5 always have",
    ),
    other("max-position-embeddings", 1, "model.max_position_embeddings", "ALiBi has no limit on positions"),
    other(
        "position-embedding-type",
        1,
        "model.name",
        "alibi is bloom, rope is llama or moe, absolute is gpt, bert or t5; other pairs are not built",
        "absolute",
    ),
    other(
        "use-rotary-position-embeddings no-position-embedding",
        0,
        "model.name",
        "llama; a model without any positions is not built",
    ),
    other(
        "rotary-base|rope-theta|rotary-position-embeddings-theta", 1, "model.rope_theta", "for llama and moe", "10000"
    ),
    other("use-rope-scaling", 0, "model.rope_factor", "Llama 3.1's scaling of low frequencies; for llama and moe"),
    other("rope-scaling-factor", 1, "model.rope_factor", "with --use-rope-scaling", "8.0"),
    lost("rotary-percent", 1, "rotary positions turn every channel of a head", "1 1.0 1.00"),
    lost("rotary-interleaved", 0, "rotary positions turn the two halves of a head, as in Llama"),
    lost("rotary-seq-len-interpolation-factor", 1, "not built", "1"),
    lost("rope-type", 1, "only rope is built", "rope"),
    other("swiglu", 0, "model.name model.glu", "llama and moe have it; for gpt and bloom the key is glu"),
    other("normalization", 1, "model.name", "RMSNorm is llama or moe, LayerNorm every other family", "LayerNorm"),
    other("group-query-attention", 0, "model.n_kv_heads", "for llama and moe"),
    other("num-query-groups|num-key-value-heads", 1, "model.n_kv_heads", "for llama and moe", "1"),
    other("untie-embeddings-and-output-weights", 0, "model.tied", "for gpt, llama and moe"),
    other("disable-bias-linear", 0, "model.name", "llama and moe have no biases, every other family has them"),
    lost("add-qkv-bias", 0, "llama has no biases"),
    switch("qk-layernorm", "model.qk_norm", "for llama and moe"),
    other("window-size", 1, "model.window", "tokens before a token that it sees, and 1 for itself"),
    other("window-attn-skip-freq", 1, "model.window_layers", "with --window-size N,0: all but every N-th layer"),
    lost("apply-layernorm-1p", 0, "the weights of norms are stored as they are, without the 1"),
    lost("squared-relu quick-geglu enable-gpt-oss", 0, "not built"),
    lost("softmax-type", 1, "not built", "vanilla"),
    lost("activation-func-clamp-value", 1, "not built"),
    lost("glu-linear-offset", 1, "not built", "0 0.0"),
    lost("multi-latent-attention", 0, "latent attention is not translated"),
    gone(
        "q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim rotary-scaling-factor mscale "
        "mscale-all-dim",
        1,
        "a setting of --multi-latent-attention",
    ),
    gone("cache-mla-latents mla-down-proj-fusion", 0, "a setting of --multi-latent-attention"),
    lost("mtp-num-layers", 1, "a model predicts one token at each place", "0"),
    gone("mtp-loss-scaling-factor mtp-hybrid-override-pattern", 1, "a setting of --mtp-num-layers"),
    gone("mtp-use-repeated-layer mtp-detach-heads mtp-standalone", 0, "a setting of --mtp-num-layers"),
    lost("kd", 0, "distillation is not built"),
    lost("retro-add-retriever", 0, "retrieval is not built"),
    other("embed-layernorm", 0, "model.name", "bloom always has it, other families never do"),
    same(
        "layernorm-epsilon|norm-epsilon",
        "model.layer_norm_eps",
        "1e-5",
        "for t5 the key is norm_eps, for llama and moe rms_norm_eps",
    ),
    switch("apply-residual-connection-post-layernorm", "model.apply_residual_connection_post_layernorm"),
    same("init-method-std", "model.init_std", "0.02"),
    lost("init-method-xavier-uniform", 0, "no published run of these families starts this way"),
    same("attention-dropout", "model.attention_dropout", "0.1"),
    same("hidden-dropout", "model.hidden_dropout", "0.1"),
    other(
        "make-vocab-size-divisible-by",
        1,
        "model.pad_vocab_to_multiple",
        "times Megatron's tensor-parallel size, for the same number of rows; rows beyond V never enter the softmax",
        "128",
    ),
    other(
        "pad-vocab-size-to|padded-vocab-size",
        1,
        "model.vocab_size",
        "Megatron trains the rows of padding, so they are part of the vocabulary",
    ),
    other("no-pad-vocab-size|disable-pad-vocab-size", 0, "model.pad_vocab_to_multiple", "1, the default here"),
    other("vocab-size", 1, "model.vocab_size", "the size without padding"),
    other(
        "no-bias-gelu-fusion",
        0,
        "model.gelu",
        "Megatron's fused GELU is the approximation with tanh; this flag selects erf, which bloom and gpt do not "
        "have; BERT's head always has erf; for t5 the key is activation",
    ),
    same("glu-activation", "model.glu"),
    switch("fp32-residual-connection", "model.fp32_residual"),
    other(
        "no-query-key-layer-scaling apply-query-key-layer-scaling",
        0,
        "model.query_key_layer_scaling",
        "it matters in float16 only, so it is carried over with --fp16; on by default until November 2023, off "
        "since; if the other flags do not tell the time, --original does; t5 and llama have no such key",
    ),
    gone("attention-softmax-in-fp32", 0, "always on"),
    lost("bert-no-binary-head", 0, "a BERT always has its sentence-order head"),
    gone(
        "bias-gelu-fusion",
        0,
        "Megatron's default since 2020; before that, the feed-forward had erf: set [model] gelu yourself",
    ),
    gone("openai-gelu", 0, "another way to compute the GELU with tanh"),
    gone("onnx-safe", 1, "another way to compute the GELU with erf"),
    lost("mup", 0, "not built"),
    gone("mup-coord-check", 0, "a setting of --mup"),
    gone("mup-attn-mult mup-input-mult mup-output-mult", 1, "a setting of --mup"),
    gone("attention-backend transformer-impl", 1, "attention is chosen by device and rule"),
    gone(
        "use-flash-attn use-flash-attn-v1 use-flash-attn-v2 use-flash-attn-triton use-mcore-models "
        "use-legacy-models export-force-local-attention no-bias-swiglu-fusion no-rope-fusion "
        "apply-rope-fusion cross-entropy-loss-fusion no-persist-layer-norm",
        0,
        "another way to compute the same",
    ),
    gone("spec", MANY, "another way to compute the same"),
    lost(
        "task",
        1,
        "classifiers are not built: export the model, and use transformers' BertForSequenceClassification",
    ),
)
