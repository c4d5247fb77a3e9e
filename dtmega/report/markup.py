"""Write pieces of HTML. Text from a file or a user becomes HTML only through `text`, which escapes the text."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tomli_w

from dtmega.files import console
from dtmega.report.run import Run

SHOWN_CHARACTERS, SHOWN_LINES = 1000, 15  # maximum length of text that is not folded away
MAX_CHARACTERS = 100_000  # maximum length of text on the page, including the folded part
WORD_CHARACTERS = 30  # maximum length of text that fits on one line of a narrow window


def text(value: object, keep: str = "") -> str:
    """Escape text for HTML, between tags or in an attribute. Control and invisible characters are escaped too.

    Args:
        value: text, or any object that `str` can convert to text.
        keep: control characters to keep, for example line ends.
    """
    return html.escape(console.printable(str(value), keep))


def breakable(value: object) -> str:
    """Escape a path or a key. Lines may break after slashes and dots, but not inside a name like step-00000120."""
    # Cut after each slash or dot, except before a digit (1.5), at the start of a path, or between two dots (../).
    pieces = re.split(r"(?<=[^\s/.][/.])(?=[^\s\d/.])", str(value))
    return "<wbr>".join(text(piece) if re.search(r"\s", piece) else unbroken(piece) for piece in pieces)


def unbroken(value: str) -> str:
    """Escape text. If the text is short enough for a narrow window, also prevent line breaks in the text."""
    return f'<span class="word">{text(value)}</span>' if len(value) <= WORD_CHARACTERS else text(value)


def times(html_text: str) -> str:
    """Add markup to HTML so that each timestamp, such as 2026-11-23 23:27:33 UTC, stays on one line."""
    return re.sub(r"\b\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", r"<time>\g<0></time>", html_text)


def cut(value: str, keep: str = "") -> str:
    """Escape text. If the text is long, show only its beginning, and fold the rest away.

    Everything after the first MAX_CHARACTERS characters is left out.

    Args:
        value: text to escape.
        keep: control characters to keep, for example line ends.
    """
    lines = value[:SHOWN_CHARACTERS].splitlines(keepends=True)[:SHOWN_LINES]
    beginning = "".join(lines)
    shown = f'<pre class="sample">{text(beginning, keep)}</pre>'
    folded = value[len(beginning) : MAX_CHARACTERS]
    if not folded:
        return shown
    summary = f"{len(value) - len(beginning):,} more characters"
    if len(value) > MAX_CHARACTERS:
        summary += f", the last {len(value) - MAX_CHARACTERS:,} not in this page"
    return f'{shown}<details><summary>{summary}</summary><pre class="sample">{text(folded, keep)}</pre></details>'


def json_in_html(json: str) -> str:
    """Escape `<` and `>` in JSON, so that the JSON cannot end the script element around it."""
    return json.replace("<", "\\u003c").replace(">", "\\u003e")


def keys_in_toml(summary: str, config: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The HTML of a folded list of configuration keys in TOML; [] if there are no keys.

    Args:
        summary: HTML that is shown while the keys are folded away.
        config: section -> key -> value. A value of None is left out, because TOML cannot express None.
    """
    sections = {}
    for section, keys in config.items():
        sections[section] = {key: value for key, value in keys.items() if value is not None}
    toml = tomli_w.dumps(sections)
    if not toml:
        return []
    return [f"<details><summary>{summary}</summary><pre>{text(toml, keep=chr(10))}</pre></details>"]


def names(runs: Sequence[Run], colours: Sequence[str]) -> list[str]:
    """The HTML of each run's name, preceded by a square in the run's colour."""
    return [swatch(colour) + text(run.name) for run, colour in zip(runs, colours, strict=True)]


def swatch(colour: str) -> str:
    """The HTML of a small square in the given colour."""
    return f'<span class="swatch" style="background:{colour}"></span>'


def table(headings: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """The HTML of a table. The headings and cells must be HTML already."""
    head = "".join(f"<th>{heading}</th>" for heading in headings)
    body_rows = []
    for row in rows:
        cells = "".join(f"<td>{cell}</td>" for cell in row)
        body_rows.append(f"<tr>{cells}</tr>")
    body = "\n".join(body_rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
