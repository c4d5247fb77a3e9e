"""Write docs/configuration.md: `python tools/configuration_page.py`."""

from __future__ import annotations

from pathlib import Path

import tomli_w
from pydantic.fields import FieldInfo

from dtmega import config
from dtmega.config.schema import choices_of, groups_of

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
OPENING = """\
# Every key

<!-- Written by tools/configuration_page.py from dtmega/config/__init__.py and dtmega/config/model_keys.py. -->

A configuration is a TOML file of sections, and any key of it can be set on the command line too: `lr` of `[optim]` is
`--optim.lr 1e-3`. Later ones win. A key that is not below is refused, with the one that was meant: names of other
trainers (`learning_rate`, `max_steps`, `tensor_parallel_degree`) are known for that. An interval of 0 is
off, −1 in `[mesh]` is what is left, and dtypes have torch's names. `train.py --help` prints the same list, `train.py -h
optim` one section of it.

The run writes the resolved configuration, every key in it, to `config.toml` in its directory.
"""


def page() -> str:
    """The whole text."""
    parts = [OPENING]
    for group in groups_of(config.Config):
        rows = [_row(key, field) for key, field in group.fields.items()]
        table = ["| key | default | |", "| --- | --- | --- |", *rows]
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
