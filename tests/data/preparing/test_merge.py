"""`dtmega merge`: a text that was tokenised in parts is the text that was tokenised at once."""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtmega.__main__ import main
from dtmega.data.indexed_files.dataset import IndexedDataset
from dtmega.data.indexed_files.pair_files import PairFiles
from dtmega.data.indexed_files.writer import IndexedWriter
from dtmega.distributed import exit_codes

SUFFIXES = ("bin", "idx", "meta.json")


def tokenize(folder: Path, files: list[Path], name: str, *more: str) -> str:
    argv = ["tokenize", "--input", *map(str, files), "--tokenizer", "bytes", "--output", str(folder / name)]
    assert main([*argv, "--workers", "1", *more]) == exit_codes.DONE
    return str(folder / name)


def texts(folder: Path) -> list[Path]:
    files = []
    for i in range(5):
        files.append(folder / f"{i}.jsonl")
        lines = [{"text": f"Text {i}, line {j}. It goes on. And ends."[: 9 * j + 5]} for j in range(i + 1)]
        files[-1].write_text("".join(json.dumps(line) + "\n" for line in lines))
    return files


@pytest.mark.parametrize("form", [["--append-eod"], ["--split-sentences"]])
def test_merged_parts_are_the_bytes_of_the_text_tokenised_at_once(tmp_path, form, capsys):
    files = texts(tmp_path)
    whole = tokenize(tmp_path, files, "whole", *form)
    parts = {"part-0": files[:1], "part-1": files[1:4], "part-2": files[4:]}
    prefixes = [tokenize(tmp_path, of_part, name, *form) for name, of_part in parts.items()]
    capsys.readouterr()
    for i, given in enumerate([prefixes, [f"{tmp_path}/part-*"]]):
        assert main(["merge", "--input", *given, "--output", f"{tmp_path}/merged{i}"]) == exit_codes.DONE
        for suffix in SUFFIXES:
            assert Path(f"{tmp_path}/merged{i}.{suffix}").read_bytes() == Path(f"{whole}.{suffix}").read_bytes()
    n_tokens = IndexedDataset(whole).n_tokens
    assert capsys.readouterr().out.startswith(f"3 parts: 15 documents, {n_tokens:,} tokens: {tmp_path}/merged0.bin")


class Killed(BaseException):
    """The end of a process, as far as its files tell."""


def killed_at(n: int, argv: list[str], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Run a command that ends before its n-th sync or rename, without clearing up. False if it has fewer."""
    events: list[str] = []

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def before(*args: Any) -> Any:
            events.append(function.__name__)
            if len(events) > n:
                raise Killed
            return function(*args)

        return before

    with monkeypatch.context() as dying:
        for name in ("fsync", "replace"):
            dying.setattr(os, name, noted(getattr(os, name)))
        dying.setattr(PairFiles, "discard", lambda self: self._lock.close())
        with contextlib.suppress(Killed):
            assert main(argv) == exit_codes.DONE
    return len(events) > n


@pytest.mark.parametrize("command", ["merge", "tokenize"])
def test_the_same_command_after_a_kill_at_any_sync_or_rename_leaves_the_data_set_alone(tmp_path, command, monkeypatch):
    files = texts(tmp_path)
    whole = tokenize(tmp_path, files, "whole")
    parts = [tokenize(tmp_path, files[:2], "part-0"), tokenize(tmp_path, files[2:], "part-1")]
    given = {"merge": parts, "tokenize": [*map(str, files), "--tokenizer", "bytes", "--workers", "1"]}[command]
    for n in range(20):
        (folder := tmp_path / str(n)).mkdir()
        argv = [command, "--input", *given, "--output", f"{folder}/out"]
        if not killed_at(n, argv, monkeypatch):
            break
        complete = (folder / "out.idx").exists()
        assert main(argv) == (exit_codes.REFUSED if complete else exit_codes.DONE)
        assert sorted(path.name for path in folder.iterdir()) == [f"out.{suffix}" for suffix in SUFFIXES]
        for suffix in SUFFIXES:
            assert (folder / f"out.{suffix}").read_bytes() == Path(f"{whole}.{suffix}").read_bytes()
    assert n > 6


def test_a_bin_that_no_killed_writer_has_left_is_not_deleted(tmp_path, monkeypatch):
    parts = [tokenize(tmp_path, [file], file.stem) for file in texts(tmp_path)[:2]]
    argv = ["merge", "--input", *parts, "--output", f"{tmp_path}/out"]
    assert killed_at(1, argv, monkeypatch)
    (tmp_path / "out.bin").write_bytes(b"another program's")
    assert main(argv) == exit_codes.REFUSED
    assert (tmp_path / "out.bin").read_bytes() == b"another program's"


def write(prefix: Path, documents: list[list[list[int]]], dtype: str = "<u2") -> str:
    with IndexedWriter(prefix, np.dtype(dtype)) as writer:
        for document in documents:
            writer.add([t for s in document for t in s], [len(s) for s in document])
    return str(prefix)


def test_parts_of_either_layout_and_without_a_record_are_merged_in_chunks(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("dtmega.data.preparing.merge.CHUNK", 2)
    monkeypatch.setattr("dtmega.data.preparing.copying.SLICE_BYTES", 5)
    monkeypatch.setattr("dtmega.data.preparing.copying.BUFFER_BYTES", 2)
    one = write(tmp_path / "one", [[[1, 2], [3]], []], "<i4")
    (tmp_path / "two.bin").write_bytes(struct.pack("<3i", 7, 8, 9))
    header = b"TNTIDX\0\0" + struct.pack("<6Q", 1, 4, 4, 2, 2, 3)
    (tmp_path / "two.idx").write_bytes(header + struct.pack("<11q", 0, 1, 2, 0, 1, 3, 1, 2, 0, 1, 2))
    assert main(["merge", "--input", one, str(tmp_path / "two"), "--output", str(tmp_path / "all")]) == exit_codes.DONE
    expected = write(tmp_path / "expected", [[[1, 2], [3]], [], [[7]], [[8, 9]]], "<i4")
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"all.{suffix}").read_bytes() == Path(f"{expected}.{suffix}").read_bytes()
    assert not (tmp_path / "all.meta.json").exists()
    assert "without a record of the tokenizer, as the parts have none" in capsys.readouterr().out


def test_parts_that_do_not_belong_together_are_refused_and_what_was_there_stays(tmp_path, capsys):
    files = texts(tmp_path)
    plain, closed = tokenize(tmp_path, files[:1], "plain"), tokenize(tmp_path, files[:1], "closed", "--append-eod")
    silent = write(tmp_path / "silent", [[[1]]])
    wide = write(tmp_path / "wide", [[[1]]], "<i4")
    there = write(tmp_path / "there", [[[5]]])
    before = Path(f"{there}.idx").read_bytes()
    for parts, message in (
        ([plain, closed], "append_eod is True, not False"),
        ([plain, silent], ": the first has none"),
        ([silent, plain], ": the second has none"),
        ([silent, wide], "expected tokens of uint16"),
        ([wide, silent], "expected tokens of int32"),
        ([silent, silent], f"names {silent} twice"),
        ([silent, there], "is one of the parts"),
        ([f"{tmp_path}/none-*"], "none-*: no "),
        ([f"{tmp_path}/none"], "none.idx: No such file"),
    ):
        capsys.readouterr()
        assert main(["merge", "--input", *parts, "--output", there, "--overwrite"]) == exit_codes.REFUSED
        said = capsys.readouterr().err
        assert message in said, said
        assert said.endswith(f"; nothing was written to {there}\n")
        assert Path(f"{there}.idx").read_bytes() == before
    assert main(["merge", "--input", plain, "--output", there]) == exit_codes.REFUSED
    assert f"{there}.bin is there: expected another --output, or --overwrite" in capsys.readouterr().err
    assert main(["merge", "--input", plain, "--output", there, "--overwrite"]) == exit_codes.DONE


def test_a_range_of_ids_that_an_older_record_lacks_is_unknown_in_the_merged_one(tmp_path):
    parts = [tokenize(tmp_path, [file], f"part-{i}") for i, file in enumerate(texts(tmp_path)[:2])]
    older = json.loads(Path(f"{parts[1]}.meta.json").read_text())
    del older["min_id"], older["max_id"]
    Path(f"{parts[1]}.meta.json").write_text(json.dumps(older))
    assert main(["merge", "--input", *parts, "--output", f"{tmp_path}/all"]) == exit_codes.DONE
    merged = json.loads(Path(f"{tmp_path}/all.meta.json").read_text())
    assert merged.keys() == older.keys()
    assert (merged["documents"], older["documents"]) == (3, 2)
