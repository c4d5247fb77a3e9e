"""Rooms untrusted_json.py and cover.py, and who relies on them: what a file from elsewhere says does no harm."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dtmega.__main__ import main as command
from dtmega.checkpoint import manifest
from dtmega.checkpoint.cover import cover
from dtmega.checkpoint.files import Disk
from dtmega.checkpoint.manifest import Entry, Manifest, StoredChunk
from dtmega.cli.convert import to_checkpoint
from dtmega.config.families.bloom import BloomKeys
from dtmega.data.tokenizers.load import load_tokenizer
from dtmega.data.tokenizers.tokenizer_json import to_json
from dtmega.files import console
from dtmega.files.console import printable
from dtmega.files.untrusted_json import MAX_DEPTH, parse_object, read_object
from dtmega.interop.hf.files import config_json
from dtmega.report.record import raw_lines

CLEAR = "\x1b[2Jall is well"


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "Expecting value"),
        (b"[1]", "expected a JSON object, got list"),
        (b"null", "expected a JSON object, got NoneType"),
        (b'{"a": "\xff"}', "can't decode byte"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "Exceeds the limit"),
        (nested(MAX_DEPTH + 1).encode(), "expected JSON of at most 64 levels"),
        (nested(200_000).encode(), "expected JSON of at most 64 levels"),
        (b'{"a": ' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}", "expected JSON of at most 64 levels"),
        (b'{"a": "' + b"x" * 1000 + b'"}', "expected at most 1,000 bytes of JSON"),
    ],
)
def test_a_file_that_is_no_json_object_within_bounds_is_one_message_with_its_name(tmp_path: Path, content, message):
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"^cannot read .*config\.json: ") as refused:
        read_object(file, max_bytes=1000 if message.endswith("bytes of JSON") else 10**9)
    assert message in str(refused.value)


def test_a_file_of_the_largest_size_is_read(tmp_path: Path):
    file = tmp_path / "config.json"
    file.write_bytes(b'{"a": "' + b"x" * 1000 + b'"}')
    assert read_object(file, max_bytes=1009)["a"] == "x" * 1000
    with pytest.raises(ValueError, match="expected at most 1,008 bytes"):
        read_object(file, max_bytes=1008)


def test_a_file_that_no_program_writes_as_json_is_refused_by_its_size_alone(tmp_path: Path):
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(64 * 2**20 + 1)
    with pytest.raises(ValueError, match="expected at most 67,108,864 bytes of JSON"):
        read_object(tmp_path / "config.json")


def test_an_object_of_the_deepest_nesting_that_is_allowed_is_read():
    assert parse_object(nested(MAX_DEPTH).encode(), "x") == json.loads(nested(MAX_DEPTH))


# Each reader of a stranger's folder, beside the file that it opens.
READERS: dict[str, Callable[[Path], object]] = {
    "config.json": config_json.read_plain,
    "model.safetensors.index.json": lambda folder: read_object(folder / "model.safetensors.index.json"),
    "tokenizer.json": lambda folder: load_tokenizer(str(folder / "tokenizer.json")),
    "vocab.txt": lambda folder: load_tokenizer(f"bert:{folder / 'vocab.txt'}"),
    "manifest.json": lambda folder: Disk(str(folder.parent)).open(folder.name, "manifest.json").__enter__(),
    "metrics.jsonl": lambda folder: list(raw_lines(folder / "metrics.jsonl")),
}


@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize("name", READERS)
def test_what_is_no_regular_file_is_not_waited_for(tmp_path: Path, name: str, kind: str):
    path = tmp_path / name
    os.mkfifo(path) if kind == "pipe" else os.symlink("/dev/zero", path)
    # Opening a pipe would wait for ever; the timer ends such a wait.
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail(f"waited for {path}"))
    signal.alarm(20)
    try:
        with pytest.raises((ValueError, OSError), match=r"expected a regular file|symbolic links"):
            READERS[name](tmp_path)
    finally:
        signal.alarm(0)


def test_what_steers_a_terminal_or_hides_is_written_out_and_letters_stay():
    assert printable("é漢 \x1b[2J\r\n\u202e\ud800") == "é漢 \\x1b[2J\\r\\n\\u202e\\ud800"
    assert printable("a\nb\tc", keep="\n") == "a\nb\\tc"


def test_a_message_is_cut_in_its_middle_and_its_lines_stay(capsys):
    text = "begin " + "x" * 6000 + " end"
    console.say(f"{text}\nshort\x1b[2J")
    long, short = capsys.readouterr().err.splitlines()
    assert re.fullmatch(rf"begin x+ \.\.\. \({len(text) - 2000:,} characters\) \.\.\. x+ end", long)
    assert short == "short\\x1b[2J"
    assert console.quoted("y" * 2000) == "y" * 2000


@pytest.mark.parametrize("said", ["[]", '{"content": []}', "5", nested(100_000)])
def test_an_eos_token_that_is_no_text_counts_as_none(tmp_path: Path, said: str):
    (tmp_path / "tokenizer.json").write_text(to_json("bytes"))
    expected = load_tokenizer(str(tmp_path / "tokenizer.json")).eod_id
    (tmp_path / "tokenizer_config.json").write_text(f'{{"eos_token": {said}}}')
    assert load_tokenizer(str(tmp_path / "tokenizer.json")).eod_id == expected


@pytest.mark.parametrize("content", [nested(100_000), "[]", '{"model": {"type": []}}', '{"added_tokens": 5}'])
def test_a_tokenizer_json_that_is_none_is_one_message(tmp_path: Path, content: str):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"expected a Hugging Face tokenizer\.json"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))


# ------------------------------------------------------------------------------------------------------- checkpoints


class Memory:
    """One tensor as a `Source`."""

    def __init__(self, name: str) -> None:
        self.tensors = {name: (torch.float32, (2,))}

    def read(self, name: str, index: Any = None) -> torch.Tensor:
        return torch.zeros(2)


def forge(folder: Path, edit: dict[str, Any]) -> None:
    """Change the state of a checkpoint; its digest is right again."""
    file = folder / manifest.NAME
    content = json.loads(file.read_bytes())["content"]
    content["state"] |= edit
    body = b'{"content":' + json.dumps(content).encode()
    file.write_bytes(body + b',"xxh3":"' + manifest.digest(body).encode() + b'"}\n')


def test_inspect_prints_no_character_of_a_checkpoint_that_steers_the_terminal(tmp_path: Path, capsys):
    for name in ("one", "two"):
        to_checkpoint.write(str(tmp_path / name), Memory("norm.weight"), BloomKeys())
    hidden = {"versions": {CLEAR: CLEAR}, "identity": {"x\nfiles": CLEAR}, "config": {"model": {"name": CLEAR}}}
    forge(tmp_path / "one", hidden)
    assert command(["inspect", str(tmp_path / "one")]) == 0
    assert command(["inspect", str(tmp_path / "one"), str(tmp_path / "two")]) == 1
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\\x1b[2Jall is well" in out
    assert len([line for line in out.splitlines() if line.startswith("files ")]) == 1


def test_a_tensor_whose_name_steers_the_terminal_is_damage_and_the_message_says_it_in_plain_characters(
    tmp_path: Path, capsys
):
    to_checkpoint.write(str(tmp_path / "one"), Memory(CLEAR), BloomKeys())
    assert command(["inspect", str(tmp_path / "one")]) != 0
    err = capsys.readouterr().err
    assert "expected a printable name, got 'model/\\x1b[2Jall is well'" in err
    assert "\x1b" not in err


def test_what_a_refusal_repeats_of_the_command_line_does_not_steer_the_terminal(capsys):
    assert command(["inspect", f"nowhere{CLEAR}"]) == 2
    assert "\x1b" not in capsys.readouterr().err


def test_boxes_cover_a_tensor_once_exactly_if_a_count_of_each_element_says_so():
    random.seed(0)
    shape, seen = (3, 4, 2), set()
    spans = [[(a, b) for a, b in itertools.combinations(range(n + 1), 2)] for n in shape]
    boxes = list(itertools.product(*spans))
    for _ in range(4000):
        # Often a true cover: halves of halves; then one box is moved, doubled or taken away now and then.
        chosen = halved(tuple((0, n) for n in shape))
        spoil = random.randrange(4)
        if spoil == 1:
            chosen[random.randrange(len(chosen))] = random.choice(boxes)
        elif spoil == 2:
            chosen.append(random.choice(boxes))
        elif spoil == 3:
            chosen.pop()
        count = torch.zeros(shape)
        for box in chosen:
            count[tuple(slice(*span) for span in box)] += 1
        truth = bool((count == 1).all())
        as_sizes = [(tuple(a for a, _ in box), tuple(b - a for a, b in box)) for box in chosen]
        assert cover(shape, as_sizes) == truth, chosen
        seen.add(truth)
    assert seen == {True, False}


def halved(box: tuple[tuple[int, int], ...]) -> list[tuple[tuple[int, int], ...]]:
    dim = random.randrange(len(box))
    low, high = box[dim]
    if high - low < 2 or random.random() < 0.2:
        return [box]
    middle = random.randrange(low + 1, high)
    parts = [(*box[:dim], span, *box[dim + 1 :]) for span in ((low, middle), (middle, high))]
    return [small for part in parts for small in halved(part)]


def test_the_work_for_a_manifest_grows_as_its_chunks_do():
    def lines(n: int) -> int:
        """Executed to check a tensor of n columns, a chunk each."""
        chunks = tuple(StoredChunk((0, i), (2, 1), "data-00000.bin", 8 * i, ("",)) for i in range(n))
        entry = Entry(torch.float32, (2, n), chunks)
        checked = Manifest(0, {}, {"data-00000.bin": 8 * n}, {"x": entry}, 8)
        count = 0

        def trace(frame: Any, event: str, arg: Any) -> Any:
            nonlocal count
            count += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            manifest._check_places(checked)
        finally:
            sys.settrace(before)
        return count

    assert lines(400) < 5 * lines(100)
