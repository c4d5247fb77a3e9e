"""Bash's integer arithmetic: `$((…))`, `((…))` and `let`."""

from __future__ import annotations

import re
from collections.abc import Callable

TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+#\w+|0[xX][0-9a-fA-F]+|\d+)|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<operator>\*\*|\+\+|--|<<=|>>=|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|[-+*/%<>=!~&|^?:(),]))"
)
# Binary operators, from lowest to highest precedence. Assignments and `? :` have an even lower precedence.
LEVELS = (("||",), ("&&",), ("|",), ("^",), ("&",), ("==", "!="), ("<", "<=", ">", ">="), ("<<", ">>"))
SUMS = ("+", "-")
PRODUCTS = ("*", "/", "%")
DEEPEST = 50  # nesting limit for parentheses, and for variables whose values name other variables
BITS = 64


class NotKnown(Exception):
    """Raised if a name's value is not known, or if the text is not arithmetic."""


def evaluate(text: str, read: Callable[[str], str], write: Callable[[str, str], None], depth: int = 0) -> int:
    """Evaluate an arithmetic expression.

    Args:
        text: the expression.
        read: function that returns a variable's text (itself an expression) or raises NotKnown.
        write: function that sets a variable, given its name and its new text.
        depth: nesting depth of this expression inside other expressions; 0 at the top level.

    Raises:
        NotKnown: a name's value is not known, the text is not arithmetic, or expressions nest too deeply.
    """
    if depth > DEEPEST:
        raise NotKnown
    if not text.strip():
        return 0
    parser = _Parser(text, read, write, depth)
    value = parser.comma()
    if parser.token:
        raise NotKnown
    return value


class _Parser:
    """Parses and evaluates an expression from left to right.

    Attributes:
        token: the next token; '' at the end of the expression.
    """

    def __init__(self, text: str, read: Callable[[str], str], write: Callable[[str, str], None], depth: int) -> None:
        self._text = text
        self._read = read
        self._write = write
        self._depth = depth
        self._at = 0
        self._n_skipping = 0  # number of operands around the current token that bash does not evaluate
        self.token = ""
        self._kind = ""
        self._advance()

    def _advance(self) -> str:
        """Consume the current token and return it."""
        before = self.token
        rest = self._text[self._at :]
        match = TOKEN.match(self._text, self._at)
        if match is not None:
            self._kind = str(match.lastgroup)
            self.token = match[self._kind]
            self._at = match.end()
        elif rest.strip():
            raise NotKnown
        else:
            self._kind = self.token = ""
        return before

    def _expect(self, token: str) -> None:
        if self._advance() != token:
            raise NotKnown

    def comma(self) -> int:
        value = self._choice()
        while self.token == ",":
            self._advance()
            value = self._choice()
        return value

    def _choice(self) -> int:
        self._depth += 1
        if self._depth > DEEPEST:
            raise NotKnown
        value = self._binary(0)
        if self.token == "?":
            self._advance()
            first = self._operand_of(self._choice, skips=not value)
            self._expect(":")
            second = self._operand_of(self._choice, skips=bool(value))
            value = first if value else second
        self._depth -= 1
        return value

    def _binary(self, level: int) -> int:
        levels = (*LEVELS, SUMS, PRODUCTS)
        if level == len(levels):
            return self._power()
        value = self._binary(level + 1)
        while self._kind == "operator" and self.token in levels[level]:
            operator = self._advance()
            is_decided = operator == ("||" if value else "&&")
            right = self._operand_of(lambda: self._binary(level + 1), skips=is_decided)
            if not self._n_skipping:
                value = _wrapped(_apply(operator, value, right))
        return value

    def _operand_of(self, parse: Callable[[], int], skips: bool) -> int:
        """Parse an operand of `&&`, `||` or `? :`. Bash skips an operand that cannot change the result."""
        self._n_skipping += skips
        value = parse()
        self._n_skipping -= skips
        return value

    def _power(self) -> int:
        value = self._unary()
        if self.token == "**":
            self._advance()
            exponent = self._power()
            if self._n_skipping:
                return 0
            if not 0 <= exponent < BITS * BITS:
                raise NotKnown
            value = _wrapped(pow(value, exponent, 1 << (2 * BITS)) if value >= 0 else value**exponent)
        return value

    def _unary(self) -> int:
        self._depth += 1
        if self._depth > DEEPEST:
            raise NotKnown
        operator = self.token if self._kind == "operator" else ""
        if operator in ("+", "-", "!", "~"):
            self._advance()
            operand = self._unary()
            value = {"+": operand, "-": -operand, "!": int(not operand), "~": ~operand}[operator]
        elif operator in ("++", "--"):
            self._advance()
            value = self._assign(self._advance(), operator[0], 1)
        elif operator == "(":
            self._advance()
            value = self.comma()
            self._expect(")")
        else:
            value = self._operand()
        self._depth -= 1
        return value

    def _operand(self) -> int:
        kind, token = self._kind, self._advance()
        if kind == "number":
            return _number(token)
        if kind != "name":
            raise NotKnown
        if self.token in ("++", "--"):
            value = self._value(token)
            self._assign(token, self._advance()[0], 1)
            return value
        if self.token == "=":
            self._advance()
            return self._assign(token, "", self._choice())
        if len(self.token) == 2 and self.token[1] == "=" and self.token[0] in "+-*/%&|^":
            operator = self._advance()[0]
            return self._assign(token, operator, self._choice())
        return self._value(token)

    def _value(self, name: str) -> int:
        if self._n_skipping:
            return 0
        return evaluate(self._read(name), self._read, self._write, self._depth + 1)

    def _assign(self, name: str, operator: str, operand: int) -> int:
        if self._n_skipping:
            return 0
        value = _apply(operator, self._value(name), operand) if operator else operand
        self._write(name, str(value))
        return value


def _number(token: str) -> int:
    base, sharp, digits = token.partition("#")
    try:
        if sharp:
            return int(digits, int(base))
        if token[:2] in ("0x", "0X"):
            return int(token, 16)
        return int(token, 8) if token[0] == "0" else int(token)
    except ValueError:
        raise NotKnown from None


def _apply(operator: str, left: int, right: int) -> int:
    if operator in ("/", "%"):
        if right == 0:
            raise NotKnown
        # Bash rounds towards zero, Python towards minus infinity.
        quotient = abs(left) // abs(right)
        quotient = quotient if (left < 0) == (right < 0) else -quotient
        return quotient if operator == "/" else left - quotient * right
    if operator in ("<<", ">>"):
        if not 0 <= right < BITS:
            raise NotKnown
        return left << right if operator == "<<" else left >> right
    return {
        "||": lambda: int(bool(left) or bool(right)),
        "&&": lambda: int(bool(left) and bool(right)),
        "|": lambda: left | right,
        "^": lambda: left ^ right,
        "&": lambda: left & right,
        "==": lambda: int(left == right),
        "!=": lambda: int(left != right),
        "<": lambda: int(left < right),
        "<=": lambda: int(left <= right),
        ">": lambda: int(left > right),
        ">=": lambda: int(left >= right),
        "+": lambda: left + right,
        "-": lambda: left - right,
        "*": lambda: left * right,
    }[operator]()


def _wrapped(value: int) -> int:
    """Wrap a value to a signed 64-bit integer, as bash does."""
    half = 1 << (BITS - 1)
    return (value + half) % (2 * half) - half
