"""Write docs/from-megatron.md: `python tools/flags_page.py`."""

from __future__ import annotations

from pathlib import Path

from dtmega import config
from dtmega.declared import Kinds
from dtmega.megatron.flags import FLAGS, Flag

PAGE = Path(__file__).resolve().parent.parent / "docs" / "from-megatron.md"
OPENING = """\
# Coming from Megatron

<!-- Written by tools/flags_page.py from dtmega/megatron/flags.py. -->

`dtmega from-megatron` reads a launch script, or a line of arguments in quotes, and prints the TOML that says the same.
The script is read as text and never run. What is not carried over is named on stderr with the reason, and what the TOML
still lacks stands in it as a comment:

    python -m dtmega from-megatron examples/pretrain_bert_distributed.sh > bert.toml
    python -m dtmega from-megatron 'pretrain_gpt.py --num-layers 24 --hidden-size 1024 ...' > gpt.toml

`python -m dtmega groups --world 16 --mesh.tp 2 --mesh.pp 4` lists the ranks of every group as Megatron's
`initialize_model_parallel` does.

Every flag of a pre-training, with Megatron's default, the key here and its default. A flag that is left out counts with
Megatron's default: where ours is another, the TOML says it. No key: the reason.
"""


def page() -> str:
    """The whole text."""
    parts = [OPENING]
    for title, flags in FLAGS.items():
        rows = ["| flag | default | key | default here | |", "| --- | --- | --- | --- | --- |"]
        parts.append("\n".join([f"\n## {title}\n", *rows, *map(_row, flags)]) + "\n")
    return "".join(parts)


def _row(flag: Flag) -> str:
    names = ", ".join(f"`{name}`" for name in flag.names)
    keys = ", ".join(f"`[{section}] {key}`" for section, _, key in (key.partition(".") for key in flag.keys))
    cells = [names, flag.default or "", keys, ", ".join(map(_default, flag.keys)), flag.why]
    return f"| {' | '.join(cells)} |"


def _default(name: str) -> str:
    """The default of section.key, in each of the classes that a section may have."""
    section, _, key = name.partition(".")
    kinds = Kinds.of(config.Config.model_fields[section])
    if key == kinds.tells:
        return kinds.default
    defaults = dict.fromkeys(str(field.default) for field in kinds.owners(key).values())
    return " or ".join("empty" if default in ("", "[]") else default for default in defaults)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
