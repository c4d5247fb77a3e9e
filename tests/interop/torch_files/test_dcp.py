"""Claims about dcp.py: DCP folders are read to the bit, and attacks run nothing, allocate nothing."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import random
import shutil
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OldTensorProperties
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat, _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dtmega.interop.torch_files import torch_save
from dtmega.interop.torch_files.dcp import DCPFolder
from tests import ranks

DTYPES = sorted(torch_save.PICKLED_DTYPES.values(), key=str)


def save(folder: Path, state: dict[str, Any], **options: Any) -> Path:
    """Plain `dcp.save` of one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp_save(state, storage_writer=FileSystemWriter(folder, **options), no_dist=True)
    return folder


def flat(state: Any, name: str = "") -> dict[str, Any]:
    """Nested dicts and lists to names with dots, as DCP's planner names them."""
    if isinstance(state, dict | list):
        pairs = state.items() if isinstance(state, dict) else enumerate(state)
        return {n: v for key, value in pairs for n, v in flat(value, f"{name}.{key}" if name else str(key)).items()}
    return {name: state}


def trained() -> dict[str, Any]:
    """State of a model and its AdamW after one step, and what else people save."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 5)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    return state | {"step": 7, "note": "a string", "rng": torch.get_rng_state(), "transposed": torch.randn(3, 5).t()}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A good folder, and the state in it by name."""
    state = trained()
    return save(tmp_path_factory.mktemp("plain") / "folder", state), flat(state)


@pytest.fixture
def copy(plain: tuple[Path, dict[str, Any]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(plain[0], tmp_path / "folder"))


def boxes(shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Some parts of a tensor: rows, columns, insides, one element, nothing."""
    generator = random.Random(0)
    for _ in range(12):
        ends = [sorted(generator.choices(range(n + 1), k=2)) for n in shape]
        yield tuple(slice(*end) for end in ends)
    yield from ((slice(1),), (slice(None),), (slice(3, 1),), ()) if shape else ((),)
    yield tuple(slice(-1, None) for _ in shape)


def raw(tensor: Tensor) -> Tensor:
    """Its bytes."""
    return tensor.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)


def assert_reads_equal(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Whole and by slices, to the bit."""
    found = DCPFolder(folder)
    assert found.tensors == {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        for index in (None, *boxes(tuple(tensor.shape))):
            part, expected = found.read(name, index), tensor[index or ...]
            assert part.dtype == expected.dtype
            assert part.shape == expected.shape
            assert torch.equal(raw(part), raw(expected)), (name, index)


def test_a_plain_folder_reads_equal_to_what_was_saved_and_lists_what_is_no_tensor(plain):
    folder, state = plain
    assert_reads_equal(folder, {name: value for name, value in state.items() if isinstance(value, Tensor)})
    others = {name for name, value in state.items() if not isinstance(value, Tensor)}
    assert set(DCPFolder(folder).others) >= {name for name in others if "param_groups" not in name} == {"step", "note"}


@pytest.mark.parametrize("options", [{}, {"single_file_per_rank": False}, {"thread_count": 3}], ids=str)
def test_every_dtype_reads_equal_empty_and_scalar_and_strided(tmp_path: Path, options: dict[str, Any]):
    state = {}
    for dtype in DTYPES:
        data = torch.randint(0, 2, (6 * dtype.itemsize,), dtype=torch.uint8).view(dtype).view(2, 3)
        name = str(dtype).removeprefix("torch.")
        state |= {name: data, f"{name}.t": data.t(), f"{name}.scalar": data[0, 0].clone(), f"{name}.none": data[:, :0]}
    assert_reads_equal(save(tmp_path, state, **options), state)


def whole(tensor: Tensor) -> Tensor:
    """One axis at a time, the one that cut last first: torch warns when it is left to order two gathers itself."""
    if isinstance(tensor, DTensor):
        for axis in range(tensor.device_mesh.ndim):
            placements = [Replicate() if i <= axis else p for i, p in enumerate(tensor.placements)]
            tensor = tensor.redistribute(placements=placements)
        tensor = tensor.to_local()
    return tensor.detach().clone()


def save_sharded(folder: str) -> tuple[dict[str, Tensor], set[str]]:
    """FSDP2 x TP on 2 x 2 as torchtitan saves it, and cuts that leave ranks with less than others or with nothing.

    Returns:
        The whole tensors, and the kinds of placements among them.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 12), nn.Linear(12, 6))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    for layer in model:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = p.detach().clone()
    optimizer.step()
    state: dict[str, Any] = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    line = init_device_mesh("cpu", (4,))
    for n in (1, 3, 5, 9):
        state[f"rows{n}"] = distribute_tensor(torch.arange(n * 3.0).view(n, 3), line, [Shard(0)])
    state["columns"] = distribute_tensor(torch.arange(30.0).view(3, 10), line, [Shard(1)])
    state["grid"] = distribute_tensor(torch.arange(35.0).view(5, 7), mesh, [Shard(0), Shard(1)])
    state["copies"] = distribute_tensor(torch.arange(35.0).view(5, 7), mesh, [Replicate(), Shard(0)])
    state["step"] = 3
    dcp_save(state, checkpoint_id=folder)
    tensors = {name: tensor for name, tensor in flat(state).items() if isinstance(tensor, Tensor)}
    kinds = {type(p).__name__ for t in tensors.values() if isinstance(t, DTensor) for p in t.placements}
    return {name: whole(tensor) for name, tensor in tensors.items()}, kinds


def test_a_folder_of_fsdp_times_tp_and_of_uneven_cuts_reads_equal_to_the_whole_tensors(tmp_path: Path):
    tensors, kinds = ranks.run(4, save_sharded, str(tmp_path))[0]
    assert kinds == {"_StridedShard", "Shard", "Replicate"}
    assert len(list(tmp_path.glob("*.distcp"))) == 4
    assert_reads_equal(tmp_path, tensors)


def test_only_the_files_of_chunks_that_have_some_of_the_part_are_opened(tmp_path: Path):
    save(tmp_path, {"a": torch.ones(2), "b": torch.zeros(2)}, single_file_per_rank=False)
    folder = DCPFolder(tmp_path)
    (tmp_path / metadata_of(tmp_path).storage_data[MetadataIndex("b", (0,))].relative_path).unlink()
    assert torch.equal(folder.read("a"), torch.ones(2))
    with pytest.raises(ValueError, match="No such file"):
        folder.read("b")


def test_a_folder_of_torch_before_2_3_is_read(copy: Path, plain):
    metadata = metadata_of(copy)
    for entry in metadata.state_dict_metadata.values():
        if isinstance(entry, TensorStorageMetadata):
            entry.properties = OldTensorProperties(entry.properties.dtype)  # pyright: ignore[reportAttributeAccessIssue]
    metadata.__dict__ = {k: metadata.__dict__[k] for k in ("state_dict_metadata", "planner_data", "storage_data")}
    write_metadata(copy, metadata)
    assert_reads_equal(copy, {name: value for name, value in plain[1].items() if isinstance(value, Tensor)})


def test_an_enum_member_as_python_3_11_2_pickles_it_is_read(copy: Path, plain):
    """There `Enum.__reduce_ex__` is `getattr, (class, name)`."""
    metadata = (copy / ".metadata").read_bytes()
    now, name = b"\x8c\x14_MEM_FORMAT_ENCODING\x94\x93\x94K\x00\x85\x94R\x94", b"TORCH_CONTIGUOUS_FORMAT"
    (before, rest) = metadata.split(now)
    head = before.rpartition(b"h\x00")[0]  # the class's module, in the memo as 0
    member = b"cbuiltins\ngetattr\nh\x00\x8c\x14_MEM_FORMAT_ENCODING\x94\x93\x94\x8c\x17" + name + b"\x94\x86R\x94"
    old = head + member + rest
    assert pickle.loads(unframed(old)) == pickle.loads(metadata)
    (copy / ".metadata").write_bytes(unframed(old))
    assert_reads_equal(copy, {name: value for name, value in plain[1].items() if isinstance(value, Tensor)})


def test_a_path_as_python_3_13_pickles_it_is_read(copy: Path, plain):
    metadata = unframed((copy / ".metadata").read_bytes())
    assert metadata.count(b"\x8c\x07pathlib") == 1
    (copy / ".metadata").write_bytes(metadata.replace(b"\x8c\x07pathlib", b"\x8c\x0epathlib._local"))
    assert_reads_equal(copy, {name: value for name, value in plain[1].items() if isinstance(value, Tensor)})


def unframed(data: bytes) -> bytes:
    """A pickle of protocol 4 without its frames, whose lengths no longer hold."""
    assert data[:3] == b"\x80\x04\x95"
    return data[:2] + data[11:]


def test_a_checksum_that_torch_was_told_not_to_compute_is_not_compared(tmp_path: Path):
    torch.serialization.set_crc32_options(False)
    try:
        save(tmp_path, {"a": torch.ones(2)})
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.equal(DCPFolder(tmp_path).read("a"), torch.ones(2))


def test_a_tensor_that_is_not_there_is_named(plain):
    with pytest.raises(ValueError, match="has no tensor 'nobody'"):
        DCPFolder(plain[0]).read("nobody")


# ---- attacks: each is a change to a good folder ----


def metadata_of(folder: Path) -> Metadata:
    return pickle.loads((folder / ".metadata").read_bytes())


def write_metadata(folder: Path, metadata: object) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def tree(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*"))


class Calls:
    """Pickles as a call."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


class Trap:
    """Runs in `__setstate__`, as any class on the victim's machine might."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __setstate__(self, state: dict[str, str]) -> None:
        Path(state["marker"]).touch()


def shell(marker: Path) -> Calls:
    return Calls(os.system, f"touch '{marker}'")


def evaluated(marker: Path) -> Calls:
    return Calls(eval, f"__import__('pathlib').Path({str(marker)!r}).touch()")


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def dotted(marker: Path) -> bytes:
    """os.system by a name with a dot in a module of torch, which `find_class` follows."""
    return (
        b"\x80\x04" + text("torch.serialization") + text("os.system") + b"\x93" + text(f"touch '{marker}'") + b"\x85R."
    )


def through_getattr(marker: Path) -> bytes:
    """os.system through names that DCP's own files ask for only: getattr and torch.serialization._get_layout."""
    attribute = b"cbuiltins\ngetattr\n"
    scope = attribute + b"ctorch.serialization\n_get_layout\n" + text("__globals__") + b"\x86R"
    module = attribute + scope + text("get") + b"\x86R" + text("os") + b"\x85R"
    return b"\x80\x04" + attribute + module + text("system") + b"\x86R" + text(f"touch '{marker}'") + b"\x85R."


def old_opcodes(marker: Path) -> bytes:
    return b"(" + text(f"touch '{marker}'") + b"ios\nsystem\n."


def planted(field: str, payload: Callable[[Path], object]) -> Callable[[Path, Path], bytes]:
    def make(folder: Path, marker: Path) -> bytes:
        metadata = metadata_of(folder)
        setattr(metadata, field, payload(marker))
        return pickle.dumps(metadata)

    return make


def planted_in_a_shape(folder: Path, marker: Path) -> bytes:
    metadata = metadata_of(folder)
    tensor_of(metadata).size = shell(marker)  # pyright: ignore[reportAttributeAccessIssue]
    return pickle.dumps(metadata)


def tensor_of(metadata: Metadata, name: str = "model.0.weight") -> TensorStorageMetadata:
    entry = metadata.state_dict_metadata[name]
    assert isinstance(entry, TensorStorageMetadata)
    return entry


MALICIOUS_METADATA: dict[str, tuple[Callable[[Path, Path], bytes], str]] = {
    "os.system": (lambda _, marker: pickle.dumps(shell(marker)), "asks for '(posix|os) system'"),
    "os.system, protocol 0": (
        lambda _, marker: pickle.dumps(shell(marker), protocol=0),
        "asks for '(posix|os) system'",
    ),
    "eval in planner_data": (planted("planner_data", evaluated), "asks for '(builtins|__builtin__) eval'"),
    "a class in storage_meta": (planted("storage_meta", lambda m: Trap(str(m))), r"asks for '[\w.]*test_dcp Trap'"),
    "a list of objects": (planted("version", lambda m: [shell(m), shell(m)]), "asks for '(posix|os) system'"),
    "in place of a shape": (planted_in_a_shape, "asks for '(posix|os) system'"),
    "a dotted name": (lambda _, marker: dotted(marker), "asks for 'torch.serialization os.system'"),
    "only names that DCP uses": (lambda _, marker: through_getattr(marker), "calls something that is not a plain name"),
    "opcodes of protocol 0": (lambda _, marker: old_opcodes(marker), "opcode INST"),
}


@pytest.mark.parametrize("attack", MALICIOUS_METADATA)
def test_malicious_metadata_is_refused_and_runs_nothing(copy: Path, tmp_path: Path, attack: str):
    make, message = MALICIOUS_METADATA[attack]
    marker = tmp_path / "ran"
    (copy / ".metadata").write_bytes(make(copy, marker))
    before = tree(tmp_path)
    with pytest.raises(ValueError, match=message) as caught:
        DCPFolder(copy)
    assert tree(tmp_path) == before
    assert str(copy / ".metadata") in str(caught.value)
    with contextlib.suppress(Exception):
        pickle.loads((copy / ".metadata").read_bytes())
    assert marker.exists(), "the control: plain pickle would have run it"


def replace_item(folder: Path, name: str, content: bytes) -> None:
    """Put these bytes at the end of the item's file and let the metadata point to them."""
    metadata = metadata_of(folder)
    (index,) = (index for index in metadata.storage_data if index.fqn == name)
    file = folder / metadata.storage_data[index].relative_path
    metadata.storage_data[index] = _StorageInfo(file.name, file.stat().st_size, len(content))
    with file.open("ab") as stream:
        stream.write(content)
    write_metadata(folder, metadata)


def saved(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def test_a_malicious_byte_entry_is_never_opened(copy: Path, tmp_path: Path, plain):
    marker = tmp_path / "ran"
    content = saved(shell(marker))
    replace_item(copy, "note", content)
    before = tree(tmp_path)
    assert_reads_equal(copy, {name: value for name, value in plain[1].items() if isinstance(value, Tensor)})
    assert "note" in DCPFolder(copy).others
    assert tree(tmp_path) == before
    torch.load(io.BytesIO(content), weights_only=False)
    assert marker.exists(), "the control: what DCP does with byte entries would have run it"


@pytest.mark.parametrize(
    "payload", [shell, evaluated, lambda marker: Trap(str(marker))], ids=["system", "eval", "class"]
)
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a tensor"])
def test_a_malicious_tensor_entry_is_refused_and_runs_nothing(copy: Path, tmp_path: Path, payload, beside: bool):
    marker = tmp_path / "ran"
    content = saved((torch.ones(4, 5), payload(marker)) if beside else payload(marker))
    content += bytes(max(0, 2000 - len(content)))
    replace_item(copy, "model.0.weight", content)
    before = tree(tmp_path)
    with pytest.raises(ValueError, match=r"__0_0.distcp: 'model.0.weight' at byte \d+: refused: the pickle asks for"):
        DCPFolder(copy).read("model.0.weight")
    assert tree(tmp_path) == before
    torch.load(io.BytesIO(content), weights_only=False)
    assert marker.exists(), "the control: torch.load without weights_only would have run it"


@pytest.mark.parametrize("escape", ["../other/__0_0.distcp", "{}/other/__0_0.distcp", "sub/__0_0.distcp"])
def test_a_path_out_of_the_folder_is_refused_where_dcp_follows_it(copy: Path, tmp_path: Path, escape: str):
    state = trained()
    state["model"]["0.weight"] = secret = torch.full((4, 5), 42.0)
    for other in (tmp_path / "other", copy / "sub"):
        save(other, state)
    metadata = metadata_of(copy)
    metadata.storage_data = {
        index: _StorageInfo(escape.format(tmp_path), info.offset, info.length)
        for index, info in metadata.storage_data.items()
    }
    write_metadata(copy, metadata)
    with pytest.raises(ValueError, match=r"expected the bare name of a data file, __RANK_N\.distcp, got '"):
        DCPFolder(copy)
    target = {"model": {"0.weight": torch.zeros(4, 5)}}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp_load(target, checkpoint_id=copy, no_dist=True)
    assert torch.equal(target["model"]["0.weight"], secret), "the control: DCP reads what is outside"


def info_of(metadata: Metadata, name: str = "model.0.weight") -> _StorageInfo:
    (info,) = (info for index, info in metadata.storage_data.items() if index.fqn == name)
    return info


def set_info(**values: Any) -> Callable[[Metadata], None]:
    return lambda metadata: info_of(metadata).__dict__.update(values)


def set_shape(size: Any, chunk: Any = None, offsets: Any = None) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        entry = tensor_of(metadata)
        entry.size = size
        entry.chunks[0].sizes = size if chunk is None else chunk
        if offsets is not None:
            entry.chunks[0].offsets = offsets

    return change


def set_chunks(*chunks: tuple[tuple[int, int], tuple[int, int]]) -> Callable[[Metadata], None]:
    """Chunks at these offsets of these sizes, each with a place of its own in the byte entry of 'big'."""

    def change(metadata: Metadata) -> None:
        tensor_of(metadata).chunks = [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in chunks]
        old = info_of(metadata)
        for n, (o, _) in enumerate(chunks):
            metadata.storage_data[MetadataIndex("model.0.weight", o)] = _StorageInfo(
                old.relative_path, old.offset + 300 * n, 300
            )

    return change


def set_property(dtype: Any) -> Callable[[Metadata], None]:
    return lambda metadata: tensor_of(metadata).properties.__dict__.update(dtype=dtype)


def rename(name: str) -> Callable[[Metadata], None]:
    return lambda metadata: metadata.state_dict_metadata.update({name: tensor_of(metadata)})


def empty_chunks_without_end(metadata: Metadata) -> None:
    nothing = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([0, 5]))
    entry = TensorStorageMetadata(tensor_of(metadata).properties, torch.Size([0, 5]), [nothing] * 10_000)
    metadata.state_dict_metadata |= {f"tensor{n}": entry for n in range(50)}


def cut_along_nine_dims(metadata: Metadata) -> None:
    set_chunks(((0,) * 9, (1,) * 9))(metadata)  # pyright: ignore[reportArgumentType]
    tensor_of(metadata).size = torch.Size([2] * 9)


def two_items(metadata: Metadata) -> None:
    """Two keys of one value, as no dict of Python's has them."""
    other = MetadataIndex("model.0.weight", torch.Size([9, 9]))
    metadata.storage_data[other] = info_of(metadata)
    object.__setattr__(other, "offset", torch.Size([0, 0]))


def compressed(metadata: Metadata) -> None:
    info_of(metadata).transform_descriptors = ["zstd"]


ABSURD: dict[str, tuple[Callable[[Metadata], None], str]] = {
    "an item behind the end": (set_info(offset=1 << 40), "where the file ends, got 1099511627776"),
    "an item of 2^62 bytes": (set_info(length=1 << 62), "where the file ends"),
    "a negative offset": (set_info(offset=-1), "the offset of 'model.0.weight' to be 0 to 2.63 - 1, got less"),
    "a negative length": (set_info(length=-5), "the length of 'model.0.weight' to be 0 to 2.63 - 1, got less"),
    "an offset beyond 64 bits": (set_info(offset=1 << 70), "got more"),
    "an offset that is no number": (set_info(offset="1"), "expected the offset of 'model.0.weight' to be int, got str"),
    "an offset that is a bool": (set_info(offset=True), "to be int, got bool"),
    "two items at one place": (set_info(offset=0), "expected an item between byte"),
    "a compressed stream": (compressed, "went through a stream transform"),
    "a file name with a line end": (set_info(relative_path="__0_0.distcp\n"), "bare name of a data file"),
    "a file name that is the folder": (set_info(relative_path=".."), "bare name of a data file"),
    "a file name that is no string": (set_info(relative_path=3), "expected relative_path to be str, got int"),
    "a missing file": (set_info(relative_path="__7_0.distcp"), "__7_0.distcp: No such file"),
    "2^60 elements": (set_shape(torch.Size([1 << 60, 5])), "expected less than 2.63 bytes"),
    "2^40 elements": (set_shape(torch.Size([1 << 40, 5])), "expected more than 21990232555520 bytes for the chunk"),
    "a size beyond 64 bits": (set_shape((1 << 70, 5)), "got more"),
    "a negative size": (set_shape((-4, 5)), "got less"),
    "an empty tensor of absurd strides": (
        set_shape(torch.Size([1 << 62, 1 << 62, 0])),
        "expected less than 2.63 bytes",
    ),
    "a thousand dims": (set_shape((1,) * 1000), "to be at most 64 numbers, got 1000"),
    "a size that is a list": (set_shape([4, 5]), "to be tuple, got list"),
    "a size of tuples": (set_shape(((4,), 5)), "to be int, got tuple"),
    "a tensor larger than its chunks": (set_shape(torch.Size([8, 5]), torch.Size([4, 5])), "do not cover its shape"),
    "a tensor smaller than its chunk": (set_shape(torch.Size([3, 5]), torch.Size([4, 5])), "do not cover its shape"),
    "a chunk of other dims": (set_shape(torch.Size([4, 5]), torch.Size([20])), "has a chunk"),
    "a chunk that is nowhere": (set_shape(torch.Size([4, 5]), None, torch.Size([1, 0])), "got no bytes"),
    "chunks with a hole": (set_chunks(((0, 0), (2, 5)), ((3, 0), (1, 5))), "do not cover its shape"),
    "chunks that overlap": (set_chunks(((0, 0), (3, 5)), ((2, 0), (2, 5))), "do not cover its shape"),
    "a hole as large as an overlap": (set_chunks(((0, 0), (2, 5)), ((1, 0), (2, 5))), "do not cover its shape"),
    "no chunks": (set_chunks(), "do not cover its shape"),
    "empty chunks without end": (empty_chunks_without_end, "more chunks than the file has bytes"),
    "a dtype that is a string": (set_property("float32"), "first property of 'model.0.weight' to be a dtype"),
    "a quantised dtype": (set_property(torch.qint8), "asks for 'torch qint8'"),
    "a name that moves the cursor": (rename("\x1b[2J"), r"expected printable names, got '\\x1b\[2J'"),
    "a name that is a number": (lambda m: m.state_dict_metadata.update({3: tensor_of(m)}), "a name to be str, got int"),  # pyright: ignore
    "an offset of 2^63": (set_info(offset=1 << 63), "the offset of 'model.0.weight' to be 0 to 2.63 - 1, got more"),
    "65 dims": (set_shape((1,) * 65), "to be at most 64 numbers, got 65"),
    "64 dims": (set_shape((1,) * 64), "has a chunk"),
    "a size that is a path": (
        set_shape(Path("4")),
        "the size of 'model.0.weight' to be tuple, got 'pathlib.* PosixPath'",
    ),
    "a cut along nine dims": (
        cut_along_nine_dims,
        "'model.0.weight': expected a tensor cut along at most 8 dims, got 9",
    ),
    "two items of one chunk": (two_items, r"two items for 'model.0.weight' at \(0, 0\)"),
    "no properties": (
        lambda m: tensor_of(m).__dict__.update(properties=3),
        "the properties of 'model.0.weight' to be TensorProperties, got int",
    ),
    "no storage": (lambda m: m.__dict__.update(storage_data=None), "storage_data to be dict, got NoneType"),
    "an entry that is no tensor": (
        lambda m: m.state_dict_metadata.update(x=3),  # pyright: ignore
        "expected an object of '.*TensorStorage",
    ),  # pyright: ignore
}


@pytest.mark.parametrize("attack", ABSURD)
def test_absurd_metadata_are_refused_before_memory_is_taken(copy: Path, tmp_path: Path, attack: str):
    change, message = ABSURD[attack]
    metadata = metadata_of(copy)
    change(metadata)
    write_metadata(copy, metadata)
    before = tree(tmp_path)
    with pytest.raises(ValueError, match=message) as caught:
        DCPFolder(copy)
    assert str(copy) in str(caught.value)
    assert tree(tmp_path) == before


CRAFTED: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "not enough data|exhausted"),
    "no pickle": (b"hello", "."),
    "a persistent id": (b"\x80\x04" + text("x") + b"Q.", "opcode BINPERSID"),
    "a persistent id in text": (b"\x80\x04Px\n.", "opcode PERSID"),
    "an extension": (b"\x80\x04\x82\x01.", "opcode EXT1"),
    "a memo slot of 2^32": (b"\x80\x04Nr\xff\xff\xff\xff.", "to be dict|expected an object"),
    "a string of 2^62 bytes": (b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62), "."),
    "a frame of 2^62 bytes": (b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b"N.", "expected an object"),
    "an empty stack": (b"\x80\x04R.", "takes 2 values of 0"),
    "values that are left": (b"\x80\x04NN.", "2 values"),
    "a mark that is missing": (b"\x80\x04t.", "damaged pickle"),
    "a memo slot that is missing": (b"\x80\x04h\x07.", "damaged pickle"),
    "a name of numbers": (b"\x80\x04K\x01K\x02\x93.", "damaged pickle"),
    "a state for a name": (b"\x80\x04ctorch\nSize\n}b.", "sets the state"),
    "a state for a dict": (b"\x80\x04}}b.", "sets the state"),
    "a call of a dict": (b"\x80\x04})R.", "calls something"),
    "items for a number": (b"\x80\x04K\x01(K\x01K\x02u.", "target of SETITEMS to be dict, got int"),
    "a key nested 200,000 times": (b"\x80\x04})" + b"\x85" * 200_000 + b"Ns.", "expected keys that are"),
    "a call with a list": (b"\x80\x04ctorch\nSize\n]R.", "calls something"),
    "a call of what a call gave": (b"\x80\x04ctorch\nSize\n)R)R.", "calls something"),
    "a state for what has one": (b"\x80\x04ctorch\nSize\n)R}b}b.", "sets the state"),
    "a key without a value": (b"\x80\x04}(K\x01u.", "zip"),
    "values for a dict": (b"\x80\x04}K\x01a.", "target of APPENDS to be list, got dict"),
    "a mark that is left": (b"\x80\x04N(.", "1 values and 1 marks are left"),
    "a mark above the values": (b"\x80\x04NN(\x86t.", "takes -1 values of 1"),
    "a name that no DCP file asks for": (b"\x80\x04ctorch\nload\n.", "asks for 'torch load'"),
    "an object of another class": (
        b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadataIndex\n)\x81}b.",
        "expected an object of '.*Metadata', got '.*MetadataIndex'",
    ),
    "a list within itself": (b"\x80\x04]\x94h\x00a.", "expected an object"),
    "only a name": (b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\n.", "to be dict, got NoneType"),
}


@pytest.mark.parametrize("attack", CRAFTED)
def test_a_crafted_pickle_is_refused(copy: Path, attack: str):
    content, message = CRAFTED[attack]
    (copy / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match=rf"\.metadata: .*({message})"):
        DCPFolder(copy)


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (link, "is a link, which is not followed"),
        (pipe, "expected a regular file"),
        (directory, "expected a regular file"),
        (Path.unlink, "No such file"),
    ],
    ids=["link", "pipe", "directory", "missing"],
)
def test_what_is_no_regular_file_is_refused(copy: Path, file: str, change, message: str):
    change(copy / file)
    with pytest.raises(ValueError, match=f"{file}: {message}"):
        DCPFolder(copy)


def test_a_link_that_took_the_place_of_a_data_file_later_is_not_followed(copy: Path):
    folder = DCPFolder(copy)
    link(copy / "__0_0.distcp")
    with pytest.raises(ValueError, match="is a link"):
        folder.read("rng")


def test_metadata_larger_than_any_are_not_read(copy: Path):
    os.truncate(copy / ".metadata", (1 << 30) + 1)
    with pytest.raises(ValueError, match="expected at most 1073741824 bytes, got 1073741825"):
        DCPFolder(copy)


def test_dcp_in_safetensors_format_is_refused_with_its_name(tmp_path: Path):
    save(tmp_path, {"a": torch.ones(2)}, serialization_format=SerializationFormat.SAFETENSORS)
    with pytest.raises(ValueError, match=r"SerializationFormat.SAFETENSORS is not read here"):
        DCPFolder(tmp_path)


def rezipped(
    content: bytes,
    change: Callable[[str, bytes], bytes] = lambda name, data: data,
    compression: int = zipfile.ZIP_STORED,
) -> bytes:
    """The archive again, its records changed."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(out, "w", compression) as new:
        for info in old.infolist():
            if data := change(info.filename, old.read(info)):
                new.writestr(info.filename, data)
    return out.getvalue()


def with_pickle(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    """data.pkl with the one place of `old` replaced."""

    def change(name: str, data: bytes) -> bytes:
        if name != "archive/data.pkl":
            return data
        assert data.count(old) == 1, data
        return data.replace(old, new)

    return lambda content: rezipped(content, change)


def with_record(record: str, new: bytes) -> Callable[[bytes], bytes]:
    return lambda content: rezipped(content, lambda name, data: new if name == f"archive/{record}" else data)


def bomb(content: bytes) -> bytes:
    """300 kB that would be 300 MB."""
    return rezipped(content, lambda n, data: bytes(300 << 20) if n == "archive/data/0" else data, zipfile.ZIP_DEFLATED)


def directory_field(at: int, value: int, size: str) -> Callable[[bytes], bytes]:
    """A field of the first header in the zip's central directory; at < 0: of the end record."""

    def change(content: bytes) -> bytes:
        content = rezipped(content)
        start = content.rindex(b"PK\5\6") - at if at < 0 else content.index(b"PK\1\2") + at
        return content[:start] + struct.pack(size, value) + content[start + struct.calcsize(size) :]

    return change


# The tensor is float32 [4, 5]: in data.pkl K\x14 is its 20 elements, K\x04K\x05 its sizes, K\x05K\x01 its strides.
CRAFTED_ITEMS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "a zip bomb": (bomb, "is compressed or encrypted"),
    "sizes of 2^62": (
        with_pickle(b"K\x04K\x05\x86", b"\x8a\x08" + struct.pack("<q", 1 << 62) + b"K\x05\x86"),
        "as the",
    ),
    "other sizes": (with_pickle(b"K\x04K\x05\x86", b"K\x05K\x04\x86"), r"got torch.float32 \(5, 4\)"),
    "strides beyond the data": (with_pickle(b"K\x05K\x01\x86", b"K\x06K\x01\x86"), "expected 92 bytes of data, got 80"),
    "strides of 2^62": (
        with_pickle(b"K\x05K\x01\x86", b"\x8a\x08" + struct.pack("<q", 1 << 62) + b"K\x01\x86"),
        "bytes",
    ),
    "negative strides": (with_pickle(b"K\x05K\x01\x86", b"J\xfb\xff\xff\xffK\x01\x86"), "strides to be 0 to"),
    "too few strides": (with_pickle(b"K\x05K\x01\x86", b"K\x01\x85"), r"with strides \(1,\)"),
    "another dtype": (with_pickle(b"FloatStorage", b"IntStorage"), "got torch.int32"),
    "a storage that is a function": (with_pickle(b"torch\nFloatStorage", b"os\nsystem"), "asks for 'os system'"),
    "another record": (with_pickle(b"X\x01\x00\x00\x000", b"X\x03\x00\x00\x00../"), "got none"),
    "less data": (with_record("data/0", b"1234"), "expected 80 bytes of data, got 4"),
    "big-endian data": (with_record("byteorder", b"big"), "expected little-endian data"),
    "a pickle too large": (with_record("data.pkl", bytes(1 << 17)), "data.pkl of at most 65536 bytes"),
    "no pickle": (with_record("data.pkl", b""), "expected an archive of torch.save with data.pkl"),
    "a list of tensors": (lambda _: saved([torch.ones(4, 5)]), "expected a plain tensor"),
    "a Parameter": (lambda _: saved(nn.Parameter(torch.ones(4, 5))), "asks for 'torch._utils _rebuild_parameter'"),
    "a sparse tensor": (
        lambda _: saved(torch.ones(4, 5).to_sparse()),
        "asks for 'torch._utils _rebuild_sparse_tensor'",
    ),
    "a plain pickle": (lambda _: pickle.dumps(bytes(1000)), "expected an archive of torch.save"),
    "a record of 4 GiB": (directory_field(24, 0xFFFFFFF0, "<I"), "is compressed or encrypted"),
    "records of 4 GiB": (directory_field(20, 0xFFFFFFF0FFFFFFF0, "<Q"), "outside of the archive"),
    "a record behind the end": (directory_field(42, 0x7FFFFFFF, "<I"), "outside of the archive"),
    "a directory of 4 GiB": (directory_field(-12, 0xFFFFFFF0, "<I"), "expected an archive of torch.save"),
    "a directory behind the end": (directory_field(-16, 0xFFFFFFF0, "<I"), "lies outside of the archive"),
    "a view that starts too late": (
        with_pickle(b"K\x00K\x04K\x05", b"K\x01K\x04K\x05"),
        "expected 84 bytes of data, got 80",
    ),
    "a storage of four parts": (with_pickle(b"K\x14tq", b"tq"), "expected a tensor with a storage"),
    "a tuple for a storage": (with_pickle(b"q\x05QK\x00", b"q\x05K\x00"), "expected a tensor with a storage"),
    "another name of the data": (
        with_pickle(b"X\x01\x00\x00\x000", b"K\x00"),
        "the key of the storage to be str, got int",
    ),
    "only a name": (
        with_record("data.pkl", b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n."),
        "expected a plain tensor",
    ),
    "a tensor of nothing": (
        with_record("data.pkl", b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R."),
        "expected a plain tensor",
    ),
    "an object for a tensor": (
        with_record("data.pkl", b"\x80\x02ccollections\nOrderedDict\n)R."),
        "expected a plain tensor",
    ),
    "a record without its header": (lambda content: content.replace(b"PK\3\4", b"PK\3\5", 1), "outside of the archive"),
    "a pickle that is damaged where it does no harm": (
        lambda content: content.replace(b"\x86q\x07\x89", b"\x86q\x07\x88"),
        "have crc32",
    ),
    "encryption": (directory_field(8, 1, "<H"), "is compressed or encrypted"),
}


@pytest.mark.parametrize("attack", CRAFTED_ITEMS)
def test_a_crafted_tensor_entry_is_refused(copy: Path, tmp_path: Path, attack: str):
    craft, message = CRAFTED_ITEMS[attack]
    replace_item(copy, "model.0.weight", craft(saved(torch.arange(20.0).view(4, 5))))
    before = tree(tmp_path)
    with pytest.raises(ValueError, match=rf"__0_0.distcp: 'model.0.weight' at byte \d+: .*({message})"):
        DCPFolder(copy).read("model.0.weight")
    assert tree(tmp_path) == before


@pytest.mark.parametrize("content", [b"PK\5\6" + bytes(10), bytes(20)])
def test_an_archive_too_short_to_be_one_is_refused(copy: Path, content: bytes):
    name = "optim.state.0.step"
    replace_item(copy, name, content)
    with pytest.raises(ValueError, match=rf"'{name}' at byte \d+: expected an archive of torch.save"):
        DCPFolder(copy).read(name)


def test_a_file_that_is_cut_short_while_it_is_read_is_an_error(copy: Path):
    folder = DCPFolder(copy)
    info = info_of(metadata_of(copy))
    os.truncate(copy / "__0_0.distcp", info.offset + info.length // 2)
    with pytest.raises(ValueError, match=r"the file ends at byte \d+, \d+ bytes too early"):
        folder.read("model.0.weight")


def test_all_is_read_where_the_kernel_gives_a_part_at_a_time(plain, monkeypatch):
    folder, state = plain
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: preadv(fd, [buffers[0][:100]], at))
    monkeypatch.setattr(torch_save, "READ_BYTES", 64)  # of which a checksum is computed at a time
    assert torch.equal(DCPFolder(folder).read("rng"), state["rng"])


def test_a_view_of_the_rows_of_a_larger_storage_is_read(copy: Path):
    base = torch.arange(50.0).view(10, 5)
    replace_item(copy, "model.0.weight", saved(base[3:7]))
    assert torch.equal(DCPFolder(copy).read("model.0.weight"), base[3:7])


def test_files_of_ranks_and_parts_of_several_digits_are_read(copy: Path, plain):
    metadata = metadata_of(copy)
    for info in metadata.storage_data.values():
        info.relative_path = "__1024_12.distcp"
    (copy / "__0_0.distcp").rename(copy / "__1024_12.distcp")
    write_metadata(copy, metadata)
    assert torch.equal(DCPFolder(copy).read("rng"), plain[1]["rng"])


@pytest.mark.parametrize("index", [(slice(0, 4, 2),), (slice(None),) * 3])
def test_a_part_is_one_box(plain, index):
    with pytest.raises(AssertionError):
        DCPFolder(plain[0]).read("model.0.weight", index)


def test_every_dtype_that_torch_saves_as_numbers_is_known():
    names = {str(dtype).removeprefix("torch.") for dtype in DTYPES}
    floats = {"float64", "float32", "float16", "bfloat16", "complex128", "complex64"}
    eights = {f"float8_{kind}" for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")}
    integers = {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
    assert names == floats | eights | integers | {"bool"}
    storages = {"float64", "float32", "float16", "bfloat16", "complex128", "complex64", "bool", "uint8"}
    assert {str(dtype).removeprefix("torch.") for dtype in torch_save.STORAGES.values()} == storages | {
        f"int{bits}" for bits in (8, 16, 32, 64)
    }


def test_the_archive_that_the_crafted_ones_are_made_from_is_read(copy: Path):
    replace_item(copy, "model.0.weight", rezipped(saved(torch.arange(20.0).view(4, 5))))
    assert torch.equal(DCPFolder(copy).read("model.0.weight"), torch.arange(20.0).view(4, 5))


def test_a_flipped_bit_in_the_data_is_found_and_elsewhere_in_the_item_found_or_harmless(copy: Path):
    state = torch.arange(20.0).view(4, 5)
    replace_item(copy, "model.0.weight", saved(state))
    file, info = copy / "__0_0.distcp", info_of(metadata_of(copy))
    good = file.read_bytes()
    data = range(at := good.index(state.numpy().tobytes(), info.offset), at + 80)
    outcomes = {"found": 0, "harmless": 0}
    for at in {*data, *range(info.offset, info.offset + info.length, 3)}:
        flipped = bytearray(good)
        flipped[at] ^= 1 << at % 8
        file.write_bytes(flipped)
        try:
            assert torch.equal(DCPFolder(copy).read("model.0.weight"), state), at
            outcomes["harmless"] += 1
            assert at not in data
        except ValueError:
            outcomes["found"] += 1
    assert min(outcomes.values()) > 80


def test_damaged_metadata_raise_nothing_but_a_value_error(copy: Path):
    good = (copy / ".metadata").read_bytes()
    generator = random.Random(0)
    damaged = [good[:n] for n in range(0, len(good), 97)]
    for _ in range(300):
        flipped = bytearray(good)
        flipped[generator.randrange(len(good))] ^= 1 << generator.randrange(8)
        damaged.append(bytes(flipped))
    found = 0
    for content in damaged:
        (copy / ".metadata").write_bytes(content)
        try:
            DCPFolder(copy)
        except ValueError:
            found += 1
    assert found > 200
