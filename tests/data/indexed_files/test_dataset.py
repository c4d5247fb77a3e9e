"""Room dataset.py, against bytes built by hand from megatron-core's layout and a reader written from it."""

import os
import pickle
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dtmega.data import cache_dir
from dtmega.data.indexed_files import dataset as indexed
from dtmega.data.indexed_files import token_ids
from dtmega.data.indexed_files.dataset import IndexedDataset, token_dtype
from dtmega.data.indexed_files.token_ids import check_token_ids
from dtmega.data.indexed_files.writer import IndexedWriter

SEQUENCES = [[5, 7, 2], [], [65499], [1, 2, 3, 4]]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def idx_bytes(sizes, itemsize, code, documents, magic=b"MMIDIDX\0\0", version=1):
    """The .idx of sequences of these sizes: the layout, field by field."""
    pointers = [sum(sizes[:i]) * itemsize for i in range(len(sizes))]
    return (
        magic
        + struct.pack("<QBQQ", version, code, len(sizes), len(documents))
        + struct.pack(f"<{len(sizes)}i", *sizes)
        + struct.pack(f"<{len(sizes)}q", *pointers)
        + struct.pack(f"<{len(documents)}q", *documents)
    )


def write_by_hand(prefix, sequences, fmt, code, documents):
    tokens = [t for s in sequences for t in s]
    Path(f"{prefix}.bin").write_bytes(struct.pack(f"<{len(tokens)}{fmt}", *tokens))
    Path(f"{prefix}.idx").write_bytes(
        idx_bytes([len(s) for s in sequences], struct.calcsize(f"<{fmt}"), code, documents)
    )


def read_like_megatron_core(prefix):
    """The read path of megatron-core's `_IndexReader` and `_MMapBinReader`, without its classes."""
    dtypes = {
        1: np.uint8,
        2: np.int8,
        3: np.int16,
        4: np.int32,
        5: np.int64,
        6: np.float64,
        7: np.float32,
        8: np.uint16,
    }
    with open(f"{prefix}.idx", "rb") as stream:
        assert stream.read(9) == b"MMIDIDX\x00\x00"
        assert struct.unpack("<Q", stream.read(8)) == (1,)
        (code,) = struct.unpack("<B", stream.read(1))
        (n,) = struct.unpack("<Q", stream.read(8))
        (n_doc,) = struct.unpack("<Q", stream.read(8))
        offset = stream.tell()
    index = Path(f"{prefix}.idx").read_bytes()
    lengths = np.frombuffer(index, np.int32, n, offset)
    pointers = np.frombuffer(index, np.int64, n, offset + lengths.nbytes)
    documents = np.frombuffer(index, np.int64, n_doc, offset + lengths.nbytes + pointers.nbytes)
    data = Path(f"{prefix}.bin").read_bytes()
    sequences = [np.frombuffer(data, dtypes[code], m, p).tolist() for p, m in zip(pointers, lengths, strict=True)]
    return sequences, documents.tolist()


def write(prefix, sequences, dtype, about=""):
    with IndexedWriter(prefix, np.dtype(dtype)) as writer:
        writer.about = about
        for sequence in sequences:
            writer.add(sequence)
    return IndexedDataset(prefix)


# ------------------------------------------------------------------------------------------------------------ layout


@pytest.mark.parametrize(("dtype", "fmt", "code"), [("uint16", "H", 8), ("int32", "i", 4), ("uint8", "B", 1)])
def test_what_the_writer_writes_is_the_layout_to_the_byte(tmp_path, dtype, fmt, code):
    sequences = [[t % 256 for t in s] for s in SEQUENCES]
    write(tmp_path / "ours", sequences, dtype)
    write_by_hand(tmp_path / "hand", sequences, fmt, code, range(len(sequences) + 1))
    assert (tmp_path / "ours.bin").read_bytes() == (tmp_path / "hand.bin").read_bytes()
    assert (tmp_path / "ours.idx").read_bytes() == (tmp_path / "hand.idx").read_bytes()


def test_a_document_of_several_sequences_is_one_entry_of_the_index_to_the_byte(tmp_path):
    with IndexedWriter(tmp_path / "ours", np.dtype("uint16")) as writer:
        writer.add([5, 7, 2, 9], sizes=[1, 3])
        writer.add([8])
        writer.add([6, 6], sizes=[1, 1])
        assert (len(writer), writer.n_documents) == (5, 3)
    write_by_hand(tmp_path / "hand", [[5], [7, 2, 9], [8], [6], [6]], "H", 8, [0, 2, 3, 5])
    assert (tmp_path / "ours.bin").read_bytes() == (tmp_path / "hand.bin").read_bytes()
    assert (tmp_path / "ours.idx").read_bytes() == (tmp_path / "hand.idx").read_bytes()


def test_megatron_core_reads_what_the_writer_writes(tmp_path):
    write(tmp_path / "ours", SEQUENCES, "uint16")
    assert read_like_megatron_core(tmp_path / "ours") == (SEQUENCES, [0, 1, 2, 3, 4])


@pytest.mark.parametrize(
    ("code", "fmt"), [(1, "B"), (2, "b"), (3, "h"), (4, "i"), (5, "q"), (6, "d"), (7, "f"), (8, "H")]
)
def test_every_dtype_code_is_read(tmp_path, code, fmt):
    sequences = [[1, 2], [100]]
    write_by_hand(tmp_path / "hand", sequences, fmt, code, [0, 2])
    dataset = IndexedDataset(tmp_path / "hand")
    assert dataset.dtype.itemsize == struct.calcsize(f"<{fmt}")
    assert [dataset.get(i).tolist() for i in range(2)] == sequences


def test_a_document_may_hold_several_sequences(tmp_path):
    write_by_hand(tmp_path / "hand", SEQUENCES, "i", 4, [0, 3, 3, 4])
    dataset = IndexedDataset(tmp_path / "hand")
    assert dataset.document_index.tolist() == [0, 3, 3, 4]
    assert dataset.sizes.tolist() == [3, 0, 1, 4]
    assert dataset.pointers.tolist() == [0, 12, 12, 16]
    assert dataset.n_tokens == 8


def test_an_empty_data_set_opens(tmp_path):
    dataset = write(tmp_path / "empty", [], "uint16")
    assert (tmp_path / "empty.idx").read_bytes() == idx_bytes([], 2, 8, [0])
    assert (len(dataset), dataset.n_tokens) == (0, 0)


def test_the_dtype_is_megatrons_choice():
    assert token_dtype(65499) == np.uint16
    assert token_dtype(65500) == np.int32


# ----------------------------------------------------------------------------------------------------------- reading


def test_get_cuts_a_range_out_of_a_sequence(tmp_path):
    dataset = write(tmp_path / "a", SEQUENCES, "uint16")
    assert dataset.get(3, offset=1, length=2).tolist() == [2, 3]
    assert dataset.get(3, offset=2).tolist() == [3, 4]
    assert dataset.get(3, offset=4).tolist() == []


@pytest.mark.parametrize("where", [(4,), (-1,), (0, 2, 2), (0, 4), (0, -1), (0, 1, -1)])
def test_get_refuses_what_is_outside(tmp_path, where):
    with pytest.raises(IndexError, match="sequence"):
        write(tmp_path / "a", SEQUENCES, "uint16").get(*where)


def test_get_is_a_read_only_view_of_the_file(tmp_path):
    view = write(tmp_path / "a", SEQUENCES, "uint16").get(0)
    assert not view.flags.owndata
    assert not view.flags.writeable


def test_a_pickle_carries_the_prefix_not_the_tokens(tmp_path):
    dataset = write(tmp_path / "a", [[1] * 10_000], "uint16")
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 1000
    assert pickle.loads(pickled).get(0).sum() == 10_000


def test_another_process_opens_the_pickle(tmp_path):
    (tmp_path / "pickle").write_bytes(pickle.dumps(write(tmp_path / "a", SEQUENCES, "uint16")))
    code = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb')).get(3).tolist())"
    out = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "pickle")],
        env={**os.environ, "PYTHONPATH": str(Path(indexed.__file__).parents[3])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stdout == "[1, 2, 3, 4]\n"


def idx(**changes):
    return idx_bytes(**({"sizes": [2, 1], "itemsize": 2, "code": 8, "documents": [0, 1, 2]} | changes))


@pytest.mark.parametrize(
    ("damaged", "content", "message"),
    [
        ("idx", None, "No such file"),
        ("bin", None, "No such file"),
        ("idx", b"", "0 bytes"),
        ("idx", idx()[:20], "20 bytes"),
        ("idx", idx(magic=b"NOTANIDX\0"), "NOTANIDX"),
        ("idx", idx(version=2), "version 1, got 2"),
        ("idx", idx(code=9), r"dtype code .* got 9"),
        ("idx", idx(code=0), r"dtype code .* got 0"),
        ("idx", idx()[:-8], r"expected 82 bytes .* got 74"),
        ("idx", idx() + b"\0\0", r"expected 82 bytes .* got 84"),
        ("idx", idx(sizes=[-1, 4]), "got -1 for sequence 0"),
        ("idx", idx(itemsize=4), r"sequence 1 at byte 4, .* got 8"),
        ("idx", idx(documents=[1, 2, 2]), "document index from 0 to 2"),
        ("idx", idx(documents=[0, 1, 1]), "document index from 0 to 2"),
        ("idx", idx(documents=[]), "document index from 0 to 2"),
        ("idx", idx(documents=[0, 2, 1, 2]), "rises, got 2, 1 at entry 1"),
        ("bin", b"\1\0\2\0\3", r"expected 6 bytes .* got 5"),
        ("bin", b"\1\0\2\0\3\0\4\0", r"expected 6 bytes .* got 8"),
        ("bin", b"", r"expected 6 bytes .* got 0"),
    ],
)
def test_a_damaged_pair_is_refused_with_the_name_of_the_file(tmp_path, damaged, content, message):
    write(tmp_path / "a", [[1, 2], [3]], "uint16")
    path = tmp_path / f"a.{damaged}"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        IndexedDataset(tmp_path / "a")
    assert str(error.value).startswith(str(path))


def legacy_idx(sizes, code, token_bytes, documents, n_sizes=None, version=1, end=None):
    """The .idx of Megatron's lazy and cached implementations: the layout, field by field."""
    n = len(sizes)
    offsets = [sum(sizes[:i]) for i in range(n + 1)]
    if end is not None:
        offsets[-1] = end
    return (
        b"TNTIDX\0\0"
        + struct.pack("<QQQ", version, code, token_bytes)
        + struct.pack("<QQQ", n, n if n_sizes is None else n_sizes, len(documents))
        + struct.pack(f"<{n + 1}q", *range(n + 1))
        + struct.pack(f"<{n + 1}q", *offsets)
        + struct.pack(f"<{n}q", *sizes)
        + struct.pack(f"<{len(documents)}q", *documents)
    )


@pytest.mark.parametrize(
    ("code", "fmt"), [(1, "B"), (2, "b"), (3, "h"), (4, "i"), (5, "q"), (6, "d"), (7, "d"), (8, "H")]
)
def test_a_legacy_pair_reads_like_the_other_layout(tmp_path, code, fmt):
    sequences = [[5, 7, 2], [], [99], [1, 2, 3, 4]]
    tokens = [t for s in sequences for t in s]
    (tmp_path / "a.bin").write_bytes(struct.pack(f"<{len(tokens)}{fmt}", *tokens))
    (tmp_path / "a.idx").write_bytes(legacy_idx([3, 0, 1, 4], code, struct.calcsize(f"<{fmt}"), [0, 2, 4]))
    dataset = pickle.loads(pickle.dumps(IndexedDataset(tmp_path / "a")))
    assert [dataset.get(i).tolist() for i in range(4)] == sequences
    assert dataset.get(3, 1, 2).tolist() == [2, 3]
    assert dataset.dtype == np.dtype(f"<{fmt}")
    assert dataset.sizes.tolist() == [3, 0, 1, 4]
    assert dataset.document_index.tolist() == [0, 2, 4]
    assert dataset.first_token(np.arange(3)).tolist() == [0, 3, 8]
    assert [dataset.sequence_of(i) for i in range(8)] == [0, 0, 0, 2, 3, 3, 3, 3]


def test_an_empty_legacy_data_set_opens(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"")
    (tmp_path / "a.idx").write_bytes(legacy_idx([], 4, 4, [0]))
    assert IndexedDataset(tmp_path / "a").n_tokens == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (legacy_idx([2, 1], 6, 4, [0, 2]), r"tokens of 8 bytes, as dtype code 6 says \(float64\), got 4"),
        (legacy_idx([2, 1], 4, 2, [0, 2]), r"tokens of 4 bytes, as dtype code 4 says \(int32\), got 2"),
        (legacy_idx([2, 1], 8, 4, [0, 2]), r"tokens of 2 bytes, as dtype code 8 says \(uint16\), got 4"),
        (legacy_idx([2, 1], 9, 4, [0, 2]), r"dtype code .* got 9"),
        (legacy_idx([2, 1], 4, 4, [0, 2], version=2), "version 1, got 2"),
        (legacy_idx([2, 1], 4, 4, [0, 2], n_sizes=1)[:-8], "one size for each of 2 sequences, .* got 1"),
        (legacy_idx([2, 1], 4, 4, [0, 2], end=4), "last sequence to end at token 3, got 4"),
        (legacy_idx([-1, 4], 4, 4, [0, 2]), "got -1 for sequence 0"),
        (legacy_idx([2, 1], 4, 4, [0, 1]), "document index from 0 to 2"),
        (legacy_idx([2, 1], 4, 4, [0, 2])[:-8], r"expected 136 bytes .* got 128 \(files of fairseq"),
        (legacy_idx([2, 1], 4, 4, [0, 2])[:50], "header of 56 bytes, got 50"),
    ],
)
def test_a_legacy_index_that_contradicts_itself_is_refused(tmp_path, content, message):
    (tmp_path / "a.bin").write_bytes(struct.pack("<3i", 1, 2, 3))
    (tmp_path / "a.idx").write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        IndexedDataset(tmp_path / "a")
    assert str(error.value).startswith(f"{tmp_path / 'a'}.idx")


def test_a_legacy_sequence_at_another_token_is_refused(tmp_path):
    content = bytearray(legacy_idx([2, 1, 1], 4, 4, [0, 3]))
    struct.pack_into("<q", content, 56 + 8 * 4 + 8, 1)  # where sequence 1 starts, 2 by right
    (tmp_path / "a.bin").write_bytes(struct.pack("<4i", 1, 2, 3, 4))
    (tmp_path / "a.idx").write_bytes(content)
    with pytest.raises(ValueError, match=r"sequence 1 at token 2, .* got 1"):
        IndexedDataset(tmp_path / "a")


def test_sequences_are_checked_beyond_the_first_chunk(tmp_path, monkeypatch):
    monkeypatch.setattr(indexed, "CHUNK", 2)
    write(tmp_path / "a", SEQUENCES, "uint16")
    content = bytearray((tmp_path / "a.idx").read_bytes())
    struct.pack_into("<q", content, 34 + 4 * 4 + 8 * 3, 10)  # the last of four pointers, 8 by right
    (tmp_path / "a.idx").write_bytes(content)
    with pytest.raises(ValueError, match=r"sequence 3 at byte 8, .* got 10"):
        IndexedDataset(tmp_path / "a")


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
def test_a_size_below_0_and_a_document_index_that_falls_are_found_in_any_chunk(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(indexed, "CHUNK", chunk)
    (tmp_path / "a.bin").write_bytes(b"")
    for i in range(5):
        sizes = [0] * 5
        sizes[i] = -1
        (tmp_path / "a.idx").write_bytes(idx_bytes(sizes, 2, 8, range(6)))
        with pytest.raises(ValueError, match=f"sizes >= 0, got -1 for sequence {i}"):
            IndexedDataset(tmp_path / "a")
    for d in range(1, 5):
        documents = [0, 0, 0, 0, 0, 5]
        documents[d] = 1 if d < 4 else 6
        (tmp_path / "a.idx").write_bytes(idx_bytes([0] * 5, 2, 8, documents))
        with pytest.raises(ValueError, match=f"rises, got {documents[d]}, {documents[d + 1]} at entry {d}"):
            IndexedDataset(tmp_path / "a")


# ----------------------------------------------------------------------------------------------------------- writing


INTEGERS = {
    "uint8": (0, 255),
    "int8": (-128, 127),
    "int16": (-(2**15), 2**15 - 1),
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1),
    "uint16": (0, 65535),
}


@pytest.mark.parametrize("dtype", INTEGERS)
def test_the_least_and_the_largest_id_of_a_dtype_are_written_and_what_is_beyond_is_refused(tmp_path, dtype):
    least, largest = INTEGERS[dtype]
    assert write(tmp_path / "a", [[least, largest], []], dtype).tokens.tolist() == [least, largest]
    for beyond in ([least - 1], [0, largest + 1]):
        with pytest.raises(ValueError, match=rf"expected ids in \[{least}, {largest}\]|fewer than 2\*\*31 integers"):
            write(tmp_path / "a", [beyond], dtype)


def test_a_sequence_of_2_to_the_31_tokens_is_refused(tmp_path):
    endless = np.broadcast_to(np.uint8(1), (2**31,))  # of one byte
    with pytest.raises(ValueError, match=r"expected fewer than 2\*\*31 integers, got uint8 \[2147483648\]"):
        write(tmp_path / "a", [endless], "uint8")


@pytest.mark.parametrize(
    ("named", "meant"),
    [
        ("a.bin", "[data] path is the PREFIX of PREFIX.bin and PREFIX.idx: a)"),
        ("a,b", """several prefixes are a list, [data] path = ["a", "b"], or --data.path '["a", "b"]'"""),
        ("[a, b]", """--data.path '["a", "b"]'"""),
        ("alone", "alone.bin is there, but useless without its .idx; dtmega tokenize writes both"),
        ("none", "[data] path is the PREFIX of PREFIX.bin and PREFIX.idx, as dtmega tokenize writes them"),
        ("linked", "linked.idx: No such file or directory (it is a link to blobs/0, which is not there)"),
        ("pointer", "pointer.idx is a pointer of Git LFS, not the file: run `git lfs pull`"),
        (
            "junk",
            "this is no index of token files, or it was cut off; make the pair again (dtmega tokenize --overwrite)",
        ),
    ],
)
def test_a_prefix_that_cannot_be_opened_is_refused_with_what_to_write_or_do(tmp_path, monkeypatch, named, meant):
    monkeypatch.chdir(tmp_path)
    for file in ("alone.bin", "linked.bin", "pointer.bin", "junk.bin"):
        Path(file).write_bytes(b"\0\0")
    Path("linked.idx").symlink_to("blobs/0")
    Path("pointer.idx").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n")
    Path("junk.idx").write_bytes(bytes(100))
    with pytest.raises(ValueError, match=re.escape(meant)):
        IndexedDataset(named)


def test_places_beyond_4_gib_are_written_and_read(tmp_path):
    sizes = [2**31 - 1] * 3 + [2]
    with IndexedWriter(tmp_path / "a", np.dtype("uint8")) as writer:
        writer._sizes.extend(sizes)  # as if they had been added
        writer._ends.extend(range(1, 5))
    assert (tmp_path / "a.idx").read_bytes() == idx_bytes(sizes, 1, 1, range(5))
    with open(tmp_path / "a.bin", "wb") as file:  # which takes no room
        file.seek(sum(sizes) - 1)
        file.write(b"\7")
    dataset = IndexedDataset(tmp_path / "a")
    assert dataset.get(3).tolist() == [0, 7]
    assert dataset.first_token(np.arange(5)).tolist() == [0, 2**31 - 1, 2**32 - 2, 3 * 2**31 - 3, sum(sizes)]


@pytest.mark.parametrize("tokens", [[1.5], [[1, 2]]])
def test_only_a_row_of_integers_is_a_sequence(tmp_path, tokens):
    with pytest.raises(ValueError, match="integers"):
        write(tmp_path / "a", [tokens], "uint16")


@pytest.mark.parametrize("dtype", ["float32", "uint32"])
def test_a_dtype_megatron_has_no_integer_code_for_is_refused(tmp_path, dtype):
    with pytest.raises(ValueError, match=f"got {dtype}"):
        IndexedWriter(tmp_path / "a", np.dtype(dtype))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_leaves_the_pair_of_before_and_nothing_else(tmp_path, error):
    write(tmp_path / "a", [[1], [2]], "uint16")

    def sequences():
        yield [3]
        raise error

    with pytest.raises(error):
        write(tmp_path / "a", sequences(), "uint16")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.bin", "a.idx"]
    assert IndexedDataset(tmp_path / "a").tokens.tolist() == [1, 2]


def test_nothing_stands_under_the_final_name_while_writing(tmp_path):
    prefix = tmp_path / "new" / "folder" / "a"
    with IndexedWriter(prefix, np.dtype("uint16")) as writer:
        writer.add([1])
        assert [path.suffix for path in prefix.parent.iterdir()] == [".tmp"] * 2
    assert sorted(path.name for path in prefix.parent.iterdir()) == ["a.bin", "a.idx"]


@pytest.mark.parametrize("survived", [0, 1, 2])
def test_a_crash_between_the_renames_leaves_no_pair_that_opens(tmp_path, monkeypatch, survived):
    write(tmp_path / "a", [[1], [2]], "uint16", about="old")
    replace, calls = os.replace, []

    def crash(source, target):
        calls.append(target)
        if len(calls) > survived:
            raise SystemExit
        replace(source, target)

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(SystemExit):
        write(tmp_path / "a", [[3], [4]], "uint16", about="new")
    assert len(calls) == survived + 1
    with pytest.raises(ValueError, match=r"a\.idx: No such file"):
        IndexedDataset(tmp_path / "a")


def test_what_is_said_of_a_text_goes_with_it(tmp_path):
    write(tmp_path / "a", [[1], [2]], "uint16", about="first")
    assert (tmp_path / "a.meta.json").read_text() == "first"
    write(tmp_path / "a", [[3], [4]], "uint16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]


def test_a_reader_keeps_the_pair_it_opened_while_another_replaces_it(tmp_path):
    before = write(tmp_path / "a", [[1], [2]], "uint16")
    write(tmp_path / "a", [[3], [4], [5]], "uint16")
    assert before.tokens.tolist() == [1, 2]


def test_the_files_have_the_permissions_of_any_new_file(tmp_path):
    write(tmp_path / "a", [[1]], "uint16")
    (tmp_path / "plain").touch()
    assert (
        (tmp_path / "a.bin").stat().st_mode
        == (tmp_path / "a.idx").stat().st_mode
        == (tmp_path / "plain").stat().st_mode
    )


# --------------------------------------------------------------------------------------------------------- token ids


def test_ids_within_the_vocabulary_pass(tmp_path):
    check_token_ids(write(tmp_path / "a", SEQUENCES, "uint16"), 65500)


def test_a_data_set_without_tokens_has_no_id_outside(tmp_path):
    check_token_ids(write(tmp_path / "a", [[], []], "uint16"), 1)


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
def test_the_first_id_outside_is_named_with_its_sequence(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(token_ids, "CHUNK", chunk)
    dataset = write(tmp_path / "a", [[5, 6], [], [7, 9, 1], [12]], "uint16")
    with pytest.raises(ValueError, match=r"a\.bin: expected ids in \[0, 9\), got 9 in sequence 2 \(all ids: 1 to 12\)"):
        check_token_ids(dataset, 9)


def test_a_negative_id_is_outside(tmp_path):
    with pytest.raises(ValueError, match="got -3 in sequence 1"):
        check_token_ids(write(tmp_path / "a", [[5], [-3]], "int32"), 9)


def test_floats_are_no_ids(tmp_path):
    write_by_hand(tmp_path / "a", [[1]], "f", 7, [0, 1])
    with pytest.raises(ValueError, match="expected token ids, got float32"):
        check_token_ids(IndexedDataset(tmp_path / "a"), 9)


@pytest.mark.parametrize(("ids", "dtype", "low", "high"), [([3, 9], "uint16", 3, 9), ([-1, 0], "int32", -1, 0)])
def test_ids_from_0_to_the_vocabularys_last_pass_and_no_others_at_first_sight_and_from_memory(
    tmp_path, ids, dtype, low, high
):
    dataset = write(tmp_path / "a", [ids], dtype)
    for _ in range(2):
        for vocab_size in (high, high + 1):
            if low >= 0 and high < vocab_size:
                check_token_ids(dataset, vocab_size)
            else:
                with pytest.raises(ValueError, match=rf"\(all ids: {low} to {high}\)"):
                    check_token_ids(dataset, vocab_size)


def test_the_file_is_scanned_once(tmp_path):
    dataset = write(tmp_path / "a", [[5]], "uint16")
    check_token_ids(dataset, 9)
    dataset.tokens = np.array([100])  # a second scan would see this
    check_token_ids(dataset, 9)


@pytest.mark.parametrize(
    ("sequences", "dtype", "mtime_ns"),
    [
        ([[5, 10]], "uint16", 1),
        ([[5, 5, 10]], "uint16", 0),
        ([[5 + 2**16 * 10]], "int32", 0),  # the same bytes as 5, 10
    ],
)
def test_a_file_of_another_time_size_or_dtype_is_scanned_again(tmp_path, sequences, dtype, mtime_ns):
    before = write(tmp_path / "a", [[5, 8]], "uint16")
    os.utime(tmp_path / "a.bin", ns=(0, 0))
    check_token_ids(before, 9)
    changed = write(tmp_path / "a", sequences, dtype)
    os.utime(tmp_path / "a.bin", ns=(0, mtime_ns))
    with pytest.raises(ValueError, match="expected ids in"):
        check_token_ids(changed, 9)


def test_a_damaged_memory_of_the_scan_is_made_anew(tmp_path):
    dataset = write(tmp_path / "a", [[5]], "uint16")
    check_token_ids(dataset, 9)
    (memory,) = cache_dir().glob("token-range-*.json")
    memory.write_text("{}")
    check_token_ids(dataset, 9)
    assert '"high": 5' in memory.read_text()


# ------------------------------------------------------------------------------------------------------------- cache


def test_the_cache_directory_follows_xdg(tmp_path):
    assert cache_dir() == tmp_path / "cache" / "dtmega"


@pytest.mark.parametrize("xdg", ["", "relative/path"])
def test_the_cache_directory_is_in_the_home_without_xdg(tmp_path, monkeypatch, xdg):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", xdg)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "dtmega"
    assert (tmp_path / ".cache" / "dtmega").stat().st_mode & 0o777 == 0o700


@pytest.fixture
def _no_home(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))


@pytest.mark.usefixtures("_no_home")
def test_the_cache_directory_falls_back_to_the_users_own_in_temp(tmp_path):
    assert cache_dir() == tmp_path / "tmp" / f"dtmega-{os.getuid()}"


@pytest.mark.usefixtures("_no_home")
def test_a_strangers_folder_in_temp_is_no_cache_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    (tmp_path / "tmp" / "dtmega-12345").mkdir()
    with pytest.raises(ValueError, match="set XDG_CACHE_HOME"):
        cache_dir()
