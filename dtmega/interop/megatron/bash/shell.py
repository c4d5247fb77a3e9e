"""Base class for the shell that follows a script: its state, its limits, and scripts that run inside other scripts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dtmega.interop.megatron.bash import grammar
from dtmega.interop.megatron.bash.expand import Expander
from dtmega.interop.megatron.bash.grammar import Source
from dtmega.interop.megatron.bash.scope import Flow, Scope
from dtmega.interop.megatron.bash.words import LONGEST, Text, Undecided, Unknown, Word, joined, unknowns

if TYPE_CHECKING:
    from tree_sitter import Node

MOST_STATEMENTS = 50_000  # maximum number of statements to follow
MOST_TEXT = 20_000_000  # limit in characters for everything that is assigned, written or run
DEEPEST = 20  # limit for nested calls of functions, substitutions and scripts


class Condition(NamedTuple):
    """A condition whose value is unknown.

    Attributes:
        text: text and line of the condition, for messages.
        names: names of the condition's unknown variables, separated by blanks.
        line: number of the condition's line in the script.
    """

    text: str
    names: str
    line: int


class Launch(NamedTuple):
    """A command that the script would run.

    Attributes:
        words: the command's words.
        line: number of the command's line in the script.
        conditions: conditions of unknown result that decide whether the command runs.
        files: contents of the files that the script wrote before the command, keyed by path.
    """

    words: list[Word]
    line: int
    conditions: tuple[Condition, ...]
    files: dict[str, Word]


class Shell:
    """Base class for the shell that follows a script; subclasses implement the statements.

    Attributes:
        wanted: function that receives a command's words, and returns True if the command is to be collected.
        folder: folder of the script; None if nothing may be read.
        given: values that the user gives to variables, keyed by variable name.
        found: commands collected so far.
        notes: remarks for the user.
        hidden: error about the first unwanted command whose words depend on an unknown condition; raised if no command
            is collected.
        source: parsed text that is being followed.
        scope: state of the shell.
        conditions: unknown conditions that decide whether the current statement runs.
        more_words: word nodes that the grammar attaches to a redirection, although they belong to the next command.
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
        self.conditions: tuple[Condition, ...] = ()
        self._n_statements = 0
        self._n_characters = 0
        self._depth = 0
        self.more_words: list[Node] = []

    def statement(self, node: Node) -> Flow:
        """Follow one statement."""
        raise NotImplementedError

    def block(self, nodes: Sequence[Node]) -> Flow:
        """Follow statements in order, until a statement leaves the block."""
        nodes = [node for node in nodes if node.is_named and node.type != "comment"]
        for node in nodes:
            is_background = node.next_sibling is not None and node.next_sibling.type == "&"
            flow = self.apart(lambda node=node: self.statement(node)) if is_background else self.statement(node)
            if flow is not Flow.NEXT:
                return flow
        return Flow.NEXT

    def follow_text(self, text: Word, scope: Scope) -> Flow:
        """Parse text, and follow its statements with `scope` as the state of the shell."""
        self.spend(text)
        return self.inside(grammar.parse(text), None, scope)

    def inside(self, source: Source, body: Node | None, scope: Scope) -> Flow:
        """Follow `source`, or only the node `body`, with `scope` as the state, then restore the old text and state.

        Raises:
            ValueError: scripts, functions or substitutions are nested too deeply.
        """
        if self._depth >= DEEPEST:
            raise ValueError(f"more than {DEEPEST} functions, substitutions or scripts inside each other")
        before = self.source, self.scope
        self._depth += 1
        self.source, self.scope = source, scope
        try:
            return self.block(source.root.children if body is None else [body])
        finally:
            self._depth -= 1
            self.source, self.scope = before

    def apart(self, follow: Callable[[], Flow]) -> Flow:
        """Follow statements in a subshell. Only the subshell's output, written files and status remain afterwards."""
        outer = self.scope
        self.scope = outer.copy()
        try:
            follow()
            outer.status, outer.output, outer.files = self.scope.status, self.scope.output, self.scope.files
        finally:
            self.scope = outer
        return Flow.NEXT

    def expander(self) -> Expander:
        return Expander(self.source, self.scope, self._substitution)

    def spend(self, word: Word) -> Word:
        """Count a word's characters toward the script's limit and return the word.

        Raises:
            ValueError: the script exceeds MOST_TEXT characters.
        """
        self._n_characters += sum(len(piece.text) for piece in word)
        if self._n_characters > MOST_TEXT:
            raise ValueError(f"the script makes texts of more than {MOST_TEXT:,} characters")
        return word

    def _substitution(self, node: Node) -> Word:
        """The output of the commands in `$(…)` or in backquotes."""
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
            self.block(statements)
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
        # One unknown piece makes the whole output unknown: return one piece with the text of the `$(…)` in the script.
        path = missing[0].path if len(pieces) == 1 else ""
        first = missing[0]
        return (Unknown(expander.text(node), expander.line(node), first.name, first.condition, path),)

    def read_file(self, path: str) -> Word | None:
        """The contents of a file that the script wrote, or of a file in the script's folder; None if unknown."""
        if path in self.scope.files:
            return self.scope.files[path]
        return self._read_below(path)

    def _read_below(self, path: str) -> Word | None:
        """The contents of a file below the script's folder; None if the file cannot be read."""
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
        """Convert a word to a path; None if the word has an unknown piece without a path."""
        parts: list[str] = []
        for piece in word:
            if isinstance(piece, Unknown) and not piece.path:
                return None
            parts.append(piece.path if isinstance(piece, Unknown) else piece.text)
        return "".join(parts)

    def count_statement(self) -> None:
        """Count one statement.

        Raises:
            ValueError: too many statements were followed.
        """
        self._n_statements += 1
        if self._n_statements > MOST_STATEMENTS:
            raise ValueError(f"the script runs more than {MOST_STATEMENTS:,} statements")
