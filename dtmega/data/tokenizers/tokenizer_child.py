"""Use a tokenizer.json in a confined process, from its first trial to the last text.

The `tokenizers` library is written in Rust. A hostile file can make the library panic (not a Python Exception), abort
the process, or fill the memory with text that keeps growing. Some do so for every text, others only for one, so every
text is encoded and decoded in the confined process.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import os
from array import array
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from dtmega.data import cache_dir
from dtmega.data.tokenizers.huggingface import TRIED, from_huggingface
from dtmega.data.tokenizers.tokenizer import EOD, SEP, Tokenizer, digest, read
from dtmega.files.confined import Confined
from dtmega.files.untrusted_json import read_object

HF_EODS = (EOD, "</s>", "<eos>", "<|end_of_text|>", "<|im_end|>", "<｜end▁of▁sentence｜>", "[EOS]", SEP)
SAMPLE = " [CLS] [SEP] [MASK] [PAD] a aa\tAB, b.\n\n  if x == 10: # é 中文 \U0001f600"
DECODED = 1000  # number of ids that the trial decodes
TRIAL = 2  # raise this number when a code change makes the trial try more


def load(spec: str) -> Tokenizer:
    """The tokenizer in a Hugging Face tokenizer.json.

    Raises:
        ValueError: the file is missing, is malformed, or has no end-of-document token.
    """
    content = read(Path(spec))
    check(spec, digest(content))
    loaded = tokenizers.Tokenizer.from_buffer(content)
    vocabulary = loaded.get_vocab(with_added_tokens=True)
    eods = [token for token in (*_named_token(Path(spec), "eos_token"), *HF_EODS) if token in vocabulary]
    if not eods:
        raise ValueError(
            f"{spec}: expected an end-of-document token, the eos_token of a tokenizer_config.json beside it or one of "
            f"{', '.join(HF_EODS)}; found none"
        )
    loaded.no_truncation()
    loaded.no_padding()
    child = TokenizerChild(spec, content)
    tokenizer = dataclasses.replace(
        from_huggingface(spec, loaded, eods[0], digest(content)),
        encode=lambda text: child.encode_all([text])[0].tolist(),
        encode_all=child.encode_all,
        decode=child.decode,
    )
    firsts = [vocabulary[token] for token in _named_token(Path(spec), "bos_token") if token in vocabulary]
    return dataclasses.replace(tokenizer, first_id=next(iter(firsts), None))


def _named_token(path: Path, role: str) -> list[str]:
    """Return a list with the name of a tokenizer's `eos_token` or `bos_token`; [] if no token has this role.

    A tokenizer_config.json next to the tokenizer.json stores the token either as a name, or as an object with the name
    under `content`.
    """
    try:
        token = read_object(path.with_name("tokenizer_config.json")).get(role)
    except ValueError:
        return []
    token = token.get("content") if isinstance(token, dict) else token
    return [token] if isinstance(token, str) else []


class TokenizerChild:
    """A confined process that encodes and decodes with a tokenizer.json. The process starts with the first text.

    Args:
        path: path of the tokenizer.json.
        content: its content; another content at `path` is refused later.
    """

    def __init__(self, path: str, content: bytes) -> None:
        self._child = Confined(
            "dtmega.data.tokenizers.tokenizer_child:serve",
            *(os.path.abspath(path), hashlib.sha256(content).hexdigest()),
            where=path,
        )

    def encode_all(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """The ids of each text.

        Raises:
            ValueError: the tokenizer refuses a text, or exceeds the limits of `confined.py`.
        """
        answer = self._child.ask(list(texts))
        ids = np.frombuffer(base64.b64decode(answer["ids"]), np.uint32)
        return [ids[start:end] for start, end in pairwise([0, *np.cumsum(answer["sizes"], dtype=np.int64).tolist()])]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids.

        Raises:
            ValueError: the tokenizer refuses the ids, or exceeds the limits of `confined.py`.
        """
        return self._child.ask({"decode": list(ids)})


def serve(path: str, digest: str) -> Callable[[Any], Any]:
    """Make a function that answers the requests of a `TokenizerChild`. Runs in the confined process."""
    content = Path(path).read_bytes()
    if hashlib.sha256(content).hexdigest() != digest:
        raise ValueError("the file has changed while it was in use")
    loaded = _read(content)
    loaded.encode_special_tokens = True  # a special token's name inside a document is ordinary text

    def answer(request: list[str] | dict[str, list[int]]) -> Any:
        try:
            if isinstance(request, dict):
                return loaded.decode(request["decode"], skip_special_tokens=False)
            # The "fast" variant saves a third of the time, because it does not compute offsets into the text.
            encodings = loaded.encode_batch_fast(request, add_special_tokens=False)
            sizes, ids = [], array("I")
            for encoding in encodings:
                ids.extend(encoding.ids)
                sizes.append(len(encoding))
            return {"sizes": sizes, "ids": base64.b64encode(ids).decode()}
        except BaseException as error:
            if isinstance(error, MemoryError):
                raise
            raise ValueError(f"the tokenizer refuses this text: {error}") from None

    return answer


def check(path: str, fingerprint: str) -> None:
    """Check, in a confined process, that a tokenizer.json can be used.

    A file that passes is not tried again: the cache directory then holds an empty file named after the fingerprint.

    Raises:
        ValueError: the trial failed; the message names the file.
    """
    passed: Path | None = None
    with contextlib.suppress(ValueError):
        passed = cache_dir() / f"tokenizer-{fingerprint}-{tokenizers.__version__}-v{TRIAL}"
    if passed is not None and passed.exists():
        return
    child = Confined("dtmega.data.tokenizers.tokenizer_child:try_out", os.path.abspath(path), where=path)
    try:
        child.start()
    finally:
        child.close()
    if passed is not None:
        with contextlib.suppress(OSError):
            passed.touch()


def try_out(path: str) -> Callable[[str], int]:
    """Use a tokenizer.json in every way that dtmega does: read, encode, decode. Runs in the confined process.

    An error while encoding or decoding does not fail the trial: a valid vocabulary without [UNK] refuses some texts.

    Returns:
        A dummy function, which is never called; `Confined` expects the result to be a function.
    """
    loaded = _read(Path(path).read_bytes())
    for text in (SAMPLE, *TRIED):
        for loaded.encode_special_tokens in (False, True):
            with contextlib.suppress(Exception):
                loaded.encode(text, add_special_tokens=False)
    ids = sorted(loaded.get_vocab(with_added_tokens=True).values())
    with contextlib.suppress(Exception):
        loaded.decode(ids[:DECODED], skip_special_tokens=False)
        for i in ids[:DECODED]:
            loaded.decode([i], skip_special_tokens=False)
    return len


def _read(content: bytes) -> tokenizers.Tokenizer:
    """The tokenizer of a tokenizer.json, without truncation and padding.

    Raises:
        ValueError: the content is no tokenizer.json.
    """
    try:
        loaded = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"expected a Hugging Face tokenizer.json, got '{error}'") from None
    loaded.no_truncation()
    loaded.no_padding()
    return loaded
