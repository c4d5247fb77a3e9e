"""A directory that `from_pretrained` and `AutoTokenizer` of transformers load: the one exporter of the project.

OUT/config.json               of the model; or the original's, but for the class and the dtype of what is written
OUT/generation_config.json    and what is the tokenizer's
OUT/model.safetensors         or several files, as write.py writes them

A model may have come from a directory, its original. Then what is the tokenizer's (BESIDE) is taken from there, byte by
byte: never code, never other weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from dtmega.formats.sources import Source
from dtmega.hf import config_json
from dtmega.hf.write import MAX_FILE_BYTES, outs, to_json, widest, write
from dtmega.strangers import parse_object

GENERATION, TOKENIZER = "generation_config.json", "tokenizer.json"
# What transformers' tokenizers call their files.
BESIDE = (
    *(TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", "vocab.json", "merges.txt", "vocab.txt", "tekken.json"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
)
# Names of special tokens by which transformers' BertTokenizer finds them, where a vocabulary has them.
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
    described: Mapping[str, Any],
    original: Path | None,
    tokenizer_json: str | None,
    *,
    rank: int,
    size: int,
    barrier: Callable[[], None],
    eod_id: int | None = None,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write `folder` as `write.write` does; all ranks call it.

    Args:
        source: the tensors by the names they shall have, in the order to write.
        described: config.json; with an original, what is to be otherwise in it.
        original: directory with the config.json that the weights were trained under; None: of a model of the house.
        tokenizer_json: the text of tokenizer.json, which takes the place of all the original's files; None: those, or
            none.
        eod_id: of that tokenizer: end of document. It becomes both bos and eos: in training it stands before a document
            and after it.
        dtype: of the written tensors; None leaves each as it is.

    Raises:
        ValueError: on every rank, before anything is written: the folder is there and not empty, a file of the original
            cannot be read, a dtype that such a folder cannot have, no such eod_id.
        OSError: as `write`.
    """
    tensors = outs(source, dtype)
    ends = {"bos_token_id": eod_id, "eos_token_id": eod_id}
    files: dict[str, bytes] = {}
    if original is None:
        plain = {**described, **ends, "torch_dtype": widest(tensors)}
    else:
        plain = config_json.read_plain(original)
        plain.pop("torch_dtype", None)  # what transformers 4 called it
        plain |= {**described, "dtype": widest(tensors)}
        files = {name: _read(original / name) for name in (GENERATION, *BESIDE) if (original / name).is_file()}
    its_own = tokenizer_json is None or tokenizer_json.encode() == files.get(TOKENIZER)
    if original is None or not its_own:
        plain |= ends
        generation = parse_object(files.get(GENERATION, b"{}"), f"{original}/{GENERATION}")
        begins = {key: plain[key] for key in ("decoder_start_token_id",) if key in plain}
        files = {GENERATION: to_json(generation | ends | begins)}
        if tokenizer_json is not None:
            tokenizer = Tokenizer.from_str(tokenizer_json)
            files |= _tokenizer_files(tokenizer, tokenizer_json, eod_id, reads_types="type_vocab_size" in plain)
            pad_id = tokenizer.token_to_id(ROLES["pad_token"])
            plain |= {} if pad_id is None else {"pad_token_id": pad_id}
    files[config_json.NAME] = to_json(plain)
    write(source, folder, tensors, files, rank=rank, size=size, barrier=barrier, max_file_bytes=max_file_bytes)


def _tokenizer_files(tokenizer: Tokenizer, text: str, eod_id: int | None, *, reads_types: bool) -> dict[str, bytes]:
    """File -> content, for AutoTokenizer.

    Args:
        text: that `tokenizer` was made of.
        reads_types: the model tells the first of two texts from the second by `token_type_ids`.

    Raises:
        ValueError: the tokenizer has no such end of document.
    """
    eod = None if eod_id is None else tokenizer.id_to_token(eod_id)
    if eod_id is not None and eod is None:
        raise ValueError(f"the tokenizer has no id {eod_id} for the end of a document ([data] tokenizer)")
    special: dict[str, Any] = {} if eod is None else {"bos_token": eod, "eos_token": eod}
    special |= {role: name for role, name in ROLES.items() if tokenizer.token_to_id(name) is not None}
    if reads_types:
        special["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    # Not the class that transformers 4 has for BLOOM, which would add BLOOM's own special tokens.
    loading = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    return {TOKENIZER: text.encode(), "tokenizer_config.json": to_json(loading | special)}


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror} (--original)") from None
