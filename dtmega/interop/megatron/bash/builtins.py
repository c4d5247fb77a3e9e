"""Commands of the shell, and programs whose effect on a launch is known: what they set, and what they write.

Each takes the follower of run.py, the words of the command and its line, and returns how the script goes on: a value of
run.Flow.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dtmega.interop.megatron.bash import conditions
from dtmega.interop.megatron.bash.words import Text, Unknown, Word, joined, known, unknowns, with_blanks, written

if TYPE_CHECKING:
    from dtmega.interop.megatron.bash.run import _Follower

Builtin = Callable[["_Follower", Sequence[Word], int], str]
# Programs that a script takes to succeed, and that write nothing that a launch depends on.
SILENT = (
    *("mkdir", "touch", "rm", "cp", "mv", "ln", "chmod", "sleep", "wait", "clear", "ulimit", "module", "conda"),
    *("pip", "pip3", "kill", "pkill", "set", "shopt", "trap", "umask", "alias", "sync", "logger", "popd", "hash"),
)
SED = re.compile(r"s([/|,#@])((?:(?!\1)[^\\])*)\1((?:(?!\1)[^\\&])*)\1(g?)")


def _end(flow: str) -> Builtin:
    return lambda follower, words, line: flow


def _status(value: bool) -> Builtin:
    def command(follower: _Follower, words: Sequence[Word], line: int) -> str:
        follower.scope.status = value
        return "next"

    return command


def _echo(follower: _Follower, words: Sequence[Word], line: int) -> str:
    options = [word for word in words[1:2] if known(word) in ("-n", "-e", "-ne", "-en")]
    ending = () if options and "n" in (known(options[0]) or "") else (Text("\n", line),)
    follower.scope.write((with_blanks(words[1 + len(options) :], line), ending))
    follower.scope.status = True
    return "next"


def _printf(follower: _Follower, words: Sequence[Word], line: int) -> str:
    texts = [known(word) for word in words[1:]]
    is_plain = bool(texts) and re.fullmatch(r"(%s|%d|\\n|[^%\\])*", texts[0] or "%") is not None
    if is_plain and None not in texts and (texts[0] or "").count("%") == len(texts) - 1:
        rest = iter(texts[1:])
        text = re.sub(r"%[sd]", lambda match: next(rest) or "", (texts[0] or "").replace("\\n", "\n"))
        follower.scope.write(((Text(text, line),),))
    else:
        follower.scope.write(((Unknown(written(with_blanks(words, line)), line),),))
    follower.scope.status = True
    return "next"


def _cat(follower: _Follower, words: Sequence[Word], line: int) -> str:
    texts = [follower.read_file(written(word)) for word in words[1:] if not written(word).startswith("-")]
    texts = texts or [follower.scope.input]
    for text in texts:
        follower.scope.write((text if text is not None else (Unknown(written(with_blanks(words, line)), line),),))
    follower.scope.status = True
    return "next"


def _sed(follower: _Follower, words: Sequence[Word], line: int) -> str:
    """Replace literal texts, as in `sed "s/NAME/$VALUE/"`. Any other use gives an unknown text."""
    arguments = [word for word in words[1:] if known(word) not in ("-e", "-E", "-r")]
    files = arguments[1:]
    text = follower.read_file(written(files[0])) if files else follower.scope.input
    rule = known(arguments[0]) if arguments else None
    match = SED.fullmatch(rule or "")
    is_literal = match is not None and match[2] != "" and re.search(r"[.*\[\]^$+?(){}]", match[2]) is None
    if text is None or match is None or len(files) > 1 or not is_literal:
        follower.scope.write(((Unknown(written(with_blanks(words, line)), line),),))
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
        follower.scope.write((joined(pieces),))
    follower.scope.status = True
    return "next"


def _pwd(follower: _Follower, words: Sequence[Word], line: int) -> str:
    follower.scope.write(((Unknown("$(pwd)", line, path=follower.scope.folder or ""),),))
    follower.scope.status = True
    return "next"


def _path_of_folder(follower: _Follower, words: Sequence[Word], line: int) -> str:
    """Write the result of dirname, basename, realpath or `readlink -f`."""
    program = written(words[0])
    arguments = [word for word in words[1:] if not written(word).startswith("-")]
    text = known(arguments[0]) if arguments else None
    path = follower.path_of(arguments[0]) if arguments else None
    result: Word = (Unknown(written(with_blanks(words, line)), line),)
    if program in ("dirname", "basename") and text is not None:
        changed = posixpath.dirname(text) or "." if program == "dirname" else posixpath.basename(text)
        result = (Text(changed, line),)
    elif program != "basename" and path is not None:
        inside = posixpath.dirname(path) if program == "dirname" else path
        result = (Unknown(written(with_blanks(words, line)), line, path=inside or "."),)
    elif arguments and unknowns(arguments[:1]):
        first = unknowns(arguments[:1])[0]
        result = (Unknown(written(with_blanks(words, line)), line, first.name, first.condition),)
    follower.scope.write((result,))
    follower.scope.status = True
    return "next"


def _cd(follower: _Follower, words: Sequence[Word], line: int) -> str:
    word = words[1] if len(words) > 1 else ()
    path = follower.path_of(word)
    begins_in_folder = bool(unknowns([word]))
    before = follower.scope.folder
    if path is None or posixpath.isabs(path) or not (begins_in_folder or before):
        follower.scope.folder = None
    else:
        follower.scope.folder = posixpath.normpath(path if begins_in_folder else posixpath.join(before or "", path))
    follower.scope.status = True
    return "next"


def _eval(follower: _Follower, words: Sequence[Word], line: int) -> str:
    return follower.follow_text(with_blanks(words[1:], line), follower.scope).value


def _source(follower: _Follower, words: Sequence[Word], line: int) -> str:
    return follower.source_file(words[1], line).value if len(words) > 1 else "next"


def _shift(follower: _Follower, words: Sequence[Word], line: int) -> str:
    count = known(words[1]) if len(words) > 1 else "1"
    arguments = follower.scope.arguments
    is_number = count is not None and count.isdigit()
    follower.scope.arguments = arguments[int(count or 0) :] if arguments is not None and is_number else None
    follower.scope.status = True
    return "next"


def _set(follower: _Follower, words: Sequence[Word], line: int) -> str:
    """Set the arguments, for `set -- …`. Options of the shell change nothing here."""
    if len(words) > 1 and known(words[1]) == "--":
        follower.scope.arguments = tuple(words[2:])
    follower.scope.status = True
    return "next"


def _read(follower: _Follower, words: Sequence[Word], line: int) -> str:
    """Make the variables of `read`, `mapfile` or `getopts` unknown."""
    for word in words[1:]:
        name = known(word) or ""
        if name.isidentifier():
            follower.set(name, (Unknown(f"${name}", line, name),), line)
    follower.scope.status = None
    return "next"


def _test(follower: _Follower, words: Sequence[Word], line: int) -> str:
    inner = words[1:-1] if known(words[0]) == "[" else words[1:]
    follower.scope.status = conditions.of_words(inner, follower.expander())
    return "next"


def _let(follower: _Follower, words: Sequence[Word], line: int) -> str:
    value: int | None = None
    for word in words[1:]:
        text = known(word)
        value = None if text is None else follower.expander().arithmetic_of(text)
    follower.scope.status = None if value is None else value != 0
    return "next"


def _seq(follower: _Follower, words: Sequence[Word], line: int) -> str:
    texts = [known(word) or "" for word in words[1:]]
    result: Word = (Unknown(written(with_blanks(words, line)), line),)
    if 1 <= len(texts) <= 2 and all(re.fullmatch(r"\d{1,5}", text) for text in texts):
        first = int(texts[0]) if len(texts) == 2 else 1
        numbers = [str(number) for number in range(first, int(texts[-1]) + 1)]
        result = (Text("\n".join(numbers), line),)
    follower.scope.write((result,))
    follower.scope.status = True
    return "next"


BUILTINS: dict[str, Builtin] = {
    **dict.fromkeys(SILENT, _status(True)),
    "exit": _end("exit"),
    "return": _end("return"),
    "break": _end("break"),
    "continue": _end("continue"),
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
