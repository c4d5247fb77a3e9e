"""A Hugging Face folder of BLOOM, written by all ranks: for `BloomForCausalLM.from_pretrained` and `AutoTokenizer`.

NAME/{config, generation_config, tokenizer, tokenizer_config}.json
NAME/model.safetensors, or model-00001-of-0000N.safetensors, ... and model.safetensors.index.json
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from dtmega import config
from dtmega.checkpoint import Source
from dtmega.checkpoint.files import Disk
from dtmega.checkpoint.hf import CONFIG_KEYS, DTYPES, EMBED, INDEX, pattern, translate


def export(
    source: Source,
    folder: Path,
    model: config.Model,
    hf_keys: Mapping[str, str],
    tokenizer_json: str | None,
    *,
    rank: int,
    size: int,
    barrier: Callable[[], None],
    eod_id: int | None = None,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = 5 * 10**9,
) -> None:
    """Write `folder`; all ranks call it.

    Which tensors are in which file follows from names and sizes alone. Rank r writes files r, r + size, ..., reads only
    what is in them, and holds one tensor in memory at a time. The folder appears whole, by one rename, or not at all.
    Padded rows of the embedding are left out.

    Args:
        hf_keys: our prefix -> theirs.
        tokenizer_json: the text of tokenizer.json; None leaves it out.
        rank, size, barrier: of the processes that write, which see one file system.
        eod_id: end of document. It becomes both bos and eos: in training it stands before a document and after it.
        dtype: of the written tensors; None leaves each as it is.
        max_file_bytes: of the tensors in one file, unless a single one is larger.

    Raises:
        ValueError: on every rank, before anything is written: the folder is there and not empty, the source does not
            have the tensors of `model`, Hugging Face's BLOOM has no such feed-forward size or dtype, or no such eod_id.
        OSError: writing failed on this rank; on rank 0, on any.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"{folder} is there already; expected a new folder, or an empty one")
    shapes = _shapes(source, model, hf_keys)
    dtypes = {name: dtype or source.tensors[name][0] for name in shapes}
    for name in dtypes:
        if dtypes[name] not in DTYPES.values():
            raise ValueError(f"'{name}' is of {dtypes[name]}, expected one of {list(DTYPES.values())}")
    n_bytes = {name: math.prod(shape) * dtypes[name].itemsize for name, shape in shapes.items()}
    theirs = {name: str(translate(name, hf_keys)) for name in shapes}
    # In a file the wider dtypes come first: so each tensor starts at a multiple of its own width.
    parts = {
        file: sorted(names, key=lambda name: -dtypes[name].itemsize)
        for file, names in split(n_bytes, max_file_bytes).items()
    }
    texts = _texts(model, functools.reduce(torch.promote_types, dtypes.values()), tokenizer_json, eod_id)
    if len(parts) > 1:
        weight_map = {theirs[name]: file for file, names in parts.items() for name in names}
        texts[INDEX] = _json({"metadata": {"total_size": sum(n_bytes.values())}, "weight_map": weight_map})
    folder = folder.absolute()
    disk, aside = Disk(str(folder.parent)), f".tmp-{folder.name}"

    def prepare() -> None:
        if rank == 0:
            disk.make(aside)

    def write() -> None:
        for file in list(parts)[rank::size]:
            # Under another name until it is whole: so rank 0 can tell.
            with disk.create(aside, f"part-{file}") as stream:
                stream.write(header([(theirs[name], dtypes[name], shapes[name]) for name in parts[file]]))
                for name in parts[file]:
                    tensor = source.read(name, tuple(slice(0, n) for n in shapes[name])).to(dtypes[name])
                    stream.write(tensor.contiguous().flatten().view(torch.uint8).numpy())
            disk.rename(f"{aside}/part-{file}", f"{aside}/{file}")

    def publish() -> None:
        if rank == 0:
            if missing := sorted(parts.keys() - disk.sizes(aside).keys()):
                raise OSError(f"{folder} was not written: {missing[0]} is missing, as the rank that writes it says")
            for file, text in texts.items():
                with disk.create(aside, file) as stream:
                    stream.write(text.encode())
            disk.sync(aside)
            disk.rename(aside, folder.name)
            disk.sync(".")

    # Whatever fails on one rank, each comes to every barrier: nobody waits there in vain.
    errors: list[Exception] = []
    for step in (prepare, write, publish):
        try:
            step()
        except Exception as error:
            errors.append(error)
        barrier()
    if errors:
        raise errors[0]


def header(tensors: list[tuple[str, torch.dtype, tuple[int, ...]]]) -> bytes:
    """What stands in a safetensors file before the data of these tensors: its length in 8 bytes, then JSON.

    Written here and not by the library, which takes all of a file's tensors at once and gives the file mode 0600.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    names = {dtype: name for name, dtype in DTYPES.items()}
    end = 0
    for name, dtype, shape in tensors:
        start, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": names[dtype], "shape": shape, "data_offsets": [start, end]}
    content = json.dumps(entries, separators=(",", ":")).encode()
    content += b" " * (-len(content) % 8)
    return len(content).to_bytes(8, "little") + content


def split(n_bytes: Mapping[str, int], max_file_bytes: int) -> dict[str, list[str]]:
    """File -> the names in it: in their order, a new file where the next tensor would make one too large."""
    files: list[list[str]] = []
    filled = 0
    for name, size in n_bytes.items():
        if not files or filled + size > max_file_bytes:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += size
    if len(files) == 1:
        return {"model.safetensors": files[0]}
    return {f"model-{i:05d}-of-{len(files):05d}.safetensors": names for i, names in enumerate(files, 1)}


def _shapes(source: Source, model: config.Model, hf_keys: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Name -> shape as written: the embedding, the layers by number, the norm."""
    if model.ffn != 4 * model.hidden_size:
        raise ValueError(
            f"Hugging Face's BLOOM has a feed-forward size of 4 x hidden_size = {4 * model.hidden_size}, this model "
            f"has {model.ffn} ([model] ffn_hidden_size)"
        )
    expected: set[str] = set()
    for prefix in hf_keys:
        kinds = {match[match.re.groups] for name in source.tensors if (match := pattern(prefix).fullmatch(name))}
        for layer in range(model.n_layers if "{}" in prefix else 1):
            expected |= {prefix.format(layer) + kind for kind in kinds or {"weight"}}
    if wrong := sorted(expected ^ source.tensors.keys()):
        raise ValueError(
            f"the weights are of another model: '{wrong[0]}' is {'missing' if wrong[0] in expected else 'unknown'} "
            f"([model] n_layers)"
        )
    by_layer = sorted(expected, key=lambda name: [int(s) if s.isdigit() else s for s in re.split(r"(\d+)", name)])
    shapes = {name: source.tensors[name][1] for name in by_layer}
    rows, *columns = shapes[EMBED]
    if rows < model.vocab_size or columns != [model.hidden_size]:
        raise ValueError(
            f"'{EMBED}' is {[rows, *columns]}, expected {[model.vocab_size, model.hidden_size]} "
            f"([model] vocab_size, [model] hidden_size)"
        )
    return shapes | {EMBED: (model.vocab_size, model.hidden_size)}


def _texts(model: config.Model, dtype: torch.dtype, tokenizer_json: str | None, eod_id: int | None) -> dict[str, str]:
    """File -> content of everything that is not weights."""
    ends = {"bos_token_id": eod_id, "eos_token_id": eod_id}
    described = {names[-1]: getattr(model, key) for key, names in CONFIG_KEYS.items()}
    fixed = {"architectures": ["BloomForCausalLM"], "model_type": "bloom", "tie_word_embeddings": True}
    dtype_name = str(dtype).removeprefix("torch.")
    texts = {
        "config.json": _json({**fixed, **described, **ends, "torch_dtype": dtype_name}),
        "generation_config.json": _json(ends),
    }
    if tokenizer_json is not None:
        from tokenizers import Tokenizer  # who has made the text has the library

        eod = None if eod_id is None else Tokenizer.from_str(tokenizer_json).id_to_token(eod_id)
        if eod_id is not None and eod is None:
            raise ValueError(f"the tokenizer has no id {eod_id} for the end of a document ([data] tokenizer)")
        special = {} if eod is None else {"bos_token": eod, "eos_token": eod}
        # Not the class that transformers 4 has for BLOOM, which would add BLOOM's own special tokens.
        loading = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        texts |= {"tokenizer.json": tokenizer_json, "tokenizer_config.json": _json(loading | special)}
    return texts


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=1) + "\n"
