"""Room hf/: directories of transformers are read as transformers reads them, or refused with the reason."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate

from dtmega import config, families
from dtmega.__main__ import main as command
from dtmega.cli.convert import to_checkpoint
from dtmega.config.families.bloom import BloomKeys
from dtmega.interop import stored
from dtmega.interop.hf.files import config_json
from dtmega.interop.hf.files.tensors import INDEX, TensorFiles, has_weights
from dtmega.interop.hf.files.theirs import open_weights
from dtmega.ops.shards import full_tensor
from dtmega.plans import load_hf, parallelize_hf, plan_for, verify_plan
from tests import hf_models, ranks
from tests.hf_models import Case

MIXTURE = {"vocab_size": 131, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2}
MIXTURE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": None}
MIXTURES = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
    "GptOss": {"num_local_experts": 4, "head_dim": 16},  # without a plan of transformers
}


def mixture(name: str) -> Any:
    torch.manual_seed(0)
    cfg = getattr(transformers, f"{name}Config")(**{**MIXTURE, **MIXTURES[name]})
    return getattr(transformers, f"{name}ForCausalLM")._from_config(cfg, attn_implementation="eager")


def saved(folder: Path, case: Case, **options: Any) -> dict[str, torch.Tensor]:
    """A directory as transformers writes it; the tensors of its one file."""
    hf_models.build(case).save_pretrained(folder, **options)
    single = folder / "model.safetensors"
    return load_file(single) if single.exists() else {}


def edit(file: Path, change: Callable[[Any], object]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def ours(folder: Path) -> dict[str, torch.Tensor]:
    """The weights that a run starts with."""
    model = config_of(folder).model
    source = stored.weights(model)
    assert source is not None
    return {name: source.read(name) for name in source.tensors}


def theirs(folder: Path) -> dict[str, torch.Tensor]:
    """The weights that transformers loads."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return {name: p.detach() for name, p in model.named_parameters()} | hf_models.stored_buffers(model)


def config_of(folder: Path) -> config.Config:
    sections = {"model": {"name": "hf", "path": str(folder)}, "data": {"seq_len": 16, "tokenizer": "bytes"}}
    return families.resolve(config.validate({**sections, "train": {"steps": 1}}, "test"))


def assert_same_as_transformers(folder: Path) -> None:
    expected = theirs(folder)
    found = ours(folder)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], p) for name, p in expected.items())


# ------------------------------------------------------------------------------------- which files, which tensors


def beside_a_single_file(folder: Path) -> None:
    """An average of weights whose name sorts last."""
    doubled = {name: 2 * t for name, t in saved(folder, Case("llama")).items()}
    save_file(doubled, folder / "z_ema.safetensors")


def beside_an_index(folder: Path) -> None:
    saved(folder, Case("llama"), max_shard_size="50KB")
    save_file({"model.norm.weight": torch.ones(64)}, folder / "z_ema.safetensors")


def a_stale_index(folder: Path) -> None:
    saved(folder, Case("llama"), max_shard_size="50KB")
    for file in folder.glob("model-*.safetensors"):
        save_file({name: 2 * t for name, t in load_file(file).items()}, file, metadata={"format": "pt"})
    hf_models.build(Case("llama")).save_pretrained(folder / "new")
    (folder / "new" / "model.safetensors").rename(folder / "model.safetensors")


def an_equal_head(folder: Path) -> None:
    tensors = saved(folder, Case("llama"))
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(tensors | head, folder / "model.safetensors", metadata={"format": "pt"})


def old_masks(folder: Path) -> None:
    """Tensors that old versions stored, and transformers leaves out for this class."""
    masks = {f"transformer.h.{i}.attn.bias": torch.ones(1, 1, 4, 4) for i in range(2)}
    save_file(saved(folder, Case("gpt2")) | masks, folder / "model.safetensors", metadata={"format": "pt"})


def old_frequencies(folder: Path) -> None:
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file(saved(folder, Case("llama")) | frequencies, folder / "model.safetensors", metadata={"format": "pt"})


def without_the_prefix(folder: Path) -> None:
    tensors = {name.removeprefix("transformer."): t for name, t in saved(folder, Case("gpt2")).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    "make",
    [
        beside_a_single_file,
        beside_an_index,
        a_stale_index,
        an_equal_head,
        old_masks,
        old_frequencies,
        without_the_prefix,
    ],
)
def test_a_run_starts_with_what_transformers_loads(tmp_path: Path, make: Callable[[Path], None]):
    make(tmp_path)
    assert_same_as_transformers(tmp_path)


def test_a_stored_head_that_differs_is_refused_and_untied_it_is_what_transformers_makes_of_it(tmp_path: Path):
    tensors = saved(tmp_path, Case("llama"))
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"].flip(0)}
    save_file(tensors | head, tmp_path / "model.safetensors", metadata={"format": "pt"})
    expected = theirs(tmp_path)
    assert "lm_head.weight" in expected
    with pytest.raises(ValueError, match=r"config.json ties them; .*\"tie_word_embeddings\": false there"):
        ours(tmp_path)
    edit(tmp_path / "config.json", lambda plain: plain.update(tie_word_embeddings=False))
    found = ours(tmp_path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], p) for name, p in expected.items())


def more(**tensors: torch.Tensor) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        save_file(load_file(folder / "model.safetensors") | tensors, folder / "model.safetensors")

    return damage


def index(content: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder.parent / "secret.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
        (folder / "model.safetensors").rename(folder / "a.safetensors")
        (folder / INDEX).write_text(content)

    return damage


def distributed(folder: Path) -> None:
    (folder / "shard-00000-model-00001-of-00001.safetensors").touch()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            more(**{"model.layers.0.mlp.up_proj.bias": torch.ones(96)}),
            "no place for model.layers.0.mlp.up_proj.bias",
        ),
        (
            more(**{"model.layers.2.mlp.up_proj.weight": torch.ones(1)}),
            "for model.layers.2.mlp.up_proj.weight",
        ),
        (
            more(**{"model.norm.weight": torch.ones(64, dtype=torch.int32)}),
            "'model.norm.weight' is of dtype I32, expected one of F64, F32, F16, BF16",
        ),
        (more(**{"norm.weight": torch.ones(64)}), "'model.norm.weight' and 'norm.weight' are stored; expected one"),
        (more(**{"a\x1b[2J": torch.ones(1)}), r"expected printable names, got 'a\x1b[2J'"),
        (index('{"weight_map": {"a": "../secret.safetensors"}}'), "names '../secret.safetensors'; expected names of"),
        (index('{"weight_map": {"a": "/etc/passwd"}}'), "names '/etc/passwd'; expected names of files beside it"),
        (index('{"weight_map": {"a": ".."}}'), "has no '..', which"),
        (index('{"metadata": {}}'), "expected a 'weight_map' of tensors to files"),
        (index('{"weight_map": []}'), "expected a 'weight_map' of tensors to files"),
        (index('{"weight_map": {"a": ["a.safetensors"]}}'), "expected a 'weight_map' of tensors to files"),
        (index('{"weight_map": {"lost": "a.safetensors"}}'), "a.safetensors has no 'lost', which"),
        (index('{"weight_map":' * 10**5), "expected JSON of at most 64 levels"),
        (index("[]"), "expected a JSON object, got list"),
        (distributed, "holds shard-00000-model-00001-of-00001.safetensors, of a distributed save"),
    ],
)
def test_a_directory_that_is_not_that_of_its_model_is_one_message(tmp_path: Path, damage, message: str):
    folder = tmp_path / "model"
    saved(folder, Case("llama"))
    damage(folder)
    with pytest.raises(ValueError, match=re.escape(message)):
        ours(folder)


def test_scalars_and_dtypes_of_buffers_are_read_and_weights_are_of_floats_only(tmp_path: Path):
    save_file({"scale": torch.tensor(3.0), "steps": torch.tensor([5])}, tmp_path / "model.safetensors")
    files = TensorFiles(tmp_path)
    assert files.read("scale").item() == 3
    assert files.read("scale", ()).item() == 3
    assert files.read("steps").tolist() == [5]
    files.check_weight("scale", ())
    with pytest.raises(ValueError, match="'steps' is of dtype I64, expected one of F64, F32, F16, BF16"):
        files.check_weight("steps", (1,))


STORED = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
    **{"BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
}


@pytest.mark.parametrize("name", STORED)
def test_each_dtype_that_safetensors_writes_is_read_and_only_floats_of_two_bytes_and_more_are_weights(
    tmp_path: Path, name: str
):
    tensor = torch.tensor([0.0, 1.0]).to(STORED[name])
    save_file({"a": tensor}, tmp_path / "model.safetensors")
    files = TensorFiles(tmp_path)
    assert files.tensors == {"a": (STORED[name], (2,))}
    assert torch.equal(files.read("a").float(), tensor.float())
    assert files.bytes_read == tensor.nbytes
    if name in ("F64", "F32", "F16", "BF16"):
        files.check_weight("a", (2,))
    else:
        with pytest.raises(ValueError, match=f"'a' is of dtype {name}, expected one of F64, F32, F16, BF16"):
            files.check_weight("a", (2,))


def test_a_dtype_that_no_weight_or_buffer_has_is_refused(tmp_path: Path):
    save_file({"a": torch.ones(2, dtype=torch.complex64)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model.safetensors: 'a' is of an unknown dtype, C64"):
        TensorFiles(tmp_path)


def written(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file of that header, which says that it has another length."""
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(content) if length is None else length).to_bytes(8, "little") + content + data


def entry(**changes: object) -> dict[str, object]:
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


DAMAGED = {
    "empty": b"",
    "shorter than a length": b"\x08",
    "a header beyond the end": written({}, length=1000),
    "a header without end": written({}, length=2**63),
    "no JSON": written(b"{]"),
    "a list": written([]),
    "less data than it says": written(entry(), bytes(7)),
    "more data than it says": written(entry(), bytes(9)),
    "data before its start": written(entry(data_offsets=[8, 0]), bytes(8)),
    "a hole": written(entry(data_offsets=[8, 16]), bytes(16)),
    "another shape": written(entry(shape=[3]), bytes(8)),
    "a shape below 0": written(entry(shape=[-2]), bytes(8)),
    "a shape beyond 64 bits": written(entry(shape=[2**62, 2**62]), bytes(8)),
    "a dtype that is none": written(entry(dtype="F33"), bytes(8)),
    "no shape": written({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, bytes(8)),
    "two tensors on one place": written(entry() | {"b": entry()["a"]}, bytes(8)),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_one_message_that_names_it(tmp_path: Path, damage: str):
    (tmp_path / "model.safetensors").write_bytes(written(entry(), bytes(8)))
    assert TensorFiles(tmp_path).read("a").tolist() == [0, 0]
    (tmp_path / "model.safetensors").write_bytes(DAMAGED[damage])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a safetensors file: "):
        TensorFiles(tmp_path)


def test_a_tensor_in_another_file_than_the_index_says_is_refused(tmp_path: Path):
    for name in "ab":
        save_file({name: torch.ones(1)}, tmp_path / f"{name}.safetensors")
    for weight_map, message in (
        ({"a": "b.safetensors", "b": "a.safetensors"}, "b.safetensors has no 'a', which"),
        ({}, "expected a 'weight_map' of tensors to files"),
        ({"a": "a\x1b.safetensors"}, r"names 'a\x1b.safetensors'; expected names of files beside it"),
    ):
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ValueError, match=re.escape(message)):
            TensorFiles(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["a.safetensors", "pytorch_model.bin", "model.pt", "consolidated.00.pth", "m-Q4_K_M.gguf", "tf_model.h5"],
)
def test_weights_of_any_kind_are_seen_and_those_that_are_not_read_are_named(tmp_path: Path, name: str):
    (tmp_path / "config.json").touch()
    assert not has_weights(tmp_path)
    (tmp_path / name).touch()
    assert has_weights(tmp_path)
    otherwise = {".safetensors": "is not read", ".gguf": "is for inference; download", ".h5": "is not read; re-save"}
    what = otherwise.get(Path(name).suffix, "a pickle, which can run code")
    with pytest.raises(ValueError, match=f"holds neither model.safetensors nor .*{re.escape(name)}.* {what}|: {what}"):
        TensorFiles(tmp_path)


def test_stored_buffers_come_from_the_files_too(tmp_path: Path):
    cfg = transformers.ApertusConfig(**MIXTURE)
    truth = transformers.ApertusForCausalLM._from_config(cfg, dtype=torch.float32)
    stored = truth.state_dict().keys() - dict(truth.named_parameters()).keys()
    assert stored
    for name in stored:
        truth.get_buffer(name).fill_(0.25)
    truth.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.ApertusForCausalLM._from_config(cfg, dtype=torch.float32)
    load_hf(model, tmp_path, "cpu")
    expected = truth.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


# ---------------------------------------------------------------------------------------------------- config.json


def test_no_implementation_that_a_config_json_names_reaches_transformers(tmp_path: Path):
    kernel = "stranger/kernel"
    keys = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")
    keys += ("_attn_implementation_internal", "_attn_implementation_autoset", "use_kernels", "kernel_config")
    keys += ("fusion_config", "base_model_tp_plan", "base_model_pp_plan", "base_model_ep_plan")
    named = dict.fromkeys(keys, kernel)
    plain = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", **named}, "parts": [named], **named}
    (tmp_path / "config.json").write_text(json.dumps(plain))
    made = config_json.make_config(tmp_path, config_json.read_plain(tmp_path))
    for part in (made, made.get_text_config()):
        assert kernel not in str(vars(part))
        assert part._attn_implementation is None
        assert part._experts_implementation is None
        assert part.base_model_tp_plan != kernel
    assert made.parts == [{}]
    assert made.name_or_path == str(tmp_path)


COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "layers", "layer", "num_experts", "n_expert")
COUNTS += ("num_local_experts", "n_routed_experts", "num_blocks", "n_block", "depth", "depths", "decoder_depth")


@pytest.mark.parametrize("key", COUNTS)
def test_a_count_above_a_thousand_needs_as_many_tensors(tmp_path: Path, key: str):
    def counted(value: object) -> dict[str, Any]:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "a", "inside": {key: value}}))
        return config_json.read_plain(tmp_path)

    assert counted(1000)["inside"] == {key: 1000}
    with pytest.raises(ValueError, match=f"has {key}=1001, but 0 tensors are stored beside it"):
        counted(1001)
    with pytest.raises(ValueError, match=f"has {key}=1001, but 0 tensors are stored beside it"):
        counted([2, 1001])
    save_file({str(i): torch.ones(1) for i in range(1001)}, tmp_path / "model.safetensors")
    assert counted(1001)["inside"] == {key: 1001}
    with pytest.raises(ValueError, match=f"has {key}=1002, but 1001 tensors are stored beside it"):
        counted(1002)


@pytest.mark.parametrize("key", ["transformers_weights", "configuration_files"])
def test_files_elsewhere_are_refused_and_a_key_that_names_none_is_not(tmp_path: Path, key: str):
    for value in (None, [], ""):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "a", key: value, "hidden_size": 10**6}))
        assert config_json.read_plain(tmp_path)[key] == value
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "a", "inside": [{key: ["../a"]}]}))
    with pytest.raises(ValueError, match=f"has {key}=.*expected a directory whose files have the usual names"):
        config_json.read_plain(tmp_path)


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_a_run_on_a_directory_that_names_a_kernel_computes_as_one_that_does_not(tmp_path: Path, key: str):
    saved(tmp_path, Case("llama"))
    edit(tmp_path / "config.json", lambda plain: plain.update({key: "stranger/kernel"}))
    built: Any = families.build(config_of(tmp_path))
    assert built.hf.config._attn_implementation == hf_models.plain(Case("llama")).config._attn_implementation


def test_the_same_configuration_is_made_as_by_transformers_itself(tmp_path: Path):
    for i, name in enumerate(("llama", "gpt2", "opt", "mistral")):
        hf_models.plain(Case(name)).config.save_pretrained(tmp_path / str(i))
        made = config_json.make_config(tmp_path / str(i), config_json.read_plain(tmp_path / str(i)))
        assert made.to_dict() == transformers.AutoConfig.from_pretrained(tmp_path / str(i)).to_dict()


WRONG = {
    "a type that is a list": {"model_type": []},
    "a type that is a number": {"model_type": 5},
    "layers without end": {"num_hidden_layers": 10**9},
    "layers without end in a list": {"depths": [2, 10**9]},
    "code of an unknown family": {"model_type": "mine", "inner": [{"auto_map": {"AutoModel": "m.M"}}]},
    "a rope that is a text": {"rope_parameters": "linear"},
    "classes that are none": {"architectures": ["pipeline"]},
    "classes that are numbers": {"architectures": [5]},
    "a width that is a text": {"hidden_size": "wide"},
    "a width that torch cannot count": {"hidden_size": 2**62},
    "a wrong dtype": {"dtype": "float31"},
}


@pytest.mark.parametrize("name", WRONG)
def test_verify_plan_refuses_a_config_json_that_is_none_with_one_message(tmp_path: Path, name: str, capsys):
    hf_models.plain(Case("llama")).config.save_pretrained(tmp_path)
    edit(tmp_path / "config.json", lambda plain: plain.update({"architectures": ["LlamaForCausalLM"], **WRONG[name]}))
    assert command(["verify-plan", str(tmp_path)]) == 2
    assert "dtmega verify-plan: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 2**52}, f"has hidden_size={2**52}, but the largest dimension of its tensors is 256"),
        ({"vocab_size": 10**400}, "vocab_size: expected an integer of at most 9007199254740992, got 1000"),
        ({"n_layer": 10**9}, "has n_layer=1000000000, but 29 tensors are stored beside it"),
        ({"n_layer": 999}, "has n_layers=999, but 29 tensors"),
        ({"n_layer": "many"}, "has n_layer='many', expected a number above 0 ([model] n_layers)"),
        ({"n_layer": -1}, "has n_layer=-1, expected a number above 0 ([model] n_layers)"),
        ({"model_type": []}, "has model_type=[]; expected the name of a family"),
    ],
)
def test_convert_from_a_directory_of_bloom_builds_no_more_than_is_stored(tmp_path: Path, change, message: str, capsys):
    saved(tmp_path / "in", Case("bloom"))
    edit(tmp_path / "in" / "config.json", lambda plain: plain.update(change))
    names = ["--from", "hf", str(tmp_path / "in"), "--to", "dtmega", str(tmp_path / "out")]
    assert command(["convert", *names]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        (
            {"rope_scaling": "linear", "rope_parameters": None},
            2,
            "config.json has 'linear' as rope_parameters",
        ),
        (
            {"auto_map": {"AutoModel": "m.M"}},
            0,
            "has auto_map, code of its own: custom (remote) code is not run",
        ),
    ],
)
def test_convert_from_a_directory_of_llama_reads_no_text_as_rope_and_runs_no_code(
    tmp_path: Path, change, code: int, message: str, capsys
):
    saved(tmp_path / "in", Case("llama"))
    edit(tmp_path / "in" / "config.json", lambda plain: plain.update(change))
    names = ["--from", "hf", str(tmp_path / "in"), "--to", "dtmega", str(tmp_path / "out")]
    assert command(["convert", *names]) == code
    assert message in "".join(capsys.readouterr())
    names = ["--from", "dtmega", str(tmp_path / "out"), "--to", "hf", str(tmp_path / "back")]
    if code == 0:
        assert command(["convert", *names]) == 0
        assert "auto_map" not in (tmp_path / "back" / "config.json").read_text()


class Memory:
    """One tensor as a `Source`."""

    tensors = {"norm.weight": (torch.float32, (64,))}  # noqa: RUF012

    def read(self, name: str, index: Any = None) -> torch.Tensor:
        return torch.zeros(64)


def test_convert_from_a_checkpoint_builds_no_more_than_is_stored(tmp_path: Path, capsys):
    to_checkpoint.write(str(tmp_path / "in"), Memory(), BloomKeys(n_layers=10**9))
    names = ["--from", "dtmega", str(tmp_path / "in"), "--to", "hf", str(tmp_path / "out")]
    assert command(["convert", *names]) == 2
    assert "(its own config) has n_layers=1000000000, but 1 tensors" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------- mixtures


@pytest.mark.parametrize(("name", "joined"), [*((name, False) for name in hf_models.MIXTURES), ("mixtral", True)])
def test_a_mixture_is_read_whether_its_experts_are_stored_one_by_one_or_stacked(
    tmp_path: Path, name: str, joined: bool
):
    tensors = saved(tmp_path, Case(name, tied=False), save_original_format=not joined)
    assert any(".experts.0." in name for name in tensors) is not joined
    assert_same_as_transformers(tmp_path)


def test_of_experts_that_are_stored_one_by_one_those_that_are_asked_for_are_read(tmp_path: Path):
    saved(tmp_path, Case("olmoe", tied=False))
    name = "model.layers.1.mlp.experts.gate_up_proj"
    model = hf_models.plain(Case("olmoe", tied=False))
    folder = open_weights(tmp_path, model)
    box = (slice(1, 5), slice(30, 70), slice(8, 40))  # of four of six, the ends of gates and the starts of ups
    assert torch.equal(folder.read(name, box), theirs(tmp_path)[name][box])
    assert folder.bytes_read == 4 * 40 * 32 * 4


def without_an_expert(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.1.block_sparse_moe.experts.2.w3.weight"]


def with_another_expert(tensors: dict[str, torch.Tensor]) -> None:
    expert = "model.layers.0.block_sparse_moe.experts.{}.w1.weight"
    tensors[expert.format(4)] = tensors[expert.format(3)].clone()


def with_a_wider_expert(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.block_sparse_moe.experts.1.w2.weight"] = torch.zeros(64, 50)


def with_the_stack_too(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.mlp.experts.down_proj"] = torch.zeros(4, 64, 48)


def with_a_second_name(tensors: dict[str, torch.Tensor]) -> None:
    expert = "model.layers.0.{}.experts.1.w2.weight"
    tensors[expert.format("mlp")] = tensors[expert.format("block_sparse_moe")].clone()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_an_expert, "has no 'model.layers.1.block_sparse_moe.experts.2.w3.weight' in its safetensors files"),
        (with_another_expert, "has no place for model.layers.0.block_sparse_moe.experts.4.w1.weight"),
        (with_a_wider_expert, "experts.1.w2.weight' of .* is [64, 50], but config.json gives [64, 48]"),
        (
            with_the_stack_too,
            "'model.layers.0.mlp.experts.down_proj' is stored whole and in parts, such as .*experts.0.w2.weight'",
        ),
        (with_a_second_name, "expected one tensor for model.layers.0.mlp.experts.1.w2.weight"),
    ],
)
def test_a_mixture_is_refused_unless_each_expert_is_there_once(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], message: str
):
    tensors = saved(tmp_path, Case("mixtral", tied=False))
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=re.escape(message).replace(r"\.\*", ".*")):
        ours(tmp_path)


def test_a_form_of_the_hub_that_is_not_read_is_refused_as_such_and_the_directory_that_the_message_tells_of_is_read(
    tmp_path: Path,
):
    """Three convolutions of a linear attention, of which the model makes one."""
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8}
    kinds = ["linear_attention", "full_attention"]
    cfg = transformers.OlmoHybridConfig(
        **MIXTURE, **sizes, linear_value_head_dim=8, layer_types=kinds, eos_token_id=1, bos_token_id=0
    )
    transformers.OlmoHybridForCausalLM(cfg).save_pretrained(tmp_path / "hub")
    message = r"is complete, but in a form that is not read here: '.*k_conv1d.weight' is stored by itself"
    with pytest.raises(ValueError, match=message):
        ours(tmp_path / "hub")
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hub")
    whole.save_pretrained(tmp_path / "joined", save_original_format=False)
    assert_same_as_transformers(tmp_path / "joined")


def test_the_noise_of_a_router_is_off_like_dropout_and_said(tmp_path: Path):
    noisy = mixture("Mixtral").config
    noisy.router_jitter_noise = 0.1
    noisy.save_pretrained(tmp_path)
    model = config_of(tmp_path).model
    assert f"{tmp_path}: without its dropout (router_jitter_noise=0.1)" in families.of(model).notes(model)
    with torch.device("meta"):
        (block, _) = families.of(model).build(model).blocks()
        theirs = transformers.MixtralForCausalLM(noisy)
    assert block.mlp.jitter_noise == 0.0
    # In a loop of one's own it stays, and the plan says so.
    assert "jitter_noise=0.1): its masks are not those of one process" in str(plan_for(theirs))


def test_the_coefficient_of_a_routers_loss_alone_is_no_reason_to_refuse(tmp_path: Path):
    mixture("Mixtral").config.save_pretrained(tmp_path)
    edit(tmp_path / "config.json", lambda plain: plain.update(router_aux_loss_coef=0.5))
    assert config_of(tmp_path).model.n_layers == 2
    edit(tmp_path / "config.json", lambda plain: plain.update(output_router_logits=True))
    with pytest.raises(ValueError, match=r"output_router_logits=true: .* would change with the layout"):
        config_of(tmp_path)


def on_one_rank() -> dict[str, list[str]]:
    """The differences in what a mixture of each kind computes from before it was "cut" over one rank."""
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    tokens = torch.arange(24).view(2, 12)
    found: dict[str, list[str]] = {}
    for name in MIXTURES:
        truth, model = mixture(name), parallelize_hf(mixture(name), mesh)
        for each in (truth, model):
            each(input_ids=tokens, labels=tokens).loss.backward()
        pairs = zip(truth.named_parameters(), model.parameters(), strict=True)
        found[name] = [n for (n, p), q in pairs if not torch.allclose(full_tensor(q.grad), p.grad, 1e-4, 1e-6)]
        found[name] += [str(plan_for(truth, 1)).splitlines()[-1]]
    dist.barrier()
    return found


def three_experts() -> Any:
    cfg = transformers.MixtralConfig(**MIXTURE, num_local_experts=3)
    return transformers.MixtralForCausalLM._from_config(cfg, attn_implementation="eager")


def on_two_ranks() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    eager = mixture("Mixtral")
    eager.set_experts_implementation("eager")
    found: dict[str, Any] = {"eager": str(verify_plan(eager, mesh)).splitlines()[-1]}
    # Both are proven first, with the implementation that transformers chooses.
    cut = parallelize_hf(mixture("Mixtral"), mesh).model.layers[0].mlp.experts
    whole = parallelize_hf(three_experts(), mesh, generic=True).model.layers[0].mlp.experts
    found["here"] = [cut.num_experts, *(list(p.to_local().shape) for p in cut.parameters())]
    found["whole"] = [whole.num_experts, *(p.placements for p in whole.parameters())]
    return found


def test_on_one_rank_a_mixture_needs_no_words_and_computes_what_it_did():
    (found,) = ranks.run(1, on_one_rank)
    assert found == {name: ["one rank: nothing is cut"] for name in MIXTURES}


def test_a_rank_has_whole_experts_with_the_numbers_of_one_process():
    for found in ranks.run(2, on_two_ranks):
        assert found.pop("here") == [2, [2, 64, 64], [2, 64, 32]]
        assert found.pop("whole") == [3, (Replicate(),), (Replicate(),)]
        assert re.fullmatch(r"(\d+) of \1 comparisons within 2e-05", found["eager"])


def test_what_tp_cannot_share_of_a_mixture_is_refused_and_generic_leaves_it_whole():
    model = three_experts()
    with pytest.raises(
        ValueError, match=r"tp=2 does not divide num_experts=3: 3 % 2 = 1, and a rank has whole experts"
    ):
        plan_for(model)
    assert "whole on every rank, though it says how to cut them: model.layers.*.mlp.experts" in str(
        plan_for(model, generic=True)
    )
    model = mixture("Mixtral")
    rows = {**model.config.base_model_tp_plan}
    del rows["layers.*.mlp.experts"]
    model.config.base_model_tp_plan = rows
    with pytest.raises(ValueError, match=r"gate_up_proj, a parameter, .*generic=True\) leaves it whole"):
        plan_for(model)
    assert "experts.gate_up_proj, model.layers" in str(plan_for(model, generic=True))


def test_a_folder_of_a_cut_model_under_fsdp_knows_the_names_of_its_class(tmp_path: Path):
    saved(tmp_path, Case("gpt_neox"))
    ranks.run(1, under_fsdp, str(tmp_path))


def under_fsdp(folder: str) -> None:
    from torch.distributed.fsdp import fully_shard

    truth = hf_models.build(Case("gpt_neox"))
    with torch.device("meta"):
        model = hf_models.plain(Case("gpt_neox"))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    source = open_weights(folder, model)
    names = dict(truth.named_parameters())
    assert source.tensors.keys() == names.keys()
    assert all(torch.equal(source.read(name), p) for name, p in names.items())
