"""Claims about what a run loads: the rooms that its configuration asks for, and no other.

Each run trains two steps in interpreters of its own, with a validation, a save and a sample, on a corpus that is
prepared already (`benchmarks/loaded.py`, which prints the files with their lines).
"""

from __future__ import annotations

import functools
import re
import tempfile
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from benchmarks.loaded import loaded
from dtmega.data import default_corpus
from dtmega.data.tokenizers.load import load_tokenizer

ROOT = Path(__file__).resolve().parents[1]

# What a configuration may ask for -> patterns of the modules that serve nothing else. A folder's name covers its files.
ROOMS = {
    "bloom": ["models.bloom", "plans.bloom", "families.bloom", "config.families.bloom"],
    "gpt": ["models.gpt", "plans.gpt", "families.gpt", "config.families.gpt"],
    "llama": ["models.llama", "plans.llama", "families.llama", "config.families.llama"],
    "moe": [
        "config.families.llama",
        "models.llama",
        "models.moe",
        "models.latent_attention",
        "plans.moe",
        "families.moe",
        "config.families.moe",
    ],
    "bert": ["models.bert", "models.show_masks", "plans.bert", "families.bert", "config.families.bert"],
    "t5": ["models.t5", "models.show_spans", "plans.t5", "families.t5", "config.families.t5"],
    "transformers": ["config.families.hf", "interop.hf", "interop.hf.files.config_json", "interop.hf.files.tensors"],
    "files of other programs": ["interop.stored", "interop.formats", "interop.hf.files.*", "interop.megatron"],
    "plans of transformers": ["interop.hf.tp"],
    "proofs on transformers": ["interop.hf.context_proof", "interop.hf.rows_proof"],
    "longrope": ["interop.hf.rope"],
    "lora": ["models.lora", "plans.adapters", "training.adapter_proof"],
    "experts": ["models.experts", "models.routing", "models.capacity", "plans.experts"],
    "ep": ["ops.expert_parallel", "interop.hf.expert_parallel"],
    "recomputation": ["training.recompute"],
    "compiled blocks": ["training.compiled_proof", "ops.compiled_softmax"],
    "muon": ["ops.optim.muon", "ops.optim.owners"],
    "exact": ["training.exact", "fsdp.exact", "fsdp.digests", "fsdp.slots", "ops.fixed_point"],
    "cp": ["ops.context_parallel", "ops.sequence_exchange", "interop.hf.context"],
    "pp": ["pipelining", "training.pipelined"],
    "fsdp": ["fsdp"],
    "tp": ["plans"],
    "object stores": [
        "files.object_file",
        "files.object_requests",
        "checkpoint.objects",
        "checkpoint.remote",
        "data.indexed_files.stored*",
        "data.objectives.stored_rows",
    ],
    "conversations": ["data.indexed_files.conversations", "data.sampling.packs", "data.objectives.conversations"],
    "prefixes": ["data.objectives.prefixes"],
    "spans and masks": ["data.objectives.denoising"],
    "megatron's orders": ["data.megatron"],
    "preparing text": [
        *("data.preparing", "data.indexed_files.writer", "data.indexed_files.spilled_array"),
        "data.indexed_files.pair_files",
    ],
    "blends": ["data.sampling.blend"],
    "wordpieces": ["data.tokenizers.wordpiece"],
    "tokenizer.json": ["data.tokenizers.tokenizer_child", "data.tokenizers.huggingface", "files.confined"],
    "data workers": ["data.workers", "data.worker_signals"],
    "profiles": ["training.profile", "training.operator_times"],
    "trackers": ["training.records.trackers"],
    "rank logs": ["training.records.rank_log"],
    "loads of experts": ["training.records.loads"],
    "float16": ["training.loss_scale"],
    "spikes": ["ops.optim.spikes"],
    "starting weights": [
        *("training.weights_beside", "checkpoint.starting", "checkpoint.weights", "checkpoint.base"),
        "checkpoint.sources",
    ],
    "changes": ["checkpoint.changes"],
    "asynchronous saves": ["checkpoint.staging"],
    "planning": ["planning"],
    "reports": ["report"],
    "refusals": ["config.refusals"],
    "synonyms": ["config.suggestions"],
    "help": ["config.help"],
    "mixtures": ["config.mixtures"],
}

# A run -> number of ranks, its options, and the rooms that it opens.
RUNS = {
    "bloom": (1, [], {"bloom"}),
    "llama": (1, [], {"llama"}),
    "moe over ep": (
        2,
        ["--mesh.ep", "2", "--mesh.dp_shard", "2"],
        {"moe", "experts", "loads of experts", "ep", "fsdp"},
    ),
    "bloom over pp": (2, ["--mesh.pp", "2"], {"bloom", "pp"}),
    "bloom over tp": (2, ["--mesh.tp", "2"], {"bloom", "tp"}),
    "hf": (1, ["--model.path", "model", "--data.tokenizer", "stdlib-8k"], {"transformers"}),
}


def rooms_of(module: str) -> set[str]:
    """The capabilities that the module serves; of two patterns, the longer one decides."""
    matching: dict[str, int] = {}
    for room, patterns in ROOMS.items():
        for pattern in patterns:
            if fnmatchcase(module, pattern) or fnmatchcase(module, f"{pattern}.*"):
                matching[room] = max(len(pattern), matching.get(room, 0))
    return {room for room, length in matching.items() if length == max(matching.values())}


def small_llama(folder: Path) -> None:
    """Save the configuration of a small Llama, without weights."""
    from transformers import LlamaConfig

    sizes = {"vocab_size": 8192, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2).save_pretrained(folder)


@functools.cache
def files_of(name: str) -> list[Path]:
    """The files of dtmega, below the package, that any rank of a run has loaded when the run ends."""
    n_ranks, options, _ = RUNS[name]
    config = name.split()[0]
    default_corpus.prepare(load_tokenizer("stdlib-8k"))
    with tempfile.TemporaryDirectory() as folder:
        if config == "hf":
            small_llama(Path(folder, "model"))
        return loaded(["--config", f"{config}.toml", *options], Path(folder), n_ranks)


def module_of(file: Path) -> str:
    """The name of the module in a file of the package, without 'dtmega.'."""
    return ".".join(file.with_suffix("").parts).removesuffix("__init__").removesuffix(".")


# These open no room in a way that no other run does.
ALIKE = ("llama", "bloom over pp")


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.full if name in ALIKE else ()) for name in RUNS])
def test_a_run_loads_the_rooms_that_it_asks_for_and_no_other(name: str):
    opened = RUNS[name][2]
    modules = [module_of(file) for file in files_of(name)]
    unasked = {module: rooms for module in modules if (rooms := rooms_of(module)) and not rooms & opened}
    assert unasked == {}
    assert opened == {room for room in opened if any(room in rooms_of(module) for module in modules)}


def test_every_room_is_there():
    package = ROOT / "dtmega"
    modules = [module_of(file.relative_to(package)) for file in package.rglob("*.py")]
    served = {room for module in modules for room in rooms_of(module)}
    assert sorted(ROOMS.keys() - served) == []


def test_the_reading_list_is_what_a_run_of_bloom_loads():
    page = (ROOT / "docs" / "reading.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([\w/]+\.py)` \|", page, re.MULTILINE)
    assert sorted(listed) == [str(file) for file in files_of("bloom")]
