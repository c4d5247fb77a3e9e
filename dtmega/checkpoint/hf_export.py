"""A Hugging Face folder of BLOOM, written by all ranks: for `BloomForCausalLM.from_pretrained` and `AutoTokenizer`.

NAME/{config, generation_config, tokenizer, tokenizer_config}.json, and the weights as hf_write.py writes them
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from dtmega import config
from dtmega.checkpoint import Source
from dtmega.checkpoint.hf import CONFIG_KEYS, EMBED, pattern, translate
from dtmega.checkpoint.hf_write import MAX_FILE_BYTES, outs, to_json, widest, write


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
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write `folder` as `hf_write.write` does; all ranks call it. Padded rows of the embedding are left out.

    Args:
        hf_keys: our prefix -> theirs.
        tokenizer_json: the text of tokenizer.json; None leaves it out.
        eod_id: end of document. It becomes both bos and eos: in training it stands before a document and after it.
        dtype: of the written tensors; None leaves each as it is.

    Raises:
        ValueError: on every rank, before anything is written: the folder is there and not empty, the source does not
            have the tensors of `model`, Hugging Face's BLOOM has no such feed-forward size or dtype, or no such eod_id.
        OSError: as `write`.
    """
    tensors = outs(source, _shapes(source, model, hf_keys), dtype, lambda name: str(translate(name, hf_keys)))
    ends = {"bos_token_id": eod_id, "eos_token_id": eod_id}
    described: dict[str, Any] = {names[-1]: getattr(model, key) for key, names in CONFIG_KEYS.items()}
    fixed = {"architectures": ["BloomForCausalLM"], "model_type": "bloom", "tie_word_embeddings": True}
    others = {
        "config.json": to_json({**fixed, **described, **ends, "torch_dtype": widest(tensors)}),
        "generation_config.json": to_json(ends),
    }
    if tokenizer_json is not None:
        others |= tokenizer_files(tokenizer_json, eod_id)
    write(source, folder, tensors, others, rank=rank, size=size, barrier=barrier, max_file_bytes=max_file_bytes)


def tokenizer_files(tokenizer_json: str, eod_id: int | None) -> dict[str, bytes]:
    """File -> content, for AutoTokenizer.

    Raises:
        ValueError: the tokenizer has no such end of document.
    """
    from tokenizers import Tokenizer  # who has made the text has the library

    eod = None if eod_id is None else Tokenizer.from_str(tokenizer_json).id_to_token(eod_id)
    if eod_id is not None and eod is None:
        raise ValueError(f"the tokenizer has no id {eod_id} for the end of a document ([data] tokenizer)")
    special = {} if eod is None else {"bos_token": eod, "eos_token": eod}
    # Not the class that transformers 4 has for BLOOM, which would add BLOOM's own special tokens.
    loading = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    return {"tokenizer.json": tokenizer_json.encode(), "tokenizer_config.json": to_json(loading | special)}


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
