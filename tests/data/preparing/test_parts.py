"""`dtmega tokenize --part` and `merge`: a text that was tokenised in parts is the text that was tokenised at once."""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from dtmega.__main__ import main
from dtmega.data.indexed_files.dataset import IndexedDataset
from dtmega.data.preparing import parts, text_files
from dtmega.data.preparing.documents import records_of
from dtmega.data.preparing.input_files import File, find_files
from dtmega.data.preparing.parts import Part, share_of
from dtmega.distributed import exit_codes

SUFFIXES = ("bin", "idx", "meta.json")


@pytest.fixture(autouse=True)
def no_waiting_for_disks(monkeypatch):
    """`test_power_cuts.py` looks after what must be synced; here it would take most of the time."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def share(files: Sequence[File], number: int, of: int, encoding: str = "") -> parts.Share:
    return share_of("out", files, Part(number, of), encoding=encoding, settings={})


# ------------------------------------------------------------------------------------------------------- lines of one

TEXTS = {
    "equal lines, so that cuts fall on first bytes": b"ab\ncd\nef\ngh\n",
    "no line end at the end": b"ab\ncd\nef",
    "characters of several bytes": "äöü\n漢字\n🙂🙂\n".encode(),
    "carriage returns": b"ab\r\ncd\r\n\r\nef\r\n",
    "blank lines at the end": b"ab\ncd\n\n\n",
    "blank lines at the start": b"\n\nab\n",
    "a line longer than several parts": b"a\n" + b"b" * 50 + b"\nc\nd\n",
    "one line": b"abcdefgh",
    "one line end": b"\n",
    "nothing": b"",
}


@pytest.mark.parametrize("chunk", [1, 3, 1 << 20])
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_each_line_is_in_the_part_that_holds_its_first_byte_and_in_no_other(tmp_path, monkeypatch, text, chunk):
    monkeypatch.setattr(parts, "SEARCH_BYTES", chunk)
    monkeypatch.setattr(text_files, "CHUNK_BYTES", chunk)
    path = tmp_path / "a.jsonl"
    path.write_bytes(text)
    files = find_files([str(path)])
    for of in {*range(1, 9), max(1, len(text)), len(text) + 2}:
        expected: list[list[bytes]] = [[] for _ in range(of)]
        first_byte = 0
        for line in text.splitlines(keepends=True) if b"\r" not in text else re.findall(rb"[^\n]*\n|[^\n]+", text):
            owner = next(i for i in range(of) if len(text) * i // of <= first_byte < len(text) * (i + 1) // of)
            expected[owner].append(line)
            first_byte += len(line)
        assert first_byte == len(text)
        for number in range(of):
            batches = list(text_files.read_batches(share(files, number, of).files, ""))
            read = b"".join(batch.data for batch in batches if isinstance(batch.data, bytes))
            assert read == b"".join(expected[number]), (number, of)
            lines = [line for batch in batches for _, line in records_of(batch)]
            assert lines == [line.removesuffix(b"\n") for line in expected[number] if line.strip()], (number, of)


def test_only_a_single_plain_file_of_lines_in_utf8_is_cut_within(tmp_path):
    for name in ("a.jsonl", "b.json", "c.txt", "d.jsonl"):
        (tmp_path / name).write_bytes(b"1\n2\n3\n")
    (tmp_path / "e.jsonl.gz").write_bytes(gzip.compress(b"1\n2\n3\n"))

    def is_cut(*names: str, encoding: str = "", kind: str | None = None) -> bool:
        files = find_files([str(tmp_path / name) for name in names], kind)
        return any(file.first_byte is not None for file in share(files, 1, 3, encoding).files)

    assert [is_cut("a.jsonl"), is_cut("b.json"), is_cut("c.txt", kind="jsonl")] == [True] * 3
    assert [is_cut("c.txt"), is_cut("e.jsonl.gz"), is_cut("a.jsonl", "d.jsonl")] == [False] * 3
    assert not is_cut("a.jsonl", encoding="utf-16")


# -------------------------------------------------------------------------------------------------------- whole files


@pytest.mark.parametrize("of", [1, 2, 3, 7, 40])
def test_each_file_is_in_one_part_in_order_and_no_part_is_larger_than_its_share_and_a_file(tmp_path, of):
    sizes = [*np.random.default_rng(0).integers(0, 100, 25).tolist(), 0, 0]
    for i, size in enumerate(sizes):
        (tmp_path / f"{i:02}.txt").write_bytes(b"a" * size)
    files = find_files([str(tmp_path)])
    shares = [share(files, number, of).files for number in range(of)]
    assert [file for own in shares for file in own] == files
    assert max(sum(file.n_bytes for file in own) for own in shares) <= sum(sizes) / of + max(sizes)


def test_empty_files_are_a_text_too(tmp_path):
    (tmp_path / "a.txt").touch()
    (tmp_path / "b.txt").touch()
    files = find_files([str(tmp_path)])
    assert [list(share(files, number, 2).files) for number in range(2)] == [files, []]


# ------------------------------------------------------------------------------------------------------ to the byte


def records() -> list[bytes]:
    """Lines of JSON of very different lengths; two are malformed, one has no text."""
    lines = [
        json.dumps({"text": "ä漢🙂" * (i % 7) + f" number {i}" * (i**2 % 40)}, ensure_ascii=False) for i in range(60)
    ]
    lines[20], lines[41] = "{", '{"text": 3}'
    return [line.encode() for line in lines]


def one_jsonl(folder: Path) -> list[str]:
    (folder / "big.jsonl").write_bytes(b"\n".join(records()))
    return [f"{folder}/big.jsonl"]


def several_gz(folder: Path) -> list[str]:
    lines = records()
    for i, size in enumerate([5, 1, 30, 9, 15]):
        taken, lines = lines[:size], lines[size:]
        (folder / f"{i}.jsonl.gz").write_bytes(gzip.compress(b"\n".join(taken) + b"\n", mtime=0))
    return [f"{folder}/*.gz"]


def several_parquet(folder: Path) -> list[str]:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    for i in range(4):
        texts = [f"row {i} {j} " * j for j in range(5 * i)]
        pq.write_table(pa.table({"text": pa.array(texts, pa.string())}), folder / f"{i}.parquet")
    return [f"{folder}/*.parquet"]


def several_texts(folder: Path) -> list[str]:
    for i in range(15):
        (folder / f"{i:02}.txt").write_text(f"text {i}. It goes on.\n\n" * i)
    return [str(folder)]


def tokenize(given: list[str], output: Path, *more: str) -> int:
    argv = ["tokenize", "--input", *given, "--tokenizer", "bytes", "--output", str(output), "--workers", "1"]
    return main([*argv, *more])


def contents(prefix: Path) -> list[bytes]:
    return [Path(f"{prefix}.{suffix}").read_bytes() for suffix in SUFFIXES]


FORMS = [
    (one_jsonl, ["--append-eod"]),
    (several_gz, []),
    (several_parquet, ["--append-eod"]),
    (several_texts, ["--split-sentences"]),
    (several_texts, ["--split-documents", "blank-lines"]),
]


@pytest.mark.parametrize(
    ("make", "options", "of"),
    [
        *((*FORMS[0], of) for of in (1, 3, 12)),
        *((*form, 3) for form in FORMS[1:]),
        *(pytest.param(*form, of, marks=pytest.mark.full) for form in FORMS[1:] for of in (1, 12)),
    ],
)
def test_merged_parts_are_the_bytes_of_the_text_tokenised_at_once(tmp_path, make, options, of):
    (tmp_path / "in").mkdir()
    given = make(tmp_path / "in")
    out = tmp_path / "out"
    assert tokenize(given, out / "whole", *options) == exit_codes.DONE
    for number in reversed(range(of)):
        assert tokenize(given, out / "mine", *options, "--part", f"{number}/{of}") == exit_codes.DONE
    assert len(list(out.glob("mine.part-*.idx"))) == of
    assert main(["merge", "--input", f"{out}/mine.part-*", "--output", f"{out}/mine"]) == exit_codes.DONE
    assert contents(out / "mine") == contents(out / "whole")


def test_a_record_has_the_smallest_and_the_largest_id_of_each_part_and_of_all(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "mno"}\n{"text": "bcx"}\n')
    tokenize([f"{tmp_path}/a.jsonl"], tmp_path / "a", "--part", "0/2")
    tokenize([f"{tmp_path}/a.jsonl"], tmp_path / "a", "--part", "1/2")
    main(["merge", "--input", f"{tmp_path}/a.part-*", "--output", f"{tmp_path}/a"])
    made = [json.loads((tmp_path / f"a{part}.meta.json").read_text()) for part in (".part-0-of-2", ".part-1-of-2", "")]
    assert [(record["min_id"], record["max_id"]) for record in made] == [(109, 111), (98, 120), (98, 120)]


def test_a_text_without_documents_is_refused_in_parts_as_at_once(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text("\n\n")
    assert tokenize([f"{tmp_path}/a.jsonl"], tmp_path / "whole") == exit_codes.REFUSED
    for number in range(2):
        assert tokenize([f"{tmp_path}/a.jsonl"], tmp_path / "a", "--part", f"{number}/2") == exit_codes.DONE
    assert main(["merge", "--input", f"{tmp_path}/a.part-*", "--output", f"{tmp_path}/a"]) == exit_codes.REFUSED
    assert "no documents in 2 parts" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------- made, or not to be


@pytest.fixture
def given(tmp_path) -> list[str]:
    (tmp_path / "in").mkdir()
    return one_jsonl(tmp_path / "in")


def test_a_part_that_is_there_is_skipped_and_another_of_its_name_is_refused_unless_it_may_be_replaced(
    tmp_path, given, capsys
):
    prefix = tmp_path / "a.part-1-of-3"
    assert tokenize(given, tmp_path / "a", "--part", "1/3") == exit_codes.DONE
    made, time_ns = contents(prefix), Path(f"{prefix}.idx").stat().st_mtime_ns
    assert capsys.readouterr().out.startswith("part 1 of 3 (")
    assert tokenize(given, tmp_path / "a", "--part", "1/3") == exit_codes.DONE
    assert re.match(rf"part 1 of 3 \(.* bytes\): skipped, because {prefix}\.idx is there", capsys.readouterr().out)
    assert Path(f"{prefix}.idx").stat().st_mtime_ns == time_ns

    assert tokenize(given, tmp_path / "a", "--part", "1/3", "--append-eod") == exit_codes.REFUSED
    assert "made from another input or with other settings" in capsys.readouterr().err
    text = Path(given[0]).read_bytes()
    Path(given[0]).write_bytes(text.replace(b"number 3", b"NUMBER 3"))
    assert tokenize(given, tmp_path / "a", "--part", "1/3") == exit_codes.REFUSED
    assert contents(prefix) == made
    assert tokenize(given, tmp_path / "a", "--part", "1/3", "--overwrite", "--append-eod") == exit_codes.DONE
    assert contents(prefix) != made


def test_a_part_that_was_killed_between_its_renames_is_made_again(tmp_path, given):
    tokenize(given, tmp_path / "a", "--part", "1/3")
    made = contents(tmp_path / "a.part-1-of-3")
    (tmp_path / "a.part-1-of-3.idx").unlink()
    (tmp_path / "a.part-1-of-3.bin").write_bytes(b"??")
    assert tokenize(given, tmp_path / "a", "--part", "1/3") == exit_codes.DONE
    assert contents(tmp_path / "a.part-1-of-3") == made


def test_the_lines_of_a_part_are_counted_from_a_byte_that_is_named(tmp_path, given, capsys):
    text = Path(given[0]).read_bytes()
    tokenize(given, tmp_path / "a", "--part", "1/2")
    path, byte, line = re.findall(
        r"skipped (\S+) from byte (\d+):(\d+): expected a string in", capsys.readouterr().err
    )[0]
    assert path == given[0]
    assert text[int(byte) :].split(b"\n")[int(line) - 1] == b'{"text": 3}'


@pytest.mark.parametrize("part", ["3/3", "-1/3", "1", "a/b", "0/0", "1/2/3", ""])
def test_a_part_is_a_number_from_0_and_the_number_of_parts(tmp_path, given, part, capsys):
    with pytest.raises(SystemExit) as error:
        tokenize(given, tmp_path / "a", f"--part={part}")
    assert error.value.code == exit_codes.REFUSED
    assert f"expected I/N with 0 <= I < N, from 0/12 to 11/12 for 12 parts, got '{part}'" in capsys.readouterr().err


def test_standard_input_has_no_parts(tmp_path, capsys):
    assert tokenize(["-"], tmp_path / "a", "--part", "0/2") == exit_codes.REFUSED
    assert "--part 0/2: expected --input of files, which all processes can read, got -" in capsys.readouterr().err


# -------------------------------------------------------------------------------------------------- which are merged


def test_only_all_parts_of_one_text_are_merged(tmp_path, given, capsys):
    for number in range(3):
        tokenize(given, tmp_path / "a", "--part", f"{number}/3")
    tokenize(given, tmp_path / "four", "--part", "0/4")
    tokenize(given, tmp_path / "closed", "--part", "0/3", "--append-eod")
    tokenize(given, tmp_path / "whole")
    (tmp_path / "other.jsonl").write_text('{"text": "b"}\n')
    tokenize([f"{tmp_path}/other.jsonl"], tmp_path / "other", "--part", "0/3")
    zero, one, two = (f"a.part-{number}-of-3" for number in range(3))
    for names, message in (
        ([zero, two], "expected each part from 0 to 2 once, as .*got 2 parts without part 1 .*--part 1/3"),
        ([two], "got 1 part without part 0"),
        ([one, two, "four.part-0-of-4"], "another text than .*a.part-1-of-3, as .* say: of is 4, not 3;"),
        ([one, two, "closed.part-0-of-3"], "another text .*: settings is '.*', not '"),
        ([one, two, "other.part-0-of-3"], "another text .*: input is '.*', not '"),
        ([zero, one, two, "whole"], "a.part-0-of-3 is a part of a text .*, and .*whole is not"),
        (["whole", one], "a.part-1-of-3 is a part of a text .*, and .*whole is not"),
    ):
        capsys.readouterr()
        argv = ["merge", "--input", *(str(tmp_path / name) for name in names), "--output", f"{tmp_path}/all"]
        assert main(argv) == exit_codes.REFUSED
        assert re.search(message, capsys.readouterr().err), message
        assert list(tmp_path.glob("all*")) == []
    for suffix in SUFFIXES:
        (tmp_path / f"copy.{suffix}").write_bytes((tmp_path / f"{zero}.{suffix}").read_bytes())
    argv = ["merge", "--input", *(f"{tmp_path}/{name}" for name in (zero, one, two, "copy"))]
    assert main([*argv, "--output", f"{tmp_path}/all"]) == exit_codes.REFUSED
    said = capsys.readouterr().err
    assert re.search("once, as .* got 4 parts", said)
    assert "without part" not in said


def test_parts_that_are_named_in_any_order_are_merged_by_their_numbers(tmp_path, given):
    for number in range(3):
        tokenize(given, tmp_path / "a", "--part", f"{number}/3")
    tokenize(given, tmp_path / "whole")
    names = [f"{tmp_path}/a.part-{number}-of-3" for number in (2, 0, 1)]
    assert main(["merge", "--input", *names, "--output", f"{tmp_path}/all"]) == exit_codes.DONE
    assert contents(tmp_path / "all") == contents(tmp_path / "whole")


def test_data_sets_of_other_origin_are_merged_in_the_order_of_their_numbers(tmp_path):
    for i in (0, 2, 10):
        (tmp_path / f"{i}.txt").write_text(str(i))
        tokenize([f"{tmp_path}/{i}.txt"], tmp_path / f"part-{i}")
    assert main(["merge", "--input", f"{tmp_path}/part-*", "--output", f"{tmp_path}/all"]) == exit_codes.DONE
    assert IndexedDataset(tmp_path / "all").tokens.astype(np.uint8).tobytes() == b"0210"
