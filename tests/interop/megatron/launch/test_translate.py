"""Coming from Megatron: its launch scripts as configurations, its groups as lists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import tomli

from dtmega import config
from dtmega.__main__ import main
from dtmega.config.families.bloom import BloomKeys
from dtmega.interop.megatron.launch.flags import by_name
from dtmega.interop.megatron.launch.translate import translate
from dtmega.interop.megatron.recipe import config_of_args
from tools import flags_page

ROOT = Path(__file__).resolve().parents[4]
# The parts of a launch script that a reader has to follow, with the settings of BLOOM's 176B (bigscience
# train/tr11-176B-ml/tr11-176B-ml.slurm).
BLOOM = r"""#!/bin/bash
# an apostrophe that isn't a quote
TP_SIZE=4
PP_SIZE=12
export NHIDDEN=14336
SEQ_LEN=2048   # tokens
TRAIN_SAMPLES=220_000_000  # 450B tokens
OPTIMIZER_ARGS=" \
    --optimizer adam \
    --adam-beta1 0.9 --adam-beta2 0.95 \
    --adam-eps 1e-8 \
    --lr 6e-5 --min-lr 6e-6 \
    --lr-decay-style cosine \
    --lr-decay-samples 200_000_000 --lr-warmup-samples 183_105 \
    --clip-grad 1.0 \
    --weight-decay 1e-1 \
    "
cat <<EOT > config.json
{ "note": "pretrain_gpt.py --num-layers 1 is text here }
EOT
GPT_ARGS=" \
    --pp-partition-method 'type:transformer|embedding' \
    --num-layers 70 --hidden-size $NHIDDEN --num-attention-heads ${NHEADS:-112} \
    --seq-length $SEQ_LEN --max-position-embeddings ${SEQ_LEN} \
    --micro-batch-size 1 --rampup-batch-size 192 16 9_765_625 --global-batch-size 2048 \
    --train-samples $TRAIN_SAMPLES \
    --tokenizer-type PretrainedFromHF --tokenizer-name-or-path data/bloom \
    --init-method-std 0.0048 --embed-layernorm --bf16 --seed 42 --position-embedding-type alibi \
    --pad-vocab-size-to 250880 \
    $OPTIMIZER_ARGS \
"
OUTPUT_ARGS=(
    --log-interval 1      # each step
    --save-interval 100
    --eval-interval 1000 --eval-iters 1
)
export CMD=" \
    `pwd`/pretrain_gpt.py \
    --tensor-model-parallel-size $TP_SIZE --pipeline-model-parallel-size $PP_SIZE \
    $GPT_ARGS \
    ${OUTPUT_ARGS[@]} \
    --data-path data/roots --split 969,30,1 --num-workers 1 --distributed-backend nccl --zero-stage 0"
LAUNCHER="python -m torch.distributed.run"
srun bash -c "$LAUNCHER --node_rank \$SLURM_PROCID $CMD" 2>&1 | tee log.txt
"""


def keys_of(toml: str) -> config.Config:
    return config.validate(tomli.loads(toml), "the translation")


def test_the_page_is_the_table() -> None:
    assert flags_page.PAGE.read_text(encoding="utf-8") == flags_page.page()


def test_every_row_has_a_key_or_a_reason() -> None:
    assert [flag.names for flag in by_name().values() if not flag.keys and not flag.why] == []


def test_blooms_launch_script_is_its_configuration(tmp_path: Path) -> None:
    script = tmp_path / "tr11.slurm"
    script.write_text(BLOOM)
    translation = translate(str(script))
    assert translation.open == []
    found = keys_of(translation.toml)
    shipped = config.load(["--config", "bloom-176b.toml"])
    same = {"run": {"dir": found.run.dir}, "eval": {"prompt": found.eval.prompt}, "mesh": {"tp": 4, "pp": 12}}
    data = {"path": "data/roots", "tokenizer": "data/bloom/tokenizer.json", "num_workers": 1}
    expected = shipped.model_dump()
    for section, keys in {**same, "data": data, "checkpoint": {"keep": 0}}.items():
        expected[section] |= keys
    assert found.model_dump() == expected
    left = {line.split(":")[0] for line in translation.left_out}
    assert left == {"--distributed-backend nccl", "--zero-stage 0", "--pp-partition-method type"}


def check_shipped(line: str, name: str, taken: tuple[str, ...]) -> list[str]:
    """Check that a command is translated into a shipped configuration, and return the flags that were left out.

    Args:
        line: the command, which leaves only the size of the vocabulary open.
        name: name of the shipped configuration.
        taken: keys whose values are taken from the shipped configuration.
    """
    translation = translate(line)
    assert "# vocab_size = " in translation.toml
    assert [line.split(":")[0] for line in translation.open] == ["[model] vocab_size"]
    found = tomli.loads(translation.toml)
    del found["run"]["untranslated"]
    shipped = config.load(["--config", name])
    for key in (*taken, "checkpoint.keep"):
        section, _, field = key.partition(".")
        found[section][field] = getattr(getattr(shipped, section), field)
    assert config.validate(found, "the translation") == shipped
    return [line.split(":")[0] for line in translation.left_out]


def test_berts_launch_script_is_its_configuration() -> None:
    # Megatron-LM examples/pretrain_bert_distributed.sh.
    line = (
        "pretrain_bert.py --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --micro-batch-size 4 "
        "--global-batch-size 32 --seq-length 512 --max-position-embeddings 512 --train-iters 1000000 "
        "--data-path data/bert_text_sentence --vocab-file data/bert-vocab.txt --data-impl mmap --split 949,50,1 "
        "--distributed-backend nccl --lr 0.0001 --lr-decay-style linear --min-lr 1.0e-5 --lr-decay-iters 990000 "
        "--weight-decay 1e-2 --clip-grad 1.0 --lr-warmup-fraction .01 --log-interval 100 --save-interval 10000 "
        "--eval-interval 1000 --eval-iters 10 --fp16"
    )
    left_out = check_shipped(line, "bert-345m.toml", ("model.vocab_size", "run.dir", "eval.prompt"))
    assert left_out == ["--data-impl mmap", "--distributed-backend nccl"]


def test_t5s_launch_script_is_its_configuration() -> None:
    # Megatron-LM examples/pretrain_t5_distributed.sh, and the sentinels that its data sets ask for.
    line = (
        "pretrain_t5.py --num-layers 12 --hidden-size 768 --num-attention-heads 12 --kv-channels 64 "
        "--ffn-hidden-size 3072 --encoder-seq-length 512 --decoder-seq-length 128 --micro-batch-size 16 "
        "--global-batch-size 2048 --max-position-embeddings 512 --train-iters 1000000 --lr-decay-iters 1000000 "
        "--data-path data/t5_text_sentence --vocab-file data/bert-vocab.txt --data-impl mmap --split 949,50,1 "
        "--lr 0.0001 --min-lr 0.00001 --lr-decay-style linear --lr-warmup-fraction .01 --weight-decay 1e-2 "
        "--clip-grad 1.0 --log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10 --fp16 "
        "--vocab-extra-ids 100"
    )
    left_out = check_shipped(line, "t5-megatron", ("model.vocab_size", "run.dir"))
    assert left_out == ["--data-impl mmap"]


def test_a_t5_has_its_own_keys_for_flags_that_other_models_share() -> None:
    toml = tomli.loads(
        translate(
            "pretrain_t5.py --layernorm-epsilon 1e-6 --no-bias-gelu-fusion --encoder-num-layers 4 "
            "--decoder-num-layers 2 --pipeline-model-parallel-size 4 --pipeline-model-parallel-split-rank 3"
        ).toml
    )
    model, pipeline = toml["model"], toml["pipeline"]
    assert (model["norm_eps"], model["activation"]) == (1e-6, "gelu_erf")
    assert (model["n_layers"], model["n_decoder_layers"], pipeline["split"]) == (4, 2, 3)


def test_an_incomplete_line_is_translated_as_far_as_it_goes_and_names_what_it_leaves(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["from-megatron", "pretrain_gpt.py --num-layers 2 --data-impl lazy --nonsense 3"]) == 1
    said = capsys.readouterr()
    assert tomli.loads(said.out)["model"]["n_layers"] == 2
    lacking = re.findall(r"^# (\w+) = ", said.out, re.MULTILINE)
    assert lacking == [
        *("vocab_size", "hidden_size", "n_heads", "path", "seq_len", "micro_batch_size", "global_batch_size"),
        *("lr", "steps"),
    ]
    assert "--data-impl lazy" in said.err
    assert "--nonsense 3" in said.err


def test_defaults_of_megatron_that_are_others_here_are_written() -> None:
    toml = tomli.loads(translate("pretrain_gpt.py --train-iters 5").toml)
    assert toml["optim"] == {"schedule": "linear", "beta2": 0.999, "weight_decay": 0.01}
    assert (toml["model"]["hidden_dropout"], toml["model"]["attention_dropout"]) == (0.1, 0.1)
    assert toml["eval"] == {"interval": 1000, "steps": 100}
    assert toml["checkpoint"] == {"interval": 0, "keep": 0}


def test_the_padding_of_the_vocabulary_follows_their_tensor_parallel_size() -> None:
    # megatron/tokenizer/tokenizer.py: a multiple of make_vocab_size_divisible_by x tensor_model_parallel_size.
    line = "pretrain_gpt.py --tensor-model-parallel-size 8 --make-vocab-size-divisible-by 64"
    assert tomli.loads(translate(line).toml)["model"]["pad_vocab_to_multiple"] == 512


# Flags with values that are nobody's default -> what they are here, by Megatron-LM's and Megatron-DeepSpeed's
# megatron/arguments.py. Of a GPT, where no other program is named.
SAID: dict[str, dict[str, Any]] = {
    "--num-layers 3 --hidden-size 24 --num-attention-heads 6 --ffn-hidden-size 40 --max-position-embeddings 77": {
        **{"model.n_layers": 3, "model.hidden_size": 24, "model.n_heads": 6, "model.ffn_hidden_size": 40},
        **{"model.max_position_embeddings": 77},
    },
    "--init-method-std 0.03 --layernorm-epsilon 1e-7 --hidden-dropout 0.2 --attention-dropout 0.3": {
        **{"model.init_std": 0.03, "model.layer_norm_eps": 1e-7},
        **{"model.hidden_dropout": 0.2, "model.attention_dropout": 0.3},
    },
    "--fp32-residual-connection --glu-activation swiglu": {"model.fp32_residual": True, "model.glu": "swiglu"},
    "pretrain_bert.py --apply-residual-connection-post-layernorm": {
        "model.apply_residual_connection_post_layernorm": True
    },
    "pretrain_bert.py --no-bias-gelu-fusion": {"model.gelu": "erf"},
    "pretrain_bert.py --num-layers 2": {"model.gelu": "tanh"},
    "--pad-vocab-size-to 50304": {"model.vocab_size": 50304},
    "--num-layers 2": {
        **{"model.pad_vocab_to_multiple": 128, "checkpoint.interval": 0, "data.tokenizer": "gpt2"},
        **{"log.interval": 100, "data.split": "969,30,1"},
    },
    "--seq-length 33 --micro-batch-size 3 --global-batch-size 96 --rampup-batch-size 6 9 1000": {
        **{"data.seq_len": 33, "batch.micro_batch_size": 3, "batch.global_batch_size": 96},
        "batch.rampup": [6, 9, 1000],
    },
    "--train-iters 11 --lr-decay-iters 9 --lr-warmup-iters 2": {
        **{"train.steps": 11, "optim.decay": 9, "optim.warmup": 2, "optim.unit": None}
    },
    "--train-samples 800 --lr-decay-samples 700 --lr-warmup-samples 60": {
        **{"train.samples": 800, "optim.decay": 700, "optim.warmup": 60, "optim.unit": "samples"}
    },
    "--train-samples 800 --train-tokens 9000 --lr-decay-tokens 8000 --lr-warmup-samples 60 --seq-length 10": {
        # learning_rates.py: the warm-up counts samples, and the decay goes on with the tokens that these had. The 800
        # samples end before 9000 tokens.
        **{"train.samples": 800, "train.tokens": None},
        **{"optim.decay": 8000, "optim.unit": "tokens", "optim.warmup": 600},
    },
    "--lr 3e-4 --min-lr 2e-5 --lr-decay-style cosine --lr-warmup-fraction 0.02": {
        **{"optim.lr": 3e-4, "optim.min_lr": 2e-5, "optim.schedule": "cosine", "optim.warmup_fraction": 0.02}
    },
    "--start-weight-decay 0.02 --end-weight-decay 0.3 --weight-decay-incr-style cosine": {
        **{"optim.start_weight_decay": 0.02, "optim.weight_decay": 0.3, "optim.weight_decay_schedule": "cosine"}
    },
    "--clip-grad 0.7 --adam-beta1 0.8 --adam-beta2 0.97 --adam-eps 1e-7": {
        **{"optim.clip_grad": 0.7, "optim.beta1": 0.8, "optim.beta2": 0.97, "optim.eps": 1e-7}
    },
    "--fp16 --initial-loss-scale 65536 --min-loss-scale 2 --loss-scale-window 500 --hysteresis 3": {
        **{"precision.params": "float16", "precision.initial_loss_scale": 65536.0, "precision.min_loss_scale": 2.0},
        **{"precision.loss_scale_window": 500, "precision.hysteresis": 3},
    },
    "--bf16 --seed 7": {"precision.params": "bfloat16", "run.seed": 7},
    "--num-layers 4": {"precision.params": None, "recompute.mode": None, "fsdp.cpu_offload": None},
    "--skip-train-iteration-range 101-200 301-400": {"train.skip_steps": [[101, 200], [301, 400]]},
    "--kill-switch-path off --exit-interval 5 --exit-duration-in-mins 30": {
        **{"train.kill_switch": "off", "train.exit_interval": 5, "train.exit_duration_min": 30.0}
    },
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4": {"mesh.tp": 2, "mesh.pp": 4},
    "--checkpoint-activations --checkpoint-num-layers 2": {"recompute.mode": "full", "recompute.layers": 2},
    "--recompute-granularity full --recompute-method block --recompute-num-layers 3": {
        **{"recompute.mode": "full", "recompute.method": "block", "recompute.layers": 3}
    },
    "--recompute-granularity selective": {"recompute.mode": "selective"},
    "--recompute-activations": {"recompute.mode": "selective"},
    "--cpu-optimizer": {"fsdp.cpu_offload": True},
    "--split 90,9,1 --num-workers 5 --data-path a": {"data.split": "90,9,1", "data.num_workers": 5, "data.path": "a"},
    "--eod-mask-loss": {"data.eod_mask_loss": True, "data.reset_position_ids": None},
    "--reset-position-ids": {"data.reset_position_ids": True, "data.reset_attention_mask": None},
    "--reset-attention-mask": {"data.reset_attention_mask": True},
    "pretrain_bert.py --mask-prob 0.2 --short-seq-prob 0.05": {"data.mask_prob": 0.2, "data.short_seq_prob": 0.05},
    "pretrain_bert.py --vocab-file v.txt": {"data.tokenizer": "bert:v.txt"},
    "pretrain_bert.py --tokenizer-type BertWordPieceCase --vocab-file v.txt": {"data.tokenizer": "bert-cased:v.txt"},
    "--eval-interval 50 --eval-iters 6 --log-interval 3 --eval-only true": {
        **{"eval.interval": 50, "eval.steps": 6, "log.interval": 3, "eval.only": True}
    },
    "--skip-train": {"eval.only": True},
    "--iterations-to-skip 3 8": {"train.skip_steps": [[3, 3], [8, 8]]},
    "--padded-vocab-size 50304": {"model.vocab_size": 50304, "model.pad_vocab_to_multiple": None},
    "--vocab-size 50257 --no-pad-vocab-size": {"model.vocab_size": 50257, "model.pad_vocab_to_multiple": None},
    "--num-virtual-stages-per-pipeline-rank 3": {
        **{"pipeline.virtual_stages": 3, "pipeline.schedule": "Interleaved1F1B"}
    },
    "--optimizer-cpu-offload": {"fsdp.cpu_offload": True},
    "--save-retain-interval 1000": {"checkpoint.keep": 0},
    "--log-params-norm": {"log.params_norm": True, "log.num_zeros": None},
    "--log-num-zeros-in-grad": {"log.num_zeros": True},
    "--save there --save-interval 40": {"checkpoint.dir": "there", "checkpoint.interval": 40},
    "pretrain_t5.py --num-layers 2": {"model.scale_scores": True, "model.activation": "gelu_tanh"},
    "pretrain_t5.py --kv-channels 5 --vocab-extra-ids 12 --decoder-seq-length 9": {
        **{"model.kv_channels": 5, "data.sentinels": 12, "data.decoder_seq_len": 9}
    },
}


@pytest.mark.parametrize("line", SAID)
def test_each_flag_is_the_key_that_says_the_same(line: str) -> None:
    toml = tomli.loads(translate(line if line.startswith("pretrain") else f"pretrain_gpt.py {line}").toml)
    found = {f"{section}.{key}": value for section, keys in toml.items() for key, value in keys.items()}
    expected = SAID[line]
    assert {key: found.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("line", "left"),
    [
        ("pretrain_gpt.py --no-bias-gelu-fusion", "a gpt has the GELU with tanh"),
        ("pretrain_gpt.py --embed-layernorm", "a gpt has none"),
        ("pretrain_gpt.py --position-embedding-type rotary", "rotary positions are built in a llama only"),
        ("pretrain_gpt.py --load there", "convert Megatron's checkpoint first"),
        ("pretrain_gpt.py --load there --save elsewhere", "convert Megatron's checkpoint first"),
        ("pretrain_gpt.py --load there --save there", ""),
        ("pretrain_gpt.py --position-embedding-type alibi --embed-layernorm", ""),
    ],
)
def test_a_flag_whose_meaning_is_another_here_is_named_and_no_other(line: str, left: str) -> None:
    found = translate(line).left_out
    assert [left in each for each in found] == [True] * bool(left), found


@pytest.mark.parametrize("flag", ["--finetune", "--no-load-optim"])
def test_weights_to_start_with_are_asked_for_where_theirs_were_loaded_without_an_optimizer(flag: str) -> None:
    assert (
        "# init_from =   # missing: the weights of there, converted"
        in translate(f"pretrain_gpt.py {flag} --load there").toml
    )


def test_scores_are_scaled_by_the_layer_where_theirs_are_which_is_in_float16_unless_a_flag_says_no() -> None:
    # megatron/arguments.py: apply_query_key_layer_scaling is True; model/transformer.py: it changes float16 alone.
    for flags, scaled in (
        ("--fp16", True),
        ("--fp16 --no-query-key-layer-scaling", None),
        ("--bf16", None),
        ("", None),
    ):
        model = tomli.loads(translate(f"pretrain_gpt.py --num-layers 2 {flags}").toml)["model"]
        assert model.get("query_key_layer_scaling") == scaled, flags


def test_virtual_stages_are_the_layers_of_a_rank_by_those_of_a_virtual_stage() -> None:
    # megatron/arguments.py: virtual_pipeline_model_parallel_size =
    # (num_layers // transformer_pipeline_model_parallel_size) // num_layers_per_virtual_pipeline_stage.
    line = "pretrain_gpt.py --num-layers 24 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2"
    pipeline = tomli.loads(translate(line).toml)["pipeline"]
    assert pipeline == {"schedule": "Interleaved1F1B", "virtual_stages": 3}


def test_weights_and_prefixes_in_turn_are_a_blend() -> None:
    data = tomli.loads(translate("pretrain_gpt.py --data-path 0.3 a 0.7 b").toml)["data"]
    assert (data["path"], data["weights"]) == (["a", "b"], [0.3, 0.7])


TRAIN = "train: 0.3 0:0.95 data/a, 0.7 0.1:0.95 data/b"
VALID = ["wiki: 1 0.95:1 data/a", "all: 0.3 0.95:1 data/a, 0.7 0.95:1 data/b"]


def test_weighted_split_paths_are_mixtures_of_the_same_words(tmp_path: Path) -> None:
    direct = (
        f"pretrain_gpt.py --train-weighted-split-paths '{TRAIN}' --valid-weighted-split-paths '{VALID[0]}' "
        f"'{VALID[1]}' --test-weighted-split-paths 'test: 1 0:1 data/c' 'more: 1 0:1 data/d' --split 1,2,3"
    )
    for split, groups in {"train": [TRAIN], "valid": VALID, "test": ["test: 1 0:1 data/c"]}.items():
        (tmp_path / split).write_text(" ".join(f'"{group}"' for group in groups) + "\n")
    in_files = "pretrain_gpt.py " + " ".join(
        f"--{split}-weighted-split-paths-path {tmp_path / split}" for split in ("train", "valid", "test")
    )
    for line in (direct, in_files):
        data = config.Data(**tomli.loads(translate(line).toml)["data"])
        mixture = data.train_mixture
        assert mixture is not None
        assert mixture.name == "train"
        assert mixture.shares == ((0.3, 0.0, 0.95, "data/a"), (0.7, 0.1, 0.95, "data/b"))
        assert [(one.name, one.shares) for one in data.validation_sets] == [
            ("wiki", ((1.0, 0.95, 1.0, "data/a"),)),
            ("all", ((0.3, 0.95, 1.0, "data/a"), (0.7, 0.95, 1.0, "data/b"))),
        ]
        assert data.test == "test: 1 0:1 data/c"
    left = translate(direct).left_out
    assert [line.partition(": ")[0].split()[0] for line in left] == ["--test-weighted-split-paths", "--split"]
    assert "more: 1 0:1 data/d" in left[0]


def test_groups_that_a_checkpoints_arguments_hold_in_pieces_are_mixtures_again() -> None:
    # As parse_data_paths leaves them (Megatron-DeepSpeed megatron/arguments.py).
    args = {
        "train_weighted_split_names": ["train"],
        "train_weighted_split_weights": [["0.3", "0.7"]],
        "train_weighted_split_splits": [["0:0.95", "0.1:0.95"]],
        "train_weighted_split_paths": [["data/a", "data/b"]],
        "valid_weighted_split_names": ["wiki", "all"],
        "valid_weighted_split_weights": [["1"], ["0.3", "0.7"]],
        "valid_weighted_split_splits": [["0.95:1"], ["0.95:1", "0.95:1"]],
        "valid_weighted_split_paths": [["data/a"], ["data/a", "data/b"]],
    }
    toml, _ = config_of_args(args, BloomKeys())
    data = tomli.loads(toml)["data"]
    assert data["train"] == TRAIN
    assert data["validation"] == VALID


def test_a_file_of_weighted_split_paths_that_is_not_at_hand_is_named(tmp_path: Path) -> None:
    translation = translate(f"pretrain_gpt.py --train-weighted-split-paths-path {tmp_path}/none")
    assert "# path = " in translation.toml
    assert any("cannot be read here" in line for line in translation.left_out)


def test_a_prefix_model_is_an_objective_here():
    data = tomli.loads(translate("pretrain_prefix_lm.py --reweight-loss-based-on-position-frequency").toml)["data"]
    assert (data["objective"], data["reweight_positions"]) == ("prefix-lm", True)


def test_with_sgd_the_settings_of_adam_are_left_out_which_would_be_refused():
    line = (
        "pretrain_gpt.py --num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 "
        "--global-batch-size 2 --lr 0.1 --train-iters 3 --pad-vocab-size-to 50304 --data-path data/a --optimizer sgd "
        "--sgd-momentum 0.8"
    )
    toml = translate(line).toml
    optim = keys_of(toml).optim
    assert (optim.name, optim.momentum, optim.beta2) == ("sgd", 0.8, 0.95)
    assert "Not accepted" not in toml


def test_a_quote_that_never_ends_is_refused_with_the_line(capsys: pytest.CaptureFixture[str]):
    assert main(["from-megatron", "pretrain_gpt.py --data-path 'a b"]) == 2
    assert "line 1: this is not bash, near ''a b'" in capsys.readouterr().err


def test_nothing_of_a_script_is_run(tmp_path: Path) -> None:
    script = tmp_path / "launch.sh"
    script.write_text(f"X=$(touch {tmp_path}/ran)\n`touch {tmp_path}/ran`\npython pretrain_gpt.py --num-layers $X\n")
    toml = translate(str(script)).toml
    assert "# n_layers = " in toml
    assert [path.name for path in tmp_path.iterdir()] == ["launch.sh"]


def test_a_model_of_another_kind_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["from-megatron", "pretrain_vit.py --num-layers 2"]) == 2
    assert "pretrain_vit.py trains a model that is not built here" in capsys.readouterr().err


def test_groups_are_listed_as_the_original_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    # megatron/mpu/initialize.py, initialize_model_parallel: the example of 16 GPUs.
    assert main(["groups", "--world", "16", "--mesh.tp", "2", "--mesh.pp", "4"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["tp"] == "[0,1] [2,3] [4,5] [6,7] [8,9] [10,11] [12,13] [14,15]"
    assert lines["data"] == "[0,2] [1,3] [4,6] [5,7] [8,10] [9,11] [12,14] [13,15]"
    assert lines["pp"] == "[0,4,8,12] [1,5,9,13] [2,6,10,14] [3,7,11,15]"
    assert lines["model"] == "[0,1,4,5,8,9,12,13] [2,3,6,7,10,11,14,15]"


def test_groups_of_a_mesh_that_does_not_make_the_world_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["groups", "--world", "16", "--mesh.tp", "3"]) == 2
    assert "expected 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("--curriculum-learning", "growing lengths break token counts"),
        ("--use-bnb-optimizer", "moments are fp32"),
        ("--mtp-num-layers 1", "--mtp-num-layers 1"),
        ("--num-experts 8", "--num-experts 8"),
        ("--moe-aux-loss-coeff 1e-2", "--moe-aux-loss-coeff 1e-2"),
        ("--use-megatron-fsdp", "--use-megatron-fsdp"),
    ],
)
def test_a_flag_of_a_feature_that_is_not_here_is_left_out_with_the_reason(flag: str, reason: str):
    (line,) = translate(f"pretrain_gpt.py --num-layers 2 {flag}").left_out
    assert line.startswith(flag.split()[0])
    assert reason in line


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("pretrain_vlm.py", "trains a model that is not built here"),
        ("finetune_t0_non_causal_decoder.py", "has no command with a pretrain_"),
    ],
)
def test_a_program_for_another_model_is_refused(program: str, reason: str):
    with pytest.raises(ValueError, match=reason):
        translate(f"{program} --num-layers 2")
