"""The default corpus: text that every CPython already has, so that the first run needs no download.

Documents are the entries of `pydoc_data.topics` (the language reference, in English) and the `.py` sources of the
standard library. `prepare_stdlib` tokenizes them into a `.bin/.idx` pair in the cache directory, once per Python
version, vocabulary and form (whole documents or their sentences), whatever is killed or run twice meanwhile.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from dtmega.data import cache_dir, sentences
from dtmega.data.indexed import IndexedDataset, IndexedWriter, token_dtype
from dtmega.data.tokenizer import Tokenizer
from dtmega.lock import Lock

FORMAT = 2  # raise it when the same Python and vocabulary give other tokens than before
SENTENCES_FORMAT = 1  # the same for sentences, beside FORMAT
TOPICS = "pydoc_data/topics/"
DEFINITION = re.compile(r"(?<=\n)[ \t\r\f]*\n(?=class |def |async def |@)")  # the blank line before one
MIN_CHARS = 200_000  # less is a broken Python, not a corpus
# Not the library's own text: what is installed beside it, tests, generated tables, build settings of one machine.
SKIPPED_FOLDERS = {
    "site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings", "pydoc_data"
}  # fmt: skip
SKIPPED_PREFIXES = ("config-", "_sysconfigdata")


def documents() -> Iterator[tuple[str, str]]:
    """Yield (name, text) of each document that is not blank; names are paths in the library.

    The order is that of the names' hashes: `[data] split` cuts by place, and in the order of the names the validation
    part would be xml/ and zipfile alone.
    """
    sources = _sources(Path(sysconfig.get_paths()["stdlib"]))
    topics = {f"{TOPICS}{name}": text for name, text in _topics().items()}
    for name in sorted([*sources, *topics], key=lambda name: hashlib.sha256(name.encode()).digest()):
        text = topics[name] if name in topics else _read(sources[name])
        if text.strip():
            yield name, text


def _sources(library: Path) -> dict[str, Path]:
    """The path of each source file, by its name in the library."""
    found = {}
    for folder, subfolders, files in os.walk(library):
        # `os.walk` goes into those that stay in its list.
        subfolders[:] = [
            name for name in subfolders if name not in SKIPPED_FOLDERS and not name.startswith(SKIPPED_PREFIXES)
        ]
        for file in files:
            if file.endswith(".py") and not file.startswith(SKIPPED_PREFIXES):
                path = Path(folder, file)
                found[path.relative_to(library).as_posix()] = path
    return found


def _topics() -> dict[str, str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions package it apart
        return {}
    return topics


def _read(path: Path) -> str:
    """The text, or nothing where there is no readable UTF-8 (a dangling link, an old source in another encoding)."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="utf-8")
    return ""


def sentence_documents(name: str, text: str, tokenizer: Tokenizer) -> list[list[list[int]]]:
    """The documents of a topic or a source, each as the ids of its sentences.

    A topic is one. In which order a source defines its classes and functions is a matter of taste, of which a model
    could learn nothing: it is cut before each of them that follows two blocks or more.
    """
    if name.startswith(TOPICS):
        return [sentences.encode(text, sentences.PROSE, tokenizer)]
    documents: list[list[list[int]]] = [[]]
    for part in DEFINITION.split(text):
        if len(documents[-1]) >= 2:
            documents.append([])
        documents[-1] += sentences.encode(part, sentences.BLOCKS, tokenizer)
    return [document for document in documents if document]


def prepare_stdlib(tokenizer: Tokenizer, *, in_sentences: bool = False) -> str:
    """The prefix of the tokenised corpus; builds it on first use or when damaged.

    Args:
        in_sentences: each sequence is a sentence or a block, as `sentence_documents` finds them; else it is a document,
            closed by `eod_id`.

    Raises:
        ValueError: this Python has next to no library sources, or no cache directory can be written.
    """
    version = ".".join(map(str, sys.version_info[:3]))
    form = f"-sentences-v{SENTENCES_FORMAT}" if in_sentences else ""
    prefix = str(cache_dir() / f"stdlib-py{version}-{tokenizer.fingerprint}-v{FORMAT}{form}")
    if not _is_whole(prefix, tokenizer):
        with Lock(Path(f"{prefix}.lock")):
            if not _is_whole(prefix, tokenizer):  # another process may have built it while this one waited
                _build(prefix, tokenizer, in_sentences)
    return prefix


def _is_whole(prefix: str, tokenizer: Tokenizer) -> bool:
    try:
        dataset = IndexedDataset(prefix)
    except ValueError:
        return False
    return len(dataset) > 0 and dataset.dtype == token_dtype(tokenizer.vocab_size)


def _build(prefix: str, tokenizer: Tokenizer, in_sentences: bool) -> None:
    for leftover in glob.glob(f"{glob.escape(prefix)}.*.tmp"):  # of a killed run: whoever holds the lock is alone
        os.unlink(leftover)
    texts = dict(documents())
    n_chars = sum(map(len, texts.values()))
    if n_chars < MIN_CHARS:
        raise ValueError(
            f"[data] path = 'stdlib': expected Python's library sources in {sysconfig.get_paths()['stdlib']}, got "
            f"{len(texts)} documents with {n_chars} characters; install the distribution's full Python (Debian: "
            f"libpython3-stdlib), or tokenize a text of your own and name it in [data] path"
        )
    line = f"tokenizing {len(texts)} documents of Python's library ({n_chars / 1e6:.1f} M characters) into {prefix}"
    print(line, file=sys.stderr, flush=True)
    with IndexedWriter(prefix, token_dtype(tokenizer.vocab_size)) as writer:
        for name, text in tqdm(texts.items(), desc="tokenize", unit=" documents", delay=1, disable=None):
            if in_sentences:
                for found in sentence_documents(name, text, tokenizer):
                    writer.add([i for ids in found for i in ids], [len(ids) for ids in found])
            else:
                writer.add([*tokenizer.encode(text), tokenizer.eod_id])
