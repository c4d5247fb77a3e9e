"""Pieces of HTML. Other people's text becomes one by `text` only."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from dtmega import output
from dtmega.report.run import Run


def text(value: object, keep: str = "") -> str:
    """Other people's text, as it stands, for a place between or within tags; what hides or steers is written out."""
    return html.escape(output.printable(str(value), keep))


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
