"""Exports a model to a directory that transformers' `from_pretrained` and `AutoTokenizer` can load.

OUT/config.json               made from the model, or copied from the original directory with class and dtype replaced
OUT/generation_config.json    written together with the tokenizer files
OUT/model.safetensors         one file or several files; see write.py

The original directory is the transformers directory that the model came from, if any. The original's tokenizer files
(TOKENIZER_FILES) are copied byte for byte. Code and other weights are never copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import Tokenizer

from dtmega.checkpoint.sources import Source
from dtmega.files.regular import read_regular
from dtmega.files.untrusted_json import parse_object
from dtmega.interop.hf.files import config_json
from dtmega.interop.hf.files.write import MAX_FILE_BYTES, TensorSpec, tensor_specs, to_json, widest, write

GENERATION, TOKENIZER = "generation_config.json", "tokenizer.json"
DECODER_START = "decoder_start_token_id"  # only models have this key; tokenizers do not
NO_TOKEN_IDS: Mapping[str, int | None] = MappingProxyType({"bos_token_id": None, "eos_token_id": None})
# File names that transformers' tokenizers use.
TOKENIZER_FILES = (
    *(TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", "vocab.json", "merges.txt", "vocab.txt", "tekken.json"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
)
# Name of a special token in transformers -> the token with this role in BERT-like vocabularies.
ROLES = {
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
}


def export(
    source: Source,
    folder: Path,
    config_values: Mapping[str, Any],
    original: Path | None,
    tokenizer_json: str | None,
    *,
    rank: int,
    size: int,
    barrier: Callable[[], None],
    token_ids: Mapping[str, int | None] = NO_TOKEN_IDS,
    end_ids: Sequence[int] = (),
    other_files: Mapping[str, bytes] = MappingProxyType({}),
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write a transformers directory with `write.write`. All ranks must call this function together.

    Args:
        source: tensors under the names that the files will use, in the order of writing.
        folder: output folder, new or empty.
        config_values: entries of config.json; with an `original`, only the entries that differ from the original.
        original: directory with the config.json used to train the weights; None for one of dtmega's own models.
        tokenizer_json: content of a tokenizer.json that replaces all of the original's tokenizer files; None if the
            original's files are kept.
        rank, size, barrier, max_file_bytes: arguments of `write.write`.
        token_ids: ids of the tokenizer's special tokens, keyed by config key (eos_token_id, ...).
        end_ids: further token ids that end generated text, such as the ids that end a turn.
        other_files: content of each further file, keyed by file name; only rank 0 writes these files. For one of
            dtmega's own models, `other_files` may include the `tokenizer.json` and `generation_config.json` of the
            directory from which training started. If the tokenizer has not changed since then, this
            generation_config.json is written unchanged; otherwise the file gets the new tokenizer's token ids.

    Raises:
        ValueError: the folder exists and is not empty, an original file cannot be read, a tensor's dtype is not allowed
            for weights, or the tokenizer has no token for an id. Every rank raises this error before writing.
        OSError: `write.write` fails.
    """
    tensors = tensor_specs(source)
    files = dict(other_files)
    if original is None:
        config = {**config_values, **token_ids, **_dtypes(tensors)}
    else:
        config = config_json.read_plain(original)
        dtypes = _dtypes(tensors)
        config |= {"dtype": dtypes["dtype"], **(dtypes if "torch_dtype" in config else {}), **config_values}
        files |= {
            name: _read(original / name) for name in (GENERATION, *TOKENIZER_FILES) if (original / name).is_file()
        }
    keeps_tokenizer = tokenizer_json is None or tokenizer_json.encode() == files.get(TOKENIZER)
    if original is None or not keeps_tokenizer:
        config |= token_ids
        if not keeps_tokenizer or GENERATION not in files:
            generation = parse_object(files.get(GENERATION, b"{}"), f"{GENERATION} of the source")
            decoder_start = {DECODER_START: config[DECODER_START]} if DECODER_START in config else {}
            files[GENERATION] = to_json({**generation, **token_ids, **decoder_start})
        files = {name: content for name, content in files.items() if name not in TOKENIZER_FILES}
        if tokenizer_json is not None:
            tokenizer = Tokenizer.from_str(tokenizer_json)
            files |= _tokenizer_files(tokenizer, tokenizer_json, token_ids, reads_types="type_vocab_size" in config)
            pad_id = tokenizer.token_to_id(ROLES["pad_token"])
            if pad_id is not None:
                config["pad_token_id"] = pad_id
    if end_ids:
        files[GENERATION] = _ending_at(files.get(GENERATION, b"{}"), end_ids)
    files[config_json.NAME] = to_json(config)
    write(source, folder, tensors, files, rank=rank, size=size, barrier=barrier, max_file_bytes=max_file_bytes)


def _tokenizer_files(
    tokenizer: Tokenizer, text: str, token_ids: Mapping[str, int | None], *, reads_types: bool
) -> dict[str, bytes]:
    """Make the content of each file that AutoTokenizer reads, keyed by file name.

    Args:
        text: content of the tokenizer.json that `tokenizer` was made from.
        reads_types: whether the model accepts `token_type_ids`, which distinguish the two segments of a pair.

    Raises:
        ValueError: the tokenizer has no token for one of the ids.
    """
    special: dict[str, Any] = {}
    for key, i in token_ids.items():
        if i is None:
            continue
        token = tokenizer.id_to_token(i)
        if token is None:
            raise ValueError(f"the tokenizer has no id {i}, which is to be {key} ([data] tokenizer)")
        if key != DECODER_START:
            special[key.removesuffix("_id")] = token
    special |= {role: name for role, name in ROLES.items() if tokenizer.token_to_id(name) is not None}
    if reads_types:
        special["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    # transformers 4's tokenizer class for BLOOM would add BLOOM's own special tokens, so name the general class.
    loading = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    return {TOKENIZER: text.encode(), "tokenizer_config.json": to_json(loading | special)}


def _ending_at(generation: bytes, end_ids: Sequence[int]) -> bytes:
    """Add further ids to `eos_token_id` in the content of a generation_config.json."""
    values = parse_object(generation, f"{GENERATION} of the source")
    stored = values.get("eos_token_id")
    known = stored if isinstance(stored, list) else [] if stored is None else [stored]
    return to_json({**values, "eos_token_id": [*known, *(i for i in end_ids if i not in known)]})


def _dtypes(tensors: Sequence[TensorSpec]) -> dict[str, str]:
    """The entries of config.json for the dtype of the weights: `dtype`, which transformers 4 calls `torch_dtype`."""
    return dict.fromkeys(("dtype", "torch_dtype"), widest(tensor.dtype for tensor in tensors))


def _read(path: Path) -> bytes:
    try:
        return read_regular(path)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror} (--original)") from None
