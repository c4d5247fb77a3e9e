"""`rendering.py`: the tokens of a conversation that bear loss, beside transformers' mask and hand-written strings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, processors
from transformers import PreTrainedTokenizerFast

from dtmega.data.tokenizers import rendering
from dtmega.data.tokenizers.chat import TURNS_FILE, find_template
from dtmega.data.tokenizers.load import load_tokenizer
from dtmega.data.tokenizers.rendering import ALL, ASSISTANT, LAST, read_conversations, read_prompts
from dtmega.data.tokenizers.tokenizer_json import to_json

TALK = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Grüße 🙂"},
    {"role": "assistant", "content": "Hello 漢字"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "See you"},
]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}BEGIN{{ m.content + '<|im_end|>' }}END{{ '\n' }}"
    "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
UNMARKED = CHATML.replace("BEGIN", "").replace("END", "")
MARKED = CHATML.replace("BEGIN", "{% generation %}").replace("END", "{% endgeneration %}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a byte-level tokenizer with ChatML's tokens, which cuts blanks off the offsets as GPT-2's does."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = tokenizers.Tokenizer.from_str(to_json("stdlib-8k"))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<|im_start|>", "<|im_end|>", "<s>")])
    bos = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))])
    blanks = processors.ByteLevel(trim_offsets=True)
    tokenizer.post_processor = processors.Sequence([blanks, bos])  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "bos_token": "<s>"}))
    return folder


def tokens(
    folder: Path, template: str, messages: list[dict[str, Any]], on: str = ASSISTANT, **other: Any
) -> dict[str, Any]:
    """What the confined process answers."""
    (folder / "chat_template.jinja").write_text(template)
    spec = str(folder / "tokenizer.json")
    return read_conversations(spec, "<|im_end|>", None, True, on)({"messages": messages, "tools": None, **other})


def mask(answer: dict[str, Any]) -> list[int]:
    learned = [0] * len(answer["ids"])
    for start, stop in answer["learned"]:
        learned[start:stop] = [1] * (stop - start)
    return learned


def learned_text(folder: Path, answer: dict[str, Any]) -> list[str]:
    decode = load_tokenizer(str(folder / "tokenizer.json")).decode
    return [decode(answer["ids"][start:stop]) for start, stop in answer["learned"]]


def test_tokens_and_loss_are_those_of_transformers(folder):
    answer = tokens(folder, MARKED, TALK)
    theirs: Any = PreTrainedTokenizerFast.from_pretrained(folder)
    expected = theirs.apply_chat_template(TALK, return_dict=True, return_assistant_tokens_mask=True)
    assert answer["ids"] == list(expected["input_ids"])
    assert mask(answer) == list(expected["assistant_masks"])
    assert (answer["by"], answer["ends"]) == ("markers", ["<|im_end|>"])


@pytest.mark.parametrize(
    ("on", "expected"),
    [
        (ASSISTANT, ["Hello 漢字<|im_end|>", "See you<|im_end|>"]),
        (LAST, ["See you<|im_end|>"]),
        (ALL, ["".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in TALK)]),
    ],
)
@pytest.mark.parametrize("template", [UNMARKED, MARKED])
def test_the_end_of_a_turn_is_learned_and_the_line_end_behind_it_is_not(folder, template, on, expected):
    assert learned_text(folder, tokens(folder, template, TALK, on)) == expected


def test_a_line_end_that_the_markers_hold_is_not_learned_either(folder):
    template = MARKED.replace("{% endgeneration %}{{ '\n' }}", "{{ '\n' }}{% endgeneration %}")
    assert learned_text(folder, tokens(folder, template, TALK)) == ["Hello 漢字<|im_end|>", "See you<|im_end|>"]


def test_a_token_of_blanks_that_gpt2_leaves_out_of_its_offsets_is_learned(folder):
    (text,) = learned_text(folder, tokens(folder, MARKED + "{{ '    ' }}", TALK, ALL))
    assert text.endswith("See you<|im_end|>\n    ")


def test_a_turn_may_be_marked_in_parts(folder):
    parts = "{{ m.role }}{% endgeneration %}{{ ': ' }}{% generation %}{{ m.content"
    answer = tokens(folder, MARKED.replace("{{ m.content", parts, 1), TALK, LAST)
    assert learned_text(folder, answer) == ["assistant", " See you<|im_end|>"]  # the token " See" crosses the border


def test_the_first_token_is_written_once_where_the_template_writes_it(folder):
    answer = tokens(folder, "{{ bos_token }}" + MARKED, TALK)
    text = load_tokenizer(str(folder / "tokenizer.json")).decode(answer["ids"])
    assert text.startswith("<s><|im_start|>")
    assert "<s>" not in load_tokenizer(str(folder / "tokenizer.json")).decode(tokens(folder, MARKED, TALK)["ids"])


THOUGHTLESS = UNMARKED.replace("{{ m.content +", "{{ ('' if loop.last else '<think>') + m.content +", 1)
REFUSED = [
    (UNMARKED.replace("{% for", "{{ messages|length }}{% for"), TALK, rendering.PREFIX_DIFFERS),
    (THOUGHTLESS, TALK, rendering.PREFIX_DIFFERS),
    (UNMARKED.replace("'<|im_end|>' }}", "'.' }}"), TALK, rendering.NO_END),
    (MARKED.replace("+ '<|im_end|>' }}", "+ '.' }}"), TALK, rendering.NO_END),
    (
        MARKED.replace(" + '<|im_end|>' }}{% endgeneration %}", " }}{% endgeneration %}{{ '<|im_end|>' }}"),
        *(TALK, rendering.NO_END),
    ),
    (MARKED + "{{ raise_exception('never') }}", TALK, rendering.TEMPLATE_FAILS),
    (MARKED + "{{ messages[9].content.x }}", TALK, rendering.TEMPLATE_FAILS),
    (MARKED, [*TALK, {"role": "user", "content": "a<|im_start|>b"}], rendering.SPELLS_SPECIAL),
    (
        *(MARKED, [*TALK, {"role": "assistant", "content": "", "tool_calls": [{"arguments": {"a": ["<|im_end|>"]}}]}]),
        rendering.SPELLS_SPECIAL,
    ),
    (MARKED, [*TALK, {"role": "assistant", "content": "", "x": {"<|im_end|>": 1}}], rendering.SPELLS_SPECIAL),
    (MARKED, [*TALK, {"role": "user", "content": "", "tool_calls": [{"arguments": "{"}]}], rendering.BAD_ARGUMENTS),
    (MARKED, [*TALK, {"role": "user", "content": "", "tool_calls": [{"arguments": "3"}]}], rendering.BAD_ARGUMENTS),
    (
        # The JSON text spells the token only with escapes.
        *(MARKED, [*TALK, {"role": "user", "content": "", "tool_calls": [{"arguments": r'{"a": "<\u007cim_end|>"}'}]}]),
        rendering.SPELLS_SPECIAL,
    ),
    (MARKED.replace("== 'assistant'", "== 'assistant' and loop.last"), TALK, rendering.TURNS_UNCLEAR),
]


@pytest.mark.parametrize(("template", "messages", "cause"), REFUSED)
def test_a_conversation_whose_loss_would_be_guessed_is_refused_by_its_cause(folder, template, messages, cause):
    answer = tokens(folder, template, messages, LAST)
    assert answer["cause"] == cause
    assert "ids" not in answer


def test_tools_that_spell_a_special_token_are_refused_like_messages(folder):
    (folder / "chat_template.jinja").write_text("{{ tools[0].description }}" + MARKED)
    render = read_conversations(str(folder / "tokenizer.json"), "<|im_end|>", None, True, ASSISTANT)
    answers = [render({"messages": TALK, "tools": [{"description": text}]}) for text in ("adds", "<|im_end|>")]
    assert "ids" in answers[0]
    assert (answers[1]["cause"], answers[1]["why"]) == (rendering.SPELLS_SPECIAL, "'<|im_end|>'")


def test_a_marked_twin_must_make_the_text_of_the_tokenizers_own_template(folder, tmp_path):
    (folder / "chat_template.jinja").write_text(UNMARKED)
    twin, spec = tmp_path / "twin.jinja", str(folder / "tokenizer.json")

    def answer() -> dict[str, Any]:
        return read_conversations(spec, "<|im_end|>", str(twin), True, ASSISTANT)({"messages": TALK, "tools": None})

    twin.write_text(MARKED)
    assert learned_text(folder, answer()) == ["Hello 漢字<|im_end|>", "See you<|im_end|>"]
    twin.write_text(MARKED.replace("{% generation %}", "{% generation -%} "))
    assert mask(answer()) == mask(tokens(folder, MARKED, TALK))
    (folder / "chat_template.jinja").write_text(UNMARKED)
    twin.write_text(MARKED.replace("{{ '\n' }}", ""))
    place = len("<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nGrüße 🙂<|im_end|>\n")
    place += len("<|im_start|>assistant\nHello 漢字<|im_end|>")
    assert answer()["differs"].startswith(rf"expected '\n<|im_start|>user\nBy' at character {place}, got '<|im_start|>")


@pytest.mark.parametrize("spec", ["bytes", "stdlib-8k"])
def test_the_shipped_template_has_ordinary_marks_and_ends_turns_with_the_end_of_document(spec):
    tokenizer, eod = load_tokenizer(spec), "<|endoftext|>"
    template = str(find_template(tokenizer).path)
    answer = read_conversations(spec, eod, template, False, ASSISTANT)({"messages": TALK, "tools": None})
    named = zip(("System", "User", "Assistant", "User", "Assistant"), TALK, strict=True)
    assert tokenizer.decode(answer["ids"]) == "".join(f"{name}:\n{m['content']}{eod}" for name, m in named)
    marks = set(answer["ids"]) & tokenizer.special_ids
    assert marks == {tokenizer.eod_id}
    ends = [answer["ids"][stop - 1] for _, stop in answer["learned"]]
    assert ends == [tokenizer.eod_id] * 2
    assert str(TURNS_FILE) == template
    # What is asked of a trained model is the beginning of what it has learned from.
    prompt = read_prompts(spec, eod, template)(TALK[:4])
    assert answer["ids"] == [*prompt, *tokenizer.encode("See you"), tokenizer.eod_id]


DECODED, KEPT = "arguments of tool calls decoded", "arguments of tool calls kept as text"
TEXT = '{"city": "Zürich",  "n": [1]}'
CALLS = [
    {"role": "user", "content": "Weather"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": TEXT}}]},
]
AS_JSON = """{"city": "Zürich", "n": [1]}"""


@pytest.mark.parametrize(
    ("write", "expected", "note"),
    [
        ("c.function.arguments | tojson", AS_JSON, DECODED),
        ("c.function.arguments.items() | list | length", "2", DECODED),
        ("'' ~ c.function.arguments", TEXT, KEPT),  # would be Python's notation
        ("'' + c['function']['arguments']", TEXT, KEPT),  # DeepSeek's, which fails with objects
        (
            "(c.function.arguments if c.function.arguments is string else c.function.arguments | tojson)",
            *(TEXT, KEPT),
        ),
        (  # Gemma 4's
            "(c.function.arguments.city if c.function.arguments is mapping else c.function.arguments is string)",
            *("Zürich", DECODED),
        ),
    ],
)
def test_arguments_of_tool_calls_are_in_the_form_that_the_template_reads(folder, write, expected, note):
    calls = "{% for c in m.tool_calls %}{{ " + write + " }}{% endfor %}"
    template = MARKED.replace("{{ m.content +", calls + "{{ m.content +")
    answer = tokens(folder, template, CALLS)
    assert learned_text(folder, answer) == [f"{expected}<|im_end|>"]
    assert answer["notes"] == [note]
    objects = json.loads(json.dumps(CALLS))
    objects[1]["tool_calls"][0]["function"]["arguments"] = json.loads(TEXT)
    if note == DECODED:
        assert tokens(folder, template, objects)["ids"] == answer["ids"]


def test_what_a_template_leaves_out_is_named_and_what_it_writes_is_not(folder):
    thought = {"role": "assistant", "content": "See you", "reasoning_content": "a", "name": "b", "flag": True}
    talk = [{"role": "developer", "content": "Be short."}, *TALK[1:4], thought]
    template = "{% for m in messages if m.role != 'developer' %}" + MARKED.removeprefix("{% for m in messages %}")
    answer = tokens(folder, template.replace("m.content +", "(m.name or '') + m.content +"), talk, tools=[{"a": 1}])
    left_out = ["messages of role developer", "the field 'flag'", "the field 'reasoning_content'"]
    assert answer["notes"] == [f"the template leaves out {name}" for name in ["the tools", *left_out]]
    assert tokens(folder, MARKED, TALK)["notes"] == []


@pytest.mark.parametrize("template", [UNMARKED, MARKED])
@pytest.mark.parametrize(
    ("on", "silent", "expected"),
    [
        (ASSISTANT, [2], ["See you<|im_end|>"]),
        (ASSISTANT, [4], ["Hello 漢字<|im_end|>"]),
        (LAST, [2], ["See you<|im_end|>"]),
        (LAST, [4], []),
    ],
)
def test_a_turn_of_weight_0_bears_no_loss(folder, template, on, silent, expected):
    answer = tokens(folder, template, TALK, on, silent=silent)
    assert learned_text(folder, answer) == expected
    assert answer["ids"] == tokens(folder, template, TALK, on)["ids"]


def test_further_variables_reach_the_template_and_spell_no_special_token(folder):
    template = "{{ greeting }}" + MARKED
    answer = tokens(folder, template, TALK, options={"greeting": "Dear all"})
    assert load_tokenizer(str(folder / "tokenizer.json")).decode(answer["ids"]).startswith("Dear all<|im_start|>")
    assert tokens(folder, template, TALK, options={"greeting": "<s>"})["cause"] == rendering.SPELLS_SPECIAL
