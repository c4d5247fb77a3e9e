"""Pickles as data: decoded opcode by opcode into inert records. Nothing is imported, nothing is called.

`pickle.load` runs whatever a pickle names. With a `find_class` that knows a few names only, it still runs these, and
`getattr` would have to be one of them (dcp.py). Here an object is a `PickledObject`: the name, arguments and state
that the pickle gives it. Which names and opcodes a file has need of is known beforehand, and others are refused: that
tells a crafted file from a damaged one, but the safety does not rest on it. Nor can a few bytes take the process down,
as they can in C's unpickler (Python 3.11: 9 bytes take 4 GB, 200 kB overflow the stack).
"""

from __future__ import annotations

import pickletools
from collections.abc import Collection, Iterator
from io import BytesIO
from typing import Any

MAX_DIMS = 64  # torch's own limit for most operations
ORDERED = "collections OrderedDict"
OPCODES = {
    *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET", "BINPERSID"),
    *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("SHORT_BINUNICODE", "BINUNICODE", "GLOBAL", "STACK_GLOBAL", "NEWOBJ", "REDUCE", "BUILD"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "APPEND", "APPENDS"),
    *("EMPTY_DICT", "SETITEM", "SETITEMS"),
}
BY_CODE = {opcode.code: opcode for opcode in pickletools.opcodes}


class PickledObject:
    """An object that a pickle asks for: `name(*args)` and its `state`.

    With args None it is the bare name, "module qualname".

    Attributes:
        items: of an OrderedDict; None of everything else.
    """

    __slots__ = ("args", "items", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...] | None = None) -> None:
        self.name = name
        self.args = args
        self.state: Any = None
        self.items: dict[Any, Any] | None = {} if name == ORDERED and args == () else None


def decode(pickle: bytes | BytesIO, names: Collection[str]) -> Any:
    """The value of a pickle: numbers, strings, None, tuples, lists, dicts, and a `PickledObject` for everything else.

    Args:
        pickle: of several in a stream, the one at its place; the place is behind it then.
        names: "module qualname" that the pickle may ask for; "persistent id" where it may refer to what is outside it.

    Raises:
        ValueError: damaged, or it asks for a name or uses an opcode that is refused.
    """
    try:
        return _decode(pickle, names)
    except (IndexError, KeyError, TypeError) as error:
        raise ValueError(f"damaged pickle ({type(error).__name__}: {error!s:.100})") from None


def _decode(pickle: bytes | BytesIO, names: Collection[str]) -> Any:
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    arg: Any
    for opcode, arg in _opcodes(pickle):
        match opcode.name:  # the frequent ones first
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[arg])
            case "SHORT_BINUNICODE" | "BINUNICODE" | "BININT1" | "BININT2" | "BININT" | "LONG1" | "BINFLOAT":
                stack.append(arg)
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(_pop(stack, int(opcode.name[-1]))))
            case "NEWOBJ" | "REDUCE":
                made, args = _pop(stack, 2)
                if type(made) is not PickledObject or made.args is not None or type(args) is not tuple:
                    raise ValueError("refused: the pickle calls something that is not a plain name")
                stack.append(PickledObject(made.name, args))
            case "BUILD":
                made, state = _pop(stack, 2)
                if type(made) is not PickledObject or made.args is None or made.state is not None:
                    raise ValueError("refused: the pickle sets the state of something that is not a new object")
                made.state = state
                stack.append(made)
            case "EMPTY_TUPLE":
                stack.append(())
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_DICT":
                stack.append({})
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[opcode.name])
            case "MARK":
                marks.append(len(stack))
            case "TUPLE":
                stack.append(tuple(_pop(stack, len(stack) - marks.pop())))
            case "SETITEM" | "SETITEMS":
                pairs = _pop(stack, 2 if opcode.name == "SETITEM" else len(stack) - marks.pop())
                target = of_type(items_of(stack[-1]), dict, "the target of SETITEMS")
                for key, value in zip(pairs[::2], pairs[1::2], strict=True):
                    if type(key) not in (
                        str,
                        int,
                        PickledObject,
                    ):  # hashing a tuple nested a million times overflows C's stack
                        raise ValueError("expected keys that are strings, numbers or objects")
                    target[key] = value
            case "APPEND" | "APPENDS":
                values = _pop(stack, 1 if opcode.name == "APPEND" else len(stack) - marks.pop())
                of_type(stack[-1], list, "the target of APPENDS").extend(values)
            case "BINPUT" | "LONG_BINPUT":
                memo[arg] = stack[-1]
            case "GLOBAL" | "STACK_GLOBAL":
                name = arg if opcode.name == "GLOBAL" else " ".join(_pop(stack, 2))
                if name not in names:
                    raise ValueError(f"refused: the pickle asks for {name!a:.200}, which such a file has no need of")
                stack.append(PickledObject(name))
            case "BINPERSID" if "persistent id" in names:
                stack.append(PickledObject("persistent id", of_type(stack.pop(), tuple, "a persistent id")))
            case "PROTO" | "FRAME" | "STOP":
                pass
            case other:
                raise ValueError(f"refused: pickle opcode {other}, which such a file has no need of")
    if len(stack) != 1 or marks:
        raise ValueError(f"damaged pickle: {len(stack)} values and {len(marks)} marks are left, expected 1 and 0")
    return stack[0]


def _opcodes(pickle: bytes | BytesIO) -> Iterator[tuple[pickletools.OpcodeInfo, Any]]:
    """Opcodes and their arguments, as `pickletools.genops`; of those that are refused not even the argument is read."""
    stream = BytesIO(pickle) if isinstance(pickle, bytes) else pickle
    name = ""
    while name != "STOP":
        at = stream.tell()
        code = stream.read(1)
        opcode = BY_CODE.get(code.decode("latin-1"))
        if opcode is None:
            raise ValueError(f"damaged pickle: exhausted before its end, or no opcode at byte {at}: {code!r}")
        name = opcode.name
        if name not in OPCODES:
            raise ValueError(f"refused: pickle opcode {name}, which such a file has no need of")
        if name == "GLOBAL":
            yield opcode, f"{_name(stream)} {_name(stream)}"
        else:
            yield opcode, opcode.arg.reader(stream) if opcode.arg else None


def _name(stream: BytesIO) -> str:
    """A line of GLOBAL's argument, as it stands: pickletools would look for escapes in it, and warn of wrong ones."""
    line = stream.readline()
    if not line.endswith(b"\n"):
        raise ValueError("damaged pickle: GLOBAL without a name")
    return line[:-1].decode("latin-1")


def _pop(stack: list[Any], n: int) -> list[Any]:
    if not 0 <= n <= len(stack):
        raise ValueError(f"damaged pickle: takes {n} values of {len(stack)}")
    at = len(stack) - n
    values = stack[at:]
    del stack[at:]
    return values


def items_of(value: Any) -> Any:
    """The items of an OrderedDict; any other value is itself."""
    return value if type(value) is not PickledObject or value.items is None else value.items


def of_type(value: Any, kind: type, what: str) -> Any:
    """`value`, if it is of exactly that type."""
    if type(value) is not kind:
        raise ValueError(f"expected {what} to be {kind.__name__}, got {kind_name(value)}")
    return value


def kind_name(value: Any) -> str:
    return f"'{value.name}'" if type(value) is PickledObject else type(value).__name__


def fields(value: Any, name: str) -> dict[str, Any]:
    """The state of an object of the class `name`, "module qualname"."""
    if type(value) is not PickledObject or value.name != name:
        raise ValueError(f"expected an object of '{name}', got {kind_name(value)}")
    return of_type(value.state, dict, f"the state of '{name}'")


def natural(value: Any, what: str) -> int:
    """`value`, if it is an int of 0 to 2^63 - 1."""
    if not 0 <= of_type(value, int, what) < 1 << 63:
        raise ValueError(f"expected {what} to be 0 to 2^63 - 1, got {'less' if value < 0 else 'more'}")
    return value


def naturals(value: Any, what: str) -> tuple[int, ...]:
    """A torch.Size, or a tuple, of such ints."""
    args = value.args if type(value) is PickledObject and value.name == "torch Size" else None
    numbers = of_type(args[0] if args else value, tuple, what)
    if len(numbers) > MAX_DIMS:
        raise ValueError(f"expected {what} to be at most {MAX_DIMS} numbers, got {len(numbers)}")
    return tuple(natural(n, what) for n in numbers)
