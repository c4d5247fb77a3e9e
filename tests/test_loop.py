"""train.py against a plain loop of transformers' BLOOM, torch's AdamW and Megatron's rates; every file a run leaves.

Each run turns some switches on, and all that it records is compared with what the plain loop says it should be.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import os
import re
import resource
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import BloomConfig, BloomForCausalLM

from dtmega import config
from dtmega.checkpoint.resume import open_checkpoint, state_of
from dtmega.checkpoint.run import Checkpoints
from dtmega.checkpoint.state import State
from dtmega.data.objectives.next_token import NEXT_TOKEN
from dtmega.data.text import Text, open_text
from dtmega.distributed.watchdog import Watch
from dtmega.ops import optim
from dtmega.training import device_peaks
from dtmega.training.sharded_model import ShardedModel
from tests.layouts import DEBUG, write_text
from tests.models.test_bloom import hf_name
from tests.ops.test_optim import megatron
from tests.test_faults import alone, replaced
from tests.training.test_metrics import events

V, D, L, H, S = 128, 16, 1, 2, 12
PADDED_V = 144
PEAK_FLOPS = 1e12
SMALL = DEBUG | {
    "model.vocab_size": V,
    "model.pad_vocab_to_multiple": PADDED_V,  # rows without a gradient, for [log] num_zeros
    "model.hidden_size": D,
    "model.n_layers": L,
    "model.n_heads": H,
    "model.hidden_dropout": 0.0,
    "model.attention_dropout": 0.0,
    "data.seq_len": S,
    "batch.micro_batch_size": 2,
    "batch.global_batch_size": 4,
    "optim.lr": 0.05,
    "optim.min_lr": 0.01,
    "optim.warmup": 2,
    "optim.weight_decay": 0.5,
    "optim.beta1": 0.8,
    "optim.beta2": 0.9,
    "optim.eps": 1e-3,  # far above the rounding of gradients that are zero, as those of the keys' biases
    "optim.clip_grad": 0.5,
    "train.steps": 5,
    "train.drift_interval": 3,
    "eval.interval": 2,
    "eval.steps": 2,
    "log.interval": 4,
    "log.num_zeros": False,
    "log.params_norm": False,
}


class Switches(NamedTuple):
    """A run.

    Attributes:
        keys: of its configuration, beside SMALL.
        sizes: sequences of each of its steps.
        lost: steps that must change no weight -> what goes wrong there, "loss is nan" or the like.
        parts: how many starts of the same command it takes.
    """

    keys: dict[str, Any]
    sizes: Sequence[int] = (4, 4, 4, 4, 4)
    lost: Mapping[int, str] = MappingProxyType({})
    parts: int = 1


PASSED_OVER = "[train] skip_steps"
RUNS = {
    "as it is": Switches({}),
    "everything recorded": Switches(
        {
            "log.num_zeros": True,
            "log.params_norm": True,
            "log.tensorboard": True,
            "checkpoint.interval": 3,
            "train.drift_interval": 2,
            "eval.sample_tokens": 9,
            "run.seed": 7,
        }
    ),
    "nothing that can be left out": Switches(
        {
            "eval.interval": 0,
            "log.interval": 0,
            "train.drift_interval": 0,
            "optim.clip_grad": 0.0,
            "optim.warmup": 0,
            "checkpoint.final": False,
            "eval.sample_tokens": 0,
        }
    ),
    "every step": Switches(
        {
            "eval.interval": 1,
            "log.interval": 1,
            "log.num_zeros": True,
            "train.drift_interval": 1,
            "checkpoint.interval": 1,
            "checkpoint.keep": 3,
            "batch.micro_batch_size": 0,
            "run.timeout_s": 300.0,
            "run.grace_s": 30.0,
        }
    ),
    # The ramp: 2 sequences up to the 8th sample, then 4. After 16 of the 18 samples another step does not fit.
    "in samples": Switches(
        {
            "train.steps": 0,
            "train.samples": 18,
            "batch.rampup": [2, 2, 8],
            "optim.unit": "samples",
            "optim.schedule": "linear",
            "optim.warmup": 5,
            "log.tensorboard": True,
        },
        sizes=(2, 2, 2, 2, 4, 4),
    ),
    "in tokens": Switches(
        {
            "train.steps": 0,
            "train.tokens": 20 * S + S - 1,
            "optim.unit": "tokens",
            "optim.schedule": "linear",
            "optim.warmup": 20 * S - 50,
            "data.eod_mask_loss": False,
            "eval.prompt": "",
        }
    ),
    "another training loss": Switches({"model.label_smoothing": 0.2, "model.z_loss": 0.01}),
    "skipped steps": Switches(
        {
            "train.steps": 8,
            "train.max_skipped": 2,
            "train.skip_steps": [[1, 1], [7, 8]],
            "log.tensorboard": True,
            "log.interval": 1,
        },
        sizes=(4,) * 8,
        lost={
            **dict.fromkeys((1, 7, 8), PASSED_OVER),
            **{2: "loss is nan", 3: "grad_norm is inf", 5: "grad_norm is nan", 6: "loss is inf"},
        },
    ),
    "in parts": Switches(
        {"train.steps": 6, "train.exit_interval": 3, "log.tensorboard": True, "batch.micro_batch_size": 0},
        sizes=(4,) * 6,
        lost={2: "loss is inf"},
        parts=2,
    ),
}


class Noted:
    """The record of a run from inside.

    Attributes:
        weights: the first ones, by the names of transformers.
        rates: of each update and each group of parameters.
        sums: losses of the microbatches of each batch that was evaluated, added up.
        beats: (step, phase).
        checks: steps after which copies were compared.
        on_disk: the step of the newest line of metrics.jsonl that was there at its last fsync.
        saves: (step, on_disk) of each checkpoint, when it begins.
        patience_s: of the watch, (grace_s, timeout_s).
        timeouts_s: of the process groups.
        ranks: what the watch says of them when the first step begins.
    """

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.rates: list[list[float]] = []
        self.sums: list[float] = []
        self.beats: list[tuple[int, str]] = []
        self.checks: list[int] = []
        self.on_disk = 0
        self.saves: list[tuple[int, int]] = []
        self.patience_s: set[tuple[float, float]] = set()
        self.timeouts_s: set[float] = set()
        self.ranks = ""


class Recorded(NamedTuple):
    """The result of a run: what it did and left behind.

    Attributes:
        codes: of its exits, one for each part.
        lines: of metrics.jsonl.
        output: lines on stdout.
        peaks_bytes: of resident memory, before and after it.
    """

    folder: Path
    cfg: config.Config
    codes: list[int]
    lines: list[dict[str, Any]]
    output: list[str]
    peaks_bytes: tuple[int, int]
    noted: Noted


class Plain(NamedTuple):
    """The result of the plain loop.

    Attributes:
        lines: of metrics.jsonl, without what depends on a clock.
        evaluated_tokens: how many there were in each evaluation.
        rates: of each update.
        sample: how the trained model goes on from the prompt.
    """

    lines: list[dict[str, Any]]
    evaluated_tokens: list[int]
    rates: list[float]
    sample: list[int]


@pytest.fixture(scope="module")
def text_keys(tmp_path_factory) -> dict[str, str]:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module", params=RUNS)
def ran(request, tmp_path_factory, text_keys) -> tuple[Switches, Recorded, Plain]:
    switches = RUNS[request.param]
    keys = SMALL | text_keys | switches.keys
    folder = tmp_path_factory.mktemp("run")
    recorded = record(keys, folder, switches)
    return switches, recorded, plain_loop(keys, recorded.noted.weights, open_text(recorded.cfg, NEXT_TOKEN), switches)


def record(keys: dict[str, Any], folder: Path, switches: Switches) -> Recorded:
    """Run train.py in this process, once for each part, and note what it does."""
    noted = Noted()
    before_bytes = peak_bytes()
    with noting(noted, switches.lost), contextlib.redirect_stdout(io.StringIO()) as output:
        codes = [alone(keys, folder / "run") for _ in range(switches.parts)]
    peaks_bytes = before_bytes, peak_bytes()
    cfg = config.load(["--config", str(folder / "run" / "config.toml")])
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return Recorded(folder / "run", cfg, codes, lines, output.getvalue().splitlines(), peaks_bytes, noted)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextlib.contextmanager
def noting(noted: Noted, lost: Mapping[int, str]) -> Iterator[None]:
    """Note what is done, on a machine of PEAK_FLOPS, and let go wrong what is to go wrong."""
    draw, update = ShardedModel.draw, optim.AdamW.step
    beat, check_copies = Watch.beat, ShardedModel.check_copies
    forward_backward, losses = ShardedModel.forward_backward, ShardedModel.losses
    save, fsync = Checkpoints.save, os.fsync

    def noting_weights(self: ShardedModel, seed: int) -> None:
        draw(self, seed)
        if not noted.weights:
            noted.weights = {hf_name(name): p.detach().clone() for name, p in self.named_parameters()}

    def noting_rates(self: optim.AdamW, *args: Any) -> Any:
        noted.rates.append([group["lr"] for group in self.param_groups])
        return update(self, *args)

    def noting_beats(self: Watch, step: int, phase: str) -> None:
        noted.beats.append((step, phase))
        noted.patience_s.add((self.grace_s, self.timeout_s))
        beat(self, step, phase)
        if phase == "data" and not noted.ranks:
            noted.ranks = self.who_is_behind()

    def noting_checks(self: ShardedModel) -> None:
        noted.checks.append(noted.beats[-1][0])
        check_copies(self)

    def noting_saves(self: Checkpoints, tensors: Mapping[str, Tensor], state: State) -> Any:
        noted.saves.append((state.progress.step, noted.on_disk))
        return save(self, tensors, state)

    def noting_syncs(fd: int) -> None:
        fsync(fd)
        file = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if file.name == "metrics.jsonl":
            noted.on_disk = json.loads(file.read_text().splitlines()[-1])["step"]

    def noting_sums(self: ShardedModel, microbatches: Any) -> Tensor:
        total = losses(self, microbatches)
        noted.sums.append(total.item())
        return total

    def going_wrong(self: ShardedModel, microbatches: Any, counts: Any, scale: Any) -> Tensor:
        for group in dist.distributed_c10d._world.pg_map:
            noted.timeouts_s.add(group._get_backend(self.world.device).options._timeout.total_seconds())
        total = forward_backward(self, microbatches, counts, scale)
        step = microbatches[0]["sample_ids"][0].item() // 4 + 1
        name, _, value = lost.get(step, "").partition(" is ")
        if name == "grad_norm":
            next(iter(self.owned().values())).grad[0, 0] = float(value)  # pyright: ignore[reportOptionalSubscript]
        return total * float(value) if name == "loss" else total

    with contextlib.ExitStack() as stack:
        for owner, name, function in (
            (ShardedModel, "draw", noting_weights),
            (optim.AdamW, "step", noting_rates),
            (Watch, "beat", noting_beats),
            (ShardedModel, "check_copies", noting_checks),
            (Checkpoints, "save", noting_saves),
            (os, "fsync", noting_syncs),
            (ShardedModel, "losses", noting_sums),
            (ShardedModel, "forward_backward", going_wrong),
            (device_peaks, "matmul_flops", lambda device, dtype: PEAK_FLOPS),
        ):
            stack.enter_context(replaced(owner, name, function))
        yield


def plain_loop(keys: dict[str, Any], weights: dict[str, Tensor], text: Text, switches: Switches) -> Plain:
    """The same run as one would write it for one device and nothing else."""
    model = BloomForCausalLM(
        BloomConfig(vocab_size=PADDED_V, hidden_size=D, n_layer=L, n_head=H, hidden_dropout=0.0, attention_dropout=0.0)
    )
    model.load_state_dict(weights | {"lm_head.weight": weights["transformer.word_embeddings.weight"]})
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": keys["optim.weight_decay"]}, {"params": others, "weight_decay": 0.0}],
        betas=(keys["optim.beta1"], keys["optim.beta2"]),
        eps=keys["optim.eps"],
    )

    def total_loss(split: str, numbers: range, smoothing: float = 0.0, z_loss: float = 0.0) -> tuple[Tensor, int]:
        """Sum over the tokens that count, and how many these are."""
        rows = torch.stack([torch.from_numpy(text.samples(split)[g].astype("int64")) for g in numbers])
        tokens, labels = rows[:, :-1], rows[:, 1:]
        if keys["data.eod_mask_loss"]:
            labels = labels.masked_fill(tokens == text.tokenizer.eod_id, -100)
        logits = model(tokens).logits[..., :V].flatten(0, 1)
        loss = F.cross_entropy(logits, labels.flatten(), reduction="sum", label_smoothing=smoothing)
        counts = labels.flatten() != -100
        return loss + z_loss * (logits.logsumexp(-1).square() * counts).sum(), int(counts.sum())

    @torch.no_grad()
    def evaluated(split: str) -> float:
        of_batches = [total_loss(split, range(4 * i, 4 * i + 4)) for i in range(keys["eval.steps"])]
        evaluated_tokens.append(sum(n_tokens for _, n_tokens in of_batches))
        return sum(loss.item() for loss, _ in of_batches) / evaluated_tokens[-1]

    evaluated_tokens: list[int] = []
    lines: list[dict[str, Any]] = []
    rates: list[float] = []
    ends = [*itertools.accumulate(switches.sizes)]
    units = {"steps": [*range(1, len(ends) + 1)], "samples": ends, "tokens": [end * S for end in ends]}
    progress = units[keys.get("optim.unit", "steps")]
    curve = keys.get("optim.schedule", "cosine"), keys["optim.warmup"], progress[-1]
    interval = keys["eval.interval"]
    if interval:
        lines.append({"step": 0, "val_loss": evaluated("valid")})
    for step, (end, size) in enumerate(zip(ends, switches.sizes, strict=True), start=1):
        rate = megatron(progress[step - 1], *curve, keys["optim.lr"], keys["optim.min_lr"])
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        factors = keys.get("model.label_smoothing", 0.0), keys.get("model.z_loss", 0.0)
        total, n_tokens = total_loss("train", range(end - size, end), *factors)
        loss = total / n_tokens
        loss.backward()
        limit = keys["optim.clip_grad"] or math.inf
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit).item()
        line = {"step": step, "loss": loss.item(), "grad_norm": norm, "tokens": end * S}
        odd = switches.lost.get(step)
        if odd == PASSED_OVER:
            why = {"reason": odd, "skipped": True, "sample_ids": [end - size, end]}
            lines.append({"step": step, "tokens": end * S} | why)
        elif odd:
            why = {odd.partition(" is ")[0]: None, "reason": odd, "skipped": True, "sample_ids": [end - size, end]}
            lines.append(line | why)
        else:
            optimizer.step()
            rates.append(rate)
            line["lr"] = rate
            if keys["log.num_zeros"]:
                line["num_zeros"] = (PADDED_V - V) * D
            if keys["log.params_norm"]:
                line["params_norm"] = math.sqrt(sum(p.double().square().sum().item() for p in model.parameters()))
            lines.append(line)
        if interval and step % interval == 0 and step < len(ends):
            lines.append({"step": step, "val_loss": evaluated("valid")})
    lines += [
        {"step": len(ends), f"{name}_loss": evaluated(split)} for name, split in (("val", "valid"), ("test", "test"))
    ]
    generator = torch.Generator().manual_seed(keys.get("run.seed", 1234))
    tokens = text.tokenizer.encode(keys.get("eval.prompt", "def "))
    n_prompt = len(tokens)
    for _ in range(keys["eval.sample_tokens"] if tokens else 0):
        logits = model(torch.tensor([tokens])).logits[0, -1, :V].detach()
        logits[logits < logits.topk(50).values[-1]] = -math.inf
        token = torch.multinomial((logits / 0.8).softmax(-1), 1, generator=generator).item()
        if token == text.tokenizer.eod_id:
            break
        tokens.append(int(token))
    return Plain(lines, evaluated_tokens, rates, tokens[n_prompt:])


OF_PHASES = {"data_s", "forward_backward_s", "reduce_s", "optimizer_s", "other_s"}
OF_A_CLOCK = {"tokens_per_s", "mfu", "peak_memory_bytes", "step_time_s", *OF_PHASES}


def saves(switches: Switches, cfg: config.Config) -> list[int]:
    """The steps after which a checkpoint is written."""
    steps = range(1, len(switches.sizes) + 1)
    intervals = [interval for interval in (cfg.checkpoint.interval, cfg.train.exit_interval) if interval]
    return [
        step
        for step in steps
        if any(step % interval == 0 for interval in intervals) or (step == steps[-1] and cfg.checkpoint.final)
    ]


def test_every_number_of_every_line_is_that_of_the_plain_loop(ran):
    _, recorded, plain = ran
    lines = [line for line in recorded.lines if "checkpoint" not in line]
    assert len(lines) == len(plain.lines)
    for line, expected in zip(lines, plain.lines, strict=True):
        found = {name: value for name, value in line.items() if name not in OF_A_CLOCK}
        if "num_zeros" in found and 0 <= found["num_zeros"] - expected["num_zeros"] <= L * D:
            found["num_zeros"] = expected["num_zeros"]  # the gradient of a bias of the keys may be rounded to zero
        exact, rounded = ({k: v for k, v in expected.items() if isinstance(v, float) == yes} for yes in (False, True))
        assert {name: value for name, value in found.items() if name not in rounded} == exact
        assert {name: found[name] for name in rounded} == pytest.approx(rounded, rel=1e-5)


def test_the_losses_of_an_evaluation_are_added_up_in_fp64(ran):
    _, recorded, plain = ran
    n = recorded.cfg.eval.steps
    totals = [sum(recorded.noted.sums[i : i + n]) for i in range(0, len(recorded.noted.sums), n)]
    means = [line[name] for line in recorded.lines for name in ("val_loss", "test_loss") if name in line]
    assert means == [total / n_tokens for total, n_tokens in zip(totals, plain.evaluated_tokens, strict=True)]


def test_every_group_of_parameters_has_the_rate_of_its_step_at_every_update(ran):
    _, recorded, plain = ran
    assert recorded.noted.rates == [pytest.approx([rate, rate], rel=1e-12) for rate in plain.rates]


def test_speed_is_that_of_the_steps_own_tokens_in_its_own_time(ran):
    switches, recorded, _ = ran
    flops_per_token = L * (6 * (4 * D * D + 2 * D * 4 * D) + 6 * S * D) + 6 * V * D
    for line in recorded.lines:
        if "lr" in line:
            tokens_per_s = switches.sizes[line["step"] - 1] * S / line["step_time_s"]
            assert line["tokens_per_s"] == pytest.approx(tokens_per_s)
            assert line["mfu"] == pytest.approx(tokens_per_s * flops_per_token / PEAK_FLOPS)
            before, after = recorded.peaks_bytes
            assert before <= line["peak_memory_bytes"] <= after


def test_checkpoints_are_of_the_steps_that_are_due_and_know_where_the_run_was(ran):
    switches, recorded, _ = ran
    cfg = recorded.cfg
    due = saves(switches, cfg)
    lines = [line for line in recorded.lines if "checkpoint" in line]
    assert [(line["step"], line["checkpoint"]) for line in lines] == [(step, step) for step in due]
    assert all(line["checkpoint_stall_s"] > 0 for line in lines)
    assert sorted(path.name for path in (recorded.folder / "checkpoints").glob("[!.]*")) == [
        f"step-{step:08}" for step in due[-cfg.checkpoint.keep :]
    ]
    for step in due[-cfg.checkpoint.keep :]:
        state = state_of(open_checkpoint(str(recorded.folder / "checkpoints" / f"step-{step:08}")))
        skipped = sum(lost <= step for lost in switches.lost)
        assert state.progress == (step, sum(switches.sizes[:step]), skipped, 0, 0)
        assert state.updates == step - skipped
        assert state.recent == []
        assert state.layout == {"processes": 1, "pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1}
        assert state.config == cfg.model_dump()


def test_the_lines_of_a_checkpoints_steps_are_on_the_disk_before_it(ran):
    switches, recorded, _ = ran
    assert recorded.noted.saves == [(step, step) for step in saves(switches, recorded.cfg)]


def test_the_watch_hears_of_each_part_of_each_step_and_copies_are_checked_when_it_is_time(ran):
    switches, recorded, plain = ran
    cfg, n_steps = recorded.cfg, len(switches.sizes)
    interval, evaluation = cfg.eval.interval, ["evaluation"] * cfg.eval.steps
    expected = [(0, phase) for phase in evaluation if interval]
    for step in range(1, n_steps + 1):
        validated = interval and step % interval == 0 and step < n_steps
        after = [*(evaluation if validated else []), *(["checkpoint"] if step in saves(switches, cfg) else [])]
        parts = ["counts", "forward+backward", "reduce", "optimizer"]
        trained = [] if switches.lost.get(step) == PASSED_OVER else parts
        expected += [(step, phase) for phase in ("data", *trained, "report", *after)]
    # An end of document ends the sample.
    n_drawn = min(len(plain.sample) + 1, cfg.eval.sample_tokens) if cfg.eval.prompt else 0
    expected += [(n_steps, phase) for phase in [*evaluation, *evaluation, *["sample"] * n_drawn]]
    assert [beat for beat in recorded.noted.beats if beat[1] != "load"] == expected
    assert ((0, "load") in recorded.noted.beats) == (switches.parts > 1)
    assert recorded.noted.ranks.startswith("rank 0 together: step 1 in data")  # it reads what ranks have shared
    assert recorded.noted.patience_s == {(cfg.run.grace_s, cfg.run.timeout_s)}
    assert recorded.noted.timeouts_s == {2 * cfg.run.timeout_s}
    every = cfg.train.drift_interval
    assert recorded.noted.checks == [step for step in range(1, n_steps + 1) if every and step % every == 0]


def test_tensorboard_has_every_number_of_every_line_or_is_not_there(ran):
    _, recorded, _ = ran
    if not recorded.cfg.log.tensorboard:
        assert not (recorded.folder / "tensorboard").exists()
        return
    found = {(e.step, v.tag): v.simple_value for e in events(recorded.folder) for v in e.summary.value}
    expected = {
        (line["step"], name): value
        for line in recorded.lines
        for name, value in line.items()
        if type(value) in (int, float) and name != "step"
    }
    assert found == pytest.approx(expected, rel=1e-6)


def test_what_is_printed_is_what_is_recorded(ran):
    switches, recorded, _ = ran
    cfg, n_steps = recorded.cfg, len(switches.sizes)
    expected = []
    for line in recorded.lines:
        text = ""
        if "lr" in line:
            if cfg.log.interval and (line["step"] % cfg.log.interval == 0 or line["step"] == n_steps):
                text = f"loss {line['loss']:.4f} | grad_norm {line['grad_norm']:.2f} | lr {line['lr']:.1e} | "
        elif "skipped" in line:
            first, end = line["sample_ids"]
            how = "passed over" if line["reason"] == PASSED_OVER else "skipped"
            text = f"{how}: {line['reason']} | samples {first} to {end - 1}"
        elif "checkpoint" not in line:
            ((name, loss),) = ((k.removesuffix("_loss"), v) for k, v in line.items() if k.endswith("_loss"))
            text = f"{name} loss {loss:.4f} | ppl {math.exp(loss):.2f}"
        expected += [f"step {line['step']}/{n_steps} | {text}"] if text else []
    # Speed and the time that is left depend on a clock.
    printed = [re.sub(r"[\d,]+ tok/s .*", "", line) for line in recorded.output if line.startswith("step ")]
    assert printed == expected


OF_A_START = ("run: ", "the learning rate rises ", "changed ", "stopped ", "written: ", "to look ", "nothing ")


def test_a_run_says_what_it_is_and_where_it_goes_on_and_ends(ran):
    switches, recorded, _ = ran
    cfg, n_steps = recorded.cfg, len(switches.sizes)
    tokens, there = sum(switches.sizes) * S, open_text(cfg, NEXT_TOKEN).samples("train").n_tokens
    parameters = PADDED_V * D + 2 * D + L * (12 * D * D + 13 * D) + 2 * D
    flops_per_token = L * (6 * 12 * D * D + 6 * S * D) + 6 * V * D
    assert recorded.output[:2] == [
        f"bloom: {parameters:,} parameters, {flops_per_token / 1e6:,.1f} MFLOP/token, float32 on 1 x cpu",
        f"data: {there:,} training tokens; {n_steps} steps of 4 x {S} tokens = {tokens:,} tokens, "
        f"{tokens / there:.2f} epochs",
    ]
    assert set(open_text(cfg, NEXT_TOKEN).notes) <= set(recorded.output)
    stops = [step for step in saves(switches, cfg) if cfg.train.exit_interval and step < n_steps]
    said = [line for line in recorded.output if line.startswith(OF_A_START)]
    expected = []  # of what has changed since the checkpoint, nothing
    for start, end in itertools.pairwise([0, *stops, n_steps]):
        expected.append(f"run: {recorded.folder}, {f'resumed at step {start}' if start else 'from the start'}")
        if cfg.optim.unit == "tokens" and 2 * cfg.optim.warmup > tokens:
            rises = f"rises for {cfg.optim.warmup} of the run's {tokens} tokens"
            why = f"the warm-up is {cfg.optim.warmup} tokens long"
            keys = "[optim] warmup, or warmup_fraction = 0.1 for a tenth of any length"
            expected.append(f"the learning rate {rises}: {why} ({keys})")
        if end < n_steps:
            why = "[train] exit_interval; the same command goes on from there"
            expected.append(f"stopped after step {end} of {n_steps}: {why}")
        newest = [step for step in saves(switches, cfg) if step <= end]
        checkpoint = f", {recorded.folder}/checkpoints/step-{newest[-1]:08}" if newest else ""
        expected.append(f"written: config.toml and metrics.jsonl in {recorded.folder}{checkpoint}")
        expected.append(f"to look at it: dtmega report {recorded.folder}")
    assert said == expected
    assert recorded.codes == [0] * switches.parts


def test_the_sample_is_drawn_from_the_trained_model_by_the_seed(ran):
    _, recorded, plain = ran
    cfg = recorded.cfg
    said = "\n".join(recorded.output)
    assert "no sample" not in said
    shown = said.partition("a sample:\n")[2].partition("\nwritten:")[0]
    wanted = cfg.eval.prompt and cfg.eval.sample_tokens
    assert shown == (f"{cfg.eval.prompt}{open_text(cfg, NEXT_TOKEN).tokenizer.decode(plain.sample)}" if wanted else "")
