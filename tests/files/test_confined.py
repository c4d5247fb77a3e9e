"""files/confined.py and what runs in it: a stranger's template or tokenizer costs one line, and little else."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from dtmega.__main__ import main
from dtmega.data.tokenizers.chat import Chat, find_template
from dtmega.data.tokenizers.load import load_tokenizer
from dtmega.data.tokenizers.tokenizer_json import to_json
from dtmega.distributed import exit_codes
from dtmega.files import confined
from dtmega.files.confined import Confined

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def child():
    found = Confined("tests.answering:answering", "a", where="FILE")
    yield found
    found.close()


def test_one_child_answers_many_requests_in_order_with_limits_and_without_torch(child: Confined):
    first, second = child.ask({"n": 1}), child.ask("loud")
    assert first == ["a", {"n": 1}, second[2]]
    assert first[2] not in (os.getpid(), 0)
    expected_bytes = confined.MEMORY_BYTES + confined.MEMORY_PER_BYTE * len(b'"limits"\n')
    assert child.ask("limits") == [expected_bytes, 0]
    assert child.ask("torch") == []


@pytest.mark.parametrize(
    ("request_", "words", "stays"),
    [
        ("wrong", "FILE: KeyError: 'first", True),
        ("memory", "FILE: expected to need at most 1024 MiB of memory", True),
        ("abort", "FILE ended its process: killed by SIGABRT", False),
        ("hang", "FILE took more than 0.3 s", False),
        ("long", "or wrote more than 548 bytes", False),
    ],
)
def test_a_child_that_fails_is_one_line_and_the_next_request_has_one_again(
    child: Confined, monkeypatch: pytest.MonkeyPatch, request_: str, words: str, stays: bool
):
    pid = child.ask("first")[2]
    with monkeypatch.context() as patch:
        patch.setattr(confined, "ANSWER_S", 0.3 if request_ == "hang" else 30.0)
        patch.setattr(confined, "ANSWER_BYTES", 100)
        with pytest.raises(ValueError) as refused:
            child.ask(request_)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)
    assert (child.ask("second")[2] == pid) == stays
    assert Path(f"/proc/{pid}").exists() == stays


def test_a_function_that_refuses_at_the_start_is_one_line():
    with pytest.raises(ValueError, match=r"^FILE: not this one$"):
        Confined("tests.answering:answering", "refused", where="FILE").start()


# ------------------------------------------------------------------------------------------------------------ templates


def chat(folder: Path, template: str, **config_json: Any) -> Chat:
    (folder / "tokenizer.json").write_text(to_json("bytes"))
    (folder / "chat_template.jinja").write_text(template)
    (folder / "tokenizer_config.json").write_text(json.dumps(config_json))
    tokenizer = load_tokenizer(str(folder / "tokenizer.json"))
    return Chat(tokenizer, find_template(tokenizer))


def test_a_conversation_has_the_ids_that_transformers_gives_it(tmp_path: Path):
    template = (
        "{{ bos_token }}{% for m in messages %}{% generation %}{{ m.content | tojson }}{% endgeneration %}{% endfor %}"
    )
    found = chat(tmp_path, template, bos_token="<|endoftext|>")
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert found.ids(MESSAGES) == expected == [256, *b'"Hi"']
    found.close()


HOSTILE = {
    "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}": "took more than 1 s",
    "{{ 'x' * 10000000000 }}": "expected to need at most 1024 MiB of memory",
    "{{ 1 / 0 }}": "ZeroDivisionError: division by zero",
    "{% for %}": "refuses this conversation: Expected an expression",
}


def test_a_template_that_loops_bursts_or_fails_is_one_line_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    found = chat(tmp_path, "")
    file = tmp_path / "chat_template.jinja"
    for template, words in HOSTILE.items():
        file.write_text(template)
        found.close()
        found.start()
        with monkeypatch.context() as patch:
            patch.setattr(confined, "ANSWER_S", 1.0 if "took" in words else 30.0)
            with pytest.raises(ValueError) as refused:
                found.ids(MESSAGES)
        assert str(refused.value).startswith(str(file))
        assert words in str(refused.value)
        assert "\n" not in str(refused.value)
    found.close()


# ----------------------------------------------------------------------------------------------------------- tokenizers


def tokenizer_json(folder: Path, **changes: Any) -> str:
    vocabulary = {"a": 0, "<|endoftext|>": 1, "[UNK]": 2}
    content = json.loads(Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]")).to_str())
    (folder / "tokenizer.json").write_text(json.dumps(content | changes))
    return str(folder / "tokenizer.json")


GROWS_ON_Q = {"type": "Replace", "pattern": {"String": "q"}, "content": "q" * 1000}  # no text of the trial has a q
ANCHORED = {"type": "Replace", "pattern": {"Regex": r"^ \[PAD\] $"}, "content": "a"}
GROWS = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": 5}, "expected a Hugging Face tokenizer.json"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "PanicException: Precompiled"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////wAAAAAA"}}, "killed by SIGABRT"),
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "chunk size must be non-zero"),
        ({"decoder": {"type": "Strip", "content": "a", "start": 2**60, "stop": 2**60}}, "PanicException"),
        ({"normalizer": {"type": "Sequence", "normalizers": [GROWS] * 5}}, "killed by SIGABRT"),
        # Grows without end on one of the texts that this process encodes itself after the trial.
        ({"normalizer": {"type": "Sequence", "normalizers": [ANCHORED, *[GROWS] * 5]}}, "killed by SIGABRT"),
    ],
)
def test_a_tokenizer_that_panics_aborts_or_bursts_is_one_line(tmp_path: Path, changes: dict[str, Any], words: str):
    path = tokenizer_json(tmp_path, **changes)
    with pytest.raises(ValueError) as refused:
        load_tokenizer(path)
    assert str(refused.value).startswith(path)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_text_that_a_tokenizer_cannot_read_is_refused_by_its_name(tmp_path: Path):
    path = tokenizer_json(
        tmp_path, model={"type": "WordLevel", "unk_token": "x", "vocab": {"a": 0, "<|endoftext|>": 1}}
    )
    loaded = load_tokenizer(path)
    assert loaded.encode("a") == [0]
    with pytest.raises(ValueError, match=r"tokenizer.json: the tokenizer refuses this text: .*Missing \[UNK\]"):
        loaded.encode("b")


def test_a_tokenizer_that_grows_on_one_word_only_is_one_line_and_the_command_goes_on_to_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tokenizer_json(tmp_path, normalizer={"type": "Sequence", "normalizers": [GROWS_ON_Q] * 5})
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode("a") == [0]
    (tmp_path / "in.txt").write_text("quick")
    argv = ["tokenize", "--input", tmp_path / "in.txt", "--tokenizer", path, "--output", tmp_path / "out"]
    assert main([*map(str, argv), "--workers", "2"]) == exit_codes.REFUSED
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"dtmega tokenize: {path} ended its process: killed by SIGABRT")


def test_a_decoder_that_grows_on_one_token_only_is_one_line(tmp_path: Path):
    # The trial decodes the first thousand ids; the last one has the letter.
    vocabulary = {**{f"a{i}": i for i in range(1200)}, "q": 1200, "<|endoftext|>": 1201, "[UNK]": 1202}
    model = json.loads(Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]")).to_str())["model"]
    path = tokenizer_json(tmp_path, model=model, decoder={"type": "Sequence", "decoders": [GROWS_ON_Q] * 5})
    tokenizer = load_tokenizer(path)
    assert tokenizer.decode([7]) == "a7"
    with pytest.raises(ValueError, match="ended its process: killed by SIGABRT"):
        tokenizer.decode([1200])


def test_the_limits_grow_with_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(confined, "ANSWER_BYTES", 100)
    monkeypatch.setattr(confined, "ANSWER_S", 0.5)
    text = "a " * 100_000
    assert load_tokenizer(tokenizer_json(tmp_path, pre_tokenizer={"type": "Whitespace"})).encode(text) == [0] * 100_000


def test_a_file_that_changes_while_it_is_in_use_is_refused(tmp_path: Path):
    tokenizer = load_tokenizer(tokenizer_json(tmp_path))
    tokenizer_json(tmp_path, version="1.1")
    with pytest.raises(ValueError, match=r"tokenizer\.json: the file has changed while it was in use"):
        tokenizer.encode("a")
    with pytest.raises(ValueError, match=r"tokenizer\.json: the file has changed while it was in use"):
        tokenizer.decode([0])


def test_a_tokenizer_is_tried_out_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tokenizer_json(tmp_path)
    load_tokenizer(path)
    monkeypatch.setattr(Confined, "start", lambda self: pytest.fail("tried out again"))
    load_tokenizer(path)
