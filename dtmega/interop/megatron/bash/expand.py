"""Expand a script's words: all forms of variables, quotes, arithmetic and command substitutions."""

from __future__ import annotations

import fnmatch
import glob
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from dtmega.interop.megatron.bash import arithmetic
from dtmega.interop.megatron.bash.grammar import STAND_IN, Source
from dtmega.interop.megatron.bash.scope import Scope
from dtmega.interop.megatron.bash.words import Fields, Text, Unknown, Word, joined, known, with_blanks

if TYPE_CHECKING:
    from tree_sitter import Node

EXPANSIONS = ("simple_expansion", "expansion", "arithmetic_expansion", "command_substitution", "process_substitution")
MOST_WORDS = 10_000  # maximum number of words from one brace range
LONGEST_PATTERN = 2_000  # limit in characters for a pattern, and for text matched against a pattern
# `{a,b}` outside quotes expands to two words. No known launch script uses this form, so such a word becomes unknown.
BRACE_LIST = re.compile(r"\{[^{}]*(,|\.\.)[^{}]*\}")
BRACE_RANGE = re.compile(r"\{(-?\d{1,9})\.\.(-?\d{1,9})(?:\.\.(-?\d{1,9}))?\}")
BLANKS = " \t\n"
QUOTES = "\"'"
ANSI_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "0": ""}


class Expander:
    """Expands a script's words in a given shell state.

    Attributes:
        source: parsed text that the nodes belong to.
        scope: state of the shell.
        run_inside: function that follows the statements in a `$(…)` node and returns their output.
    """

    def __init__(self, source: Source, scope: Scope, run_inside: Callable[[Node], Word]) -> None:
        self.source = source
        self.scope = scope
        self.run_inside = run_inside

    def fields(self, nodes: Iterable[Node]) -> list[Word]:
        """Expand the nodes of a command into words."""
        words: list[Word] = []
        for node in nodes:
            if node.type == "comment":
                continue
            fields = Fields()
            self._add(node, fields)
            fields.close()
            words += fields.words
        return words

    def string(self, node: Node | None) -> Word:
        """Expand a node without splitting the result into words, as in an assignment."""
        if node is None:
            return ()
        fields = _Unsplit()
        self._add(node, fields)
        return joined(fields.parts)

    def pattern(self, nodes: Iterable[Node]) -> str | None:
        """Combine adjacent nodes into a pattern, with quoted parts taken literally; None if a part is not known."""
        pattern = ""
        for node in nodes:
            parts = node.named_children if node.type == "concatenation" else [node]
            for part in parts:
                text = known(self.string(part))
                if text is None:
                    return None
                pattern += glob.escape(text) if part.type in ("string", "raw_string") else text
        return pattern

    def span(self, parent: Node, start: int, stop: int) -> Word:
        """Expand the text between two offsets inside a node, as if the text were in double quotes."""
        return joined(self._parts(parent, start, stop, unescaped_in_quotes))

    def line(self, node: Node) -> int:
        return self.source.line(node.start_byte)

    def text(self, node: Node) -> str:
        """The text of a node, as written in the script."""
        return self.source.text[self._begin(node) : node.end_byte].decode("utf-8", errors="replace").strip()

    def _begin(self, node: Node) -> int:
        """The offset where a node's text begins, without the blanks that the grammar puts before an expansion."""
        if node.type not in ("command_substitution", "expansion"):
            return node.start_byte
        raw = self.source.text[node.start_byte : node.end_byte]
        return node.start_byte + min(raw.find(mark) for mark in (b"`", b"$") if mark in raw)

    def unknown(self, node: Node, name: str = "") -> Word:
        """A word with a single unknown piece that stands for a node."""
        return (Unknown(self.text(node), self.line(node), name),)

    def arithmetic(self, parent: Node, start: int, stop: int) -> int | None:
        """Evaluate the arithmetic between two offsets inside a node; None if the value is not known."""
        text = known(self.span(parent, start, stop))
        return None if text is None else self.arithmetic_of(text)

    def arithmetic_of(self, text: str) -> int | None:
        """Evaluate an arithmetic expression in which every `$` is expanded already; None if the value is not known."""
        try:
            return arithmetic.evaluate(text, self._read_number, self._write_number)
        except (arithmetic.NotKnown, RecursionError):
            return None

    def _read_number(self, name: str) -> str:
        items = self.scope.items(name)
        text = None if items is None else known(items.get("0", ()))
        if text is None:
            raise arithmetic.NotKnown
        return text

    def _write_number(self, name: str, value: str) -> None:
        self.scope.assign(name, (Text(value, 0),))

    def _add(self, node: Node, fields: Fields) -> None:
        """Expand a node and add the result to `fields`."""
        kind = node.type
        if kind in ("concatenation", "brace_expression", "word") and BRACE_LIST.search(self._unquoted(node)):
            self._add_range(node, fields)
        elif kind in ("concatenation", "command_name", "translated_string"):
            for child in node.named_children:
                if self._begin(child) > child.start_byte:
                    fields.close()
                self._add(child, fields)
        elif kind == "string":
            self._add_string(node, fields)
        elif kind == "raw_string":
            fields.add(tuple(self.source.segments(node.start_byte + 1, node.end_byte - 1)))
        elif kind == "ansi_c_string":
            fields.add(self._literal(node.start_byte + 2, node.end_byte - 1, _ansi))
        elif kind in ("simple_expansion", "expansion"):
            self._add_variable(node, fields)
        elif kind in EXPANSIONS:
            fields.add_split(self._computed(node))
        elif node.named_child_count and kind != "word":
            fields.add(joined(self._parts(node, node.start_byte, node.end_byte, _unescaped)))
        else:
            fields.add(self._literal(node.start_byte, node.end_byte, _unescaped))

    def _add_string(self, node: Node, fields: Fields) -> None:
        """Add text in double quotes. If the text is only `${A[@]}`, add one word for each item of A."""
        inner = node.named_children
        if len(inner) == 1 and inner[0].type in ("simple_expansion", "expansion"):
            alone = inner[0].end_byte - inner[0].start_byte == node.end_byte - node.start_byte - 2
            items = self._all_items(inner[0]) if alone and "*" not in self.text(inner[0]) else None
            if items is not None:
                for i, item in enumerate(items):
                    if i:
                        fields.close()
                    fields.add(item)
                return
        fields.add(self.span(node, node.start_byte + 1, node.end_byte - 1))

    def _parts(
        self,
        parent: Node,
        start: int,
        stop: int,
        unescape: Callable[[str], str],
        kinds: Sequence[str] = EXPANSIONS,
    ) -> list[Word]:
        """Split the text between two offsets into literal parts and expansions, and evaluate the expansions."""
        parts: list[Word] = []
        at = start
        for node in _expansions(parent, start, stop, kinds):
            parts.append(self._literal(at, self._begin(node), unescape))
            parts.append(self._quoted(node))
            at = node.end_byte
        parts.append(self._literal(at, stop, unescape))
        return parts

    def _span_with_quotes(self, parent: Node, start: int, stop: int) -> Word:
        """Expand the text between two offsets and remove double quotes around parts of the text."""
        return joined(self._parts(parent, start, stop, unescaped_in_quotes, (*EXPANSIONS, "string")))

    def _quoted(self, node: Node) -> Word:
        """Evaluate an expansion or a double-quoted string, without splitting the result into words."""
        if node.type == "string":
            return self.span(node, node.start_byte + 1, node.end_byte - 1)
        if node.type not in ("simple_expansion", "expansion"):
            return self._computed(node)
        fields = _Unsplit()
        self._add_variable(node, fields)
        return joined(fields.parts)

    def _literal(self, start: int, stop: int, unescape: Callable[[str], str]) -> Word:
        return tuple(Text(unescape(part.text), part.line) for part in self.source.segments(start, stop))

    def _unquoted(self, node: Node) -> str:
        """A word's text, without its quoted parts and expansions."""
        parts = [node] if node.type != "concatenation" else node.named_children
        return "".join(self.text(part) for part in parts if part.type in ("word", "number", "brace_expression"))

    def _add_range(self, node: Node, fields: Fields) -> None:
        """Add all words of a range such as `{1..4}` or `{100..900..100}`; other words with braces become unknown."""
        match = BRACE_RANGE.fullmatch(self.text(node))
        if match is None:
            fields.add(self.unknown(node))
            return
        first, last = int(match[1]), int(match[2])
        size = abs(int(match[3] or 1)) or 1
        if abs(last - first) // size > MOST_WORDS:
            raise ValueError(f"line {self.line(node)}: {match[0]} has more than {MOST_WORDS:,} words")
        numbers = range(first, last + 1, size) if first <= last else range(first, last - 1, -size)
        for number in numbers:
            if number != first:
                fields.close()
            fields.add((Text(str(number), self.line(node)),))

    def _computed(self, node: Node) -> Word:
        """Evaluate `$((…))`, `$(…)` or `<(…)`."""
        raw = self.text(node)
        if node.type == "arithmetic_expansion":
            offset = len("$((") if raw.startswith("$((") else len("$[")
            close = len("))") if raw.startswith("$((") else len("]")
            inside = self.span(node, node.start_byte + offset, node.end_byte - close)
            text = known(inside)
            value = None if text is None else self.arithmetic_of(text)
            if value is not None:
                return (Text(str(value), self.line(node)),)
            return (Unknown(raw, self.line(node), *self._cause(inside)),)
        if node.type == "command_substitution":
            return self.run_inside(node)
        return self.unknown(node)

    def _cause(self, word: Word) -> tuple[str, str]:
        """The variables and the condition that make a value unknown, as (names, condition). Either string may be ''."""
        for piece in word:
            if isinstance(piece, Unknown):
                return piece.name, piece.condition
        # Arithmetic allows variable names without `$`, so the unknown variable may be one of these names.
        for name in re.findall(r"[A-Za-z_]\w*", known(word) or ""):
            for piece in (self.scope.items(name) or {}).get("0", (Unknown(name, 0, name),)):
                if isinstance(piece, Unknown):
                    return piece.name, piece.condition
        return "", ""

    def _add_variable(self, node: Node, fields: Fields) -> None:
        """Add the value of `$NAME` or `${NAME…}`."""
        items = self._all_items(node)
        if items is None:
            value = self._value(node)
            separators = known((self.scope.items("IFS") or {}).get("0", (Text(BLANKS, 0),)))
            has_other = separators is None or {*separators} != {*BLANKS}
            if has_other and any(separators is None or set(piece.text) & {*separators, *BLANKS} for piece in value):
                # Word splitting is implemented only for the default IFS, which consists of blanks.
                value = self.unknown(node, "IFS") if not isinstance(fields, _Unsplit) else value
            quoted = self._quoted_alternative(node) if not isinstance(fields, _Unsplit) else None
            if quoted is not None and quoted == value:
                fields.add(value)
            else:
                fields.add_split(value)
            return
        for i, item in enumerate(items):
            if i:
                fields.close()
            fields.add_split(item)

    def _quoted_alternative(self, node: Node) -> Word | None:
        """The text in `${NAME:-"text"}`, which stays one word; None unless one quoted string follows `:-`."""
        inner = [child for child in node.named_children if child.type not in ("variable_name", "subscript")]
        if node.type == "expansion" and len(inner) == 1 and inner[0].type == "string":
            return self.string(inner[0])
        return None

    def _all_items(self, node: Node) -> list[Word] | None:
        """The items of `$@` or `${A[@]}`; None for any other form, or if the items are not known."""
        names = [child for child in node.named_children if child.type in ("subscript", "special_variable_name")]
        is_plain = node.type == "simple_expansion" or node.child_count == 3
        if len(names) != 1 or not is_plain:
            return None
        if names[0].type == "special_variable_name":
            return (
                list(self.scope.arguments) if self.text(names[0]) in "@*" and self.scope.arguments is not None else None
            )
        name, index = self._subscript(names[0])
        if index not in ("@", "*"):
            return None
        items = self.scope.items(name)
        return None if items is None else list(items.values())

    def _subscript(self, node: Node) -> tuple[str, str | None]:
        """The name and the index of `NAME[INDEX]`; the index is None if unknown."""
        name_node = node.child_by_field_name("name")
        index_node = node.child_by_field_name("index")
        assert name_node is not None
        name = self.text(name_node)
        text = None if index_node is None else known(self.string(index_node))
        if text is None or text in ("@", "*"):
            return name, text
        items = self.scope.variables.get(name)
        is_table = items is not None and isinstance(items.value, dict) and not all(map(str.isdigit, items.value))
        if is_table:
            return name, text
        number = self.arithmetic_of(text)
        if number is not None and number < 0:
            # Negative indices count from the end.
            number += 1 + max(map(int, self.scope.items(name) or {}), default=-1)
        return name, text if number is None else str(number)

    def _read(self, node: Node) -> Word | None:
        """The value of a variable or an array item; None if the script never sets the variable."""
        name = self.text(node)
        if node.type == "subscript":
            base, index = self._subscript(node)
            items = self.scope.items(base)
            if base == "BASH_SOURCE":
                return self._own_path(node)
            if items is None or index is None:
                return None if index is not None else self.unknown(node, base)
            if index in ("@", "*"):
                return with_blanks(items.values(), self.line(node))
            return items.get(index, ())
        if name in self.source.unknown and name.startswith(STAND_IN):
            return (self.source.unknown[name],)
        if name in ("0", "BASH_SOURCE"):
            return self._own_path(node)
        arguments = self.scope.arguments
        if name in ("@", "*"):
            return None if arguments is None else with_blanks(arguments, self.line(node))
        if name == "#":
            return None if arguments is None else (Text(str(len(arguments)), self.line(node)),)
        if name.isdigit() and arguments is not None:
            return arguments[int(name) - 1] if int(name) <= len(arguments) else ()
        if name == "?":
            status = self.scope.status
            return None if status is None else (Text(str(int(not status)), self.line(node)),)
        items = self.scope.items(name)
        return items.get("0", ()) if items else None

    def _own_path(self, node: Node) -> Word:
        return (Unknown(f"${{{self.text(node)}}}", self.line(node), path="./script"),)

    def _value(self, node: Node) -> Word:
        """Evaluate `$NAME` or `${NAME…}`."""
        children = node.children
        if any(child.is_missing or child.is_error for child in children):
            return self.unknown(node)
        names = [c for c in children if c.type in ("variable_name", "subscript", "special_variable_name")]
        if not names:
            return self.unknown(node)
        name = names[0]
        value = self._read(name)
        if node.type == "simple_expansion" or node.child_count == 3:
            was_unset = self.scope.items(self.text(name)) == {}
            nothing: Word = () if was_unset else self.unknown(node, self.text(name))
            return nothing if value is None else value
        prefix = self.text(children[1]) if children[1] != name else ""
        if prefix:
            return self._prefixed(node, prefix, name, value)
        operator = self.text(children[2])
        start = children[2].end_byte
        stop = children[-1].start_byte
        if operator in (":-", "-", ":=", "=", ":+", "+", ":?", "?"):
            return self._alternative(node, operator, name, value, start, stop)
        # Bash changes each item of a list by itself.
        is_list = self.text(name) in ("@", "*") or (name.type == "subscript" and self._subscript(name)[1] in ("@", "*"))
        text = None if value is None or is_list else known(value)
        result = None if text is None else self._cut(node, operator, text, start, stop)
        if result is None:
            cause = self._cause(value) if value else (self.text(name), "")
            return (Unknown(self.text(node), self.line(node), *cause),)
        return (Text(result, self.line(node)),)

    def _prefixed(self, node: Node, prefix: str, name: Node, value: Word | None) -> Word:
        """Evaluate `${#NAME}` or `${!NAME}`."""
        line = self.line(node)
        is_all = name.type == "subscript" and self._subscript(name)[1] in ("@", "*")
        items = self.scope.items(self._subscript(name)[0]) if name.type == "subscript" else None
        if prefix == "#" and is_all and items is not None:
            return (Text(str(len(items)), line),)
        if prefix == "#" and value is not None and not is_all and known(value) is not None:
            return (Text(str(len(known(value) or "")), line),)
        if prefix == "!" and is_all and items is not None:
            return with_blanks([(Text(index, line),) for index in items], line)
        target = known(value) if value is not None and prefix == "!" and not is_all else None
        if target and re.fullmatch(r"[A-Za-z_]\w*", target):
            inner = self.scope.items(target)
            return (Unknown(f"${target}", line, target),) if inner is None else inner.get("0", ())
        return self.unknown(node, "" if is_all else self.text(name))

    def _alternative(self, node: Node, operator: str, name: Node, value: Word | None, start: int, stop: int) -> Word:
        """Evaluate `${NAME:-other}` and similar forms.

        A variable that the script never sets counts as unset, because the script itself gives a value for this case.
        """
        is_set = value is not None
        if value is not None and operator.startswith(":"):
            text = known(value)
            if text is None and not any(isinstance(piece, Text) and piece.text for piece in value):
                # The result depends on whether the unknown text is empty.
                return value if operator[-1] != "+" else self.unknown(node, self._cause(value)[0])
            is_set = text != ""
        if operator[-1] == "+":
            return self._span_with_quotes(node, start, stop) if is_set else ()
        if is_set and value is not None:
            return value
        if operator[-1] == "?":
            return self.unknown(node, self.text(name))
        other = self._span_with_quotes(node, start, stop)
        if operator[-1] == "=" and name.type == "variable_name":
            self.scope.assign(self.text(name), other)
        return other

    def _cut(self, node: Node, operator: str, text: str, start: int, stop: int) -> str | None:
        """Evaluate `${NAME%pattern}` and other forms that modify a value; None if the result is not known."""
        if operator == ":":
            return self._substring(node, text, start, stop)
        if operator in ("^^", ",,", "^", ",") and start == stop:
            changed = text.upper() if operator[0] == "^" else text.lower()
            return changed if len(operator) == 2 else changed[:1] + text[1:]
        if operator in ("%", "%%", "#", "##"):
            pattern = known(self.span(node, start, stop))
            return None if pattern is None or set(pattern) & {*QUOTES} else _without(text, operator, pattern)
        if operator.startswith("/"):
            slash = [child for child in node.children if not child.is_named and child.start_byte >= start]
            slashes = [child for child in slash if self.text(child) == "/"]
            middle = slashes[0].start_byte if slashes else stop
            pattern = known(self.span(node, start, middle))
            new = known(self.span(node, middle + 1, stop)) if slashes else ""
            if pattern is None or new is None or operator not in ("/", "//"):
                return None
            if re.search(r"[*?\[\\]", pattern) or set(pattern + new) & {*QUOTES}:
                return None
            return text.replace(pattern, new, -1 if operator == "//" else 1) if pattern else text
        return None

    def _substring(self, node: Node, text: str, start: int, stop: int) -> str | None:
        """Evaluate `${NAME:offset:length}`; None if the result is not known."""
        colons = [child for child in node.children if self.text(child) == ":" and child.start_byte >= start]
        middle = colons[0].start_byte if colons else stop
        offset = self.arithmetic(node, start, middle)
        length = self.arithmetic(node, middle + 1, stop) if colons else len(text)
        if offset is None or length is None:
            return None
        if offset < 0:
            offset += len(text)
        end = len(text) + length if length < 0 else offset + length
        return text[offset:end] if 0 <= offset <= len(text) else ""


class _Unsplit(Fields):
    """A substitute for Fields that does not split text into words.

    Attributes:
        parts: all words added so far, with a blank for each call of `close`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[Word] = []

    def add(self, word: Word) -> None:
        self.parts.append(word)

    def add_split(self, word: Word) -> None:
        self.parts.append(word)

    def close(self) -> None:
        self.parts.append((Text(" ", 0),))


def _expansions(parent: Node, start: int, stop: int, kinds: Sequence[str]) -> list[Node]:
    """The outermost nodes of the given kinds between two offsets, in order."""
    found: list[Node] = []
    for child in parent.children:
        if child.end_byte <= start or child.start_byte >= stop:
            continue
        if child.type in kinds:
            found.append(child)
        else:
            found += _expansions(child, start, stop, kinds)
    return found


def unescaped_in_quotes(text: str) -> str:
    return re.sub(r'\\(?:\n|([$`"\\]))', lambda match: match[1] or "", text)


def _unescaped(text: str) -> str:
    return re.sub(r"\\(\n|.)", lambda match: "" if match[1] == "\n" else match[1], text)


def _ansi(text: str) -> str:
    return re.sub(r"\\(.)", lambda match: ANSI_ESCAPES.get(match[1], match[0]), text)


def _without(text: str, operator: str, pattern: str) -> str | None:
    """Remove the shortest suffix (`%`) or prefix (`#`) that matches a pattern; `%%` and `##` remove the longest."""
    if len(text) > LONGEST_PATTERN or len(pattern) > LONGEST_PATTERN:
        return None
    matches = re.compile(fnmatch.translate(pattern)).match
    sizes = range(len(text) + 1)
    for size in sizes if len(operator) == 1 else reversed(sizes):
        part = text[len(text) - size :] if operator[0] == "%" else text[:size]
        if matches(part):
            return text[: len(text) - size] if operator[0] == "%" else text[size:]
    return text
