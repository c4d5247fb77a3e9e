"""Damage to a checkpoint never loads, and a checkpoint made to attack is refused: nothing runs, nothing is made.

All flips, of which these are some, are in `benchmarks/faults.py`. Two ranks wrote steps 1 and 2; step 2 is damaged, and
the message names what is, and step 1 is loaded to the bit.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from dtmega.checkpoint import data_files, manifest, resume
from dtmega.checkpoint.manifest import Damaged, OtherFormat
from dtmega.checkpoint.state import State
from tests.faults import BLOCK_BYTES, IDENTITY, Trained, alone, value
from tests.ranks import Forks, forks

OLDER, NEWER = "step-00000001", "step-00000002"
CI_FLIPS = 60


class Wound(NamedTuple):
    """One damage.

    Attributes:
        kind, file: for the table of the benchmark.
        names: what the message has to say.
        hurt: does it.
    """

    kind: str
    file: str
    names: tuple[str, ...]
    hurt: Callable[[], object]


class Victim:
    """Attributes:
    files: of step 2, name -> bytes.
    """

    def __init__(self, forks: Forks, folder: Path) -> None:
        self.root = folder / "checkpoints"
        assert [ended.code for ended in forks.run(2, save_both, self.root)] == [0, 0]
        self.files = {path.name: path.read_bytes() for path in sorted((self.root / NEWER).iterdir())}
        self.reader = Trained(self.root)
        self._truth = {n: value(n, tuple(t.shape), 1) for n, t in self.reader.tensors().items()}

    def flips(self, every: int) -> Iterator[Wound]:
        """One bit of each `every`-th byte of the whole folder."""
        n = 0
        for file, raw in self.files.items():
            owners = self._owners(file)
            for at in range(-n % every, len(raw), every):
                names = (file, *(owner for start, stop, owner in owners if start <= at < stop))
                assert len(names) == (1 if file == manifest.NAME else 2)
                yield Wound("a flipped bit", file, names, partial(self._flip, file, at))
            n += len(raw)

    def others(self) -> Iterator[Wound]:
        for file, raw in self.files.items():
            path, older = self.root / NEWER / file, self.root / OLDER / file
            # A manifest of another step is whole, and its digests tell that the data is not.
            blamed = "data-00000.bin" if file == manifest.NAME else file
            wounds: list[tuple[str, Callable[[], object]]] = [
                *[("cut short", partial(os.truncate, path, size)) for size in (len(raw) - 1, len(raw) // 2, 0)],
                *[("with more at its end", partial(path.write_bytes, raw + more)) for more in (b"\0", raw)],
                ("zeros", partial(path.write_bytes, bytes(len(raw)))),
                ("deleted", path.unlink),
                ("of another step", partial(shutil.copy, older, path)),
                ("a link", partial(_replace, path, partial(path.symlink_to, older))),
                ("a folder", partial(_replace, path, path.mkdir)),
            ]
            for kind, hurt in wounds:
                yield Wound(kind, file, (blamed if kind == "of another step" else file,), hurt)

    def detects(self, wound: Wound) -> bool:
        """Tell whether step 1 is loaded, to the bit, and the message says of step 2 what it should."""
        wound.hurt()
        try:
            state, damage = self.load(self.root)
            assert state is not None
            intact = all(torch.equal(tensor, self._truth[name]) for name, tensor in self.reader.tensors().items())
            (message,) = damage
            return state.progress.step == 1 and intact and all(name in message for name in (NEWER, *wound.names))
        finally:
            path = self.root / NEWER / wound.file
            if path.is_dir():
                path.rmdir()
            path.unlink(missing_ok=True)
            path.write_bytes(self.files[wound.file])

    def load(self, root: Path) -> tuple[State | None, list[str]]:
        """Load as a run in that folder would, into `reader`."""
        there = self.reader.cfg.checkpoint.model_copy(update={"dir": str(root)})
        candidates, damage = resume.find_checkpoints(self.reader.cfg.model_copy(update={"checkpoint": there}), IDENTITY)
        loaded = self.reader.checkpoints.load(candidates, self.reader.parameters.items(), self.reader.optimizer, damage)
        return loaded, damage

    def _flip(self, file: str, at: int) -> None:
        with (self.root / NEWER / file).open("r+b") as f:
            f.seek(at)
            f.write(bytes([self.files[file][at] ^ 1 << at % 8]))

    def _owners(self, file: str) -> list[tuple[int, int, str]]:
        """The entry that bytes of a data file are of."""
        tensors = json.loads(self.files[manifest.NAME])["content"]["tensors"]
        return [
            (start, start + 4 * int(torch.tensor(sizes).prod()), f"'{name}'")
            for name, entry in tensors.items()
            for _, sizes, its_file, start, _ in entry["chunks"]
            if its_file == file
        ]


def _replace(path: Path, make: Callable[[], object]) -> None:
    path.unlink()
    make()


def save_both(root: Path) -> None:
    manifest.LEAST_BLOCK_BYTES = data_files.WRITE_BYTES = BLOCK_BYTES
    trained = Trained(root, keep=2)
    for step in (1, 2):
        trained.fill(step)
        assert [outcome.error for outcome in trained.save(step)] == [""]


@pytest.fixture(scope="module")
def victim(tmp_path_factory) -> Iterator[Victim]:
    with alone():
        yield Victim(forks(), tmp_path_factory.mktemp("damage"))


def test_every_bit_that_is_flipped_is_noticed_and_named_and_the_older_checkpoint_is_loaded(victim):
    flips = list(victim.flips(sum(map(len, victim.files.values())) // CI_FLIPS))
    assert len(flips) >= CI_FLIPS
    assert {wound.file for wound in flips} == {"data-00000.bin", "data-00001.bin", "manifest.json"}
    assert [wound.names for wound in flips if not victim.detects(wound)] == []


def test_whatever_else_happens_to_a_file_is_noticed_and_named_too(victim):
    wounds = list(victim.others())
    assert len(wounds) == 30
    assert [(wound.kind, wound.file) for wound in wounds if not victim.detects(wound)] == []


# Checkpoints that somebody made. Each digest is right: it is no signature.

Content = dict[str, Any]


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.canary,)


def sign(body: bytes) -> bytes:
    return body + b',"xxh3":"' + manifest.digest(body).encode() + b'"}\n'


def put(*path: str | int, to: Any) -> Callable[[Content], None]:
    """Sets content[path[0]][path[1]]...; * is the first entry's name."""

    def edit(content: Content) -> None:
        at: Any = content
        for key in path[:-1]:
            at = at[next(iter(at)) if key == "*" else key]
        at[path[-1]] = to

    return edit


def only(shape: list[int], chunks: list[Any]) -> Callable[[Content], None]:
    """No other tensor than one of that shape."""
    return put("tensors", to={"model/x": {"dtype": "float32", "shape": shape, "chunks": chunks}})


def share_bytes(content: Content) -> None:
    """Two entries of the same bytes."""
    first, second = list(content["tensors"].values())[:2]
    second |= first


def overlapping(content: Content) -> None:
    """Twice the first half."""
    chunks = next(e["chunks"] for e in content["tensors"].values() if len(e["chunks"]) == 2)
    chunks[1][0] = chunks[0][0]


def renamed(name: str) -> Callable[[Content], None]:
    def edit(content: Content) -> None:
        content["files"][name] = content["files"].pop("data-00000.bin")
        for each in content["tensors"].values():
            for chunk in each["chunks"]:
                chunk[2] = name if chunk[2] == "data-00000.bin" else chunk[2]

    return edit


HUGE = 2**59
CHUNK = ("tensors", "*", "chunks", 0)
FORGED: dict[str, tuple[Callable[[Content], None], str]] = {
    "a path that leads out": (renamed("../secret.bin"), "expected a name like data-00000.bin, got"),
    "an absolute path": (renamed("/etc/passwd"), "expected a name like data-00000.bin, got"),
    "a path inside": (renamed("sub/data-00000.bin"), "expected a name like data-00000.bin, got"),
    "a name with a line end": (renamed("data-00000.bin\n"), "expected a name like data-00000.bin, got"),
    "a name with a zero byte": (renamed("data-00000.bin\0"), "expected a name like data-00000.bin, got"),
    "the manifest as data": (renamed("manifest.json"), "expected a name like data-00000.bin, got"),
    "a tensor of 2^59 elements": (only([HUGE], [[[0], [HUGE], "data-00000.bin", 0, []]]), "does not fit"),
    "a shape whose strides overflow": (only([0, HUGE, HUGE], []), "expected a shape, got"),
    "100,000 dims": (only([HUGE] * 10**5, []), "expected at most 16 dims, got 100000"),
    "a chunk of 100,000 dims": (put(*CHUNK, 1, to=[HUGE] * 10**5), "expected at most 16 dims, got 100000"),
    "2^64 elements": (put("tensors", "*", "shape", to=[2**64]), "expected a count, got 18446744073709551616"),
    "a negative size": (put("tensors", "*", "shape", to=[-1]), "expected a count, got -1"),
    "a negative start": (put(*CHUNK, 3, to=-8), "expected a count, got -8"),
    "a start behind the end": (
        put(*CHUNK, 3, to=HUGE),
        "an entry ends at byte 576460752303423616 of data-00000.bin, which has",
    ),
    "a negative offset": (put(*CHUNK, 0, to=[-1, 0]), "expected a count, got -1"),
    "an offset that overflows": (put(*CHUNK, 0, to=[2**63 - 1, 0]), "expected a count, got 9223372036854775807"),
    "too many digests": (put(*CHUNK, 4, to=["0" * 32] * 10**5), "does not fit"),
    "digests that are no list": (put(*CHUNK, 4, to="0" * 32), "expected list, got '0000"),
    "digests that are no strings": (put(*CHUNK, 4, to=[{"a": 1}]), "do not match their digest"),
    "no chunks": (put("tensors", "*", "chunks", to=[]), "do not make [7, 8]"),
    "chunks that are numbers": (put("tensors", "*", "chunks", to=[1]), "cannot unpack non-iterable int"),
    "two entries of the same bytes": (share_bytes, "two entries share bytes 0 to 128 of data-00000.bin"),
    "two chunks of the same box": (overlapping, "do not make [7, 8]"),
    "another dtype": (
        put("tensors", "*", "dtype", to="float64"),
        "two entries share bytes 128 to 256 of data-00000.bin",
    ),
    "no dtype of ours": (put("tensors", "*", "dtype", to="object"), "KeyError: 'object'"),
    "a dtype that is a list": (put("tensors", "*", "dtype", to=["float32"]), "unhashable type: 'list'"),
    "an entry that is a list": (put("tensors", "*", to=[]), "list indices must be integers"),
    "tensors that are a list": (put("tensors", to=[]), "expected dict, got '[]'"),
    "no tensors": (put("tensors", to={}), "is of another model: it has no 'model/embed.weight'"),
    "files that are a list": (put("files", to=["data-00000.bin"]), "expected dict, got \"['data-00000.bin']\""),
    "a file of 2^59 bytes": (
        put("files", "data-00000.bin", to=HUGE),
        "data-00000.bin has 5808 bytes, expected 576460752303423488",
    ),
    "a size that is a string": (put("files", "data-00000.bin", to="5"), "expected int, got '5'"),
    "a size that is a bool": (put("files", "data-00000.bin", to=True), "expected int, got 'True'"),
    "a file that is not there": (put("files", "data-00007.bin", to=5), "data-00007.bin is missing"),
    "a step that is a string": (put("step", to="2"), "expected int, got '2'"),
    "a negative step": (put("step", to=-2), "expected a count, got -2"),
    "no step": (lambda content: content.pop("step"), "KeyError: 'step'"),
    "another format": (put("format", to=99), "a checkpoint of format 99; this dtmega reads 1 and 2"),
    "a format that is a list": (put("format", to=[1]), "a checkpoint of format [1]; this dtmega reads 1 and 2"),
    "blocks of no bytes": (put("block_bytes", to=0), "expected the size of a block, got 0"),
    "blocks of a gigabyte": (put("block_bytes", to=2**30), "expected the size of a block, got 1073741824"),
    "no size of blocks": (lambda content: content.pop("block_bytes"), "KeyError: 'block_bytes'"),
    "the first format's blocks": (put("format", to=1), "does not fit"),
    "state that is a list": (put("state", to=[]), "expected dict, got '[]'"),
    "state with a key too much": (put("state", "__class__", to="os"), "Extra inputs are not permitted"),
    "progress that is a string": (put("state", "progress", to="far"), "progress\n"),
    "negative progress": (put("state", "progress", to=[-1, 0, 0]), "progress.0\n"),
    "updates without end": (put("state", "updates", to=10**400), "updates\n"),
    "a configuration that is a number": (put("state", "config", to=5), "config\n"),
    "a section that is a number": (put("state", "config", "model", to=5), "config.model\n"),
    "identity that is a list": (put("state", "identity", to=[1]), "identity\n"),
    "recent that is a string": (put("state", "recent", to="x"), "recent\n"),
    "versions that are numbers": (put("state", "versions", to={"torch": 2}), "versions.torch\n"),
    "an offset beyond the shape": (put(*CHUNK, 0, to=[4, 0]), "does not fit"),
    "an offset of fewer dims": (put(*CHUNK, 0, to=[0]), "does not fit"),
    "a chunk of fewer dims": (only([7, 8], [[[0], [7], "data-00000.bin", 0, ["0" * 32]]]), "does not fit"),
    "a file of which nothing is said": (put(*CHUNK, 2, to="data-00009.bin"), "does not fit"),
    "too few digests": (put(*CHUNK, 4, to=[]), "does not fit"),
    "a size of 2^60": (put("files", "data-00000.bin", to=2**60), "expected a count, got 1152921504606846976"),
    "a file that is larger": (put("files", "data-00000.bin", to=5807), "an entry ends at byte 5808 of data-00000.bin"),
    "a name that moves the cursor": (put("tensors", "\x1b[2J", to={}), r"expected a printable name, got '\x1b[2J'"),
}


def nested(content: bytes) -> bytes:
    return content.replace(b'"state":{', b'"state":' + b"[" * 200_000 + b"]" * 200_000 + b',"x":{', 1)


RAW: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "nesting without end": (nested, "expected JSON of at most 64 levels"),
    "nothing": (lambda content: b"", "Expecting value"),
    "null": (lambda content: b"null", "expected a JSON object, got NoneType"),
    "a list": (lambda content: b"[1,2]", "expected a JSON object, got list"),
    "a number that is infinite": (
        lambda content: content.replace(b'"step":2', b'"step":1e400', 1),
        "expected int, got 'inf'",
    ),
    "a number that is none": (
        lambda content: content.replace(b'"step":2', b'"step":NaN', 1),
        "expected int, got 'nan'",
    ),
    "a number of a million digits": (
        lambda content: content.replace(b'"step":2', b'"step":' + b"9" * 10**6, 1),
        "Exceeds the limit",
    ),
    "bytes that are no text": (
        lambda content: content.replace(b'"step":2', b'"step":"\xff\xfe"', 1),
        "can't decode byte 0xff",
    ),
    "two contents": (lambda content: content + b',"content":{}', "Extra data"),
}


@pytest.fixture(scope="module")
def traced() -> Iterator[None]:
    """Memory is traced from here on, until the last test of this file.

    CPython 3.11 may crash if tracing stops while another thread ends, such as one that read a checkpoint (gh-128679).
    """
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.fixture
def attacked(victim, traced, tmp_path, monkeypatch) -> Callable[[str], None]:
    """A copy of step 2 alone, in tmp_path/run; and what must be so when it is read."""
    root, empty = tmp_path / "run", torch.empty
    shutil.copytree(victim.root / NEWER, root / NEWER)
    (tmp_path / "secret.bin").write_bytes(victim.files["data-00000.bin"])

    def small(*sizes: Any, **keywords: Any) -> torch.Tensor:
        result = empty(*sizes, device="meta", dtype=keywords.get("dtype"))
        assert result.nbytes < 10**6, result.shape
        return empty(*sizes, **keywords)

    def refuses(reason: str) -> None:
        before = sorted(tmp_path.rglob("*"))
        monkeypatch.setattr(torch, "empty", small)
        tracemalloc.reset_peak()
        held_bytes, _ = tracemalloc.get_traced_memory()
        try:
            with pytest.raises(ValueError) as refused:
                victim.load(root)
            assert refused.type in (Damaged, OtherFormat, ValueError)
            assert reason in str(refused.value)
            assert tracemalloc.get_traced_memory()[1] - held_bytes < 200 * 2**20
        finally:
            monkeypatch.undo()
        assert sorted(tmp_path.rglob("*")) == before

    return refuses


@pytest.mark.parametrize("name", FORGED)
def test_a_manifest_with_a_right_digest_that_does_not_describe_a_checkpoint_is_refused(
    victim, attacked, tmp_path, name
):
    content = json.loads(victim.files[manifest.NAME])["content"]
    forge, reason = FORGED[name]
    forge(content)
    (tmp_path / "run" / NEWER / manifest.NAME).write_bytes(sign(b'{"content":' + json.dumps(content).encode()))
    attacked(reason)


@pytest.mark.parametrize("name", RAW)
def test_a_manifest_with_a_right_digest_that_is_not_what_json_should_be_is_refused(victim, attacked, tmp_path, name):
    raw = victim.files[manifest.NAME]
    body = raw[len(b'{"content":') : raw.rindex(b',"xxh3"')]
    forge, reason = RAW[name]
    (tmp_path / "run" / NEWER / manifest.NAME).write_bytes(sign(b'{"content":' + forge(body)))
    attacked(reason)


@pytest.mark.parametrize("signed", [True, False])
def test_a_pickle_in_the_place_of_the_manifest_is_refused_and_does_not_run(attacked, tmp_path, signed):
    raw = pickle.dumps(Payload(tmp_path / "canary"))
    (tmp_path / "run" / NEWER / manifest.NAME).write_bytes(sign(raw) if signed else raw)
    attacked("can't decode byte" if signed else "its digest does not match its content")


def test_a_pickle_in_the_place_of_data_is_numbers_if_its_digest_is_right_and_does_not_run(victim, tmp_path):
    root = tmp_path / "run"
    shutil.copytree(victim.root / NEWER, root / NEWER)
    content = json.loads(victim.files[manifest.NAME])["content"]
    size = content["files"]["data-00000.bin"]
    raw = pickle.dumps(Payload(tmp_path / "canary")).ljust(size, b".")
    (root / NEWER / "data-00000.bin").write_bytes(raw)
    for each in content["tensors"].values():
        for _, sizes, file, start, digests in each["chunks"]:
            if file == "data-00000.bin":
                stop = start + 4 * int(torch.tensor(sizes).prod())
                blocks = [raw[at : min(at + BLOCK_BYTES, stop)] for at in range(start, stop, BLOCK_BYTES)]
                digests[:] = [manifest.digest(block) for block in blocks]
    (root / NEWER / manifest.NAME).write_bytes(sign(b'{"content":' + json.dumps(content).encode()))
    assert victim.load(root)[1] == []
    first = victim.reader.tensors()["model/embed.weight"].reshape(-1)[:2]
    assert first.view(torch.uint8).numpy().tobytes() == raw[:8]
    assert not (tmp_path / "canary").exists()


def test_a_manifest_too_large_to_be_one_is_refused_unread(attacked, tmp_path):
    os.truncate(tmp_path / "run" / NEWER / manifest.NAME, manifest.MAX_BYTES + 1)
    attacked("manifest.json has 1073741825 bytes, more than any manifest")


@pytest.mark.parametrize("file", ["data-00000.bin", "manifest.json"])
def test_a_link_to_a_file_that_would_do_is_refused(victim, attacked, tmp_path, file):
    path = tmp_path / "run" / NEWER / file
    path.unlink()
    path.symlink_to(victim.root / NEWER / file)
    attacked(f"{file} is missing")


@pytest.mark.parametrize(("size", "message"), [(0, "has 0 bytes, expected"), (None, "do not match their digest")])
def test_where_every_checkpoint_is_damaged_it_is_an_error_and_not_a_new_start(victim, tmp_path, size, message):
    root = tmp_path / "run"
    shutil.copytree(victim.root, root)
    for folder in (OLDER, NEWER):
        path = root / folder / "data-00001.bin"
        path.write_bytes(bytes(path.stat().st_size if size is None else size))
    with pytest.raises(Damaged, match=rf"(?s){NEWER}: data-00001.bin.* {message}.*{OLDER}: data-00001.bin.* {message}"):
        victim.load(root)
