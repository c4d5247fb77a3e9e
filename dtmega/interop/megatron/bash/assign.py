"""Assignments, declarations and function definitions."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dtmega.interop.megatron.bash.scope import Flow, Function
from dtmega.interop.megatron.bash.shell import Shell
from dtmega.interop.megatron.bash.words import Text, Word, joined, known, unknowns

if TYPE_CHECKING:
    from tree_sitter import Node

INDEXED = re.compile(r"\[([^\]]*)\]=")  # an explicit index at the start of an array item


class Assignments(Shell):
    """A shell that follows assignments, declarations and function definitions."""

    def assignments(self, node: Node) -> Flow:
        for child in node.named_children if node.type == "variable_assignments" else [node]:
            self._assign(child)
        self.scope.status = True
        return Flow.NEXT

    def _assign(self, node: Node) -> str:
        """Carry out an assignment and return the variable's name."""
        expander = self.expander()
        target = node.child_by_field_name("name")
        value_node = node.child_by_field_name("value")
        assert target is not None
        is_appended = any(child.type == "+=" for child in node.children)
        index_node = target.child_by_field_name("index")
        name_node = target.child_by_field_name("name") if target.type == "subscript" else target
        assert name_node is not None
        name = expander.text(name_node)
        before = self.scope.items(name)
        if value_node is not None and value_node.type == "array":
            self.scope.assign(name, self._items(value_node, dict(before or {}) if is_appended else {}))
            return name
        value = self.spend(expander.string(value_node))
        index = None if index_node is None else known(expander.string(index_node))
        if index_node is not None and index is None:
            self.scope.assign(name, expander.unknown(node, name))
            return name
        if index is not None and not index.isdigit():
            number = expander.arithmetic_of(index)
            index = index if number is None else str(number)
        if is_appended:
            value = joined([(before or {}).get(index or "0", ()), value])
        if index is not None:
            self.scope.assign(name, {**(before or {}), index: value})
        else:
            self.set(name, value, expander.line(node))
        return name

    def _items(self, node: Node, items: dict[str, Word]) -> dict[str, Word]:
        """Evaluate an array such as `(a b [5]=c)` and return its items keyed by index.

        Args:
            node: node of the array.
            items: existing items, to which the new items are added; empty if the array replaces the old value.
        """
        expander = self.expander()
        place = 1 + max((int(key) for key in items if key.isdigit()), default=-1)
        for child in node.named_children:
            words = expander.fields([child])
            if INDEXED.match(expander.text(child)):
                word = expander.string(child)
                match = INDEXED.match(word[0].text)
                index = match[1] if match and isinstance(word[0], Text) else None
                if match is None or index is None:
                    return {"0": expander.unknown(node)}
                rest = (word[0]._replace(text=word[0].text[match.end() :]), *word[1:])
                items[index] = self.spend(rest)
                place = int(index) + 1 if index.isdigit() else place
                continue
            for word in words:
                items[str(place)] = self.spend(word)
                place += 1
        return items

    def set(self, name: str, value: Word, line: int) -> None:
        """Set a variable. If the value is not known, use the value that the user gives for the variable, if any."""
        missing = unknowns([value])
        if missing and name in self.given:
            value = (Text(self.given[name], line),)
        elif len(value) == 1 and missing and not missing[0].name and not missing[0].condition:
            value = (missing[0]._replace(name=name),)
        self.scope.assign(name, value)

    def declaration(self, node: Node) -> Flow:
        """Follow `export`, `declare`, `local`, `readonly` or `typeset`."""
        expander = self.expander()
        command = expander.text(node.children[0])
        options = "".join(expander.text(child) for child in node.named_children if child.type == "word")
        is_exported = command == "export" or ("x" in options and options.startswith("-"))
        for child in node.named_children:
            names: list[str] = []
            if child.type == "variable_assignment":
                names.append(self._assign(child))
            elif child.type == "variable_name":
                names.append(expander.text(child))
                if command == "local" and not is_exported:
                    self.scope.variables.pop(names[0], None)
            elif child.type in ("concatenation", "string"):
                names += self._assign_text(expander.string(child), expander.line(child))
            for name in names:
                if is_exported:
                    self.scope.export(name)
        self.scope.status = True
        return Flow.NEXT

    def _assign_text(self, word: Word, line: int) -> list[str]:
        """Set a variable from the text NAME=VALUE. Return [NAME], or [] if the name is not known."""
        head = word[0] if word else None
        name, equals, rest = head.text.partition("=") if isinstance(head, Text) else ("", "", "")
        if not (equals and name.isidentifier()):
            return []
        self.set(name, self.spend((Text(rest, line), *word[1:])), line)
        return [name]

    def unset(self, node: Node) -> Flow:
        for child in node.named_children:
            if child.type == "variable_name":
                self.scope.assign(self.expander().text(child), {})
        self.scope.status = True
        return Flow.NEXT

    def define(self, node: Node) -> Flow:
        name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
        if name is not None and body is not None:
            self.scope.functions[self.expander().text(name)] = Function(self.source, body)
        return Flow.NEXT
