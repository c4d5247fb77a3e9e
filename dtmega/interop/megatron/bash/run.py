"""Follow a script's statements and collect the commands that the script would run.

Nothing is executed. If the value of a condition is unknown, both branches are followed, and variables that differ
between the branches become unknown. A branch that ends in `exit` does not affect later statements. `Undecided` is
raised if a wanted command, or the order of statements, depends on an unknown condition.

    run.launches(script_text, wanted=lambda words: ..., folder=Path("examples"), given={"DEBUG_MODE": "1"})
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dtmega.interop.megatron.bash import grammar
from dtmega.interop.megatron.bash.assign import Assignments
from dtmega.interop.megatron.bash.builtins import BUILTINS
from dtmega.interop.megatron.bash.redirect import Redirections
from dtmega.interop.megatron.bash.scope import Flow, Function, Scope, Variable
from dtmega.interop.megatron.bash.shell import Launch
from dtmega.interop.megatron.bash.words import Text, Undecided, Unknown, Word, known, unknowns, written

if TYPE_CHECKING:
    from tree_sitter import Node


def launches(
    text: str,
    wanted: Callable[[Sequence[Word]], bool],
    folder: Path | None = None,
    given: Mapping[str, str] | None = None,
) -> tuple[list[Launch], list[str]]:
    """Collect the wanted commands of a script.

    Args:
        text: text of the script.
        wanted: function that receives a command's words, and returns True if the command is to be collected.
        folder: folder of the script, below which files may be read; None if nothing may be read.
        given: values of the script's environment variables, keyed by name. The names `1`, `2`, ... stand for the
            script's arguments, and `#` for the number of arguments.

    Returns:
        The commands in the order of execution, and remarks for the user.

    Raises:
        ValueError: the text is not bash, or the script exceeds a limit.
        Undecided: a wanted command, or the order of statements, depends on a condition with an unknown value.
    """
    follower = _Follower(wanted, folder, dict(given or {}))
    scope = Scope(arguments=_arguments(follower.given))
    for name, value in follower.given.items():
        if name.isidentifier():
            scope.variables[name] = Variable((Text(value, 0),), is_exported=True)
    try:
        follower.follow_text(grammar.script(text), scope)
    except RecursionError:
        raise ValueError("the script nests too deeply") from None
    if not follower.found and follower.hidden is not None:
        raise follower.hidden
    return follower.found, follower.notes


def _arguments(given: Mapping[str, str]) -> tuple[Word, ...] | None:
    """The script's arguments; None if the user gives neither the arguments nor the number of arguments."""
    numbers = [int(name) for name in given if name.isdigit() and int(name) > 0]
    n_given = max(numbers, default=0)
    count = given.get("#", "")
    if not numbers and not count.isdigit():
        return None
    total = int(count) if count.isdigit() else n_given
    if total > 1000:
        raise ValueError(f"--set #={total}: expected at most 1000 arguments")
    words: list[Word] = []
    for number in range(1, total + 1):
        value = given.get(str(number))
        words.append((Unknown(f"${number}", 0, str(number)),) if value is None else (Text(value, 0),))
    return tuple(words)


class _Follower(Assignments, Redirections):
    """A shell that follows all kinds of statements."""

    def statement(self, node: Node) -> Flow:
        """Follow one statement.

        Raises:
            ValueError: too many statements were followed.
        """
        self.count_statement()
        follow = {
            "variable_assignment": self.assignments,
            "variable_assignments": self.assignments,
            "declaration_command": self.declaration,
            "unset_command": self.unset,
            "command": self._command,
            "redirected_statement": self.redirected,
            "pipeline": self.pipeline,
            "list": self.follow_list,
            "negated_command": self.follow_negated,
            "if_statement": self.follow_if,
            "case_statement": self.follow_case,
            "for_statement": self.follow_for,
            "c_style_for_statement": self.follow_counted_for,
            "while_statement": self.follow_while,
            "until_statement": self.follow_while,
            "function_definition": self.define,
            "subshell": lambda node: self.apart(lambda: self.block(node.named_children)),
            "test_command": self.follow_test,
        }.get(node.type)
        if follow is not None:
            return follow(node)
        if node.type == "compound_statement" and self.expander().text(node).startswith("(("):
            return self.follow_test(node)
        if node.type in ("compound_statement", "do_group", "else_clause"):
            return self.block(node.children)
        self.scope.status = None
        return Flow.NEXT

    def _command(self, node: Node) -> Flow:
        """Follow a simple command."""
        expander = self.expander()
        environment: dict[str, Word] = {}
        nodes: list[Node] = []
        more, self.more_words = self.more_words, []
        for child in node.named_children:
            if child.type == "variable_assignment":
                target = child.child_by_field_name("name")
                assert target is not None
                environment[expander.text(target)] = expander.string(child.child_by_field_name("value"))
            elif child.type == "herestring_redirect":
                self.scope.input = expander.string(child.named_children[-1])
            elif child.type not in ("file_redirect", "heredoc_redirect", "comment"):
                nodes.append(child)
        words = expander.fields([*nodes, *more])
        for word in words:
            self.spend(word)
        line = expander.line(node)
        if not words:
            self.scope.status = True
            return Flow.NEXT
        name = known(words[0])
        if name in self.scope.functions:
            return self.call(self.scope.functions[name], words[1:])
        if name in BUILTINS:
            return BUILTINS[name](self, words, line)
        self._other_program(words, environment, line)
        return Flow.NEXT

    def _other_program(self, words: list[Word], environment: Mapping[str, Word], line: int) -> None:
        """Handle a command that runs another program: follow a bash script, or collect a wanted command."""
        self.scope.status = None
        self.scope.write(((Unknown(written(words[0]), line),),))
        names = [(known(word) or "").rpartition("/")[2] for word in words]
        for i, name in enumerate(names):
            if name not in ("bash", "sh"):
                continue
            options = i + 1
            while options < len(words) and names[options].startswith("-"):
                if names[options].endswith("c") and options + 1 < len(words):
                    self.child(words[options + 1], words[options + 3 :], environment)
                    return
                options += 1
            path = self.path_of(words[options]) if options < len(words) else None
            text = None if path is None else self.read_file(path)
            if text is not None:
                self.child(text, words[options + 1 :], environment)
                return
        undecided = next((piece for piece in unknowns(words) if piece.condition), None)
        refusal = None if undecided is None else Undecided(undecided.condition, undecided.name.split())
        if not self.wanted(words):
            self.hidden = self.hidden or refusal
        elif refusal is not None:
            raise refusal
        else:
            self.scope.status = True
            self.found.append(Launch(words, line, self.conditions, dict(self.scope.files)))

    def call(self, function: Function, arguments: Sequence[Word]) -> Flow:
        """Follow a function call, then restore the old values of the function's `local` variables."""
        scope = self.scope
        before = scope.arguments
        scope.arguments = tuple(arguments)
        local = {name: scope.variables.get(name) for name in _local_names(function)}
        flow = self.inside(function.source, function.body, scope)
        for name, variable in local.items():
            if variable is None:
                scope.variables.pop(name, None)
            else:
                scope.variables[name] = variable
        scope.arguments = before
        return Flow.NEXT if flow is Flow.RETURN else flow

    def child(self, text: Word, arguments: Sequence[Word], environment: Mapping[str, Word]) -> None:
        """Follow text as a child process would run it, with only the exported variables."""
        exported = {name: variable for name, variable in self.scope.variables.items() if variable.is_exported}
        exported |= {name: Variable(value, is_exported=True) for name, value in environment.items()}
        scope = Scope(variables=exported, arguments=tuple(arguments), folder=self.scope.folder, files=self.scope.files)
        self.follow_text(text, scope)
        self.scope.status = None

    def source_file(self, word: Word, line: int) -> Flow:
        """Follow the statements of another file in this shell."""
        path = self.path_of(word)
        text = None if path is None else self.read_file(path)
        if text is None:
            self.notes.append(f"line {line}: '{written(word):.100}' is not read, so what it sets is not known")
            self.scope.status = True
            return Flow.NEXT
        flow = self.follow_text(tuple(piece._replace(line=line) for piece in text), self.scope)
        return Flow.NEXT if flow is Flow.RETURN else flow


def _local_names(function: Function) -> list[str]:
    """The names of the variables that a function declares with `local`, `declare` or `typeset`."""
    names: list[str] = []
    waiting = [function.body]
    while waiting:
        node = waiting.pop()
        waiting += node.named_children
        if node.type == "declaration_command" and node.children[0].type in ("local", "declare", "typeset"):
            for child in node.named_children:
                target = child.child_by_field_name("name") if child.type == "variable_assignment" else child
                if target is not None and target.type == "variable_name" and target.text:
                    names.append(target.text.decode("utf-8", errors="replace"))
    return names
