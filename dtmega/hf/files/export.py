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
from types import MappingProxyType
from typing import Any

from tokenizers import Tokenizer

from dtmega.formats.sources import Source
from dtmega.hf.files import config_json
from dtmega.hf.files.write import MAX_FILE_BYTES, tensor_specs, to_json, widest, write
from dtmega.strangers import parse_object

GENERATION, TOKENIZER = "generation_config.json", "tokenizer.json"
BEGINS = "decoder_start_token_id"  # of a model, and of no tokenizer
NO_ENDS: Mapping[str, int | None] = MappingProxyType({"bos_token_id": None, "eos_token_id": None})
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
    token_ids: Mapping[str, int | None] = NO_ENDS,
    beside: Mapping[str, bytes] = MappingProxyType({}),
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write `folder` as `write.write` does; all ranks call it.

    Args:
        source: the tensors by the names they shall have, in the order to write.
        described: config.json; with an original, what is to be otherwise in it.
        original: directory with the config.json that the weights were trained under; None: of a model of the house.
        tokenizer_json: the text of tokenizer.json, which takes the place of all the original's files; None: those, or
            none.
        token_ids: of that tokenizer, by the names that configurations have for them: eos_token_id and others.
        beside: file -> content of other files to write; rank 0's count. Of a model of the house `tokenizer.json` and
            `generation_config.json` of the directory that it began with may be among them: the second stays as it is
            where the tokenizer is the first, and else has the ids of the tokenizer.

    Raises:
        ValueError: on every rank, before anything is written: the folder is there and not empty, a file of the original
            cannot be read, a dtype that such a folder cannot have, no token with such an id.
        OSError: as `write`.
    """
    tensors = tensor_specs(source)
    files = dict(beside)
    if original is None:
        plain = {**described, **token_ids, "torch_dtype": widest(out.dtype for out in tensors)}
    else:
        plain = config_json.read_plain(original)
        plain.pop("torch_dtype", None)  # what transformers 4 called it
        plain |= {"dtype": widest(out.dtype for out in tensors), **described}
        files |= {name: _read(original / name) for name in (GENERATION, *BESIDE) if (original / name).is_file()}
    its_own = tokenizer_json is None or tokenizer_json.encode() == files.get(TOKENIZER)
    if original is None or not its_own:
        plain |= token_ids
        if not its_own or GENERATION not in files:
            generation = parse_object(files.get(GENERATION, b"{}"), f"{GENERATION} of the source")
            begins = {BEGINS: plain[BEGINS]} if BEGINS in plain else {}
            files[GENERATION] = to_json({**generation, **token_ids, **begins})
        files = {name: content for name, content in files.items() if name not in BESIDE}
        if tokenizer_json is not None:
            tokenizer = Tokenizer.from_str(tokenizer_json)
            files |= _tokenizer_files(tokenizer, tokenizer_json, token_ids, reads_types="type_vocab_size" in plain)
            pad_id = tokenizer.token_to_id(ROLES["pad_token"])
            plain |= {} if pad_id is None else {"pad_token_id": pad_id}
    files[config_json.NAME] = to_json(plain)
    write(source, folder, tensors, files, rank=rank, size=size, barrier=barrier, max_file_bytes=max_file_bytes)


def _tokenizer_files(
    tokenizer: Tokenizer, text: str, token_ids: Mapping[str, int | None], *, reads_types: bool
) -> dict[str, bytes]:
    """File -> content, for AutoTokenizer.

    Args:
        text: that `tokenizer` was made of.
        reads_types: the model tells the first of two texts from the second by `token_type_ids`.

    Raises:
        ValueError: the tokenizer has no token with such an id.
    """
    special: dict[str, Any] = {}
    for key, i in token_ids.items():
        if i is None:
            continue
        token = tokenizer.id_to_token(i)
        if token is None:
            raise ValueError(f"the tokenizer has no id {i}, which is to be {key} ([data] tokenizer)")
        if key != BEGINS:
            special[key.removesuffix("_id")] = token
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
