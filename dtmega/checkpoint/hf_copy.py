"""A directory of transformers again, after training: new weights, and the rest as the original directory has it.

OUT/config.json               the original's, but for the class and the dtype of what is written
OUT/generation_config.json    and what is the tokenizer's (BESIDE), byte by byte; never code, never other weights
OUT/model.safetensors         or several files, as hf_write.py writes them
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from dtmega.checkpoint import Source
from dtmega.checkpoint.hf_export import tokenizer_files
from dtmega.checkpoint.hf_write import MAX_FILE_BYTES, outs, to_json, widest, write
from dtmega.strangers import parse_object, read_object

CONFIG, GENERATION = "config.json", "generation_config.json"
# What transformers' tokenizers call their files.
BESIDE = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", "vocab.json", "merges.txt", "vocab.txt", "tekken.json"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
)


def export(
    source: Source,
    folder: Path,
    original: Path,
    architecture: str,
    names: Mapping[str, str],
    tokenizer_json: str | None,
    *,
    rank: int,
    size: int,
    barrier: Callable[[], None],
    eod_id: int | None = None,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write `folder` as `hf_write.write` does; all ranks call it.

    Args:
        source: the parameters, tied ones once, in the order to write.
        original: directory with the config.json that the weights were trained under.
        architecture: class of the model, which the original may not name or be of a base model.
        names: of the source's tensors in such a directory, which for some families are not the parameters'.
        tokenizer_json: the text of another tokenizer than the original's, which takes the place of all its files.
        eod_id: of that tokenizer: end of document, in both configurations bos and eos, as the trainer uses it.
        dtype: of the written tensors; None leaves each as it is.

    Raises:
        ValueError: on every rank, before anything is written: the folder is there and not empty, a file of the original
            cannot be read, a dtype that such a folder cannot have, no such eod_id.
        OSError: as `write`.
    """
    tensors = outs(source, {name: shape for name, (_, shape) in source.tensors.items()}, dtype, names.__getitem__)
    described = read_object(original / CONFIG)
    described.pop("torch_dtype", None)  # what transformers 4 called it
    described |= {"architectures": [architecture], "dtype": widest(tensors)}
    others = {name: _read(original / name) for name in (GENERATION, *BESIDE) if (original / name).is_file()}
    if tokenizer_json is not None and tokenizer_json.encode() != others.get("tokenizer.json"):
        ends = {"bos_token_id": eod_id, "eos_token_id": eod_id}
        generation = parse_object(others.get(GENERATION, b"{}"), str(original / GENERATION))
        others = {GENERATION: to_json(generation | ends), **tokenizer_files(tokenizer_json, eod_id)}
        described |= ends
    others[CONFIG] = to_json(described)
    write(source, folder, tensors, others, rank=rank, size=size, barrier=barrier, max_file_bytes=max_file_bytes)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror} (--original)") from None
