"""A Megatron command -> the TOML that says the same here, as far as it says something.

toml, left = translate("pretrain_bert.py --num-layers 24 ...")
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import tomli_w

from dtmega import config
from dtmega.declared import SectionClasses
from dtmega.megatron import shell
from dtmega.megatron.flags import MANY, by_name

PRE_TRAINED = {"pretrain_gpt": "gpt", "pretrain_prefix_lm": "gpt", "pretrain_bert": "bert", "pretrain_t5": "t5"}
TOKENIZERS = {"gpt": "GPT2BPETokenizer", "bert": "BertWordPieceLowerCase", "t5": "BertWordPieceLowerCase"}
# Scripts that train a family for another objective than its own.
OBJECTIVE_OF_SCRIPT = {"pretrain_prefix_lm": "prefix-lm", "pretrain_t5": "separate-spans"}
# The keys of [model] that Megatron's T5 has, whatever its flags say.
THEIR_T5: Mapping[str, Any] = MappingProxyType(
    {
        "positions": "learned",
        "norm": "layer",
        "bias": True,
        "scale_head": False,
        "scale_scores": True,
        "init": "normal",
    }
)
WORDPIECE_OF = {"BertWordPieceLowerCase": "bert", "BertWordPieceCase": "bert-cased"}
# Without one of these, Megatron does not start or takes what it finds on the machine.
REQUIRED_FLAGS = (
    *("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length"),
    *("--micro-batch-size", "--global-batch-size", "--lr"),
)
UNITS = ("iters", "samples", "tokens")
LAYOUT = ("mesh", "pipeline", "recompute", "fsdp")  # sections on which no number depends


class Translation(NamedTuple):
    """A configuration as far as the flags say it.

    Attributes:
        toml: its text; what it lacks stands in it as a comment.
        left: a line for each flag that was not carried over.
    """

    toml: str
    left: list[str]


class Given(NamedTuple):
    """The flags of a command.

    Attributes:
        script: the program, such as pretrain_bert.
        values: flag -> what follows it.
        stray: words that belong to no flag.
    """

    script: str
    values: dict[str, list[str]]
    stray: list[str]


def translate(source: str) -> Translation:
    """The configuration of a line of arguments, or of the command in a launch script.

    Args:
        source: the line from `pretrain_....py` on, or a file's path.

    Raises:
        ValueError: there is no such command in it, or one that trains another kind of model.
        OSError: the file cannot be read.
    """
    given = _read(source)
    if given.script not in PRE_TRAINED:
        known = ", ".join(f"{name}.py" for name in PRE_TRAINED)
        raise ValueError(f"{given.script}.py trains a model that is not here; expected one of {known}")
    draft = _drafted(given)
    return Translation(draft.text(f"From {given.script}.py's flags by dtmega from-megatron."), draft.left())


def recipe(given: Given, known: Mapping[str, Any], title: str) -> tuple[str, dict[str, dict[str, Any]]]:
    """The configuration of a run whose model is known, without its layout: text, and values by section.

    Args:
        known: keys with their sections, those of the model all.
        title: the text's first line.
    """
    draft = _drafted(given)
    for keys in (draft.keys, draft.lacking):
        for key in [key for key in keys if key.partition(".")[0] in ("model", *LAYOUT)]:
            del keys[key]
    draft.keys |= known
    values: dict[str, dict[str, Any]] = {}
    for key, value in draft.keys.items():
        section, _, name = key.partition(".")
        values.setdefault(section, {})[name] = value
    return draft.text(title), values


def _drafted(given: Given) -> _Draft:
    draft = _Draft(given)
    draft.copy_plain()
    for step in (_model, _vocabulary, _batch, _schedule, _precision, _layout, _data, _checkpoints):
        step(draft)
    return draft


def _read(source: str) -> Given:
    if " " in source.strip() and not _is_file(source):
        words = shell.split_words(source)
    else:
        words = shell.words(Path(source).read_text(encoding="utf-8", errors="replace"))
    names = [found[1] if found else "" for found in map(shell.SCRIPT.search, words)]
    name = next(filter(None, names), "")
    if not name:
        raise ValueError(f"'{source:.80}' has no command with a pretrain_....py in it")
    flags = by_name()
    values: dict[str, list[str]] = {}
    stray: list[str] = []
    last: list[str] = []  # values of the last flag
    room = 0  # how many more it may take
    for word in words[names.index(name) + 1 :]:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            last = values[flag] = [value] if equals else []
            room = 0 if equals else flags[flag].n_values if flag in flags else MANY
        elif room:
            last.append(word)
            room -= 1
        else:
            stray.append(word)
    return Given(name, values, stray)


class _Draft:
    """The keys that have been found, and the flags that were used for them."""

    def __init__(self, given: Given) -> None:
        self.given = given
        self.flags = by_name()
        self.family = PRE_TRAINED[given.script]
        if self.value("position-embedding-type") == "alibi":
            self.family = "bloom"
        self.keys: dict[str, Any] = {}
        self.lacking: dict[str, str] = {}  # key -> what would have to stand there
        self.refused: dict[str, str] = {}  # flag -> why its value is not carried over

    def has(self, name: str) -> bool:
        return f"--{name}" in self.given.values

    def value(self, name: str) -> str | None:
        """The value on the command line, or Megatron's default."""
        values = self.given.values.get(f"--{name}")
        return values[0] if values else self.flags[f"--{name}"].default

    def number(self, name: str) -> int | float | None:
        """The value as a number; None where there is none, or one that only a shell would know."""
        value = self.value(name)
        return None if value is None else _number(value)

    def keys_of(self, section: str) -> Mapping[str, Any]:
        kinds = SectionClasses.of(config.Config.model_fields[section])
        return kinds.classes[self.family if kinds.discriminator else ""].model_fields

    def copy_plain(self) -> None:
        """Copy the flags whose value is that of one key; of one left out, Megatron's default if ours is another."""
        for name in REQUIRED_FLAGS:
            flag = self.flags[name]
            if not self.given.values.keys() & {*flag.names}:
                self.lacking[flag.keys[0]] = name
        for name, flag in self.flags.items():
            if not flag.same:
                continue
            section, _, key = flag.keys[0].partition(".")
            fields = self.keys_of(section)
            if key not in fields:
                if name in self.given.values:
                    self.refused[name] = f"a {self.family} has no {key}"
                continue
            if name in self.given.values and flag.n_values == 0:
                self.keys[flag.keys[0]] = True
            elif name in self.given.values or flag.default is not None:
                value = self._typed(fields[key].annotation, self.value(name.removeprefix("--")))
                if value is None:
                    self.lacking[flag.keys[0]] = f"{name} {' '.join(self.given.values[name])}"
                elif name in self.given.values or value != fields[key].default:
                    self.keys[flag.keys[0]] = value

    @staticmethod
    def _typed(kind: Any, value: str | None) -> Any:
        number = None if value is None else _number(value)
        if kind is int and isinstance(number, float) and number.is_integer():
            return int(number)
        return number if kind in (int, float) else value

    def left(self) -> list[str]:
        lines = []
        for name, values in self.given.values.items():
            flag = self.flags.get(name)
            written = " ".join([name, *values])
            if flag is None:
                lines.append(f"{written}: not a flag that is known here")
            elif name in self.refused:
                lines.append(f"{written}: {self.refused[name]}")
            elif not flag.keys:
                lines.append(f"{written}: {flag.why}" if flag.why else written)
        return [*lines, *(f"{word}: belongs to no flag" for word in self.given.stray)]

    def text(self, title: str) -> str:
        lines = [f"# {title}"]
        found = {key: value for key, value in self.keys.items() if key not in self.lacking}
        lines += self._refusal(found)
        for section in config.Config.model_fields:
            order = [f"{section}.{key}" for key in self.keys_of(section)]
            body = [
                f"{key.partition('.')[2]} = {_toml(found[key])}"
                if key in found
                else f"# {key.partition('.')[2]} =   # lacks: {self.lacking[key]}"
                for key in order
                if key in found or key in self.lacking
            ]
            if body:
                lines += ["", f"[{section}]", *body]
        return "\n".join(lines) + "\n"

    def _refusal(self, found: Mapping[str, Any]) -> list[str]:
        """The refusal that a run would print of the keys, as a comment; nothing as long as some are lacking."""
        if self.lacking:
            return []
        values: dict[str, Any] = {}
        for key, value in found.items():
            section, _, name = key.partition(".")
            values.setdefault(section, {})[name] = value
        try:
            config.validate(values, "these flags")
        except config.ConfigError as error:
            return [f"# Not accepted as it stands: {line}" for line in str(error).splitlines()]
        return []


def _model(draft: _Draft) -> None:
    draft.keys["model.name"] = draft.family
    draft.keys["run.dir"] = f"runs/{draft.family}"
    if draft.has("max-position-embeddings") and draft.family != "bloom":
        draft.keys["model.max_position_embeddings"] = draft.number("max-position-embeddings")
    if draft.has("embed-layernorm") != (draft.family == "bloom"):
        draft.refused["--embed-layernorm"] = f"a {draft.family} has none"
    if draft.value("position-embedding-type") == "rotary":
        draft.refused["--position-embedding-type"] = draft.flags["--position-embedding-type"].why
    gelu = "erf" if draft.has("no-bias-gelu-fusion") else "tanh"
    if draft.family == "bert":
        draft.keys["model.gelu"] = gelu
    elif draft.family == "t5":
        draft.keys |= {f"model.{key}": value for key, value in THEIR_T5.items()}
        draft.keys["model.activation"] = f"gelu_{gelu}"
        draft.keys["model.norm_eps"] = draft.number("layernorm-epsilon")
        draft.refused.pop("--layernorm-epsilon", None)
    elif draft.has("no-bias-gelu-fusion"):
        draft.refused["--no-bias-gelu-fusion"] = f"a {draft.family} has the form of tanh"


def _vocabulary(draft: _Draft) -> None:
    padded = draft.number("pad-vocab-size-to")
    if padded is not None:
        draft.keys["model.vocab_size"] = padded
    else:
        draft.lacking["model.vocab_size"] = "the tokenizer's size, which no flag says"
        multiple = draft.number("make-vocab-size-divisible-by")
        tp = draft.number("tensor-model-parallel-size")
        if multiple is not None and tp is not None:
            draft.keys["model.pad_vocab_to_multiple"] = multiple * tp
    kind = draft.value("tokenizer-type") or TOKENIZERS[PRE_TRAINED[draft.given.script]]
    vocabulary = draft.value("vocab-file")
    directory = draft.value("tokenizer-name-or-path")
    if kind in WORDPIECE_OF and vocabulary:
        draft.keys["data.tokenizer"] = f"{WORDPIECE_OF[kind]}:{vocabulary}"
    elif kind == "GPT2BPETokenizer":
        draft.keys["data.tokenizer"] = "gpt2"
    elif kind == "PretrainedFromHF" and directory:
        draft.keys["data.tokenizer"] = f"{directory}/tokenizer.json"
    else:
        draft.lacking["data.tokenizer"] = f"the vocabulary of {kind}"


def _batch(draft: _Draft) -> None:
    ramp = draft.given.values.get("--rampup-batch-size")
    if ramp:
        draft.keys["batch.rampup"] = [_number(number) for number in ramp]
    if not any(f"train.{unit}" in draft.keys for unit in ("steps", "samples", "tokens")):
        draft.lacking["train.steps"] = "--train-iters, --train-samples or --train-tokens"
    ranges = draft.given.values.get("--skip-train-iteration-range", [])
    if ranges:
        draft.keys["train.skip_steps"] = [[_number(end) for end in each.split("-")] for each in ranges]


def _schedule(draft: _Draft) -> None:
    by_unit = {unit: (draft.number(f"lr-decay-{unit}"), draft.number(f"train-{unit}")) for unit in UNITS}
    # A run that is counted in samples has its rate counted in them.
    unit = next((u for u in reversed(UNITS) if any(by_unit[u])), UNITS[0])
    decay, _ = by_unit[unit]
    if decay:
        draft.keys["optim.decay"] = decay
    if unit != UNITS[0]:
        draft.keys["optim.unit"] = unit
    # Theirs has no warm-up in tokens: a run that decays with them warms up for samples, all of them of one length.
    warmup = draft.number("lr-warmup-samples" if unit == "tokens" else f"lr-warmup-{unit}")
    seq_len = draft.keys.get("data.seq_len")
    if warmup and unit != "tokens":
        draft.keys["optim.warmup"] = warmup
    elif warmup and seq_len:
        draft.keys["optim.warmup"] = warmup * seq_len
    elif warmup:
        draft.lacking["optim.warmup"] = f"the tokens of --lr-warmup-samples {warmup}, each of --seq-length"
    if draft.value("optimizer") == "sgd":
        draft.keys["optim.name"] = "sgd"
    for key in config.UNREAD_BY_OPTIMIZER[draft.keys.get("optim.name", "adamw")]:
        draft.keys.pop(f"optim.{key}", None)


def _precision(draft: _Draft) -> None:
    for flag, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        if draft.has(flag):
            draft.keys["precision.params"] = dtype
    scaling = "query_key_layer_scaling"
    if draft.has("fp16") and not draft.has("no-query-key-layer-scaling") and scaling in draft.keys_of("model"):
        draft.keys[f"model.{scaling}"] = True


def _layout(draft: _Draft) -> None:
    if draft.has("cpu-optimizer"):
        draft.keys["fsdp.cpu_offload"] = True
    full = ("checkpoint-activations", "deepspeed-activation-checkpointing")
    if any(draft.has(name) for name in full):
        draft.keys["recompute.mode"] = "full"
    elif draft.has("recompute-activations"):
        draft.keys["recompute.mode"] = "selective"
    elif draft.has("recompute-granularity"):
        draft.keys["recompute.mode"] = draft.value("recompute-granularity")
    for name in ("checkpoint-num-layers", "recompute-num-layers"):
        if draft.has(name):
            draft.keys["recompute.layers"] = draft.number(name)
    per_stage = draft.number("num-layers-per-virtual-pipeline-stage")
    n_layers = draft.number("num-layers")
    pp = draft.number("pipeline-model-parallel-size")
    if per_stage and n_layers and pp:
        draft.keys["pipeline.schedule"] = "Interleaved1F1B"
        draft.keys["pipeline.virtual_stages"] = int(n_layers // pp // per_stage)


def _data(draft: _Draft) -> None:
    if draft.given.script in OBJECTIVE_OF_SCRIPT:
        draft.keys["data.objective"] = OBJECTIVE_OF_SCRIPT[draft.given.script]
    paths = draft.given.values.get("--data-path", [])
    groups = {split: _groups(draft, split) for split in ("train", "valid", "test")}
    if groups["train"]:
        _mixtures(draft, groups)
    elif len(paths) == 1:
        draft.keys["data.path"] = paths[0]
    elif paths and len(paths) % 2 == 0:
        draft.keys["data.path"] = paths[1::2]
        draft.keys["data.weights"] = [_number(weight) for weight in paths[::2]]
    else:
        draft.lacking["data.path"] = "--data-path"


def _groups(draft: _Draft, split: str) -> list[str]:
    """The groups of corpora that a split has, of the flag itself or in the file that a flag names."""
    flag = f"--{split}-weighted-split-paths"
    path = draft.value(f"{split}-weighted-split-paths-path")
    if path is None:
        return draft.given.values.get(flag, [])
    try:
        # One line, each group in double quotes.
        return shell.split_words(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        draft.refused[f"{flag}-path"] = f"cannot be read here: {error}"
        return []


def _mixtures(draft: _Draft, groups: Mapping[str, list[str]]) -> None:
    draft.keys["data.train"] = groups["train"][0]
    draft.keys.pop("data.split", None)  # which they do not read either
    if "--split" in draft.given.values:
        draft.refused["--split"] = "each range of --train-weighted-split-paths says its part"
    if groups["valid"]:
        draft.keys["data.validation"] = groups["valid"]
    if groups["test"]:
        draft.keys["data.test"] = groups["test"][0]
    if groups["test"][1:]:
        flag = next(flag for flag in draft.given.values if flag.startswith("--test-weighted-split-paths"))
        draft.refused[flag] = f"there is one test: {'; '.join(groups['test'][1:])}"


def _checkpoints(draft: _Draft) -> None:
    save, load = draft.value("save"), draft.value("load")
    if save:
        draft.keys["checkpoint.dir"] = save
    if not draft.has("save-interval"):
        draft.keys["checkpoint.interval"] = 0
    if draft.has("finetune") or draft.has("no-load-optim"):
        draft.lacking["model.init_from"] = f"the weights of {load}, converted"
    elif load and load != save:
        draft.refused["--load"] = "their checkpoints are converted first, then named in [model] init_from"


def _is_file(path: str) -> bool:
    with contextlib.suppress(OSError, ValueError):  # too long for a name, or with a NUL
        return Path(path).is_file()
    return False


def _number(text: str) -> int | float | None:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None


def _toml(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(map(_toml, value))}]"
    return tomli_w.dumps({"key": value}).strip().removeprefix("key = ")
