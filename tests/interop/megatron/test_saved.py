"""Claims about saved.py: files of torch.save, of both formats, are read as data, and attacks run nothing."""

from __future__ import annotations

import enum
import io
import pickle
import random
import struct
import sys
import types
import zipfile
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dtmega.interop.megatron.saved import SavedFile, check_apart, entries, plain
from dtmega.interop.torch_files.inert import PickledObject


def member(monkeypatch: pytest.MonkeyPatch, module: str, kind: str, **values: int) -> Any:
    """An Enum of a module that is not installed here."""
    made: Any = enum.Enum(kind, values, module=module)
    parts = module.split(".")
    for n in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:n]), types.ModuleType(".".join(parts[:n])))
    setattr(sys.modules[module], kind, made)
    return made


@pytest.fixture(params=["zip", "older"])
def save(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Any], Path]:
    """Writes a value with torch.save, in both formats in turn."""

    def written(value: Any) -> Path:
        path = tmp_path / "model_optim_rng.pt"
        torch.save(value, path, _use_new_zipfile_serialization=request.param == "zip")
        return path

    return written


def raw(tensor: Tensor) -> Tensor:
    return tensor.detach().flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)


def with_attributes(tensor: Tensor) -> Tensor:
    """An fp32 master, as Megatron marks it."""
    tensor.tensor_model_parallel = True  # pyright: ignore[reportAttributeAccessIssue]
    tensor.partition_dim = 0  # pyright: ignore[reportAttributeAccessIssue]
    return tensor


def parameter_with_attributes() -> nn.Parameter:
    parameter = nn.Parameter(torch.randn(3, 4))
    with_attributes(parameter)
    return parameter


TENSORS: dict[str, Callable[[], Tensor]] = {
    "fp32": lambda: torch.randn(3, 5),
    "bf16": lambda: torch.randn(7).bfloat16(),
    "fp16": lambda: torch.randn(2, 2).half(),
    "fp64": lambda: torch.randn(2, 2).double(),
    "transposed": lambda: torch.randn(3, 5).t(),
    "a view": lambda: torch.arange(12.0).view(4, 3)[1:3],
    "a number": lambda: torch.tensor(3.5),
    "a generator's state": torch.get_rng_state,
    "a parameter": lambda: nn.Parameter(torch.randn(4)),
    "a parameter with attributes": parameter_with_attributes,
    "a master": lambda: with_attributes(torch.randn(4, 2)),
}


def test_every_kind_of_tensor_in_a_checkpoint_is_read_to_the_bit(save):
    there = {name: make() for name, make in TENSORS.items()}
    file = SavedFile(save(there))
    for name, tensor in there.items():
        stored = file.tensor(file.value[name])
        assert (stored.dtype, stored.shape) == (tensor.dtype, tuple(tensor.shape)), name
        assert torch.equal(raw(file.read(stored)), raw(tensor)), name


def test_arguments_are_data_with_enums_and_dtypes_by_name(save, monkeypatch):
    position = member(monkeypatch, "megatron.enums", "PositionEmbeddingType", rotary=1, absolute=2, alibi=3)
    model_type = member(monkeypatch, "megatron.model.enums", "ModelType", encoder_or_decoder=1)
    args = Namespace(
        num_layers=2,
        lr=1e-4,
        data_path=["0.5", "a"],
        train_weighted_split_paths=[["a", "b"], ["c"]],
        bf16=True,
        params_dtype=torch.bfloat16,
        vocab_file=None,
        position_embedding_type=position.alibi,
        model_type=model_type.encoder_or_decoder,
    )
    there = entries(SavedFile(save({"args": args})).value["args"], "args")
    found = {name: plain(value) for name, value in there.items()}
    assert found == {
        **{"num_layers": 2, "lr": 1e-4, "data_path": ["0.5", "a"], "bf16": True, "params_dtype": "torch.bfloat16"},
        "train_weighted_split_paths": [["a", "b"], ["c"]],
        **{"vocab_file": None, "position_embedding_type": "alibi", "model_type": "encoder_or_decoder"},
    }


def test_what_else_a_checkpoint_holds_is_passed_over(save):
    state = nn.Linear(2, 2).state_dict()  # an OrderedDict with a state
    there = {
        "model": state,
        "rng_state": [{"random_rng_state": random.getstate(), "np_rng_state": np.random.RandomState(1).get_state()}],
        "loss": np.float64(2.5),
        "skipped": {1, 2},
        "empty": OrderedDict(),
        "module": None,
    }
    file = SavedFile(save(there))
    model = entries(file.value["model"], "model")
    assert [*model] == ["weight", "bias"]
    assert torch.equal(file.read(file.tensor(model["bias"])), state["bias"])
    assert entries(file.value["empty"], "empty") == {}
    assert plain(file.value["skipped"]) is None


def test_a_member_of_an_enum_that_was_pickled_by_its_name_is_known():
    by_name = PickledObject("__builtin__ getattr", (PickledObject("megatron.enums PositionEmbeddingType"), "alibi"))
    assert plain(by_name) == "alibi"


def pickled(content: bytes) -> Callable[[Path], None]:
    """A zip with this pickle, and one storage of 8 bytes."""

    def write(path: Path) -> None:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x/data.pkl", content)
            archive.writestr("x/data/0", bytes(8))

    return write


def older(*pickles: Any, storages: bytes = b"") -> Callable[[Path], None]:
    """The older format, of values that are pickled, or of bytes that are pickles."""

    def write(path: Path) -> None:
        parts = [part if type(part) is bytes else pickle.dumps(part, 2) for part in pickles]
        path.write_bytes(b"".join(parts) + storages)

    return write


def tensor(sizes: bytes, strides: bytes, offset: bytes = b"K\x00", key: bytes = b"0", kind: bytes = b"Float") -> bytes:
    """A pickle of one tensor, its parts as opcodes."""
    name = struct.pack("<I", len(key)) + key
    storage = b"(X\x07\x00\x00\x00storagectorch\n" + kind + b"Storage\nX" + name + b"X\x03\x00\x00\x00cpuK\x02tQ"
    rest = b"\x89ccollections\nOrderedDict\n)RtR."
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage + offset + sizes + strides + rest


MACHINE = {"protocol_version": 1001, "little_endian": True, "type_sizes": {}}
START = (0x1950A86A20F9469CFC6C, 1001, MACHINE)
FLOATS = b"\x80\x02(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x02NtQ."
TYPES = b"(" + FLOATS[2:-1] + FLOATS[2:-1].replace(b"Float", b"Half") + b"t."

CRAFTED: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (lambda path: path.write_bytes(b""), "expected a file of torch.save"),
    "a plain pickle": (older({"model": 1}), "expected a file of torch.save"),
    "a call of os.system": (pickled(b"\x80\x02cposix\nsystem\nX\x01\x00\x00\x00x\x85R."), "asks for 'posix system'"),
    "the same in the older format": (older(*START, b"\x80\x02cposix\nsystem\n."), "asks for 'posix system'"),
    "a name in the keys": (older(*START, 1, b"\x80\x02ctorch\nTensor\n."), "asks for 'torch Tensor'"),
    "an object of a name that is known": (pickled(b"\x80\x02cargparse\nNamespace\n)R)R."), "calls something"),
    "an extension": (pickled(b"\x80\x02\x82\x01."), "opcode EXT1"),
    "a build of nothing": (pickled(b"\x80\x02cargparse\nNamespace\n}b."), "sets the state"),
    "items for a namespace": (
        pickled(b"\x80\x02cargparse\nNamespace\n)RK\x01K\x02s."),
        "target of SETITEMS to be dict",
    ),
    "a memo slot of 2^32": (pickled(b"\x80\x02Nr\xff\xff\xff\xffK\x01."), "2 values"),
    "a string of 4 GiB": (pickled(b"\x80\x02X\xff\xff\xff\xffx."), "."),
    "a pickle of 16 MiB": (pickled(b"\x80\x02" + b"}" * (1 << 24) + b"."), "at most 16777216 bytes"),
    "no pickle": (lambda path: zipfile.ZipFile(path, "w").writestr("x/y", b"1"), "one data.pkl, got 0"),
    "another magic number": (older(7, 1001), "expected a file of torch.save"),
    "another version": (older(START[0], 1002, MACHINE), "expected version 1001"),
    "another machine": (older(*START[:2], {"little_endian": False}), "little-endian"),
    "a storage that no tensor has": (older(*START, 1, ["0"]), "expected the storages of the tensors"),
    "a storage twice": (older(*START, FLOATS, ["0", "0"], storages=struct.pack("<q", 0)), "each once, got '0'"),
    "a storage behind the end": (
        older(*START, FLOATS, ["0"], storages=struct.pack("<q", 3) + bytes(8)),
        "expected a storage of 3 elements",
    ),
    "a storage of less than nothing": (older(*START, FLOATS, ["0"], storages=struct.pack("<q", -1)), "of -1 elements"),
    "a storage of 2^62 elements": (older(*START, FLOATS, ["0"], storages=struct.pack("<q", 1 << 62)), "elements"),
    "a storage without a length": (older(*START, FLOATS, ["0"]), "the file ends"),
    "a storage of two types": (older(*START, TYPES, ["0"]), "of one known type each"),
}


@pytest.mark.parametrize("attack", CRAFTED)
def test_a_crafted_file_is_refused_with_its_name(tmp_path: Path, attack: str):
    write, message = CRAFTED[attack]
    path = tmp_path / "model_optim_rng.pt"
    write(path)
    with pytest.raises(ValueError, match=rf"model_optim_rng\.pt: .*({message})"):
        SavedFile(path)


def test_a_compressed_record_is_refused(tmp_path: Path):
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", b"\x80\x02N." + bytes(1 << 20))
    with pytest.raises(ValueError, match="is compressed or encrypted"):
        SavedFile(path)


TWO, ONE, HUGE = b"K\x02\x85", b"K\x01\x85", b"\x8a\x08" + struct.pack("<q", 1 << 60) + b"\x85"
CRAFTED_TENSORS: dict[str, tuple[bytes, str]] = {
    "behind the end of its storage": (tensor(b"K\x03\x85", ONE), "expected 12 bytes of data"),
    "a start behind the end": (tensor(TWO, ONE, offset=b"K\x01"), "expected 12 bytes of data"),
    "one element that counts 2^60 times": (tensor(HUGE, b"K\x00\x85"), "bytes of data for a tensor"),
    "2^60 elements": (tensor(HUGE, ONE), "bytes of data for a tensor"),
    "no elements": (tensor(b"K\x00\x85", ONE), "expected a tensor with elements"),
    "too few strides": (tensor(TWO, b")"), "expected a tensor with elements"),
    "negative strides": (tensor(TWO, b"J\xff\xff\xff\xff\x85"), "strides to be 0 to"),
    "no such storage": (tensor(TWO, ONE, key=b"1"), "with its storage, '1'"),
    "a storage of a folder above": (tensor(TWO, ONE, key=b"../0"), "with its storage, '../0'"),
    "a storage of no type": (
        tensor(TWO, ONE, kind=b"Untyped").replace(b"ctorch\nU", b"ctorch.storage\nU"),
        "known dtype",
    ),
    "a number": (b"\x80\x02K\x01.", "expected a plain tensor"),
    "a parameter of a number": (b"\x80\x02ctorch._utils\n_rebuild_parameter\nK\x01\x88N\x87R.", "expected a plain"),
    "a master that is made by a call of a number": (
        b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n(K\x01K\x01)}tR.",
        "got a call of int",
    ),
    "a master that is made by another function": (
        b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n(c__builtin__\ngetattr\nctorch\nTensor\n)}tR.",
        "expected a plain tensor",
    ),
}


@pytest.mark.parametrize("attack", CRAFTED_TENSORS)
def test_a_crafted_tensor_is_refused_with_the_files_name(tmp_path: Path, attack: str):
    content, message = CRAFTED_TENSORS[attack]
    path = tmp_path / "x.pt"
    pickled(content)(path)
    file = SavedFile(path)
    with pytest.raises(ValueError, match=rf"x\.pt: .*{message}"):
        file.tensor(file.value)


def test_the_tensor_that_the_crafted_ones_are_made_from_is_read(tmp_path: Path):
    pickled(tensor(TWO, ONE))(tmp_path / "x.pt")
    file = SavedFile(tmp_path / "x.pt")
    assert torch.equal(file.read(file.tensor(file.value)), torch.zeros(2))


def test_two_tensors_of_the_same_bytes_are_refused_and_neighbours_are_not(save):
    base = torch.arange(6.0)
    file = SavedFile(save({"a": base[:3], "b": base[3:], "c": base[2:4]}))
    found = {name: file.tensor(made) for name, made in file.value.items()}
    check_apart(file.path, [found["a"], found["b"]])
    with pytest.raises(ValueError, match=r"two tensors share the bytes \d+ to \d+"):
        check_apart(file.path, found.values())


def test_a_flipped_bit_in_the_elements_of_a_zip_is_found(tmp_path: Path):
    there = torch.arange(20.0)
    torch.save({"a": there}, path := tmp_path / "x.pt")
    content = bytearray(path.read_bytes())
    content[content.index(there.numpy().tobytes()) + 7] ^= 1
    path.write_bytes(content)
    file = SavedFile(path)
    with pytest.raises(ValueError, match=r"x\.pt: damaged: the data at byte \d+ have crc32"):
        file.read(file.tensor(file.value["a"]))


def test_a_file_without_checksums_is_read(tmp_path: Path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.ones(3)}, path := tmp_path / "x.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    file = SavedFile(path)
    assert torch.equal(file.read(file.tensor(file.value["a"])), torch.ones(3))


def test_damage_raises_nothing_but_a_value_error(save):
    args = Namespace(num_layers=2, params_dtype=torch.float16)
    generator = random.Random(0)
    path = save({"args": args, "model": nn.Linear(3, 2).state_dict(), "rng": generator.getstate()[1][:9]})
    good = path.read_bytes()
    damaged = [good[:n] for n in range(0, len(good), 61)]
    for _ in range(300):
        flipped = bytearray(good)
        flipped[generator.randrange(len(good))] ^= 1 << generator.randrange(8)
        damaged.append(bytes(flipped))
    found = 0
    for content in damaged:
        path.write_bytes(content)
        try:
            file = SavedFile(path)
            for made in entries(entries(file.value, "the file").get("model"), "model").values():
                file.read(file.tensor(made))
        except ValueError:
            found += 1
    assert found > 100


def test_a_name_with_an_escape_in_it_is_refused_like_any_other_that_is_not_known(tmp_path: Path):
    pickled(b"\x80\x02ccollections\nOrdered\\qDict\n.")(path := tmp_path / "x.pt")
    with pytest.raises(ValueError, match=r"the pickle asks for .*Ordered.*qDict"):
        SavedFile(path)


def test_deep_nesting_is_data_like_any_other(tmp_path: Path):
    pickled(b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b".")(path := tmp_path / "x.pt")
    assert plain(SavedFile(path).value) == [[]]
    older(*START, b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b".", [])(path)
    assert plain(SavedFile(path).value) == [[]]


def test_a_list_that_doubles_thirty_times_is_looked_at_once(tmp_path: Path):
    doubled = b"\x80\x02]q\x00" + b"".join(
        b"]q" + bytes([i]) + b"(h" + bytes([i - 1]) + b"h" + bytes([i - 1]) + b"e" for i in range(1, 31)
    )
    older(*START, doubled + b".", [])(path := tmp_path / "x.pt")
    with pytest.raises(ValueError, match="31 values"):
        SavedFile(path)
    older(*START, b"\x80\x02(" + doubled[2:] + b"t.", [])(path)
    assert type(SavedFile(path).value) is tuple


def test_bytes_behind_the_archive_of_a_zip_are_no_value(tmp_path: Path):
    out = io.BytesIO()
    torch.save({"a": 1}, out)
    (tmp_path / "x.pt").write_bytes(b"junk" + out.getvalue())
    with pytest.raises(ValueError, match=r"expected a file of torch\.save"):
        SavedFile(tmp_path / "x.pt")
