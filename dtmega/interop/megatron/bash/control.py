"""`if`, `case`, loops, and the lists `first && second` and `first || second`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dtmega.interop.megatron.bash import conditions
from dtmega.interop.megatron.bash.scope import Flow, Scope, merged
from dtmega.interop.megatron.bash.shell import Condition, Shell
from dtmega.interop.megatron.bash.words import Text, Undecided, Word, known, unknowns

if TYPE_CHECKING:
    from tree_sitter import Node

MOST_ROUNDS = 10_000  # maximum number of iterations of one loop


class Control(Shell):
    """A shell that follows conditionals, lists and loops."""

    def follow_if(self, node: Node) -> Flow:
        """Follow `if`, its `elif` branches and its `else`."""
        return self._branches(node, [child for child in node.children if child.type in ("elif_clause", "else_clause")])

    def _branches(self, node: Node, others: Sequence[Node]) -> Flow:
        children = list(node.children)
        then = next(i for i, child in enumerate(children) if child.type == "then")
        body = [child for child in children[then + 1 :] if child.type not in ("elif_clause", "else_clause")]
        flow = self.block(children[1:then])
        if flow is not Flow.NEXT:
            return flow

        def otherwise() -> Flow:
            if not others:
                return Flow.NEXT
            if others[0].type == "else_clause":
                return self.block(others[0].children)
            return self._branches(others[0], others[1:])

        return self.either(self.condition(node, children[1:then]), lambda: self.block(body), otherwise)

    def either(self, condition: Condition, first: Callable[[], Flow], second: Callable[[], Flow]) -> Flow:
        """Follow one of two branches, by the last command's status, or both if it is not known.

        Args:
            condition: description of the condition, for messages.
            first: function that follows the branch for a true condition.
            second: function that follows the branch for a false condition.
        """
        value = self.scope.status
        if value is not None:
            return first() if value else second()
        start = self.scope
        flows: list[Flow] = []
        ends: list[Scope] = []
        conditions_before = self.conditions
        self.conditions = (*conditions_before, condition)
        for branch in (first, second):
            self.scope = start.copy()
            flows.append(branch())
            ends.append(self.scope)
        self.conditions = conditions_before
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
        """Copy another scope's values into the object `self.scope`, because callers hold references to that object."""
        vars(self.scope).update(vars(scope))

    def condition(self, node: Node, nodes: Sequence[Node]) -> Condition:
        """Describe the condition that the given nodes form: its text, its unknown variables, and the line of `node`."""
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

    def follow_case(self, node: Node) -> Flow:
        value_node = node.child_by_field_name("value")
        assert value_node is not None
        value = self.expander().string(value_node)
        arms = [child for child in node.named_children if child.type == "case_item"]
        return self._arms(value_node, value, arms)

    def _arms(self, value_node: Node, value: Word, arms: Sequence[Node]) -> Flow:
        """Follow the first `case` arm with a matching pattern."""
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
        condition = self.condition(value_node, [value_node])
        return self.either(condition, lambda: self.block(body), lambda: self._arms(value_node, value, arms[1:]))

    def follow_list(self, node: Node) -> Flow:
        """Follow `first && second` or `first || second`."""
        left, operator, right = node.children[0], node.children[1].type, node.children[-1]
        flow = self.statement(left)
        return self.then(left, operator, right) if flow is Flow.NEXT else flow

    def then(self, left: Node, operator: str, right: Node) -> Flow:
        """Follow the right side of a list. The caller has already followed the left side."""
        if operator == "||":
            self.scope.status = conditions.negated(self.scope.status)

        def skip() -> Flow:
            self.scope.status = operator == "||"
            return Flow.NEXT

        return self.either(self.condition(left, [left]), lambda: self.statement(right), skip)

    def follow_negated(self, node: Node) -> Flow:
        flow = self.statement(node.named_children[0])
        self.scope.status = conditions.negated(self.scope.status)
        return flow

    def follow_test(self, node: Node) -> Flow:
        self.scope.status = conditions.test(node, self.expander())
        return Flow.NEXT

    def follow_for(self, node: Node) -> Flow:
        expander = self.expander()
        variable, body = node.child_by_field_name("variable"), node.child_by_field_name("body")
        assert variable is not None
        assert body is not None
        name = expander.text(variable)
        values = in_field(node, "value")
        words = expander.fields(values)
        if not any(child.type == "in" for child in node.children):
            words = list(self.scope.arguments) if self.scope.arguments is not None else [expander.unknown(node, "#")]
        if any(known(word) is None and len(word) == 1 for word in words):
            # An unknown word without quotes may expand to several words, or to none.
            condition = self.condition(node, values)
            return self._once_or_never(condition, body, [(name, expander.unknown(node))])
        if len(words) > MOST_ROUNDS:
            raise ValueError(f"line {expander.line(node)}: a loop of more than {MOST_ROUNDS:,} rounds")
        for word in words:
            self.scope.assign(name, word)
            flow = self.statement(body)
            if flow is Flow.BREAK:
                break
            if flow in (Flow.RETURN, Flow.EXIT):
                return flow
        return Flow.NEXT

    def follow_counted_for(self, node: Node) -> Flow:
        """Follow `for ((start; condition; update))`."""
        expander = self.expander()
        body = node.child_by_field_name("body")
        marks = [child for child in node.children if child.type in ("((", ";", "))")]
        assert body is not None
        if len(marks) < 4 or expander.arithmetic(node, marks[0].end_byte, marks[1].start_byte) is None:
            return self._once_or_never(self.condition(node, [node]), body, [])
        for _ in range(MOST_ROUNDS):
            # Without a condition, as in `for ((;;))`, the loop runs until a statement leaves the loop.
            has_condition = known(expander.span(node, marks[1].end_byte, marks[2].start_byte)) not in ("", " ")
            holds = expander.arithmetic(node, marks[1].end_byte, marks[2].start_byte) if has_condition else 1
            if holds is None:
                return self._once_or_never(self.condition(node, [node]), body, [])
            if not holds:
                return Flow.NEXT
            flow = self.statement(body)
            if flow is Flow.BREAK:
                return Flow.NEXT
            if flow in (Flow.RETURN, Flow.EXIT):
                return flow
            expander.arithmetic(node, marks[2].end_byte, marks[3].start_byte)
        raise ValueError(f"line {expander.line(node)}: a loop of more than {MOST_ROUNDS:,} rounds")

    def follow_while(self, node: Node) -> Flow:
        """Follow `while` or `until`."""
        body = node.child_by_field_name("body")
        assert body is not None
        head = [child for child in node.children[1:] if child != body]
        is_while = self.expander().text(node.children[0]) == "while"
        for _ in range(MOST_ROUNDS):
            flow = self.block(head)
            if flow is not Flow.NEXT:
                return flow
            holds = self.scope.status if is_while else conditions.negated(self.scope.status)
            if holds is None:
                return self._once_or_never(self.condition(node, head), body, [])
            if not holds:
                self.scope.status = True
                return Flow.NEXT
            flow = self.statement(body)
            if flow is Flow.BREAK:
                return Flow.NEXT
            if flow in (Flow.RETURN, Flow.EXIT):
                return flow
        raise ValueError(f"line {self.expander().line(node)}: a loop of more than {MOST_ROUNDS:,} rounds")

    def _once_or_never(self, condition: Condition, body: Node, variables: Sequence[tuple[str, Word]]) -> Flow:
        """Follow the body of a loop with an unknown number of iterations.

        One iteration shows which variables the loop sets. After the loop, these variables depend on the condition.
        """

        def once() -> Flow:
            for name, value in variables:
                self.scope.assign(name, value)
            flow = self.statement(body)
            return Flow.NEXT if flow in (Flow.BREAK, Flow.CONTINUE) else flow

        self.scope.status = None
        return self.either(condition, once, lambda: Flow.NEXT)


def _variables(nodes: Sequence[Node]) -> list[str]:
    """The names of all variables that occur in the given nodes."""
    names: list[str] = []
    for node in nodes:
        if node.type in ("variable_name", "special_variable_name") and node.text:
            names.append(node.text.decode("utf-8", errors="replace"))
        names += _variables(node.named_children)
    return names


def in_field(node: Node, name: str) -> list[Node]:
    """The children of a node that belong to the field `name`."""
    return [child for i, child in enumerate(node.children) if node.field_name_for_child(i) == name]
