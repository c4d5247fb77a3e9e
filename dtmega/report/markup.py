"""Pieces of HTML. Other people's text becomes one by `text` only."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

from dtmega.files import console
from dtmega.report.run import Run

SHOWN_LETTERS, SHOWN_LINES = 1000, 15  # of a long text, at once
MOST_LETTERS = 100_000
WORD_LETTERS = 30  # that have room in a narrow column


def text(value: object, keep: str = "") -> str:
    """Other people's text, as it stands, for a place between or within tags; what hides or steers is written out."""
    return html.escape(console.printable(str(value), keep))


def breakable(value: object) -> str:
    """Other people's paths and keys: a narrow window breaks them after a slash or a dot, not within step-00000120."""
    pieces = re.split(r"(?<=[^\s/.][/.])(?=[^\s\d/.])", str(value))
    return "<wbr>".join(text(piece) if re.search(r"\s", piece) else whole(piece) for piece in pieces)


def whole(value: str) -> str:
    """Text that is kept on one line if it is short enough for a narrow window."""
    return f'<span class="word">{text(value)}</span>' if len(value) <= WORD_LETTERS else text(value)


def times(html_text: str) -> str:
    """HTML in which no line ends within a time such as 2026-11-23 23:27:33 UTC."""
    return re.sub(r"\b\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", r"<time>\g<0></time>", html_text)


def cut(value: str, keep: str = "") -> str:
    """Other people's long text: its beginning, and behind a click the rest, as far as a page can hold it."""
    lines = value[:SHOWN_LETTERS].splitlines(keepends=True)[:SHOWN_LINES]
    beginning = "".join(lines)
    shown = f'<pre class="sample">{text(beginning, keep)}</pre>'
    rest = value[len(beginning) : MOST_LETTERS]
    if not rest:
        return shown
    summary = f"{len(value) - len(beginning):,} more letters"
    if len(value) > MOST_LETTERS:
        summary += f", the last {len(value) - MOST_LETTERS:,} not in this page"
    return f'{shown}<details><summary>{summary}</summary><pre class="sample">{text(rest, keep)}</pre></details>'


def json_in_html(json: str) -> str:
    """JSON in which no end of a script element can stand."""
    return json.replace("<", "\\u003c").replace(">", "\\u003e")


def names(runs: Sequence[Run], colours: Sequence[str]) -> list[str]:
    """The name of each run, with its colour before it."""
    return [swatch(colour) + text(run.name) for run, colour in zip(runs, colours, strict=True)]


def swatch(colour: str) -> str:
    """A square of a colour."""
    return f'<span class="swatch" style="background:{colour}"></span>'


def table(headings: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are HTML already."""
    head = "".join(f"<th>{heading}</th>" for heading in headings)
    body = "\n".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
