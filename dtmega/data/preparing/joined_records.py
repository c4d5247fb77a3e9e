"""Sort the parts of a text by their metadata, and build the metadata of the merged data set.

A data set's metadata is a `Record`, stored in its PREFIX.meta.json.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dtmega.data.indexed_files.dataset import IndexedDataset
from dtmega.data.indexed_files.record import ChatRecord, PartRecord, Record
from dtmega.files.console import counted


class Part(NamedTuple):
    """A data set to merge, and the `Record` in its .meta.json; None without a .meta.json of this `.bin`."""

    dataset: IndexedDataset
    record: Record | None

    @property
    def place(self) -> PartRecord | None:
        """The text and the part's number, as recorded by `tokenize --part`; None if the data set is not a part."""
        return self.record and self.record.part

    @property
    def n_documents(self) -> int:
        """Number of documents."""
        return len(self.dataset.document_index) - 1


def in_order(parts: Sequence[Part]) -> Sequence[Part]:
    """Sort the parts of one text by number. Data sets that are not parts keep the given order.

    Raises:
        ValueError: only some of the data sets are parts, the parts belong to different texts, or a part of the text
            is missing or given twice.
    """
    first, place = parts[0], parts[0].place
    for part in parts:
        if (part.place is None) != (place is None):
            names = (part, first) if place is None else (first, part)
            raise ValueError(
                f"{names[0].dataset.prefix} is a part of a text (--part), and {names[1].dataset.prefix} is not, as "
                f"their .meta.json say: expected only parts of one text, or none"
            )
        if place is not None and _text_of(part) != _text_of(first):
            raise ValueError(
                f"{part.dataset.prefix} is a part of another text than {first.dataset.prefix}, as their .meta.json "
                f"say: {_differences(_text_of(part), _text_of(first))}"
            )
    if place is None:
        return parts
    by_number = {part.place.number: part for part in parts if part.place}
    missing = next((i for i in range(place.of) if i not in by_number), None)
    if missing is not None or len(parts) != place.of:
        got = "" if missing is None else f" without part {missing} (dtmega tokenize --part {missing}/{place.of})"
        raise ValueError(
            f"expected each part from 0 to {place.of - 1} once, as {first.dataset.prefix}.meta.json says, got "
            f"{counted(len(parts), 'part')}{got}"
        )
    return [by_number[i] for i in range(place.of)]


def _text_of(part: Part) -> dict[str, Any]:
    """The fields of `part.place` that are the same in all parts of a text: all except the part's number."""
    assert part.place
    return part.place.model_dump(exclude={"number"})


def _differences(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> str:
    """The entries in which two records differ, in words."""
    if one is None or other is None:
        return f"the {'first' if one is None else 'second'} has none"
    lines = []
    for key in dict.fromkeys([*one, *other]):
        a, b = one.get(key), other.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            lines.append(_differences(a, b))
        elif a != b:
            names = ["none" if value is None else f"{value!r:.80}" for value in (a, b)]
            lines.append(f"{key} is {names[0]}, not {names[1]}")
    return "; ".join(line for line in lines if line)


def joined_record(parts: Sequence[Part]) -> Record | None:
    """Merge the parts' records: keep the shared settings and add up the counts. Returns None if no part has a record.

    Raises:
        ValueError: the parts' records differ, or only some parts have a record.
    """
    # If the text has conversations, an empty part's record names no template, so prefer the record of a part with
    # documents.
    first = next((part for part in parts if part.n_documents), parts[0])
    for part in parts:
        expected, got = _how_made(first, part), _how_made(part, part)
        if got != expected:
            raise ValueError(
                f"{part.dataset.prefix} was tokenised in another way than {first.dataset.prefix}, as their .meta.json "
                f"say: {_differences(got, expected)}"
            )
    records = [part.record for part in parts if part.record]
    if first.record is None:
        return None
    # A record from an earlier version has no range of ids. The range of the joined ids is then unknown too.
    with_tokens = [made for made in records if made.tokens]
    lows = [made.min_id for made in with_tokens if made.min_id is not None]
    highs = [made.max_id for made in with_tokens if made.max_id is not None]
    is_known = 0 < len(with_tokens) == len(lows) == len(highs)
    return first.record.model_copy(
        update={
            "tokenizer": records[0].tokenizer,
            "documents": sum(made.documents for made in records),
            "tokens": sum(made.tokens for made in records),
            "min_id": min(lows) if is_known else None,
            "max_id": max(highs) if is_known else None,
            "part": None,
            "chat": first.record.chat and _joined_chat(first.record.chat, records),
        }
    )


def _joined_chat(first: ChatRecord, records: Sequence[Record]) -> ChatRecord:
    """The entry `chat` of the joined record.

    Args:
        first: entry `chat` in the record of the first part that has conversations.
        records: records of all parts.
    """
    chats = [made.chat for made in records if made.chat]
    refused: Counter[str] = Counter()
    notes: Counter[str] = Counter()
    for chat in chats:
        refused.update(chat.refused)
        notes.update(chat.notes)
    end_ids = sorted({i for chat in chats for i in chat.end_ids})
    learned = sum(chat.learned for chat in chats)
    sums = {"end_ids": end_ids, "learned": learned, "refused": dict(sorted(refused.items()))}
    return first.model_copy(update=sums | {"notes": dict(sorted(notes.items()))})


def _how_made(part: Part, beside: Part) -> dict[str, Any] | None:
    """The entries of a part's record that must be equal in all records: all except counts and the tokenizer's name.

    Args:
        part: part whose entries to return.
        beside: part that will be compared with `part`. If `beside` has no conversations, its template is unknown, so
            the template is left out.
    """
    of_chat = {"end_ids", "learned", "refused", "notes", *(() if beside.n_documents else ("template",))}
    counts = {"documents": True, "tokens": True, "min_id": True, "max_id": True, "part": True, "chat": of_chat}
    return part.record and part.record.model_dump(exclude={"tokenizer": True, **counts}, exclude_none=True)
