"""The worker that turns conversation records into tokens.

The chat template runs in a child process with limits on time and memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtmega.data.indexed_files.conversations import sequence_sizes
from dtmega.data.indexed_files.dataset import token_dtype
from dtmega.data.preparing.documents import json_object, records_of
from dtmega.data.preparing.messages import messages_of, options_of, tools_of
from dtmega.data.preparing.text_files import RecordBatch
from dtmega.data.preparing.workers import Result
from dtmega.data.tokenizers.chat import Template
from dtmega.data.tokenizers.load import load_tokenizer
from dtmega.data.tokenizers.rendering import ALL
from dtmega.files.confined import Confined

# Causes of a refusal, in addition to the causes in `rendering.py`.
MALFORMED = "malformed"
NOTHING_TO_LEARN = "no token to learn"


@dataclass(frozen=True)
class Refusal:
    """A conversation that is left out.

    Attributes:
        where: location of the conversation's record, as "file:line".
        cause: MALFORMED, NOTHING_TO_LEARN, or a cause that `rendering.py` defines.
        why: details for the user.
    """

    where: str
    cause: str
    why: str


@dataclass(frozen=True)
class ChatResult(Result):
    """The conversations of one batch of records.

    Attributes:
        refused: conversations that are left out, in order.
        learned: number of tokens that count in the loss.
        template, by: digest of the template, and method that finds the learned tokens (MARKERS or PREFIXES); both are
            '' if the batch has no conversations.
        ends, end_ids: names and ids of the tokens that end the learned turns.
        notes: number of conversations for each note of `rendering.Renderer`.
        fatal: message "file:line: reason" if the template cannot be used at all; otherwise ''.
    """

    refused: list[Refusal]
    learned: int
    template: str
    by: str
    ends: frozenset[str]
    end_ids: frozenset[int]
    notes: Counter[str]
    fatal: str


@dataclass(frozen=True)
class Job:
    """The settings of a worker.

    Attributes:
        tokenizer: spec of the tokenizer.
        eod: name of the end-of-document token.
        template: files of the chat template.
        key: key that holds the list of messages; None to find the key automatically.
        roles: mapping from role names in the records to the template's role names.
        train_on: turns that count in the loss, as in `rendering.py`.
    """

    tokenizer: str
    eod: str
    template: Template
    key: str | None
    roles: Mapping[str, str]
    train_on: str

    def worker(self) -> Worker:
        """Make a worker with these settings."""
        return Worker(self)


@dataclass
class _Found:
    """The fields of a `ChatResult`, collected while a batch is processed."""

    tokens: list[NDArray[Any]] = field(default_factory=list)
    sizes: list[list[int]] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    learned: int = 0
    about: tuple[str, str] = ("", "")
    ends: set[str] = field(default_factory=set)
    end_ids: set[int] = field(default_factory=set)
    notes: Counter[str] = field(default_factory=Counter)
    fatal: str = ""


class Worker:
    """A callable that turns a batch of records into conversations."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._vocab_size = load_tokenizer(job.tokenizer).vocab_size
        self._dtype = token_dtype(self._vocab_size)
        given = job.template.given
        self._child = Confined(
            "dtmega.data.tokenizers.rendering:read_conversations",
            *(job.tokenizer, job.eod, str(given) if given else None, job.template.own is not None, job.train_on),
            where=str(job.template.path),
        )

    def __call__(self, batch: RecordBatch) -> ChatResult:
        found = _Found()
        for number, record in records_of(batch):
            assert record is not None  # only parquet has nulls
            where = f"{batch.path}:{number}"
            try:
                value = json_object(record, number, batch.kind)
                request = self._request(value)
            except ValueError as error:
                found.refused.append(Refusal(where, MALFORMED, str(error)))
                continue
            try:
                self._add(found, where, self._child.ask(request))
            except ValueError as error:
                found.fatal = f"{where}: {error}"
            if found.fatal:
                break
        template, by = found.about
        return ChatResult(
            ids=np.concatenate(found.tokens) if found.tokens else np.zeros(0, self._dtype),
            sizes=found.sizes,
            n_empty=0,
            malformed=[],
            position_bytes=batch.position_bytes,
            refused=found.refused,
            learned=found.learned,
            template=template,
            by=by,
            ends=frozenset(found.ends),
            end_ids=frozenset(found.end_ids),
            notes=found.notes,
            fatal=found.fatal,
        )

    def _request(self, record: dict[str, Any]) -> dict[str, Any]:
        """A record as a request to `rendering.Renderer`.

        Raises:
            ValueError: the record is malformed, or a message has weight 0 although all text is learned.
        """
        messages = messages_of(record, self._job.key, self._job.roles)
        silent = [i for i, message in enumerate(messages) if message.pop("weight", 1) == 0]
        if silent and self._job.train_on == ALL:
            raise ValueError(f"message {silent[0]} bears no loss ('weight' or 'train'), but --train-on {ALL}")
        return {"messages": messages, "tools": tools_of(record), "options": options_of(record), "silent": silent}

    def _add(self, found: _Found, where: str, answer: dict[str, Any]) -> None:
        """Add a result of `rendering.Renderer` to `found`.

        Raises:
            ValueError: the two templates render different texts, or an id is outside the vocabulary.
        """
        found.about = answer["template"], answer["by"]
        if "differs" in answer:
            raise ValueError(
                f"{self._job.template.given} makes another text than {self._job.template.own}: {answer['differs']} "
                f"(--chat-template takes the same template with {{% generation %}} markers)"
            )
        if "cause" in answer:
            found.refused.append(Refusal(where, answer["cause"], answer["why"]))
            return
        tokens = np.array(answer["ids"], np.int64)
        if len(tokens) and tokens.max() >= self._vocab_size:
            raise ValueError(
                f"{self._job.template.path} makes id {tokens.max()}, outside a vocabulary of {self._vocab_size}"
            )
        learns = np.zeros(len(tokens), np.bool_)
        for start, stop in answer["learned"]:
            learns[start:stop] = True
        learns[:1] = False  # there is no earlier token from which to predict the first token
        if not learns.any():
            whose = "text" if self._job.train_on == ALL else "turn of the assistant"
            found.refused.append(Refusal(where, NOTHING_TO_LEARN, f"no {whose}"))
            return
        found.tokens.append(tokens.astype(self._dtype))
        found.sizes.append(sequence_sizes(learns))
        found.learned += int(learns.sum())
        found.ends |= set(answer["ends"])
        found.end_ids |= set(answer["end_ids"])
        found.notes.update(answer["notes"])
