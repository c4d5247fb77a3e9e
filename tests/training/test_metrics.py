"""metrics.py: the record a run leaves in metrics.jsonl, what it prints, and what survives a crash."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]  # made at run time

from dtmega import config
from dtmega.ops import cost
from dtmega.training import device_peaks, metrics
from dtmega.training.metrics import Metrics

SEQ_LEN, STEPS, BATCH = 16, 6, 4
PIECES = [cost.Piece("embed", 7, 0, 0), cost.Piece("layers.0", 1000, 6000, 60, label_flops=8000)]


class Start(Protocol):
    def __call__(self, start_step: int = 0, world_size: int = 1, write: bool = True, **log: Any) -> Metrics: ...


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Metrics of a run in tmp_path on a machine of 1 TFLOP/s, closed at the end."""
    monkeypatch.setattr(device_peaks, "matmul_flops", lambda device, dtype: 1e12)
    with contextlib.ExitStack() as stack:

        def start(start_step: int = 0, world_size: int = 1, write: bool = True, **log: Any) -> Metrics:
            settings = config.Config(
                run=config.Run(dir=str(tmp_path)),
                data=config.Data(seq_len=SEQ_LEN, mask_prob=0.25),
                train=config.Train(steps=STEPS),
                log=config.Log(**{"interval": 2, "tensorboard": False} | log),
            )
            end = settings.end(0, 0)
            run = Metrics(settings, PIECES, torch.device("cpu"), world_size, end, start_step=start_step, write=write)
            return stack.enter_context(contextlib.closing(run))

        yield start


def take(run: Metrics, step: int, loss: float = 4.0, **others: Any) -> None:
    values = {"grad_norm": 0.8, "lr": 1e-3, "step_time_s": 0.5} | others
    run.step(step, loss, **values, samples=range((step - 1) * BATCH, step * BATCH))


def lines(run_dir: Path) -> list[dict[str, Any]]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    text = (run_dir / "metrics.jsonl").read_text()
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_a_step_has_the_keys_of_the_contract(start: Start, tmp_path: Path):
    take(start(), 1)
    assert list(lines(tmp_path)[0]) == [
        *("step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "mfu", "peak_memory_bytes", "step_time_s")
    ]


def test_loss_and_gradient_norm_are_read_back_to_the_bit(start: Start, tmp_path: Path):
    loss, grad_norm = 10 / 3, 2**-0.5
    take(start(), 1, loss, grad_norm=grad_norm)
    assert (lines(tmp_path)[0]["loss"], lines(tmp_path)[0]["grad_norm"]) == (loss, grad_norm)


def test_tokens_count_from_the_start_of_the_run_when_it_resumes(start: Start, tmp_path: Path):
    take(start(start_step=4), 5)
    assert lines(tmp_path)[0]["tokens"] == 5 * BATCH * SEQ_LEN


def test_tokens_per_second_are_those_of_this_step(start: Start, tmp_path: Path):
    run = start()
    take(run, 1, step_time_s=100.0)
    take(run, 2, step_time_s=0.25)
    assert lines(tmp_path)[1]["tokens_per_s"] == BATCH * SEQ_LEN / 0.25


def test_mfu_is_the_share_of_the_peak_of_all_devices(start: Start, tmp_path: Path):
    take(start(world_size=3), 1, step_time_s=0.25)
    flops_per_s = BATCH * SEQ_LEN * (6000 + SEQ_LEN * 60 + 8000 // 4) / 0.25
    assert lines(tmp_path)[0]["mfu"] == pytest.approx(flops_per_s / 3e12)


def test_perplexity_of_a_uniform_guess_is_the_number_of_choices():
    assert metrics.perplexity(math.log(8192)) == pytest.approx(8192)


def test_a_loss_whose_perplexity_is_beyond_all_floats_is_still_printed(start: Start, capfd: pytest.CaptureFixture[str]):
    start().validation(2, 1000.0)
    assert capfd.readouterr().out == "step 2/6 | val loss 1000.0000 | ppl 485165195.41\n"  # e^20, as Megatron has it


def test_validation_and_test_lines_carry_their_loss(start: Start, tmp_path: Path):
    run = start()
    run.validation(4, 1.5)
    run.test(6, 1.25)
    assert lines(tmp_path) == [{"step": 4, "val_loss": 1.5}, {"step": 6, "test_loss": 1.25}]


def test_a_skipped_step_names_its_samples_and_why(start: Start, tmp_path: Path):
    start().skipped(3, math.nan, 0.5, samples=range(8, 12))
    assert lines(tmp_path)[0] == {
        "step": 3,
        "loss": None,
        "grad_norm": 0.5,
        "tokens": 12 * SEQ_LEN,
        "skipped": True,
        "sample_ids": [8, 12],
        "reason": "loss is nan",
    }


def test_an_infinite_validation_loss_is_still_json(start: Start, tmp_path: Path):
    start().validation(3, math.inf)
    assert lines(tmp_path)[0] == {"step": 3, "val_loss": None, "reason": "val_loss is inf"}


def test_a_line_is_in_the_file_before_the_next_step(start: Start, tmp_path: Path):
    run = start()
    take(run, 1)
    assert (tmp_path / "metrics.jsonl").read_text().endswith("}\n")


def killed_run(start: Start, run_dir: Path, tail: str = "") -> list[str]:
    """Five steps and a validation at 2 and 4, then whatever a killed process left; returns the whole lines."""
    run = start()
    for step in range(1, 6):
        take(run, step)
        if step % 2 == 0:
            run.validation(step, 3.0)
    path = run_dir / "metrics.jsonl"
    whole = path.read_text().splitlines(keepends=True)
    path.write_text("".join(whole) + tail)
    return whole


def test_a_resumed_run_has_each_step_once(start: Start, tmp_path: Path):
    killed_run(start, tmp_path)
    run = start(start_step=3)
    for step in range(4, 7):
        take(run, step)
    assert [r["step"] for r in lines(tmp_path) if "loss" in r] == [1, 2, 3, 4, 5, 6]


def test_what_was_written_up_to_the_checkpoint_stays_byte_for_byte(start: Start, tmp_path: Path):
    whole = killed_run(start, tmp_path)
    start(start_step=4)
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(whole[:6])  # steps 1 to 4, validation at 2 and 4


def test_a_line_torn_by_a_kill_is_dropped(start: Start, tmp_path: Path):
    killed_run(start, tmp_path, tail='{"step": 3, "loss": 4.0')
    take(start(start_step=5), 6)
    assert [r["step"] for r in lines(tmp_path)] == [1, 2, 2, 3, 4, 4, 5, 6]


def test_a_line_whose_bytes_are_damaged_is_dropped(start: Start, tmp_path: Path):
    whole = killed_run(start, tmp_path)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0, "val_\xff' + b"\0" * 8 + b"\n" + path.read_bytes())
    start(start_step=5)
    assert path.read_text() == "".join(whole)


@pytest.mark.parametrize("damage", ["null", "[]", "7", "{}", '{"step": null}', '{"step": 1e400}', "[" * 100_000])
def test_a_line_that_is_no_record_of_a_step_is_dropped(start: Start, tmp_path: Path, damage: str):
    whole = killed_run(start, tmp_path)
    path = tmp_path / "metrics.jsonl"
    path.write_text(damage + "\n" + path.read_text())
    start(start_step=5)
    assert path.read_text() == "".join(whole)


def test_a_whole_line_without_its_newline_does_not_swallow_the_next(start: Start, tmp_path: Path):
    killed_run(start, tmp_path, tail='{"step": 6, "val_loss": 4.0}')
    run = start(start_step=6)
    run.validation(6, 3.5)
    assert lines(tmp_path)[-1] == {"step": 6, "val_loss": 3.5}


def test_a_finished_run_that_is_started_again_evaluates_again(start: Start, tmp_path: Path):
    first = start()
    first.validation(4, 3.5)
    first.validation(6, 3.0)
    first.test(6, 2.5)
    start(start_step=6)
    assert lines(tmp_path) == [{"step": 4, "val_loss": 3.5}]


def test_a_new_run_in_an_old_directory_starts_anew_and_sets_the_old_lines_aside(start: Start, tmp_path: Path):
    killed_run(start, tmp_path)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    start().validation(0, 9.0)
    assert lines(tmp_path) == [{"step": 0, "val_loss": 9.0}]
    assert (tmp_path / "metrics.1.jsonl").read_bytes() == before
    start()
    assert (tmp_path / "metrics.1.jsonl").read_bytes() == before
    assert json.loads((tmp_path / "metrics.2.jsonl").read_text()) == {"step": 0, "val_loss": 9.0}


def test_a_validation_before_the_first_step_stays_when_the_run_resumes(start: Start, tmp_path: Path):
    start().validation(0, 9.0)
    start(start_step=1)
    assert lines(tmp_path) == [{"step": 0, "val_loss": 9.0}]


def test_a_kill_during_the_cut_loses_nothing(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole = killed_run(start, tmp_path)

    def kill(fd: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as killed:
        killed.setattr("os.fsync", kill)
        with pytest.raises(KeyboardInterrupt):
            start(start_step=2)
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(whole)


def test_a_process_that_does_not_write_leaves_no_trace(start: Start, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    run = start(write=False, tensorboard=True)
    take(run, 1)
    run.skipped(2, math.nan, 1.0, samples=range(4, 8))
    run.validation(2, 1.0)
    run.test(2, 1.0)
    run.message("hello")
    run.close()
    assert (list(tmp_path.iterdir()), *capfd.readouterr()) == ([], "", "")


def test_without_a_terminal_every_interval_and_the_last_step_print_a_line(
    start: Start, capfd: pytest.CaptureFixture[str]
):
    run = start(interval=4)
    for step in range(1, STEPS + 1):
        take(run, step, 4.12345, lr=9.5e-4)
    number = r"[\d,]+"
    fixed = r"loss 4\.1235 \| grad_norm 0\.80 \| lr 9\.5e-04"
    speed = rf"{number} tok/s \| [\d.e-]+ TFLOP/s per device \| eta"
    expected = rf"step 4/6 \| {fixed} \| {speed} \d\d:\d\d\nstep 6/6 \| {fixed} \| {speed} 00:00\n"
    assert re.fullmatch(expected, capfd.readouterr().out)


def test_a_line_is_on_its_way_at_once_where_stdout_is_a_pipe(start: Start, monkeypatch: pytest.MonkeyPatch):
    pipe = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(pipe))
    start().message("hello")
    assert pipe.getvalue() == b"hello\n"


def test_an_interval_of_zero_prints_no_step(start: Start, capfd: pytest.CaptureFixture[str]):
    run = start(interval=0)
    for step in range(1, STEPS + 1):
        take(run, step)
    assert capfd.readouterr().out == ""


def test_a_skipped_spike_says_that_it_is_one(start: Start, capfd: pytest.CaptureFixture[str]):
    start().skipped(3, 9.0, 0.5, samples=range(8, 12))
    assert "step 3/6 | skipped: spike: loss 9.0000, grad_norm 0.50 | samples 8 to 11" in capfd.readouterr().out


def test_a_save_records_how_long_training_stood_still(start: Start, tmp_path: Path):
    start().saved(4, 3, 0.25, "")
    assert lines(tmp_path) == [{"step": 4, "checkpoint": 3, "checkpoint_stall_s": 0.25}]


def test_a_save_that_failed_is_recorded_and_warned_of(start: Start, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    start(tensorboard=True).saved(4, 3, 0.25, "No space left on device (12 bytes free)")
    assert lines(tmp_path)[0]["checkpoint_error"] == "No space left on device (12 bytes free)"
    assert "WARNING: no checkpoint of step 3, the ones before stay: No space left" in capfd.readouterr().out


def test_a_checkpoint_that_a_power_cut_may_undo_is_recorded_and_warned_of(
    start: Start, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    start().saved(4, 3, 0.25, "", "Input/output error")
    assert lines(tmp_path) == [{"step": 4, "checkpoint": 3, "checkpoint_stall_s": 0.25}]
    expected = "step 4/6 | WARNING: a power cut may undo the checkpoint of step 3: Input/output error\n"
    assert capfd.readouterr().out == expected


def test_validation_test_and_skipped_steps_print_a_line_each(start: Start, capfd: pytest.CaptureFixture[str]):
    run = start()
    run.validation(2, 4.0)
    run.skipped(3, 4.0, math.inf, samples=range(8, 12))
    run.test(6, 4.0)
    assert capfd.readouterr().out.splitlines() == [
        "step 2/6 | val loss 4.0000 | ppl 54.60",
        "step 3/6 | skipped: grad_norm is inf | samples 8 to 11",
        "step 6/6 | test loss 4.0000 | ppl 54.60",
    ]


def test_the_printed_rate_is_that_of_the_last_steps_together(start: Start, capfd: pytest.CaptureFixture[str]):
    run = start()
    take(run, 1, step_time_s=3.0)
    take(run, 2, step_time_s=1.0)
    assert f"| {2 * BATCH * SEQ_LEN / 4.0:,.0f} tok/s |" in capfd.readouterr().out
    for _ in range(19):
        take(run, 2, step_time_s=1.0)
    assert f"| {BATCH * SEQ_LEN:,} tok/s |" in capfd.readouterr().out.splitlines()[-1]  # of 20 steps, not of the first


def test_the_printed_flops_are_the_models_on_each_device(start: Start, capfd: pytest.CaptureFixture[str]):
    take(start(world_size=2), 2, step_time_s=0.5)
    flops_per_token = 6000 + 60 * SEQ_LEN + 8000 // 4
    expected = BATCH * SEQ_LEN / 0.5 * flops_per_token / 2 / 1e12
    assert f" tok/s | {expected:.3g} TFLOP/s per device | eta " in capfd.readouterr().out


def test_the_eta_counts_the_time_between_steps(
    start: Start, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    clock = iter([1000.0, 1090.0])  # 90 s from step to step, with an evaluation say; a step itself takes 0.5 s
    monkeypatch.setattr(metrics.time, "monotonic", lambda: next(clock))
    run = start()
    take(run, 1)
    take(run, 2)
    assert capfd.readouterr().out.endswith("eta 06:00\n")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_a_bar_shows_loss_rate_and_eta(start: Start, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    run = start(start_step=2)
    take(run, 3)
    run.close()
    assert re.search(r" 50%\|.*\| 3/6 \| loss 4\.0000 \| 128 tok/s \| eta 00:01", terminal.getvalue())


def test_the_bar_counts_a_skipped_step(start: Start, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    run = start()
    take(run, 1)
    run.skipped(2, math.nan, 1.0, samples=range(4, 8))
    take(run, 3)
    run.close()
    assert "| 3/6 |" in terminal.getvalue()


def test_on_a_terminal_an_evaluation_counts_its_batches_and_elsewhere_it_does_not(
    start: Start, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    assert list(start().evaluating(iter("abc"), "valid", 3)) == ["a", "b", "c"]
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    run = start()
    batches = run.evaluating(iter("abc"), "valid", 3)
    monkeypatch.setattr("tqdm.std.tqdm.mininterval", 0, raising=False)
    assert list(batches) == ["a", "b", "c"]
    run.close()
    assert re.search(r"valid loss: .* 0/3 ", terminal.getvalue())


def test_tensorboard_gets_every_number_of_a_step(start: Start, tmp_path: Path):
    run = start(tensorboard=True)
    take(run, 1)
    run.close()
    record = lines(tmp_path)[0]
    values = {v.tag: v.simple_value for event in events(tmp_path) for v in event.summary.value}
    assert values == pytest.approx({k: v for k, v in record.items() if k != "step"}, rel=1e-6)


def test_tensorboard_hides_what_the_killed_run_wrote_after_the_checkpoint(start: Start, tmp_path: Path):
    start(start_step=4, tensorboard=True).close()
    assert [e.step for e in events(tmp_path) if e.HasField("session_log")] == [5]


def test_a_start_in_the_second_of_the_one_before_leaves_its_file_of_tensorboard_alone(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(metrics.time, "time", lambda: 1e9)
    for step in (1, 2):
        run = start(start_step=step - 1, tensorboard=True)
        take(run, step)
        run.close()
    assert {e.step for e in events(tmp_path) if e.HasField("summary")} == {1, 2}


def events(run_dir: Path) -> list[Event]:
    """TensorBoard's files are TFRecords: length (8 bytes), its checksum (4), the event, its checksum (4)."""
    found = []
    for path in (run_dir / "tensorboard").iterdir():
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            found.append(Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    return found


def test_the_means_that_a_loss_is_made_of_have_names_where_there_are_several(start: Start, tmp_path: Path, capsys):
    assert metrics.several({"lm": 3.0}) == {}
    means: dict[str, Any] = {**metrics.several({"mlm": 3.0, "order": 0.5, "right": 0.75})}
    run = start(interval=1)
    take(run, 1, 3.5, **means)
    run.validation(1, 3.25, **means)
    run.test(6, 3.0, **means)
    step, validation, test = lines(tmp_path)
    assert {name: step[name] for name in ("loss", *means)} == {"loss": 3.5, **means}
    assert validation == {"step": 1, "val_loss": 3.25, "val_mlm": 3.0, "val_order": 0.5, "val_right": 0.75}
    assert test == {"step": 6, "test_loss": 3.0, "test_mlm": 3.0, "test_order": 0.5, "test_right": 0.75}
    assert "val loss 3.2500 | mlm 3.0000 | order 0.5000 | right 0.7500\n" in capsys.readouterr().out


def test_a_new_run_without_experts_sets_the_loads_of_an_earlier_mixture_aside(start: Start, tmp_path: Path):
    (tmp_path / "expert_loads.jsonl").write_text('{"first": 1, "step": 6, "loads": {"0": [3, 5]}}\n')
    start()
    assert not (tmp_path / "expert_loads.jsonl").exists()
    assert (tmp_path / "expert_loads.1.jsonl").read_text() == '{"first": 1, "step": 6, "loads": {"0": [3, 5]}}\n'
