"""TOML + `--section.key value` -> frozen typed sections. No torch: a bad configuration fails before anything starts.

    config = load(["--config", "bloom.toml", "--optim.lr", "1e-3"])
    config.optim.lr

Every key is declared once, below or for [model] in `model_sections.py`, with its default and one line; `--help` prints
exactly that. An interval of 0 is off, dtypes are torch's names. How they are read is in `sections.py`. `neighbours.py`
says which key a wrong one may have meant, from the table of `synonyms.py`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import tomli_w
from pydantic import Field, model_validator

from dtmega import declared, mixture, sections
from dtmega.config.neighbours import Neighbours
from dtmega.config.synonyms import SECTIONS, SYNONYMS
from dtmega.declared import Section, key
from dtmega.mixture import Mixture
from dtmega.model_sections import GPT, T5, Bert, Bloom, Llama, Transformers
from dtmega.model_sections import DroppingModel as DroppingModel  # those below for all who ask this file for them
from dtmega.model_sections import Model as Model
from dtmega.model_sections import OwnModel as OwnModel
from dtmega.sections import ConfigError, Override

PACKAGE = Path(__file__).resolve().parent.parent
CONFIGS_DIR = PACKAGE / "configs"  # in a copy of the repository a link to the folder beside the package
USAGE = "torchrun [--nproc-per-node N] train.py --config NAME.toml [--section.key value ...], or dtmega train ..."
GONE = ("elements", "digest")  # keys of [model] that earlier versions wrote into every config.toml
WARMUPS = ("warmup", "warmup_fraction")  # keys of [optim] that give one length in two units
HELP = """usage: python train.py --config NAME.toml [--section.key value ...]
Several processes: torchrun --nproc-per-node N train.py --config NAME.toml ...
Installed, from any folder: dtmega train --config NAME.toml ..., or
    torchrun --nproc-per-node N -m dtmega train --config NAME.toml ...
NAME is a path, or a name under configs/. One section alone: -h SECTION.
Every key, its default, what it is:"""


class End(NamedTuple):
    """Counts of what a run has done when it is done."""

    steps: int
    samples: int


class Run(Section):
    dir: str = key(
        "runs/bloom",
        "where everything is written: config.toml, metrics.jsonl, checkpoints/, tensorboard/",
        min_length=1,
    )
    seed: int = key(1234, "the one seed: initial values, data order and dropout are functions of it", ge=0, lt=2**31)
    device: Literal["auto", "cpu", "cuda"] = key("auto", "auto takes the GPU where there is one")
    timeout_s: float = key(600.0, "a process that does nothing for so long hangs: the job ends and names it", gt=0)
    grace_s: float = key(20.0, "after a signal, how long a step may take before the process leaves unsaved", gt=0)

    def collective_timeout_s(self) -> float:
        """A collective that times out cannot say who is behind; the watch can, and must come first."""
        return 2 * self.timeout_s


class Data(Section):
    path: str | list[str] = key("stdlib", "'stdlib' (Python's own docs and sources) or .bin/.idx prefixes")
    weights: list[float] = key([], "one positive weight per path, normalised; empty = by number of tokens")
    tokenizer: str = key("stdlib-8k", "stdlib-8k, stdlib-wordpiece, bytes, bert:VOCAB, a file or a tiktoken name")
    seq_len: int = key(256, "S, tokens in a sequence", ge=1)
    split: str = key("969,30,1", "documents to train, valid, test, by weight")
    validation: list[str] = key(
        [], "further sets for validation, each with a loss of its own: 'NAME=PREFIX', or mixtures as in train"
    )
    train: str = key("", "instead of path, weights and split: 'NAME: WEIGHT START:END PREFIX, ...', 0.5:1 = later half")
    test: str = key("", "with train: the same for the test")
    order: Literal["auto", "megatron-lm", "megatron-deepspeed", "megatron-core"] = key(
        "auto", "samples in the order of a run of the original's that goes on here; auto: dtmega's own"
    )
    order_samples: int = key(0, "with order: samples the original was to train on; 0 = as [train] says", ge=0)
    eod_mask_loss: bool = key(False, "no loss where the input token is end-of-document")
    reset_position_ids: bool = key(False, "positions start again after each end-of-document; ALiBi (bloom) has none")
    reset_attention_mask: bool = key(False, "no attention across an end-of-document")
    decoder_seq_len: int = key(0, "t5: T, tokens in a sequence of the decoder; 0 = a quarter of S", ge=0)
    objective: Literal["auto", "prefix-lm", "separate-spans"] = key(
        "auto", "auto = the family's; prefix-lm: each text's start is given; separate-spans: t5, Megatron's form"
    )
    reweight_positions: bool = key(False, "prefix-lm: early tokens weigh more, which are targets more seldom")
    short_seq_prob: float = key(0.1, "bert, separate-spans: share of samples that are cut shorter than S", ge=0, le=1)
    mask_prob: float = key(0.15, "bert, t5: share of the tokens that are hidden, at least one", gt=0, lt=1)
    max_ngram: int = key(3, "bert: words that are masked together at most", ge=1, le=10)
    mean_span: float = key(3.0, "t5: tokens in a hidden span, as a mean", ge=1)
    max_span: int = key(10, "separate-spans: words in a hidden span at most", ge=1, le=32)
    sentinels: int = key(100, "t5: ids that stand for hidden spans, the tokenizer's or those behind its last", ge=1)
    num_workers: int = key(
        -1, "loader processes per rank; 0 = in the trainer; -1 = 0 where a batch takes a moment, else 1", ge=-1, le=64
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
        """Refuse mixtures that are none, and keys beside [data] train that would not be read."""
        fields = type(self).model_fields
        beside = ("path", "weights", "split") if self.train else ("test",)
        if idle := [name for name in beside if getattr(self, name) != fields[name].default]:
            has = "has mixtures" if self.train else "has a split"
            raise ValueError(f"[data] {', '.join(idle)} would not be read: this run {has} ([data] train)")
        for name, written in (("train", self.train), ("test", self.test)):
            try:
                _ = mixture.parse(written) if written else None
            except ValueError as error:
                raise ValueError(f"[data] {name} is a mixture: {error}") from None
        taken = ("train", "test") if self.train else ("train", "valid", "test")
        names: set[str] = set()
        for written in self.validation:
            try:
                name = mixture.parse(written).name
            except ValueError as error:
                raise ValueError(f"[data] validation: {error}") from None
            if name in taken or name in names:
                raise ValueError(
                    f"[data] validation has {mixture.FORM}, each NAME once, of letters, digits and '_.-', and none of "
                    f"{', '.join(taken)}; got '{written}'"
                )
            names.add(name)

    @property
    def train_mixture(self) -> Mixture | None:
        return mixture.parse(self.train) if self.train else None

    @property
    def test_mixture(self) -> Mixture | None:
        return mixture.parse(self.test) if self.test else None

    @property
    def validation_sets(self) -> list[Mixture]:
        return [mixture.parse(written) for written in self.validation]

    @property
    def paths(self) -> list[str]:
        return [self.path] if isinstance(self.path, str) else self.path

    @property
    def decoder_length(self) -> int:
        """T."""
        return self.decoder_seq_len or max(1, self.seq_len // 4)

    @property
    def lengths(self) -> dict[str, int]:
        """Tokens in a sequence of an encoder and of a decoder, by their keys."""
        return {"seq_len": self.seq_len, "decoder_seq_len": self.decoder_length}

    @property
    def split_weights(self) -> tuple[float, float, float]:
        train, valid, test = (float(x) for x in self.split.split(","))
        return train, valid, test


class Batch(Section):
    micro_batch_size: int = key(8, "B: sequences per rank and forward; 0 = the largest up to 4 that fits", ge=0)
    global_batch_size: int = key(16, "sequences per optimizer step", ge=1)
    rampup: list[int] = key([], "[start, increment, samples]: grow from start to global_batch_size over samples")

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
        """The sizes that a step can have, ascending: those of the ramp-up, or one."""
        start, increment = self.rampup[:2] if self.rampup else (self.global_batch_size, 1)
        return range(start, self.global_batch_size + 1, increment)

    def size_at(self, samples: int) -> int:
        """Sequences in the step that starts after `samples` consumed ones (Megatron-LM `microbatches.py`)."""
        size, _ = next(self.stairs(samples))
        return size

    def stairs(self, samples: int) -> Iterator[tuple[int, int]]:
        """(size, until) from `samples` consumed ones on: steps that start before `until` ones have that size."""
        sizes = self.sizes
        ramps = len(sizes) - 1
        if ramps:
            ramp_samples = self.rampup[2]
            for i in range(min(samples * ramps // ramp_samples, ramps), ramps):
                yield sizes[i], -(-(i + 1) * ramp_samples // ramps)
        yield sizes[-1], sys.maxsize


# Keys of [optim] that an optimizer does not read.
UNREAD = {"adamw": ("momentum",), "adam": ("momentum",), "sgd": ("beta1", "beta2", "eps")}


class Optim(Section):
    name: Literal["adamw", "adam", "sgd"] = key(
        "adamw", "adam: the decay is part of the gradient; sgd: momentum, and decay in the gradient"
    )
    lr: float = key(1e-3, "peak learning rate", gt=0)
    min_lr: float = key(0.0, "where the decay ends", ge=0)
    schedule: Literal["constant", "linear", "cosine", "inverse-sqrt", "wsd"] = key("cosine", "after the linear warm-up")
    unit: Literal["steps", "samples", "tokens"] = key("steps", "what warmup, decay and wsd_decay count")
    warmup: int = key(0, "length of the linear warm-up", ge=0)
    warmup_fraction: float = key(0.0, "instead of warmup: its part of the schedule, up to the decay's end", ge=0, lt=1)
    decay: int = key(0, "where the decay has reached min_lr; 0 = the end of training", ge=0)
    wsd_decay: int = key(0, "wsd: length of the final linear decay; 0 = a tenth of the schedule", ge=0)
    lr_factors: list[str] = key(
        [], "'PATTERN=FACTOR' on the rate of the parameters of that name ('embed.*=0.1'); the first that fits counts"
    )
    beta1: float = key(0.9, "adamw and adam", ge=0, lt=1)
    beta2: float = key(0.95, "adamw and adam", ge=0, lt=1)
    eps: float = key(1e-8, "adamw and adam", gt=0)
    momentum: float = key(0.9, "sgd", ge=0, lt=1)
    weight_decay: float = key(0.1, "on matrices and embeddings; never on biases and norms", ge=0)
    weight_decay_schedule: Literal["constant", "linear", "cosine"] = key(
        "constant", "how it gets from start_weight_decay to weight_decay, over the whole training"
    )
    start_weight_decay: float = key(0.0, "where a linear or cosine schedule begins", ge=0)
    clip_grad: float = key(1.0, "largest L2 norm of the whole gradient; 0 = no clipping", ge=0)

    @model_validator(mode="after")
    def _check(self) -> Optim:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr={self.min_lr} is above lr={self.lr} ([optim] min_lr, [optim] lr)")
        if 0 < self.decay <= self.warmup:
            raise ValueError(
                f"decay={self.decay} does not come after warmup={self.warmup} ([optim] decay, [optim] warmup)"
            )
        if self.warmup and self.warmup_fraction:
            raise ValueError(
                f"there are two lengths of the warm-up: expected warmup=0 or warmup_fraction=0, got {self.warmup} and "
                f"{self.warmup_fraction} ([optim] warmup, [optim] warmup_fraction)"
            )
        fields = type(self).model_fields
        unread = UNREAD[self.name]
        if self.weight_decay_schedule == "constant":
            unread += ("start_weight_decay",)
        if idle := [key for key in unread if getattr(self, key) != fields[key].default]:
            raise ValueError(
                f"[optim] {', '.join(idle)} would not be read with name='{self.name}' and weight_decay_schedule="
                f"'{self.weight_decay_schedule}' ([optim] name, [optim] weight_decay_schedule)"
            )
        _ = self.factors
        return self

    @property
    def factors(self) -> list[tuple[str, float]]:
        """lr_factors as (pattern, factor).

        Raises:
            ValueError: one of them is none.
        """
        found = []
        for written in self.lr_factors:
            pattern, _, factor = written.rpartition("=")
            try:
                found.append((pattern, float(factor)))
            except ValueError:
                found.append(("", -1.0))
            if not pattern or not 0 <= found[-1][1] < math.inf:
                raise ValueError(f"[optim] lr_factors has 'PATTERN=FACTOR', FACTOR at least 0, got '{written}'")
        return found

    def warmup_until(self, total: int) -> float:
        """The progress at which the warm-up ends; `total`: that of the whole run."""
        return self.warmup_fraction * (self.decay or total) if self.warmup_fraction else self.warmup


class Train(Section):
    steps: int = key(0, "how long: optimizer steps ...", ge=0)
    samples: int = key(0, "... or sequences", ge=0)
    tokens: int = key(0, "... or tokens; exactly one of the three", ge=0)
    drift_interval: int = key(100, "steps between checks that copies of a parameter are still equal", ge=0)
    max_skipped: int = key(10, "stop with an error after this many skipped steps in a row", ge=1)
    skip_spikes: float = key(
        0.0, "skip a step whose loss or gradient norm is so many sigma above the last 128; 0 = never (OLMo: 6)", ge=0
    )
    skip_steps: list[list[int]] = key(
        [], "[[first, last], ...]: steps that consume their samples and change nothing, from 1, the last included"
    )
    kill_switch: str = key("", "a path: once there is such a file, save and exit, and do not start")
    exit_interval: int = key(0, "save and exit at every multiple of this step", ge=0)
    exit_duration_min: float = key(0.0, "save and exit after this many minutes", ge=0)

    @model_validator(mode="after")
    def _check(self) -> Train:
        if [self.steps > 0, self.samples > 0, self.tokens > 0].count(True) != 1:
            raise ValueError(
                f"exactly one of [train] steps, samples, tokens must be positive, got "
                f"steps={self.steps}, samples={self.samples}, tokens={self.tokens}"
            )
        for pair in self.skip_steps:
            if len(pair) != 2 or not 1 <= pair[0] <= pair[1]:
                raise ValueError(f"[train] skip_steps has pairs [first, last] with 1 <= first <= last, got {pair}")
        return self

    def skips(self, step: int) -> bool:
        """True for a step that is among skip_steps."""
        return any(first <= step <= last for first, last in self.skip_steps)


class Eval(Section):
    interval: int = key(100, "steps between validation losses", ge=0)
    steps: int = key(10, "global batches per validation and test loss, the same ones each time", ge=1)
    only: bool = key(False, "validation and test losses of what there is, into evaluation.jsonl; nothing is trained")
    prompt: str = key("def ", "continued by the trained model at the end, or each [MASK] filled; empty = no sample")
    sample_tokens: int = key(64, "length of that continuation; 0 = no sample", ge=0)


class Log(Section):
    interval: int = key(10, "steps between log lines (metrics.jsonl gets every step)", ge=0)
    tensorboard: bool = key(True, "write tensorboard/ in the run directory")
    num_zeros: bool = key(False, "also the number of zeros in the gradient")
    params_norm: bool = key(False, "also the L2 norm of the parameters")
    trackers: list[Literal["wandb", "mlflow", "trackio"]] = key([], "also to these; each is an extra to be installed")
    project: str = key("dtmega", "with trackers: the project or experiment that the run belongs to", min_length=1)


class Checkpoint(Section):
    interval: int = key(100, "steps between checkpoints; 0 = only at the end, and where a run is stopped", ge=0)
    final: bool = key(True, "write one at the end, whatever the interval")
    keep: int = key(2, "how many finished checkpoints stay", ge=1)
    resume: str = key(
        "auto",
        "auto = the newest intact one, none = start anew, or a folder: a checkpoint's, or a run's for its newest",
    )
    dir: str = key("", "where they are: a folder or an fsspec URL (s3://...); empty = DIR/checkpoints")
    mode: Literal["sync", "async"] = key("sync", "async: a thread writes a copy while training goes on")
    allow_changed_data: bool = key(False, "resume although data, tokenizer or seed are not what they were")


class Mesh(Section):
    pp: int = key(1, "pipeline stages' ranks; -1 = what is left (for one axis)", ge=-1)
    dp_replicate: int = key(1, "data ranks that hold the same shards (alone: DDP)", ge=-1)
    dp_shard: int = key(-1, "data ranks that FSDP cuts parameters over", ge=-1)
    cp: Literal[1] = key(1, "ranks that cut the sequence of attention; only 1 so far")
    tp: int = key(1, "ranks that cut each layer", ge=-1)
    sequence_parallel: bool = key(True, "with tp: norms, dropout and the residual on S / tp of the sequence")


class Pipeline(Section):
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
        [], "the layers of each stage, by number, a decoder's after the encoder's; empty = balanced by cost"
    )
    split: int = key(0, "t5: the stage that the decoder begins with; 0 = wherever the cost says", ge=0)
    csv: str = key("", "a file with one row of actions (0F0, 1B0, ...) per rank, instead of `schedule`")
    draw: str = key("", "write the schedule as this SVG file")


class Recompute(Section):
    mode: Literal["none", "full", "selective"] = key(
        "none", "what backward computes again: nothing, whole blocks, or all but matrix products and attention"
    )
    method: Literal["uniform", "block"] = key(
        "uniform", "of which layers: of all, so many at a time; or of so many, the first ones of each stage"
    )
    layers: int = key(1, "so many. Of layers that are computed at a time only the first one's input is kept", ge=1)

    @model_validator(mode="after")
    def _check(self) -> Recompute:
        if self.mode == "none" and (self.method, self.layers) != ("uniform", 1):
            raise ValueError(
                f"nothing is recomputed: expected method='uniform' and layers=1, got '{self.method}' and {self.layers} "
                f"([recompute] mode, [recompute] method, [recompute] layers)"
            )
        return self


class Fsdp(Section):
    reshard_after_forward: Literal["auto"] | bool = key(
        "auto", "free a block's weights after its forward; auto: not under pp"
    )
    cpu_offload: bool = key(False, "shards and optimizer state in host memory")


class Precision(Section):
    params: Literal["float32", "bfloat16", "float16", "auto"] = key(
        "float32",
        "dtype of the forward and backward, masters are fp32; auto: bfloat16 where a CPU or GPU is fast at it",
    )
    reduce: Literal["float32", "bfloat16"] = key("float32", "dtype of gradient sums")
    initial_loss_scale: float = key(2.0**32, "float16: what the loss of the first step is multiplied by", gt=0)
    min_loss_scale: float = key(1.0, "float16: the scale is never halved to less", gt=0)
    loss_scale_window: int = key(1000, "float16: steps without an overflow after which the scale is doubled", ge=1)
    hysteresis: int = key(2, "float16: overflows before the scale is halved; counted anew when it is doubled", ge=1)

    @model_validator(mode="after")
    def _check(self) -> Precision:
        scales = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
        idle = [name for name in scales if getattr(self, name) != type(self).model_fields[name].default]
        if self.params != "float16" and idle:
            raise ValueError(
                f"there is no loss scale for [precision] {', '.join(idle)}: expected params = 'float16', got "
                f"'{self.params}' ([precision] params)"
            )
        if self.initial_loss_scale < self.min_loss_scale:
            raise ValueError(
                f"initial_loss_scale={self.initial_loss_scale} is below min_loss_scale={self.min_loss_scale} "
                f"([precision] initial_loss_scale, min_loss_scale)"
            )
        return self


class Compile(Section):
    enable: Literal["auto"] | bool = key("auto", "torch.compile per block; auto = on CUDA")


class Config(Section):
    run: Run = Run()
    model: Annotated[Bloom | GPT | Bert | Llama | T5 | Transformers, Field(discriminator="name")] = Bloom()
    data: Data = Data()
    batch: Batch = Batch()
    optim: Optim = Optim()
    train: Train
    eval: Eval = Eval()
    log: Log = Log()
    checkpoint: Checkpoint = Checkpoint()
    precision: Precision = Precision()
    compile: Compile = Compile()
    mesh: Mesh = Mesh()
    pipeline: Pipeline = Pipeline()
    recompute: Recompute = Recompute()
    fsdp: Fsdp = Fsdp()

    @model_validator(mode="after")
    def _check(self) -> Config:
        end = self.end(0, 0)
        if end.steps < 1:
            raise ValueError(
                f"the run is shorter than one step of {self.batch.size_at(0)} sequences x {self.data.seq_len} tokens "
                f"([train] samples={self.train.samples} or tokens={self.train.tokens}, [batch] global_batch_size)"
            )
        total = self.progress(*end)
        ends = self.optim.decay or total
        warmup = self.optim.warmup_until(total)
        room = ends - warmup
        if self.optim.schedule == "wsd" and 0 < room < self.optim.wsd_decay:
            raise ValueError(
                f"wsd_decay={self.optim.wsd_decay} does not fit between the warm-up and the end of the schedule: "
                f"{ends} - {warmup} = {room} {self.optim.unit} ([optim] wsd_decay, warmup, decay)"
            )
        return self

    def end(self, steps: int, samples: int) -> End:
        """The end of a run that has done so many steps and samples. On its way there this does not change.

        With [train] steps it is that step; with samples or tokens the last step that still fits whole.
        """
        most_steps = self.train.steps or sys.maxsize
        most_samples = sys.maxsize if self.train.steps else self.train.samples or self.train.tokens // self.data.seq_len
        for size, until in self.batch.stairs(samples):
            on_this_stair = -(-(until - samples) // size)
            fitting = max(0, min(most_steps - steps, (most_samples - samples) // size))
            n = min(on_this_stair, fitting)
            steps += n
            samples += n * size
            if fitting < on_this_stair:
                break
        return End(steps, samples)

    def progress(self, steps: int, samples: int) -> int:
        """The one of these counts that [optim] unit names, or the samples' tokens."""
        if self.optim.unit == "steps":
            return steps
        return samples * (self.data.seq_len if self.optim.unit == "tokens" else 1)

    def to_toml(self) -> str:
        return tomli_w.dumps(self.model_dump())


NEIGHBOURS = Neighbours(Config, SYNONYMS, SECTIONS)


def load(argv: list[str]) -> Config:
    """`--config NAME.toml` (a path, or a name under configs/), then overrides in order.

    `--help` prints every key and exits, `--help SECTION` the keys of one section; `-h` is the same.

    Raises:
        ConfigError: no such file, not TOML, an unknown key, a wrong type, a value out of range, keys that contradict.
    """
    for place, argument in enumerate(argv):
        if argument in ("-h", "--help"):
            following = argv[place + 1 : place + 2]
            print(help_text(*(word for word in following if not word.startswith("-"))))
            sys.exit(0)
    name, overrides = sections.read_argv(argv, USAGE, NEIGHBOURS)
    return read(find_file(name), overrides)


def run_dir_of(argv: Sequence[str]) -> Path | None:
    """The `[run] dir` that these arguments mean, even where the configuration is refused; None where nothing says."""
    name = ""
    told = ""
    words = iter(argv)
    for word in words:
        flag, eq, text = word.partition("=")
        value = text if eq else next(words, "")
        if flag == "--run.dir":
            told = value
        elif flag == "--config":
            name = value
    if told:
        return Path(told)
    try:
        section = sections.read_toml(find_file(name)).get("run", {})
    except ConfigError:
        return None
    found = section.get("dir", Run().dir) if isinstance(section, dict) else None
    return Path(found) if isinstance(found, str) else None


def read(path: Path, overrides: Sequence[Override] = ()) -> Config:
    """The configuration in a file.

    Raises:
        ConfigError: as `load`.
    """
    return validate(sections.read_toml(path), str(path), overrides)


def find_file(name: str) -> Path:
    """The file that `--config NAME` means.

    Raises:
        ConfigError: there is none.
    """
    for path in (Path(name), CONFIGS_DIR / name, CONFIGS_DIR / f"{name}.toml"):
        try:
            if path.is_file():
                return path
        except OSError as error:  # a name that is too long, a folder that may not be looked into
            raise ConfigError(f"--config {name:.{sections.SHOWN}}: {error.strerror}") from None
    known = ", ".join(sorted(p.name for p in CONFIGS_DIR.glob("*.toml")))
    raise ConfigError(f"--config {name}: no such file, and none of that name in {CONFIGS_DIR} (there: {known})")


def validate(values: Mapping[str, Any], source: str, overrides: Sequence[Override] = ()) -> Config:
    """Typed sections from nested dicts; `source` names the file in messages.

    Raises:
        ConfigError: as `load`.
    """
    model = values.get("model")
    if isinstance(model, dict):
        values = {**values, "model": {k: value for k, value in model.items() if k not in GONE}}
    optim = values.get("optim")
    if isinstance(optim, dict) and any(o.section == "optim" and o.key in WARMUPS for o in overrides):
        # A warm-up on the command line replaces the file's, whichever unit that has.
        values = {**values, "optim": {k: value for k, value in optim.items() if k not in WARMUPS}}
    return sections.validate(Config, {"train": {}, **values}, source, NEIGHBOURS, overrides)


def model_section(keys: Mapping[str, Any], source: str) -> Model:
    """A [model] section by itself; arguments and errors as of `validate`."""
    return validate({"model": keys, "train": {"steps": 1}}, source).model


def help_text(section: str = "") -> str:
    """The text that `--help` prints, or `--help SECTION`.

    Raises:
        ConfigError: no section has that name.
    """
    if not section:
        return f"{HELP}\n{declared.describe_keys(Config)}"
    known = list(Config.model_fields)
    if section not in known:
        raise ConfigError(f"--help {section:.{sections.SHOWN}}: expected a section, one of {', '.join(known)}")
    return declared.describe_keys(Config, section).lstrip()
