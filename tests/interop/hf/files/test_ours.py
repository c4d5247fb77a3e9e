"""Room hf/ for a model of the house: transformers writes what we read, and reads what we write."""

# transformers is imported where it is used: ranks import this file, and it would cost each of them seconds.
import json
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dtmega import config, families, mesh
from dtmega.checkpoint.weights import load_weights
from dtmega.config.families.bloom import BloomKeys
from dtmega.data.tokenizers.load import load_tokenizer
from dtmega.data.tokenizers.tokenizer_json import to_json
from dtmega.interop import stored
from dtmega.interop.formats.bloom import HF
from dtmega.interop.formats.sources import Cast
from dtmega.interop.hf.files import config_json
from dtmega.interop.hf.files.folder import Folder
from dtmega.interop.hf.files.tensors import INDEX, TensorFiles
from dtmega.interop.hf.files.write import split
from dtmega.models.bloom import Bloom
from dtmega.models.initial import init_weights
from dtmega.training.parallelize import parallelize
from tests import ranks

SHAPE = {"vocab_size": 131, "hidden_size": 64, "n_layers": 2, "n_heads": 8}
MODEL = BloomKeys.model_validate(SHAPE)


class Memory:
    """Tensors in memory as a `Source`; `asked` are the names that were read, in order."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors, self.asked = tensors, []

    @property
    def tensors(self):
        return {name: (t.dtype, tuple(t.shape)) for name, t in self._tensors.items()}

    def read(self, name, index=None):
        self.asked.append(name)
        return self._tensors[name][... if index is None else index]


class Broken(Memory):
    def read(self, name, index=None):
        raise OSError(f"{name} is on a bad sector")


def write_all(source, folder, model, tokenizer_json=None, **keys):
    """`export` from one process."""
    keys = {"rank": 0, "size": 1, "barrier": lambda: None} | keys
    stored.of(model).export(source, folder, model, tokenizer_json, **keys)


def opened(folder: Path | str, model: config.Model = MODEL) -> Folder:
    """The weights in a directory."""
    source = stored.of(model).folder(Path(folder), model)
    assert isinstance(source, Folder)
    return source


def model_section(folder: Path) -> dict:
    """The [model] section that its config.json describes."""
    return HF.section(config_json.read_plain(folder), str(folder))


def check_config(folder: Path, model: config.Model) -> None:
    HF.check(config_json.read_plain(folder), str(folder), model)


def parameters(model: Bloom) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def empty_model(model: BloomKeys = MODEL) -> Bloom:
    """Every parameter is NaN, so that one which is not filled shows."""
    built = families.of(model).build(model)
    built.init_buffers(seed=1)
    with torch.no_grad():
        for p in built.parameters():
            p.fill_(torch.nan)
    return built


def error(ours: torch.Tensor, truth: torch.Tensor) -> float:
    return ((ours - truth).norm() / truth.norm()).item()


@pytest.fixture(scope="module")
def pair():
    """Our model and Hugging Face's with the same weights, biases and norms perturbed."""
    from tests.models.test_bloom import pair

    return pair(8)


@pytest.fixture(scope="module")
def folders(tmp_path_factory, pair) -> dict[str, Path]:
    """The files that transformers writes, and those that older versions wrote."""
    root, (_, theirs) = tmp_path_factory.mktemp("hf"), pair
    named = {name: root / name for name in ("many", "one", "bare", "with head", "cache")}
    theirs.save_pretrained(named["many"], max_shard_size="100KB")
    theirs.save_pretrained(named["one"])
    theirs.transformer.save_pretrained(named["bare"])
    tensors = load_file(named["one"] / "model.safetensors")
    buffers = {"transformer.h.0.self_attention.scale_mask_softmax.causal_mask": torch.zeros(1)}
    buffers |= {"transformer.h.1.self_attention.masked_bias": torch.zeros(1)}
    head = {"lm_head.weight": tensors["transformer.word_embeddings.weight"].clone()}
    named["with head"].mkdir()
    save_file(tensors | head | buffers, named["with head"] / "model.safetensors")
    theirs.config.save_pretrained(named["with head"])
    named["cache"].mkdir()
    for file in named["many"].iterdir():
        (named["cache"] / file.name).symlink_to(file)
    return named


@pytest.fixture
def folder(folders, tmp_path) -> Path:
    """A copy of the folder with several files, to damage."""
    for file in folders["many"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def rewrite(path: Path, change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


# ----------------------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("kind", ["many", "one", "bare", "with head", "cache"])
def test_a_folder_of_any_form_gives_the_weights_and_logits_of_hugging_face(folders, pair, kind):
    ours, theirs = pair
    assert (len(list(folders[kind].glob("*.safetensors"))) > 2) == (kind in ("many", "cache"))
    loaded = empty_model()
    source = opened(folders[kind])
    load_weights(source, loaded.named_parameters(), vocab=131)
    truth = parameters(ours)
    assert all(torch.equal(p, truth[name]) for name, p in parameters(loaded).items())
    assert {name: shape for name, (_, shape) in source.tensors.items()} == {n: tuple(t.shape) for n, t in truth.items()}
    tokens = torch.arange(131)[None]
    assert error(loaded(tokens), theirs(tokens).logits) < 1e-6


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a DTensor, gathered over one axis after the other, the one that cut last first."""
    if isinstance(tensor, DTensor):
        for axis in range(tensor.device_mesh.ndim):
            placements = [Replicate() if i <= axis else p for i, p in enumerate(tensor.placements)]
            tensor = tensor.redistribute(placements=placements)
        tensor = tensor.to_local()
    return tensor.detach().clone()


def load_on_two_layouts(folder: str) -> list[tuple]:
    """Per layout: what was loaded, bytes read, bytes of the shards; then a tensor with fewer rows than ranks."""
    results = []
    for axes, multiple in (({"dp_shard": 2, "tp": 2}, 144), ({"pp": 2, "tp": 2}, 288)):
        sections = {"model": SHAPE | {"pad_vocab_to_multiple": multiple}, "mesh": axes, "train": {"steps": 1}}
        cfg = config.validate(sections | {"batch": {"micro_batch_size": 1, "global_batch_size": 8}}, "test")
        model = parallelize(cfg, mesh.start(torch.device("cpu"), mesh.resolve(cfg.mesh, 4)))
        source = opened(folder, cfg.model)
        load_weights(source, model.named_parameters(), vocab=131)
        named = list(model.named_parameters())
        held = sum(p.to_local().numel() * 4 for _, p in named if isinstance(p, DTensor))
        results.append(([(name, whole(p)) for name, p in named], source.bytes_read, held))
        dist.barrier()
    small = distribute_tensor(torch.zeros(3), init_device_mesh("cpu", (4,)), [Shard(0)])
    load_weights(Memory({"norm.weight": torch.tensor([1.0, 2.0, 3.0])}), [("norm.weight", small)], vocab=131)
    results.append(whole(small))
    return results


def test_each_rank_reads_its_share_and_together_they_hold_the_file(folders, pair):
    truth = parameters(pair[0])
    total_bytes = sum(t.numel() * 4 for t in truth.values())
    outcomes = ranks.run(4, load_on_two_layouts, str(folders["many"]))
    names = []
    for rank, (sharded, staged, small) in enumerate(outcomes):
        for (loaded, bytes_read, held_bytes), rows in ((sharded, 144), (staged, 288)):
            for name, tensor in loaded:
                assert torch.equal(tensor[: len(truth[name])], truth[name]), (rank, name)
                assert len(tensor) == (rows if name == "embed.weight" else len(truth[name]))
                assert not tensor[len(truth[name]) :].any()
            assert bytes_read <= held_bytes
        assert small.tolist() == [1, 2, 3]
        # A quarter, and what is whole on every tp rank: norms and the biases of rows.
        assert 0.23 * total_bytes < sharded[1] < 0.26 * total_bytes
        names += [name for name, _ in staged[0]]
    assert sum(sharded[1] for sharded, _, _ in outcomes) < 1.02 * total_bytes
    # The tied weight is on both stages; of 288 rows, tp rank 1 holds none that the file has.
    assert names.count("embed.weight") == 4
    assert all(names.count(name) == 2 for name in truth if name != "embed.weight")


def test_bf16_weights_fill_fp32_parameters(pair):
    truth = {name: t.bfloat16() for name, t in parameters(pair[0]).items()}
    loaded = empty_model()
    load_weights(Memory(truth), loaded.named_parameters(), vocab=131)
    assert all(p.dtype == torch.float32 and torch.equal(p, truth[n].float()) for n, p in parameters(loaded).items())


@pytest.mark.parametrize(("there", "here"), [(144, 131), (144, 262), (131, 144)])
def test_padding_of_the_vocabulary_may_differ_and_new_rows_are_zero(pair, there, here):
    weights = parameters(pair[0])
    embed = weights["embed.weight"]
    source = Memory(weights | {"embed.weight": torch.cat([embed, torch.ones(there - 131, 64)])})
    loaded = empty_model(BloomKeys.model_validate(SHAPE | {"pad_vocab_to_multiple": here}))
    load_weights(source, loaded.named_parameters(), vocab=131)
    filled = parameters(loaded)["embed.weight"]
    assert filled.shape == (here, 64)
    assert torch.equal(filled[:131], embed)
    assert not filled[max(there, 131) :].any()


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("norm.bias", None, "have no 'norm.bias'"),
        ("norm.bias", (65,), r"'norm.bias' is \[65\] there, \[64\] here"),
        ("embed.weight", (130, 64), r"'embed.weight' is \[130, 64\] there, \[131, 64\] here"),
        ("embed.weight", (131, 32), r"'embed.weight' is \[131, 32\] there, \[131, 64\] here"),
        ("layers.1.mlp.up.weight", (512, 64), r"is \[512, 64\] there, \[256, 64\] here"),
    ],
)
def test_weights_of_another_shape_are_refused(pair, name, shape, message):
    weights = parameters(pair[0])
    del weights[name]
    source = Memory(weights | ({} if shape is None else {name: torch.zeros(shape)}))
    with pytest.raises(ValueError, match=message):
        load_weights(source, empty_model().named_parameters(), vocab=131)


SECOND = "model-00002-of-"


def remove_second(folder):
    next(folder.glob(f"{SECOND}*")).unlink()


def remove_second_and_index(folder):
    remove_second(folder)
    (folder / INDEX).unlink()


def index_names_a_lost_tensor(folder):
    rewrite(folder / INDEX, lambda index: index["weight_map"].update({"h.9.w": next(folder.glob(f"{SECOND}*")).name}))


def index_leaves_the_folder(folder):
    (folder / "outside").mkdir()
    save_file({"h.9.w": torch.ones(2)}, folder / "outside" / "x.safetensors")
    rewrite(folder / INDEX, lambda index: index["weight_map"].update({"h.9.w": "outside/x.safetensors"}))


def index_is_a_list(folder):
    (folder / INDEX).write_text("[]")


def index_without_a_map(folder):
    (folder / INDEX).write_text('{"weight_map": {"a": 1}}')


def add(tensors):
    """One more file, which the index names."""

    def damage(folder):
        save_file(tensors, folder / "more.safetensors")
        rewrite(folder / INDEX, lambda index: index["weight_map"].update(dict.fromkeys(tensors, "more.safetensors")))

    return damage


leftover = add({"transformer.h.0.self_attention.rotary.weight": torch.ones(2)})
other_name = add({"ln_f.weight": torch.ones(64)})
tensor_twice = add({"transformer.ln_f.weight": torch.ones(64)})
other_head = add({"lm_head.weight": torch.ones(131, 64)})
head_of_another_shape = add({"lm_head.weight": torch.ones(130, 64)})


def integers(folder):
    tensors = load_file(next(folder.glob(f"{SECOND}*")))
    save_file({name: t.to(torch.int8) for name, t in tensors.items()}, next(folder.glob(f"{SECOND}*")))


def only_pickles(folder):
    for file in [*folder.glob("*.safetensors"), folder / INDEX]:
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({}))


def only_a_configuration(folder):
    for file in folder.glob("*.safetensors*"):
        file.unlink()


def cut_off(folder):
    next(folder.glob(f"{SECOND}*")).write_bytes(b"\x08")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_second, rf"has no '{SECOND}\d+.safetensors', which {INDEX} names"),
        (remove_second_and_index, rf"holds neither model.safetensors nor {INDEX}, the names .*; model-00001-of"),
        (index_names_a_lost_tensor, rf"{SECOND}\d+.safetensors has no 'h.9.w'"),
        (index_leaves_the_folder, "names 'outside/x.safetensors'; expected names of files beside it"),
        (index_is_a_list, "expected a JSON object"),
        (index_without_a_map, "expected a 'weight_map'"),
        (leftover, "bloom has no place for transformer.h.0.self_attention.rotary.weight"),
        (
            other_name,
            "and 'ln_f.weight' are stored; expected one tensor for transformer.ln_f.weight",
        ),
        (tensor_twice, r"'transformer.ln_f.weight' occurs twice, in model-0000\d-of-0000\d.safetensors and in more"),
        (integers, "' is of dtype I8, expected one of F64, F32, F16, BF16"),
        (other_head, "'embed.weight' and 'head.weight' are stored with different values, but they are one parameter"),
        (
            head_of_another_shape,
            r"'lm_head.weight' of .*more.* is \[130, 64\], but config.json gives \[131, 64\]",
        ),
        (only_pickles, "pytorch_model.bin: a pickle, which can run code; re-save it as safetensors"),
        (only_a_configuration, "holds neither model.safetensors nor"),
        (cut_off, rf"{SECOND}\d+.safetensors is not a safetensors file"),
    ],
)
def test_a_folder_that_is_not_whole_or_not_bloom_is_refused(folder, damage, message):
    damage(folder)
    with pytest.raises(ValueError, match=message):
        opened(folder).read("embed.weight", (slice(0, 3), slice(0, 64)))


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match="missing is not a folder"):
        TensorFiles(tmp_path / "missing")


def test_a_file_that_the_index_does_not_name_is_ignored(folder, pair):
    save_file({"ln_f.weight": torch.ones(3)}, folder / "model-extra.safetensors")
    assert torch.equal(opened(folder).read("norm.weight"), parameters(pair[0])["norm.weight"])


# ------------------------------------------------------------------------------------------------------ configuration


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_head": 4}, r"n_heads=4, not 8 \(\[model\] n_heads\)"),
        ({"n_layer": 3, "vocab_size": 9}, r"vocab_size=9, not 131 .*; n_layers=3, not 2 \(\[model\] n_layers\)"),
        ({"hidden_size": 128}, r"hidden_size=128, not 64 \(\[model\] hidden_size\)"),
        ({"layer_norm_epsilon": 1e-6}, r"layer_norm_eps=1e-06, not 1e-05 \(\[model\] layer_norm_eps\)"),
        (
            {"apply_residual_connection_post_layernorm": True},
            r"post_layernorm=True, not False \(\[model\] apply_residual",
        ),
        ({"model_type": "gpt2"}, r"model_type='gpt2', expected 'bloom' \(\[model\] name\)"),
        ({"hidden_size": None}, r"has no 'hidden_size' \(\[model\] hidden_size\)"),
    ],
)
def test_a_configuration_of_another_model_is_refused_with_both_values(folder, change, message):
    check_config(folder, MODEL)
    rewrite(folder / "config.json", lambda values: values.update(change))
    with pytest.raises(ValueError, match=message):
        check_config(folder, MODEL)


PUBLISHED = {"model_type": "bloom", "vocab_size": 99, "hidden_size": 48, "n_layer": 3, "n_head": 4}
# Name in config.json -> [model] key, and a value that is no default.
NAMES = {
    "vocab_size": ("vocab_size", 98),
    "n_embed": ("hidden_size", 24),
    "hidden_size": ("hidden_size", 24),
    "num_hidden_layers": ("n_layers", 5),
    "n_layer": ("n_layers", 5),
    "num_attention_heads": ("n_heads", 6),
    "n_head": ("n_heads", 6),
    "layer_norm_epsilon": ("layer_norm_eps", 1e-3),
    "apply_residual_connection_post_layernorm": ("apply_residual_connection_post_layernorm", True),
    "hidden_dropout": ("hidden_dropout", 0.25),
    "attention_dropout": ("attention_dropout", 0.125),
    "initializer_range": ("init_std", 0.5),
}
OF_BLOOM = {"layer_norm_eps": "layer_norm_epsilon", "n_layers": "n_layer", "n_heads": "n_head"}
OF_BLOOM |= {"init_std": "initializer_range"}


@pytest.mark.parametrize("name", NAMES)
def test_each_key_of_config_json_is_read_as_transformers_reads_it_and_compared_where_weights_depend_on_it(
    tmp_path, name
):
    from transformers import BloomConfig

    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    default = BloomKeys.model_validate(model_section(tmp_path))
    check_config(tmp_path, default)
    key, value = NAMES[name]
    plain = PUBLISHED | {name: value}
    (tmp_path / "config.json").write_text(json.dumps(plain))
    section = model_section(tmp_path)
    theirs = BloomConfig(**{name: value for name, value in plain.items() if name != "model_type"})
    for ours in {key for key, _ in NAMES.values()} & section.keys():
        assert section[ours] == getattr(theirs, OF_BLOOM.get(ours, ours)), ours
    assert section[key] == value
    if key in ("hidden_dropout", "attention_dropout", "init_std"):
        check_config(tmp_path, default)
    else:
        with pytest.raises(ValueError, match=rf"{key}={value}, not .* \(\[model\] {key}\)"):
            check_config(tmp_path, default)


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "n_layer", "n_head"])
@pytest.mark.parametrize("value", [None, 0, True, 2.0, "8"])
def test_a_size_that_is_missing_or_no_count_is_refused(tmp_path, key, value):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED | {key: value}))
    with pytest.raises(ValueError, match=f"has no '{key}'" if value is None else f"has {key}={value!r}, expected a"):
        model_section(tmp_path)


def test_another_feed_forward_size_is_refused(folder):
    with pytest.raises(ValueError, match=r"4 x hidden_size = 256, this model has 100 \(\[model\] ffn_hidden_size\)"):
        check_config(folder, MODEL.model_copy(update={"ffn_hidden_size": 100}))


def test_a_folder_without_a_configuration_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json"):
        check_config(tmp_path, MODEL)


def test_the_configuration_as_bloom_was_published_is_a_model_section(tmp_path):
    published = {"model_type": "bloom", "n_embed": 1024, "n_layer": 24, "num_attention_heads": 16, "n_inner": None}
    published |= {"vocab_size": 250880, "layer_norm_epsilon": 1e-05, "initializer_range": 0.02, "hidden_dropout": 0.0}
    (tmp_path / "config.json").write_text(json.dumps(published))
    model = BloomKeys.model_validate(model_section(tmp_path))
    assert (model.hidden_size, model.n_layers, model.n_heads, model.vocab_size) == (1024, 24, 16, 250880)
    check_config(tmp_path, model)


# ----------------------------------------------------------------------------------------------------------- writing

# The vocabulary of stdlib-8k, padded from 8,192 to 8,208 rows.
WITH_TOKENIZER = BloomKeys(
    vocab_size=8192, pad_vocab_to_multiple=144, hidden_size=16, n_layers=2, n_heads=2, layer_norm_eps=1e-3
)


def model_to_write() -> Bloom:
    model = families.of(WITH_TOKENIZER).build(WITH_TOKENIZER)
    init_weights(model, seed=1)
    model.init_buffers(1)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.1)
    return model


def write_on_two_ranks(folder: str) -> tuple[list[str], str]:
    """The names of the tensors that this rank read, and the error it got when rank 1 could not read."""
    place = {"rank": dist.get_rank(), "size": 2, "barrier": dist.barrier, "max_file_bytes": 12_000}
    eod_id = load_tokenizer("stdlib-8k").eod_id
    ends = {"bos_token_id": eod_id, "eos_token_id": eod_id}
    tokenizer = {"tokenizer_json": to_json("stdlib-8k"), "token_ids": ends}
    source = Memory(parameters(model_to_write()))
    write_all(source, Path(folder, "whole"), WITH_TOKENIZER, **place, **tokenizer)
    asked = list(source.asked)
    source = (Memory, Broken)[dist.get_rank()](parameters(model_to_write()))
    with pytest.raises(OSError) as caught:
        write_all(source, Path(folder, "broken"), WITH_TOKENIZER, **place)
    return asked, str(caught.value)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder that two ranks wrote, and what each of them returned."""
    folder = tmp_path_factory.mktemp("export")
    return folder, ranks.run(2, write_on_two_ranks, str(folder))


def test_what_two_ranks_write_gives_our_logits_in_transformers(written):
    from transformers import BloomForCausalLM

    theirs, info = BloomForCausalLM.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]
        written[0] / "whole", output_loading_info=True
    )
    assert not any(info.values())
    assert theirs.dtype == torch.float32
    assert theirs.lm_head.weight is theirs.transformer.word_embeddings.weight
    tokens = torch.arange(0, 8192, 50)[None]
    logits = theirs(tokens).logits
    assert logits.shape == (1, 164, 8192)
    assert error(model_to_write()(tokens), logits) < 1e-6
    assert theirs.generation_config.eos_token_id == theirs.config.bos_token_id == 8191


def test_the_tokenizer_that_is_written_gives_our_ids_in_transformers(written):
    from transformers import AutoTokenizer

    ours, theirs = load_tokenizer("stdlib-8k"), AutoTokenizer.from_pretrained(written[0] / "whole")
    text = " Straße 12345\n\n\tdef f(x):\n        return x  # 漢字 🙂 , . I'LL"
    assert theirs(text)["input_ids"] == ours.encode(text)
    assert theirs.decode(ours.encode(text)) == text
    assert (theirs.eos_token_id, theirs.bos_token_id) == (ours.eod_id, ours.eod_id)
    spelled = "a <|endoftext|> b"
    assert ours.eod_id in theirs(spelled)["input_ids"]
    assert theirs(spelled, split_special_tokens=True)["input_ids"] == ours.encode(spelled)


def test_the_folder_reads_back_to_the_bit_without_the_padding(written):
    source, truth = opened(written[0] / "whole", WITH_TOKENIZER), parameters(model_to_write())
    check_config(written[0] / "whole", WITH_TOKENIZER)
    assert source.tensors.keys() == truth.keys()
    assert source.tensors["embed.weight"][1] == (8192, 16)
    assert all(torch.equal(source.read(name), truth[name][:8192]) for name in truth)


def test_each_rank_reads_only_what_it_writes_and_files_keep_their_size(written):
    files = sorted((written[0] / "whole").glob("*.safetensors"))
    first, second = (asked for asked, _ in written[1])
    assert len(files) > 3
    assert sorted(first + second) == sorted(parameters(model_to_write()))
    assert first
    assert second
    for tensors in map(load_file, files):
        assert len(tensors) == 1 or sum(t.numel() * 4 for t in tensors.values()) <= 12_000


def test_when_one_rank_fails_every_rank_is_told_and_nothing_appears(written):
    folder, ((_, told), (_, failed)) = written
    assert "is on a bad sector" in failed
    assert "was not written: model-00002" in told
    assert not (folder / "broken").exists()


def test_after_a_failure_the_same_command_writes_the_folder(tmp_path, pair):
    weights = parameters(pair[0])
    with pytest.raises(OSError, match="bad sector"):
        write_all(Broken(weights), tmp_path / "out", MODEL)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").mkdir()  # an empty folder is as good as none
    write_all(Memory(weights), tmp_path / "out", MODEL)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_weights_are_cast_to_the_dtype_that_is_asked_for(tmp_path, pair):
    from transformers import BloomForCausalLM

    weights = parameters(pair[0])
    write_all(Cast(Memory(weights), "memory", torch.bfloat16), tmp_path / "out", MODEL)
    theirs = BloomForCausalLM.from_pretrained(tmp_path / "out")
    assert theirs.dtype == torch.bfloat16
    source = opened(tmp_path / "out")
    assert all(torch.equal(source.read(name), t.bfloat16()) for name, t in weights.items())


def test_weights_of_several_dtypes_keep_them_and_lie_at_multiples_of_their_width(tmp_path):
    model = BloomKeys(vocab_size=5, hidden_size=3, n_layers=2, n_heads=1)
    random = {name: torch.randn(p.shape) for name, p in parameters(families.of(model).build(model)).items()}
    weights = {name: t if "norm" in name else t.bfloat16() for name, t in random.items()}
    write_all(Memory(weights), tmp_path / "out", model)
    source = opened(tmp_path / "out", model)
    assert {name: dtype for name, (dtype, _) in source.tensors.items()} == {n: t.dtype for n, t in weights.items()}
    assert all(torch.equal(source.read(name), t) for name, t in weights.items())
    assert all(source.read(name).data_ptr() % t.itemsize == 0 for name, t in weights.items())
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["dtype"] == written["torch_dtype"] == "float32"


def test_every_key_of_the_model_is_written_as_transformers_reads_it(tmp_path):
    from transformers import BloomConfig

    keys = {"vocab_size": 7, "hidden_size": 12, "n_layers": 1, "n_heads": 3, "layer_norm_eps": 1e-3, "init_std": 0.5}
    keys |= {"hidden_dropout": 0.25, "attention_dropout": 0.125, "apply_residual_connection_post_layernorm": True}
    model = BloomKeys.model_validate(keys)
    write_all(
        Memory(parameters(families.of(model).build(model))),
        tmp_path / "out",
        model,
        token_ids={"bos_token_id": 5, "eos_token_id": 5},
    )
    theirs = BloomConfig.from_pretrained(tmp_path / "out")
    assert {key: getattr(theirs, OF_BLOOM.get(key, key)) for key in keys} == keys
    assert (theirs.architectures, theirs.tie_word_embeddings) == (["BloomForCausalLM"], True)
    for file in ("config.json", "generation_config.json"):
        written = json.loads((tmp_path / "out" / file).read_text())
        assert (written["bos_token_id"], written["eos_token_id"]) == (5, 5)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }


@pytest.mark.parametrize("max_file_bytes", [10**9, 4096])
def test_an_index_says_where_each_tensor_is_and_how_much_they_are_together(tmp_path, pair, max_file_bytes):
    from safetensors import safe_open

    weights = parameters(pair[0])
    write_all(Memory(weights), tmp_path / "out", MODEL, max_file_bytes=max_file_bytes)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    found = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            found |= dict.fromkeys(opened.keys(), file.name)
    assert len(found) == len(weights)
    if max_file_bytes == 10**9:
        assert [file.name for file in files] == ["model.safetensors"]
        assert not (tmp_path / "out" / INDEX).exists()
    else:
        n = len(files)
        assert [file.name for file in files] == [f"model-{i:05d}-of-{n:05d}.safetensors" for i in range(1, n + 1)]
        index = json.loads((tmp_path / "out" / INDEX).read_text())
        assert index["weight_map"] == found
        assert index["metadata"] == {"total_size": sum(t.nbytes for t in weights.values())}


def test_what_a_killed_export_left_is_no_obstacle(tmp_path):
    (tmp_path / ".tmp-out").mkdir()
    (tmp_path / ".tmp-out" / "model-00001-of-00009.safetensors").write_text("half")
    model = BloomKeys(vocab_size=7, hidden_size=8, n_layers=1, n_heads=2)
    write_all(Memory(parameters(families.of(model).build(model))), tmp_path / "out", model)
    assert not (tmp_path / ".tmp-out").exists()
    assert sorted(path.name for path in (tmp_path / "out").glob("*.safetensors")) == ["model.safetensors"]


def test_a_rank_that_may_not_write_is_refused_before_any_rank_has_made_a_file(tmp_path):
    model = BloomKeys(vocab_size=7, hidden_size=8, n_layers=1, n_heads=2)

    def refused() -> None:
        raise RuntimeError("another rank has refused")

    with pytest.raises(RuntimeError, match="another rank has refused"):
        write_all(Memory(parameters(families.of(model).build(model))), tmp_path / "out", model, barrier=refused)
    assert list(tmp_path.iterdir()) == []


def test_who_may_read_the_configuration_may_read_the_weights(written):
    assert len({file.stat().st_mode for file in (written[0] / "whole").iterdir()}) == 1


def test_files_are_cut_in_order_and_one_tensor_may_be_larger_than_a_file():
    assert list(split({"a": 3, "b": 3, "c": 4, "d": 12, "e": 1, "f": 9}, 10).values()) == [
        ["a", "b", "c"],
        ["d"],
        ["e", "f"],
    ]
    assert split({"a": 10}, 10) == {"model.safetensors": ["a"]}


@pytest.mark.parametrize(
    ("change", "keys", "message"),
    [
        ({}, {"n_layers": 3}, r"'layers.2.attn.out.bias' is missing \(\[model\] n_layers\)"),
        ({}, {"n_layers": 1}, r"'layers.1.attn.out.bias' is unknown \(\[model\] n_layers\)"),
        ({"layers.1.mlp.up.bias": None}, {}, "'layers.1.mlp.up.bias' is missing"),
        ({"embed.weight": None}, {}, "'embed.weight' is missing"),
        ({"head.weight": torch.ones(1)}, {}, "'head.weight' is unknown"),
        (
            {"norm.weight": torch.ones(64, dtype=torch.int32)},
            {},
            "'transformer.ln_f.weight' is of torch.int32",
        ),
        ({}, {"vocab_size": 132}, r"'embed.weight' is \[131, 64\], expected \[132, 64\] \(\[model\] vocab_size"),
        ({}, {"ffn_hidden_size": 128}, r"4 x hidden_size = 256, this model has 128 \(\[model\] ffn_hidden_size\)"),
    ],
)
def test_what_hugging_faces_bloom_cannot_be_is_refused_before_anything_is_written(
    tmp_path, pair, change, keys, message
):
    weights = {name: t for name, t in (parameters(pair[0]) | change).items() if t is not None}
    with pytest.raises(ValueError, match=message):
        write_all(Memory(weights), tmp_path / "out", MODEL.model_copy(update=keys))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_something_in_it_is_not_overwritten(tmp_path, pair):
    (tmp_path / "file").touch()
    for there in (tmp_path, tmp_path / "file"):
        with pytest.raises(ValueError, match="exists already; expected a new folder, or an empty one"):
            write_all(Memory(parameters(pair[0])), there, MODEL)


def test_an_end_of_document_that_the_tokenizer_does_not_have_is_refused(tmp_path, pair):
    with pytest.raises(ValueError, match="no id 999, which is to be eos_token_id"):
        write_all(
            Memory(parameters(pair[0])),
            tmp_path / "out",
            MODEL,
            tokenizer_json=to_json("bytes"),
            token_ids={"eos_token_id": 999},
        )
