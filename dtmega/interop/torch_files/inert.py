"""Decodes pickles, opcode by opcode, into inert records. Nothing is imported and nothing is called.

`pickle.load` runs any code that a pickle names. A `find_class` that allows only a few names still runs the allowed
functions, and would have to allow `getattr` (see dcp.py). Here an object becomes a `PickledObject`, which only holds
the name, the arguments and the state from the pickle.

All names and opcodes that a file format does not need are refused. Decoding would be safe without this refusal; its
only purpose is to report that a file is malicious and not just damaged. A small file cannot crash the process either.
By contrast, Python's C unpickler allocates 4 GB for a file of 9 bytes and overflows the stack for a file of 200 kB (in
Python 3.11).
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Collection, Iterator
from io import BytesIO
from typing import Any

MAX_DIMS = 64  # torch's own limit for most operations
ORDERED = "collections OrderedDict"
BY_CODE = {opcode.code: opcode for opcode in pickletools.opcodes}


class PickledObject:
    """An object that a pickle asks for: `name(*args)` and its `state`.

    Attributes:
        name: "module qualname" of the class or function.
        args: arguments of the call; None if the pickle only mentions the name.
        state: value that the pickle sets as the object's state; None if the pickle sets no state.
        items: entries of an OrderedDict; None for every other object.
    """

    __slots__ = ("args", "items", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...] | None = None) -> None:
        self.name = name
        self.args = args
        self.state: Any = None
        self.items: dict[Any, Any] | None = {} if name == ORDERED and args == () else None


def decode(pickle: bytes | BytesIO, names: Collection[str]) -> Any:
    """Decode a pickle into numbers, strings, None, tuples, lists, dicts, and a `PickledObject` for everything else.

    Args:
        pickle: bytes of the pickle, or a stream of several pickles. Decoding begins at the stream's position and leaves
            the stream at the end of the decoded pickle.
        names: names that the pickle may ask for, each as "module qualname". The name "persistent id" allows references
            to objects outside of the pickle.

    Raises:
        ValueError: the pickle is damaged, asks for a name outside of `names`, or uses an opcode that is not allowed.
    """
    try:
        decoder = _Decoder(names)
        for opcode, arg in _opcodes(pickle):
            ACTIONS[opcode](decoder, arg)
        return decoder.result()
    except (IndexError, KeyError, TypeError) as error:
        raise ValueError(f"damaged pickle ({type(error).__name__}: {error!s:.100})") from None


class _Decoder:
    """The stack machine that runs the opcodes of a pickle, with one method for each kind of opcode.

    Attributes:
        names: names that the pickle may ask for.
        stack: values that are not yet part of another value; at the end, only the result is left.
        marks: stack heights at which the contents of open tuples, lists and dicts begin.
        memo: values that later opcodes may reuse, keyed by number.
    """

    def __init__(self, names: Collection[str]) -> None:
        self.names = names
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def result(self) -> Any:
        """The value of the whole pickle, once all opcodes have run."""
        stack, marks = self.stack, self.marks
        if len(stack) != 1 or marks:
            raise ValueError(f"damaged pickle: {len(stack)} values and {len(marks)} marks are left, expected 1 and 0")
        return stack[0]

    def pop(self, n: int) -> list[Any]:
        """Remove the top n values from the stack and return them in the order in which they were pushed."""
        stack = self.stack
        if not 0 <= n <= len(stack):
            raise ValueError(f"damaged pickle: takes {n} values of {len(stack)}")
        at = len(stack) - n
        values = stack[at:]
        del stack[at:]
        return values

    def pop_to_mark(self) -> list[Any]:
        return self.pop(len(self.stack) - self.marks.pop())

    def skip(self, arg: Any) -> None:
        """Do nothing: the opcodes for protocol, frame length and end of the pickle change no value."""

    def mark(self, arg: Any) -> None:
        self.marks.append(len(self.stack))

    def push(self, arg: Any) -> None:
        self.stack.append(arg)

    def memoize(self, arg: Any) -> None:
        """Store the top value of the stack in the memo, under the next free number."""
        self.memo[len(self.memo)] = self.stack[-1]

    def put(self, number: int) -> None:
        """Store the top value of the stack in the memo, under a number that the pickle chooses."""
        self.memo[number] = self.stack[-1]

    def get(self, number: int) -> None:
        self.stack.append(self.memo[number])

    def make_tuple(self, values: list[Any]) -> None:
        self.stack.append(tuple(values))

    def append(self, values: list[Any]) -> None:
        """Append values to the list on top of the stack."""
        of_type(self.stack[-1], list, "the target of APPENDS").extend(values)

    def set_items(self, pairs: list[Any]) -> None:
        """Add alternating keys and values to the dict or OrderedDict on top of the stack."""
        target = of_type(items_of(self.stack[-1]), dict, "the target of SETITEMS")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            # Refuse tuples, because hashing a tuple that is nested a million levels deep overflows the C stack.
            if type(key) not in (str, int, PickledObject):
                raise ValueError("expected keys that are strings, numbers or objects")
            target[key] = value

    def push_name(self, name: str) -> None:
        """Push a class or function by its name, "module qualname"."""
        if name not in self.names:
            raise ValueError(f"refused: the pickle asks for {name!a:.200}, which such a file does not need")
        self.stack.append(PickledObject(name))

    def push_external(self, arg: Any) -> None:
        """Push a reference to an object outside of the pickle, by its persistent id."""
        if "persistent id" not in self.names:
            raise ValueError("refused: pickle opcode BINPERSID, which such a file does not need")
        self.stack.append(PickledObject("persistent id", of_type(self.stack.pop(), tuple, "a persistent id")))

    def call(self, arg: Any) -> None:
        """Record a call: the stack's top value holds the arguments, and the value below it is the function."""
        function, args = self.pop(2)
        if type(function) is not PickledObject or function.args is not None or type(args) is not tuple:
            raise ValueError("refused: the pickle calls something that is not a plain name")
        self.stack.append(PickledObject(function.name, args))

    def set_state(self, arg: Any) -> None:
        """Record the top value of the stack as the state of the object below it."""
        instance, state = self.pop(2)
        if type(instance) is not PickledObject or instance.args is None or instance.state is not None:
            raise ValueError("refused: the pickle sets the state of something that is not a new object")
        instance.state = state
        self.stack.append(instance)


# Opcode -> function that takes a decoder and the opcode's argument. No other opcodes are allowed.
ACTIONS: dict[str, Callable[[_Decoder, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), _Decoder.skip),
    "MARK": _Decoder.mark,
    "MEMOIZE": _Decoder.memoize,
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _Decoder.put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Decoder.get),
    "NONE": lambda decoder, _: decoder.push(None),
    "NEWTRUE": lambda decoder, _: decoder.push(True),
    "NEWFALSE": lambda decoder, _: decoder.push(False),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"), _Decoder.push),
    **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE"), _Decoder.push),
    "EMPTY_TUPLE": lambda decoder, _: decoder.push(()),
    "TUPLE1": lambda decoder, _: decoder.make_tuple(decoder.pop(1)),
    "TUPLE2": lambda decoder, _: decoder.make_tuple(decoder.pop(2)),
    "TUPLE3": lambda decoder, _: decoder.make_tuple(decoder.pop(3)),
    "TUPLE": lambda decoder, _: decoder.make_tuple(decoder.pop_to_mark()),
    "EMPTY_LIST": lambda decoder, _: decoder.push([]),
    "APPEND": lambda decoder, _: decoder.append(decoder.pop(1)),
    "APPENDS": lambda decoder, _: decoder.append(decoder.pop_to_mark()),
    "EMPTY_DICT": lambda decoder, _: decoder.push({}),
    "SETITEM": lambda decoder, _: decoder.set_items(decoder.pop(2)),
    "SETITEMS": lambda decoder, _: decoder.set_items(decoder.pop_to_mark()),
    "GLOBAL": _Decoder.push_name,
    "STACK_GLOBAL": lambda decoder, _: decoder.push_name(" ".join(decoder.pop(2))),
    "BINPERSID": _Decoder.push_external,
    **dict.fromkeys(("NEWOBJ", "REDUCE"), _Decoder.call),
    "BUILD": _Decoder.set_state,
}


def _opcodes(pickle: bytes | BytesIO) -> Iterator[tuple[str, Any]]:
    """Yield each opcode's name and argument, which are read as in `pickletools.genops`.

    An opcode that is not allowed is refused before its argument is read.
    """
    stream = BytesIO(pickle) if isinstance(pickle, bytes) else pickle
    name = ""
    while name != "STOP":
        at = stream.tell()
        code = stream.read(1)
        opcode = BY_CODE.get(code.decode("latin-1"))
        if opcode is None:
            raise ValueError(f"damaged pickle: exhausted before its end, or no opcode at byte {at}: {code!r}")
        name = opcode.name
        if name not in ACTIONS:
            raise ValueError(f"refused: pickle opcode {name}, which such a file does not need")
        if name == "GLOBAL":
            yield name, f"{_name(stream)} {_name(stream)}"
        else:
            yield name, opcode.arg.reader(stream) if opcode.arg else None


def _name(stream: BytesIO) -> str:
    """One line of GLOBAL's argument, taken literally.

    pickletools would interpret escapes in the line and warn about invalid escapes.
    """
    line = stream.readline()
    if not line.endswith(b"\n"):
        raise ValueError("damaged pickle: GLOBAL without a name")
    return line[:-1].decode("latin-1")


def items_of(value: Any) -> Any:
    """The entries of an OrderedDict; any other value is returned unchanged."""
    return value if type(value) is not PickledObject or value.items is None else value.items


def of_type(value: Any, kind: type, what: str) -> Any:
    """Return `value` if its type is exactly `kind`.

    Args:
        what: noun phrase that names the value in the error message.

    Raises:
        ValueError: the value has a different type.
    """
    if type(value) is not kind:
        raise ValueError(f"expected {what} to be {kind.__name__}, got {kind_name(value)}")
    return value


def kind_name(value: Any) -> str:
    """The type name of a decoded value, for messages; for a `PickledObject`, the name from the pickle."""
    return f"'{value.name}'" if type(value) is PickledObject else type(value).__name__


def fields(value: Any, name: str) -> dict[str, Any]:
    """The state of an object of class `name` ("module qualname"), as a dict of fields.

    Raises:
        ValueError: the value is not an object of this class, or the object's state is not a dict.
    """
    if type(value) is not PickledObject or value.name != name:
        raise ValueError(f"expected an object of '{name}', got {kind_name(value)}")
    return of_type(value.state, dict, f"the state of '{name}'")


def natural(value: Any, what: str) -> int:
    """Return `value` if it is an int between 0 and 2^63 - 1.

    Raises:
        ValueError: the value is not an int or is out of range.
    """
    if not 0 <= of_type(value, int, what) < 1 << 63:
        raise ValueError(f"expected {what} to be 0 to 2^63 - 1, got {'less' if value < 0 else 'more'}")
    return value


def naturals(value: Any, what: str) -> tuple[int, ...]:
    """The numbers in a torch.Size or a tuple: at most MAX_DIMS numbers, each from 0 to 2^63 - 1.

    Raises:
        ValueError: the value has any other type, too many numbers, or a number out of range.
    """
    args = value.args if type(value) is PickledObject and value.name == "torch Size" else None
    numbers = of_type(args[0] if args else value, tuple, what)
    if len(numbers) > MAX_DIMS:
        raise ValueError(f"expected {what} to be at most {MAX_DIMS} numbers, got {len(numbers)}")
    return tuple(natural(n, what) for n in numbers)
