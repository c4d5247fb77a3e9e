"""The state of a shell (variables, functions, arguments, written files), and the ways in which a statement can end."""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING

from dtmega.interop.megatron.bash.words import Unknown, Word

if TYPE_CHECKING:
    from tree_sitter import Node

    from dtmega.interop.megatron.bash.grammar import Source


class Flow(enum.Enum):
    """The way in which a statement ends, which determines where the script continues."""

    NEXT = "next"
    BREAK = "break"
    CONTINUE = "continue"
    RETURN = "return"
    EXIT = "exit"


@dataclasses.dataclass(frozen=True)
class Variable:
    """A shell variable.

    Attributes:
        value: text of a plain variable, or the items of an array keyed by index.
        is_exported: whether child processes inherit the variable.
    """

    value: Word | dict[str, Word]
    is_exported: bool = False


@dataclasses.dataclass(frozen=True)
class Function:
    """A function of the script.

    Attributes:
        source: parsed text that defines the function.
        body: the function's statements.
    """

    source: Source
    body: Node


@dataclasses.dataclass
class Scope:
    """The state of a shell. All values are immutable, so copying the dicts is enough for an independent copy.

    Attributes:
        variables: variables of the shell, keyed by name.
        functions: functions of the shell, keyed by name.
        arguments: arguments of the script or function; None if they are not known.
        folder: working directory, relative to the script's folder; None if it is not known.
        files: contents of the files that the script wrote, keyed by path.
        output: text written to standard output so far; None if nothing reads the output.
        input: text on standard input; None if the text is not known.
        status: outcome of the last command: True for success, False for failure, None if the outcome is not known.
    """

    variables: dict[str, Variable] = dataclasses.field(default_factory=dict)
    functions: dict[str, Function] = dataclasses.field(default_factory=dict)
    arguments: tuple[Word, ...] | None = None
    folder: str | None = None
    files: dict[str, Word] = dataclasses.field(default_factory=dict)
    output: tuple[Word, ...] | None = None
    input: Word | None = None
    status: bool | None = True

    def copy(self) -> Scope:
        """An independent copy, as a subshell needs: changes to the copy do not affect the original."""
        return dataclasses.replace(
            self, variables={**self.variables}, functions={**self.functions}, files={**self.files}
        )

    def items(self, name: str) -> dict[str, Word] | None:
        """A variable's items keyed by index (only "0" for a plain variable); None if the variable was never set."""
        variable = self.variables.get(name)
        if variable is None:
            return None
        return variable.value if isinstance(variable.value, dict) else {"0": variable.value}

    def assign(self, name: str, value: Word | dict[str, Word]) -> None:
        """Set a variable. An exported variable stays exported."""
        before = self.variables.get(name)
        self.variables[name] = Variable(value, before is not None and before.is_exported)

    def export(self, name: str) -> None:
        """Export a variable to child processes, if the variable is set."""
        if name in self.variables:
            self.variables[name] = dataclasses.replace(self.variables[name], is_exported=True)

    def write(self, words: tuple[Word, ...]) -> None:
        """Append words to standard output, if anything reads the output."""
        if self.output is not None:
            self.output = (*self.output, *words)


def merged(first: Scope, second: Scope, condition: str, names: str, line: int) -> Scope:
    """Merge the states after both branches of a condition with an unknown value.

    Values that differ between the branches become unknown pieces that name the condition.

    Args:
        first: state after the branch for a true condition.
        second: state after the branch for a false condition.
        condition: text of the condition, with its line.
        names: names of the condition's unknown variables, separated by blanks.
        line: line of the condition.
    """
    scope = first.copy()
    for name in {**first.variables, **second.variables}:
        if first.variables.get(name) == second.variables.get(name):
            continue
        one_of_both = first.variables.get(name) or second.variables[name]
        text = f"${{{name}}}"
        scope.variables[name] = Variable((Unknown(text, line, names, condition),), one_of_both.is_exported)
    for path in {**first.files, **second.files}:
        if first.files.get(path) != second.files.get(path):
            scope.files[path] = (Unknown(path, line, names, condition),)
    for name in {**first.functions, **second.functions}:
        if first.functions.get(name) is None:
            scope.functions[name] = second.functions[name]
    if first.arguments != second.arguments:
        scope.arguments = None
    if first.folder != second.folder:
        scope.folder = None
    if first.output != second.output:
        scope.output = ((Unknown("output", line, names, condition),),)
    scope.status = first.status if first.status == second.status else None
    return scope
