"""Claims about launch/tokenize_ray.py, without Ray; `test_ray.py` has Ray itself."""

from __future__ import annotations

import json

import pytest

from dtmega.__main__ import main as dtmega
from tests.launch.fake_ray import launch

SUFFIXES = ("bin", "idx", "meta.json")


@pytest.fixture
def options(tmp_path, monkeypatch) -> list[str]:
    """Options for a text of 30 documents in the working folder, but for --output."""
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"text": "a document " * number}) for number in range(1, 31)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return ["--input", "text.jsonl", "--tokenizer", "stdlib-8k", "--append-eod"]


def test_a_text_in_three_parts_is_byte_identical_to_one_go(tmp_path, monkeypatch, options):
    assert dtmega(["tokenize", *options, "--output", "whole", "--workers", "1"]) == 0
    script = launch("tokenize_ray", monkeypatch)
    assert script.main(["--parts", "3", *options, "--output", "parts"]) == 0
    assert len([*tmp_path.glob("parts.part-*.idx")]) == 3
    for suffix in SUFFIXES:
        assert (tmp_path / f"parts.{suffix}").read_bytes() == (tmp_path / f"whole.{suffix}").read_bytes()


def test_a_part_that_fails_gives_its_exit_code_and_nothing_is_merged(tmp_path, monkeypatch, options):
    script = launch("tokenize_ray", monkeypatch)
    options[options.index("text.jsonl")] = "absent.jsonl"
    assert script.main(["--parts", "3", *options, "--output", "parts"]) == 2
    assert [*tmp_path.glob("parts*")] == []
