"""Turn conversations into tokens and find the tokens that bear loss. This code runs in a confined process.

A chat template turns a conversation into one text. The text is encoded as a whole, because encoding the text in pieces
would give different tokens at the borders. The learned parts of the text are found as character ranges, and the
tokens' offsets convert these ranges into token ranges. A token that crosses the border of a learned part is
learned, as in transformers.

The learned parts are never guessed. Either the template marks them with {% generation %}, or prefixes of the
conversation show them. Let m[:i] be the messages before answer i. Answer i begins where the text of m[:i] with the
generation prompt ends, and stops where the text of m[:i + 1] ends. For each conversation, the code checks that both
texts are prefixes of the whole text.

In both cases, the learned part of a turn ends with the token that ends the turn. Text that the template writes after
this token, such as a line end, is not learned. A conversation is refused if a learned turn has no such token.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dtmega.data.tokenizers import template_input
from dtmega.data.tokenizers.tokenizer_json import to_json

ALL, ASSISTANT, LAST = "all", "assistant", "last"
MARKERS, PREFIXES = "markers", "prefixes"
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # same pattern as in transformers

# Reasons for refusing a conversation, as worded in messages and in the data set's .meta.json.
TEMPLATE_FAILS = "the template refuses"
SPELLS_SPECIAL = "content spells a special token"
PREFIX_DIFFERS = "a prefix does not hold"
NO_END = "no special token ends the learned turn"
TURNS_UNCLEAR = "the turns are unclear"
BAD_ARGUMENTS = "arguments of a tool call are not JSON"

Span = tuple[int, int]  # range (start, stop) of characters or of tokens
Render = Callable[..., "Text"]  # `Renderer._render` with the tools and options of one conversation


class Refused(Exception):
    """Raised to refuse a conversation, which is then left out.

    Attributes:
        cause: reason for the refusal, one of the constants above.
        why: details about this conversation.
    """

    def __init__(self, cause: str, why: str) -> None:
        super().__init__(cause)
        self.cause, self.why = cause, why


class Text(NamedTuple):
    """A conversation as rendered by the template.

    Attributes:
        text: rendered text.
        marked: character ranges inside {% generation %} blocks.
    """

    text: str
    marked: list[Span]


def read_tokenizer(spec: str, eod: str, template: str | None) -> Any:
    """Load the tokenizer that a spec names, as a transformers tokenizer.

    Args:
        spec: spec of the tokenizer.
        eod: name of the end-of-document token. Templates see this token as `eos_token`, unless the tokenizer's files
            define an `eos_token`.
        template: path of a template that replaces the tokenizer's own template; None to keep the tokenizer's own.
    """
    import tokenizers
    from transformers import PreTrainedTokenizerFast

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
    """Make a function that turns a conversation into ids, up to the beginning of the assistant's next answer.

    The arguments are the same as for `read_tokenizer`.
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
    """Make a function that turns a conversation into a result of `Renderer`.

    Args:
        spec: spec of the tokenizer.
        eod: name of the end-of-document token.
        template: path of a template; None for the tokenizer's own template.
        has_own: whether the tokenizer has its own template. If `template` is given as well, both templates must render
            the same text.
        train_on: turns that bear loss: ALL, ASSISTANT or LAST.
    """
    tokenizer = read_tokenizer(spec, eod, None)
    own = tokenizer.get_chat_template() if template is not None and has_own else None
    if template is not None:
        tokenizer.chat_template = Path(template).read_text(encoding="utf-8")
    return Renderer(tokenizer, own, train_on)


class Renderer:
    """A callable that turns a conversation into its tokens.

    Args:
        tokenizer: transformers tokenizer with the template to use.
        own: second template that must render the same text as the first; None to use no second template.
        train_on: turns that bear loss: ALL, ASSISTANT or LAST.
    """

    def __init__(self, tokenizer: Any, own: str | None, train_on: str) -> None:
        from tokenizers import processors

        self._tokenizer, self._own, self._train_on = tokenizer, own, train_on
        self._template: str = tokenizer.get_chat_template()
        # GPT-2's post-processor excludes a token's blanks from the token's offsets. Without the post-processor, the
        # offsets cover all characters of the token. The ids stay the same, because no special ids are added.
        tokenizer.backend_tokenizer.post_processor = processors.Sequence([])
        added = tokenizer.added_tokens_decoder.values()
        special = {token.content for token in added if token.special} | set(tokenizer.all_special_tokens)
        self._special = tuple(sorted(special))
        self._about = {
            "template": hashlib.sha256(self._template.encode()).hexdigest()[:12],
            "by": MARKERS if GENERATION.search(self._template) else PREFIXES,
        }

    def __call__(self, conversation: dict[str, Any]) -> dict[str, Any]:
        """Turn a conversation into tokens.

        Args:
            conversation: dict with the keys `messages` and `tools` (may be None), and optionally `options` (further
                variables of the template) and `silent` (indices of messages that bear no loss).

        Returns:
            A dict that always has the keys `template` (digest) and `by` (MARKERS or PREFIXES). For an accepted
            conversation, the dict also has `ids`, `learned` (ranges of tokens), `ends` and `end_ids` (names and ids of
            the tokens that end the learned turns) and `notes` (how arguments of tool calls were read, and what the
            template leaves out). For a refused conversation, the dict also has `cause` and `why`. If
            the second template renders a different text, the dict also has `differs`, a description of the difference.
        """
        messages, tools = conversation["messages"], conversation["tools"]
        options, silent = conversation.get("options", {}), conversation.get("silent", ())
        render = functools.partial(self._render, tools=tools, options=options)
        try:
            self._check_content([tools, options], messages)
            messages, whole, notes = self._read_arguments(messages, render)
            expected = whole if self._own is None else render(messages, template=self._own)
            if differs := _difference(whole.text, expected.text):
                return self._about | {"differs": differs}
            turns = [] if self._train_on == ALL else self._turns(messages, silent, whole, render)
        except Refused as refused:
            return self._about | {"cause": refused.cause, "why": refused.why}

        def other_text(messages: Sequence[dict[str, Any]], tools: Any) -> str | None:
            with contextlib.suppress(Refused):
                return render(messages, tools=tools).text
            return None

        left_out = template_input.left_out(messages, tools, whole.text, other_text)
        parts = [span for turn in turns for span in turn] if self._train_on != ALL else [(0, len(whole.text))]
        encoding = self._tokenizer(whole.text, add_special_tokens=False, return_offsets_mapping=True)
        ends = {name for turn in turns for name in self._special if whole.text.endswith(name, 0, turn[-1][1])}
        return self._about | {
            "ids": encoding["input_ids"],
            "learned": list(_tokens_of(parts, encoding["offset_mapping"])),
            "ends": sorted(ends),
            "end_ids": sorted(map(self._tokenizer.convert_tokens_to_ids, ends)),
            "notes": [*notes, *(f"the template leaves out {name}" for name in left_out)],
        }

    def _check_content(self, other: Any, messages: Sequence[dict[str, Any]]) -> None:
        """Refuse a conversation if a message or `other` contains a special token, which could begin or end a turn."""
        for text in template_input.strings([other, *({**message, "role": None} for message in messages)]):
            for name in self._special:
                if name in text:
                    raise Refused(SPELLS_SPECIAL, f"'{name}'")

    def _read_arguments(
        self, messages: Sequence[dict[str, Any]], render: Render
    ) -> tuple[Sequence[dict[str, Any]], Text, list[str]]:
        """Put the arguments of tool calls into the form that the template reads, and render the conversation.

        Returns:
            The messages in this form, the rendered conversation, and a note if arguments were text.

        Raises:
            Refused: arguments are text that is no JSON object, or the template fails.
        """
        try:
            decoded = template_input.decoded(messages)
        except ValueError as error:
            raise Refused(BAD_ARGUMENTS, str(error)) from None
        if decoded is None:
            return messages, render(messages), []
        self._check_content(None, decoded)  # JSON text may spell a special token with escapes
        if not template_input.reads_text(self._template):
            with contextlib.suppress(Refused):
                whole = render(decoded)
                if not template_input.writes_python(decoded, whole.text):
                    return decoded, whole, [template_input.DECODED]
        return messages, render(messages), [template_input.KEPT]

    def _render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Any,
        options: Mapping[str, Any],
        with_prompt: bool = False,
        template: str | None = None,
    ) -> Text:
        """Render a conversation with the template; `options` are further variables of the template.

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
                **options,
                **self._tokenizer.special_tokens_map,
            )
        except Exception as error:  # a template can raise any error: KeyError, TypeError, ...
            raise Refused(TEMPLATE_FAILS, f"{type(error).__name__}: {error}".partition("\n")[0][:300]) from None
        (text,), marked = rendered
        return Text(text, [(start, stop) for start, stop in marked[0]] if marked else [])

    def _turns(
        self, messages: Sequence[dict[str, Any]], silent: Sequence[int], whole: Text, render: Render
    ) -> list[list[Span]]:
        """The character ranges of the learned parts, for each turn that bears loss; messages in `silent` bear none.

        Raises:
            Refused: the learned parts, or the tokens that end them, cannot be determined.
        """
        if self._about["by"] == MARKERS:
            turns = self._marked_turns(whole)
        else:
            turns = list(self._turns_by_prefixes(messages, whole.text, render))
        if self._train_on != LAST and not silent:
            return turns
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if len(turns) != len(answers):
            raise Refused(TURNS_UNCLEAR, f"{len(turns)} marked turns for {len(answers)} of the assistant")
        first = len(turns) - 1 if self._train_on == LAST else 0
        return [turn for i, turn in list(zip(answers, turns, strict=True))[first:] if i not in silent]

    def _marked_turns(self, whole: Text) -> list[list[Span]]:
        """Find the learned turns in the marked parts of a rendered text.

        If a marked part does not end with the end of a turn, the turn continues in the next marked part.
        """
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

    def _turns_by_prefixes(self, messages: Sequence[dict[str, Any]], text: str, render: Render) -> Iterator[list[Span]]:
        """Yield the assistant's turns, found by rendering prefixes of the conversation."""
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = render(messages[:i], with_prompt=True).text
            after = render(messages[: i + 1]).text
            if not (text.startswith(after) and after.startswith(before)):
                raise Refused(PREFIX_DIFFERS, f"message {i}; the template needs {{% generation %}} (--chat-template)")
            end = self._end_of_turn(text, len(before), len(after))
            if end is None:
                raise Refused(NO_END, _border(text, len(after)))
            yield [(len(before), end)]

    def _end_of_turn(self, text: str, start: int, stop: int) -> int | None:
        """The position after the special token that ends text[start:stop]; None if no special token ends this part.

        Blanks at the end of the part are ignored.
        """
        part = text[start:stop].rstrip()
        return start + len(part) if part.endswith(self._special) else None


def _tokens_of(parts: Sequence[Span], offsets: Sequence[Span]) -> Iterator[Span]:
    """Yield one token range per part of a text: the range of tokens that cover the part.

    Args:
        parts: non-empty character ranges, in ascending order.
        offsets: character range of each token, in ascending order. If several tokens encode the bytes of one
            character, each of these tokens covers the character.
    """
    first = 0
    for start, stop in parts:
        while first < len(offsets) and offsets[first][1] <= start:
            first += 1
        last = first
        while last < len(offsets) and offsets[last][0] < stop:
            last += 1
        yield first, last


def _difference(text: str, expected: str) -> str:
    """Describe where `text` first differs from the text of the tokenizer's own template; '' if both are equal."""
    if text == expected:
        return ""
    pairs = zip(text, expected, strict=False)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(text), len(expected)))
    return f"expected {expected[place : place + 20]!r} at character {place}, got {text[place : place + 20]!r}"


def _border(text: str, end: int) -> str:
    """Quote the text around the end of a learned part, for a message."""
    return f"it ends with {text[max(0, end - 20) : end]!r}, before {text[end : end + 20]!r}"
