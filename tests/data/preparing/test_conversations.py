"""`dtmega tokenize --chat` and `merge` of conversations: forms of records, counts, refusals, the record."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtmega.__main__ import main
from dtmega.data.indexed_files.conversations import Conversations
from dtmega.data.indexed_files.dataset import IndexedDataset
from dtmega.data.preparing import conversation_worker, conversations
from dtmega.data.preparing.messages import messages_of, options_of, tools_of
from dtmega.data.tokenizers import rendering
from dtmega.data.tokenizers.chat import TURNS_FILE, Template
from dtmega.data.tokenizers.load import load_tokenizer
from dtmega.data.tokenizers.tokenizer_json import to_json
from dtmega.distributed import exit_codes

EOD = "<|endoftext|>"
ROOT = Path(conversations.__file__).parents[3]


class Here:
    """`Confined` without its process."""

    def __init__(self, function: str, *arguments: Any, where: str) -> None:
        self.ask: Callable[[Any], Any] = getattr(rendering, function.partition(":")[2])(*arguments)


@pytest.fixture
def here(monkeypatch):
    """Run templates in this process, because an import of transformers takes seconds."""
    monkeypatch.setattr(conversation_worker, "Confined", Here)


def tokenize(folder: Path, records: list[Any], *options: object, name: str = "out") -> int:
    (folder / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    argv = ["tokenize", "--chat", "--input", folder / "in.jsonl", "--tokenizer", "bytes", "--workers", 1]
    return main([*map(str, argv), "--output", str(folder / name), *map(str, options)])


def learned(prefix: Path) -> list[tuple[str, str]]:
    """The text of each conversation, and the text of its tokens that bear loss."""
    decode = load_tokenizer("bytes").decode
    talks = Conversations(IndexedDataset(prefix))
    return [(decode(tokens.tolist()), decode(tokens[learns].tolist())) for tokens, learns in talks]


def talk(*turns: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]}


def test_all_forms_of_records_become_the_same_conversations(tmp_path, here, capsys):
    records = [
        {**talk("Add 1\n\nto 2", "3"), "prompt": "ignored"},
        {"conversations": [{"from": "human", "value": "Add 1\n\nto 2"}, {"from": "gpt", "value": "3"}]},
        {"prompt": "Add 1\n\nto 2", "completion": "3", "input": "no part of this form"},
        {"instruction": "Add 1", "input": "to 2", "output": "3"},
        {"instruction": "Add 1\n\nto 2", "input": "", "output": "3"},
    ]
    assert tokenize(tmp_path, records) == exit_codes.DONE
    text = f"User:\nAdd 1\n\nto 2{EOD}Assistant:\n3{EOD}"
    assert learned(tmp_path / "out") == [(text, f"3{EOD}")] * 5
    n_tokens = IndexedDataset(tmp_path / "out").n_tokens
    counts = f"5 conversations, {n_tokens} tokens, 10 of them learned (marked by the template; turns end with {EOD}, "
    assert capsys.readouterr().out.startswith(counts + "which is learned), 0 refused; template ")


def test_the_key_of_the_list_and_the_names_of_roles_can_be_given(tmp_path, here):
    records = [{"talk": [{"role": "bot", "content": "Hi"}, {"role": "me", "content": "Bye"}], "messages": 3}]
    options = ("--json-key", "talk", "--roles", "bot=assistant", "me=user", "--train-on", "all")
    assert tokenize(tmp_path, records, *options) == exit_codes.DONE
    text = f"Assistant:\nHi{EOD}User:\nBye{EOD}"
    assert learned(tmp_path / "out") == [(text, text.removeprefix("A"))]


def test_refused_conversations_are_counted_by_their_cause(tmp_path, here, capsys):
    records = [talk("Hi", "Hello"), talk("Hi"), {"text": "Hi"}, talk("a", f"b{EOD}"), {"messages": []}]
    assert tokenize(tmp_path, records, "--skip-empty") == exit_codes.DONE
    printed = capsys.readouterr()
    causes = "4 refused (1 content spells a special token, 2 malformed, 1 no token to learn)"
    assert causes in printed.out
    assert f"skipped {tmp_path}/in.jsonl:4: content spells a special token: '{EOD}'" in printed.err
    record = json.loads((tmp_path / "out.meta.json").read_text())
    assert sum(record["chat"]["refused"].values()) + record["documents"] == len(records)
    assert record["chat"]["learned"] == len(load_tokenizer("bytes").encode("Hello")) + 1
    assert record["chat"]["end_ids"] == [load_tokenizer("bytes").eod_id]
    assert tokenize(tmp_path, records, "--skip-empty", "--strict", "--overwrite") == exit_codes.REFUSED
    assert f"{tmp_path}/in.jsonl:2: no token to learn: no turn of the assistant (--strict)" in capsys.readouterr().err


def test_a_conversation_without_a_token_to_learn_is_refused_by_file_and_line(tmp_path, here, capsys):
    assert tokenize(tmp_path, [talk("Hi", "Hello"), talk("Hi")]) == exit_codes.REFUSED
    expected = f"{tmp_path}/in.jsonl:2: no token to learn: no turn of the assistant; --skip-empty leaves such"
    assert expected in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))


def test_a_twin_with_another_text_refuses_the_run(tmp_path, here, capsys):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(to_json("bytes"))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content + eos_token }}{% endfor %}")
    twin = tmp_path / "twin.jinja"
    twin.write_text(
        "{% for m in messages %}{% generation %}{{ m.content|trim + eos_token }}{% endgeneration %}{% endfor %}"
    )
    options = ("--tokenizer", folder / "tokenizer.json", "--chat-template", twin)
    assert tokenize(tmp_path, [talk("Hi", "Hello"), talk("Hi", "Hello ")], *options) == exit_codes.REFUSED
    assert f"in.jsonl:2: {twin} makes another text than {folder}/chat_template.jinja" in capsys.readouterr().err
    assert tokenize(tmp_path, [talk("Hi", "Hello")], *options) == exit_codes.DONE
    assert learned(tmp_path / "out") == [(f"Hi{EOD}Hello{EOD}", f"Hi{EOD}Hello{EOD}".removeprefix("H"))]


def test_merged_conversations_are_those_tokenised_at_once_and_the_counts_add_up(tmp_path, here, capsys):
    first, second = [talk("Hi", "Hello"), talk("Hi")], [talk("a", "b", "c", "d"), {"text": 1}, talk("e")]
    for records in (first, second):
        records[0]["messages"][1]["name"] = "Ann"  # which the template leaves out
    for name, records in (("one", first), ("two", second), ("whole", first + second)):
        assert tokenize(tmp_path, records, "--skip-empty", name=name) == exit_codes.DONE
    argv = ["merge", "--input", f"{tmp_path}/one", f"{tmp_path}/two", "--output", f"{tmp_path}/merged"]
    assert main(argv) == exit_codes.DONE
    for suffix in ("bin", "idx", "meta.json"):
        assert (tmp_path / f"merged.{suffix}").read_bytes() == (tmp_path / f"whole.{suffix}").read_bytes()
    template = tmp_path / "other.jinja"
    template.write_text(TURNS_FILE.read_text() + " ")
    for option, differs in (
        (("--train-on", "last"), "train_on is 'last', not"),
        (("--chat-template", template), "template is '"),
    ):
        assert tokenize(tmp_path, first, "--skip-empty", *option, "--overwrite", name="two") == exit_codes.DONE
        assert main([*argv, "--overwrite"]) == exit_codes.REFUSED
        said = capsys.readouterr().err
        assert f"two was tokenised in another way than {tmp_path}/one, as their .meta.json say: {differs}" in said
        assert "{" not in said


@pytest.mark.parametrize("of", [3, *(pytest.param(of, marks=pytest.mark.full) for of in (1, 12))])
def test_conversations_in_parts_are_those_tokenised_at_once(tmp_path, here, of):
    # Of three parts, the first has no conversation, and so no template.
    records = [
        *({"text": i} for i in range(20)),
        *(talk("Hi" * i, "a" * (i % 3), "b", "c") for i in range(12)),
        {"text": 9},
    ]
    assert tokenize(tmp_path, records, name="whole") == exit_codes.DONE
    for number in range(of):
        assert tokenize(tmp_path, records, "--part", f"{number}/{of}", name="parts") == exit_codes.DONE
    assert main(["merge", "--input", f"{tmp_path}/parts.part-*", "--output", f"{tmp_path}/merged"]) == exit_codes.DONE
    for suffix in ("bin", "idx", "meta.json"):
        assert (tmp_path / f"merged.{suffix}").read_bytes() == (tmp_path / f"whole.{suffix}").read_bytes()


def test_a_part_that_is_there_is_skipped_unless_an_option_that_changes_tokens_differs(tmp_path, here, capsys):
    template = tmp_path / "other.jinja"
    template.write_text(TURNS_FILE.read_text() + " ")
    part = ("--part", "0/1")
    for _ in range(2):
        assert tokenize(tmp_path, [talk("Hi", "a")], *part) == exit_codes.DONE
    assert "skipped" in capsys.readouterr().out
    for option in (("--train-on", "all"), ("--roles", "bot=assistant"), ("--chat-template", template)):
        assert tokenize(tmp_path, [talk("Hi", "a")], *part, *option) == exit_codes.REFUSED
        assert "with other settings" in capsys.readouterr().err
    assert tokenize(tmp_path, [talk("Hi", "a")], *part, "--json-key", "messages") == exit_codes.REFUSED


def test_a_merge_keeps_the_end_marks_of_all_parts(tmp_path):
    for number, end_ids in enumerate(([7], [3, 7])):
        assert tokenize(tmp_path, [talk("Hi", "a")], name=f"part-{number}") == exit_codes.DONE
        path = tmp_path / f"part-{number}.meta.json"
        record = json.loads(path.read_text())
        record["chat"]["end_ids"] = end_ids
        path.write_text(json.dumps(record))
    assert main(["merge", "--input", f"{tmp_path}/part-*", "--output", f"{tmp_path}/merged"]) == exit_codes.DONE
    assert json.loads((tmp_path / "merged.meta.json").read_text())["chat"]["end_ids"] == [3, 7]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "a"}, r"expected messages, conversations, prompt and completion, instruction and output, .*\['text'"),
        ({"messages": "a"}, "expected a list of messages in 'messages'"),
        ({"messages": ["a"]}, "message 0: expected an object, got str"),
        ({"messages": [{"role": "human", "content": "a"}]}, "got 'human' .--roles human=ROLE"),
        ({"conversations": [{"from": "bing", "value": "a"}]}, "got 'bing'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "expected parts of text in 'content', got"),
        ({"messages": [{"role": "user", "content": None}]}, "expected text in 'content', got NoneType"),
        (
            {"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]},
            "a 'weight' of 0 or 1, and 'train' true",
        ),
        ({"system": "a", "messages": [{"role": "system", "content": "b"}]}, "expected one system message"),
        ({"messages": [{"role": "user", "content": "a"}], "tools": ["a"]}, "expected a list of objects in 'tools'"),
        ({"messages": [{"role": "user", "content": "a"}], "tools": "[a"}, "expected JSON in 'tools'"),
        ({"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": [1]}, "expected an object in 'chat_"),
        (
            {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"eos_token": ""}},
            "not set 'eos_tok",
        ),
    ],
)
def test_a_record_that_cannot_be_read_says_why(record, message):
    with pytest.raises(ValueError, match=message):
        _ = messages_of(record, None, {}), tools_of(record), options_of(record)


def test_what_a_template_may_read_is_kept():
    called = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    record = {"system": "Be short.", "messages": [called], "tools": [{"name": "f"}]}
    system = {"role": "system", "content": "Be short."}
    assert messages_of(record, None, {}) == [system, {"role": "assistant", "tool_calls": [{"name": "f"}]}]
    assert tools_of(record) == [{"name": "f"}]


def test_other_ways_to_write_the_same_are_read():
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    said = {"role": "assistant", "content": parts, "weight": 1, "train": True}
    record = {"messages": [said], "tools": '[{"name": "f"}]', "chat_template_kwargs": '{"enable_thinking": false}'}
    assert messages_of(record, None, {}) == [{"role": "assistant", "content": "Hello"}]
    assert (tools_of(record), options_of(record)) == ([{"name": "f"}], {"enable_thinking": False})


def test_turns_of_weight_0_are_not_learned_and_what_the_template_leaves_out_is_counted(tmp_path, here, capsys):
    silent, untrained = talk("Hi", "Hello", "Bye", "Ciao"), talk("Hi", "Hello", "Bye", "Ciao")
    silent["messages"][1]["weight"] = 0
    untrained["messages"][3] |= {"train": False, "reasoning_content": "They leave."}
    assert tokenize(tmp_path, [silent, untrained]) == exit_codes.DONE
    assert [answer for _, answer in learned(tmp_path / "out")] == [f"Ciao{EOD}", f"Hello{EOD}"]
    assert "0 refused, the template leaves out the field 'reasoning_content' (1); template" in capsys.readouterr().out
    notes = json.loads((tmp_path / "out.meta.json").read_text())["chat"]["notes"]
    assert notes == {"the template leaves out the field 'reasoning_content'": 1}
    assert tokenize(tmp_path, [silent], "--train-on", "all", "--strict", "--overwrite") == exit_codes.REFUSED
    assert "message 1 bears no loss ('weight' or 'train'), but --train-on all" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--train-on", "last"], "--train-on means nothing without --chat"),
        (["--chat", "--append-eod"], "--append-eod means nothing with --chat"),
        (["--chat", "--tokenizer", "stdlib-wordpiece", "--kind", "jsonl"], "loses line ends and blanks"),
        (["--chat"], "expected lines of JSON for --chat, got .txt"),
        (["--chat", "--kind", "jsonl", "--chat-template", "nowhere"], "--chat-template nowhere: expected a file, or t"),
    ],
)
def test_options_that_mean_nothing_together_are_refused(tmp_path, argv, message, capsys):
    (tmp_path / "a.txt").write_text("")
    options = ["--input", str(tmp_path / "a.txt"), "--output", str(tmp_path / "out"), "--tokenizer", "bytes"]
    assert main(["tokenize", *options, *argv]) == exit_codes.REFUSED
    assert message in capsys.readouterr().err


def test_the_shipped_conversations_are_those_of_their_rule_and_the_held_out_questions_are_new():
    spec = importlib.util.spec_from_file_location("shipped_chat", ROOT / "tools" / "shipped_chat.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert conversations.SHIPPED.read_text() == tool.text()
    asked = [[m["content"] for m in json.loads(line)["messages"][::2]] for line in tool.text().splitlines()]
    held_out = {question for questions in asked[-tool.HELD_OUT :] for question in questions}
    assert held_out.isdisjoint(question for questions in asked[: -tool.HELD_OUT] for question in questions)
    assert len(held_out) == tool.HELD_OUT == len(asked) // 10


def test_the_shipped_conversations_are_tokenised_once_by_a_confined_process(tmp_path, monkeypatch):
    monkeypatch.setattr(conversations, "cache_dir", lambda: tmp_path)
    prefix = conversations.prepare_shipped(load_tokenizer("bytes"))
    talks = Conversations(IndexedDataset(prefix))
    lines = conversations.SHIPPED.read_text().splitlines()
    answers = [m["content"] for line in lines for m in json.loads(line)["messages"][1::2]]
    assert len(talks) == len(lines)
    assert talks.record.learned == sum(len(answer) + 1 for answer in answers)
    written: list[Any] = []
    monkeypatch.setattr(conversations, "write", written.append)
    assert conversations.prepare_shipped(load_tokenizer("bytes")) == prefix
    assert written == []
    other = tmp_path / "other.jinja"
    other.write_text(TURNS_FILE.read_text() + " ")
    monkeypatch.setattr(conversations, "find_template", lambda _: Template(None, other))
    assert conversations.prepare_shipped(load_tokenizer("bytes")) == written[0].output != prefix


@pytest.mark.full
def test_the_conversations_are_the_same_for_any_number_of_workers(tmp_path, monkeypatch):
    monkeypatch.setattr("dtmega.data.preparing.text_files.CHUNK_BYTES", 50)
    records = [talk(f"Add {i} and 1", f"{i + 1}") for i in range(20)]
    for n in (1, 2):
        assert tokenize(tmp_path, records, "--workers", n, name=f"by{n}") == exit_codes.DONE
    for suffix in ("bin", "idx", "meta.json"):
        assert (tmp_path / f"by1.{suffix}").read_bytes() == (tmp_path / f"by2.{suffix}").read_bytes()
