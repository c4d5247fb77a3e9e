"""Chat templates: the form in which a model reads conversations.

    template = find_template(tokenizer)                     # the tokenizer's own template, or the shipped template
    chat = Chat(tokenizer, template)
    ids = chat.ids([{"role": "user", "content": "Hi"}])     # ends where the assistant's answer begins

A template is a Jinja program that transformers runs in a sandbox. The sandbox keeps the template from reading files,
but cannot stop an endless loop, so the template runs in a child process with limits (`rendering.py`). Unlike a training
document, a conversation contains special ids, because the template writes special tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dtmega.data.tokenizers.load import is_wordpiece
from dtmega.data.tokenizers.tokenizer import Tokenizer
from dtmega.files import optional_imports
from dtmega.files.confined import Confined
from dtmega.files.untrusted_json import dangling, read_object

Message = dict[str, Any]  # role, content

# The shipped template, for tokenizers without special tokens for turns.
TURNS = "turns"
TURNS_FILE = Path(__file__).with_name("turns.jinja")


class Template(NamedTuple):
    """The files of a chat template.

    Attributes:
        own: file with the tokenizer's own template, next to the tokenizer's file; None if there is no such template.
        given: file of a template that replaces the tokenizer's own template; None to use the tokenizer's own.
    """

    own: Path | None
    given: Path | None

    @property
    def path(self) -> Path:
        """The file of the template in use."""
        path = self.given or self.own
        assert path is not None
        return path


def find_template(tokenizer: Tokenizer, given: str | None = None) -> Template:
    """Find the chat template of a tokenizer. dtmega's own tokenizers use the shipped template.

    Args:
        tokenizer: the tokenizer.
        given: path of a template, or TURNS for the shipped template; None for the tokenizer's own template.

    Raises:
        ValueError: there is no template, or the tokenizer does not preserve blanks and line ends.
    """
    if is_wordpiece(tokenizer.name):
        raise ValueError(
            f"tokenizer '{tokenizer.name}' loses line ends and blanks, which conversations need: expected a tokenizer "
            f"of a model of the next token"
        )
    is_file = tokenizer.name.endswith(".json")
    own = _beside(Path(tokenizer.name).parent) if is_file else None
    if given is None and own is None and is_file:
        raise ValueError(
            f"{tokenizer.name}: expected a chat template beside it (chat_template.jinja, or chat_template in "
            f"tokenizer_config.json), or --chat-template FILE; --chat-template {TURNS} is the one that dtmega ships"
        )
    if given is None and not is_file:
        return Template(own=None, given=TURNS_FILE)
    path = None if given is None else Path(given)
    if path is not None and not path.is_file():
        if given != TURNS:
            raise ValueError(f"--chat-template {given}: expected a file, or {TURNS}{dangling(path)}")
        path = TURNS_FILE
    return Template(own, path)


def end_of_document(tokenizer: Tokenizer) -> str:
    """The name of the end-of-document token."""
    return tokenizer.decode([tokenizer.eod_id])


class Chat:
    """A tokenizer with a chat template. A `Chat` turns conversations into the ids that a model reads.

    Args:
        tokenizer: the tokenizer.
        template: chat template for the tokenizer.
        end_ids: ids that end a turn in a run's training conversations.

    Attributes:
        end_ids: ids that end the assistant's turn: the argument `end_ids`, the end-of-document id, and the ids that a
            generation_config.json next to the tokenizer lists.

    Raises:
        ValueError: transformers is not installed.
    """

    def __init__(self, tokenizer: Tokenizer, template: Template, end_ids: Sequence[int] = ()) -> None:
        optional_imports.check("transformers", "hf", f"the chat template {template.path}")
        self._child = Confined(
            "dtmega.data.tokenizers.rendering:read_prompts",
            *(tokenizer.name, end_of_document(tokenizer), str(template.given) if template.given else None),
            where=str(template.path),
        )
        self._vocab_size = tokenizer.vocab_size
        beside = _end_ids(Path(tokenizer.name).parent) if tokenizer.name.endswith(".json") else []
        self.end_ids = frozenset([tokenizer.eod_id, *beside, *end_ids])

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


def _beside(folder: Path) -> Path | None:
    """The file with a folder's chat template, a .jinja or tokenizer_config.json; None if the folder has no template."""
    template = folder / "chat_template.jinja"
    if template.is_file():
        return template
    config = folder / "tokenizer_config.json"
    return config if config.is_file() and read_object(config).get("chat_template") else None


def _end_ids(folder: Path) -> list[int]:
    """The ids that end an answer, from a folder's generation_config.json, which holds one id or a list of ids."""
    file = folder / "generation_config.json"
    named = read_object(file).get("eos_token_id") if file.is_file() else None
    ids = named if isinstance(named, list) else [named]
    return [i for i in ids if isinstance(i, int)]
