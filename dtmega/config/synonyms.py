"""Other trainers' names for dtmega's keys, so that the message about an unknown key can name the right key.

The names come from transformers' `TrainingArguments` and `config.json`, torchtitan, Megatron-LM, DeepSpeed, axolotl,
Lightning, nanoGPT and nanochat. `suggestions.py` looks up the names.
"""

from __future__ import annotations

from typing import NamedTuple


class Synonym(NamedTuple):
    """A setting, with dtmega's keys and other trainers' names for the setting.

    Attributes:
        keys: dtmega's keys (`section.key`), separated by spaces; '' if dtmega has no key for the setting. There are
            several keys if dtmega splits the setting into several keys, or if model families name the key differently.
        names: other trainers' names, separated by spaces. A name with a section (`eval.freq`) counts only in that
            section.
        how: remark for messages about a difference in meaning, or about the lack of a key in dtmega; '' for no remark.
    """

    keys: str
    names: str
    how: str = ""


# Section name in other trainers -> section name in dtmega.
SECTIONS = {
    "activation_checkpoint": "recompute",
    "activation_checkpointing": "recompute",
    "checkpointing": "checkpoint",
    "ckpt": "checkpoint",
    "dataset": "data",
    "evaluation": "eval",
    "job": "run",
    "logging": "log",
    "lr_scheduler": "optim",
    "metrics": "log",
    "network": "model",
    "optimizer": "optim",
    "parallel": "mesh",
    "parallelism": "mesh",
    "scheduler": "optim",
    "trainer": "train",
    "training": "train",
    "training_args": "train",
    "validation": "eval",
}

RUN = (
    Synonym("run.dir", "output_dir out_dir save_dir run_dir work_dir dump_folder default_root_dir run.folder"),
    Synonym(
        "run.dir", "run_name wandb_name wandb_run_name experiment_name exp_name", "a run is named after its folder"
    ),
    Synonym("run.seed", "random_seed manual_seed rng_seed"),
    Synonym("run.seed", "data_seed seed_offset", "one seed for everything"),
    Synonym("run.device", "device_type accelerator use_cpu no_cuda"),
    Synonym("run.timeout_s", "ddp_timeout nccl_timeout train_timeout_seconds timeout"),
    Synonym("run.timeout_s", "distributed_timeout_minutes", "in seconds"),
)

MODEL = (
    Synonym("model.name", "model_type architecture architectures model_family model_arch"),
    Synonym(
        "model.name",
        "model model_name",
        "a family; for a model of Hugging Face, name = 'hf' and its local folder in path",
    ),
    Synonym(
        "model.name",
        "position_embedding_type",
        "the family decides: bloom has ALiBi, gpt learned, llama rotary positions",
    ),
    Synonym(
        "model.path",
        "model_name_or_path pretrained_model_name_or_path base_model hf_model model_id hf_assets_path model_path",
        "a local folder, with name = 'hf'; dtmega's own families load weights by [model] init_from",
    ),
    Synonym(
        "model.init_from", "pretrained pretrained_checkpoint initial_load_path load_weights finetune no_load_optim"
    ),
    Synonym("model.vocab_size", "pad_vocab_size_to n_vocab vocab padded_vocab_size"),
    Synonym(
        "model.pad_vocab_to_multiple",
        "make_vocab_size_divisible_by pad_vocab_size_multiple pad_to_multiple_of resize_token_embeddings_to_32x",
    ),
    Synonym("model.hidden_size", "n_embd n_embed d_model dim model_dim hidden_dim embed_dim embedding_dim emb_dim"),
    Synonym("model.n_layers", "num_hidden_layers num_layers n_layer depth num_blocks encoder_num_layers"),
    Synonym("model.n_decoder_layers", "num_decoder_layers decoder_num_layers decoder_layers"),
    Synonym("model.n_heads", "num_attention_heads num_heads n_head attention_heads num_q_heads"),
    Synonym("model.n_kv_heads", "num_key_value_heads num_query_groups n_kv_head num_kv_heads kv_heads"),
    Synonym(
        "model.kv_channels", "head_dim d_kv d_head", "llama and t5 only; other families have hidden_size / n_heads"
    ),
    Synonym("model.ffn_hidden_size", "intermediate_size n_inner ffn_dim d_ff mlp_dim ffn_size"),
    Synonym("model.ffn_hidden_size", "ffn_dim_multiplier mlp_ratio multiple_of", "a size, not a ratio"),
    Synonym("model.max_position_embeddings", "n_positions n_ctx max_positions"),
    Synonym("model.tied", "tie_word_embeddings tie_embeddings enable_weight_tying weight_tying"),
    Synonym("model.tied", "untie_embeddings_and_output_weights untie_embeddings", "with the opposite value"),
    Synonym(
        "model.layer_norm_eps model.rms_norm_eps model.norm_eps",
        "layer_norm_epsilon layernorm_epsilon layernorm_eps norm_epsilon layer_norm_eps rms_norm_eps norm_eps",
    ),
    Synonym("model.init_std", "initializer_range init_method_std initializer_std"),
    Synonym("model.hidden_dropout", "dropout resid_pdrop embd_pdrop hidden_dropout_prob resid_dropout dropout_rate"),
    Synonym("model.attention_dropout", "attn_pdrop attn_dropout attention_probs_dropout_prob"),
    Synonym("model.label_smoothing", "label_smoothing_factor"),
    Synonym("model.z_loss", "z_loss_weight z_loss_coef z_loss_alpha softmax_auxiliary_loss"),
    Synonym("model.qk_norm", "qk_layernorm use_qk_norm", "llama only, as in Qwen3"),
    Synonym("model.window", "sliding_window attention_window", "llama only; 0 = none"),
    Synonym("model.window", "window_size", "llama only; the token itself counts, in Megatron it does not"),
    Synonym("model.window_layers", "layer_types max_window_layers window_attn_skip_freq", "a list of layer numbers"),
    Synonym("model.rope_theta", "rotary_base rope_base rotary_emb_base"),
    Synonym("model.rope_factor", "rope_scaling rope_scaling_factor", "llama only, as in Llama 3.1"),
    Synonym("model.rope_original_length", "original_max_position_embeddings"),
    Synonym("model.rope_low_freq_factor", "low_freq_factor"),
    Synonym("model.rope_high_freq_factor", "high_freq_factor"),
    Synonym("model.glu", "glu_activation swiglu gated_linear_unit"),
    Synonym("model.gelu model.activation", "hidden_act activation_function feed_forward_proj"),
    Synonym("model.fp32_residual", "fp32_residual_connection residual_in_fp32"),
    Synonym("model.query_key_layer_scaling", "apply_query_key_layer_scaling"),
    Synonym("model.query_key_layer_scaling", "no_query_key_layer_scaling", "off by default"),
    Synonym("model.relative_buckets", "relative_attention_num_buckets"),
    Synonym("model.relative_max_distance", "relative_attention_max_distance"),
    Synonym("", "flavor model_size", "choose a size by its file (--config), or set the keys of [model]"),
    Synonym("", "load_in_8bit load_in_4bit qlora quantization quantization_config", "nothing is quantized"),
    Synonym(
        "",
        "attn_implementation flash_attention use_flash_attn use_flash_attention sdp_attention flash_attn "
        "attn_mask_type",
        "the attention kernel follows from the device and the mask",
    ),
    Synonym("model.kv_latent_size", "kv_lora_rank"),
    Synonym("model.q_latent_size", "q_lora_rank"),
    Synonym("model.rotary_channels", "qk_rope_head_dim qk_pos_emb_head_dim"),
    Synonym("model.v_channels", "v_head_dim"),
    Synonym("model.kv_channels", "qk_head_dim qk_nope_head_dim", "with the rotated channels; with name = 'moe'"),
    Synonym("model.n_experts", "num_experts num_local_experts n_routed_experts", "with name = 'moe' or 'hf'"),
    Synonym("model.experts_per_token", "num_experts_per_tok moe_top_k moe_router_topk model.top_k"),
    Synonym("model.expert_ffn_hidden_size", "moe_intermediate_size moe_ffn_hidden_size"),
    Synonym("model.shared_experts", "n_shared_experts"),
    Synonym("model.dense_layers", "first_k_dense_replace"),
    Synonym("model.normalize_weights", "norm_topk_prob"),
    Synonym("model.routed_scale", "routed_scaling_factor moe_router_topk_scaling_factor"),
    Synonym("model.balance_loss", "router_aux_loss_coef moe_aux_loss_coeff aux_loss_alpha"),
    Synonym("model.router_z_loss", "moe_z_loss_coeff"),
    Synonym("model.capacity_factor", "moe_expert_capacity_factor moe_capacity_factor"),
)

A_PREFIX = "a .bin/.idx prefix, which `dtmega tokenize` makes from text"
DATA = (
    Synonym(
        "data.path",
        "data_path dataset datasets dataset_path dataset_name train_file train_data train_data_path "
        "pretraining_dataset data_dir input_bin data.dir data.name data.files train_dataset",
        A_PREFIX,
    ),
    Synonym("data.weights", "data_weights dataset_weights mixture_weights data_blend interleave_probs"),
    Synonym(
        "data.tokenizer",
        "tokenizer_path tokenizer_name tokenizer_name_or_path tokenizer_config tokenizer_model tokenizer_type "
        "vocab_file merge_file processing_class",
        "a tokenizer.json, bert:VOCAB or a name",
    ),
    Synonym(
        "data.seq_len",
        "seq_length sequence_length sequence_len max_seq_len max_seq_length block_size context_length context_len "
        "cutoff_len max_length model_max_length encoder_seq_length",
    ),
    Synonym("data.decoder_seq_len", "decoder_seq_length max_target_length"),
    Synonym(
        "data.split",
        "val_set_size validation_split validation_split_percentage val_size test_size train_split",
        "three weights, 'train,valid,test'",
    ),
    Synonym(
        "data.validation",
        "validation_file eval_dataset val_data val_file test_datasets valid_data_path valid_weighted_split_paths",
        "a list of 'NAME=PREFIX', each for a .bin/.idx pair",
    ),
    Synonym("data.train", "train_weighted_split_paths"),
    Synonym("data.test", "test_weighted_split_paths"),
    Synonym("data.objective", "training_objective prefix_lm"),
    Synonym("data.mask_prob", "mlm_probability masked_lm_prob masking_ratio noise_density"),
    Synonym("data.mean_span", "mean_noise_span_length mean_span_length"),
    Synonym("data.sentinels", "vocab_extra_ids extra_ids"),
    Synonym("data.reweight_positions", "reweight_loss_based_on_position_frequency"),
    Synonym(
        "data.reset_attention_mask",
        "sample_packing packing pretraining_sample_concatenation packed_sequences document_mask intra_doc_masking",
        "samples are always packed; true keeps attention inside each document",
    ),
    Synonym(
        "data.num_workers",
        "dataloader_num_workers num_dataloader_workers dataset_num_proc preprocessing_num_workers dataset_processes",
    ),
)

SEQUENCES = "sequences, not tokens: divide by [data] seq_len"
ACCUMULATION = "micro-batches in a step = global_batch_size / (micro_batch_size x data ranks)"
BATCH = (
    Synonym(
        "batch.micro_batch_size",
        "per_device_train_batch_size per_gpu_train_batch_size local_batch_size device_batch_size microbatch_size mbs "
        "train_micro_batch_size_per_gpu pipeline_parallel_microbatch_size device_train_microbatch_size "
        "batch_size_per_gpu",
    ),
    Synonym("batch.global_batch_size", "train_batch_size gbs effective_batch_size global_train_batch_size"),
    Synonym("batch.global_batch_size", "total_batch_size batch_size_in_tokens tokens_per_batch", SEQUENCES),
    Synonym(
        "batch.global_batch_size batch.micro_batch_size",
        "batch_size bs bsz",
        "sequences per step on all ranks; sequences per forward on one rank",
    ),
    Synonym(
        "batch.global_batch_size",
        "gradient_accumulation_steps grad_accum_steps accumulate_grad_batches gradient_accumulation num_microbatches "
        "accumulation_steps grad_acc_steps update_freq",
        ACCUMULATION,
    ),
    Synonym("batch.micro_batch_size", "auto_find_batch_size", "0 = the largest up to 4 that fits"),
    Synonym(
        "batch.micro_batch_size",
        "per_device_eval_batch_size eval_batch_size per_gpu_eval_batch_size",
        "evaluation uses the batch sizes of training",
    ),
    Synonym("batch.rampup", "rampup_batch_size batch_size_rampup batch_rampup"),
)

A_RATE = "a rate, not a fraction of lr"  # torchtitan's lr_min is a fraction
IN_UNITS = "in [optim] unit: steps, samples or tokens"
OPTIM = (
    Synonym("optim.name", "optimizer optimizer_type optimizer_name optim_type optim optimizer.type"),
    Synonym("optim.lr", "learning_rate max_lr peak_lr base_lr lr_max max_learning_rate peak_learning_rate init_lr"),
    Synonym("optim.lr", "matrix_lr", "with [optim] lr_factors for parameters with another rate"),
    Synonym(
        "optim.lr_factors",
        "embedding_lr unembedding_lr lr_groups embedding_lr_scale scalar_lr lr_mult",
        "factors on lr, not rates",
    ),
    Synonym("optim.min_lr", "min_learning_rate end_lr lr_end eta_min final_lr"),
    Synonym(
        "optim.min_lr",
        "lr_min min_lr_ratio min_lr_factor cosine_min_lr_ratio final_lr_frac min_lr_rate alpha_f",
        A_RATE,
    ),
    Synonym(
        "optim.schedule",
        "lr_scheduler lr_scheduler_type lr_decay_style decay_type lr_schedule lr_decay_type scheduler_type scheduler "
        "decay_lr lr_policy optim.type",
    ),
    Synonym(
        "optim.warmup",
        "warmup_steps warmup_iters lr_warmup_iters lr_warmup_steps num_warmup_steps lr_warmup_samples warmup_tokens "
        "warmup_num_steps warmup_samples",
        IN_UNITS,
    ),
    Synonym("optim.warmup_fraction", "warmup_ratio lr_warmup_fraction warmup_frac lr_warmup_ratio"),
    Synonym(
        "optim.decay", "lr_decay_iters lr_decay_steps decay_steps lr_decay_samples lr_decay_tokens t_max", IN_UNITS
    ),
    Synonym("optim.wsd_decay", "lr_wsd_decay_iters lr_wsd_decay_samples num_decay_steps cooldown_steps", IN_UNITS),
    Synonym("optim.wsd_decay", "decay_ratio warmdown_ratio cooldown_ratio warmdown_iters", f"a length, {IN_UNITS}"),
    Synonym("optim.beta1", "adam_beta1"),
    Synonym("optim.beta2", "adam_beta2"),
    Synonym("optim.beta1 optim.beta2", "betas adam_betas"),
    Synonym("optim.eps", "adam_epsilon adam_eps epsilon optimizer_eps"),
    Synonym("optim.momentum", "sgd_momentum"),
    Synonym("optim.weight_decay", "wd l2_reg end_weight_decay weight_decay_rate adam_weight_decay"),
    Synonym("optim.weight_decay_schedule", "weight_decay_incr_style"),
    Synonym(
        "optim.clip_grad",
        "max_grad_norm grad_clip gradient_clipping gradient_clip_val max_norm clip_grad_norm grad_clip_norm "
        "gradient_clip_norm grad_norm_clip clip_norm max_gradient_norm clip",
    ),
    Synonym("optim.name", "use_muon use_bnb_optimizer use_lion", "adamw, adam, sgd or muon"),
    Synonym("optim.muon_momentum", "muon_beta muon_beta1"),
    Synonym("optim.adjust_lr_fn", "muon_scale_mode muon_adjust_lr_fn muon_adjust_lr"),
    Synonym("optim.adamw_lr", "adam_lr muon_adamw_lr"),
    Synonym("optim.lr", "muon_lr", "with [optim] adamw_lr for what AdamW trains"),
)

TRAIN = (
    Synonym(
        "train.steps",
        "max_steps train_iters max_iters num_iterations num_steps total_steps training_steps num_training_steps "
        "train_steps max_train_steps iterations max_iterations n_steps num_train_steps total_num_steps",
    ),
    Synonym("train.samples", "train_samples max_samples num_samples max_train_samples"),
    Synonym("train.tokens", "train_tokens max_tokens total_tokens token_budget num_tokens training_tokens"),
    Synonym("train.epochs", "num_train_epochs num_epochs max_epochs n_epochs total_epochs num_train_epoch"),
    Synonym("train.tokens", "target_param_data_ratio target_flops", "a number of tokens"),
    Synonym("train.kill_switch", "kill_switch_path"),
    Synonym("train.exit_duration_min", "exit_duration_in_mins max_time time_limit max_runtime", "in minutes"),
    Synonym("train.skip_steps", "skip_train_iteration_range iterations_to_skip"),
    Synonym("train.drift_interval", "check_weight_hash_across_dp_replicas_interval"),
    Synonym("train.max_skipped", "max_consecutive_skips"),
    Synonym(
        "",
        "early_stopping_patience load_best_model_at_end metric_for_best_model early_stopping",
        "a run always trains to its end",
    ),
    Synonym("", "push_to_hub hub_model_id hub_token", "`dtmega convert` writes a folder, `hf upload` uploads it"),
    Synonym(
        "",
        "world_size nproc_per_node num_nodes nnodes local_rank num_processes num_gpus n_gpu gpus devices",
        "torchrun sets the number of processes",
    ),
    Synonym("", "ddp_backend distributed_backend backend", "always nccl on GPUs, gloo on CPUs"),
    Synonym("", "deterministic full_determinism deterministic_mode", "always on: the layout never changes the numbers"),
    Synonym("", "do_train do_predict", "a run trains, unless [eval] only is true"),
)

LORA = (
    Synonym("lora.rank", "lora_r lora_rank lora.r adapter use_peft lora_dim"),
    Synonym("lora.alpha", "lora_alpha"),
    Synonym("lora.dropout", "lora_dropout", "only 0"),
    Synonym("lora.targets", "lora_target_modules target_modules lora_target lora_target_linear", "patterns of names"),
    Synonym("train.freeze", "unfrozen_parameters freeze_layers frozen_parameters", "patterns of names"),
)

EVAL = (
    Synonym("eval.interval", "eval_interval eval_every eval_freq val_check_interval val_interval eval_step eval.freq"),
    Synonym("eval.interval", "eval_steps", "steps between evaluations; [eval] steps is the number of batches in one"),
    Synonym("eval.interval", "eval_strategy evaluation_strategy", "steps between evaluations; 0 = none"),
    Synonym("eval.steps", "eval_iters eval_batches max_eval_steps limit_val_batches max_eval_batches val_steps"),
    Synonym("eval.steps", "eval_tokens eval_samples max_eval_samples", "in global batches"),
    Synonym("eval.only", "eval_only do_eval skip_train validate_only"),
    Synonym("eval.sample_tokens", "max_new_tokens eval_max_new_tokens sample_length"),
    Synonym("eval.prompt", "sample_prompt sample_every start_prompt", "there is one sample, at the end"),
)

LOG = (
    Synonym(
        "log.interval",
        "logging_steps log_interval log_every log_freq logging_interval log_every_n_steps print_freq log.freq "
        "log.steps print_every steps_per_print",
    ),
    Synonym("log.tensorboard", "enable_tensorboard use_tensorboard tensorboard_log"),
    Synonym(
        "log.tensorboard run.dir", "tensorboard_dir logging_dir save_tb_folder", "tensorboard/ in the run's folder"
    ),
    Synonym("log.num_zeros", "log_num_zeros_in_grad"),
    Synonym("log.params_norm", "log_params_norm log_param_norm"),
    Synonym("log.trackers", "report_to enable_wandb use_wandb wandb wandb_log wandb_mode use_mlflow logger loggers"),
    Synonym("log.project", "wandb_project wandb_project_name mlflow_experiment_name log_project log_with project_name"),
)

CHECKPOINT = (
    Synonym(
        "checkpoint.interval",
        "save_steps save_interval save_every checkpoint_interval checkpoint_every save_freq ckpt_interval "
        "checkpointing_steps checkpoint_freq save_every_n_steps checkpoint.freq checkpoint.steps "
        "persistent_save_interval",
    ),
    Synonym("checkpoint.interval", "save_strategy enable_checkpoint", "steps between checkpoints; 0 = at the end only"),
    Synonym(
        "checkpoint.keep", "save_total_limit keep_latest_k keep_last_n checkpoints_total_limit save_top_k max_to_keep"
    ),
    Synonym(
        "checkpoint.resume", "resume_from_checkpoint resume_from auto_resume_from_checkpoints ckpt_path auto_resume"
    ),
    Synonym("checkpoint.resume", "load load_step resume_from_step", "'auto', 'none', or the folder of a checkpoint"),
    Synonym(
        "checkpoint.dir", "checkpoint_dir ckpt_dir save save_folder checkpoint_path checkpoint.folder checkpoint.path"
    ),
    Synonym("checkpoint.mode", "async_save async_mode use_async_checkpoint"),
    Synonym("checkpoint.final", "save_last save_final"),
    Synonym(
        "",
        "save_only_model no_save_optim no_save_rng no_load_rng last_save_model_only",
        "a checkpoint always has weights and optimizer state, and needs no random state",
    ),
)

PRECISION = (
    Synonym(
        "precision.params",
        "dtype torch_dtype bf16 fp16 bfloat16 float16 mixed_precision mixed_precision_param precision param_dtype "
        "params_dtype half_precision amp",
    ),
    Synonym("precision.params", "fp8 fp8_recipe fp8_format tf32", "float32, bfloat16 or float16"),
    Synonym(
        "precision.reduce",
        "mixed_precision_reduce reduce_dtype accumulate_allreduce_grads_in_fp32 grad_reduce_in_bf16 "
        "communication_data_type",
    ),
    Synonym(
        "precision.initial_loss_scale", "loss_scale init_scale", "the scale is always dynamic; this is its first value"
    ),
    Synonym("precision.initial_loss_scale", "initial_scale_power", "the scale itself, not its exponent"),
    Synonym("precision.min_loss_scale", "min_scale"),
    Synonym("precision.loss_scale_window", "scale_window growth_interval"),
)

COMPILE = (
    Synonym("compile.enable", "torch_compile use_compile compile compile_model use_torch_compile torch_compile_mode"),
)

MESH = (
    Synonym(
        "mesh.tp",
        "tensor_model_parallel_size tensor_parallel_degree tensor_parallel_size tp_size tp_degree tensor_parallel "
        "model_parallel_size num_tp tensor_parallelism mesh.tensor",
    ),
    Synonym(
        "mesh.pp",
        "pipeline_model_parallel_size pipeline_parallel_degree pipeline_parallel_size pp_size pp_degree "
        "pipeline_parallel num_stages mesh.pipeline",
    ),
    Synonym("mesh.dp_shard", "data_parallel_shard_degree dp_shard_size dp_shard_degree fsdp_size fsdp mesh.shard"),
    Synonym(
        "mesh.dp_replicate", "data_parallel_replicate_degree dp_replicate_size dp_replicate_degree ddp mesh.replicate"
    ),
    Synonym(
        "mesh.dp_shard mesh.dp_replicate",
        "dp dp_size dp_degree data_parallel data_parallel_size data_parallel_degree mesh.data",
        "data ranks that shard the parameters (FSDP), or that copy them (DDP)",
    ),
    Synonym(
        "mesh.dp_shard",
        "zero_stage zero_optimization deepspeed deepspeed_config use_distributed_optimizer sharding_strategy "
        "fsdp_config",
        "FSDP2 shards parameters, gradients and moments over these ranks",
    ),
    Synonym(
        "mesh.cp",
        "context_parallel_size context_parallel_degree cp_size cp_degree sequence_parallel_degree sp_size "
        "sequence_parallel_size",
        "ranks that each sequence is divided over",
    ),
    Synonym("mesh.sequence_parallel", "enable_sequence_parallel use_sequence_parallel", "on by default with tp"),
    Synonym(
        "mesh.ep mesh.tp",
        "expert_model_parallel_size expert_parallel_degree expert_parallel_size ep_size ep_degree",
        "with name = 'moe'; with name = 'hf' each of the tp ranks holds 1 / tp of the experts",
    ),
)

PIPELINE = (
    Synonym("pipeline.schedule", "pipeline_parallel_schedule pipeline_schedule pp_schedule"),
    Synonym("pipeline.csv", "pipeline_parallel_schedule_csv"),
    Synonym(
        "pipeline.virtual_stages",
        "virtual_pipeline_model_parallel_size num_virtual_stages_per_pipeline_rank num_model_chunks vpp_size vpp",
    ),
    Synonym(
        "pipeline.virtual_stages",
        "num_layers_per_virtual_pipeline_stage pipeline_parallel_layers_per_stage",
        "stages per rank = n_layers / (pp x layers per stage)",
    ),
    Synonym(
        "pipeline.stages",
        "pipeline_parallel_split_points module_fqns_per_model_part pp_partition_method pipeline_model_parallel_layout",
        "lists of layer numbers, one for each stage",
    ),
    Synonym("pipeline.split", "pipeline_model_parallel_split_rank"),
)

RECOMPUTE = (
    Synonym(
        "recompute.mode",
        "gradient_checkpointing activation_checkpointing recompute_granularity recompute_activations recompute "
        "checkpoint_activations use_checkpointing use_gradient_checkpointing selective_ac_option activation_checkpoint",
        "none, full or selective",
    ),
    Synonym("recompute.method", "recompute_method"),
    Synonym("recompute.layers", "recompute_num_layers checkpoint_num_layers"),
)

FSDP = (
    Synonym("fsdp.reshard_after_forward", "fsdp_reshard_after_forward"),
    Synonym(
        "fsdp.cpu_offload",
        "enable_cpu_offload offload_params fsdp_offload_params cpu_optimizer optimizer_cpu_offload offload_optimizer",
    ),
)

SYNONYMS = (
    *RUN,
    *MODEL,
    *DATA,
    *BATCH,
    *OPTIM,
    *TRAIN,
    *LORA,
    *EVAL,
    *LOG,
    *CHECKPOINT,
    *PRECISION,
    *COMPILE,
    *MESH,
    *PIPELINE,
    *RECOMPUTE,
    *FSDP,
)
