"""Find a Megatron command in a launch script or a line of text, then group the command's words by flag."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dtmega.interop.megatron.bash import run
from dtmega.interop.megatron.bash.words import Unknown, Word, known, unknowns, written
from dtmega.interop.megatron.launch.flags import first_name, row_of
from dtmega.interop.megatron.launch.row import MANY, Flag

SCRIPT = re.compile(r"(?:^|/)(pretrain_\w+)\.py$")
# Programs that can have a pretrain_*.py script as an argument without running the script.
OTHERS = (
    "grep",
    "ls",
    "find",
    "git",
    "wc",
    "head",
    "tail",
    "diff",
    "scp",
    "rsync",
    "vim",
    "nano",
    "less",
    "du",
    "stat",
)


class Command(NamedTuple):
    """A Megatron command.

    Attributes:
        script: name of the training script without `.py`, such as pretrain_bert.
        values: words that follow each flag, keyed by the flag's first name in the table. Unknown parts of a word are
            kept as written in the script.
        stray: words that belong to no flag.
        lines: line numbers in the script, keyed by flag or stray word.
        unknown: first unknown piece of each flag's words and of each stray word, keyed by the flag or the word; flags
            and words without unknown pieces are left out.
        names: name of each flag as written in the command, keyed by the flag's first name in the table.
        files: contents of files that the script wrote or that are in the script's folder, keyed by path; None for
            unknown contents.
    """

    script: str
    values: dict[str, list[str]]
    stray: list[str]
    lines: Mapping[str, int] = {}
    unknown: Mapping[str, Unknown] = {}
    names: Mapping[str, str] = {}
    files: Mapping[str, str | None] = {}


def read(source: str, given: Mapping[str, str], number: int = 0) -> tuple[Command, list[str]]:
    """Read a Megatron command from a line of text or a launch script.

    Args:
        source: text of a command that contains `pretrain_….py`, or path of a launch script.
        given: values of the script's environment variables, keyed by name.
        number: 1-based index of the command if the script has several commands; 0 if the script must have only one.

    Returns:
        The command, and remarks for the user.

    Raises:
        ValueError: `source` is not bash, has no Megatron command, has several Megatron commands although `number` is 0,
            or does not determine which command runs.
        OSError: the launch script cannot be read.
    """
    if not source.strip():
        raise ValueError("expected the path of a launch script, or a command in quotes, got an empty text")
    path = Path(source)
    is_line = " " in source.strip() and not _is_file(source)
    text = source if is_line else path.read_text(encoding="utf-8", errors="replace")
    launches, notes = run.launches(text, is_training, None if is_line else path.parent, given)
    if not launches:
        raise ValueError(f"'{source:.80}' has no command with a pretrain_....py in it")
    different = _different(launches)
    if number > len(different):
        raise ValueError(f"--command {number}: expected at most {len(different)}, the number of different commands")
    if len(different) > 1 and not number:
        lines = ", ".join(str(launch.line) for launch in different[:5])
        raise ValueError(
            f"the script runs {len(different)} different commands (lines {lines}{', ...' if different[5:] else ''}): "
            f"choose one with --command 1 to {len(different)}"
        )
    launch = different[max(number, 1) - 1]
    files = {path: known(content) for path, content in launch.files.items()}
    files |= _files_beside(launch, None if is_line else path.parent)
    return _sorted_by_flag(launch.words, files), notes


def is_training(words: Sequence[Word]) -> bool:
    """True if the words form a command that runs a pretrain_*.py script."""
    program = written(words[0]).rpartition("/")[2]
    return program not in OTHERS and any(_script(word) for word in words)


def _script(word: Word) -> str:
    """The name of the training script in a word, without `.py`; '' if the word names no training script."""
    text = written(word)
    match = SCRIPT.search(text)
    return match[1] if match and "=" not in text else ""


def _different(launches: Sequence[run.Launch]) -> list[run.Launch]:
    """The commands, except those with the same arguments as an earlier command."""
    seen: dict[tuple[str, ...], run.Launch] = {}
    for launch in launches:
        texts = [written(word) for word in launch.words]
        first = next(i for i, word in enumerate(launch.words) if _script(word))
        seen.setdefault(tuple(texts[first:]), launch)
    return list(seen.values())


def _files_beside(launch: run.Launch, folder: Path | None) -> dict[str, str]:
    """Read the JSON files that the command names, keyed by path. Files outside the script's folder are left out."""
    files: dict[str, str] = {}
    for word in launch.words:
        path = written(word)
        if folder is None or path in launch.files or not path.endswith(".json"):
            continue
        with contextlib.suppress(OSError, ValueError):
            full = (folder / path).resolve()
            if folder.resolve() in full.parents and full.stat().st_size < 1_000_000:
                files[path] = full.read_text(encoding="utf-8")
    return files


def _sorted_by_flag(words: Sequence[Word], files: Mapping[str, str | None]) -> Command:
    """Group the words after the training script by flag."""
    first = next(i for i, word in enumerate(words) if _script(word))
    values: dict[str, list[str]] = {}
    stray: list[str] = []
    lines: dict[str, int] = {}
    unknown: dict[str, Unknown] = {}
    names: dict[str, str] = {}
    flag = ""  # the last flag
    row: Flag | None = None  # the last flag's row in the table
    room = 0  # number of values that the last flag still accepts; MANY (a negative number) means no limit
    for word in words[first + 1 :]:
        text = written(word)
        owner = flag
        if text.startswith("--") and known(word[:1]) is not None:
            name, equals, value = text.partition("=")
            flag = owner = first_name(name)
            names[flag] = name
            lines[flag] = word[0].line
            values[flag] = [value] if equals else []
            unknown.pop(flag, None)
            row = row_of(name)
            n_values = row.n_values if row else MANY
            room = 0 if equals else n_values
        elif room and (room != MANY or row is None or known(word) is not None or len(word) > 1 or not values[flag]):
            values[flag].append(text)
            room -= 1
        else:
            stray.append(text)
            owner = text
            lines[text] = word[0].line if word else 0
        missing = unknowns([word])
        if missing:
            unknown.setdefault(owner, missing[0])
    return Command(_script(words[first]), values, stray, lines, unknown, names, files)


def _is_file(path: str) -> bool:
    with contextlib.suppress(OSError, ValueError):  # the text of a command may be too long for a path, or contain a NUL
        return Path(path).is_file()
    return False
