"""config.py: what it refuses, and in which words; what it reads; and the arithmetic of batches and steps."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import tomli

from dtmega import config
from dtmega.config import Batch, Config, ConfigError, Data, Model, Optim, Train


def load(tmp_path: Path, toml: str = "", *overrides: str) -> Config:
    path = tmp_path / "test.toml"
    path.write_text(toml)
    return config.load(["--config", str(path), *(overrides or ("--train.steps", "1"))])


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("[optim]\nlearning_rte = 1.0", "unknown key 'learning_rte' in [optim]"),
        ("[model]\nhiden_size = 1", "unknown key 'hiden_size' in [model]; did you mean 'hidden_size'?"),
        ("[optimm]\nlr = 1.0", "unknown section [optimm]; did you mean 'optim'?"),
        ("[log]\nzzz = 1", "unknown key 'zzz' in [log]; known: interval, tensorboard"),
        ("steps = 1", "'steps' stands outside any section"),
        ("[train]\nsteps = 1\n[train]", "is not TOML"),
    ],
)
def test_a_key_that_does_not_exist_is_an_error_with_its_nearest_neighbour(tmp_path: Path, toml: str, words: str):
    with pytest.raises(ConfigError, match=re.escape(words)):
        load(tmp_path, toml)


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
        ('[precision]\nparams = "int8"', r"[precision] params: expected float32 or bfloat16, got 'int8'"),
    ],
)
def test_a_value_of_another_type_is_an_error_with_its_key_and_the_value(tmp_path: Path, toml: str, words: str):
    with pytest.raises(ConfigError, match=re.escape(words)):
        load(tmp_path, toml)


@pytest.mark.parametrize(
    "override",
    [
        "--run.seed=-1",
        "--optim.lr=0.0",
        "--optim.beta2=1.0",
        "--model.hidden_dropout=1.0",
        "--optim.lr=inf",
        "--optim.lr=nan",
    ],
)
def test_a_value_out_of_range_is_an_error_with_its_key(tmp_path: Path, override: str):
    with pytest.raises(ConfigError, match=f"^{override.split('=')[0]}: Input should be"):
        load(tmp_path, "", "--train.steps=1", override)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["--model.n_heads=7"], "n_heads=7 does not divide hidden_size=256 ([model] n_heads, [model] hidden_size)"),
        (["--optim.min_lr=1.0"], "min_lr=1.0 is above lr=0.001"),
        (["--optim.warmup=10", "--optim.decay=5"], "decay=5 does not come after warmup=10"),
        (["--batch.micro_batch_size=3"], "micro_batch_size=3 does not divide 16"),
        (["--batch.rampup=[8, 3, 100]"], "(16 - 8) % 3 = 2, expected 0"),
        (["--batch.rampup=[32, 8, 100]"], "expected 0 and start <= global_batch_size"),
        (["--batch.rampup=[8, 8]"], "three positive integers [start, increment, samples], got [8, 8]"),
        (["--train.samples=100"], "exactly one of [train] steps, samples, tokens must be positive"),
        (["--train.steps=0", "--train.tokens=255"], "the run is shorter than one step"),
        (["--data.weights=[1.0, 2.0]"], "[data] weights needs 1 positive numbers"),
        (["--data.split=1,2"], "[data] split is three weights 'train,valid,test' with train > 0, got '1,2'"),
        (["--data.split=0,1,1"], "with train > 0"),
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
    ("argv", "words"),
    [
        ([], "--config is missing"),
        (["--config"], "--config needs a value"),
        (["--config", "no-such"], "no such file"),
        (["steps=1"], "cannot read argument 'steps'"),
        (["--steps", "1"], "cannot read argument '--steps'"),
        (["--config", "x", "--train.steps"], "--train.steps needs a value"),
    ],
)
def test_an_argument_that_cannot_be_read_is_an_error_with_the_argument(argv: list[str], words: str):
    with pytest.raises(ConfigError, match=re.escape(words)):
        config.load(argv)


def test_an_override_of_another_type_is_an_error_with_its_text(tmp_path: Path):
    with pytest.raises(ConfigError, match=re.escape("--optim.lr: Input should be a valid number, got 'fast'")):
        load(tmp_path, "", "--train.steps=1", "--optim.lr=fast")


def test_keys_of_the_file_and_of_the_command_line_that_contradict_name_both(tmp_path: Path):
    words = "test.toml with --model.n_heads 7: n_heads=7 does not divide hidden_size=64"
    with pytest.raises(ConfigError, match=re.escape(words)):
        load(tmp_path, "[model]\nhidden_size = 64", "--model.n_heads=7", "--train.steps=1")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("--log.tensorboard=False", "--log.tensorboard: Input should be a valid boolean, got 'False'; write false"),
        ("--compile.enable=False", "--compile.enable: expected auto or true or false, got 'False'; write false"),
        ("--run.dir=", "--run.dir: String should have at least 1 character, got ''"),
        ("--data.num_workers=999", "--data.num_workers: Input should be less than or equal to 64, got 999"),
    ],
)
def test_what_is_easily_written_is_one_line_that_says_what_to_write(tmp_path: Path, override: str, words: str):
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, "", "--train.steps=1", override)
    assert str(refused.value) == words


def test_python_booleans_in_a_file_are_refused_with_those_of_toml(tmp_path: Path):
    with pytest.raises(ConfigError, match="TOML writes true and false in small letters"):
        load(tmp_path, "[log]\ntensorboard = False")


DEEP = "[" * 5000


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        (f"[optim]\nlr = {DEEP}", "is not TOML: TOML inline arrays/tables are nested more than"),
        (f"[{'a.' * 5000}a]", "is not TOML: TOML key has more than"),
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
        ConfigError, match=re.escape("--train.step: unknown key 'step' in [train]; did you mean 'steps'?")
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


def test_a_resolved_config_loads_as_an_equal_one(tmp_path: Path):
    original = load(
        tmp_path,
        '[data]\npath = ["a", "b"]\nweights = [0.1, 0.9]\n[eval]\nprompt = """quote " and\nnewline é"""',
        *("--optim.lr=0.0003", "--batch.rampup=[8, 8, 100]", "--train.samples=1000", "--compile.enable=false"),
    )
    assert load(tmp_path, original.to_toml(), "--run.seed=1234") == original


@pytest.fixture
def printed_help(capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as exit:
        config.load(["--help"])
    assert exit.value.code == 0
    return capsys.readouterr().out


def help_of(printed: str, section: str, k: str) -> tuple[str, str]:
    """What stands behind an option, and the lines below it as one."""
    found = re.search(rf"(?m)^  --{section}\.{k} (.*)\n((?:      .*\n)+)", printed)
    assert found, f"--{section}.{k}"
    return found[1], " ".join(found[2].split())


def test_help_lists_every_key_with_its_default_and_its_line(printed_help: str):
    for section, info in Config.model_fields.items():
        for k, field in info.annotation.model_fields.items():  # pyright: ignore
            default, line = help_of(printed_help, section, k)
            assert tomli.loads(f"v = {default}")["v"] == field.default
            assert line.startswith(field.description)


@pytest.mark.parametrize(
    ("section", "k", "choices"),
    [
        ("optim", "schedule", "constant, linear, cosine, inverse-sqrt, wsd"),
        ("compile", "enable", "auto, true, false"),
        ("checkpoint", "mode", "sync, async"),
    ],
)
def test_help_says_what_a_choice_may_be(printed_help: str, section: str, k: str, choices: str):
    assert help_of(printed_help, section, k)[1].endswith(f"; one of {choices}")


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
@pytest.mark.parametrize("rampup", [[], [16, 16, 100], [16, 8, 160], [32, 32, 5]])
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


def test_a_run_in_tokens_is_as_long_as_one_in_samples_of_that_many_tokens():
    data = Data(seq_len=100)
    assert Config(data=data, train=Train(tokens=100 * 163 + 99)).end(0, 0) == Config(
        data=data, train=Train(samples=163)
    ).end(0, 0)


def test_a_section_cannot_be_changed_once_it_is_made():
    with pytest.raises(ValueError, match="frozen"):
        Optim().lr = 1.0


def test_the_feed_forward_is_four_times_as_wide_as_the_model_unless_said():
    assert (Model(hidden_size=64).ffn, Model(hidden_size=64, ffn_hidden_size=100).ffn) == (256, 100)
