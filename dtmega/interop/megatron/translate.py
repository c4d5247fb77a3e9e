"""Translate a Megatron command into a TOML configuration, as far as its flags go.

toml, left_out = translate("pretrain_bert.py --num-layers 24 ...")
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import tomli_w

from dtmega import config
from dtmega.config.schema import SectionClasses
from dtmega.interop.megatron import shell
from dtmega.interop.megatron.flags import MANY, Flag, by_name

# Script -> the family that it trains, and family -> Megatron's default tokenizer.
FAMILY_OF_SCRIPT = {"pretrain_gpt": "gpt", "pretrain_prefix_lm": "gpt", "pretrain_bert": "bert", "pretrain_t5": "t5"}
TOKENIZERS = {"gpt": "GPT2BPETokenizer", "bert": "BertWordPieceLowerCase", "t5": "BertWordPieceLowerCase"}
# Script -> objective, for scripts that do not train the family's default objective.
OBJECTIVE_OF_SCRIPT = {"pretrain_prefix_lm": "prefix-lm", "pretrain_t5": "separate-spans"}
# Keys of [model] that no flag sets: every T5 of Megatron has these values.
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
# Megatron's names of WordPiece tokenizers -> the prefix of dtmega's tokenizer spec.
WORDPIECE_OF = {"BertWordPieceLowerCase": "bert", "BertWordPieceCase": "bert-cased"}
# If one of these flags is missing, Megatron refuses to start or chooses a value that depends on the machine.
REQUIRED_FLAGS = (
    *("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length"),
    *("--micro-batch-size", "--global-batch-size", "--lr"),
)
UNITS = ("iters", "samples", "tokens")
LAYOUT = ("mesh", "pipeline", "recompute", "fsdp")  # sections that do not change what a run computes


class Translation(NamedTuple):
    """The configuration that a command's flags give.

    Attributes:
        toml: text of the configuration, with comments in place of the keys that the flags do not give.
        left_out: lines for the user, one for each flag that was not carried over.
    """

    toml: str
    left_out: list[str]


class Command(NamedTuple):
    """A Megatron command.

    Attributes:
        script: name of the program, such as pretrain_bert.
        values: flag -> words that follow the flag.
        stray: words that belong to no flag.
    """

    script: str
    values: dict[str, list[str]]
    stray: list[str]


def translate(source: str) -> Translation:
    """Translate a command line, or the command in a launch script.

    Args:
        source: text of a command that contains `pretrain_....py`, or path of a launch script.

    Raises:
        ValueError: `source` has no such command, or the command trains a model that is not built here.
        OSError: the file cannot be read.
    """
    command = _read_command(source)
    if command.script not in FAMILY_OF_SCRIPT:
        known = ", ".join(f"{name}.py" for name in FAMILY_OF_SCRIPT)
        raise ValueError(f"{command.script}.py trains a model that is not built here; expected one of {known}")
    draft = _filled_draft(command)
    return Translation(draft.text(f"From {command.script}.py's flags by dtmega from-megatron."), draft.left_out())


def translate_known_model(
    command: Command, known: Mapping[str, Any], title: str
) -> tuple[str, dict[str, dict[str, Any]]]:
    """Translate a command whose model is known, without its layout.

    Args:
        known: values by "section.key". The [model] section gets only these values. In other sections they replace the
            values from the flags.
        title: first line of the text, a comment.

    Returns:
        The text of the configuration, and its values by section.
    """
    draft = _filled_draft(command)
    for keys in (draft.keys, draft.lacking):
        for key in [key for key in keys if key.partition(".")[0] in ("model", *LAYOUT)]:
            del keys[key]
    draft.keys |= known
    draft.family = known["model.name"]  # pretrain_gpt.py trains Llamas, too
    return draft.text(title), _by_section(draft.keys)


def _filled_draft(command: Command) -> _Draft:
    """The draft of a configuration after all flags of the command have been translated."""
    draft = _Draft(command)
    # The order matters: each step reads keys that were copied or set before, and replaces some of them.
    draft.copy_values()
    for step in (_model, _vocabulary, _batch, _schedule, _precision, _layout, _data, _checkpoints):
        step(draft)
    return draft


def _read_command(source: str) -> Command:
    """Find the command in a line or a script, and sort its words by flag."""
    if " " in source.strip() and not _is_file(source):
        words = shell.split_words(source)
    else:
        words = shell.words(Path(source).read_text(encoding="utf-8", errors="replace"))
    script = ""
    arguments: list[str] = []
    for i, word in enumerate(words):
        if match := shell.SCRIPT.search(word):
            script = match[1]
            arguments = words[i + 1 :]
            break
    if not script:
        raise ValueError(f"'{source:.80}' has no command with a pretrain_....py in it")
    flags = by_name()
    values: dict[str, list[str]] = {}
    stray: list[str] = []
    last: list[str] = []  # values of the last flag
    room = 0  # number of further values that the last flag takes; MANY, which is negative, never runs out
    for word in arguments:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            last = values[flag] = [value] if equals else []
            n_values = flags[flag].n_values if flag in flags else MANY
            room = 0 if equals else n_values
        elif room:
            last.append(word)
            room -= 1
        else:
            stray.append(word)
    return Command(script, values, stray)


class _Draft:
    """A configuration that is being built from the flags of a command.

    Attributes:
        command: the command that is translated.
        flags: Megatron's flags by name.
        family: the family of the model.
        keys: "section.key" -> value.
        lacking: "section.key" -> description of the value that the user has to fill in.
        refused: flag -> reason why its value is not carried over.
    """

    def __init__(self, command: Command) -> None:
        self.command = command
        self.flags = by_name()
        self.family = FAMILY_OF_SCRIPT[command.script]
        if self.value("position-embedding-type") == "alibi":
            self.family = "bloom"
        self.keys: dict[str, Any] = {}
        self.lacking: dict[str, str] = {}
        self.refused: dict[str, str] = {}

    def has(self, name: str) -> bool:
        return f"--{name}" in self.command.values

    def value(self, name: str) -> str | None:
        """The value of a flag on the command line, or Megatron's default; None if there is neither."""
        values = self.command.values.get(f"--{name}")
        return values[0] if values else self.flags[f"--{name}"].default

    def number(self, name: str) -> int | float | None:
        """The value of a flag as a number; None without a value, or if it is not a number."""
        value = self.value(name)
        return None if value is None else _number(value)

    def fields_of(self, section: str) -> Mapping[str, Any]:
        """The fields of a section, by key. The [model] section has the fields of the draft's family."""
        kinds = SectionClasses.of(config.Config.model_fields[section])
        return kinds.classes[self.family if kinds.discriminator else ""].model_fields

    def copy_values(self) -> None:
        """Copy each flag whose value is the value of one key.

        If a flag is not given, its key is set to Megatron's default where dtmega's default differs.
        """
        for name in REQUIRED_FLAGS:
            flag = self.flags[name]
            if not self.command.values.keys() & {*flag.names}:
                self.lacking[flag.keys[0]] = name
        for name, flag in self.flags.items():
            if flag.same:
                self._copy_value(name, flag)

    def _copy_value(self, name: str, flag: Flag) -> None:
        """Copy the value of one flag, given or default, to its key."""
        section, _, key = flag.keys[0].partition(".")
        fields = self.fields_of(section)
        is_given = name in self.command.values
        if key not in fields:
            if is_given:
                self.refused[name] = f"a {self.family} has no {key}"
        elif is_given and flag.n_values == 0:
            self.keys[flag.keys[0]] = True
        elif is_given or flag.default is not None:
            value = self._typed(fields[key].annotation, self.value(name.removeprefix("--")))
            if value is None:
                self.lacking[flag.keys[0]] = f"{name} {' '.join(self.command.values[name])}"
            elif is_given or value != fields[key].default:
                self.keys[flag.keys[0]] = value

    @staticmethod
    def _typed(kind: Any, value: str | None) -> Any:
        """A value in the type of its key; None if the key needs a number and the value is not one."""
        number = None if value is None else _number(value)
        if kind is int and isinstance(number, float) and number.is_integer():
            return int(number)
        return number if kind in (int, float) else value

    def left_out(self) -> list[str]:
        """A line for each flag that was not carried over, and for each word that belongs to no flag."""
        lines = []
        for name, values in self.command.values.items():
            flag = self.flags.get(name)
            written = " ".join([name, *values])
            if flag is None:
                lines.append(f"{written}: unknown flag")
            elif name in self.refused:
                lines.append(f"{written}: {self.refused[name]}")
            elif not flag.keys:
                lines.append(f"{written}: {flag.why}" if flag.why else written)
        return [*lines, *(f"{word}: belongs to no flag" for word in self.command.stray)]

    def text(self, title: str) -> str:
        """The text of the configuration.

        Args:
            title: text of the first line, which is a comment.
        """
        values = {key: value for key, value in self.keys.items() if key not in self.lacking}
        lines = [f"# {title}", *self._refusal(values)]
        for section in config.Config.model_fields:
            body = []
            for name in self.fields_of(section):
                key = f"{section}.{name}"
                if key in values:
                    body.append(f"{name} = {_toml(values[key])}")
                elif key in self.lacking:
                    body.append(f"# {name} =   # missing: {self.lacking[key]}")
            if body:
                lines += ["", f"[{section}]", *body]
        return "\n".join(lines) + "\n"

    def _refusal(self, values: Mapping[str, Any]) -> list[str]:
        """The message with which a run would refuse these values, as comment lines; empty if keys are lacking."""
        if self.lacking:
            return []
        try:
            config.validate(_by_section(values), "these flags")
        except config.ConfigError as error:
            return [f"# Not accepted as it stands: {line}" for line in str(error).splitlines()]
        return []


def _model(draft: _Draft) -> None:
    """Set the keys of [model], except those of the vocabulary, and the run's directory."""
    draft.keys["model.name"] = draft.family
    draft.keys["run.dir"] = f"runs/{draft.family}"
    if draft.has("max-position-embeddings") and draft.family != "bloom":
        draft.keys["model.max_position_embeddings"] = draft.number("max-position-embeddings")
    if draft.has("embed-layernorm") and draft.family != "bloom":
        draft.refused["--embed-layernorm"] = f"a {draft.family} has none"
    if draft.value("position-embedding-type") == "rotary":
        draft.refused["--position-embedding-type"] = draft.flags["--position-embedding-type"].why
    gelu = "erf" if draft.has("no-bias-gelu-fusion") else "tanh"
    if draft.family == "bert":
        draft.keys["model.gelu"] = gelu
    elif draft.family == "t5":
        draft.keys |= {f"model.{key}": value for key, value in THEIR_T5.items()}
        draft.keys["model.activation"] = f"gelu_{gelu}"
        # The key in the table of flags does not exist for a T5, so `copy_values` refused the flag. Set the key of T5.
        draft.keys["model.norm_eps"] = draft.number("layernorm-epsilon")
        draft.refused.pop("--layernorm-epsilon", None)
    elif draft.has("no-bias-gelu-fusion"):
        draft.refused["--no-bias-gelu-fusion"] = f"a {draft.family} has the GELU with tanh"


def _vocabulary(draft: _Draft) -> None:
    """Set the size of the vocabulary, its padding and the tokenizer."""
    padded = draft.number("pad-vocab-size-to")
    if padded is not None:
        draft.keys["model.vocab_size"] = padded
    else:
        draft.lacking["model.vocab_size"] = "the size of the tokenizer, which no flag gives"
        multiple = draft.number("make-vocab-size-divisible-by")
        tp = draft.number("tensor-model-parallel-size")
        if multiple is not None and tp is not None:
            draft.keys["model.pad_vocab_to_multiple"] = multiple * tp
    kind = draft.value("tokenizer-type") or TOKENIZERS[FAMILY_OF_SCRIPT[draft.command.script]]
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
    """Set the ramp-up and the skipped steps, and ask for the length of the run if no flag gives it."""
    ramp = draft.command.values.get("--rampup-batch-size")
    if ramp:
        draft.keys["batch.rampup"] = [_number(number) for number in ramp]
    if not any(f"train.{unit}" in draft.keys for unit in ("steps", "samples", "tokens")):
        draft.lacking["train.steps"] = "--train-iters, --train-samples or --train-tokens"
    ranges = draft.command.values.get("--skip-train-iteration-range", [])
    if ranges:
        skipped = []
        for step_range in ranges:
            skipped.append([_number(end) for end in step_range.split("-")])
        draft.keys["train.skip_steps"] = skipped


def _schedule(draft: _Draft) -> None:
    """Set the optimizer and the unit, decay and warm-up of its learning rate."""
    by_unit = {unit: (draft.number(f"lr-decay-{unit}"), draft.number(f"train-{unit}")) for unit in UNITS}
    # A run that is counted in samples or tokens has its learning rate counted in the same unit. If there are flags of
    # several units, the last unit of UNITS counts.
    unit = next((u for u in reversed(UNITS) if any(by_unit[u])), UNITS[0])
    decay, _ = by_unit[unit]
    if decay:
        draft.keys["optim.decay"] = decay
    if unit != UNITS[0]:
        draft.keys["optim.unit"] = unit
    # Megatron has no warm-up in tokens. A run whose rate decays by tokens warms up by samples, all of the same length.
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
    # A key that this optimizer does not read would be refused.
    for key in config.UNREAD_BY_OPTIMIZER[draft.keys.get("optim.name", "adamw")]:
        draft.keys.pop(f"optim.{key}", None)


def _precision(draft: _Draft) -> None:
    """Set the dtype of the parameters, and the scaling of attention scores that comes with float16."""
    for flag, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        if draft.has(flag):
            draft.keys["precision.params"] = dtype
    scaling = "query_key_layer_scaling"
    if draft.has("fp16") and not draft.has("no-query-key-layer-scaling") and scaling in draft.fields_of("model"):
        draft.keys[f"model.{scaling}"] = True


def _layout(draft: _Draft) -> None:
    """Set offloading, recomputing and virtual stages."""
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
    """Set the objective and the corpora."""
    if draft.command.script in OBJECTIVE_OF_SCRIPT:
        draft.keys["data.objective"] = OBJECTIVE_OF_SCRIPT[draft.command.script]
    paths = draft.command.values.get("--data-path", [])
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
    """The weighted groups of corpora of a split, from its flag or from the file that another flag names."""
    flag = f"--{split}-weighted-split-paths"
    path = draft.value(f"{split}-weighted-split-paths-path")
    if path is None:
        return draft.command.values.get(flag, [])
    try:
        # The file has one line, with each group in double quotes.
        return shell.split_words(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        draft.refused[f"{flag}-path"] = f"cannot be read here: {error}"
        return []


def _mixtures(draft: _Draft, groups: Mapping[str, list[str]]) -> None:
    """Set the mixtures of each split.

    Args:
        groups: weighted groups of corpora by split.
    """
    draft.keys["data.train"] = groups["train"][0]
    # Each group has its own range, so --split is ignored, as in Megatron.
    draft.keys.pop("data.split", None)
    if "--split" in draft.command.values:
        draft.refused["--split"] = "replaced by the ranges in --train-weighted-split-paths"
    if groups["valid"]:
        draft.keys["data.validation"] = groups["valid"]
    if groups["test"]:
        draft.keys["data.test"] = groups["test"][0]
    if groups["test"][1:]:
        flag = next(flag for flag in draft.command.values if flag.startswith("--test-weighted-split-paths"))
        draft.refused[flag] = f"only one test set is supported, so these are left out: {'; '.join(groups['test'][1:])}"


def _checkpoints(draft: _Draft) -> None:
    """Set the folder and the interval of checkpoints, and the weights that the run starts from."""
    save, load = draft.value("save"), draft.value("load")
    if save:
        draft.keys["checkpoint.dir"] = save
    if not draft.has("save-interval"):
        draft.keys["checkpoint.interval"] = 0
    if draft.has("finetune") or draft.has("no-load-optim"):
        draft.lacking["model.init_from"] = f"the weights of {load}, converted"
    elif load and load != save:
        draft.refused["--load"] = "convert Megatron's checkpoint first, then name the result in [model] init_from"


def _by_section(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Nest values with keys like "section.key": section -> key -> value."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = value
    return sections


def _is_file(path: str) -> bool:
    with contextlib.suppress(OSError, ValueError):  # a command is too long for a path, or contains a NUL
        return Path(path).is_file()
    return False


def _number(text: str) -> int | float | None:
    """The number that a string stands for; None if it is not a number."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None


def _toml(value: Any) -> str:
    """A value as TOML. A list is written on one line."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(map(_toml, value))}]"
    return tomli_w.dumps({"key": value}).strip().removeprefix("key = ")
