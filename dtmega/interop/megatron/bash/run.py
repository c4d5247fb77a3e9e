"""Follow the statements of a script, and collect the commands that it would run.

Nothing is run. A condition whose value is not known is followed both ways: what differs afterwards depends on it, and
a branch that ends in `exit` never comes to what follows. Only a command that is wanted and depends on such a condition
is refused.

    run.launches(script_text, wanted=lambda words: ..., folder=Path("examples"), given={"DEBUG_MODE": "1"})
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dtmega.interop.megatron.bash import conditions, grammar
from dtmega.interop.megatron.bash.builtins import BUILTINS
from dtmega.interop.megatron.bash.expand import Expander
from dtmega.interop.megatron.bash.grammar import Source
from dtmega.interop.megatron.bash.scope import Flow, Function, Scope, Variable, merged
from dtmega.interop.megatron.bash.words import LONGEST, Text, Undecided, Unknown, Word, joined, known, unknowns, written

if TYPE_CHECKING:
    from tree_sitter import Node

MOST_STATEMENTS = 50_000  # limit for the statements that are followed
MOST_TEXT = 20_000_000  # limit in characters for everything that is assigned, written or run
DEEPEST = 20  # limit for functions, substitutions and scripts that call each other
MOST_ROUNDS = 10_000  # limit for the rounds of one loop
INDEXED = re.compile(r"\[([^\]]*)\]=")  # start of an array's item with its index


class Condition(NamedTuple):
    """A condition whose value is not known.

    Attributes:
        text: the condition with its line, for a message.
        names: names of its unknown variables, separated by blanks.
        line: line of the condition.
    """

    text: str
    names: str
    line: int


class Launch(NamedTuple):
    """A command that the script would run.

    Attributes:
        words: the command's words.
        line: line of the command.
        conditions: conditions that must hold for the command to run, and whose values are not known.
        files: contents of the files that the script wrote before, by path.
    """

    words: list[Word]
    line: int
    conditions: tuple[Condition, ...]
    files: dict[str, Word]


def launches(
    text: str,
    wanted: Callable[[Sequence[Word]], bool],
    folder: Path | None = None,
    given: Mapping[str, str] | None = None,
) -> tuple[list[Launch], list[str]]:
    """The commands of a script that somebody wants.

    Args:
        text: text of the script.
        wanted: True for a command that is collected.
        folder: folder of the script, below which files may be read; None if nothing may be read.
        given: variable -> value in the script's environment. A number is an argument of the script, and `#` is the
            number of arguments.

    Returns:
        The commands in the order in which the script comes to them, and remarks for the user.

    Raises:
        ValueError: the text is not bash, or it exceeds a limit.
        Undecided: it depends on a condition whose value is not known which command runs next.
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
    """The script's arguments; None if they are not given."""
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


class _Follower:
    """Follows one script.

    Attributes:
        wanted: True for a command that is collected.
        folder: folder of the script; None if nothing may be read.
        given: variable -> value that the user gives.
        found: commands that were collected.
        notes: remarks for the user.
        hidden: refusal of the first other command that depends on a condition; the wanted one may hide in it.
        source: text that is being followed.
        scope: state of the shell.
    """

    def __init__(self, wanted: Callable[[Sequence[Word]], bool], folder: Path | None, given: Mapping[str, str]) -> None:
        self.wanted = wanted
        self.folder = folder
        self.given = given
        self.found: list[Launch] = []
        self.notes: list[str] = []
        self.hidden: Undecided | None = None
        self.source = grammar.parse(())
        self.scope = Scope()
        self._conditions: tuple[Condition, ...] = ()
        self._n_statements = 0
        self._n_characters = 0
        self._depth = 0
        self._more_words: list[Node] = []  # words of the next command that the grammar puts elsewhere

    def follow_text(self, text: Word, scope: Scope) -> Flow:
        """Follow a whole text in a shell."""
        self._spend(text)
        return self.inside(grammar.parse(text), None, scope)

    def inside(self, source: Source, body: Node | None, scope: Scope) -> Flow:
        """Follow a text, or one node of it, in a shell, and return to what was followed before.

        Raises:
            ValueError: too many texts, functions or substitutions are inside each other.
        """
        if self._depth >= DEEPEST:
            raise ValueError(f"more than {DEEPEST} functions, substitutions or scripts inside each other")
        before = self.source, self.scope
        self._depth += 1
        self.source, self.scope = source, scope
        try:
            return self._block(source.root.children if body is None else [body])
        finally:
            self._depth -= 1
            self.source, self.scope = before

    def expander(self) -> Expander:
        return Expander(self.source, self.scope, self._substitution)

    def _spend(self, word: Word) -> Word:
        """Count the characters of a text.

        Raises:
            ValueError: all texts together are too long.
        """
        self._n_characters += sum(len(piece.text) for piece in word)
        if self._n_characters > MOST_TEXT:
            raise ValueError(f"the script makes texts of more than {MOST_TEXT:,} characters")
        return word

    def _block(self, nodes: Sequence[Node]) -> Flow:
        """Follow statements one after the other."""
        nodes = [node for node in nodes if node.is_named and node.type != "comment"]
        for node in nodes:
            is_background = node.next_sibling is not None and node.next_sibling.type == "&"
            flow = self._apart(lambda node=node: self._statement(node)) if is_background else self._statement(node)
            if flow is not Flow.NEXT:
                return flow
        return Flow.NEXT

    def _statement(self, node: Node) -> Flow:
        """Follow one statement.

        Raises:
            ValueError: too many statements were followed.
        """
        self._n_statements += 1
        if self._n_statements > MOST_STATEMENTS:
            raise ValueError(f"the script runs more than {MOST_STATEMENTS:,} statements")
        follow = {
            "variable_assignment": self._assignments,
            "variable_assignments": self._assignments,
            "declaration_command": self._declaration,
            "unset_command": self._unset,
            "command": self._command,
            "redirected_statement": self._redirected,
            "pipeline": self._pipeline,
            "list": self._list,
            "negated_command": self._negated,
            "if_statement": self._if,
            "case_statement": self._case,
            "for_statement": self._for,
            "c_style_for_statement": self._counted_for,
            "while_statement": self._while,
            "until_statement": self._while,
            "function_definition": self._define,
            "subshell": lambda node: self._apart(lambda: self._block(node.named_children)),
            "test_command": self._test,
        }.get(node.type)
        if follow is not None:
            return follow(node)
        if node.type == "compound_statement" and self.expander().text(node).startswith("(("):
            return self._test(node)
        if node.type in ("compound_statement", "do_group", "else_clause"):
            return self._block(node.children)
        self.scope.status = None
        return Flow.NEXT

    # Assignments

    def _assignments(self, node: Node) -> Flow:
        for child in node.named_children if node.type == "variable_assignments" else [node]:
            self._assign(child)
        self.scope.status = True
        return Flow.NEXT

    def _assign(self, node: Node) -> str:
        """Set the variable of an assignment, and return its name."""
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
        value = self._spend(expander.string(value_node))
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
        """The items of an array, `(a b [5]=c)`.

        Args:
            node: the array.
            items: items before it, which are kept.
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
                items[index] = self._spend(rest)
                place = int(index) + 1 if index.isdigit() else place
                continue
            for word in words:
                items[str(place)] = self._spend(word)
                place += 1
        return items

    def set(self, name: str, value: Word, line: int) -> None:
        """Set a variable. If its value is not known, the value that the user gives counts."""
        missing = unknowns([value])
        if missing and name in self.given:
            value = (Text(self.given[name], line),)
        elif len(value) == 1 and missing and not missing[0].name and not missing[0].condition:
            value = (missing[0]._replace(name=name),)
        self.scope.assign(name, value)

    def _declaration(self, node: Node) -> Flow:
        """Follow export, declare, local, readonly or typeset."""
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
        """Set a variable from the text NAME=VALUE, and return its name; [] if the name is not known."""
        head = word[0] if word else None
        name, equals, rest = head.text.partition("=") if isinstance(head, Text) else ("", "", "")
        if not (equals and name.isidentifier()):
            return []
        self.set(name, self._spend((Text(rest, line), *word[1:])), line)
        return [name]

    def _unset(self, node: Node) -> Flow:
        for child in node.named_children:
            if child.type == "variable_name":
                self.scope.assign(self.expander().text(child), {})
        self.scope.status = True
        return Flow.NEXT

    def _define(self, node: Node) -> Flow:
        name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
        if name is not None and body is not None:
            self.scope.functions[self.expander().text(name)] = Function(self.source, body)
        return Flow.NEXT

    # Control

    def _if(self, node: Node) -> Flow:
        """Follow `if`, its `elif` branches and its `else`."""
        return self._branches(node, [child for child in node.children if child.type in ("elif_clause", "else_clause")])

    def _branches(self, node: Node, others: Sequence[Node]) -> Flow:
        children = list(node.children)
        then = next(i for i, child in enumerate(children) if child.type == "then")
        body = [child for child in children[then + 1 :] if child.type not in ("elif_clause", "else_clause")]
        flow = self._block(children[1:then])
        if flow is not Flow.NEXT:
            return flow

        def otherwise() -> Flow:
            if not others:
                return Flow.NEXT
            if others[0].type == "else_clause":
                return self._block(others[0].children)
            return self._branches(others[0], others[1:])

        return self._either(self._condition(node, children[1:then]), lambda: self._block(body), otherwise)

    def _either(
        self, condition: Condition, first: Callable[[], Flow], second: Callable[[], Flow], held: bool | None = None
    ) -> Flow:
        """Follow one of two branches, or both if it is not known which.

        Args:
            condition: the condition, for a message.
            first: follows the branch for a condition that holds.
            second: follows the other branch.
            held: value of the condition; the status of the last command if None.
        """
        value = self.scope.status if held is None else held
        if value is not None:
            return first() if value else second()
        start = self.scope
        flows: list[Flow] = []
        ends: list[Scope] = []
        conditions_before = self._conditions
        self._conditions = (*conditions_before, condition)
        for branch in (first, second):
            self.scope = start.copy()
            flows.append(branch())
            ends.append(self.scope)
        self._conditions = conditions_before
        self.scope = start
        if flows[0] is not flows[1] and Flow.EXIT not in flows:
            raise Undecided(condition.text, condition.names.split())
        if flows[0] is Flow.EXIT:
            self._become(ends[1])
            return flows[1]
        if flows[1] is Flow.EXIT:
            self._become(ends[0])
            return flows[0]
        self._become(merged(ends[0], ends[1], condition.text, condition.names, condition.line))
        for name in self.given:
            variable = self.scope.variables.get(name)
            if variable is not None and not isinstance(variable.value, dict) and unknowns([variable.value]):
                self.scope.assign(name, (Text(self.given[name], condition.line),))
        return flows[0]

    def _become(self, scope: Scope) -> None:
        """Take over the state of another shell, in place: callers hold this one."""
        vars(self.scope).update(vars(scope))

    def _condition(self, node: Node, nodes: Sequence[Node]) -> Condition:
        """The description of a condition that is made of some nodes."""
        expander = self.expander()
        line = expander.line(node)
        named = [child for child in nodes if child.is_named and child.type != "comment"]
        texts = " ".join(" ".join(expander.text(child) for child in named).split())
        names: list[str] = []
        for name in _variables(named):
            value = self.scope.items(name)
            if value is None:
                names.append(name)
                continue
            for piece in unknowns(value.values()):
                names += piece.name.split() or [name]
        return Condition(f"line {line}: '{texts:.100}'", " ".join(dict.fromkeys(names)), line)

    def _case(self, node: Node) -> Flow:
        value_node = node.child_by_field_name("value")
        assert value_node is not None
        value = self.expander().string(value_node)
        arms = [child for child in node.named_children if child.type == "case_item"]
        return self._arms(value_node, value, arms)

    def _arms(self, value_node: Node, value: Word, arms: Sequence[Node]) -> Flow:
        """Follow the first arm of a `case` whose pattern fits."""
        if not arms:
            self.scope.status = True
            return Flow.NEXT
        end = next(i for i, child in enumerate(arms[0].children) if child.type == ")")
        head, body = arms[0].children[:end], arms[0].children[end + 1 :]
        patterns: list[list[Node]] = [[]]
        for child in head:
            if child.type == "|":
                patterns.append([])
            elif child.is_named:
                patterns[-1].append(child)
        fits: bool | None = False
        for pattern in patterns:
            one = conditions.fits(value, self.expander().pattern(pattern))
            fits = conditions.negated(conditions.both(conditions.negated(fits), conditions.negated(one)))
        self.scope.status = fits
        condition = self._condition(value_node, [value_node])
        return self._either(condition, lambda: self._block(body), lambda: self._arms(value_node, value, arms[1:]))

    def _list(self, node: Node) -> Flow:
        """Follow `first && second` or `first || second`."""
        left, operator, right = node.children[0], node.children[1].type, node.children[-1]
        flow = self._statement(left)
        return self._then(left, operator, right) if flow is Flow.NEXT else flow

    def _then(self, left: Node, operator: str, right: Node) -> Flow:
        """Follow the second part of a list, after the first."""
        if operator == "||":
            self.scope.status = conditions.negated(self.scope.status)

        def skip() -> Flow:
            self.scope.status = operator == "||"
            return Flow.NEXT

        return self._either(self._condition(left, [left]), lambda: self._statement(right), skip)

    def _negated(self, node: Node) -> Flow:
        flow = self._statement(node.named_children[0])
        self.scope.status = conditions.negated(self.scope.status)
        return flow

    def _test(self, node: Node) -> Flow:
        self.scope.status = conditions.test(node, self.expander())
        return Flow.NEXT

    def _apart(self, follow: Callable[[], Flow]) -> Flow:
        """Follow statements in a subshell: only their output and their files remain."""
        outer = self.scope
        self.scope = outer.copy()
        try:
            follow()
            outer.status, outer.output, outer.files = self.scope.status, self.scope.output, self.scope.files
        finally:
            self.scope = outer
        return Flow.NEXT

    def _pipeline(self, node: Node) -> Flow:
        """Follow commands that read each other's output."""
        return self._pipe([child for child in node.named_children if child.type != "comment"], self.scope.input)

    def _pipe(self, commands: Sequence[Node], text: Word | None) -> Flow:
        """Follow the commands of a pipeline.

        Args:
            commands: the commands.
            text: input of the first one.
        """
        outer = self.scope
        for i, command in enumerate(commands):
            is_last = i == len(commands) - 1
            self.scope = outer.copy()
            self.scope.input = text
            if not is_last:
                self.scope.output = ()
            try:
                self._statement(command)
                outer.status, outer.files = self.scope.status, self.scope.files
                if is_last:
                    outer.output = self.scope.output
                else:
                    text = joined(self.scope.output or ())
            finally:
                self.scope = outer
        return Flow.NEXT

    # Loops

    def _for(self, node: Node) -> Flow:
        expander = self.expander()
        variable, body = node.child_by_field_name("variable"), node.child_by_field_name("body")
        assert variable is not None
        assert body is not None
        name = expander.text(variable)
        values = _fields(node, "value")
        words = expander.fields(values)
        if not any(child.type == "in" for child in node.children):
            words = list(self.scope.arguments) if self.scope.arguments is not None else [expander.unknown(node, "#")]
        if any(known(word) is None and len(word) == 1 for word in words):
            # An unknown word without quotes may be several words, or none.
            condition = self._condition(node, values)
            return self._once_or_never(condition, body, [(name, expander.unknown(node))])
        for word in words[:MOST_ROUNDS]:
            self.scope.assign(name, word)
            flow = self._statement(body)
            if flow is Flow.BREAK:
                break
            if flow in (Flow.RETURN, Flow.EXIT):
                return flow
        return Flow.NEXT

    def _counted_for(self, node: Node) -> Flow:
        """Follow `for ((start; condition; update))`."""
        expander = self.expander()
        body = node.child_by_field_name("body")
        marks = [child for child in node.children if child.type in ("((", ";", "))")]
        assert body is not None
        if len(marks) < 4 or expander.arithmetic(node, marks[0].end_byte, marks[1].start_byte) is None:
            return self._once_or_never(self._condition(node, [node]), body, [])
        for _ in range(MOST_ROUNDS):
            holds = expander.arithmetic(node, marks[1].end_byte, marks[2].start_byte)
            if holds is None:
                return self._once_or_never(self._condition(node, [node]), body, [])
            if not holds:
                return Flow.NEXT
            flow = self._statement(body)
            if flow is Flow.BREAK:
                return Flow.NEXT
            if flow in (Flow.RETURN, Flow.EXIT):
                return flow
            expander.arithmetic(node, marks[2].end_byte, marks[3].start_byte)
        raise ValueError(f"line {expander.line(node)}: a loop of more than {MOST_ROUNDS:,} rounds")

    def _while(self, node: Node) -> Flow:
        """Follow `while` or `until`."""
        body = node.child_by_field_name("body")
        assert body is not None
        head = [child for child in node.children[1:] if child != body]
        is_while = self.expander().text(node.children[0]) == "while"
        for _ in range(MOST_ROUNDS):
            flow = self._block(head)
            if flow is not Flow.NEXT:
                return flow
            holds = self.scope.status if is_while else conditions.negated(self.scope.status)
            if holds is None:
                return self._once_or_never(self._condition(node, head), body, [])
            if not holds:
                self.scope.status = True
                return Flow.NEXT
            flow = self._statement(body)
            if flow is Flow.BREAK:
                return Flow.NEXT
            if flow in (Flow.RETURN, Flow.EXIT):
                return flow
        raise ValueError(f"line {self.expander().line(node)}: a loop of more than {MOST_ROUNDS:,} rounds")

    def _once_or_never(self, condition: Condition, body: Node, variables: Sequence[tuple[str, Word]]) -> Flow:
        """Follow the body of a loop whose number of rounds is not known.

        One round shows which variables the loop sets. Afterwards they depend on the condition.
        """

        def once() -> Flow:
            for name, value in variables:
                self.scope.assign(name, value)
            flow = self._statement(body)
            return Flow.NEXT if flow in (Flow.BREAK, Flow.CONTINUE) else flow

        self.scope.status = None
        return self._either(condition, once, lambda: Flow.NEXT)

    # Commands

    def _substitution(self, node: Node) -> Word:
        """The output of a `$(…)` or of commands in backquotes."""
        expander = self.expander()
        inner = self.scope.copy()
        inner.output = ()
        statements = [child for child in node.children if child.is_named]
        if len(statements) == 1 and statements[0].type == "file_redirect":
            return expander.unknown(node)
        outer = self.scope
        self._depth += 1
        if self._depth > DEEPEST:
            raise ValueError(f"more than {DEEPEST} functions, substitutions or scripts inside each other")
        self.scope = inner
        try:
            self._block(statements)
        finally:
            self.scope = outer
            self._depth -= 1
        outer.status = inner.status
        pieces = list(joined(inner.output or ()))
        while pieces and isinstance(pieces[-1], Text) and not pieces[-1].text.rstrip("\n"):
            pieces.pop()
        if pieces and isinstance(pieces[-1], Text):
            pieces[-1] = pieces[-1]._replace(text=pieces[-1].text.rstrip("\n"))
        missing = unknowns([tuple(pieces)])
        if not missing:
            line = expander.line(node)
            return tuple(Text(piece.text, line) for piece in pieces)
        # An unknown part makes the whole unknown: the text that is shown is the substitution's own.
        path = missing[0].path if len(pieces) == 1 else ""
        first = missing[0]
        return (Unknown(expander.text(node), expander.line(node), first.name, first.condition, path),)

    def _redirected(self, node: Node) -> Flow:
        """Follow a command whose input or output is a file, or whose input is a here-document."""
        expander = self.expander()
        body = node.child_by_field_name("body")
        target: str | None = None
        is_appended = False
        scope = self.scope
        text: Word | None = scope.input
        rest: Node | None = None  # a here-document that is followed by `| command` or `&& command`
        for redirect in _redirects(node):
            destinations = _fields(redirect, "destination")
            # The grammar takes the command's words behind a redirection for further destinations.
            self._more_words += [*destinations[1:], *_fields(redirect, "argument")]
            kind = next((expander.text(child) for child in redirect.children if not child.is_named), "")
            if redirect.type == "heredoc_redirect":
                text = self._heredoc(redirect)
                rest = redirect
            elif redirect.type == "herestring_redirect":
                text = (*expander.string(redirect.named_children[-1]), Text("\n", expander.line(redirect)))
            elif kind in (">", ">>", ">|", "&>", "&>>") and not _is_errors(redirect, expander):
                target = written(expander.string(destinations[0] if destinations else None))
                is_appended = ">>" in kind
            elif kind == "<":
                text = self.read_file(written(expander.string(destinations[0] if destinations else None)))
        if body is None:
            return Flow.NEXT
        scope.input = text
        output_before = scope.output
        pipe = next((child for child in rest.named_children if child.type == "pipeline"), None) if rest else None
        if target is not None or pipe is not None:
            scope.output = ()
        flow = self._statement(body)
        scope.input = None
        if target is not None or pipe is not None:
            content = joined(scope.output or ())
            scope.output = output_before
            if pipe is not None:
                return self._pipe(pipe.named_children, content)
            assert target is not None
            whole = joined([scope.files.get(target, ()), content]) if is_appended else content
            scope.files[target] = self._spend(whole)
        right = rest.child_by_field_name("right") if rest else None
        if right is not None and rest is not None and flow is Flow.NEXT:
            operator = next(child.type for child in rest.children if child.type in ("&&", "||"))
            return self._then(body, operator, right)
        return flow

    def _heredoc(self, node: Node) -> Word:
        """The text of a here-document. If its end mark is quoted, variables stay as they are written."""
        expander = self.expander()
        mark = next(child for child in node.named_children if child.type == "heredoc_start")
        body = next((child for child in node.named_children if child.type == "heredoc_body"), None)
        if body is None:
            return ()
        if expander.text(mark)[:1] in "'\"\\":
            return tuple(self.source.segments(body.start_byte, body.end_byte))
        return expander.span(body, body.start_byte, body.end_byte)

    def read_file(self, path: str) -> Word | None:
        """The contents of a file that the script wrote, or that lies in the script's folder; None if not known."""
        if path in self.scope.files:
            return self.scope.files[path]
        return self._read_below(path)

    def _read_below(self, path: str) -> Word | None:
        """The contents of a file below the script's folder; None if there is none."""
        if self.folder is None:
            return None
        try:
            root = self.folder.resolve()
            full = (root / path).resolve()
            if root not in full.parents or not full.is_file() or full.stat().st_size > LONGEST:
                return None
            return grammar.script(full.read_text(encoding="utf-8", errors="replace"))
        except (OSError, ValueError):
            return None

    def path_of(self, word: Word) -> str | None:
        """The path that a word stands for, relative to the script's folder where it is known to be below it."""
        parts: list[str] = []
        for piece in word:
            if isinstance(piece, Unknown) and not piece.path:
                return None
            parts.append(piece.path if isinstance(piece, Unknown) else piece.text)
        return "".join(parts)

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

    def child(self, text: Word, arguments: Sequence[Word], environment: Mapping[str, Word]) -> None:
        """Follow a text in a process of its own, which has only the exported variables."""
        exported = {name: variable for name, variable in self.scope.variables.items() if variable.is_exported}
        exported |= {name: Variable(value, is_exported=True) for name, value in environment.items()}
        scope = Scope(variables=exported, arguments=tuple(arguments), folder=self.scope.folder, files=self.scope.files)
        self.follow_text(text, scope)
        self.scope.status = None

    def call(self, function: Function, arguments: Sequence[Word]) -> Flow:
        """Follow a function. Its `local` variables have their old values afterwards."""
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

    def _command(self, node: Node) -> Flow:
        """Follow a simple command."""
        expander = self.expander()
        environment: dict[str, Word] = {}
        nodes: list[Node] = []
        more, self._more_words = self._more_words, []
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
            self._spend(word)
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
        """Take note of a command that is not part of the shell."""
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
            self.found.append(Launch(words, line, self._conditions, dict(self.scope.files)))


def _variables(nodes: Sequence[Node]) -> list[str]:
    """The names of all variables in some nodes."""
    names: list[str] = []
    for node in nodes:
        if node.type in ("variable_name", "special_variable_name") and node.text:
            names.append(node.text.decode("utf-8", errors="replace"))
        names += _variables(node.named_children)
    return names


def _redirects(node: Node) -> list[Node]:
    """The redirections of a statement. Those behind a `<<EOF` are inside its node."""
    redirects: list[Node] = []
    for child in node.named_children:
        if child.type.endswith("_redirect"):
            redirects += [child, *_redirects(child)]
    return redirects


def _fields(node: Node, name: str) -> list[Node]:
    """The children of a node that stand in one of its fields."""
    return [child for i, child in enumerate(node.children) if node.field_name_for_child(i) == name]


def _is_errors(node: Node, expander: Expander) -> bool:
    """True if a redirection is about the error output."""
    descriptor = node.child_by_field_name("descriptor")
    return descriptor is not None and expander.text(descriptor) != "1"


def _local_names(function: Function) -> list[str]:
    """The names of a function's `local` variables."""
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
