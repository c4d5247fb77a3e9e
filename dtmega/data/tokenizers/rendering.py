"""Conversations as tokens, with the tokens that bear loss. All of this file runs in a confined process.

A chat template makes one text of a conversation. The text is encoded once, as a whole, because a text that is encoded
in pieces has other tokens at the borders. The learned part of the text is found in characters, and the offsets of the
tokens carry it over to the tokens. A token that crosses the border of a learned part is learned, as in transformers.

The learned part is never guessed. Either the template marks it with {% generation %}, or prefixes show it: with m[:i]
the conversation before answer i, the answer begins where the text of m[:i] with the generation prompt ends, and it ends
where the text of m[:i + 1] ends. Both texts must be prefixes of the whole text, which is checked for each conversation.

In both cases the learned part of a turn ends with the token that ends the turn. What the template writes behind this
token, such as a line end, is not learned. A conversation whose turns do not end in this way is refused.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ALL, ASSISTANT, LAST = "all", "assistant", "last"
MARKERS, PREFIXES = "markers", "prefixes"
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # the same as in transformers

# Causes of a refusal, as the user and the record read them.
TEMPLATE_FAILS = "the template refuses"
SPELLS_SPECIAL = "content spells a special token"
PREFIX_DIFFERS = "a prefix does not hold"
NO_END = "no special token ends the learned turn"
LAST_UNCLEAR = "the last turn is unclear"

Span = tuple[int, int]  # first character (or token), and the one past the last


class Refused(Exception):
    """A conversation that is left out.

    Attributes:
        cause: one of the causes above.
        why: details of this conversation.
    """

    def __init__(self, cause: str, why: str) -> None:
        super().__init__(cause)
        self.cause, self.why = cause, why


class Text(NamedTuple):
    """A conversation after the template.

    Attributes:
        text: the text.
        marked: the parts inside {% generation %}.
    """

    text: str
    marked: list[Span]


def read_tokenizer(spec: str, eod: str, template: str | None) -> Any:
    """The tokenizer of a spec in transformers' form.

    Args:
        spec: spec of the tokenizer.
        eod: name of the end-of-document token, which is `eos_token` for a template unless the files name another.
        template: path of a template that replaces the tokenizer's own; None for its own.
    """
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    from dtmega.data.tokenizers.tokenizer_json import to_json

    if Path(spec).name == "tokenizer.json":
        tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(Path(spec).parent)
    else:
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer.from_str(to_json(spec)))
    if tokenizer.eos_token is None:
        tokenizer.eos_token = eod
    if template is not None:
        tokenizer.chat_template = Path(template).read_text(encoding="utf-8")
    return tokenizer


def read_prompts(spec: str, eod: str, template: str | None) -> Callable[[list[dict[str, Any]]], list[int]]:
    """A function from a conversation to its ids, up to the beginning of the assistant's next answer.

    The arguments are those of `read_tokenizer`.
    """
    from jinja2 import TemplateError

    tokenizer = read_tokenizer(spec, eod, template)

    def ids(messages: list[dict[str, Any]]) -> list[int]:
        try:
            rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        except TemplateError as error:
            raise ValueError(f"the chat template refuses this conversation: {error}") from None
        return list(rendered["input_ids"])

    return ids


def read_conversations(
    spec: str, eod: str, template: str | None, has_own: bool, train_on: str
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A function from a conversation to an answer of `Renderer`.

    Args:
        spec: spec of the tokenizer.
        eod: name of the end-of-document token.
        template: path of a template; None for the tokenizer's own.
        has_own: whether the tokenizer has a template of its own. If `template` is given as well, both must make the
            same text.
        train_on: the turns that bear loss, ALL, ASSISTANT or LAST.
    """
    tokenizer = read_tokenizer(spec, eod, None)
    own = tokenizer.get_chat_template() if template is not None and has_own else None
    if template is not None:
        tokenizer.chat_template = Path(template).read_text(encoding="utf-8")
    return Renderer(tokenizer, own, train_on)


class Renderer:
    """A callable that turns a conversation into its tokens.

    Args:
        tokenizer: transformers' tokenizer, with the template.
        own: template that must make the same text; None if there is none.
        train_on: the turns that bear loss, ALL, ASSISTANT or LAST.
    """

    def __init__(self, tokenizer: Any, own: str | None, train_on: str) -> None:
        from tokenizers import processors

        self._tokenizer, self._own, self._train_on = tokenizer, own, train_on
        self._template: str = tokenizer.get_chat_template()
        # GPT-2's post-processor takes the blanks of a token out of its offsets. Without it, a token covers all of its
        # characters, and the ids stay the same, because special ids are not added.
        tokenizer.backend_tokenizer.post_processor = processors.Sequence([])
        added = tokenizer.added_tokens_decoder.values()
        special = {token.content for token in added if token.special} | set(tokenizer.all_special_tokens)
        self._special = tuple(sorted(special))
        self._about = {
            "template": hashlib.sha256(self._template.encode()).hexdigest()[:12],
            "by": MARKERS if GENERATION.search(self._template) else PREFIXES,
        }

    def __call__(self, conversation: dict[str, Any]) -> dict[str, Any]:
        """The tokens of a conversation.

        Args:
            conversation: `messages`, and `tools` or None.

        Returns:
            The keys template (digest) and by (MARKERS or PREFIXES); and either ids, learned (ranges of tokens), ends
            and end_ids (names and ids of the tokens that end the learned turns), or cause and why, or differs (why
            `own` makes another text).
        """
        messages, tools = conversation["messages"], conversation["tools"]
        try:
            self._check_content(messages)
            whole = self._render(messages, tools)
            if self._own is not None and (differs := self._difference(messages, tools, whole.text)):
                return self._about | {"differs": differs}
            turns = [] if self._train_on == ALL else self._turns(messages, tools, whole)
        except Refused as refused:
            return self._about | {"cause": refused.cause, "why": refused.why}
        parts = [span for turn in turns for span in turn] if self._train_on != ALL else [(0, len(whole.text))]
        encoding = self._tokenizer(whole.text, add_special_tokens=False, return_offsets_mapping=True)
        ends = {name for turn in turns for name in self._special if whole.text.endswith(name, 0, turn[-1][1])}
        return self._about | {
            "ids": encoding["input_ids"],
            "learned": list(_tokens_of(parts, encoding["offset_mapping"])),
            "ends": sorted(ends),
            "end_ids": sorted(map(self._tokenizer.convert_tokens_to_ids, ends)),
        }

    def _check_content(self, messages: Sequence[dict[str, Any]]) -> None:
        """Refuse a conversation whose content would become a special id, and so could begin or end a turn."""
        for text in _strings([{**message, "role": None} for message in messages]):
            for name in self._special:
                if name in text:
                    raise Refused(SPELLS_SPECIAL, f"'{name}'")

    def _render(
        self, messages: Sequence[dict[str, Any]], tools: Any, *, with_prompt: bool = False, template: str | None = None
    ) -> Text:
        """The text of a conversation.

        Raises:
            Refused: the template fails.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        template = template or self._template
        try:
            rendered: Any = render_jinja_template(
                [list(messages)],
                tools=tools,
                chat_template=template,
                return_assistant_tokens_mask=GENERATION.search(template) is not None,
                add_generation_prompt=with_prompt,
                **self._tokenizer.special_tokens_map,
            )
        except Exception as error:  # a template can fail in any way: on a missing key, on a type
            raise Refused(TEMPLATE_FAILS, f"{type(error).__name__}: {error}".partition("\n")[0][:300]) from None
        (text,), marked = rendered
        return Text(text, [(start, stop) for start, stop in marked[0]] if marked else [])

    def _difference(self, messages: Sequence[dict[str, Any]], tools: Any, text: str) -> str:
        """The first difference between a text and the text of the tokenizer's own template; '' if they are equal."""
        expected = self._render(messages, tools, template=self._own).text
        if text == expected:
            return ""
        pairs = zip(text, expected, strict=False)
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(text), len(expected)))
        return f"expected {expected[place : place + 20]!r} at character {place}, got {text[place : place + 20]!r}"

    def _turns(self, messages: Sequence[dict[str, Any]], tools: Any, whole: Text) -> list[list[Span]]:
        """The learned parts of each turn that bears loss, in characters.

        Raises:
            Refused: the learned parts or their ends are not known.
        """
        if self._about["by"] == MARKERS:
            turns = self._marked_turns(whole)
        else:
            turns = list(self._turns_by_prefixes(messages, tools, whole.text))
        if self._train_on != LAST:
            return turns
        n_answers = sum(message["role"] == "assistant" for message in messages)
        if len(turns) != n_answers:
            raise Refused(LAST_UNCLEAR, f"{len(turns)} marked turns for {n_answers} of the assistant")
        return turns[-1:]

    def _marked_turns(self, whole: Text) -> list[list[Span]]:
        """The turns inside the markers. A turn has several parts if a part does not end with the end of a turn."""
        turns: list[list[Span]] = []
        parts: list[Span] = []
        for start, stop in whole.marked:
            if start == stop:
                continue
            end = self._end_of_turn(whole.text, start, stop)
            if end is None and whole.text[stop:].lstrip().startswith(self._special):
                raise Refused(NO_END, _border(whole.text, stop))
            parts.append((start, stop if end is None else end))
            if end is not None:
                turns.append(parts)
                parts = []
        if parts:
            raise Refused(NO_END, _border(whole.text, parts[-1][1]))
        return turns

    def _turns_by_prefixes(self, messages: Sequence[dict[str, Any]], tools: Any, text: str) -> Iterator[list[Span]]:
        """The turns of the assistant, from the texts of the conversation's beginnings."""
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:i], tools, with_prompt=True).text
            after = self._render(messages[: i + 1], tools).text
            if not (text.startswith(after) and after.startswith(before)):
                raise Refused(PREFIX_DIFFERS, f"message {i}; the template needs {{% generation %}} (--chat-template)")
            end = self._end_of_turn(text, len(before), len(after))
            if end is None:
                raise Refused(NO_END, _border(text, len(after)))
            yield [(len(before), end)]

    def _end_of_turn(self, text: str, start: int, stop: int) -> int | None:
        """The place behind the special token that ends text[start:stop], before blanks; None if there is none."""
        part = text[start:stop].rstrip()
        return start + len(part) if part.endswith(self._special) else None


def _tokens_of(parts: Sequence[Span], offsets: Sequence[Span]) -> Iterator[Span]:
    """Yield the range of the tokens that cover each part of a text.

    Args:
        parts: parts of the text, ascending, none empty.
        offsets: characters of each token, ascending. Tokens of the bytes of one character all cover this character.
    """
    first = 0
    for start, stop in parts:
        while first < len(offsets) and offsets[first][1] <= start:
            first += 1
        last = first
        while last < len(offsets) and offsets[last][0] < stop:
            last += 1
        yield first, last


def _strings(value: Any) -> Iterator[str]:
    """Yield all strings in a JSON value, without the keys of objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)


def _border(text: str, end: int) -> str:
    """The text at the end of a learned part, for a message."""
    return f"it ends with {text[max(0, end - 20) : end]!r}, before {text[end : end + 20]!r}"
