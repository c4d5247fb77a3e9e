"""Redirections, here-documents and pipelines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dtmega.interop.megatron.bash.control import Control, in_field
from dtmega.interop.megatron.bash.expand import Expander
from dtmega.interop.megatron.bash.scope import Flow
from dtmega.interop.megatron.bash.words import Text, Word, joined, written

if TYPE_CHECKING:
    from tree_sitter import Node


class Redirections(Control):
    """A shell that follows pipelines, and statements with redirected input or output."""

    def redirected(self, node: Node) -> Flow:
        """Follow a command with redirected input or output, such as `< FILE`, `> FILE` or a here-document."""
        expander = self.expander()
        body = node.child_by_field_name("body")
        target: str | None = None
        is_appended = False
        scope = self.scope
        text: Word | None = scope.input
        rest: Node | None = None  # a here-document that is followed by `| command` or `&& command`
        for redirect in _redirects(node):
            destinations = in_field(redirect, "destination")
            # The grammar mistakes the command's words after a redirection for further destinations.
            self.more_words += [*destinations[1:], *in_field(redirect, "argument")]
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
        flow = self.statement(body)
        scope.input = None
        if target is not None or pipe is not None:
            content = joined(scope.output or ())
            scope.output = output_before
            if pipe is not None:
                return self.pipe(pipe.named_children, content)
            assert target is not None
            whole = joined([scope.files.get(target, ()), content]) if is_appended else content
            scope.files[target] = self.spend(whole)
        right = rest.child_by_field_name("right") if rest else None
        if right is not None and rest is not None and flow is Flow.NEXT:
            operator = next(child.type for child in rest.children if child.type in ("&&", "||"))
            return self.then(body, operator, right)
        return flow

    def _heredoc(self, node: Node) -> Word:
        """The text of a here-document, with variables expanded unless the end marker is quoted."""
        expander = self.expander()
        mark = next(child for child in node.named_children if child.type == "heredoc_start")
        body = next((child for child in node.named_children if child.type == "heredoc_body"), None)
        if body is None:
            return ()
        if expander.text(mark)[:1] in "'\"\\":
            return tuple(self.source.segments(body.start_byte, body.end_byte))
        return expander.span(body, body.start_byte, body.end_byte)

    def pipeline(self, node: Node) -> Flow:
        """Follow a pipeline, in which each command reads the previous command's output."""
        return self.pipe([child for child in node.named_children if child.type != "comment"], self.scope.input)

    def pipe(self, commands: Sequence[Node], text: Word | None) -> Flow:
        """Follow the commands of a pipeline.

        Args:
            commands: nodes of the commands, in order.
            text: input of the first command; None if the input is not known.
        """
        outer = self.scope
        for i, command in enumerate(commands):
            is_last = i == len(commands) - 1
            self.scope = outer.copy()
            self.scope.input = text
            if not is_last:
                self.scope.output = ()
            try:
                self.statement(command)
                outer.status, outer.files = self.scope.status, self.scope.files
                if is_last:
                    outer.output = self.scope.output
                else:
                    text = joined(self.scope.output or ())
            finally:
                self.scope = outer
        return Flow.NEXT


def _redirects(node: Node) -> list[Node]:
    """The redirections of a statement, including those that the grammar nests inside a `<<EOF` redirection."""
    redirects: list[Node] = []
    for child in node.named_children:
        if child.type.endswith("_redirect"):
            redirects += [child, *_redirects(child)]
    return redirects


def _is_errors(node: Node, expander: Expander) -> bool:
    """True if a redirection does not apply to standard output, as with `2>`."""
    descriptor = node.child_by_field_name("descriptor")
    return descriptor is not None and expander.text(descriptor) != "1"
