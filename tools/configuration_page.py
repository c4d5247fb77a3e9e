"""Write docs/configuration.md: `python tools/configuration_page.py`."""

from __future__ import annotations

from pathlib import Path

import tomli_w
from pydantic.fields import FieldInfo

from dtmega import config
from dtmega.config.help import groups_of
from dtmega.config.schema import choices_of

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
OPENING = """\
# Every key

<!-- Written by tools/configuration_page.py from the keys in dtmega/config/. -->

A configuration is a TOML file with sections. Any key can be set on the command line too: `lr` of `[optim]` is
`--optim.lr 1e-3`, and later options win. `train.py --help` prints the list below, `train.py -h optim` one section of
it.

An interval of 0 means never, −1 in `[mesh]` stands for all remaining ranks, and dtypes have torch's names. A key that
is not in the list is refused, with a suggestion of the right one, also for names of other trainers (`learning_rate`,
`max_steps`, `tensor_parallel_degree`).

A run writes its resolved configuration, with every key, to `config.toml` in its directory.
"""


def page() -> str:
    """The text of the page."""
    parts = [OPENING]
    for group in groups_of(config.Config):
        rows = [_row(key, field) for key, field in group.fields.items()]
        table = ["| key | default | meaning |", "| --- | --- | --- |", *rows]
        parts.append(f"\n## {group.title}\n\n" + "\n".join(table) + "\n")
    return "".join(parts)


def _row(key: str, field: FieldInfo) -> str:
    written = tomli_w.dumps({key: field.default}, multiline_strings=False)
    default = " ".join(written.strip().partition("= ")[2].split())
    choices = choices_of(field)
    listed = f"; one of {', '.join(f'`{choice}`' for choice in choices)}" if len(choices) > 1 else ""
    # A bar would end the cell.
    text = f"{field.description}{listed}".replace("|", "\\|")
    return f"| `{key}` | `{default}` | {text} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
