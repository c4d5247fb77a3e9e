"""The section "Profiles" of the page: how profiled steps spent their time, with links to their traces."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from dtmega.files.console import counted
from dtmega.report.colours import phase_colour
from dtmega.report.curves import plain
from dtmega.report.markup import swatch, table, text, unbroken
from dtmega.report.profiles import Phase, Profile, Summary
from dtmega.report.run import Run
from dtmega.report.units import duration, file_size, gibibytes

SHOWN_OPERATORS = 8  # number of operators that are not folded away
MAX_CHARACTERS = 160  # maximum length of an operator's name; names of C++ templates can have thousands of characters
REST = "rest"  # name for the part of a window's time that belongs to no phase
HOW_TO_OPEN = (
    'To look into a trace, open its file at <a href="https://ui.perfetto.dev" rel="noreferrer">ui.perfetto.dev</a>, '
    "which keeps it within the browser, or at <code>chrome://tracing</code>."
)
FOR_SNAPSHOTS = '<a href="https://pytorch.org/memory_viz" rel="noreferrer">pytorch.org/memory_viz</a>'


def section(runs: Sequence[Run], colours: Sequence[str], page_folder: Path) -> list[str]:
    """The HTML of the section, which shows every run that has profiles; [] if no run has profiles.

    Args:
        runs: runs on the page.
        colours: colour of each run.
        page_folder: folder that will contain the page. Links are relative to this folder.
    """
    out = []
    for run, colour in zip(runs, colours, strict=True):
        profiles = run.profiles
        who = f"{swatch(colour)}{text(run.name)}: " if len(runs) > 1 else ""
        for place, window in enumerate(profiles.windows):
            out += _window(window, who, run.record.last_step, page_folder, folded=place > 0)
        if profiles.damaged:
            are = "is" if profiles.damaged == 1 else "are"
            damaged = counted(profiles.damaged, "profile")
            out.append(f'<p class="note">{who}{damaged} cannot be read and {are} left out.</p>')
        if profiles.left_out:
            out.append(f'<p class="note">{who}{profiles.left_out:,} more are left out here.</p>')
    if not out:
        return []
    return ["<section><h2>Profiles</h2>", f'<p class="note">{HOW_TO_OPEN}</p>', *out, "</section>"]


def _window(profiles: Sequence[Profile], who: str, last_step: int, page_folder: Path, *, folded: bool) -> list[str]:
    """The HTML of one window: the first rank's profile, then the profiles of all other ranks, each folded away.

    Args:
        profiles: profiles of the window, at least one.
        who: HTML of the run's name, which precedes the steps; '' on a page about one run.
        last_step: last step that the run has completed.
        page_folder: folder that will contain the page. Links are relative to this folder.
        folded: whether to fold the whole window away.
    """
    first, last = profiles[0].summary.steps
    steps = f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
    out = []
    if last > last_step:
        out.append(
            f'<p class="note">The run has not reached step {last:,}: this is a profile of an earlier attempt, or of a '
            "run that was in this directory before.</p>"
        )
    shown, *others = profiles
    out += [f"<p>{_about(shown.summary)}: {_links(shown, page_folder)}</p>", _tables(shown.summary)]
    for profile in others:
        links = f"<p>{_links(profile, page_folder)}</p>"
        summary = f"<summary>{_about(profile.summary)}</summary>"
        out.append(f"<details>{summary}{links}{_tables(profile.summary)}</details>")
    if folded:
        return [f"<details><summary>{who}{steps}</summary>", *out, "</details>"]
    return [f"<h3>{who}{steps}</h3>", *out]


def _about(summary: Summary) -> str:
    """A profile's rank, device and window length, as HTML."""
    return text(f"rank {summary.rank} on {plain(summary.device)}, a window of {duration(summary.seconds)}")


def _links(profile: Profile, page_folder: Path) -> str:
    """Links to the trace and the memory snapshot of a profile, as HTML."""
    links = _link(profile.stem, ".json.gz", "trace", page_folder) or "no trace beside its summary"
    if snapshot := _link(profile.stem, ".memory.pickle", "memory snapshot", page_folder):
        links += f" · {snapshot}, for {FOR_SNAPSHOTS}"
    return links


def _link(stem: Path, suffix: str, label: str, page_folder: Path) -> str:
    """A link to one file of a profile, followed by the file's size, as HTML; '' if the file does not exist.

    Args:
        stem: path of the profile's files, without the suffix.
        suffix: suffix of the file.
        label: text of the link.
        page_folder: folder that will contain the page. The link is relative to this folder.
    """
    path = stem.with_name(stem.name + suffix)
    try:
        n_bytes = path.stat().st_size
    except OSError:
        return ""
    # A browser resolves ".." in a path as text, without following symbolic links. `os.path.abspath` does the
    # same, but `Path.resolve` would follow symbolic links.
    relative = os.path.relpath(os.path.abspath(path), os.path.abspath(page_folder))
    return f'<a href="{text(quote(os.fsencode(relative)))}">{label}</a> ({unbroken(file_size(n_bytes))})'


def _tables(summary: Summary) -> str:
    """The HTML of a summary: a bar of the phases, a table of the phases and a table of the operators."""
    bar, phases = _phases(summary)
    return f'{bar}<div class="profile"><div>{phases}</div><div>{_operators(summary)}</div></div>'


def _phases(summary: Summary) -> tuple[str, str]:
    """Two pieces of HTML: a bar with each phase's share, and a table with each phase's share, time and memory peak."""
    phases = list(summary.phases)
    rest_s = summary.whole_s - sum(phase.seconds for phase in phases)
    # Leave out the rest if the table would show it as 0.0%.
    if rest_s >= 0.0005 * summary.whole_s:
        phases.append(Phase(name=REST, seconds=rest_s, peak_bytes=None))
    has_peaks = any(phase.peak_bytes is not None for phase in phases)
    bars, rows = "", []
    for place, phase in enumerate(phases):
        share = phase.seconds / summary.whole_s
        colour = phase_colour(phase.name, place)
        bars += f'<span style="width:{100 * share:.3f}%;background:{colour}"></span>'
        name = f'<span class="word">{swatch(colour)}{text(plain(phase.name))}</span>'
        cells = [name, f"{share:.1%}", unbroken(duration(phase.seconds))]
        if has_peaks:
            cells.append("–" if phase.peak_bytes is None else unbroken(gibibytes(phase.peak_bytes)))
        rows.append(cells)
    headings = ["phase", "share", "time", *(["peak memory"] if has_peaks else [])]
    return f'<div class="bar">{bars}</div>', table(headings, rows)


def _operators(summary: Summary) -> str:
    """The HTML of a table of operators, slowest first. Operators after the first SHOWN_OPERATORS are folded away.

    The times are measured on the GPU, or on the CPU if there is no GPU.
    """
    timed = []
    for operator in summary.operators:
        timed.append((operator.self_device_s if summary.on_gpu else operator.self_s, operator))
    timed.sort(key=lambda pair: pair[0], reverse=True)
    rows = []
    for time_s, operator in timed:
        name = f'<span class="key">{_operator_name(operator.name)}</span>'
        host = [unbroken(duration(operator.self_s))] if summary.on_gpu else []
        share = f"{time_s / summary.seconds:.1%}"
        rows.append([name, unbroken(duration(time_s)), share, *host, f"{operator.calls:,}"])
    if not rows:
        return '<p class="note">No operators were recorded.</p>'
    times = ["device time", "of the window", "time on the host"]
    headings = ["operator", *(times if summary.on_gpu else ["self time", "of the window"]), "calls"]
    shown, more = table(headings, rows[:SHOWN_OPERATORS]), rows[SHOWN_OPERATORS:]
    if not more:
        return shown
    return f"{shown}<details><summary>{len(more)} more operators</summary>{table(headings, more)}</details>"


def _operator_name(name: str) -> str:
    """Escape an operator's name, and allow a line break after each colon, comma, bracket or underscore."""
    pieces = re.split(r"(?<=[:_,<(])(?=[^:_,<(])", plain(name, MAX_CHARACTERS))
    return "<wbr>".join(map(text, pieces))
