"""The keys of all sections except [model]: one class per section, with the checks within that section.

Keys of [model] are in `model_keys.py` and `families/`. `config/__init__.py` combines the sections and checks keys of
different sections against each other.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, model_validator

from dtmega import rooms
from dtmega.config.schema import Excluded, LocalPath, PathOrUrl, Section, key
from dtmega.files import urls

if TYPE_CHECKING:
    from dtmega.config.mixtures import Mixture


class Run(Section):
    """[run]: the run directory, the seed, the device, and time limits for processes."""

    dir: LocalPath = key(
        "runs/bloom",
        "where everything is written: config.toml, metrics.jsonl, checkpoints/, tensorboard/",
        min_length=1,
    )
    seed: int = key(1234, "the only seed: it determines initial values, data order and dropout", ge=0, lt=2**32)
    exact: bool = key(
        False, "equal bits of losses, norms and weights on every data layout and pipeline (docs/exact.md)"
    )
    untranslated: list[str] = key(
        [], "what from-megatron could not carry over: a run refuses each line until it is settled and deleted"
    )
    device: Literal["auto", "cpu", "cuda"] = key("auto", "auto: the GPU if there is one, else the CPU")
    timeout_s: float = key(
        600.0, "a process without progress for this long counts as hung: the job ends and names it", gt=0
    )
    grace_s: float = key(
        20.0, "after a signal, how long the current step may take; then the process exits without saving", gt=0
    )

    @model_validator(mode="after")
    def _check_untranslated(self) -> Run:
        if self.untranslated:
            lines = "; ".join(self.untranslated)
            raise ValueError(
                f"from-megatron left {len(self.untranslated)} settings open: {lines}. Settle each in this "
                f"configuration, then delete its line ([run] untranslated)"
            )
        return self

    def collective_timeout_s(self) -> float:
        """Seconds after which a collective times out: twice `timeout_s`.

        The watchdog (`distributed/watchdog.py`) must act before the collective times out, because only the watchdog can
        name the rank that hangs.
        """
        return 2 * self.timeout_s


def _check_prefixes(path: str | list[str]) -> str | list[str]:
    for prefix in [path] if isinstance(path, str) else path:
        urls.check(prefix)
    return path


class Data(Section):
    """[data]: corpora, tokenizer, the split, and how samples are made from text."""

    path: Annotated[str | list[str], AfterValidator(_check_prefixes)] = key(
        "stdlib", "the corpus: 'stdlib' (Python's own docs and sources), or prefixes of .bin/.idx files"
    )
    weights: list[float] = key(
        [], "one positive weight per path, normalised; empty = proportional to the number of tokens"
    )
    tokenizer: LocalPath = key("stdlib-8k", "stdlib-8k, stdlib-wordpiece, bytes, bert:VOCAB, a file or a tiktoken name")
    seq_len: int = key(256, "S: tokens in a sequence", ge=1)
    split: str = key("969,30,1", "weights by which documents are divided into train, valid and test")
    validation: list[str] = key(
        [], "additional validation sets, each with its own loss: 'NAME=PREFIX', or mixtures as in train"
    )
    train: str = key(
        "",
        "a mixture of ranges of corpora, instead of path, weights and split: "
        "'NAME: WEIGHT START:END PREFIX, ...'; 0.5:1 = the second half of a corpus",
    )
    test: str = key("", "the test set, in the same form; only with train")
    order: Literal["auto", "megatron-lm", "megatron-deepspeed", "megatron-core"] = key(
        "auto", "read samples in the order that Megatron would have, to continue one of its runs; auto: dtmega's own"
    )
    order_samples: int = key(
        0, "with order: number of samples that the Megatron run was started for; 0 = as [train] says", ge=0
    )
    eod_mask_loss: bool = key(False, "no loss where the input token is end-of-document")
    reset_position_ids: bool = key(
        False, "restart positions at 0 after each end-of-document; no effect on bloom, whose ALiBi needs no positions"
    )
    reset_attention_mask: bool = key(False, "no attention across an end-of-document")
    decoder_seq_len: int = key(0, "t5: T, tokens in a sequence of the decoder; 0 = a quarter of S", ge=0)
    objective: Literal["auto", "prefix-lm", "conversations", "separate-spans"] = key(
        "auto",
        "auto: the family's own; prefix-lm: read the first part of each text in both directions, predict the rest; "
        "conversations: predict the tokens that bear loss (dtmega tokenize --chat); separate-spans: t5 with spans of "
        "whole words, as Megatron's T5",
    )
    pack: bool = key(True, "conversations: several in a row, each attending to itself; false: one in a row")
    too_long: Literal["drop", "cut"] = key(
        "drop", "conversations: of more than S + 1 tokens, leave out, or cut if a token to learn remains"
    )
    reweight_positions: bool = key(False, "prefix-lm: weight early positions more, because they are targets less often")
    short_seq_prob: float = key(
        0.1, "bert, separate-spans: share of samples that are cut to a random length below S", ge=0, le=1
    )
    mask_prob: float = key(0.15, "bert, t5: share of the tokens to hide, at least one token", gt=0, lt=1)
    max_ngram: int = key(3, "bert: largest number of words that are masked together", ge=1, le=10)
    mean_span: float = key(3.0, "t5: mean number of tokens in a hidden span", ge=1)
    max_span: int = key(10, "separate-spans: largest number of words in a hidden span", ge=1, le=32)
    sentinels: int = key(
        100,
        "t5: number of sentinels, ids that stand for hidden spans; the tokenizer's, or new ids after its last",
        ge=1,
    )
    num_workers: int = key(
        -1,
        "loader processes per rank; 0 = load in the training process; -1 = 0 if batches are fast to make, else 1",
        ge=-1,
        le=64,
    )

    @model_validator(mode="after")
    def _check(self) -> Data:
        if self.weights and (len(self.weights) != len(self.paths) or min(self.weights) <= 0):
            raise ValueError(
                f"[data] weights needs {len(self.paths)} positive numbers, one per [data] path, got {self.weights}"
            )
        try:
            fractions = [float(x) for x in self.split.split(",")]
        except ValueError:
            fractions = []
        finite = all(math.isfinite(x) for x in fractions)
        if len(fractions) != 3 or not finite or min(fractions) < 0 or fractions[0] <= 0:
            raise ValueError(f"[data] split is three weights 'train,valid,test' with train > 0, got '{self.split}'")
        self._check_mixtures()
        if self.order == "auto" and self.order_samples:
            raise ValueError(
                f"[data] order_samples={self.order_samples} would not be read with order='auto' ([data] order)"
            )
        return self

    def _check_mixtures(self) -> None:
        """Refuse malformed mixtures, duplicate names of validation sets, and keys that this run would not read."""
        fields = type(self).model_fields
        # A run has either a split of whole corpora, or mixtures. Keys of the other kind would be silently ignored.
        useless = ("path", "weights", "split") if self.train else ("test",)
        if unread := [name for name in useless if getattr(self, name) != fields[name].default]:
            has = "has mixtures" if self.train else "has a split"
            by_option = {"data.train": [f"data.{name}" for name in unread], "data.path": ["data.train", "data.test"]}
            raise Excluded(f"[data] {', '.join(unread)} would not be read: this run {has} ([data] train)", by_option)
        for name, written in (("train", self.train), ("test", self.test)):
            try:
                _ = rooms.mixtures().parse(written) if written else None
            except ValueError as error:
                raise ValueError(f"[data] {name} is a mixture: {error}") from None
        # The names of the run's own splits are reserved. With [data] train there is no split, so 'valid' is free.
        taken = ("train", "test") if self.train else ("train", "valid", "test")
        names: set[str] = set()
        for written in self.validation:
            try:
                name = rooms.mixtures().parse(written).name
            except ValueError as error:
                raise ValueError(f"[data] validation: {error}") from None
            if name in taken or name in names:
                raise ValueError(
                    f"[data] validation has {rooms.mixtures().FORM}, each NAME once, of letters, digits and '_.-', and "
                    f"none of {', '.join(taken)}; got '{written}'"
                )
            names.add(name)

    @property
    def train_mixture(self) -> Mixture | None:
        """`train` as a `Mixture`; None if the run has a split instead."""
        return rooms.mixtures().parse(self.train) if self.train else None

    @property
    def test_mixture(self) -> Mixture | None:
        """`test` as a `Mixture`; None if `test` is empty."""
        return rooms.mixtures().parse(self.test) if self.test else None

    @property
    def validation_sets(self) -> list[Mixture]:
        """`validation` as a list of mixtures."""
        return [rooms.mixtures().parse(written) for written in self.validation]

    @property
    def paths(self) -> list[str]:
        """`path` as a list, even if `path` is a single prefix."""
        return [self.path] if isinstance(self.path, str) else self.path

    @property
    def decoder_length(self) -> int:
        """T: number of tokens in a decoder sequence."""
        return self.decoder_seq_len or max(1, self.seq_len // 4)

    @property
    def lengths(self) -> dict[str, int]:
        """The sequence lengths in tokens, keyed by `seq_len` (encoder) and `decoder_seq_len`."""
        return {"seq_len": self.seq_len, "decoder_seq_len": self.decoder_length}

    @property
    def split_weights(self) -> tuple[float, float, float]:
        """`split` as three numbers: the weights of train, valid and test."""
        train, valid, test = (float(x) for x in self.split.split(","))
        return train, valid, test


class Batch(Section):
    """[batch]: sequences per forward pass and per step."""

    micro_batch_size: int = key(
        8, "B: sequences per rank in one forward pass; 0 = the largest up to 4 that divides each rank's share", ge=0
    )
    global_batch_size: int = key(16, "sequences per optimizer step, over all ranks", ge=1)
    rampup: list[int] = key(
        [],
        "[start, increment, samples]: the batch grows from start to global_batch_size, by increment, over the first "
        "samples; empty = no ramp-up",
    )

    @model_validator(mode="after")
    def _check(self) -> Batch:
        if self.rampup:
            if len(self.rampup) != 3 or min(self.rampup) < 1:
                raise ValueError(
                    f"[batch] rampup is three positive integers [start, increment, samples], got {self.rampup}"
                )
            start, increment, _ = self.rampup
            if start > self.global_batch_size or (self.global_batch_size - start) % increment:
                raise ValueError(
                    f"[batch] rampup cannot grow from {start} to global_batch_size={self.global_batch_size} in steps "
                    f"of {increment}: ({self.global_batch_size} - {start}) % {increment} = "
                    f"{(self.global_batch_size - start) % increment}, expected 0 and start <= global_batch_size"
                )
        for size in self.sizes if self.micro_batch_size else ():
            if size % self.micro_batch_size:
                raise ValueError(
                    f"micro_batch_size={self.micro_batch_size} does not divide {size} "
                    f"([batch] micro_batch_size; [batch] global_batch_size and rampup's sizes)"
                )
        return self

    @property
    def sizes(self) -> range:
        """All global batch sizes in the run, ascending: the sizes of the ramp-up, or only `global_batch_size`."""
        start, increment = self.rampup[:2] if self.rampup else (self.global_batch_size, 1)
        return range(start, self.global_batch_size + 1, increment)

    def size_at(self, samples: int) -> int:
        """The global batch size of the step that starts after `samples` samples (Megatron-LM `microbatches.py`)."""
        size, _ = next(self.stairs(samples))
        return size

    def stairs(self, samples: int) -> Iterator[tuple[int, int]]:
        """Yield the stairs of the batch-size ramp-up, beginning with the stair in effect after `samples` samples.

        A stair is a stretch of the run with one global batch size.

        Yields:
            Pairs (size, until): a step that starts before `until` consumed samples has the global batch size `size`.
            `until` is sys.maxsize for the last stair, which has no end.
        """
        sizes = self.sizes
        ramps = len(sizes) - 1
        if ramps:
            ramp_samples = self.rampup[2]
            # All stairs have the same number of samples. `-(-a // b)` rounds a / b up to a whole number.
            for i in range(min(samples * ramps // ramp_samples, ramps), ramps):
                yield sizes[i], -(-(i + 1) * ramp_samples // ramps)
        yield sizes[-1], sys.maxsize


OF_MUON = ("muon_momentum", "adjust_lr_fn", "adamw_lr")
# Optimizer ([optim] name) -> keys of [optim] that the optimizer does not read.
UNREAD_BY_OPTIMIZER = {
    "adamw": ("momentum", *OF_MUON),
    "adam": ("momentum", *OF_MUON),
    "sgd": ("beta1", "beta2", "eps", *OF_MUON),
    "muon": ("momentum",),
}


class Optim(Section):
    """[optim]: the optimizer, and the schedules of learning rate and weight decay."""

    name: Literal["adamw", "adam", "sgd", "muon"] = key(
        "adamw",
        "the optimizer; adam and sgd (with momentum) add the weight decay to the gradient, adamw and muon do not; muon "
        "trains the matrices inside of the model, and adamw the rest: embeddings, head, norms, biases",
    )
    lr: float = key(1e-3, "peak learning rate", gt=0)
    min_lr: float = key(0.0, "learning rate at the end of the decay", ge=0)
    schedule: Literal["constant", "linear", "cosine", "inverse-sqrt", "wsd"] = key(
        "cosine", "curve of the learning rate after the linear warm-up"
    )
    unit: Literal["steps", "samples", "tokens"] = key("steps", "unit of warmup, decay and wsd_decay")
    warmup: int = key(0, "length of the linear warm-up", ge=0)
    warmup_fraction: float = key(
        0.0, "instead of warmup: the warm-up as a fraction of the schedule, which ends with the decay", ge=0, lt=1
    )
    decay: int = key(0, "point where the decay reaches min_lr, counted from the start; 0 = the end of training", ge=0)
    wsd_decay: int = key(0, "wsd: length of the final linear decay; 0 = a tenth of the schedule", ge=0)
    lr_factors: list[str] = key(
        [],
        "'PATTERN=FACTOR' multiplies the learning rate of the parameters whose name matches ('embed.*=0.1'); "
        "the first match wins",
    )
    beta1: float = key(0.9, "adamw, adam, muon's adamw: decay rate of the first moment", ge=0, lt=1)
    beta2: float = key(0.95, "adamw, adam, muon's adamw: decay rate of the second moment", ge=0, lt=1)
    eps: float = key(1e-8, "adamw, adam, muon's adamw: epsilon of the update's denominator", gt=0)
    momentum: float = key(0.9, "sgd: momentum", ge=0, lt=1)
    muon_momentum: float = key(0.95, "muon: momentum (Nesterov's)", ge=0, lt=1)
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = key(
        "match_rms_adamw",
        "muon: factor on lr for a matrix of A rows and B columns: 0.2 sqrt(max(A, B)), which suits the lr of adamw, or "
        "sqrt(max(1, A / B))",
    )
    adamw_lr: float = key(0.0, "muon: peak learning rate of what adamw trains; 0 = lr; min_lr in proportion", ge=0)
    weight_decay: float = key(0.1, "weight decay of matrices and embeddings; biases and norms have none", ge=0)
    weight_decay_schedule: Literal["constant", "linear", "cosine"] = key(
        "constant", "curve of the weight decay from start_weight_decay to weight_decay, over the whole training"
    )
    start_weight_decay: float = key(0.0, "weight decay at the start of a linear or cosine schedule", ge=0)
    clip_grad: float = key(1.0, "clip the gradient of the whole model to this L2 norm; 0 = no clipping", ge=0)

    @model_validator(mode="after")
    def _check(self) -> Optim:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr={self.min_lr} is above lr={self.lr} ([optim] min_lr, [optim] lr)")
        if 0 < self.decay <= self.warmup:
            raise ValueError(
                f"decay={self.decay} does not come after warmup={self.warmup} ([optim] decay, [optim] warmup)"
            )
        if self.warmup and self.warmup_fraction:
            raise Excluded(
                f"there are two lengths of the warm-up: expected warmup=0 or warmup_fraction=0, got {self.warmup} and "
                f"{self.warmup_fraction} ([optim] warmup, [optim] warmup_fraction)",
                {"optim.warmup": ["optim.warmup_fraction"], "optim.warmup_fraction": ["optim.warmup"]},
            )
        fields = type(self).model_fields
        useless = UNREAD_BY_OPTIMIZER[self.name]
        if self.weight_decay_schedule == "constant":
            useless += ("start_weight_decay",)
        if unread := [name for name in useless if getattr(self, name) != fields[name].default]:
            names = [f"optim.{name}" for name in unread]
            raise Excluded(
                f"[optim] {', '.join(unread)} would not be read with name='{self.name}' and weight_decay_schedule="
                f"'{self.weight_decay_schedule}' ([optim] name, [optim] weight_decay_schedule)",
                {"optim.name": names, "optim.weight_decay_schedule": names},
            )
        _ = self.factors  # raises an error if a factor is malformed
        return self

    @property
    def factors(self) -> list[tuple[str, float]]:
        """`lr_factors` as (pattern, factor) pairs, in order.

        Raises:
            ValueError: an entry is not PATTERN=FACTOR, or its factor is negative or not finite.
        """
        pairs = []
        for written in self.lr_factors:
            pattern, _, text = written.rpartition("=")
            try:
                factor = float(text)
            except ValueError:
                factor = -1.0
            if not pattern or not 0 <= factor < math.inf:
                raise ValueError(f"[optim] lr_factors has 'PATTERN=FACTOR', FACTOR at least 0, got '{written}'")
            pairs.append((pattern, factor))
        return pairs

    def warmup_until(self, total: int) -> float:
        """The length of the warm-up for a run of length `total`, with both lengths in [optim] unit."""
        return self.warmup_fraction * (self.decay or total) if self.warmup_fraction else self.warmup


class Lora(Section):
    """[lora]: low-rank adapters, which are trained instead of the weights (docs/fine-tuning.md)."""

    rank: int = key(0, "r: rank of an adapter, the width between its matrices; 0 = all weights are trained", ge=0)
    alpha: float = key(16.0, "an adapter's result is multiplied by alpha / rank", gt=0)
    dropout: float = key(0.0, "dropout on an adapter's input; only 0", ge=0)
    targets: str | list[str] = key(
        "linears", "layers that get an adapter: patterns of their names ('q_proj'), or linears = all inside the blocks"
    )
    base: Literal["float32", "bfloat16"] = key(
        "float32", "dtype in which the frozen weights are kept; bfloat16 only with [precision] params = 'bfloat16'"
    )
    base_path: PathOrUrl = key("", "with [lora] or [train] freeze: where the weights that the run started from are now")

    @model_validator(mode="after")
    def _check(self) -> Lora:
        if self.dropout:
            raise ValueError(
                f"a linear layer does not see which sample a token is from, so its dropout would depend on the layout: "
                f"expected dropout=0, got {self.dropout} ([lora] dropout)"
            )
        fields = type(self).model_fields
        unread = [name for name in ("alpha", "targets", "base") if getattr(self, name) != fields[name].default]
        if not self.rank and unread:
            message = f"[lora] {', '.join(unread)} would not be read without adapters: expected rank > 0, got 0"
            raise Excluded(message, {"lora.rank": [f"lora.{name}" for name in unread]})
        if not self.targets:
            raise ValueError("[lora] targets has patterns, at least one, or is 'linears'; got none")
        return self


class Train(Section):
    """[train]: the length of the run, steps to skip, and reasons to stop early."""

    steps: int = key(0, "length of the run in optimizer steps ...", ge=0)
    samples: int = key(0, "... or in sequences ...", ge=0)
    tokens: int = key(0, "... or in tokens ...", ge=0)
    epochs: int = key(
        0,
        "... or in passes over the training data, except for the last batch if it is incomplete; set exactly one of "
        "the four",
        ge=0,
    )
    drift_interval: int = key(100, "steps between checks that all copies of a parameter are still equal", ge=0)
    max_skipped: int = key(10, "stop with an error after this many skipped steps in a row", ge=1)
    skip_spikes: float = key(
        0.0,
        "skip a step whose loss or gradient norm is this many standard deviations above the mean of the last 128 "
        "steps; 0 = never (OLMo: 6)",
        ge=0,
    )
    skip_steps: list[list[int]] = key(
        [],
        "[[first, last], ...]: ranges of steps that consume their samples but change no weight; the first step is 1, "
        "last is included",
    )
    kill_switch: LocalPath = key(
        "", "a path: when a file appears there, save and exit; a run does not start while it is there"
    )
    exit_interval: int = key(0, "save and exit at every multiple of this many steps", ge=0)
    exit_duration_min: float = key(0.0, "save and exit after this many minutes", ge=0)
    stop_loss_above: list[float] = key(
        [],
        "[loss, steps]: save and end the run if the loss is above this for this many steps in a row; empty = never",
    )
    stop_validation_rises: int = key(
        0,
        "save and end the run after this many validations in a row above the best one; every validation is followed "
        "by a checkpoint, and the best one is kept besides [checkpoint] keep; 0 = never",
        ge=0,
    )
    past_stop: bool = key(False, "continue a run that stop_loss_above or stop_validation_rises has ended")
    freeze: list[str] = key(
        [], "patterns of parameters' names that are not trained ('embed.*'); needs weights to start from"
    )

    @model_validator(mode="after")
    def _check(self) -> Train:
        lengths = {key: getattr(self, key) for key in ("steps", "samples", "tokens", "epochs")}
        if [length > 0 for length in lengths.values()].count(True) != 1:
            got = ", ".join(f"{key}={length}" for key, length in lengths.items())
            positive = [f"train.{key}" for key, length in lengths.items() if length > 0]
            by_option = {key: [other for other in positive if other != key] for key in positive}
            raise Excluded(f"exactly one of [train] {', '.join(lengths)} must be positive, got {got}", by_option)
        for pair in self.skip_steps:
            if len(pair) != 2 or not 1 <= pair[0] <= pair[1]:
                raise ValueError(f"[train] skip_steps has pairs [first, last] with 1 <= first <= last, got {pair}")
        if self.stop_loss_above:
            n_steps = self.stop_loss_above[-1]
            if len(self.stop_loss_above) != 2 or n_steps < 1 or n_steps != int(n_steps):
                raise ValueError(
                    f"[train] stop_loss_above is [loss, steps] with a whole number of steps >= 1, got "
                    f"{self.stop_loss_above}"
                )
        return self

    def skips(self, step: int) -> bool:
        """True if `step` lies in one of the `skip_steps` ranges."""
        return any(first <= step <= last for first, last in self.skip_steps)


class Eval(Section):
    """[eval]: validation and test losses, and the text that the model generates at the end of the run."""

    interval: int = key(100, "steps between validation losses", ge=0)
    steps: int = key(10, "global batches per validation or test loss, the same ones each time", ge=1)
    only: bool = key(
        False,
        "train nothing: write the validation and test losses of the newest checkpoint, or of the initial weights, to "
        "evaluation.jsonl",
    )
    prompt: str = key(
        "def ", "prompt of the sample at the end: the model continues it, or fills each [MASK]; empty = no sample"
    )
    sample_tokens: int = key(64, "tokens in that sample; 0 = no sample", ge=0)


class Log(Section):
    """[log]: printed lines, and destinations for metrics."""

    interval: int = key(10, "steps between printed lines (metrics.jsonl gets every step)", ge=0)
    ranks: Literal["first", "all"] = key(
        "first",
        "ranks that keep a log; all: each logs its steps and all that it prints, to logs/rank-00012.txt in [run] dir",
    )
    slow_steps: int = key(
        20, "warn once, naming the slow rank, if tokens/s stay below half of their median for this many steps", ge=0
    )
    tensorboard: bool = key(True, "write tensorboard/ in the run directory")
    num_zeros: bool = key(False, "also log the number of zeros in the gradient")
    params_norm: bool = key(False, "also log the L2 norm of the parameters")
    trackers: list[Literal["wandb", "mlflow", "trackio"]] = key(
        [], "send metrics to these trackers too; each needs the extra of the same name"
    )
    project: str = key("dtmega", "with trackers: the project or experiment that the run belongs to", min_length=1)


class Profile(Section):
    """[profile]: traces of chosen steps, for Perfetto or chrome://tracing.

    While a run is in progress, creating a file `profile-now` in the run directory starts a profile at the next step.
    """

    steps: list[int] = key([], "[first, last]: trace these steps, last included; the first step is 1; empty = none")
    ranks: list[int] = key([0], "ranks that write a trace")
    with_stack: bool = key(False, "record the line of Python that called each operator; slows the traced steps")
    with_memory: bool = key(False, "record allocations, and the peak memory of each phase")
    memory_history: bool = key(False, "GPU: record all allocations, and write a snapshot of them if memory runs out")

    @model_validator(mode="after")
    def _check(self) -> Profile:
        if self.steps and (len(self.steps) != 2 or not 1 <= self.steps[0] <= self.steps[1]):
            raise ValueError(f"[profile] steps is [first, last] with 1 <= first <= last, got {self.steps}")
        if not self.ranks or min(self.ranks) < 0:
            raise ValueError(f"[profile] ranks has numbers of ranks from 0, at least one, got {self.ranks}")
        return self


class Checkpoint(Section):
    """[checkpoint]: when and where checkpoints are written, and which checkpoint a run resumes from."""

    interval: int = key(100, "steps between checkpoints; 0 = only at the end, and when the run is stopped", ge=0)
    final: bool = key(True, "write a checkpoint at the end, whatever the interval")
    keep: int = key(2, "number of checkpoints to keep, the newest ones; 0 = all", ge=0)
    resume: PathOrUrl = key(
        "auto",
        "auto: the newest intact checkpoint of this run; none: start from scratch; or the folder of a checkpoint, or a "
        "run directory, whose newest checkpoint is used",
    )
    dir: PathOrUrl = key(
        "", "where checkpoints are: a folder or a URL (s3://, gs://, az://, ...); empty = checkpoints/ in [run] dir"
    )
    mode: Literal["sync", "async"] = key("sync", "async: training goes on while a thread writes a copy")
    allow_changed_data: bool = key(False, "resume even if data, tokenizer or seed have changed")


class Mesh(Section):
    """[mesh]: the sizes of the five axes."""

    pp: int = key(
        1, "pipeline parallel: ranks that the stages are divided over; -1 (on one axis) = all remaining ranks", ge=-1
    )
    dp_replicate: int = key(1, "data parallel: ranks with copies of the parameters (DDP; with dp_shard, HSDP)", ge=-1)
    dp_shard: int = key(-1, "data parallel: ranks that the parameters are sharded over (FSDP)", ge=-1)
    cp: int = key(1, "context parallel: ranks that each sequence is divided over", ge=-1)
    cp_form: Literal["gather", "heads", "auto"] = key(
        "auto",
        "with cp, attention of a rank's tokens to all tokens (gather), or of its heads over all tokens (heads); auto: "
        "the one that sends fewer bytes",
    )
    ep: int = key(
        1, "expert parallel: neighbours among the dp_shard x cp ranks that a layer's experts are divided over", ge=1
    )
    tp: int = key(1, "tensor parallel: ranks that each layer's matrices are divided over", ge=-1)
    sequence_parallel: bool = key(
        True, "with tp: each rank computes norms, dropout and the residual for S / tp tokens only"
    )


class Pipeline(Section):
    """[pipeline]: the schedule, and the division of layers into stages."""

    schedule: Literal[
        "GPipe",
        "1F1B",
        "Interleaved1F1B",
        "LoopedBFS",
        "InterleavedZeroBubble",
        "ZBVZeroBubble",
        "DualPipeV",
    ] = key("1F1B", "the order of forward and backward passes")
    virtual_stages: int = key(0, "stages per rank; 0 = 1 for GPipe and 1F1B, else 2", ge=0)
    stages: list[list[int]] = key(
        [],
        "the numbers of the layers in each stage; a decoder's layers are numbered after the encoder's; empty = "
        "balanced by cost",
    )
    split: int = key(0, "t5: the first stage of the decoder; 0 = balanced by cost", ge=0)
    csv: LocalPath = key("", "instead of `schedule`: a CSV file with one row of actions (0F0, 1B0, ...) per rank")
    draw: LocalPath = key("", "draw the schedule into this SVG file")


class Recompute(Section):
    """[recompute]: activations that are recomputed in the backward pass instead of being kept in memory."""

    mode: Literal["none", "full", "selective"] = key(
        "none",
        "results that backward recomputes to save memory: none, whole layers (full), or all but matrix products and "
        "attention (selective)",
    )
    method: Literal["uniform", "block"] = key(
        "uniform",
        "which layers to recompute; uniform: all, in groups of `layers`, keeping only the input of each group; "
        "block: the first `layers` of each stage",
    )
    layers: int = key(1, "number of layers in a group (uniform), or from the start of each stage (block)", ge=1)

    @model_validator(mode="after")
    def _check(self) -> Recompute:
        if self.mode == "none" and (self.method, self.layers) != ("uniform", 1):
            raise Excluded(
                f"nothing is recomputed: expected method='uniform' and layers=1, got '{self.method}' and {self.layers} "
                f"([recompute] mode, [recompute] method, [recompute] layers)",
                {"recompute.mode": ["recompute.method", "recompute.layers"]},
            )
        return self


class Fsdp(Section):
    """[fsdp]: when gathered weights are freed, where shards are kept, and how gradients are accumulated."""

    reshard_after_forward: Literal["auto"] | bool = key(
        "auto", "free a layer's gathered weights after its forward; auto: yes, but not in a pipeline"
    )
    cpu_offload: bool = key(False, "keep shards and optimizer state in host memory")
    accumulate: Literal["whole", "sharded", "auto"] = key(
        "whole",
        "what a rank keeps of its gradients between microbatches; whole: all of them, summed over ranks once a step; "
        "sharded: its shards, summed after each microbatch; auto: sharded if whole ones took over a tenth of a GPU",
    )


class Precision(Section):
    """[precision]: dtypes, and float16's loss scale."""

    params: Literal["float32", "bfloat16", "float16", "auto"] = key(
        "float32",
        "dtype of forward and backward; the optimizer's weights stay float32; auto: bfloat16 where the device is fast "
        "at it, else float32",
    )
    reduce: Literal["float32", "bfloat16"] = key("float32", "dtype in which gradients are summed over data ranks")
    initial_loss_scale: float = key(2.0**32, "float16: factor on the loss in the first step", gt=0)
    min_loss_scale: float = key(1.0, "float16: smallest loss scale", gt=0)
    loss_scale_window: int = key(1000, "float16: steps without an overflow after which the scale is doubled", ge=1)
    hysteresis: int = key(
        2, "float16: overflows before the scale is halved; the count restarts when it is doubled", ge=1
    )

    @model_validator(mode="after")
    def _check(self) -> Precision:
        scales = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
        changed = [name for name in scales if getattr(self, name) != type(self).model_fields[name].default]
        if self.params != "float16" and changed:
            raise Excluded(
                f"there is no loss scale for [precision] {', '.join(changed)}: expected params = 'float16', got "
                f"'{self.params}' ([precision] params)",
                {"precision.params": [f"precision.{name}" for name in changed]},
            )
        if self.initial_loss_scale < self.min_loss_scale:
            raise ValueError(
                f"initial_loss_scale={self.initial_loss_scale} is below min_loss_scale={self.min_loss_scale} "
                f"([precision] initial_loss_scale, min_loss_scale)"
            )
        return self


class Compile(Section):
    """[compile]: torch.compile."""

    enable: Literal["auto"] | bool = key("auto", "torch.compile each layer; auto: on a GPU only")
