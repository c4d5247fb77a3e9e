"""Nothing that changes a run is lost in silence: what is not carried over, a run refuses until it is settled."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli

from dtmega import config
from dtmega.__main__ import main
from dtmega.config.families.llama import LlamaKeys
from dtmega.interop.megatron.launch.translate import translate

# A GPT whose flags say everything that a run needs.
GPT = (
    "pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --train-iters 10 "
    "--vocab-size 50257 --data-path data/a"
)
# Llama 2's architecture in the flags of Megatron-LM since 2023 (examples/llama).
LLAMA = (
    "pretrain_gpt.py --use-mcore-models --num-layers 3 --hidden-size 96 --ffn-hidden-size 160 --num-attention-heads 6 "
    "--group-query-attention --num-query-groups 2 --seq-length 64 --max-position-embeddings 64 "
    "--position-embedding-type rope --rotary-base 500000 --rotary-percent 1.0 --attention-dropout 0.0 "
    "--hidden-dropout 0 --swiglu --normalization RMSNorm --norm-epsilon 1e-6 --untie-embeddings-and-output-weights "
    "--disable-bias-linear --micro-batch-size 1 --global-batch-size 4 --train-samples 100 --lr-decay-samples 80 "
    "--lr-warmup-samples 8 --lr 3e-4 --bf16 --vocab-size 128256 --tokenizer-type HuggingFaceTokenizer "
    "--tokenizer-model tok --data-path data/a --kv-channels 16 --transformer-impl transformer_engine"
)


def keys_of(line: str, **options: Any) -> dict[str, Any]:
    """The translation's values by section.key."""
    toml = tomli.loads(translate(line, **options).toml)
    return {f"{section}.{key}": value for section, keys in toml.items() for key, value in keys.items()}


def opened(line: str, **options: Any) -> list[str]:
    return translate(line, **options).open


def test_a_command_that_says_everything_leaves_nothing_open(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["from-megatron", GPT]) == 0
    cfg = config.validate(tomli.loads(capsys.readouterr().out), "the translation")
    assert (cfg.model.n_layers, cfg.run.untranslated) == (2, [])


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("--num-experts 8", "experts are built in a moe only, which has rotary positions"),
        ("--nonsense 3", "unknown flag"),
        ("--mup", "not built"),
        ("--lr-warmup-init 1e-7", "a warm-up begins at 0"),
        ("--fp16-lm-cross-entropy", "always fp32"),
        ("--dataloader-type cyclic", "only single is built"),
        ("--position-embedding-type none", "none positions in a gpt are not built"),
        ("--normalization RMSNorm", "a gpt does not have it"),
        ("--group-query-attention", "a gpt has none"),
        ("--disable-bias-linear", "a gpt has biases"),
        ("--apply-residual-connection-post-layernorm", "a gpt has no apply_residual"),
        ("--optimizer lion", "only adam and sgd"),
        ("--lr-decay-style WSD", "its last decay is exponential"),
        ("--lr-decay-style step", "one of constant, linear"),
        ("--train-samples 100 --rampup-batch-size 2 2 4", "it cannot be compared"),
        ("--lr $LR", "$LR is not known: --set LR=VALUE"),
        ("--lr-decay-iters $(wc -l f)", "$(wc -l f) is not known"),
        ("--weight-decay high", "expected a number"),
        ("$MORE", "$MORE is not known: --set MORE=VALUE"),
        ("--bf16 more", "belongs to no flag"),
        ("more", "expected numbers"),
        ("--rampup-batch-size 2 x 4", "expected numbers"),
    ],
)
def test_what_changes_a_run_and_is_not_carried_over_is_refused_by_the_trainer(
    flag: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["from-megatron", f"{GPT} {flag}"]) == 1
    path = tmp_path / "it.toml"
    path.write_text(capsys.readouterr().out)
    with pytest.raises(config.ConfigError) as refusal:
        config.load(["--config", str(path)])
    assert reason in str(refusal.value)


@pytest.mark.parametrize(
    "flag",
    [
        *("--num-experts 1 --moe-loss-coeff 0.1", "--use-flash-attn", "--overlap-grad-reduce", "--loss-scale 12"),
        *("--rotary-percent 1.0", "--log-throughput", "--context-parallel-size 2", "--save $DIR --load $DIR"),
        *("--vocab-file $V --merge-file $M", "--kv-channels 16", "--position-embedding-type learned_absolute"),
        *("--dataloader-type single", "--tensorboard-dir $T", "--normalization LayerNorm"),
        "--calculate-per-token-loss",
    ],
)
def test_what_changes_no_number_leaves_nothing_open(flag: str) -> None:
    assert opened(f"{GPT} {flag}") == []


def test_a_flag_that_is_known_to_be_missing_is_named_and_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["from-megatron", f"{GPT} --num-experts 8", "--allow-missing", "--num-experts"]) == 0
    assert (
        "--num-experts 8: experts are built in a moe only, which has rotary positions (allowed)"
        in capsys.readouterr().err
    )
    assert main(["from-megatron", f"{GPT} --lr $LR", "--allow-missing", "lr"]) == 0
    assert main(["from-megatron", GPT, "--allow-missing", "--mup"]) == 2
    assert "--allow-missing --mup: nothing with this name is missing" in capsys.readouterr().err


def test_a_line_of_the_script_is_to_blame(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f'MORE="--clip-grad 1 \\\n  --swiglu \\\n  --squared-relu"\npython {GPT} $MORE --lr $LR\n')
    lines = {line.split()[0]: line for line in opened(str(script))}
    assert "(line 3)" in lines["--squared-relu"]
    assert "(line 4)" in lines["--lr"]


def test_variables_are_given_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f'if [ "$DEBUG" = 1 ]; then L=3; else L=5; fi\npython {GPT} --num-layers $L\n')
    assert main(["from-megatron", str(script)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert "line 1" in captured.err
    assert "--set DEBUG=VALUE" in captured.err
    assert main(["from-megatron", str(script), "--set", "DEBUG=1"]) == 0
    assert tomli.loads(capsys.readouterr().out)["model"]["n_layers"] == 3
    assert main(["from-megatron", str(script), "--set", "DEBUG"]) == 2
    assert "expected NAME=VALUE" in capsys.readouterr().err


def test_of_several_different_commands_the_user_chooses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"for L in 1 2 3; do python {GPT} --num-layers $L; done\npython {GPT} --num-layers 3\n")
    assert main(["from-megatron", str(script)]) == 2
    assert "3 different commands" in capsys.readouterr().err
    assert main(["from-megatron", str(script), "--command", "2"]) == 0
    assert tomli.loads(capsys.readouterr().out)["model"]["n_layers"] == 2
    assert main(["from-megatron", str(script), "--command", "4"]) == 2


def test_without_the_grammar_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tree_sitter", None)
    assert main(["from-megatron", GPT]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "needs tree_sitter, which is not installed: pip install -e '.[megatron]'" in captured.err


@pytest.mark.parametrize(
    "text", ["X=pretrain_gpt.py; grep x pretrain_gpt.py; echo python pretrain_gpt.py --lr 1", "python other.py"]
)
def test_a_script_without_a_command_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.sh").write_text(text)
    assert main(["from-megatron", str(tmp_path / "run.sh")]) == 2
    assert "has no command with a pretrain_....py in it" in capsys.readouterr().err


def test_an_empty_source_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["from-megatron", " "]) == 2
    assert "expected the path of a launch script, or a command in quotes" in capsys.readouterr().err


def test_megatrons_llama_is_our_llama() -> None:
    translation = translate(LLAMA)
    assert translation.open == []
    cfg = config.validate(tomli.loads(translation.toml), "the translation")
    expected = LlamaKeys(
        vocab_size=128256,
        hidden_size=96,
        n_layers=3,
        n_heads=6,
        n_kv_heads=2,
        ffn_hidden_size=160,
        max_position_embeddings=64,
        rope_theta=500_000.0,
        rms_norm_eps=1e-6,
        tied=False,
        pad_vocab_to_multiple=128,
    )
    assert cfg.model == expected
    assert (cfg.train.samples, cfg.optim.decay, cfg.optim.warmup, cfg.optim.unit) == (100, 80, 8, "samples")


def test_other_spellings_of_a_llama() -> None:
    # microsoft/Megatron-DeepSpeed examples_deepspeed/pretrain_llama_distributed.sh.
    theirs = (
        LLAMA.replace("--position-embedding-type rope", "--use-rotary-position-embeddings --no-position-embedding")
        .replace("--group-query-attention --num-query-groups 2", "--num-key-value-heads 2")
        .replace("RMSNorm", "rmsnorm")
    )
    assert keys_of(theirs) == keys_of(LLAMA)
    # megatron/training/arguments.py, validate_args: 8/3 D in multiples of 64.
    for size, width in ((96, 256), (100, 256), (4096, 10880)):
        line = LLAMA.replace("--ffn-hidden-size 160", f"--hidden-size {size}")
        assert keys_of(line)["model.ffn_hidden_size"] == width
    tied = keys_of(LLAMA.replace("--untie-embeddings-and-output-weights", ""))
    assert tied["model.tied"] is True
    scaled = keys_of(f"{LLAMA} --use-rope-scaling")
    assert [scaled[f"model.rope_{key}"] for key in ("factor", "low_freq_factor", "high_freq_factor")] == [8, 1, 4]


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("--swiglu", "", "without --swiglu"),
        ("--normalization RMSNorm", "", "without --normalization RMSNorm"),
        ("--disable-bias-linear", "", "without --disable-bias-linear"),
        ("--hidden-dropout 0", "", "Megatron's default, is 0.1"),
        ("--attention-dropout 0.0", "--attention-dropout 0.1", "a llama has no dropout"),
        ("--rotary-percent 1.0", "--rotary-percent 0.5", "every channel of a head"),
        ("--swiglu", "--swiglu --window-size 7", "expected two numbers, and as"),
        ("--swiglu", "--swiglu --window-size 7,0 --window-attn-skip-freq [1,0]*2", "expected two numbers, and as"),
        ("--swiglu", "--swiglu --apply-layernorm-1p", "--apply-layernorm-1p"),
        ("--swiglu", "--squared-relu", "--squared-relu"),
        ("--swiglu", "--swiglu --rotary-interleaved", "--rotary-interleaved"),
        ("--swiglu", "--swiglu --add-qkv-bias", "--add-qkv-bias"),
        ("--swiglu", "--swiglu --fp32-residual-connection", "a llama has no fp32_residual"),
    ],
)
def test_a_model_beside_our_llama_is_refused_by_name(old: str, new: str, reason: str) -> None:
    lines = opened(LLAMA.replace(old, new))
    assert any(reason in line for line in lines), lines


def test_norms_of_heads_their_width_and_windows_are_those_of_our_llama() -> None:
    keys = keys_of(f"{LLAMA.replace('--kv-channels 16', '--kv-channels 32')} --qk-layernorm --window-size 7,0")
    assert (keys["model.kv_channels"], keys["model.qk_norm"], keys["model.window"]) == (32, True, 8)
    assert "model.window_layers" not in keys
    # Every second layer, counted from 1, attends to all tokens.
    keys = keys_of(f"{LLAMA} --window-size '(7,0)' --window-attn-skip-freq 2")
    assert (keys["model.window"], keys["model.window_layers"]) == (8, [0, 2])
    assert opened(f"{LLAMA} --qk-layernorm --window-size 7,0 --window-attn-skip-freq 2") == []


@pytest.mark.parametrize("flags", ["--qk-layernorm", "--window-size 7,0", "--kv-channels 32"])
def test_a_gpt_has_none_of_them(flags: str) -> None:
    assert any(flags in line and "a gpt has no" in line for line in opened(f"{GPT} {flags}"))


def test_a_gpt_has_gates_and_two_weights_where_flags_say_so() -> None:
    keys = keys_of(f"{GPT} --swiglu --untie-embeddings-and-output-weights")
    assert (keys["model.glu"], keys["model.tied"]) == ("swiglu", False)
    assert keys["model.ffn_hidden_size"] == int(4 * 64 * 2 / 3 / 64) * 64
    # BigScience's own flag keeps the width, and doubles the first matrix.
    assert "model.ffn_hidden_size" not in keys_of(f"{GPT} --glu-activation swiglu")


def test_a_model_with_alibi_needs_blooms_norm() -> None:
    alibi = GPT.replace("--max-position-embeddings 32", "--position-embedding-type alibi")
    assert any("without --embed-layernorm" in line for line in opened(alibi))
    assert opened(f"{alibi} --embed-layernorm") == []


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--lr-decay-style inverse-square-root --lr-warmup-iters 2", {"schedule": "inverse-sqrt", "warmup": 2}),
        (
            "--lr-decay-style WSD --lr-wsd-decay-style linear --lr-wsd-decay-iters 3 --lr-decay-iters 9",
            {"schedule": "wsd", "wsd_decay": 3, "decay": 9},
        ),
        (
            "--lr-decay-tokens 2048 --lr-warmup-tokens 512",
            {"unit": "tokens", "decay": 2048, "warmup": 512},
        ),
        # 2 steps of 8 sequences of 32 tokens.
        ("--lr-decay-tokens 2048 --lr-warmup-iters 2", {"unit": "tokens", "decay": 2048, "warmup": 512}),
        ("--lr-decay-samples 64 --lr-warmup-iters 2", {"unit": "samples", "decay": 64, "warmup": 16}),
        ("--warmup 0.1", {"warmup_fraction": 0.1}),
    ],
)
def test_a_schedule_is_in_one_unit(flags: str, expected: dict[str, Any]) -> None:
    keys = keys_of(f"{GPT} {flags}")
    assert {key: keys.get(f"optim.{key}") for key in expected} == expected
    assert opened(f"{GPT} {flags}") == []


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--train-tokens 2559", {"tokens": 2559}),  # 10 steps are 2560 tokens
        ("--train-tokens 2561", {"steps": 10}),
        ("--train-tokens 100000 --train-samples 81", {"steps": 10}),
        ("--train-tokens 100000 --train-samples 79", {"samples": 79}),
    ],
)
def test_of_several_lengths_the_first_ends_the_run(flags: str, expected: dict[str, int]) -> None:
    keys = keys_of(f"{GPT} {flags}")
    assert {key.partition(".")[2]: keys[key] for key in keys if key.startswith("train.")} == expected
    # The decay still ends where Megatron's does: at the length in steps or samples.
    assert opened(f"{GPT} {flags}") == []


@pytest.mark.parametrize(
    ("flags", "key", "value"),
    [
        ("--split 90,10", "data.split", "90,10,0"),
        ("--split 949/50/1", "data.split", "949,50,1"),
        ("--split 1", "data.split", "1,0,0"),
        ("--split \"'99,1,0'\"", "data.split", "99,1,0"),
        ("--eval-iters 0", "eval.interval", 0),
        ("--seed 4294967295", "run.seed", 2**32 - 1),
        ("--activations-checkpoint-method block --activations-checkpoint-num-layers 1", "recompute.method", "block"),
        ("--model-parallel-size 2", "mesh.tp", 2),
        ("--grad-reduce-in-bf16 --bf16", "precision.reduce", "bfloat16"),
        ("--lr=0.5", "optim.lr", 0.5),
    ],
)
def test_further_flags_are_keys(flags: str, key: str, value: Any) -> None:
    line = f"{GPT} {flags}"
    assert keys_of(line)[key] == value
    assert opened(line) == []
    config.validate(tomli.loads(translate(line).toml), "the translation")


def test_the_program_of_2020_trains_a_gpt() -> None:
    assert keys_of(GPT.replace("pretrain_gpt.py", "pretrain_gpt2.py")) == keys_of(GPT)


@pytest.mark.parametrize(
    ("flags", "original", "scales"),
    [
        ("--data-impl mmap", "", True),
        ("--deepspeed", "", True),
        ("--apply-query-key-layer-scaling", "", True),
        ("--data-impl mmap --no-query-key-layer-scaling", "", False),
        ("--use-legacy-models", "", False),
        ("", "megatron-lm", True),
        ("", "megatron-deepspeed", True),
        ("", "megatron-core", False),
    ],
)
def test_the_scaling_of_scores_follows_the_version_of_the_program(flags: str, original: str, scales: bool) -> None:
    line = f"{GPT} --fp16 {flags}"
    assert keys_of(line, original=original).get("model.query_key_layer_scaling", False) is scales
    assert opened(line, original=original) == []


def test_the_version_is_asked_for_where_no_flag_tells_it() -> None:
    (line,) = opened(f"{GPT} --fp16")
    assert "give --original" in line
    assert opened(f"{GPT} --bf16") == []


def deepspeed(tmp_path: Path, settings: dict[str, Any], flags: str) -> Path:
    script = tmp_path / "run.sh"
    text = json.dumps(settings, indent=1)
    command = f"deepspeed {GPT} --deepspeed --deepspeed_config $CONFIG_JSON {flags}"
    script.write_text(f"CONFIG_JSON=./ds_$SLURM_JOBID.json\ncat <<EOT > $CONFIG_JSON\n{text}\nEOT\n{command}\n")
    return script


def test_deepspeeds_json_sets_the_loss_scale_and_the_limit_of_gradients(tmp_path: Path) -> None:
    fp16 = {
        "enabled": True,
        "loss_scale": 0,
        "loss_scale_window": 500,
        "hysteresis": 4,
        "min_loss_scale": 2,
        "initial_scale_power": 12,
    }
    settings = {"fp16": fp16, "gradient_clipping": 0.5, "zero_optimization": {"stage": 1}}
    script = deepspeed(tmp_path, settings, "--fp16 --clip-grad 1.0 --hysteresis 2 --loss-scale 12")
    keys = keys_of(str(script))
    expected = {
        "precision.initial_loss_scale": 4096.0,
        "precision.loss_scale_window": 500,
        "precision.hysteresis": 4,
        "precision.min_loss_scale": 2.0,
        "optim.clip_grad": 0.5,
    }
    assert {key: keys[key] for key in expected} == expected
    assert opened(str(script)) == []
    # DeepSpeed's defaults: no limit, 2^16, and a scale that doubles after 1,000 steps.
    script = deepspeed(tmp_path, {"fp16": {"enabled": True}}, "--fp16 --loss-scale-window 77 --min-loss-scale 7")
    keys = keys_of(str(script))
    defaults = zip(expected, (65536.0, 1000, 2, 1.0, 0.0), strict=True)
    assert {key: keys[key] for key in expected} == dict(defaults)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"fp16": {"enabled": True, "loss_scale": 128}}, "its loss_scale is 128"),
        ({"fp16": {"initial_scale_power": "x"}}, "values that are no numbers"),
        ({"gradient_clipping": "x"}, "is no number"),
        ({"optimizer": {"type": "Lamb"}}, "its optimizer is not carried over"),
        ({"curriculum_learning": {"enabled": True}}, "its curriculum_learning is not carried over"),
    ],
)
def test_settings_of_deepspeed_that_are_not_here_are_left_open(
    settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    (line,) = opened(str(deepspeed(tmp_path, settings, "--fp16")))
    assert reason in line


def test_a_json_that_the_script_does_not_write_is_left_open(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"deepspeed {GPT} --bf16 --deepspeed --deepspeed_config ds.json\n")
    (line,) = opened(str(script))
    assert "not known" in line
    (tmp_path / "ds.json").write_text('{"gradient_clipping": 1.0, "curriculum_learning": {"enabled": false}}')
    assert opened(str(script)) == []
