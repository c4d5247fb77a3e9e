"""Find the arguments of a Megatron command in the text of a shell script, without running the script.

    words(Path("examples/pretrain_bert_distributed.sh").read_text())    # [..., 'pretrain_bert.py', '--num-layers', ...]

Assignments are followed, including quoted or bracketed values over several lines, and so is `${NAME:-default}`. Text
that only a shell could expand (`$(nproc)`, a variable of the environment) stays in the words as it is written.
"""

from __future__ import annotations

import re
import shlex

SCRIPT = re.compile(r"(?:^|/)(pretrain_\w+)\.py$")
ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?:\[[@*]\])?(?::?-([^}]*))?\}|([A-Za-z_]\w*))")
HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1[^\n]*\n.*?^\s*\2[ \t]*$", re.DOTALL | re.MULTILINE)
LONGEST = 1_000_000  # limit in characters for a statement whose variables are expanded
CLOSING = {'"': '"', "'": "'", "`": "`", "(": ")"}


def words(text: str) -> list[str]:
    """The words of the first command that contains a `pretrain_....py`; [] if there is none.

    Raises:
        ValueError: a quote or bracket never ends, or a statement grows beyond LONGEST when its variables are expanded.
    """
    known: dict[str, str] = {}
    for statement in _statements(HEREDOC.sub("", text)):
        assignment = ASSIGNMENT.fullmatch(statement)
        if assignment:
            name, value = assignment.groups()
            statement = _expanded(_unwrapped(value), known)
            known[name] = statement
        command = split_words(_expanded(statement, known))
        if any(SCRIPT.search(word) for word in command):
            return command
    return []


def split_words(line: str) -> list[str]:
    """The words of one command.

    Raises:
        ValueError: a quote never ends.
    """
    try:
        return shlex.split(line)
    except ValueError as error:
        raise ValueError(f"{error} in '{line:.80}'") from None


def _statements(text: str) -> list[str]:
    """Split a script into statements at line ends and semicolons outside quotes and brackets. Comments are removed."""
    text = text.replace("\\\r\n", " ").replace("\\\n", " ")
    statements = [""]
    closing = ""
    at = 0
    while at < len(text):
        letter = text[at]
        if closing:
            if letter == "\\" and closing == '"':
                statements[-1] += letter
                at += 1
                letter = text[at : at + 1]
            elif letter == closing:
                closing = ""
            elif letter == "#" and closing == ")" and text[at - 1].isspace():
                at = _end_of_line(text, at)
                continue
            statements[-1] += letter
        elif letter in "\n;":
            statements.append("")
        elif letter == "#" and (at == 0 or text[at - 1].isspace()):
            at = _end_of_line(text, at)
            continue
        else:
            closing = CLOSING.get(letter, "")
            statements[-1] += letter
        at += 1
    if closing:
        raise ValueError(f"expected the closing {closing} of '{statements[-1].strip():.80}'")
    return [statement.strip() for statement in statements if statement.strip()]


def _end_of_line(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end


def _unwrapped(value: str) -> str:
    """The value of an assignment, without the quotes or brackets around it."""
    value = value.strip()
    if len(value) > 1 and value[0] in "\"'(" and value[-1] == CLOSING[value[0]]:
        value = value[1:-1]
    return value


def _expanded(text: str, known: dict[str, str]) -> str:
    """Replace the variables in `text`. An unknown variable becomes its default after `:-`, or stays as it is."""

    def value(match: re.Match[str]) -> str:
        braced, default, bare = match.groups()
        name = braced or bare
        if name in known:
            return known[name]
        return match[0] if default is None else default

    # Values were expanded when they were assigned, so one pass is enough. A script that doubles a variable line by line
    # could still grow without limit.
    expanded = VARIABLE.sub(value, text)
    if len(expanded) > LONGEST:
        raise ValueError(f"the variables of '{text:.80}' make a text of {len(expanded):,} characters")
    return expanded
