"""`dtmega plan`: its answer is that of `plan_job`, its exit code says if the run fits; test_dry_run.py has refusals."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from dtmega import config, families, mesh
from dtmega.__main__ import main as command
from dtmega.distributed import exit_codes
from dtmega.ops.cost import Piece
from dtmega.pipelining.table import SCHEDULES, Action
from dtmega.planning.answers import answer, comparisons, job
from dtmega.planning.extrapolation import repeats
from dtmega.planning.plan import Plan, plan_job
from dtmega.report.units import binary
from dtmega.training import checks
from tests.planning.small import KEYS, LAYOUT, ROOT

PLAN = ["plan", *KEYS, *LAYOUT]


class Planned(NamedTuple):
    """A command that has run: its exit code and output, and the plan that it answered from."""

    code: int
    out: str
    err: str
    json: dict[str, Any]
    plan: Plan


@pytest.fixture(scope="module")
def small_plan() -> Plan:
    """The plan of two ranks on fake GPUs."""
    laid_out = job.lay_out(config.load(KEYS), 2, job.machine_of("cuda"))
    return plan_job(laid_out.cfg, laid_out.sizes, laid_out.machine.device)


@pytest.fixture(scope="module")
def planned(tmp_path_factory, small_plan: Plan) -> Planned:
    with pytest.MonkeyPatch.context() as patch:
        return run(patch, tmp_path_factory.mktemp("plan"), small_plan)


def run(patch: pytest.MonkeyPatch, folder: Path, plan: Plan, *options: str) -> Planned:
    """The command, with a plan that is there already."""
    patch.setattr(answer, "plan_job", stand_in(plan))
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = command([*PLAN, "--json", str(folder / "plan.json"), *options])
    return Planned(code, out.getvalue(), err.getvalue(), json.loads((folder / "plan.json").read_text()), plan)


def stand_in(plan: Plan) -> Callable[..., Plan]:
    """`plan_job` for a job that is planned already; another job is an error."""

    def answered(
        cfg: config.Config,
        sizes: dict[str, int],
        device: Any,
        on_role: Callable[[int, int], object],
        imbalance: float = 1.0,
    ) -> Plan:
        assert (cfg, sizes, device, imbalance) == (plan.cfg, plan.sizes, plan.device, plan.imbalance)
        on_role(0, 1)
        return plan

    return answered


def test_the_numbers_in_json_are_those_of_the_plan(planned: Planned):
    by_place = {place: role for role in planned.json["roles"] for place in role["places"]}
    assert sorted(by_place) == sorted(planned.plan.roles)
    for place, role in planned.plan.roles.items():
        told = by_place[place]
        assert (told["peak_bytes"], told["at_peak"], told["held"]) == (
            max(span.peak_bytes for span in role.spans),
            role.peak.at_peak,
            role.held,
        )
        # Each total is added up again, work by work.
        sent_bytes = flops = 0.0
        for work, times in zip(role.works, repeats(role), strict=True):
            flops += work.flops * times
            sent_bytes += times * work.message.n_bytes if work.message else 0
        assert sum(told["flops"].values()) == flops
        assert sum(row["n_bytes"] for row in told["messages"]) == sent_bytes


def test_the_parts_of_the_predicted_step_add_up(planned: Planned):
    step = planned.json["prediction"]["step"]
    parts = step["compute_s"] + step["exposed_communication_s"] + step["bubble_fraction"] * step["seconds"]
    # Microbatches that were not run take the median times, so the sum is not exact.
    assert parts == pytest.approx(step["seconds"], rel=0.01)
    tokens = planned.plan.cfg.batch.global_batch_size * planned.plan.cfg.data.seq_len
    assert planned.json["prediction"]["budget"]["tokens_per_s"] == pytest.approx(tokens / step["seconds"])


def test_the_answer_is_marked_as_a_prediction_and_says_how_much_was_run(planned: Planned):
    assert planned.code == exit_codes.DONE
    assert "predicted, not measured (fabric h100-ib" in planned.out
    told = f"extrapolated from {planned.plan.run_microbatches} of {planned.plan.n_microbatches} microbatches"
    assert (told in planned.out) == (planned.plan.run_microbatches < planned.plan.n_microbatches)


def test_progress_goes_to_stderr(planned: Planned):
    assert planned.err == "dtmega plan: role 1 of 1\n"


@pytest.mark.parametrize("spare", [0, -1])
def test_the_exit_code_says_whether_peak_and_reserve_fit_into_the_given_memory(
    spare: int, small_plan: Plan, tmp_path: Path, monkeypatch
):
    peak = max(role.peak.peak_bytes for role in small_plan.roles.values())
    options = ["--memory", str(peak + 1000 + spare), "--reserve", "1000"]
    told = run(monkeypatch, tmp_path, small_plan, *options)
    assert told.code == (exit_codes.DONE if spare == 0 else exit_codes.DOES_NOT_FIT)
    assert told.json["fits"] == (spare == 0)


def test_the_fullest_role_decides_whether_the_run_fits(small_plan: Plan):
    (role,) = small_plan.roles.values()
    machine = job.machine_of("cuda", memory=str(2 * role.peak.peak_bytes), reserve="0")
    one = answer.price(small_plan, job.Job(small_plan.cfg, small_plan.sizes, machine))
    fuller = role._replace(spans=[span._replace(peak_bytes=3 * span.peak_bytes) for span in role.spans])
    two = one._replace(plan=small_plan._replace(roles={0: role, 1: fuller}))
    assert (one.fits, two.fits) == (True, False)


def test_without_memory_a_run_that_does_not_fit_ends_with_0(small_plan: Plan, tmp_path: Path, monkeypatch):
    shipped = (ROOT / "dtmega/planning/prices/fabrics/h100-ib.toml").read_text()
    (tmp_path / "tiny.toml").write_text(re.sub(r"memory_bytes = .*", "memory_bytes = 1000", shipped, count=1))
    told = run(monkeypatch, tmp_path, small_plan, "--fabric", str(tmp_path / "tiny.toml"))
    assert (told.code, told.json["fits"]) == (exit_codes.DONE, False)
    assert "DOES NOT FIT" in told.out


@pytest.mark.parametrize(("memory", "is_told"), [("24GiB", True), ("80GiB", False)])
def test_the_prices_of_a_device_with_other_memory_are_named(
    memory: str, is_told: bool, small_plan: Plan, tmp_path: Path, monkeypatch
):
    out = run(monkeypatch, tmp_path, small_plan, "--memory", memory).out
    line = (
        f"those of H100 SXM 80GB, which has 79.1 GiB, not those of a device with {memory.replace('G', ' G')} (--memory)"
    )
    assert (line in out) == is_told


def test_the_reserve_is_that_of_the_fabric_and_its_source_is_printed(planned: Planned):
    fabric = planned.json["prediction"]["fabric"]["gpu"]
    assert planned.json["memory"]["reserve_bytes"] == fabric["reserve_bytes"] > 0
    assert fabric["sources"]["reserve_bytes"] in planned.out


def test_an_answer_for_cpus_says_so_in_its_first_line(small_plan: Plan, tmp_path: Path, monkeypatch):
    cfg = job.lay_out(config.load([*KEYS, "--precision.params", "bfloat16"]), 2, job.machine_of("cpu")).cfg
    on_cpu = small_plan._replace(cfg=cfg, device=torch.device("cpu"))
    told = run(monkeypatch, tmp_path, on_cpu, "--device", "cpu", "--precision.params", "bfloat16")
    assert told.out.splitlines()[0].startswith("for the CPU path only")


def refusal(argv: list[str], capsys: Any) -> str:
    assert command(argv) == exit_codes.REFUSED
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return err


SPLIT = "ZBVZeroBubble"


@pytest.mark.parametrize(
    "schedule", [pytest.param(name, marks=() if name == SPLIT else pytest.mark.full) for name in SCHEDULES]
)
def test_a_plan_of_each_schedule_is_priced(schedule: str, tmp_path: Path):
    keys = [
        "--model.n_layers",
        "4",
        "--mesh.pp",
        "2",
        "--pipeline.schedule",
        schedule,
        "--batch.global_batch_size",
        "4",
    ]
    assert command([*PLAN, *keys, "--json", str(tmp_path / "plan.json")]) == exit_codes.DONE
    step = json.loads((tmp_path / "plan.json").read_text())["prediction"]["step"]
    seconds = {one["action"]: one["end_s"] - one["start_s"] for row in step["timeline"] for one in row}
    # The first stage has no inputs that need gradients, so its backward for inputs launches nothing.
    without_work = {action for action, duration_s in seconds.items() if not duration_s}
    assert without_work == {action for action in seconds if action.startswith("0I")}
    shares = [
        step["bubble_fraction"],
        *(step[part] / step["seconds"] for part in ("compute_s", "exposed_communication_s")),
    ]
    assert 0 <= min(shares) <= max(shares) <= 1


def test_a_plan_of_an_exact_run_is_answered(capsys):
    keys = ["--run.exact", "true", "--precision.params", "float32", "--batch.global_batch_size", "2"]
    assert command(["plan", *KEYS, "--world", "1", "--device", "cpu", *keys]) == exit_codes.DONE
    assert "digests of the weights are computed in a run" in capsys.readouterr().out


def test_a_mesh_with_an_open_size_needs_the_number_of_ranks(capsys):
    assert "dp_shard=-1" in refusal(["plan", *KEYS], capsys)


def test_json_that_cannot_be_written_is_refused_before_the_plan(tmp_path: Path, capsys):
    assert "--json" in refusal([*PLAN, "--json", str(tmp_path / "gone" / "plan.json")], capsys)


def test_a_mesh_that_does_not_make_the_ranks_is_refused_with_the_option_of_the_command(capsys):
    assert command(["plan", "--config", "bloom.toml", "--world", "4", "--mesh.tp", "3"]) == exit_codes.REFUSED
    assert "all there are ([mesh]; --world): 4 % 3 = 1, expected 0" in capsys.readouterr().err


def test_ctrl_c_leaves_in_one_line(monkeypatch, capsys):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(answer, "plan_job", interrupted)
    assert command(PLAN) == 130
    assert capsys.readouterr().err == "dtmega plan: interrupted\n"


@pytest.mark.parametrize("text", ["80 GiB/s", "GiB", "-1GiB", "1e9", "80GiBB", "80", "80B"])
def test_a_number_of_bytes_that_cannot_be_read_is_refused(text: str):
    with pytest.raises(ValueError, match="--memory"):
        job.read_option("--memory", text)


@pytest.mark.parametrize(
    ("text", "n_bytes"), [("1.5GiB", 3 * 2**29), ("2gb", 2 * 10**9), ("1 TiB", 2**40), ("7000", 7000)]
)
def test_a_number_of_bytes_has_binary_and_decimal_units(text: str, n_bytes: int):
    assert job.read_option("--reserve", text) == n_bytes


def test_weights_gradients_and_moments_are_16_bytes_a_parameter_over_the_ranks(small_plan: Plan, planned: Planned):
    (role,) = planned.json["roles"]
    (states,) = [one for one in role["formulas"] if one["what"].startswith("weights")]
    assert states["formula"] == 16 * planned.json["parameters"] / 2
    assert abs(states["difference"]) < 0.01


def test_a_weight_that_two_stages_share_counts_on_both_and_once_where_one_stage_has_both_pieces(small_plan: Plan):
    embed, head = Piece("embed", 100, 0, 0), Piece("head", 10, 0, 0, shared=100)
    decoder = Piece("decoder.embed", 0, 0, 0, shared=100)
    stages = [["embed", "decoder.embed"], ["head"]]
    cut = small_plan._replace(table=[[Action(0, "F", 0)], [Action(1, "F", 0)]], stages=stages)
    assert comparisons._copies(cut, 0, [embed, decoder]) == 0
    assert comparisons._copies(cut, 1, [head]) == 100


def test_the_bubble_of_equal_stages_is_that_of_the_formula(small_plan: Plan):
    table = []
    for rank in range(2):
        ahead = 2 - rank
        row = [Action(rank, "F", m) for m in range(ahead)]
        for m in range(4):
            row.append(Action(rank, "B", m))
            if m + ahead < 4:
                row.append(Action(rank, "F", m + ahead))
        table.append(row)
    piped = small_plan._replace(table=table, n_microbatches=4)
    laid_out = job.Job(small_plan.cfg, small_plan.sizes | {"pp": 2}, job.machine_of("cuda"))
    compared = comparisons.compare_bubble(laid_out, piped)
    assert compared is not None
    # One forward and one backward of 4 microbatches each are waited for: 1 of 5 parts of the step.
    assert (compared.counted, compared.formula) == (pytest.approx(0.2), pytest.approx(0.2))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--write", "best.toml"], "--write needs --search"),
        (["--search", "--world", "2", "--page", "plan.html"], "--page shows one layout"),
        (["--search"], "--search needs --world"),
    ],
)
def test_options_that_exclude_each_other_are_refused_before_anything_is_planned(options: list[str], words: str, capsys):
    assert command(["plan", *KEYS, *options]) == exit_codes.REFUSED
    assert words in capsys.readouterr().err


def test_a_search_writes_a_configuration_that_training_accepts_and_keeps_given_keys(tmp_path: Path, capsys):
    best = tmp_path / "best.toml"
    kept = ["--mesh.pp", "2", "--recompute.mode", "selective"]
    options = ["--world", "2", *kept, "--search", "--top", "1", "--write", str(best)]
    assert command(["plan", *KEYS, *options]) == exit_codes.DONE
    written = config.load(["--config", str(best)])
    checks.check(families.resolve(written), mesh.resolve(written.mesh, 2), torch.device("cuda", 0))
    assert (written.mesh.pp, written.recompute.mode) == (2, "selective")
    assert "accepts" in capsys.readouterr().out


def test_the_page_shows_the_peak_that_the_answer_names(small_plan: Plan, tmp_path: Path, monkeypatch):
    pytest.importorskip("plotly")
    page = tmp_path / "plan.html"
    run(monkeypatch, tmp_path, small_plan, "--page", str(page))
    assert binary(small_plan.fullest.peak.peak_bytes) in page.read_text(encoding="utf-8")
