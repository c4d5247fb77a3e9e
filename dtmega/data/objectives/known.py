"""All objectives, by name. Only the objective that is asked for is imported."""

from __future__ import annotations

from dtmega import rooms
from dtmega.data.objectives.objective import Objective


def objective(name: str) -> Objective:
    """The objective with a name that `keys.READS` lists.

    Raises:
        KeyError: no objective has this name.
    """
    match name:
        case "next-token":
            return rooms.next_token().NEXT_TOKEN
        case "prefix-lm":
            return rooms.prefixes().PREFIX
        case "conversations":
            return rooms.conversations().CONVERSATIONS
        case "masked":
            return rooms.masked_tokens().MASKED
        case "spans":
            return rooms.hidden_spans().SPANS
        case "separate-spans":
            return rooms.hidden_spans().SEPARATE_SPANS
        case _:
            raise KeyError(name)
