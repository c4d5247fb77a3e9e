"""A conversation as a chat template reads it: arguments of tool calls as objects, and the parts that are left out.

Records in OpenAI's format store the arguments of a tool call as JSON text. Most templates write `arguments | tojson`,
which would turn this text into an escaped string, so the text is decoded first. This code runs in a confined process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Message = dict[str, Any]

# A template that asks whether the arguments are text writes text as it is; one that asks for a mapping reads objects.
ASKS_FOR_TEXT = re.compile(r"arguments\W*\s+is\s+(not\s+)?string\b")
ASKS_FOR_OBJECT = re.compile(r"arguments\W*\s+is\s+(not\s+)?mapping\b")
DECODED, KEPT = "arguments of tool calls decoded", "arguments of tool calls kept as text"
# A text of this many characters that occurs in a rendered conversation does not occur there by chance.
CERTAIN_CHARS = 9


def decoded(messages: Sequence[Message]) -> list[Message] | None:
    """The messages with the arguments of all tool calls as objects; None if no arguments are text.

    Raises:
        ValueError: arguments are text, but not a JSON object.
    """
    n_decoded = 0

    def with_objects(call: Any) -> Any:
        nonlocal n_decoded
        if not isinstance(call, dict):
            return call
        if isinstance(call.get("function"), dict):
            return {**call, "function": with_objects(call["function"])}
        text = call.get("arguments")
        if not isinstance(text, str):
            return call
        try:
            arguments = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{error}, in {text[:60]!r}") from None
        if not isinstance(arguments, dict):
            raise ValueError(f"expected an object, got {text[:60]!r}")
        n_decoded += 1
        return {**call, "arguments": arguments}

    found: list[Message] = []
    for message in messages:
        new = dict(message)
        if isinstance(new.get("tool_calls"), list):
            new["tool_calls"] = [with_objects(call) for call in new["tool_calls"]]
        if "function_call" in new:  # OpenAI's format before tools
            new["function_call"] = with_objects(new["function_call"])
        found.append(new)
    return found if n_decoded else None


def reads_text(template: str) -> bool:
    """True if a template has a way to write arguments that are text."""
    return bool(ASKS_FOR_TEXT.search(template)) and not ASKS_FOR_OBJECT.search(template)


def writes_python(messages: Sequence[Message], text: str) -> bool:
    """True if a rendered text has arguments in Python's notation: the template has written an object as it is."""
    for value in _values_of("arguments", [message.get("tool_calls") for message in messages]):
        if isinstance(value, dict) and str(value) in text and str(value) != json.dumps(value, ensure_ascii=False):
            return True
    return False


def left_out(
    messages: Sequence[Message], tools: Any, text: str, render: Callable[[Sequence[Message], Any], str | None]
) -> Iterator[str]:
    """Yield a name for each kind of message or field that changes nothing in the rendered text.

    Args:
        messages, tools: the conversation.
        text: rendered text of the conversation.
        render: function that renders other messages and tools; None if the template fails.
    """
    if tools is not None and render(messages, None) == text:
        yield "the tools"
    found: set[str] = set()
    for i, message in enumerate(messages):
        for key, value in message.items():
            name = f"messages of role {message['role']}" if key == "content" else f"the field {key!r:.60}"
            if key == "role" or name in found or value in ("", [], {}) or _is_shown(value, text):
                continue
            changed = {**message, key: f"{value}."} if isinstance(value, str) else {**message}
            if not isinstance(value, str):
                del changed[key]
            if render([*messages[:i], changed, *messages[i + 1 :]], tools) == text:
                found.add(name)
    yield from sorted(found)


def strings(value: Any) -> Iterator[str]:
    """Yield all strings in a JSON value, including the keys of objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from strings(inner)


def _is_shown(value: Any, text: str) -> bool:
    """True if a long string of a value certainly comes from this value, or if there is nothing that could be shown."""
    if isinstance(value, str) and not value.strip():
        return True
    return any(len(part) >= CERTAIN_CHARS and part in text for part in map(str.strip, strings(value)))


def _values_of(key: str, value: Any) -> Iterator[Any]:
    """Yield the values of a key in all objects of a JSON value."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == key:
                yield inner
            else:
                yield from _values_of(key, inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _values_of(key, inner)
