"""Keys, digests and names of random streams: each ingredient that is changed changes them.

Two things whose keys are equal share a cache file, a part of a text or an order of samples, and nothing tells. So a
table names the ingredients of each key, with another value of each, and a change of any one must make another key. A
new parameter of what makes a key has to come into its row.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from dtmega import config
from dtmega.cli import commands
from dtmega.data import text
from dtmega.data.indexed_files.dataset import IndexedDataset
from dtmega.data.indexed_files.shared_file import SharedFile
from dtmega.data.indexed_files.writer import IndexedWriter
from dtmega.data.megatron import blend as megatron_blend
from dtmega.data.megatron import index as megatron_index
from dtmega.data.megatron.index import Epochs, Indices, OrderSettings
from dtmega.data.objectives.denoising import cut
from dtmega.data.objectives.denoising.cut import Targets
from dtmega.data.objectives.denoising.merged_spans import SpanSamples
from dtmega.data.objectives.denoising.pairs import PairSamples
from dtmega.data.objectives.denoising.separate_spans import SentenceSamples
from dtmega.data.objectives.prefixes import PrefixSamples
from dtmega.data.preparing import conversations, tokenize
from dtmega.data.preparing.input_files import File
from dtmega.data.preparing.parts import Part, share_of
from dtmega.data.sampling import order
from dtmega.data.sampling.packs import Packs
from dtmega.data.sampling.samples import Samples
from dtmega.data.tokenizers import chat
from dtmega.data.tokenizers.load import load_tokenizer
from dtmega.data.tokenizers.tokenizer_json import to_json
from dtmega.interop.hf import resolve
from tests.data.indexed_files.test_conversations import CHAT
from tests.data.indexed_files.test_conversations import write as write_chat

N_DOCUMENTS = 30


class Key(NamedTuple):
    """A key and its ingredients.

    Attributes:
        made: makes the key of all its ingredients, which are its parameters.
        given: a value of each ingredient.
        others: another value of each.
    """

    made: Callable[..., object]
    given: dict[str, Any]
    others: dict[str, Any]


class Shared(Exception):
    """Raised where a shared file would be read or made; holds the file's name and what it is made from."""


@pytest.fixture(autouse=True)
def no_shared_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def stop(self: SharedFile) -> bool:
        raise Shared(self.path.name, self._made_from)

    monkeypatch.setattr(SharedFile, "read_or_make", stop)


def write(folder: Path, name: str, first: int = 0) -> IndexedDataset:
    """A corpus of documents of three sentences."""
    with IndexedWriter(folder / name, np.dtype("<u2")) as writer:
        for i in range(N_DOCUMENTS):
            writer.add([first + i % 7] * 9, [2, 3, 4])
    return IndexedDataset(folder / name)


# --------------------------------------------------------------------------------------------------- files of a cache


class Version(NamedTuple):
    """A corpus, and when its index was written."""

    dataset: IndexedDataset
    written_ns: int

    def there(self) -> IndexedDataset:
        os.utime(self.dataset.index_path, ns=(0, self.written_ns))
        return self.dataset


def files_of_a_cache(folder: Path) -> Iterator[tuple[str, Key]]:
    """The names of files, which tell corpora, parts and settings apart, and what the content of each is made from."""
    corpus, other = Version(write(folder, "a"), 1), Version(write(folder, "b"), 1)

    def files(
        what: str,
        function: Callable[..., object],
        arguments: Callable[..., tuple[Any, ...]],
        given: dict[str, Any],
        others: dict[str, Any],
    ) -> Iterator[tuple[str, Key]]:
        def made(place: int, **ingredients: Any) -> Any:
            with pytest.raises(Shared) as stopped:
                function(*arguments(**ingredients))
            return stopped.value.args[place]

        yield f"the name of {what}", Key(partial(made, 0), given, others)
        yield f"the content of {what}", Key(partial(made, 1), given, others)
        if "corpus" in given:
            changed = others | {"corpus": corpus._replace(written_ns=2)}
            yield f"the content of {what}, whose corpus was written anew", Key(partial(made, 1), given, changed)

    yield from files(
        "an order of documents",
        order._from_file,
        lambda corpus, documents, stream, epoch: (corpus.there(), documents, stream, epoch),
        {"corpus": corpus, "documents": (0, 20), "stream": "1/train/0", "epoch": 0},
        {"corpus": other, "documents": (0, 19), "stream": "1/valid/0", "epoch": 1},
    )
    yield from files(
        "a table of sentences",
        cut._from_file,
        lambda corpus, documents, **targets: (corpus.there(), documents, Targets(**targets), np.dtype("u4"), tuple),
        {"corpus": corpus, "documents": (0, 20)} | Targets(96, 0.1, "1/train/0")._asdict(),
        {"corpus": other, "documents": (0, 19)}
        | {"longest": 95, "short_seq_prob": 0.2, "stream": "1/train/1", "fewest": 1},
    )
    settings = OrderSettings(corpus.dataset, (0, 20), 60, 8, 1, 0.8)._asdict()
    del settings["dataset"]
    yield from files(
        "an order of Megatron's",
        megatron_index._from_file,
        lambda corpus, **settings: (OrderSettings(corpus.there(), **settings), Epochs(1, 22, 22), 20),
        {"corpus": corpus, **settings},
        {"corpus": other, "sequences": (0, 19), "samples": 61, "seq_len": 9, "seed": 2, "cutoff": 0.7},
    )
    yield from files(
        "a blend of Megatron's",
        megatron_blend._from_file,
        lambda weights, n: (np.array(weights), n),
        {"weights": [0.5, 0.5], "n": 60},
        {"weights": [0.25, 0.75], "n": 61},
    )


# ------------------------------------------------------------------------------------------------------------ digests


def of_a_pair(idx: bytes, bin: bytes) -> str:
    """The fingerprint of files with these contents."""
    prefix = Path(os.environ["XDG_CACHE_HOME"]).parent / "pair"
    Path(f"{prefix}.idx").write_bytes(idx)
    Path(f"{prefix}.bin").write_bytes(bin)
    return text.fingerprint(str(prefix))


def of_a_part(files: list[tuple[str, bytes]], encoding: str, settings: dict[str, Any], number: int, of: int) -> object:
    """The entry `part` of the record of a part of these files, of which each has a kind and a content."""
    folder = Path(os.environ["XDG_CACHE_HOME"]).parent
    found = []
    for i, (kind, content) in enumerate(files):
        (folder / f"{i}").write_bytes(content)
        found.append(File(str(folder / f"{i}"), kind, len(content)))
    return share_of("out", found, Part(number, of), encoding=encoding, settings=settings).part


def of_an_order(documents: list[int], samples: list[list[int]], shuffle: list[int]) -> str:
    indices = Indices(np.array(documents, np.int32), np.array(samples, np.int32), np.array(shuffle, np.uint32))
    return indices.digest()


def digests() -> Iterator[tuple[str, Key]]:
    large = bytes(200_000)
    yield ("a data set", Key(of_a_pair, {"idx": large, "bin": large}, {"idx": large + b"0", "bin": large + b"0"}))
    for place in ("first", "last"):
        at = slice(0, 1) if place == "first" else slice(-1, None)
        changed = bytearray(large)
        changed[at] = b"1"
        others = {"idx": bytes(changed), "bin": bytes(changed)}
        yield (f"a data set, by its {place} bytes", Key(of_a_pair, {"idx": large, "bin": large}, others))
    files = [(".jsonl", b'{"text": "a"}\n' * 3000), (".txt", b"b" * 9)]
    given = {"files": files, "encoding": "", "settings": {"key": "text"}, "number": 0, "of": 2}
    others = {"encoding": "latin-1", "settings": {"key": "body"}, "number": 1, "of": 3}
    for what, other in {
        "order": files[::-1],
        "number": files[:1],
        "kinds": [(".json", files[0][1]), files[1]],
        "bounds": [(".jsonl", files[0][1] + b"b"), (".txt", b"b" * 8)],
        "last bytes": [files[0], (".txt", b"b" * 8 + b"c")],
    }.items():
        yield (f"a part of a text, by its files' {what}", Key(of_a_part, given, {"files": other, **others}))
    yield (
        "an order of Megatron's, by its entries",
        Key(
            of_an_order,
            {"documents": [0, 1, 2], "samples": [[0, 0], [1, 2]], "shuffle": [0, 1, 2]},
            {"documents": [0, 2, 1], "samples": [[0, 0], [1, 3]], "shuffle": [0, 2, 1]},
        ),
    )
    yield (
        "an order of Megatron's, by its lengths",
        Key(
            of_an_order,
            {"documents": [0], "samples": [[0, 0]], "shuffle": [0]},
            {"documents": [0, 0], "samples": [[0, 0], [0, 0]], "shuffle": [0, 0]},
        ),
    )


def tables() -> Iterator[tuple[str, Key]]:
    """Keys of what a user's files determine: their contents are the ingredients, whatever their names."""
    folder = Path(os.environ["XDG_CACHE_HOME"]).parent
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c", "d", "e"]

    def of_words(spec: str, words: list[str]) -> str:
        (folder / "vocab.txt").write_text("\n".join(words))
        return load_tokenizer(f"{spec}:{folder}/vocab.txt").fingerprint

    others = {"spec": "bert-cased", "words": [*words[:-1], "f"]}
    yield ("a vocabulary of WordPieces", Key(of_words, {"spec": "bert", "words": words}, others))

    def of_template(own: str, given: str) -> str:
        (folder / "own").write_text(own)
        (folder / "given").write_text(given)
        return conversations._digest(chat.Template(folder / "own", folder / "given"))

    yield ("a chat template", Key(of_template, {"own": "a", "given": "b"}, {"own": "c", "given": "c"}))

    def of_model(**keys: Any) -> str:
        (folder / "config.json").write_text(json.dumps(keys))
        return resolve.digest(str(folder))

    keys = {"model_type": "llama", "rope_theta": 1.0, "rope_scaling": None}
    others = {"model_type": "qwen2", "rope_theta": 2.0, "rope_scaling": {"factor": 2.0}}
    yield ("a config.json", Key(of_model, keys, others))


def keys_without_a_change(rows: Iterator[tuple[str, Key]]) -> dict[str, list[str]]:
    """By key, the ingredients of which another value makes the same key; [""] if the same ingredients make another."""
    wrong: dict[str, list[str]] = {}
    for name, key in rows:
        assert key.given.keys() == key.others.keys(), name
        first = key.made(**key.given)
        same = [each for each, other in key.others.items() if key.made(**key.given | {each: other}) == first]
        if key.made(**key.given) != first:
            same.append("")
        if same:
            wrong[name] = same
    return wrong


@pytest.mark.parametrize("rows", [files_of_a_cache, digests, tables])
def test_a_key_is_another_with_another_value_of_any_of_its_ingredients(tmp_path: Path, rows: Callable[..., Any]):
    assert keys_without_a_change(rows(tmp_path) if inspect.signature(rows).parameters else rows()) == {}


# ------------------------------------------------------------------------------------------------ options of a command

# By what is tokenized, the options that change the tokens; those of a text also depend on whether it is of lines.
DOCUMENTS = ["--tokenizer bytes", "--json-key body", "--append-eod", "--encoding latin-1", "--encoding utf-16"]
DOCUMENTS += ["--split-documents 7", "--split-documents 8", "--split-documents blank-lines"]
DOCUMENTS += ["--split-sentences prose", "--split-sentences blocks"]
DOCUMENTS += ["--tokenizer tokenizer.json", "--prepend-bos --tokenizer tokenizer.json"]
CONVERSATIONS = ["--tokenizer bytes", "--json-key talk", "--encoding latin-1", "--chat-template own.jinja"]
CONVERSATIONS += ["--train-on all", "--train-on last", "--roles bot=assistant", "--roles bot=user"]
# These choose the files, which have a digest of their own, or change no token of a text that is tokenized whole.
OF_NO_EFFECT = {"--help", "--input", "--output", "--overwrite", "--part", "--kind", "--workers", "--strict"}
OF_NO_EFFECT |= {"--chat", "--skip-empty"}


def test_every_option_of_tokenize_that_changes_tokens_changes_the_digest_of_a_parts_settings(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "own.jinja").write_text("{{ messages }}")
    (tmp_path / "tokenizer.json").write_text(to_json("stdlib-8k"))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<|endoftext|>"}')
    monkeypatch.chdir(tmp_path)

    def stop(*args: Any, **options: Any) -> None:
        part = share_of(*args, **options).part
        assert part is not None
        raise Shared(part.settings)

    monkeypatch.setattr(tokenize, "share_of", stop)
    monkeypatch.setattr(conversations, "share_of", stop)

    def of(given: str) -> str:
        always = "--tokenizer stdlib-8k --output out --part 0/2"
        args = commands.parse(["tokenize", *f"{always} {given}".split()])
        with pytest.raises(Shared) as stopped:
            commands.module_of("tokenize").command(args)
        return stopped.value.args[0]

    for given, options in (("--input a.jsonl a.txt", DOCUMENTS), ("--chat --input a.jsonl", CONVERSATIONS)):
        found = {option: of(f"{given} {option}") for option in ["", *options]}
        assert len(set(found.values())) == len(found), found
    parser = argparse.ArgumentParser()
    commands.module_of("tokenize").add_arguments(parser)
    options = {action.option_strings[-1] for action in parser._actions}
    assert options == {option.split()[0] for option in (*DOCUMENTS, *CONVERSATIONS)} | OF_NO_EFFECT


# ------------------------------------------------------------------------------------------------------ random streams


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The names of random streams, as they are hashed."""
    found: list[bytes] = []
    honest = hashlib.blake2b

    def noted(name: bytes, **options: Any) -> Any:
        if b"/" in name:  # others are those of draws, which are combined with the key of a stream
            found.append(name)
        return honest(name, **options)

    monkeypatch.setattr(hashlib, "blake2b", noted)
    return found


def text_samples(kind: type[Samples]) -> Callable[..., Any]:
    return lambda folder, *part: kind(write(folder, "text"), (0, N_DOCUMENTS), 8, *part)


def sentence_samples(kind: Any) -> Callable[..., Any]:
    return lambda folder, *part: kind(write(folder, "sentences"), (0, N_DOCUMENTS), 12, 0.1, *part)


def packs(folder: Path, *part: Any) -> Packs:
    talks = [["a", "B" * (1 + i % 5)] for i in range(N_DOCUMENTS)]
    dataset = write_chat(folder / "chat", talks, chat=CHAT | {"learned": sum(len(talk[1]) for talk in talks)})
    return Packs(dataset, (0, N_DOCUMENTS), config.Data(objective="conversations", seq_len=12), *part)


SAMPLES = {
    "text": text_samples(Samples),
    "prefixes": text_samples(PrefixSamples),
    "spans": text_samples(SpanSamples),
    "pairs": sentence_samples(PairSamples),
    "spans of sentences": sentence_samples(SentenceSamples),
    "conversations": packs,
}


@pytest.mark.parametrize("kind", SAMPLES)
def test_no_two_epochs_seeds_splits_or_corpora_share_the_name_of_a_random_stream(
    tmp_path: Path, names: list[bytes], kind: str
):
    def taken() -> set[bytes]:
        found = set(names)
        names.clear()
        return found

    streams = []
    for part in ((1, "train", 0), (2, "train", 0), (1, "valid", 0), (1, "train", 1)):
        samples = SAMPLES[kind](tmp_path, *part)
        n = int(samples.n_samples)
        if part == (1, "train", 0):
            for epoch in range(3):
                samples[epoch * n + 1 + epoch]
                streams.append(taken())
        else:
            samples[1]
            streams.append(taken())
    assert all(streams)
    counts = Counter(name for stream in streams for name in stream)
    assert [name for name, count in counts.items() if count > 1] == []


@pytest.mark.parametrize("kind", ["prefixes", "spans", "pairs", "spans of sentences"])
def test_each_sample_has_a_key_of_its_own(tmp_path: Path, kind: str):
    samples = SAMPLES[kind](tmp_path, 1, "train", 0)
    n = 3 * int(samples.n_samples)
    assert len({samples[g].key for g in range(n)}) == n
