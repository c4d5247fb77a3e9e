"""Evaluate a script's conditions. A result is True or False; None if it depends on a real machine."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dtmega.interop.megatron.bash.expand import LONGEST_PATTERN, Expander
from dtmega.interop.megatron.bash.words import Text, Word, known

if TYPE_CHECKING:
    from tree_sitter import Node

NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda left, right: left == right,
    "-ne": lambda left, right: left != right,
    "-lt": lambda left, right: left < right,
    "-le": lambda left, right: left <= right,
    "-gt": lambda left, right: left > right,
    "-ge": lambda left, right: left >= right,
}


def test(node: Node, expander: Expander) -> bool | None:
    """Evaluate `[ … ]`, `[[ … ]]` or `(( … ))`."""
    kind = node.type
    if kind == "compound_statement":
        value = expander.arithmetic(node, node.start_byte + 2, node.end_byte - 2)
        return None if value is None else value != 0
    if kind in ("test_command", "parenthesized_expression"):
        if expander.text(node).startswith("(("):
            value = expander.arithmetic(node, node.start_byte + 2, node.end_byte - 2)
            return None if value is None else value != 0
        if expander.text(node).startswith("[["):
            return test(node.named_children[0], expander)
        inner = _operands(node) if kind == "test_command" else node.named_children
        return _of_words(expander.fields(inner), expander)
    if kind == "unary_expression":
        return _unary(node, expander)
    if kind == "binary_expression":
        return _binary(node, expander)
    return _is_filled(expander.string(node))


def of_words(words: Sequence[Word], expander: Expander) -> bool | None:
    """Evaluate a `test` command, given the words that follow `test`."""
    return _of_words(words, expander)


def both(first: bool | None, second: bool | None) -> bool | None:
    """True if both conditions hold; None if the result is not known."""
    if first is False or second is False:
        return False
    return None if first is None or second is None else True


def negated(condition: bool | None) -> bool | None:
    """The opposite of a condition; None stays None."""
    return None if condition is None else not condition


def _operands(node: Node) -> list[Node]:
    """The nodes of all words in `[ … ]`, in order, flattened from the syntax tree."""
    if node.type not in ("test_command", "unary_expression", "binary_expression", "parenthesized_expression"):
        return [node]
    operands: list[Node] = []
    for child in node.children:
        if child.is_named or child.type in ("!", "=", "==", "!=", "<", ">"):
            operands += _operands(child)
    return operands


def _unary(node: Node, expander: Expander) -> bool | None:
    operator = node.child_by_field_name("operator") or node.children[0]
    operand = node.named_children[-1]
    if expander.text(operator) == "!":
        return negated(test(operand, expander))
    return _of_text(expander.text(operator), expander.string(operand), expander)


def _binary(node: Node, expander: Expander) -> bool | None:
    middle = node.child_by_field_name("operator") or node.children[1]
    operator = expander.text(middle)
    left = node.children[0]
    right = node.children[node.children.index(middle) + 1 :]
    if operator in ("&&", "-a"):
        return both(test(left, expander), test(right[0], expander))
    if operator in ("||", "-o"):
        return negated(both(negated(test(left, expander)), negated(test(right[0], expander))))
    text = expander.string(left)
    is_double = _is_double(node, expander)
    if is_double and operator in ("=", "==", "!="):
        result = fits(text, expander.pattern(right))
        return negated(result) if operator == "!=" else result
    return _compared(operator, text, expander.string(right[0]), expander, is_double=is_double)


def _is_double(node: Node, expander: Expander) -> bool:
    """True if a node is inside `[[ … ]]`."""
    while node.parent is not None and node.type != "test_command":
        node = node.parent
    return expander.text(node).startswith("[[")


def _compared(operator: str, left: Word, right: Word, expander: Expander, *, is_double: bool) -> bool | None:
    """Compare two words as strings or as numbers; None if the result is not known."""
    one, other = known(left), known(right)
    if one is None or other is None:
        return None
    if operator in NUMBERS:
        numbers = [_number(text, expander, is_double=is_double) for text in (one, other)]
        # `[` fails if an operand is not a number. `[[` evaluates each operand as arithmetic.
        first, second = numbers
        if first is None or second is None:
            return None if is_double else False
        return NUMBERS[operator](first, second)
    if operator in ("=", "=="):
        return one == other
    if operator == "!=":
        return one != other
    if operator in ("<", ">"):
        return one < other if operator == "<" else one > other
    return None  # the operator matches a regular expression or compares the ages of two files


def _number(text: str, expander: Expander, *, is_double: bool) -> int | None:
    """Convert an operand of a comparison to a number; None if the operand is not a number."""
    if is_double:
        return expander.arithmetic_of(text)
    return int(text) if re.fullmatch(r"\s*[-+]?\d+\s*", text) else None


def _of_text(operator: str, word: Word, expander: Expander) -> bool | None:
    """Evaluate `-z TEXT`, `-n TEXT` or `-v NAME`. The result is None for other operators, which inspect files."""
    if operator == "-z":
        return negated(_is_filled(word))
    if operator == "-n":
        return _is_filled(word)
    if operator == "-v":
        name = known(word)
        return True if name is not None and expander.scope.items(name) is not None else None
    return None


def _is_filled(word: Word) -> bool | None:
    """True if a word is not empty; None if the word's unknown pieces could be empty."""
    if any(isinstance(piece, Text) and piece.text for piece in word):
        return True
    return False if known(word) is not None else None


def _of_words(words: Sequence[Word], expander: Expander) -> bool | None:
    """Evaluate a test that is given as a list of words."""
    texts = [known(word) for word in words]
    for operator in ("-o", "-a"):
        if operator in texts:
            at = texts.index(operator)
            first, second = _of_words(words[:at], expander), _of_words(words[at + 1 :], expander)
            if operator == "-a":
                return both(first, second)
            return negated(both(negated(first), negated(second)))
    if texts[:1] == ["!"] and len(words) > 1:
        return negated(_of_words(words[1:], expander))
    if not words:
        return False
    if len(words) == 1:
        return _is_filled(words[0])
    if len(words) == 2:
        return _of_text(texts[0] or "", words[1], expander)
    if len(words) == 3:
        return _compared(texts[1] or "", words[0], words[2], expander, is_double=False)
    return None


def fits(value: Word, pattern: str | None) -> bool | None:
    """True if a value matches a pattern from `case` or `[[`; None if the value or pattern is unknown or too long."""
    if pattern == "*":
        return True
    text = known(value)
    if text is None or pattern is None or max(len(text), len(pattern)) > LONGEST_PATTERN:
        return None
    return fnmatch.fnmatchcase(text, pattern)
