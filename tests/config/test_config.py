"""config/: what it refuses, and in which words; what it reads; and the arithmetic of batches and steps."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import tomli

from dtmega import config
from dtmega.config import Batch, Config, ConfigError, Data, Optim, Run, Train, help, schema
from dtmega.config.families.bloom import BloomKeys
from dtmega.config.families.hf import TransformersKeys
from dtmega.config.suggestions import SimilarKeys, read_synonyms
from dtmega.interop.megatron.launch import flags
from tests import keys

TABLE = keys.read()
SIMILAR_KEYS = SimilarKeys(Config)
NAMES = " or ".join(schema.SectionClasses.of(config.Config.model_fields["model"]).classes)


def load(tmp_path: Path, toml: str = "", *overrides: str) -> Config:
    path = tmp_path / "test.toml"
    path.write_text(toml)
    return config.load(["--config", str(path), *(overrides or ("--train.steps", "1"))])


def test_the_table_of_keys_has_those_of_the_code_in_their_order():
    in_code = [(group.title, k) for group in help.groups_of(Config) for k in group.fields]
    assert [(row.title, row.key) for row in TABLE] == in_code


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.section}.{row.key}")
def test_a_key_has_the_default_the_values_and_the_bounds_of_the_table(tmp_path: Path, row: keys.Key):
    (field,) = (group.fields[row.key] for group in help.groups_of(Config) if group.title == row.title)
    resolved = getattr(getattr(load(tmp_path, "", "--train.steps", "1", *row.family), row.section), row.key)
    default = 1 if (row.section, row.key) == ("train", "steps") else row.default
    assert (resolved, type(resolved)) == (default, type(default))
    assert field.default == row.default
    assert keys.values_of(field.annotation) == row.values
    assert keys.bounds_of(field) == row.bounds


def refusal(tmp_path: Path, row: keys.Key, value: float | str) -> str:
    """Why a value is refused by itself; '' if it is not, whatever else it contradicts."""
    toml = "" if row.section == "train" else "[train]\nsteps = 1"
    try:
        load(tmp_path, toml, *row.family, f"{row.option}={value}")
    except ConfigError as refused:
        return str(refused) if str(refused).startswith(f"{row.option}: ") else ""
    return ""


NUMBERS = [(row, sign, limit) for row in TABLE for sign, limit in row.bounds if not sign.startswith("length")]


@pytest.mark.parametrize(("row", "sign", "limit"), NUMBERS, ids=lambda one: getattr(one, "option", str(one)))
def test_a_number_is_taken_up_to_its_bound_and_the_next_one_is_refused_with_its_key(
    tmp_path: Path, row: keys.Key, sign: str, limit: float
):
    def beside(direction: int) -> float:
        return int(limit) + direction if row.values == "int" else math.nextafter(limit, direction * math.inf)

    bound = int(limit) if row.values == "int" else limit
    outwards = 1 if sign.startswith("<") else -1
    inside, outside = (bound, beside(outwards)) if sign.endswith("=") else (beside(-outwards), bound)
    assert refusal(tmp_path, row, inside) == ""
    assert refusal(tmp_path, row, outside).startswith(f"{row.option}: Input should be ")


@pytest.mark.parametrize("row", [row for row in TABLE if '"' in row.values], ids=lambda row: row.option)
def test_each_choice_is_taken_and_no_other(tmp_path: Path, row: keys.Key):
    listed = row.values.startswith("list of ")
    choices = row.values.removeprefix("list of ").replace("bool", "true | false").replace('"', "").split(" | ")
    assert [refusal(tmp_path, row, f'["{choice}"]' if listed else choice) for choice in choices] == [""] * len(choices)
    expected = f"expected {'a list of ' if listed else ''}{' or '.join(choices)}"
    assert f"{expected}, got 'neither'" in refusal(tmp_path, row, '["neither"]' if listed else "neither")


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("[optim]\nlearning_rte = 1.0", "unknown key 'learning_rte' in [optim]; did you mean [optim] lr?"),
        ("[optim]\nclip-grad = 1.0", "unknown key 'clip-grad' in [optim]; did you mean [optim] clip_grad?"),
        ("[model]\nhiden_size = 1", "unknown key 'hiden_size' in [model]; did you mean [model] hidden_size?"),
        ("[modle]\nn_layers = 2\nhiden_size = 4", "test.toml: unknown section [modle]; did you mean [model]?\n"),
        ("[modle]\nhiden_size = 4", "unknown key 'hiden_size' in [model]; did you mean [model] hidden_size?"),
        ("[training]\nlr = 4.0", "unknown section [training]; did you mean [train]?"),
        ("[run]\ndri = 'x'", "unknown key 'dri' in [run]; did you mean [run] dir?"),
        ("[model]\ntop_k = 2", "did you mean [model] experts_per_token? For name = 'moe'"),
        ("[profile]\nsteps = 5", "[profile] steps: expected a list, got 5 ([first, last]: trace these steps"),
        ("[optimm]", "unknown section [optimm]; did you mean [optim]?"),
        ("[zzz]", "unknown section [zzz]; the sections are run, model, data"),
        (
            "[log]\nzzz = 1",
            "unknown key 'zzz' in [log]; no key has a name like it; [log] has interval, ranks, slow_steps",
        ),
        ("steps = 1", "'steps' stands outside any section, expected [section] tables; did you mean [train] steps"),
        ("[train]\nsteps = 1\n[train]", "is not TOML"),
        ("[model]\nx = 1\n[optim]\nlr = 1.0", "test.toml: unknown key 'x' in [model]; no key has a name like it"),
        (
            "[model]\nname = 'hf'\nhidden_sze = 1",
            "unknown key 'hidden_sze' in [model]; did you mean [model] hidden_size",
        ),
        ("[model]\nn_kv_head = 2", "in [model]; did you mean [model] n_kv_heads? For name = 'llama'"),
        ("[model]\nname = 't5'\nlayernorm_eps = 1e-5", "in [model]; did you mean [model] norm_eps?"),
        ("[train]\nlora_r = 8", "unknown key 'lora_r' in [train]; did you mean [lora] rank"),
    ],
)
def test_a_key_that_does_not_exist_is_an_error_with_the_key_that_was_meant(tmp_path: Path, toml: str, words: str):
    with pytest.raises(ConfigError, match=re.escape(words)):
        load(tmp_path, toml)


# Where a user of another trainer would write a key, in the spelling of its documentation, and the key here.
ELSEWHERE = {
    "transformers": """
        train.learning_rate optim.lr   train.max_steps train.steps   optim.adam_beta2 optim.beta2
        optim.learning_rate optim.lr   train.max_grad_norm optim.clip_grad
        train.warmup_ratio optim.warmup_fraction   train.per_device_train_batch_size batch.micro_batch_size
        optim.lr_scheduler_type optim.schedule   train.gradient_accumulation_steps batch.global_batch_size
        train.save_steps checkpoint.interval   train.num_train_epochs train.epochs
        train.logging_steps log.interval   train.save_total_limit checkpoint.keep   train.eval_steps eval.interval
        train.report_to log.trackers   train.bf16 precision.params   train.gradient_checkpointing recompute.mode
        train.resume_from_checkpoint checkpoint.resume   train.output_dir run.dir
        train.dataloader_num_workers data.num_workers   model.num_hidden_layers model.n_layers
        model.num_attention_heads model.n_heads   model.n_embd model.hidden_size
        model.intermediate_size model.ffn_hidden_size   model.initializer_range model.init_std
        model.layer_norm_epsilon model.layer_norm_eps   model.attn_pdrop model.attention_dropout
    """,
    "torchtitan": """
        training.steps train.steps   training.seq_len data.seq_len   optimizer.lr optim.lr
        training.local_batch_size batch.micro_batch_size   training.max_norm optim.clip_grad
        training.mixed_precision_param precision.params   training.compile compile.enable
        lr_scheduler.warmup_steps optim.warmup   lr_scheduler.lr_min optim.min_lr   metrics.log_freq log.interval
        parallelism.tensor_parallel_degree mesh.tp   parallelism.data_parallel_shard_degree mesh.dp_shard
        parallelism.pipeline_parallel_schedule pipeline.schedule   checkpoint.folder checkpoint.dir
        checkpoint.keep_latest_k checkpoint.keep   activation_checkpoint.mode recompute.mode
        job.dump_folder run.dir   validation.freq eval.interval   validation.steps eval.steps
    """,
    "Megatron": """
        tensor_model_parallel_size mesh.tp   pipeline-model-parallel-size mesh.pp   train-iters train.steps
        lr-warmup-iters optim.warmup   lr-decay-style optim.schedule   clip-grad optim.clip_grad
        num-layers model.n_layers   num-query-groups model.n_kv_heads   seq-length data.seq_len
        context-parallel-size mesh.cp   save-interval checkpoint.interval   use-distributed-optimizer mesh.dp_shard
        mesh.dp mesh.dp_shard   lr optim.lr   seed run.seed
    """,
    "nanoGPT, nanochat": """
        block_size data.seq_len   max_iters train.steps   grad_clip optim.clip_grad   n_layer model.n_layers
        device-batch-size batch.micro_batch_size   eval_iters eval.steps   total-batch-size batch.global_batch_size
        depth model.n_layers   num-iterations train.steps   eval-every eval.interval   final-lr-frac optim.min_lr
        out_dir run.dir
    """,
    "axolotl, Lightning": """
        sequence_len data.seq_len   val_set_size data.split   gradient_clip_val optim.clip_grad
        optim.batch_size batch.global_batch_size   accumulate_grad_batches batch.global_batch_size
        base_model model.path   wandb_project log.project   max_epochs train.epochs
    """,
}


@pytest.mark.parametrize("trainer", ELSEWHERE)
def test_a_key_of_another_trainer_leads_to_the_key_here(trainer: str):
    words = ELSEWHERE[trainer].split()
    wrong = {}
    for written, key in zip(words[::2], words[1::2], strict=True):
        section, _, k = written.rpartition(".")
        answer = SIMILAR_KEYS.of_key(section, k, {}, option=True)
        if not re.search(rf"did you mean (--\S+ or )*--{re.escape(key)}\b", answer):
            wrong[written] = answer
    assert wrong == {}


@pytest.mark.parametrize("name", [name for name, flag in flags.by_name().items() if flag.same])
def test_a_flag_of_megatrons_leads_to_the_key_that_it_is_translated_to(name: str):
    key = flags.by_name()[name].keys[0]
    assert re.search(rf"--{key}\b", SIMILAR_KEYS.of_key("", name.removeprefix("--"), {}, option=True))


# Words for a unit at any place of a name. A min_lr is no minute, so that the last word of a key has some more.
UNITS = {"percentage": "%", "minutes": "min", "mins": "min", "seconds": "s", "tokens": "tokens", "samples": "samples"}
UNITS |= dict.fromkeys(("ratio", "frac", "fraction"), "share")
OF_KEYS = {"s": "s", "min": "min", "prob": "share"}


def test_a_synonym_in_another_unit_than_its_key_says_so():
    others = []
    for synonym in read_synonyms()[0]:
        words = [key.partition(".")[2].split("_") for key in synonym.keys.split()]
        of_keys = {UNITS.get(word) for key in words for word in key} | {OF_KEYS.get(key[-1]) for key in words}
        for name in synonym.names.split():
            units = {UNITS[word] for word in name.split("_") if word in UNITS}
            others += [(name, synonym.how)] if words and not units <= of_keys else []
    assert [name for name, how in others if not how] == []
    assert ("distributed_timeout_minutes", "in seconds") in others


def test_every_synonym_stands_once_leads_to_declared_keys_and_is_no_key_of_its_section_itself():
    declared_keys = {f"{row.section}.{row.key}" for row in TABLE}
    synonyms, sections = read_synonyms()
    names = [name for synonym in synonyms for name in synonym.names.split()]
    assert len(names) == len(set(names)) > 120
    for synonym in synonyms:
        assert set(synonym.keys.split()) <= declared_keys
        assert synonym.keys or synonym.how
        assert not declared_keys & set(synonym.names.split())
    assert set(sections.values()) <= set(Config.model_fields)


def test_a_configuration_of_another_trainer_is_answered_whole(tmp_path: Path):
    theirs = """
        learning_rate = 3e-4
        [training]
        max_steps = 100
        seq_len = 8
        [parallel]
        tp = 2
        [optim]
        min_lr_ratio = 0.1
    """
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, theirs, "--mesh.dp", "2")
    answers = [line.partition("did you mean ")[2].partition("?")[0] for line in str(refused.value).splitlines()]
    assert answers == [
        "[optim] lr",
        "[train]",
        "[train] steps",
        "[data] seq_len",
        "[mesh]",
        "[optim] min_lr",
        "--mesh.dp_shard or --mesh.dp_replicate",
    ]


def test_of_any_number_of_unknown_keys_the_first_fifty_are_answered(tmp_path: Path):
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, "[optim]\n" + "\n".join(f"unknown{i} = 1" for i in range(1000)))
    assert len(str(refused.value).splitlines()) == 50


def test_an_option_without_a_section_is_answered_with_the_option_that_has_one():
    with pytest.raises(
        ConfigError, match=re.escape("'--learning_rate', which has no section; did you mean --optim.lr?")
    ):
        config.load(["--learning_rate", "1e-3"])


@pytest.mark.parametrize(
    ("toml", "overrides", "words"),
    [
        (
            "[model]\npath = 'x'",
            [],
            "test.toml: key 'path' in [model] is for name = 'hf', not for 'bloom'",
        ),
        (
            "",
            ["--model.path", "x"],
            "--model.path: key 'path' in [model] is for name = 'hf', not for 'bloom'",
        ),
        (
            "[model]\nname = 'hf'\napply_residual_connection_post_layernorm = true",
            [],
            "key 'apply_residual_connection_post_layernorm' in [model] is for name = 'bloom' or 'bert', not for 'hf'",
        ),
        ("[model]\nz_loss = 1e-4", ["--model.name", "hf"], "test.toml: key 'z_loss' in [model] is for name = 'bloom'"),
        ("", ["--model.z_loss", "0.0", "--model.name", "hf"], "--model.z_loss: key 'z_loss' in [model] is for name = "),
        ("[model]\nname = 3", [], f"test.toml: [model] name: expected {NAMES}, got 3"),
        ("[model]\nname = ['hf']", [], f"test.toml: [model] name: expected {NAMES}, got ['hf']"),
    ],
)
def test_a_key_of_another_family_is_refused_with_whose_it_is(
    tmp_path: Path, toml: str, overrides: list[str], words: str
):
    with pytest.raises(ConfigError, match=re.escape(words)):
        load(tmp_path, toml, "--train.steps", "1", *overrides)


@pytest.mark.parametrize(
    "argv", [["--model.path", "x", "--model.name", "hf"], ["--model.name=bloom", '--model.name="hf"', "--model.path=x"]]
)
def test_keys_of_a_family_may_come_before_its_name(tmp_path: Path, argv: list[str]):
    assert load(tmp_path, "[model]\nname = 'bloom'", "--train.steps", "1", *argv).model == TransformersKeys(path="x")


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ('[eval]\nsteps = "1"', r"[eval] steps: Input should be a valid integer, got '1'"),
        ("[eval]\nsteps = 1.0", r"[eval] steps: Input should be a valid integer, got 1.0"),
        ("[eval]\nsteps = true", r"[eval] steps: Input should be a valid integer, got True"),
        ('[optim]\nlr = "1e-3"', r"[optim] lr: Input should be a valid number, got '1e-3'"),
        ("[log]\ntensorboard = 1", r"[log] tensorboard: Input should be a valid boolean, got 1"),
        ("[run]\ndir = 1", r"[run] dir: Input should be a valid string, got 1"),
        ("[batch]\nrampup = [1.5, 1, 1]", r"[batch] rampup: Input should be a valid integer, got 1.5"),
        ('[precision]\nreduce = "int8"', r"[precision] reduce: expected float32 or bfloat16, got 'int8'"),
    ],
)
def test_a_value_of_another_type_is_an_error_with_its_key_and_the_value(tmp_path: Path, toml: str, words: str):
    with pytest.raises(ConfigError, match=re.escape(words)):
        load(tmp_path, toml)


@pytest.mark.parametrize("number", ["inf", "-inf", "nan"])
def test_a_number_that_is_not_finite_is_refused_with_its_key(tmp_path: Path, number: str):
    with pytest.raises(ConfigError, match=r"^--optim\.lr: Input should be a finite number"):
        load(tmp_path, "", "--train.steps=1", f"--optim.lr={number}")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["--model.n_heads=7"], "n_heads=7 does not divide hidden_size=256 ([model] n_heads, [model] hidden_size)"),
        (["--optim.min_lr=1.0"], "min_lr=1.0 is above lr=0.001"),
        (["--optim.warmup=10", "--optim.decay=10"], "decay=10 does not come after warmup=10"),
        (["--batch.micro_batch_size=3"], "micro_batch_size=3 does not divide 16"),
        (["--batch.rampup=[8, 3, 100]"], "(16 - 8) % 3 = 2, expected 0"),
        (["--batch.rampup=[32, 8, 100]"], "expected 0 and start <= global_batch_size"),
        *(
            ([f"--batch.rampup={rampup}"], f"three positive integers [start, increment, samples], got {rampup}")
            for rampup in ("[0, 8, 100]", "[8, 0, 100]", "[8, 8, 0]", "[8, 8, 100, 1]")
        ),
        (["--batch.micro_batch_size=8", "--batch.rampup=[8, 4, 100]"], "micro_batch_size=8 does not divide 12"),
        (["--batch.rampup=[8, 8]"], "three positive integers [start, increment, samples], got [8, 8]"),
        *(
            (
                [f"--train.{k}={n}" for k, n in lengths.items()],
                "exactly one of [train] steps, samples, tokens, epochs must be",
            )
            for lengths in ({"samples": 100}, {"tokens": 9999}, {"steps": 0}, {"steps": 0, "samples": 16, "tokens": 1})
        ),
        (
            ["--train.steps=0", "--train.tokens=4095"],
            "test.toml with --train.tokens 4095: the run is shorter than one step of 16 sequences x "
            "256 tokens ([train] samples=0, tokens=4095 or epochs=0",
        ),
        (["--train.steps=0", "--train.samples=15"], "the run is shorter than one step of 16 sequences"),
        (["--data.weights=[1.0, 2.0]"], "[data] weights needs 1 positive numbers"),
        (["--data.weights=[0.0]"], "one per [data] path, got [0.0]"),
        (['--data.path=["a", "b"]', "--data.weights=[1.0]"], "[data] weights needs 2 positive numbers"),
        (["--data.split=1,2"], "[data] split is three weights 'train,valid,test' with train > 0, got '1,2'"),
        (["--data.split=1,2,3,4"], "[data] split is three weights"),
        (["--data.split=all,1,1"], "[data] split is three weights"),
        (["--data.split=0,1,1"], "with train > 0"),
        (["--data.split=1,-1,1"], "[data] split is three weights"),
        (["--data.split=nan,1,1"], "[data] split is three weights"),
        (["--data.split=1,inf,1"], "[data] split is three weights"),
        (
            ["--optim.schedule=wsd", "--optim.warmup=4", "--optim.decay=10", "--optim.wsd_decay=7"],
            "wsd_decay=7 does not fit between the warm-up and the end of the schedule: 10 - 4 = 6 steps",
        ),
        (
            *[["--optim.schedule=wsd", "--optim.unit=samples", "--train.steps=2", "--optim.wsd_decay=33"]],
            "wsd_decay=33 does not fit between the warm-up and the end of the schedule: 32 - 0 = 32 samples",
        ),
    ],
)
def test_keys_that_contradict_are_an_error_with_both_sides(tmp_path: Path, overrides: list[str], words: str):
    with pytest.raises(ConfigError, match=re.escape(words)):
        load(tmp_path, "", "--train.steps=1", *overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["--model.n_heads=256"],
        ["--model.name=hf", "--model.n_heads=7"],  # the sizes of an HF model are its directory's
        ["--optim.min_lr=0.001"],
        ["--optim.warmup=10", "--optim.decay=11"],
        ["--optim.warmup=10", "--optim.decay=0"],
        ["--batch.micro_batch_size=16"],
        ["--batch.micro_batch_size=0", "--batch.rampup=[1, 5, 100]"],
        ["--batch.rampup=[16, 8, 1]"],
        ["--batch.micro_batch_size=4", "--batch.rampup=[8, 4, 100]"],
        ["--batch.micro_batch_size=1", "--batch.rampup=[1, 1, 1]"],
        ["--train.steps=0", "--train.tokens=4096"],
        ["--train.steps=0", "--train.samples=16"],
        ['--data.path=["a", "b"]', "--data.weights=[1e-9, 2.0]"],
        ["--data.split=1e-9,0,0"],
        ["--optim.schedule=wsd", "--optim.warmup=4", "--optim.decay=10", "--optim.wsd_decay=6"],
        ["--optim.schedule=wsd", "--train.steps=4", "--optim.warmup=4", "--optim.wsd_decay=1"],  # all of it warm-up
        ["--optim.schedule=cosine", "--optim.warmup=4", "--optim.decay=10", "--optim.wsd_decay=7"],
    ],
)
def test_keys_that_just_do_not_contradict_are_taken(tmp_path: Path, overrides: list[str]):
    load(tmp_path, "", "--train.steps=1", *overrides)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "--config is missing"),
        (["--config"], "--config needs a value"),
        (["--config", "no-such"], "no such file"),
        (["steps=1"], "cannot read argument 'steps'"),
        (["--steps", "1"], "cannot read argument '--steps'"),
        (["--config", "x", "--train.steps"], "--train.steps needs a value"),
        (["--config", "hf", "--config=bloom.toml"], "--config is given twice, 'hf' and 'bloom.toml'"),
        (["-h", "optimizer"], "--help optimizer: expected a section, one of run, model, data, batch, optim, train,"),
    ],
)
def test_an_argument_that_cannot_be_read_is_an_error_with_the_argument(argv: list[str], words: str):
    with pytest.raises(ConfigError, match=re.escape(words)):
        config.load(argv)


def test_an_override_of_another_type_is_an_error_with_its_text(tmp_path: Path):
    with pytest.raises(ConfigError, match=re.escape("--optim.lr: Input should be a valid number, got 'fast'")):
        load(tmp_path, "", "--train.steps=1", "--optim.lr=fast")


def test_a_file_that_does_not_say_how_long_to_train_is_an_error_with_the_keys(tmp_path: Path):
    with pytest.raises(
        ConfigError, match=r"test\.toml: exactly one of \[train\] steps, samples, tokens, epochs must be positive"
    ):
        load(tmp_path, "", "--run.seed=1")


def test_keys_of_the_file_and_of_the_command_line_that_contradict_name_both(tmp_path: Path):
    words = "test.toml with --model.n_heads 7: n_heads=7 does not divide hidden_size=64"
    with pytest.raises(ConfigError, match=re.escape(words)):
        load(tmp_path, "[model]\nhidden_size = 64", "--model.n_heads=7", "--train.steps=1")


def test_an_option_of_another_section_is_not_named_though_its_key_has_the_same_name(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"test\.toml with --train\.steps 1 --train\.samples 9: exactly one of"):
        load(tmp_path, "", "--train.steps=1", "--eval.steps=2", "--train.samples=9", "--train.max_skipped=3")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("--log.tensorboard=False", "--log.tensorboard: Input should be a valid boolean, got 'False'; write false"),
        ("--compile.enable=False", "--compile.enable: expected auto or true or false, got 'False'; write false"),
        ("--run.dir=", "--run.dir: String should have at least 1 character, got ''"),
        (
            "--data.validation=a,b",
            """--data.validation: expected a list, got 'a,b'; write --data.validation '["a", "b"]' """
            "(additional validation sets, each with its own loss: 'NAME=PREFIX', or mixtures as in train)",
        ),
        (
            "--data.weights=0.3,1",
            "--data.weights: expected a list, got '0.3,1'; write --data.weights '[0.3, 1]' "
            "(one positive weight per path, normalised; empty = proportional to the number of tokens)",
        ),
        (
            "--train.samples=99999999999999999999",
            "--train.samples: expected an integer of at most 9007199254740992, got 99999999999999999999",
        ),
        ("--data.num_workers=999", "--data.num_workers: Input should be less than or equal to 64, got 999"),
    ],
)
def test_what_is_easily_written_is_one_line_that_says_what_to_write(tmp_path: Path, override: str, words: str):
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, "", "--train.steps=1", override)
    assert str(refused.value) == words


def test_every_wrong_key_is_said_on_a_line_of_its_own_and_where_it_came_from(tmp_path: Path):
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, "[optim]\nlr = -1.0\neps = 'x'", "--train.steps=1", "--optim.beta1=2.0")
    assert [line.rpartition("test.toml")[2].partition(" Input")[0] for line in str(refused.value).splitlines()] == [
        ": [optim] lr:",
        "--optim.beta1:",
        ": [optim] eps:",
    ]


@pytest.mark.parametrize(
    ("content", "words"), [(b"\xff = 1", "is not TOML: 'utf-8'"), (None, "cannot be read: Is a d")]
)
def test_a_file_that_is_no_text_is_an_error_with_its_name(tmp_path: Path, content: bytes | None, words: str):
    path = tmp_path
    if content is not None:
        path = tmp_path / "binary.toml"
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"^{re.escape(f'{path} {words}')}"):
        config.read(path)


def test_python_booleans_in_a_file_are_refused_with_those_of_toml(tmp_path: Path):
    with pytest.raises(ConfigError, match="TOML writes true and false in small letters"):
        load(tmp_path, "[log]\ntensorboard = False")


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("path = data/mine  # of mine", 'a string stands in quotes: path = "data/mine"'),
        ("tokenizer = stdlib-8k", 'a string stands in quotes: tokenizer = "stdlib-8k"'),
        ("path = [data/a, data/b]", 'strings of a list stand in quotes: path = ["data/a", "data/b"]'),
        ('path = ["data/a", b]', 'strings of a list stand in quotes: path = ["data/a", "b"]'),
        ("weights = [0.5, 0.5", ""),
        ("seq_len = 1x", ""),
    ],
)
def test_a_string_without_quotes_is_refused_with_how_it_is_written(tmp_path: Path, line: str, hint: str):
    with pytest.raises(ConfigError, match=r"is not TOML: .*at ") as refused:
        load(tmp_path, f"[data]\n{line}")
    assert str(refused.value).partition("; ")[2] == hint


DEEP = "[" * 5000


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        (f"[optim]\nlr = {DEEP}", "is not TOML: expected at most 64 levels"),
        (f"[{'a.' * 5000}a]", "is not TOML: expected at most 64 levels"),
        (f"[train]\nsteps = {'9' * 5000}", "is not TOML: Exceeds the limit"),
        ("[optim]\nlr = 2020-01-01", "[optim] lr: Input should be a valid number, got datetime.date(2020, 1, 1)"),
        ("[[optim]]\nlr = 1.0", "'optim' stands outside any section"),
        (f"[optim]\nlr = '{'x' * 5000}'", "got '" + "x" * 199 + "\0"),
    ],
)
def test_a_file_that_is_deep_long_or_mistyped_is_one_short_line(tmp_path: Path, toml: str, words: str):
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, toml)
    assert words.removesuffix("\0") in str(refused.value)
    assert len(str(refused.value)) < 500
    assert str(refused.value).isprintable()


def test_a_deep_override_is_one_short_line(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"^--optim.lr: Input should be a valid number, got '\[\[\["):
        load(tmp_path, "", "--train.steps=1", f"--optim.lr={DEEP}")


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b"])
def test_a_name_that_no_file_can_have_is_an_error_with_its_option(name: str):
    with pytest.raises(ConfigError, match=r"^--config "):
        config.load(["--config", name])


def test_a_byte_order_mark_is_not_part_of_the_file(tmp_path: Path):
    assert load(tmp_path, "\ufeff[optim]\nlr = 0.5").optim.lr == 0.5


def test_an_override_of_an_unknown_key_is_an_error_with_its_flag(tmp_path: Path):
    with pytest.raises(
        ConfigError, match=re.escape("--train.step: unknown key 'step' in [train]; did you mean --train.steps?")
    ):
        load(tmp_path, "", "--train.step", "1")


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("--train.steps=7", 7),
        ("--optim.lr=1e-3", 1e-3),
        ("--optim.lr=1", 1.0),
        ("--log.tensorboard=false", False),
        ("--compile.enable=auto", "auto"),
        ("--compile.enable=true", True),
        ("--batch.rampup=[8, 8, 100]", [8, 8, 100]),
        ("--data.path=a/b", "a/b"),
        ('--data.path=["a", "b"]', ["a", "b"]),
        ("--run.dir=123", "123"),
        ("--eval.prompt=", ""),
        ("--eval.prompt=a=b", "a=b"),
    ],
)
def test_an_override_is_read_as_the_type_of_its_key(tmp_path: Path, override: str, value: Any):
    section, k = override[2:].split("=")[0].split(".")
    result = getattr(getattr(load(tmp_path, "", "--train.steps=7", override), section), k)
    assert (result, type(result)) == (value, type(value))


def test_the_last_override_wins_over_the_file(tmp_path: Path):
    assert load(tmp_path, "[train]\nsteps = 1", "--train.steps", "2", "--train.steps=3").train.steps == 3


def test_a_bare_name_is_found_under_configs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    assert config.load(["--config", "bloom-560m"]) == config.load(["--config", "bloom-560m.toml"])


def test_a_file_is_taken_before_one_of_that_name_under_configs(monkeypatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bloom.toml").write_text("[train]\nsteps = 7")
    assert config.load(["--config", "bloom.toml"]).train.steps == 7
    with pytest.raises(ConfigError, match=r"there: .*bloom-176b\.toml, bloom-1b1\.toml, .*bloom\.toml, .*hf\.toml.*\)"):
        config.load(["--config", "mamba"])


def test_a_resolved_config_loads_as_an_equal_one(tmp_path: Path):
    original = load(
        tmp_path,
        '[data]\npath = ["a", "b"]\nweights = [0.1, 0.9]\n[eval]\nprompt = """quote " and\nnewline é"""',
        *("--optim.lr=0.0003", "--batch.rampup=[8, 8, 100]", "--train.samples=1000", "--compile.enable=false"),
    )
    assert load(tmp_path, original.to_toml(), "--run.seed=1234") == original


@pytest.fixture(params=["--help", "-h"])
def printed_help(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as exit:
        config.load(["--config", "bloom", request.param])
    assert exit.value.code == 0
    return capsys.readouterr().out


def help_of(printed: str, title: str, section: str, k: str) -> tuple[str, str]:
    """The text behind an option of a group, and the lines below it as one."""
    (group,) = re.findall(rf"(?ms)^{re.escape(title)}\n(.*?)^\n", f"{printed}\n\n")
    found = re.search(rf"(?m)^  --{section}\.{k} (.*)\n((?:      .*\n)+)", group)
    assert found, f"--{section}.{k}"
    return found[1], " ".join(found[2].split())


def test_help_lists_every_key_with_its_default_and_its_line(printed_help: str):
    for section, title, fields in help.groups_of(Config):
        for k, field in fields.items():
            default, line = help_of(printed_help, title, section, k)
            assert tomli.loads(f"v = {default}")["v"] == field.default
            assert field.description is not None
            assert line.startswith(field.description)


def test_help_says_what_a_choice_may_be_and_of_nothing_else(printed_help: str):
    for row in TABLE:
        choices = (
            row.values.removeprefix("list of ").replace(" | ", ", ").replace('"', "").replace("bool", "true, false")
        )
        how_many = "any" if row.values.startswith("list") else "one"
        said = help_of(printed_help, row.title, row.section, row.key)[1].partition(f"; {how_many} of ")[2]
        assert said == (choices if '"' in row.values else "")


@pytest.mark.parametrize("argv", [["-h", "model"], ["--config", "bloom", "--help", "model"]])
def test_help_of_a_section_is_its_part_of_the_whole_help(argv: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit:
        config.load(argv)
    assert exit.value.code == 0
    printed = capsys.readouterr().out
    assert set(re.findall(r"(?m)^\[(\w+)\]", printed)) == {"model"}
    assert printed in config.help_text()


EXCLUDED = {
    "--train.steps 20": ("[train]\nepochs = 3", "--train.steps replaces epochs = 3 of {} ([train] epochs)"),
    "--train.epochs 2": ("[train]\nsteps = 9\nsamples = 0", "--train.epochs replaces steps = 9 of {} ([train] steps)"),
    "--train.steps 9 --data.train 'a: 1 0:1 x'": (
        "[data]\nsplit = '9,1,0'\nweights = []",
        "--data.train replaces split = '9,1,0' of {} ([data] split)",
    ),
    "--train.steps 9 --data.path x": (
        "[data]\ntrain = 'a: 1 0:1 y'\ntest = ''",
        "--data.path replaces train = 'a: 1 0:1 y' of {} ([data] train)",
    ),
    "--train.steps 9 --optim.warmup 2": (
        "[optim]\nwarmup_fraction = 0.1",
        "--optim.warmup replaces warmup_fraction = 0.1 of {} ([optim] warmup_fraction)",
    ),
    "--train.steps 9 --optim.warmup_fraction 0.5": (
        "[optim]\nwarmup = 7",
        "--optim.warmup_fraction replaces warmup = 7 of {} ([optim] warmup)",
    ),
    "--train.steps 9 --optim.name sgd": (
        "[optim]\nbeta2 = 0.9",
        "--optim.name replaces beta2 = 0.9 of {} ([optim] beta2)",
    ),
    "--train.steps 9 --lora.rank 0": (
        "[lora]\nrank = 4\nalpha = 8.0",
        "--lora.rank replaces alpha = 8.0 of {} ([lora] alpha)",
    ),
    "--train.steps 9 --recompute.mode none": (
        "[recompute]\nmode = 'full'\nlayers = 2",
        "--recompute.mode replaces layers = 2 of {} ([recompute] layers)",
    ),
    "--train.steps 9 --precision.params bfloat16": (
        "[precision]\nparams = 'float16'\nhysteresis = 3",
        "--precision.params replaces hysteresis = 3 of {} ([precision] hysteresis)",
    ),
}


@pytest.mark.parametrize("options", EXCLUDED)
def test_an_option_replaces_the_keys_of_the_file_that_exclude_it_and_a_line_says_so(tmp_path: Path, options: str):
    toml, line = EXCLUDED[options]
    words = shlex.split(options)
    cfg = load(tmp_path, toml, *words)
    assert cfg.replaced == (line.format(tmp_path / "test.toml"),)
    alone = load(tmp_path, "", *words)
    section = words[-2][2:].partition(".")[0]
    assert getattr(cfg, section) == getattr(alone, section)


@pytest.mark.parametrize(
    ("toml", "options"),
    [
        ("", ["--train.steps=2", "--train.epochs=2"]),
        ("[train]\nsamples = 9", ["--train.steps=2", "--train.epochs=2"]),
        ("", ["--train.steps=2", "--data.train=a: 1 0:1 x", "--data.split=1,1,1"]),
        ("", ["--train.steps=2", "--optim.warmup=2", "--optim.warmup_fraction=0.1"]),
        ("[optim]\nname = 'sgd'", ["--train.steps=2", "--optim.beta2=0.9"]),
        ("[train]\nsteps = 2\nepochs = 2", ["--run.seed=1"]),
    ],
)
def test_keys_that_exclude_each_other_in_one_place_are_refused(tmp_path: Path, toml: str, options: list[str]):
    with pytest.raises(ConfigError):
        load(tmp_path, toml, *options)


def test_a_warm_up_of_0_steps_is_none_whatever_fraction_the_file_has(tmp_path: Path):
    cfg = load(tmp_path, "[optim]\nwarmup_fraction = 0.1", "--train.steps=100", "--optim.warmup=0")
    assert cfg.optim.warmup_until(100) == 0


def test_an_unknown_section_is_named_once_whatever_known_keys_it_has(tmp_path: Path):
    with pytest.raises(ConfigError) as refusal:
        load(tmp_path, "[modle]\nn_layers = 2\nhidden_size = 4\n[train]\nsteps = 1")
    assert len(str(refusal.value).splitlines()) == 1


@pytest.mark.parametrize(("name", "meant"), [("llama3-8b.toml", "llama-3-8b.toml"), ("blom", "bloom.toml")])
def test_a_file_that_does_not_exist_is_an_error_with_the_nearest_name_only(name: str, meant: str):
    with pytest.raises(ConfigError, match=rf"did you mean {meant}( or \S+)*\?$"):
        config.load(["--config", name])


def test_help_fits_into_80_columns(printed_help: str):
    assert max(len(line) for line in printed_help.splitlines()) <= 80


RAMPS = [(192, 16, 9_765_625, 2048), (192, 32, 9_765_625, 512), (8, 8, 100, 64), (16, 16, 7, 16), (4, 4, 1, 12)]


@pytest.mark.parametrize(("start", "increment", "samples", "full"), RAMPS)
def test_the_ramp_is_a_staircase_of_equal_stretches_of_samples(start: int, increment: int, samples: int, full: int):
    batch = Batch(micro_batch_size=1, global_batch_size=full, rampup=[start, increment, samples])
    stairs = range(start, full + 1, increment)
    consumed = {0, 1, samples - 1, samples, samples + 1, 10 * samples, *range(0, samples, max(1, samples // 997))}
    for n in consumed:
        # The stair whose stretch [i, i + 1) * samples / (stairs - 1) contains n; the last one has no end.
        stretches = [i for i in range(len(stairs)) if n * (len(stairs) - 1) >= i * samples]
        assert batch.size_at(n) == stairs[stretches[-1]]


def bloom() -> Config:
    batch = Batch(micro_batch_size=1, global_batch_size=2048, rampup=[192, 16, 9_765_625])
    return Config(batch=batch, data=Data(seq_len=2048), train=Train(samples=220_000_000))


def test_blooms_ramp_has_consumed_what_its_log_says():
    # bigscience train/tr11-176B-ml/chronicles.md: "iteration 12695/ 115311 | consumed samples: 9841584"
    batch, consumed = bloom().batch, 0
    for _ in range(12_695):
        consumed += batch.size_at(consumed)
    assert consumed == 9_841_584


def test_blooms_run_has_the_steps_its_log_says():
    assert bloom().end(0, 0).steps == 115_311


@pytest.mark.parametrize("total", [16, 17, 99, 100, 101, 160, 161, 5000])
@pytest.mark.parametrize("rampup", [[], [16, 16, 100], [16, 8, 160], [32, 32, 5], [8, 8, 57]])
def test_steps_are_those_of_taking_batches_until_one_no_longer_fits(rampup: list[int], total: int):
    batch = Batch(micro_batch_size=8, global_batch_size=64, rampup=rampup)
    steps = consumed = 0
    while consumed + batch.size_at(consumed) <= total:
        consumed += batch.size_at(consumed)
        steps += 1
    if steps:
        assert Config(batch=batch, train=Train(samples=total)).end(0, 0) == (steps, consumed)
    else:
        with pytest.raises(ValueError, match="shorter than one step"):
            Config(batch=batch, train=Train(samples=total))


CHANGED = Batch(micro_batch_size=1, global_batch_size=24, rampup=[4, 5, 30])


@pytest.mark.parametrize("train", [Train(steps=23), Train(samples=301), Train(samples=40)])
@pytest.mark.parametrize("done", [0, 1, 4, 23])
def test_a_run_that_goes_on_with_another_batch_ends_where_taking_such_batches_ends(train: Train, done: int):
    cfg = Config(batch=CHANGED, train=train)
    steps, samples = done, done * 7  # of 7 sequences until then
    while steps < (train.steps or 999) and samples + CHANGED.size_at(samples) <= (train.samples or 9999):
        assert cfg.end(done, done * 7) == cfg.end(steps, samples)
        samples += CHANGED.size_at(samples)
        steps += 1
    assert cfg.end(done, done * 7) == (steps, samples)


def test_a_run_stopped_at_half_its_samples_has_the_other_half_left_with_twice_the_batch():
    cfg = Config(batch=Batch(micro_batch_size=1, global_batch_size=8), train=Train(samples=80))
    assert cfg.end(10, 40) == (15, 80)


def test_the_end_of_a_ramp_of_a_quadrillion_samples_is_a_formula():
    long = 10**15
    batch = Batch(micro_batch_size=1, global_batch_size=3, rampup=[1, 1, 2 * long])
    # `long` samples one at a time, as many two at a time, then three at a time.
    expected = long + long // 2 + 100
    assert Config(batch=batch, train=Train(samples=2 * long + 300)).end(0, 0) == (expected, 2 * long + 300)


def test_a_run_in_epochs_has_the_whole_batches_of_their_samples():
    cfg = Config(batch=Batch(micro_batch_size=1, global_batch_size=8), train=Train(epochs=3))
    complete = cfg.completed(lambda epochs: 15 * epochs)
    assert complete.end(0, 0) == (5, 40)
    with pytest.raises(ValueError, match="only the data tells how many samples 3 epochs have"):
        cfg.end(0, 0)
    with pytest.raises(ValueError, match="the run is shorter than one step of 8 sequences"):
        cfg.completed(lambda epochs: 2 * epochs)
    assert Config(train=Train(steps=3)).completed(lambda epochs: 0) == Config(train=Train(steps=3))


@pytest.mark.parametrize(("tokens", "steps"), [(16_000, 10), (15_999, 9), (17_599, 10)])
def test_a_run_in_tokens_ends_with_the_last_step_whose_tokens_fit(tokens: int, steps: int):
    cfg = Config(data=Data(seq_len=100), batch=Batch(global_batch_size=16), train=Train(tokens=tokens))
    assert cfg.end(0, 0) == (steps, 16 * steps)


def test_a_section_cannot_be_changed_once_it_is_made():
    with pytest.raises(ValueError, match="frozen"):
        Optim().lr = 1.0


def test_the_feed_forward_is_four_times_as_wide_as_the_model_unless_said():
    assert (BloomKeys(hidden_size=64).ffn, BloomKeys(hidden_size=64, ffn_hidden_size=100).ffn) == (256, 100)


def test_other_sizes_follow_from_those_that_are_said():
    model = BloomKeys(hidden_size=64, n_heads=4, vocab_size=257, pad_vocab_to_multiple=128)
    assert (model.head_dim, model.padded_vocab_size) == (16, 384)
    assert BloomKeys(vocab_size=256, pad_vocab_to_multiple=128).padded_vocab_size == 256
    assert Data(split="8,1.5,0").split_weights == (8.0, 1.5, 0.0)
    assert (Data(path="a").paths, Data(path=["a", "b"]).paths) == (["a"], ["a", "b"])


@pytest.mark.parametrize(("unit", "expected"), [("steps", 3), ("samples", 50), ("tokens", 50 * 100)])
def test_progress_is_counted_in_the_unit_of_the_schedule(unit: Any, expected: int):
    cfg = Config(data=Data(seq_len=100), optim=Optim(unit=unit), train=Train(steps=9))
    assert cfg.progress(3, 50) == expected


def test_a_collective_gives_up_after_twice_the_time_in_which_a_hang_is_noticed():
    assert Run(timeout_s=7.0).collective_timeout_s() == 14.0


PATHS = [
    *("run.dir", "model.init_from", "data.path", "data.tokenizer", "lora.base_path", "train.kill_switch"),
    *("checkpoint.resume", "checkpoint.dir", "pipeline.csv", "pipeline.draw", "model.path"),
]


@pytest.mark.parametrize("option", PATHS)
def test_a_path_that_was_meant_as_a_url_is_refused_with_the_url(option: str):
    with pytest.raises(ConfigError) as refused:
        config.load(["--config", "hf.toml" if option == "model.path" else "bloom.toml", f"--{option}", "s3:/bkt/run"])
    assert str(refused.value).startswith(f"--{option}: expected s3://bkt/run, or ./ before the name of a folder")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("mixture", ["--data.validation=['a=gs:/b']", "--data.validation=['a: 1 0:1 gs:/b']"])
def test_so_is_one_in_a_mixture(mixture: str):
    with pytest.raises(ConfigError, match=r"expected gs://b"):
        config.load(["--config", "bloom.toml", mixture])


def test_the_folders_of_a_run_are_local():
    with pytest.raises(ConfigError, match=r"^--run.dir: expected a local path, got the URL s3://bkt/run$"):
        config.load(["--config", "bloom.toml", "--run.dir", "s3://bkt/run"])


TEXTS = [row for row in TABLE if row.values in ("str", "list of str", "str | list of str")]


@pytest.mark.parametrize("row", TEXTS, ids=lambda row: row.option)
@pytest.mark.parametrize("url", ["memory://user:SECRET@host/x", "https://SECRET@host/x"])
def test_a_url_with_credentials_is_refused_for_every_key_and_not_repeated(tmp_path: Path, row: keys.Key, url: str):
    listed = row.values == "list of str"
    value = f'["{url}"]' if listed else f'"{url}"'
    file, empty = tmp_path / "a.toml", tmp_path / "empty.toml"
    file.write_text(f"[{row.section}]\n{row.key} = {value}\n")
    empty.touch()
    for argv in ([str(file), *row.family], [str(empty), row.option, value if listed else url, *row.family]):
        with pytest.raises(ConfigError, match="expected no URL with credentials") as refused:
            config.load(["--config", *argv])
        assert "SECRET" not in str(refused.value)


@pytest.mark.parametrize(
    "argv",
    [
        ["s3://u:SECRET@b/x"],
        ["--config", "s3://u:SECRET@b/x"],
        ["--config", "bloom.toml", "--run.dri", "s3://u:SECRET@b/x"],
        ["--config", "bloom.toml", "--train.steps", "s3://u:SECRET@b/x"],
        ["--config", "bad.toml"],
    ],
)
def test_no_other_message_repeats_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str]):
    monkeypatch.chdir(tmp_path)
    Path("bad.toml").write_text("[run]\ndir = s3://u:SECRET@b/x\n")
    with pytest.raises(ConfigError) as refused:
        config.load(argv)
    assert "SECRET" not in str(refused.value)
