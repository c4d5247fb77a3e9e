"""Conversations for `dtmega generate --chat`: the model answers messages and, with --interactive, each line of stdin.

The first process reads stdin, runs the chat template and prints the answers. All processes together compute each
answer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from io import TextIOWrapper, UnsupportedOperation
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from dtmega.data.tokenizers.chat import Chat, Message
    from dtmega.inference.trained import TrainedModel

T = TypeVar("T")


class Conversation:
    """A conversation with a model. Before each answer, the model reads all messages and answers so far.

    Args:
        trained: the model.
        chat: chat template of the model's tokenizer.
        options: keyword arguments of `Sampling`, and `tokens`, the maximum number of tokens in an answer.
    """

    def __init__(self, trained: TrainedModel, chat: Chat, options: Mapping[str, Any]) -> None:
        from dtmega.models.generate import Sampling

        options = dict(options)
        self._trained, self._chat = trained, chat
        self._n_tokens = options.pop("tokens", 512)
        self._sampling = Sampling(trained.tokenizer.vocab_size, chat.end_ids, **options)
        self._messages: list[Message] = []

    def __call__(self, text: str) -> str:
        """Return the model's answer to a message."""
        from dtmega.models.generate import generate

        messages = [*self._messages, {"role": "user", "content": text}]
        answer_ids = generate(self._trained.model, self._ids(messages), self._n_tokens, self._sampling)
        answer = self._trained.tokenizer.decode(answer_ids)
        self._messages = [*messages, {"role": "assistant", "content": answer}]
        return answer

    def first_answers(self, texts: Sequence[str]) -> list[str]:
        """Return the model's answer to each text. Each text begins a separate conversation."""
        from dtmega.models.generate import generate_together

        prompts = [self._ids([{"role": "user", "content": text}]) for text in texts]
        answers = generate_together(self._trained.model, prompts, self._n_tokens, self._sampling)
        return [self._trained.tokenizer.decode(answer) for answer in answers]

    def _ids(self, messages: Sequence[Message]) -> list[int]:
        """The token ids of a conversation, up to the point where the next answer begins."""
        # Only the first process runs the template. If every process ran the template, one process might exceed the time
        # limit while the first process did not.
        return _from_first(lambda: self._chat.ids(messages))


def talk(answer: Callable[[str], str]) -> None:
    """Print the answer to each line of stdin, or the reason why there is no answer."""
    if isinstance(sys.stdin, TextIOWrapper):
        # Bytes that are not UTF-8 become lone surrogates, which `_utf8` refuses line by line. If `--prompt -` has
        # already read stdin, the error handling cannot be changed, but then nothing is left to read.
        with suppress(UnsupportedOperation):
            sys.stdin.reconfigure(errors="surrogateescape")
    while line := _from_first(_read_line):
        text = line.rstrip("\n")
        if not text:
            continue
        # All processes answer the same line, so either all processes raise an error or none do.
        try:
            print_on_first(answer(_utf8(text)))
        except ValueError as error:
            print_on_first(f"({error})")


def _read_line() -> str:
    """Read a line of stdin, including the line end; "" at the end of the input."""
    if sys.stdin.isatty():
        print("> ", end="", flush=True)
    return sys.stdin.readline()


def _utf8(text: str) -> str:
    """Return the text unchanged if its bytes were valid UTF-8.

    Raises:
        ValueError: the bytes were not valid UTF-8; the message names the first bad byte.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        byte = ord(text[error.start]) & 0xFF
        raise ValueError(f"the line is not UTF-8: byte 0x{byte:02x} after {error.start} characters") from None
    return text


def _from_first(read: Callable[[], T]) -> T:
    """Call a function on the first process and return its result on all processes.

    Raises:
        ValueError: the function raised ValueError on the first process. Every process then raises this error.
    """
    from dtmega import mesh

    if mesh.world_size() == 1:
        return read()
    import torch.distributed as dist

    outcome: list[Any] = [None, None]
    if mesh.rank() == 0:
        try:
            outcome[0] = read()
        except ValueError as error:
            outcome[1] = str(error)
    dist.broadcast_object_list(outcome, src=0)
    result, error_message = outcome
    if error_message is not None:
        raise ValueError(error_message)
    return result


def print_on_first(text: str) -> None:
    """Print on the first process only and flush stdout."""
    from dtmega import mesh

    if mesh.rank() == 0:
        print(text, flush=True)
