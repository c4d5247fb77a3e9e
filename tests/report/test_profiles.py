"""report/profiles.py: the page shows the profiles of a run, links their traces, and trusts no summary."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

import pytest
import torch.distributed as dist

from dtmega import __main__ as dtmega
from dtmega import train
from dtmega.report import page, profiles, run
from tests.report.test_page import HOSTILE, Tags, leaves, step_line, write
from tests.test_train import arguments

PHASES = [("data", 0.5), ("forward+backward", 4.0), ("optimizer", 1.5)]
OPERATORS = [("aten::addmm", 30, 1.0, 0.25), ("aten::copy_", 60, 2.0, 0.0), ("nccl", 5, 0.125, 3.0)]


def summary_of(first: int = 10, rank: int = 0, **others: Any) -> dict[str, Any]:
    """A summary of a window of 8 seconds, of which the phases take 6."""
    phases = [{"name": name, "seconds": seconds, "peak_bytes": None} for name, seconds in PHASES]
    keys = ("name", "calls", "self_s", "self_device_s")
    return {
        "rank": rank,
        "steps": [first, first + 3],
        "device": "cpu",
        "trace": f"step-{first:08d}-rank-{rank:05d}.json.gz",
        "seconds": 8.0,
        "phases": phases,
        "operators": [dict(zip(keys, operator, strict=True)) for operator in OPERATORS],
    } | others


def profiled(folder: Path, first: int = 10, rank: int = 0, **others: Any) -> Path:
    """Write a summary and its trace, whose size tells step and rank. Returns the path without a suffix."""
    stem = folder / "profiles" / f"step-{first:08d}-rank-{rank:05d}"
    stem.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{stem}.summary.json").write_text(json.dumps(summary_of(first, rank, **others)))
    Path(f"{stem}.json.gz").write_bytes(bytes(first + rank))
    return stem


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of 40 steps."""
    return write(tmp_path / "run", [step_line(step) for step in range(1, 41)])


def html_of(*folders: Path, page_folder: Path | None = None) -> str:
    """The section of profiles on the page of these runs, or '' if it has none."""
    runs = run.read([str(folder) for folder in folders])
    html = page.page(runs, {"curves": "{}"}, "", ["#123456"] * len(runs), page_folder or folders[0])
    return "".join(re.findall(r"<section><h2>Profiles</h2>.*?</section>", html, re.DOTALL))


def text_of(*folders: Path) -> str:
    return Tags(html_of(*folders)).text


def links_of(html: str) -> list[str]:
    """The addresses of the links to files, as they are written."""
    links = [attributes["href"] or "" for tag, attributes in Tags(html).tags if tag == "a"]
    return [link for link in links if not link.startswith("https://")]


def opened_from(page_path: Path, link: str) -> Path:
    """The file that a browser opens for a link of a page."""
    return Path(unquote(urlsplit(urljoin(page_path.absolute().as_uri(), link)).path))


def test_a_profile_that_the_trainer_has_written_is_on_the_page(tmp_path: Path, corpus: str):
    keys = {"train__steps": 4, "eval__interval": 3, "profile__steps": "[2, 3]", "profile__with_memory": "true"}
    try:
        assert train.main(arguments(tmp_path, corpus, **keys)) == 0
    finally:
        dist.destroy_process_group()
    ((profile,),) = profiles.read(tmp_path).windows
    (path,) = (tmp_path / profiles.FOLDER).glob("*.summary.json")
    content = json.loads(path.read_text())
    del content["trace"]
    assert profile.summary.model_dump() == content
    html = html_of(tmp_path)
    assert len(links_of(html)) == 1
    said = Tags(html).text
    assert "steps 2 to 3 rank 0 on cpu" in said
    assert "left out" not in said
    for phase in ("data", "forward+backward", "optimizer", "evaluation"):
        assert re.search(rf" {re.escape(phase)} [\d.]+% [\d.]+ m?s [\d.]+ GiB ", said), phase


def test_the_phases_are_shown_with_their_shares_of_the_window_and_the_rest_of_it(folder: Path):
    profiled(folder)
    html = html_of(folder)
    said = Tags(html).text
    assert "steps 10 to 13 rank 0 on cpu, a window of 8 s" in said
    rows = "data 6.2% 500 ms forward+backward 50.0% 4 s optimizer 18.8% 1.5 s rest 25.0% 2 s"
    assert f"phase share time {rows} operator" in said
    assert re.findall(r'<span style="width:([\d.]+)%', html) == ["6.250", "50.000", "18.750", "25.000"]


def test_a_phase_has_the_same_colour_in_the_bar_and_in_the_table(folder: Path):
    profiled(folder)
    bar, table = html_of(folder).split('<div class="profile">')
    colours = re.findall(r"background:(#\w+)", bar)
    assert len(set(colours)) == 4
    assert re.findall(r"background:(#\w+)", table) == colours


def test_phases_that_add_up_to_more_than_the_window_are_shares_of_their_sum(folder: Path):
    profiled(folder, seconds=5.0)
    said = text_of(folder)
    assert "data 8.3% 500 ms forward+backward 66.7% 4 s optimizer 25.0% 1.5 s operator" in said
    assert "aten::copy_ 2 s 40.0% 60" in said


def test_the_peak_of_memory_is_shown_for_the_phases_in_which_it_was_measured(folder: Path):
    profiled(folder)
    assert "peak memory" not in text_of(folder)
    phases = summary_of()["phases"]
    phases[1]["peak_bytes"] = 3 * 2**30
    profiled(folder, phases=phases)
    said = text_of(folder)
    assert "time peak memory data 6.2% 500 ms – forward+backward 50.0% 4 s 3 GiB optimizer" in said


def test_operators_of_a_cpu_are_ordered_by_their_time_on_it(folder: Path):
    profiled(folder)
    rows = "aten::copy_ 2 s 25.0% 60 aten::addmm 1 s 12.5% 30 nccl 125 ms 1.6% 5"
    assert f"operator self time of the window calls {rows}" in text_of(folder)


def test_operators_of_a_gpu_are_ordered_by_their_time_on_the_device(folder: Path):
    profiled(folder, device="cuda")
    rows = "nccl 3 s 37.5% 125 ms 5 aten::addmm 250 ms 3.1% 1 s 30 aten::copy_ 0 ms 0.0% 2 s 60"
    assert f"operator device time of the window time on the host calls {rows}" in text_of(folder)


def test_of_many_operators_those_with_less_time_are_folded_away(folder: Path):
    names = [f"op_{place}" for place in range(20)]
    operators = [{"name": n, "calls": 1, "self_s": 2.0**-i, "self_device_s": 0} for i, n in enumerate(names)]
    profiled(folder, operators=operators[::-1])
    shown, folded = html_of(folder).split("<details><summary>12 more operators</summary>")
    assert re.findall(r"op_\d+", Tags(shown).text) == names[:8]
    assert re.findall(r"op_\d+", Tags(folded).text) == names[8:]


def test_a_profile_without_phases_and_operators_is_all_rest(folder: Path):
    profiled(folder, phases=[], operators=[])
    assert "rest 100.0% 8 s No operators were recorded." in text_of(folder)


@pytest.mark.parametrize("name", ["run", "a b#c?d%20e&f'g\"h<i>;=+:é", "100%", "a:b"])
@pytest.mark.parametrize("place", ["", "..", "../other/deeper"])
def test_a_link_leads_from_the_page_to_the_trace_of_its_own_summary(tmp_path: Path, name: str, place: str):
    folder = write(tmp_path / name, [step_line(step) for step in range(1, 41)])
    stems = [profiled(folder, first, rank) for first, rank in ((30, 0), (30, 1), (10, 0))]
    page_path = Path(os.path.normpath(folder / place)) / "page.html"
    links = links_of(html_of(folder, page_folder=page_path.parent))
    assert [opened_from(page_path, link) for link in links] == [Path(f"{stem}.json.gz") for stem in stems]


def test_the_links_of_a_written_page_start_in_its_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    pytest.importorskip("plotly", reason="plotly is not installed (pip install -e '.[report]')")
    trace = Path(f"{profiled(folder)}.json.gz")
    (tmp_path / "pages").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    for argv, written in (([], folder / "report.html"), (["--output", "../pages/x.html"], tmp_path / "pages/x.html")):
        assert dtmega.main(["report", ".", *argv]) == 0
        (link,) = links_of(written.read_text(encoding="utf-8").rpartition("<script>")[0].rpartition("</style>")[2])
        assert opened_from(written, link) == trace


def test_the_name_of_a_trace_in_a_summary_is_no_address(folder: Path):
    profiled(folder, trace="javascript:alert(1)")
    assert links_of(html_of(folder)) == ["profiles/step-00000010-rank-00000.json.gz"]


def test_a_link_has_the_size_of_its_file_and_files_that_are_missing_have_no_link(folder: Path):
    stem = profiled(folder)
    assert ": trace (10 B) phase" in text_of(folder)
    Path(f"{stem}.memory.pickle").write_bytes(bytes(12_345))
    Path(f"{stem}.json.gz").unlink()
    html = html_of(folder)
    assert ": no trace beside its summary · memory snapshot (12.3 KB), for pytorch.org/memory_viz" in Tags(html).text
    assert links_of(html) == ["profiles/step-00000010-rank-00000.memory.pickle"]


def test_a_trace_is_not_opened(folder: Path):
    stem = profiled(folder)
    Path(f"{stem}.json.gz").unlink()
    os.mkfifo(f"{stem}.json.gz")  # whoever opens it waits for ever
    assert len(links_of(html_of(folder))) == 1


def test_the_newest_window_is_open_and_other_windows_and_ranks_are_folded(folder: Path):
    for first, rank in ((10, 0), (30, 1), (30, 0), (30, 3), (20, 2)):
        profiled(folder, first, rank)
    html = html_of(folder)
    outline = re.sub(r"<(?!/?(details|summary|h3))[^>]*>|operator.*", "", html)
    outline = re.sub(r"rank (\d) on cpu, a window of 8 s", r"r\1", outline)
    found = re.findall(r"<h3>(steps \d+)|<summary>(steps \d+|r\d)|(r\d):|(</?details>)", outline)
    assert ["".join(groups) for groups in found] == [
        *("steps 30", "r0", "<details>", "r1", "</details>", "<details>", "r3", "</details>"),
        *("<details>", "steps 20", "r2", "</details>", "<details>", "steps 10", "r0", "</details>"),
    ]


def test_of_more_windows_and_ranks_than_are_shown_the_newest_windows_and_the_first_ranks_are(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(profiles, "MAX_WINDOWS", 2)
    monkeypatch.setattr(profiles, "MAX_RANKS", 3)
    for first in (5, 10, 20):
        for rank in range(5):
            profiled(folder, first, rank)
    found = profiles.read(folder)
    shown = [(one.summary.steps[0], one.summary.rank) for window in found.windows for one in window]
    assert shown == [(first, rank) for first in (20, 10) for rank in range(3)]
    assert "9 more are left out here." in text_of(folder)


def test_of_many_damaged_summaries_only_some_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(profiles, "MAX_FILES", 3)
    for first in range(1, 8):
        profiled(folder, first, seconds=-1)
    assert profiles.read(folder) == profiles.Profiles([], 3, 4)


def test_a_profile_of_steps_that_the_run_has_not_reached_is_said_to_be_of_an_earlier_attempt(folder: Path):
    profiled(folder, 37)
    assert "earlier attempt" not in text_of(folder)
    profiled(folder, 38)
    assert "The run has not reached step 41: this is a profile of an earlier attempt" in text_of(folder)


def test_a_window_of_one_step_is_called_by_that_step(folder: Path):
    profiled(folder, 7, steps=[7, 7])
    assert "step 7 rank 0" in text_of(folder)


def test_profiles_of_several_runs_have_the_runs_name(tmp_path: Path):
    folders = [write(tmp_path / name, [step_line(step) for step in range(1, 41)]) for name in ("a", "b", "c")]
    profiled(folders[0])
    profiled(folders[2], 20)
    said = text_of(*folders)
    assert re.search(r"a: steps 10 to 13 rank 0.*c: steps 20 to 23 rank 0", said)
    assert "b: " not in said


def test_a_run_without_profiles_has_no_section_of_them(folder: Path):
    assert html_of(folder) == ""
    (folder / "profiles").write_text("a file")
    assert html_of(folder) == ""
    (folder / "profiles").unlink()
    (folder / "profiles").mkdir()
    for name in ("out-of-memory-rank-00000.memory.pickle", ".tmp-step-00000001-rank-00000.summary.json", "x.json"):
        (folder / "profiles" / name).write_text("{}")
    assert html_of(folder) == ""


@pytest.mark.parametrize(
    "raw",
    [
        b'{"rank": 0',
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        b" " * 2**20 + json.dumps(summary_of()).encode(),
        *(
            json.dumps(summary_of() | {key: value}).encode()
            for key, value in (
                ("rank", 1),  # of another file
                ("rank", True),
                ("steps", [11, 13]),  # of another file
                ("steps", [10, 9]),
                ("steps", [10]),
                ("steps", [10, 10**30]),
                ("seconds", 0),
                ("seconds", -1.0),
                ("seconds", float("nan")),
                ("seconds", float("inf")),
                ("seconds", 10**400),
                ("seconds", "8"),
                ("device", None),
                ("phases", None),
                ("phases", [{"name": "data", "seconds": 1}]),
                ("phases", [{"name": "data", "seconds": float("nan"), "peak_bytes": None}]),
                ("phases", [{"name": "data", "seconds": 1, "peak_bytes": -1}]),
                ("phases", [{"name": ["data"], "seconds": 1, "peak_bytes": None}]),
                ("phases", summary_of()["phases"] * 100),
                ("operators", {}),
                ("operators", [{"name": "x", "calls": 1.5, "self_s": 1, "self_device_s": 1}]),
                ("operators", [{"name": "x", "calls": 1, "self_s": -1, "self_device_s": 1}]),
                ("operators", [{"name": "x", "calls": 1, "self_s": 1, "self_device_s": 1e300}]),
                ("operators", [{"name": "x", "calls": 1, "self_s": 1}]),
            )
        ),
    ],
    ids=lambda raw: raw[:24].decode("ascii", "replace"),
)
def test_a_damaged_summary_is_left_out_and_counted_and_hides_no_other(folder: Path, raw: bytes):
    profiled(folder, 20)
    profiled(folder)
    (folder / "profiles" / "step-00000010-rank-00000.summary.json").write_bytes(raw)
    said = text_of(folder)
    assert "steps 20 to 23" in said
    assert "steps 10" not in said
    assert said.endswith("1 profile cannot be read and is left out.")


@pytest.mark.parametrize("key", [key for key in summary_of() if key != "trace"])
def test_a_summary_that_lacks_a_field_is_left_out_and_counted(folder: Path, key: str):
    for rank in (0, 1):
        stem = profiled(folder, rank=rank)
        content = summary_of(rank=rank)
        del content[key]
        Path(f"{stem}.summary.json").write_text(json.dumps(content))
    assert text_of(folder).endswith("2 profiles cannot be read and are left out.")


@pytest.mark.parametrize(
    "odd", [None, 10**400, 10**30, 2**53, -1, 1e308, 1e-300, "x", [None], {"a": None}], ids=lambda odd: f"{odd}"[:8]
)
def test_a_value_that_no_profiler_writes_is_no_traceback(folder: Path, odd: Any):
    whole = summary_of(device="cuda")
    stem = profiled(folder)
    for place in leaves(whole):
        changed = json.loads(json.dumps(whole))
        inside = changed
        for key in place[:-1]:
            inside = inside[key]
        inside[place[-1]] = odd
        Path(f"{stem}.summary.json").write_text(json.dumps(changed))
        assert text_of(folder), place


def test_no_text_of_a_summary_becomes_markup(folder: Path, tmp_path: Path):
    short = HOSTILE[len("</script>") : len("</script>") + 40]
    phase = {"name": short, "seconds": 1, "peak_bytes": 5}
    operators = [{"name": f"{HOSTILE}{i}\x1b\u202e", "calls": 1, "self_s": 1, "self_device_s": 1} for i in range(9)]
    profiled(folder, device=short, phases=[phase], operators=operators, trace=HOSTILE)
    stem = profiled(folder, rank=1)
    Path(f"{stem}.json.gz").rename(folder / "profiles" / f"{HOSTILE.replace('/', '_')}.json.gz")
    write(tmp_path / HOSTILE.replace("/", "\\"), [step_line(40)])
    profiled(tmp_path / HOSTILE.replace("/", "\\"))
    html = html_of(folder, tmp_path / HOSTILE.replace("/", "\\"))
    tags = Tags(html)
    assert {tag for tag, _ in tags.tags} <= {
        *("section", "h2", "h3", "p", "a", "code", "details", "summary", "div", "span", "wbr"),
        *("table", "thead", "tbody", "tr", "th", "td"),
    }
    assert {name for _, attributes in tags.tags for name in attributes} <= {"class", "style", "href", "rel"}
    assert tags.text.count(HOSTILE + "0\\x1b\\u202e") == 1
    assert tags.text.count(short) >= 2 + 9  # device, phase and operators: letter by letter


def test_the_name_of_a_kernel_is_cut_and_can_be_broken_between_its_words(folder: Path):
    name = "void at::native::kernel<4, at::native::Functor_add<float> >(int, float)"
    operator = {"name": name, "calls": 1, "self_s": 1, "self_device_s": 1}
    profiled(folder, operators=[operator, operator | {"name": "x" * 5000}])
    html = html_of(folder)
    said = Tags(html).text
    assert name in said
    assert "x" * 159 + "… " in said
    assert "x" * 160 not in said
    pieces = re.search(r'<span class="key">(void.*?)</span>', html)
    assert pieces is not None
    assert max(map(len, pieces[1].split("<wbr>"))) < 20
