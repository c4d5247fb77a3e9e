"""The default corpus: text that ships with every CPython, so that the first run needs no download.

The documents are the entries of `pydoc_data.topics` (the language reference, in English) and the `.py` sources of the
standard library. `build` tokenizes these documents into a `.bin/.idx` pair, as whole documents or as sentences, and may
be killed at any time. `default_corpus.prepare` calls it where the pair is missing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from tqdm import tqdm

from dtmega.data.indexed_files.dataset import token_dtype
from dtmega.data.indexed_files.writer import IndexedWriter
from dtmega.data.preparing import sentences
from dtmega.data.tokenizers.tokenizer import Tokenizer

TOPICS = "pydoc_data/topics/"
DEFINITION = re.compile(r"(?<=\n)[ \t\r\f]*\n(?=class |def |async def |@)")  # the blank line before a definition
MIN_CHARS = 200_000  # a library with less text is incomplete
# The corpus leaves out installed packages, tests, generated tables, and the build settings of one machine.
SKIPPED_FOLDERS = {
    "site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings", "pydoc_data"
}  # fmt: skip
SKIPPED_PREFIXES = ("config-", "_sysconfigdata")


def documents() -> Iterator[tuple[str, str]]:
    """Yield the name (the path in the library) and the text of each document that is not blank.

    Documents are sorted by the hash of their name. `[data] split` takes consecutive documents, so in alphabetical
    order the validation set would consist of xml/ and zipfile alone.
    """
    sources = _sources(Path(sysconfig.get_paths()["stdlib"]))
    topics = {f"{TOPICS}{name}": text for name, text in _topics().items()}
    for name in sorted([*sources, *topics], key=lambda name: hashlib.sha256(name.encode()).digest()):
        text = topics[name] if name in topics else _read(sources[name])
        if text.strip():
            yield name, text


def _sources(library: Path) -> dict[str, Path]:
    """The path of each source file, keyed by the file's name in the library."""
    sources = {}
    for folder, subfolders, files in os.walk(library):
        # `os.walk` descends only into the folders that remain in this list.
        subfolders[:] = [
            name for name in subfolders if name not in SKIPPED_FOLDERS and not name.startswith(SKIPPED_PREFIXES)
        ]
        for file in files:
            if file.endswith(".py") and not file.startswith(SKIPPED_PREFIXES):
                path = Path(folder, file)
                sources[path.relative_to(library).as_posix()] = path
    return sources


def _topics() -> dict[str, str]:
    """The entries of the language reference, keyed by name; empty if this Python lacks the reference."""
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions put the topics into a separate package
        return {}
    return topics


def _read(path: Path) -> str:
    """The text of a source file; '' if it cannot be read as UTF-8 (a dangling link, or another encoding)."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="utf-8")
    return ""


def sentence_documents(name: str, text: str, tokenizer: Tokenizer) -> list[list[list[int]]]:
    """The documents of a topic or a source file: lists of sentences, each a list of ids.

    A topic is one document. A source file is split before each class or function, and its sentences are blocks between
    blank lines. BERT learns which of two segments comes first, but the order of definitions in a file is arbitrary, so
    BERT could not learn this order across definitions. A document of a single block gives no pair of segments, so it
    also takes the next definition.

    Args:
        name: name of the topic or source, as yielded by `documents`.
        text: text of the topic or source.
        tokenizer: tokenizer that encodes the sentences.
    """
    if name.startswith(TOPICS):
        return [sentences.encode(text, sentences.PROSE, tokenizer)]
    documents: list[list[list[int]]] = [[]]
    for part in DEFINITION.split(text):
        if len(documents[-1]) >= 2:
            documents.append([])
        documents[-1] += sentences.encode(part, sentences.BLOCKS, tokenizer)
    return [document for document in documents if document]


def build(prefix: str, tokenizer: Tokenizer, in_sentences: bool) -> None:
    """Tokenise the corpus into the `.bin/.idx` pair at `prefix`.

    Raises:
        ValueError: this Python lacks the library's sources.
    """
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
                for document in sentence_documents(name, text, tokenizer):
                    writer.add(list(chain.from_iterable(document)), [len(ids) for ids in document])
            else:
                writer.add([*tokenizer.encode(text), tokenizer.eod_id])
