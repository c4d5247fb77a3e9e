"""Parse text with the bash grammar and map each piece of the text to its line in the script."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from dtmega.files import optional_imports
from dtmega.interop.megatron.bash.words import LONGEST, Text, Unknown, Word

if TYPE_CHECKING:
    from tree_sitter import Node

DEEPEST = 150  # limit for nested constructs, far below Python's recursion limit
# A placeholder that the reader of a published example must replace: NAME=<Specify path>. Bash rejects placeholders.
PLACEHOLDER = re.compile(r"^([ \t]*(?:export[ \t]+)?[A-Za-z_]\w*=)(<[A-Za-z][^<>\n]*>)", re.MULTILINE)
# Prefix for the names of stand-in variables, which replace unknown pieces while text is parsed.
STAND_IN = "__unknown_"


class Source(NamedTuple):
    """Parsed bash text.

    Attributes:
        text: the text as UTF-8; the syntax tree's nodes hold offsets into these bytes.
        starts: offsets at which the script's line number changes, in ascending order.
        lines: line numbers in the script, one for each offset in `starts`; each number is valid up to the next offset.
        unknown: unknown pieces of the text, keyed by the name of the stand-in variable.
        root: root node of the syntax tree.
    """

    text: bytes
    starts: list[int]
    lines: list[int]
    unknown: dict[str, Unknown]
    root: Node

    def line(self, offset: int) -> int:
        """The script's line number for an offset in the text."""
        return self.lines[bisect.bisect_right(self.starts, offset) - 1]

    def segments(self, start: int, stop: int) -> Iterator[Text]:
        """Yield the text between two offsets, split into lines of the script."""
        while start < stop:
            i = bisect.bisect_right(self.starts, start)
            end = min(self.starts[i], stop) if i < len(self.starts) else stop
            yield Text(self.text[start:end].decode("utf-8", errors="replace"), self.lines[i - 1])
            start = end


def parse(word: Word) -> Source:
    """Parse a script, or a string that a shell would run.

    Args:
        word: text to parse; its unknown pieces are parsed as stand-in variables, which `Source.unknown` lists.

    Raises:
        ValueError: the text is not bash, is longer than LONGEST or nests deeper than DEEPEST; or tree-sitter is not
            installed.
    """
    parts: list[str] = []
    starts = [0]
    lines = [word[0].line if word else 1]
    unknown: dict[str, Unknown] = {}
    offset = 0
    for piece in word:
        text = piece.text
        if isinstance(piece, Unknown):
            name = f"{STAND_IN}{len(unknown)}"
            unknown[name] = piece
            text = f"${{{name}}}"
        if lines[-1] != piece.line:
            starts.append(offset)
            lines.append(piece.line)
        parts.append(text)
        offset += len(text.encode())
    whole = "".join(parts)
    if len(whole) > LONGEST:
        raise ValueError(f"line {lines[0]}: a script of {len(whole):,} characters, expected at most {LONGEST:,}")
    # Remove a backslash at the end of the text, because there is no next line to join.
    whole = re.sub(r"\\\s*\Z", "", whole) + "\n"
    encoded = whole.encode()
    source = Source(encoded, starts, lines, unknown, _parser().parse(encoded).root_node)
    _check(source)
    return source


def script(text: str) -> Word:
    """Convert a script's text to a word, with one piece for each line and an unknown piece for each placeholder."""
    text = text.replace("\r\n", "\n").replace("\0", "")
    pieces: list[Text | Unknown] = []
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        match = PLACEHOLDER.match(line)
        if match:
            name = match[1].split()[-1].rstrip("=")
            pieces.append(Text(match[1], number))
            pieces.append(Unknown(match[2], number, name))
            line = line[match.end() :]
        pieces.append(Text(line, number))
    return tuple(pieces)


def _parser() -> Any:
    with optional_imports.needed("megatron", "from-megatron"):
        import tree_sitter
        import tree_sitter_bash
    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))


def _check(source: Source) -> None:
    """Refuse text that the grammar cannot parse, and constructs that nest too deeply."""
    cursor = source.root.walk()
    depth = 0
    while True:
        node = cursor.node
        assert node is not None
        # The grammar does not support every form of ${NAME...}. `expand.py` makes unsupported forms unknown.
        is_form = node.is_missing and node.type == "}" and node.parent is not None and node.parent.type == "expansion"
        if (node.is_error or node.is_missing) and not is_form:
            line = source.line(node.start_byte)
            near = node.text.decode("utf-8", errors="replace") if node.text else ""
            raise ValueError(f"line {line}: this is not bash{_near(near, node)}")
        if depth > DEEPEST:
            raise ValueError(f"line {source.line(node.start_byte)}: more than {DEEPEST} nested constructs")
        if cursor.goto_first_child():
            depth += 1
            continue
        while not cursor.goto_next_sibling():
            if not cursor.goto_parent():
                return
            depth -= 1


def _near(text: str, node: Node) -> str:
    if node.is_missing:
        return f": '{node.type}' is missing"
    first = text.strip().splitlines()[:1]
    return f", near '{first[0]:.40}'" if first else ""
