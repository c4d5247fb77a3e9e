"""Read the messages of a conversation from the record formats of other projects:

    {"messages": [{"role": "user", "content": "Hi"}, ...]}             OpenAI, TRL
    {"conversations": [{"from": "human", "value": "Hi"}, ...]}         ShareGPT
    {"prompt": "Hi", "completion": "Hello"}
    {"instruction": "Translate", "input": "chat", "output": "cat"}     Alpaca; `input` may be missing or empty

If a record has the keys of several formats, the first matching format in this list is used. In all formats, the key
`system` may hold the text of an additional first message, and the keys `tools` (a list) and `chat_template_kwargs` (an
object) may hold values that the template reads, also as JSON text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

Message = dict[str, Any]

LISTS = ("messages", "conversations")
PAIRS = (("prompt", "completion"), ("instruction", "output"))
ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT = {"human": "user", "gpt": "assistant"}
# Variables of a template that `chat_template_kwargs` may not set.
OWN_VARIABLES = re.compile(
    "conversations|messages|tools|documents|chat_template|return_.*|continue_.*|add_generation_prompt|.*_tokens?"
)


def messages_of(record: Mapping[str, Any], key: str | None, roles: Mapping[str, str]) -> list[Message]:
    """The messages of a record. A message that bears no loss, whatever `--train-on` says, has `weight` 0.

    Args:
        record: the record.
        key: key that holds the list of messages; None to find the key automatically.
        roles: mapping from role names in the records to the template's role names.

    Raises:
        ValueError: the record matches none of the formats, or a message is invalid.
    """
    names = [key] if key else [name for name in LISTS if name in record]
    pairs = [pair for pair in PAIRS if all(isinstance(record.get(name), str) for name in pair)]
    if names:
        messages = _from_list(record, names[0], roles)
    elif pairs:
        messages = _from_pair(record, *pairs[0])
    else:
        forms = [*LISTS, *(" and ".join(pair) for pair in PAIRS)]
        raise ValueError(f"expected {', '.join(forms)}, or --json-key, got keys {list(record)[:8]}")
    system = record.get("system")
    if isinstance(system, str) and system.strip():
        if messages[0]["role"] == "system":
            raise ValueError("expected one system message, got the key 'system' and a message of this role")
        messages.insert(0, {"role": "system", "content": system})
    return messages


def is_conversation(record: Mapping[str, Any]) -> bool:
    """True if a record has the keys of one of the formats."""
    return any(name in record for name in LISTS) or any(set(pair) <= record.keys() for pair in PAIRS)


def tools_of(record: Mapping[str, Any]) -> list[Any] | None:
    """The tools that a record offers to the assistant; None if the record offers no tools.

    Raises:
        ValueError: the value of `tools` is not a list of objects.
    """
    tools = _from_json(record, "tools")
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"expected a list of objects in 'tools', got {type(tools).__name__}")
    return tools


def options_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The further variables that a record sets for the template, such as `enable_thinking`.

    Raises:
        ValueError: the value of `chat_template_kwargs` is not an object, or sets a variable that dtmega itself sets.
    """
    options = _from_json(record, "chat_template_kwargs") or {}
    if not isinstance(options, dict):
        raise ValueError(f"expected an object in 'chat_template_kwargs', got {type(options).__name__}")
    if name := next(filter(OWN_VARIABLES.fullmatch, options), None):
        raise ValueError(f"'chat_template_kwargs' may not set '{name}'")
    return options


def _from_json(record: Mapping[str, Any], key: str) -> Any:
    """The value of a key. A text is decoded, because some data sets store JSON as text.

    Raises:
        ValueError: the value is a text, but not JSON.
    """
    value = record.get(key)
    if not isinstance(value, str) or not value.strip():
        return value or None
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected JSON in '{key}': {error}") from None


def _from_pair(record: Mapping[str, Any], prompt: str, answer: str) -> list[Message]:
    question = record[prompt]
    more = record.get("input") if prompt == "instruction" else None
    if isinstance(more, str) and more.strip():
        question = f"{question}\n\n{more}"
    return [{"role": "user", "content": question}, {"role": "assistant", "content": record[answer]}]


def _from_list(record: Mapping[str, Any], key: str, roles: Mapping[str, str]) -> list[Message]:
    items = record.get(key)
    if not isinstance(items, list) or not items:
        got = "an empty list" if items == [] else type(items).__name__
        raise ValueError(f"expected a list of messages in '{key}' (--json-key), got {got}")
    return [_message(item, number, roles) for number, item in enumerate(items)]


def _message(item: Any, number: int, roles: Mapping[str, str]) -> Message:
    """Convert a message into the form that templates read.

    Args:
        item: JSON value of the message.
        number: index of the message in the conversation.
        roles: mapping of role names, as in `messages_of`.
    """
    if not isinstance(item, dict):
        raise ValueError(f"message {number}: expected an object, got {type(item).__name__}")
    message = {name: value for name, value in item.items() if value is not None}
    names = dict(roles)
    if "from" in message and "value" in message:
        message["role"], message["content"] = message.pop("from"), message.pop("value")
        names = SHAREGPT | names
    role, content = message.get("role"), message.get("content")
    role = names.get(role, role) if isinstance(role, str) else role
    if role not in ROLES and role not in names.values():
        raise ValueError(f"message {number}: expected a role in {', '.join(ROLES)}, got {role!r} (--roles {role}=ROLE)")
    if isinstance(content, list):
        content = message["content"] = _joined(content, number)
    if not isinstance(content, str) and not (content is None and "tool_calls" in message):
        raise ValueError(f"message {number}: expected text in 'content', got {type(content).__name__}")
    weight, trains = message.pop("weight", 1), message.pop("train", True)
    if weight not in (0, 1) or trains not in (True, False):
        raise ValueError(f"message {number}: expected a 'weight' of 0 or 1, and 'train' true or false")
    return {**message, "role": role, **({} if weight and trains else {"weight": 0})}


def _joined(parts: list[Any], number: int) -> str:
    """The text of a content in parts, which may only be texts.

    Args:
        parts: the parts, each {"type": "text", "text": ...}.
        number: index of the message in the conversation.
    """
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    if wrong := [part for part, text in zip(parts, texts, strict=True) if not isinstance(text, str)]:
        raise ValueError(f"message {number}: expected parts of text in 'content', got {str(wrong[0])[:60]}")
    return "".join(map(str, texts))
