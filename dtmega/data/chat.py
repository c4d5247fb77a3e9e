"""Conversations as their model was told to read them: by the chat template beside a tokenizer.json.

    chat = Chat.beside(tokenizer)                       # None where there is no template
    ids = chat.ids([{"role": "user", "content": "Hi"}])     # up to where the assistant begins to speak

The template is Jinja, run by transformers in its sandbox, which keeps it from files but not from running for ever: so
it runs in a child process with limits. Unlike a document of the training text, a conversation has special ids: they are
what the template writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dtmega import extras
from dtmega.data.confined import Confined
from dtmega.data.tokenizer import Tokenizer
from dtmega.strangers import read_object

Message = dict[str, str]  # role, content


class Chat:
    """The template of one tokenizer.

    Attributes:
        end_ids: what ends the assistant's turn: the end of a document, and what generation_config.json names.

    Raises:
        ValueError: transformers is not installed.
    """

    def __init__(self, template: Path, tokenizer: Tokenizer) -> None:
        extras.check("transformers", "hf", f"the chat template {template}")
        self._child = Confined("dtmega.data.chat:read_conversations", str(template.parent), where=str(template))
        self._vocab_size = tokenizer.vocab_size
        self.end_ids = frozenset([tokenizer.eod_id, *_end_ids(template.parent)])

    @staticmethod
    def beside(tokenizer: Tokenizer) -> Chat | None:
        """The template beside the file of a tokenizer, if there is one.

        Raises:
            ValueError: as the class.
        """
        if not tokenizer.name.endswith(".json"):
            return None
        template = _template(Path(tokenizer.name).parent)
        return None if template is None else Chat(template, tokenizer)

    def start(self) -> None:
        """Have the process that runs the template, which keeps for all conversations.

        Raises:
            ValueError: the files beside the template cannot be read.
        """
        self._child.start()

    def ids(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a conversation whose next words are the assistant's.

        Raises:
            ValueError: the template refuses it, fails, or does not keep to the limits of `confined`.
        """
        found = self._child.ask(list(messages))
        if wrong := [i for i in found if i >= self._vocab_size]:
            raise ValueError(f"the chat template makes id {wrong[0]}, of a vocabulary of {self._vocab_size}")
        return found

    def close(self) -> None:
        """End the process that runs the template."""
        self._child.close()


def read_conversations(folder: str) -> Callable[[list[Message]], list[int]]:
    """Read a tokenizer and its template; the function makes ids of a conversation. Runs in a confined process."""
    from jinja2 import TemplateError
    from transformers import PreTrainedTokenizerFast

    theirs: Any = PreTrainedTokenizerFast.from_pretrained(folder)

    def ids(messages: list[Message]) -> list[int]:
        try:
            rendered = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        except TemplateError as error:
            raise ValueError(f"the chat template refuses this conversation: {error}") from None
        return list(rendered["input_ids"])

    return ids


def _template(folder: Path) -> Path | None:
    """The file with the chat template of a folder."""
    own = folder / "chat_template.jinja"
    if own.is_file():
        return own
    file = folder / "tokenizer_config.json"
    return file if file.is_file() and read_object(file).get("chat_template") else None


def _end_ids(folder: Path) -> list[int]:
    file = folder / "generation_config.json"
    found = read_object(file).get("eos_token_id") if file.is_file() else None
    found = found if isinstance(found, list) else [found]
    return [i for i in found if isinstance(i, int)]
