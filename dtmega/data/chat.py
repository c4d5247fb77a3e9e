"""Conversations as their model was told to read them: by the chat template beside a tokenizer.json.

    chat = Chat.beside(tokenizer)                       # None where there is no template
    ids = chat.ids([{"role": "user", "content": "Hi"}])     # up to where the assistant begins to speak

The template is Jinja, run by transformers in its sandbox. Unlike a document of the training text, a conversation has
special ids: they are what the template writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dtmega import extras
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

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        with extras.needed("hf", f"the chat template in {folder}"):
            from transformers import PreTrainedTokenizerFast
        self._theirs: Any = PreTrainedTokenizerFast.from_pretrained(folder)
        self.end_ids = frozenset([tokenizer.eod_id, *_end_ids(folder)])

    @staticmethod
    def beside(tokenizer: Tokenizer) -> Chat | None:
        """The template beside the file of a tokenizer, if there is one.

        Raises:
            ValueError: as the class.
        """
        if not tokenizer.name.endswith(".json"):
            return None
        folder = Path(tokenizer.name).parent
        return Chat(folder, tokenizer) if _has_template(folder) else None

    def ids(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a conversation whose next words are the assistant's.

        Raises:
            ValueError: the template refuses it.
        """
        from jinja2 import TemplateError

        try:
            rendered = self._theirs.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=True)
        except TemplateError as error:
            raise ValueError(f"the chat template refuses this conversation: {error}") from None
        return list(rendered["input_ids"])


def _has_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    file = folder / "tokenizer_config.json"
    return file.is_file() and bool(read_object(file).get("chat_template"))


def _end_ids(folder: Path) -> list[int]:
    file = folder / "generation_config.json"
    found = read_object(file).get("eos_token_id") if file.is_file() else None
    found = found if isinstance(found, list) else [found]
    return [i for i in found if isinstance(i, int)]
