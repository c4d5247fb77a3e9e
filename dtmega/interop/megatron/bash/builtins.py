"""Shell builtins and common programs, reduced to the effects that can change a launch command.

Each function takes the shell, the command's words and the line number, and returns a Flow, which determines where the
script continues.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Sequence
from typing import Protocol

from dtmega.interop.megatron.bash import conditions
from dtmega.interop.megatron.bash.expand import Expander
from dtmega.interop.megatron.bash.scope import Flow, Scope
from dtmega.interop.megatron.bash.words import Text, Unknown, Word, joined, known, unknowns, with_blanks, written


class Follower(Protocol):
    """The part of the shell's interface that builtins use."""

    scope: Scope

    def expander(self) -> Expander: ...

    def set(self, name: str, value: Word, line: int) -> None: ...

    def read_file(self, path: str) -> Word | None: ...

    def path_of(self, word: Word) -> str | None: ...

    def follow_text(self, text: Word, scope: Scope) -> Flow: ...

    def source_file(self, word: Word, line: int) -> Flow: ...


Builtin = Callable[[Follower, Sequence[Word], int], Flow]
# Programs that are assumed to succeed without writing anything that affects a launch.
SILENT = (
    *("mkdir", "touch", "rm", "cp", "mv", "ln", "chmod", "sleep", "wait", "clear", "ulimit", "module", "conda"),
    *("pip", "pip3", "kill", "pkill", "set", "shopt", "trap", "umask", "alias", "sync", "logger", "popd", "hash"),
)
ECHO_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}
SED = re.compile(r"s([/|,#@])((?:(?!\1)[^\\])*)\1((?:(?!\1)[^\\&])*)\1(g?)")


def _end(flow: Flow) -> Builtin:
    return lambda shell, words, line: flow


def _status(value: bool) -> Builtin:
    def command(shell: Follower, words: Sequence[Word], line: int) -> Flow:
        shell.scope.status = value
        return Flow.NEXT

    return command


def _echo(shell: Follower, words: Sequence[Word], line: int) -> Flow:
    options = [word for word in words[1:2] if known(word) in ("-n", "-e", "-ne", "-en")]
    ending = () if options and "n" in (known(options[0]) or "") else (Text("\n", line),)
    text = with_blanks(words[1 + len(options) :], line)
    if options and "e" in (known(options[0]) or ""):
        text = _with_escapes(text) or (Unknown(written(with_blanks(words, line)), line),)
    shell.scope.write((text, ending))
    shell.scope.status = True
    return Flow.NEXT


def _with_escapes(word: Word) -> Word | None:
    """Replace the escapes that `echo -e` replaces; None if there are escapes that ECHO_ESCAPES lacks."""
    pieces: list[Text | Unknown] = []
    for piece in word:
        if isinstance(piece, Text):
            if not {*re.findall(r"\\(.?)", piece.text, re.DOTALL)} <= ECHO_ESCAPES.keys():
                return None
            piece = piece._replace(text=re.sub(r"\\(.)", lambda match: ECHO_ESCAPES[match[1]], piece.text))
        pieces.append(piece)
    return tuple(pieces)


def _printf(shell: Follower, words: Sequence[Word], line: int) -> Flow:
    texts = [known(word) for word in words[1:]]
    is_plain = bool(texts) and re.fullmatch(r"(%s|%d|\\n|[^%\\])*", texts[0] or "%") is not None
    if is_plain and None not in texts and (texts[0] or "").count("%") == len(texts) - 1:
        rest = iter(texts[1:])
        text = re.sub(r"%[sd]", lambda match: next(rest) or "", (texts[0] or "").replace("\\n", "\n"))
        shell.scope.write(((Text(text, line),),))
    else:
        shell.scope.write(((Unknown(written(with_blanks(words, line)), line),),))
    shell.scope.status = True
    return Flow.NEXT


def _cat(shell: Follower, words: Sequence[Word], line: int) -> Flow:
    texts = [shell.read_file(written(word)) for word in words[1:] if not written(word).startswith("-")]
    texts = texts or [shell.scope.input]
    for text in texts:
        shell.scope.write((text if text is not None else (Unknown(written(with_blanks(words, line)), line),),))
    shell.scope.status = True
    return Flow.NEXT


def _sed(shell: Follower, words: Sequence[Word], line: int) -> Flow:
    """Replace literal text, as in `sed "s/NAME/$VALUE/"`. For any other use of sed, the output is unknown."""
    arguments = [word for word in words[1:] if known(word) not in ("-e", "-E", "-r")]
    files = arguments[1:]
    text = shell.read_file(written(files[0])) if files else shell.scope.input
    rule = known(arguments[0]) if arguments else None
    match = SED.fullmatch(rule or "")
    is_literal = match is not None and match[2] != "" and re.search(r"[.*\[\]^$+?(){}]", match[2]) is None
    if text is None or match is None or len(files) > 1 or not is_literal:
        shell.scope.write(((Unknown(written(with_blanks(words, line)), line),),))
    else:
        old, new, every = match[2], match[3], match[4]
        pieces: list[Word] = []
        for piece in text:
            if isinstance(piece, Unknown):
                pieces.append((piece,))
                continue
            lines = piece.text.splitlines(keepends=True)
            replaced = [part.replace(old, new, -1 if every else 1) for part in lines]
            pieces.append((Text("".join(replaced), piece.line),))
        shell.scope.write((joined(pieces),))
    shell.scope.status = True
    return Flow.NEXT


def _pwd(shell: Follower, words: Sequence[Word], line: int) -> Flow:
    shell.scope.write(((Unknown("$(pwd)", line, path=shell.scope.folder or ""),),))
    shell.scope.status = True
    return Flow.NEXT


def _path_of_folder(shell: Follower, words: Sequence[Word], line: int) -> Flow:
    """Write the output of `dirname`, `basename`, `realpath` or `readlink -f`."""
    program = written(words[0])
    arguments = [word for word in words[1:] if not written(word).startswith("-")]
    text = known(arguments[0]) if arguments else None
    path = shell.path_of(arguments[0]) if arguments else None
    suffix = known(arguments[1]) if len(arguments) > 1 else ""
    result: Word = (Unknown(written(with_blanks(words, line)), line),)
    if program == "dirname" and text is not None:
        result = (Text(posixpath.dirname(text.rstrip("/")) or ("/" if text.startswith("/") else "."), line),)
    elif program == "basename" and text is not None:
        if suffix is not None and len(arguments) == len(words) - 1 < 3:
            name = posixpath.basename(text.rstrip("/")) or text[:1]
            result = (Text(name if name == suffix else name.removesuffix(suffix), line),)
    elif program != "basename" and path is not None:
        inside = posixpath.dirname(path) if program == "dirname" else path
        result = (Unknown(written(with_blanks(words, line)), line, path=inside or "."),)
    elif arguments and unknowns(arguments[:1]):
        first = unknowns(arguments[:1])[0]
        result = (Unknown(written(with_blanks(words, line)), line, first.name, first.condition),)
    shell.scope.write((result,))
    shell.scope.status = True
    return Flow.NEXT


def _cd(shell: Follower, words: Sequence[Word], line: int) -> Flow:
    word = words[1] if len(words) > 1 else ()
    path = shell.path_of(word)
    begins_in_folder = bool(unknowns([word]))
    before = shell.scope.folder
    if path is None or posixpath.isabs(path) or not (begins_in_folder or before):
        shell.scope.folder = None
    else:
        shell.scope.folder = posixpath.normpath(path if begins_in_folder else posixpath.join(before or "", path))
    shell.scope.status = True
    return Flow.NEXT


def _eval(shell: Follower, words: Sequence[Word], line: int) -> Flow:
    return shell.follow_text(with_blanks(words[1:], line), shell.scope)


def _source(shell: Follower, words: Sequence[Word], line: int) -> Flow:
    return shell.source_file(words[1], line) if len(words) > 1 else Flow.NEXT


def _shift(shell: Follower, words: Sequence[Word], line: int) -> Flow:
    count = known(words[1]) if len(words) > 1 else "1"
    arguments = shell.scope.arguments
    is_number = count is not None and count.isdigit()
    shell.scope.arguments = arguments[int(count or 0) :] if arguments is not None and is_number else None
    shell.scope.status = True
    return Flow.NEXT


def _set(shell: Follower, words: Sequence[Word], line: int) -> Flow:
    """Set the script's arguments if the command is `set -- …`. Shell options have no effect here."""
    if len(words) > 1 and known(words[1]) == "--":
        shell.scope.arguments = tuple(words[2:])
    shell.scope.status = True
    return Flow.NEXT


def _read(shell: Follower, words: Sequence[Word], line: int) -> Flow:
    """Assign an unknown value to each variable that `read`, `mapfile` or `getopts` sets."""
    for word in words[1:]:
        name = known(word) or ""
        if name.isidentifier():
            shell.set(name, (Unknown(f"${name}", line, name),), line)
    shell.scope.status = None
    return Flow.NEXT


def _test(shell: Follower, words: Sequence[Word], line: int) -> Flow:
    inner = words[1:-1] if known(words[0]) == "[" else words[1:]
    shell.scope.status = conditions.of_words(inner, shell.expander())
    return Flow.NEXT


def _let(shell: Follower, words: Sequence[Word], line: int) -> Flow:
    value: int | None = None
    for word in words[1:]:
        text = known(word)
        value = None if text is None else shell.expander().arithmetic_of(text)
    shell.scope.status = None if value is None else value != 0
    return Flow.NEXT


def _seq(shell: Follower, words: Sequence[Word], line: int) -> Flow:
    texts = [known(word) or "" for word in words[1:]]
    result: Word = (Unknown(written(with_blanks(words, line)), line),)
    if 1 <= len(texts) <= 2 and all(re.fullmatch(r"\d{1,5}", text) for text in texts):
        first = int(texts[0]) if len(texts) == 2 else 1
        numbers = [str(number) for number in range(first, int(texts[-1]) + 1)]
        result = (Text("\n".join(numbers), line),)
    shell.scope.write((result,))
    shell.scope.status = True
    return Flow.NEXT


BUILTINS: dict[str, Builtin] = {
    **dict.fromkeys(SILENT, _status(True)),
    "exit": _end(Flow.EXIT),
    "return": _end(Flow.RETURN),
    "break": _end(Flow.BREAK),
    "continue": _end(Flow.CONTINUE),
    ":": _status(True),
    "true": _status(True),
    "false": _status(False),
    "echo": _echo,
    "printf": _printf,
    "cat": _cat,
    "sed": _sed,
    "seq": _seq,
    "tee": _cat,
    "pwd": _pwd,
    "cd": _cd,
    "pushd": _cd,
    "dirname": _path_of_folder,
    "basename": _path_of_folder,
    "realpath": _path_of_folder,
    "readlink": _path_of_folder,
    "eval": _eval,
    "source": _source,
    ".": _source,
    "shift": _shift,
    "set": _set,
    "read": _read,
    "mapfile": _read,
    "readarray": _read,
    "getopts": _read,
    "test": _test,
    "[": _test,
    "let": _let,
}
