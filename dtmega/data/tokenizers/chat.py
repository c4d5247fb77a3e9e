"""Conversations in the form that a model was trained on, rendered by the chat template next to its tokenizer.json.

    chat = Chat.beside(tokenizer)                           # None if there is no template
    ids = chat.ids([{"role": "user", "content": "Hi"}])     # ends where the assistant's answer begins

The template is a Jinja program that transformers runs in a sandbox. The sandbox keeps the template from reading files,
but cannot stop an endless loop, so the template runs in a child process with limits. Unlike a training document, a
conversation contains special ids, because the template writes special tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dtmega.data.tokenizers.tokenizer import Tokenizer
from dtmega.files import optional_imports
from dtmega.files.confined import Confined
from dtmega.files.untrusted_json import read_object

Message = dict[str, str]  # role, content


class Chat:
    """The chat template of one tokenizer.

    Args:
        template: path of the file that holds the template.
        tokenizer: tokenizer loaded from the tokenizer.json in the same folder.

    Attributes:
        end_ids: ids that end the assistant's turn: end-of-document, and the ids that generation_config.json lists.

    Raises:
        ValueError: transformers is not installed.
    """

    def __init__(self, template: Path, tokenizer: Tokenizer) -> None:
        optional_imports.check("transformers", "hf", f"the chat template {template}")
        self._child = Confined(
            "dtmega.data.tokenizers.chat:read_conversations", str(template.parent), where=str(template)
        )
        self._vocab_size = tokenizer.vocab_size
        self.end_ids = frozenset([tokenizer.eod_id, *_end_ids(template.parent)])

    @staticmethod
    def beside(tokenizer: Tokenizer) -> Chat | None:
        """The chat template next to a tokenizer file; None if that folder has no template.

        Raises:
            ValueError: transformers is not installed.
        """
        if not tokenizer.name.endswith(".json"):
            return None
        template = _template(Path(tokenizer.name).parent)
        return None if template is None else Chat(template, tokenizer)

    def start(self) -> None:
        """Start the process that runs the template and serves any number of conversations.

        Raises:
            ValueError: the files next to the template cannot be read.
        """
        self._child.start()

    def ids(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a conversation, up to the beginning of the assistant's next answer.

        Raises:
            ValueError: the template refuses the conversation, fails, or exceeds the limits of `confined.py`.
        """
        ids = self._child.ask(list(messages))
        if wrong := [i for i in ids if i >= self._vocab_size]:
            raise ValueError(f"the chat template makes id {wrong[0]}, outside a vocabulary of {self._vocab_size}")
        return ids

    def close(self) -> None:
        """End the process that runs the template."""
        self._child.close()


def read_conversations(folder: str) -> Callable[[list[Message]], list[int]]:
    """Read a folder's tokenizer and template; return a function from a conversation to its ids.

    This function runs in the confined process.
    """
    from jinja2 import TemplateError
    from transformers import PreTrainedTokenizerFast

    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folder)

    def ids(messages: list[Message]) -> list[int]:
        try:
            rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        except TemplateError as error:
            raise ValueError(f"the chat template refuses this conversation: {error}") from None
        return list(rendered["input_ids"])

    return ids


def _template(folder: Path) -> Path | None:
    """The file in a folder that holds the chat template; None if there is no template."""
    template = folder / "chat_template.jinja"
    if template.is_file():
        return template
    config = folder / "tokenizer_config.json"
    return config if config.is_file() and read_object(config).get("chat_template") else None


def _end_ids(folder: Path) -> list[int]:
    """Read the ids that end an answer from a folder's generation_config.json, which holds one number or a list."""
    file = folder / "generation_config.json"
    named = read_object(file).get("eos_token_id") if file.is_file() else None
    ids = named if isinstance(named, list) else [named]
    return [i for i in ids if isinstance(i, int)]
