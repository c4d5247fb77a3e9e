"""The configuration of a run: a TOML file and `--section.key value` options become frozen, typed sections.

    config = load(["--config", "bloom.toml", "--optim.lr", "1e-3"])
    config.optim.lr

Every key is declared once, with its default and a line of help. `keys.py` declares the keys of all sections
but [model], which has the keys of `model_keys.py` and those of the family's file in `families/`. `--help` and
docs/configuration.md print these declarations. An interval of 0 switches a feature off; dtypes have torch's names. This
file finds and reads the TOML file and combines the sections.

Nothing here imports torch, so that a bad configuration is refused within a fraction of a second.

    schema.py       declarations of keys
    reading.py      conversion of TOML and options into sections
    refusals.py     errors in plain words; opened if there is one
    mixtures.py     the notation for mixtures in [data]; opened if there are some
    help.py         the list of keys; opened by `--help`
    suggestions.py  suggestions for unknown keys, from the table in synonyms.toml; opened if a key is unknown
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import tomli_w
from pydantic import Field, SerializeAsAny, field_validator, model_validator

from dtmega import rooms
from dtmega.config import reading
from dtmega.config.families import DEFAULT, KEYS
from dtmega.config.families import register_family as register_family
from dtmega.config.keys import UNREAD_BY_OPTIMIZER as UNREAD_BY_OPTIMIZER
from dtmega.config.keys import (
    Batch,
    Checkpoint,
    Compile,
    Data,
    Eval,
    Fsdp,
    Log,
    Lora,
    Mesh,
    Optim,
    Pipeline,
    Precision,
    Profile,
    Recompute,
    Run,
    Train,
)
from dtmega.config.model_keys import DropoutModel as DropoutModel
from dtmega.config.model_keys import Model as Model
from dtmega.config.model_keys import NativeModel as NativeModel
from dtmega.config.reading import ConfigError, Override, Suggester
from dtmega.config.schema import SHOWN, Section, SectionClasses

PACKAGE = Path(__file__).resolve().parent.parent
CONFIGS_DIR = PACKAGE / "config" / "shipped"  # in a clone of the repository, a link to the folder next to the package
USAGE = "torchrun [--nproc-per-node N] train.py --config NAME.toml [--section.key value ...], or dtmega train ..."
ELSEWHERE = "a family from elsewhere is known once families.register has its record (docs/adding-a-model.md)"
FAMILIES = SectionClasses("name", DEFAULT, KEYS, ELSEWHERE)


class RunEnd(NamedTuple):
    """The end of a run, as the total numbers of optimizer steps and samples."""

    steps: int
    samples: int


def _default_model() -> Model:
    return KEYS[DEFAULT](name=DEFAULT)


class Config(Section):
    """The configuration of a run, with one field per section. `model_copy(update=...)` makes a changed copy."""

    run: Run = Run()
    model: Annotated[SerializeAsAny[Model], FAMILIES] = Field(default_factory=_default_model)
    data: Data = Data()
    batch: Batch = Batch()
    optim: Optim = Optim()
    train: Train
    lora: Lora = Lora()
    eval: Eval = Eval()
    log: Log = Log()
    profile: Profile = Profile()
    checkpoint: Checkpoint = Checkpoint()
    precision: Precision = Precision()
    compile: Compile = Compile()
    mesh: Mesh = Mesh()
    pipeline: Pipeline = Pipeline()
    recompute: Recompute = Recompute()
    fsdp: Fsdp = Fsdp()

    @field_validator("model", mode="before")
    @classmethod
    def _of_its_family(cls, written: Any) -> Any:
        """The section as an object of the class that its key `name` chooses."""
        if isinstance(written, Mapping):
            return FAMILIES.chosen(written.get("name", DEFAULT)).model_validate(written)
        return written

    @model_validator(mode="after")
    def _check(self) -> Config:
        if self.train.stop_validation_rises and not self.eval.interval:
            raise ValueError(
                f"there are no validations to compare: expected interval > 0, got 0 with stop_validation_rises="
                f"{self.train.stop_validation_rises} ([eval] interval, [train] stop_validation_rises)"
            )
        if self.run.exact and not self.batch.micro_batch_size:
            raise ValueError(
                "micro_batch_size = 0 would follow the layout, expected a size, which fixes the bits of a microbatch "
                "([batch] micro_batch_size, [run] exact)"
            )
        if self.lora.rank and self.train.freeze:
            raise ValueError("adapters freeze all other weights: expected freeze=[] ([train] freeze, [lora] rank)")
        if self.lora.base != "float32" and self.precision.params != self.lora.base:
            raise ValueError(
                f"frozen weights in bfloat16 would be rounded: expected params='bfloat16' or base='float32', got "
                f"params='{self.precision.params}' ([lora] base, [precision] params)"
            )
        if not self.train.epochs:
            self._check_length()
        return self

    def _check_length(self) -> None:
        """Refuse a run that is too short.

        Raises:
            ValueError: the run is shorter than one step, ends before [profile] steps, or is too short for [optim]
                wsd_decay.
        """
        end = self.end(0, 0)
        if end.steps < 1:
            raise ValueError(
                f"the run is shorter than one step of {self.batch.size_at(0)} sequences x {self.data.seq_len} tokens "
                f"([train] samples={self.train.samples}, tokens={self.train.tokens} or epochs={self.train.epochs}, "
                f"[batch] global_batch_size)"
            )
        if self.profile.steps and self.profile.steps[0] > end.steps:
            raise ValueError(
                f"steps={self.profile.steps} begins after the last step, {end.steps} ([profile] steps, [train] steps, "
                f"samples or tokens)"
            )
        # wsd: the final decay must begin after the warm-up, or the learning rate would jump between the two phases.
        total = self.progress(*end)
        schedule_end = self.optim.decay or total
        warmup = self.optim.warmup_until(total)
        room = schedule_end - warmup
        if self.optim.schedule == "wsd" and 0 < room < self.optim.wsd_decay:
            raise ValueError(
                f"wsd_decay={self.optim.wsd_decay} does not fit between the warm-up and the end of the schedule: "
                f"{schedule_end} - {warmup} = {room} {self.optim.unit} ([optim] wsd_decay, warmup, decay)"
            )

    def completed(self, samples_in: Callable[[int], int]) -> Config:
        """The configuration with [train] epochs converted into a number of samples, if [train] epochs is set.

        Args:
            samples_in: function that takes a number of epochs and returns the number of samples (`Text.samples_in`).

        Raises:
            ValueError: the run is too short.
        """
        if not self.train.epochs:
            return self
        samples = samples_in(self.train.epochs)
        complete = self.model_copy(update={"train": self.train.model_copy(update={"samples": samples})})
        complete._check_length()
        return complete

    def end(self, steps: int, samples: int) -> RunEnd:
        """The end of a run that has done `steps` steps and read `samples` samples so far.

        If [train] steps is set, the run ends after that many steps. If [train] samples, tokens or epochs is set, the
        run ends after the last step that does not exceed this amount. The arguments `steps` and `samples` change the
        result only if the run resumes with a different batch size.

        Raises:
            ValueError: [train] epochs is set, and `completed` has not yet converted it into samples.
        """
        if self.train.epochs and not self.train.samples:
            raise ValueError(
                f"only the data tells how many samples {self.train.epochs} epochs have: expected [train] steps, "
                f"samples or tokens here ([train] epochs)"
            )
        most_steps = self.train.steps or sys.maxsize
        most_samples = sys.maxsize if self.train.steps else self.train.samples or self.train.tokens // self.data.seq_len
        # Advance from one batch size of the ramp-up to the next, not step by step: a run may have billions of steps.
        for size, until in self.batch.stairs(samples):
            on_this_stair = -(-(until - samples) // size)  # rounded up: the step that crosses `until` counts
            fitting = max(0, min(most_steps - steps, (most_samples - samples) // size))
            n = min(on_this_stair, fitting)
            steps += n
            samples += n * size
            if fitting < on_this_stair:
                break
        return RunEnd(steps, samples)

    def progress(self, steps: int, samples: int) -> int:
        """The schedules' progress after `steps` steps and `samples` samples, measured in [optim] unit."""
        if self.optim.unit == "steps":
            return steps
        return samples * (self.data.seq_len if self.optim.unit == "tokens" else 1)

    def to_toml(self) -> str:
        """All keys as TOML text; `read` turns this text back into an equal configuration."""
        return tomli_w.dumps(self.model_dump())


@functools.cache
def similar_keys() -> Suggester:
    """Suggestions for unknown keys of the configuration."""
    return rooms.suggestions().SimilarKeys(Config)


def load(argv: list[str]) -> Config:
    """Read the configuration that command-line arguments describe.

        cfg = load(["--config", "bloom.toml", "--optim.lr", "1e-3", "--train.steps=100"])

    `--help` (or `-h`) prints every key and exits; `--help SECTION` prints the keys of one section.

    Args:
        argv: command-line arguments: `--config NAME` (a path, or the name of a file in configs/), and overrides
            `--section.key value`. If a key is overridden twice, the later value wins.

    Raises:
        ConfigError: the file does not exist or is not TOML, a key is unknown, a value has a wrong type or is out of
            range, or keys contradict each other.
    """
    for position, argument in enumerate(argv):
        if argument in ("-h", "--help"):
            following = argv[position + 1 : position + 2]
            print(help_text(*(word for word in following if not word.startswith("-"))))
            sys.exit(0)
    name, overrides = reading.read_argv(argv, USAGE, similar_keys)
    return read(find_file(name), overrides)


def run_dir_of(argv: Sequence[str]) -> Path | None:
    """The run directory (`[run] dir`) that the arguments name, even if the rest of the configuration is invalid.

    A refused run still writes `exit.json` in the run directory, so the directory is needed even if `load` fails.

    Returns:
        The directory; None if the TOML file cannot be read, or if [run] dir is not a string.
    """
    config_name = ""
    dir_option = ""
    words = iter(argv)
    for word in words:
        flag, eq, text = word.partition("=")
        value = text if eq else next(words, "")
        if flag == "--run.dir":
            dir_option = value
        elif flag == "--config":
            config_name = value
    if dir_option:
        return Path(dir_option)
    try:
        section = reading.read_toml(find_file(config_name)).get("run", {})
    except ConfigError:
        return None
    run_dir = section.get("dir", Run().dir) if isinstance(section, dict) else None
    return Path(run_dir) if isinstance(run_dir, str) else None


def read(path: Path, overrides: Sequence[Override] = ()) -> Config:
    """Read the configuration in the TOML file `path` and apply `overrides` in order.

    Raises:
        ConfigError: the file is missing or is not TOML, or the configuration is invalid (see `load`).
    """
    return validate(reading.read_toml(path), str(path), overrides)


def find_file(name: str) -> Path:
    """Find the file that `--config NAME` names: try NAME as a path, then in configs/, with or without `.toml`.

    Raises:
        ConfigError: the file does not exist.
    """
    for path in (Path(name), CONFIGS_DIR / name, CONFIGS_DIR / f"{name}.toml"):
        try:
            if path.is_file():
                return path
        except OSError as error:  # the name is too long, or a folder is not readable
            raise ConfigError(f"--config {name:.{SHOWN}}: {error.strerror}") from None
    known = sorted(path.name for path in CONFIGS_DIR.glob("*.toml"))
    stems = rooms.suggestions().closest(Path(name).stem.lower(), [Path(file).stem for file in known], 3)
    nearest = " or ".join(f"{stem}.toml" for stem in stems)
    hint = f"; did you mean {nearest}?" if nearest else f" (there: {', '.join(known)})"
    raise ConfigError(f"--config {name:.{SHOWN}}: no such file, and none of that name in {CONFIGS_DIR}{hint}")


def validate(values: Mapping[str, Any], source: str, overrides: Sequence[Override] = ()) -> Config:
    """Make a configuration from values and command-line options.

    Args:
        values: values in TOML's types, as section -> key -> value.
        source: name of the file that the values come from, for messages.
        overrides: options on the command line, in order; later options win.

    Raises:
        ConfigError: the configuration is invalid (see `load`).
    """
    if any(o.option == "--optim.warmup" and o.text == "0" for o in overrides):
        # No warm-up at all: with a fraction in the file, 0 steps would otherwise mean this fraction.
        overrides = [Override("optim", "warmup_fraction", "0.0"), *overrides]
    return reading.validate(Config, {"train": {}, **values}, source, similar_keys, overrides)


def model_section(keys: Mapping[str, Any], source: str) -> Model:
    """Make a [model] section on its own.

    Args:
        keys: keys of [model] and their values.
        source: name of the file or checkpoint that the keys come from, for messages.

    Raises:
        ConfigError: the section is invalid (see `load`).
    """
    return validate({"model": keys, "train": {"steps": 1}}, source).model


def help_text(section: str = "") -> str:
    """The text of `--help`, or of `--help SECTION` if a section is given.

    Raises:
        ConfigError: no section has this name.
    """
    known = list(Config.model_fields)
    if section and section not in known:
        raise ConfigError(f"--help {section:.{SHOWN}}: expected a section, one of {', '.join(known)}")
    return rooms.config_help().text(Config, section)
