"""Room data/preparing/corpus.py, and the vocabulary trained on it."""

import base64
import dataclasses
import importlib.util
import os
import signal
import subprocess
import sys
import sysconfig
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from dtmega.data import cache_dir, default_corpus
from dtmega.data.indexed_files.dataset import IndexedDataset
from dtmega.data.indexed_files.token_ids import check_token_ids
from dtmega.data.indexed_files.writer import IndexedWriter
from dtmega.data.preparing import corpus, sentences
from dtmega.data.tokenizers.load import STDLIB_8K, load_tokenizer

ROOT = Path(corpus.__file__).parents[3]
BYTES = load_tokenizer("bytes")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def few(monkeypatch):
    """The corpus cut to its first 40 documents."""
    texts = list(islice(corpus.documents(), 40))
    monkeypatch.setattr(corpus, "documents", lambda: iter(texts))
    return texts


@pytest.fixture(scope="module")
def train_tokenizer():
    spec = importlib.util.spec_from_file_location("train_tokenizer", ROOT / "tools" / "train_tokenizer.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(code, **popen):
    """Python in another process that shares this test's cache."""
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **popen,
    )


# --------------------------------------------------------------------------------------------------------- documents


def test_the_corpus_is_megabytes_of_sources_and_prose():
    documents = dict(corpus.documents())
    assert "class Thread" in documents["threading.py"]
    assert "lambda" in documents["pydoc_data/topics/lambda"]
    assert sum(map(len, documents.values())) > 5_000_000


def test_documents_come_none_twice_and_in_an_order_that_mixes_the_packages():
    names = [name for name, _ in corpus.documents()]
    assert len(names) == len(set(names))
    last_tenth = names[-len(names) // 10 :]
    assert 0.05 < sum(name.startswith("pydoc_data/") for name in last_tenth) / len(last_tenth) < 0.25


def test_no_document_is_blank():
    assert all(text.strip() for _, text in corpus.documents())


def test_a_library_gives_its_own_text_only(tmp_path, monkeypatch):
    files = {
        "b/c.py": b"c = 1\n",
        "a.py": "é = 1\r\n".encode(),
        "latin.py": "é".encode("latin-1"),
        "empty.py": b"\n",
        "notes.txt": b"x",
        "_sysconfigdata__linux.py": b"x",
    }
    skipped = [
        "test",
        "b/tests",
        "site-packages/p",
        "dist-packages",
        "__pycache__",
        "config-3-linux",
        "_sysconfigdata-3",
        "idlelib/idle_test",
        "encodings",
        "pydoc_data",
    ]
    for name, content in {**files, **{f"{folder}/x.py": b"x" for folder in skipped}}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "dangling.py").symlink_to("nowhere")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)  # a distribution without the topics
    assert sorted(corpus.documents()) == [("a.py", "é = 1\n"), ("b/c.py", "c = 1\n")]


def test_the_order_of_documents_stays_what_it_was(tmp_path, monkeypatch):
    # Where this changes, raise FORMAT: runs that go on would find other data.
    for letter in "abcdefgh":
        (tmp_path / f"{letter}.py").write_text(letter)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    monkeypatch.setattr(corpus, "_topics", lambda: {"c": "a topic"})
    order = " ".join(name.removesuffix(".py") for name, _ in corpus.documents())
    assert (order, default_corpus.FORMAT) == ("e g d b h c pydoc_data/topics/c f a", 2)


def test_a_python_without_library_sources_is_an_error_that_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "python311.zip")})
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(ValueError, match=r"python311\.zip, got 0 documents .* \[data\] path"):
        default_corpus.prepare(BYTES)
    assert not list(cache_dir().glob("*.bin"))


# ----------------------------------------------------------------------------------------------------------- prepare


def test_each_document_is_its_tokens_and_end_of_document(few):
    tokenizer = load_tokenizer("stdlib-8k")
    dataset = IndexedDataset(default_corpus.prepare(tokenizer))
    assert len(dataset) == len(few)
    for i, (_, text) in enumerate(few):
        *ids, last = dataset.get(i).tolist()
        assert last == tokenizer.eod_id == 8191
        assert tokenizer.decode(ids) == text
    check_token_ids(dataset, tokenizer.vocab_size)


def test_in_sentences_a_topic_is_its_sentences_and_a_source_its_blocks_without_ends_of_documents(few):
    pieces = load_tokenizer("stdlib-wordpiece")
    whole, dataset = (IndexedDataset(default_corpus.prepare(pieces, in_sentences=cut)) for cut in (False, True))
    assert len(whole) == len(whole.document_index) - 1 == len(few)
    assert {name.startswith("pydoc_data/") for name, _ in few} == {True, False}
    expected = []
    for name, text in few:
        kind = sentences.PROSE if name.startswith("pydoc_data/") else sentences.BLOCKS
        expected += sentences.encode(text, kind, pieces)
    assert [dataset.get(i).tolist() for i in range(len(dataset))] == expected
    assert pieces.eod_id not in dataset.tokens


def test_a_source_is_cut_before_definitions_that_follow_two_blocks_and_a_topic_is_not_cut():
    parts = ["import os\n\nX = 1\n\ndef f():\n    1\n", "class A:\n    y = 1\n\n    def g(self):\n        2\n"]
    parts += ["@late\ndef h():\n    3\n\nasync def k():\n    4\n"]
    text = "\n".join(["\n\nimport sys\n", *parts])
    found = corpus.sentence_documents("a.py", text, BYTES)
    assert [[BYTES.decode(ids).strip() for ids in document] for document in found] == [
        ["import sys", "import os", "X = 1"],
        ["def f():\n    1", "class A:\n    y = 1", "def g(self):\n        2"],
        ["@late\ndef h():\n    3", "async def k():\n    4"],
    ]
    assert len(corpus.sentence_documents(f"{corpus.TOPICS}a", text, BYTES)) == 1


def test_the_name_tells_python_and_vocabulary(few):
    prefix = default_corpus.prepare(BYTES)
    version = "{}.{}.{}".format(*sys.version_info)
    assert Path(prefix) == cache_dir() / f"stdlib-py{version}-{BYTES.fingerprint}-v{default_corpus.FORMAT}"


@pytest.mark.usefixtures("few")
def test_building_says_so_in_one_line_and_happens_once(capsys):
    prefix = default_corpus.prepare(BYTES)
    assert capsys.readouterr().err.count("tokenizing 40 documents") == 1
    assert default_corpus.prepare(dataclasses.replace(BYTES, encode=None)) == prefix
    assert capsys.readouterr() == ("", "")


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("suffix", ["bin", "idx"])
@pytest.mark.parametrize("content", [None, b"", b"damaged"])
def test_a_damaged_pair_is_built_again(suffix, content):
    prefix = default_corpus.prepare(BYTES)
    path = Path(f"{prefix}.{suffix}")
    whole = path.read_bytes()
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    default_corpus.prepare(BYTES)
    assert path.read_bytes() == whole


@pytest.mark.usefixtures("few")
def test_a_pair_in_another_dtype_or_without_documents_is_built_again():
    prefix = default_corpus.prepare(BYTES)
    whole = Path(f"{prefix}.bin").read_bytes()
    for dtype, documents in (("int32", [[1, 2]]), ("uint16", [])):
        with IndexedWriter(prefix, np.dtype(dtype)) as writer:
            for document in documents:
                writer.add(document)
        default_corpus.prepare(BYTES)
        assert Path(f"{prefix}.bin").read_bytes() == whole


@pytest.mark.usefixtures("few")
def test_what_a_killed_run_left_goes_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "[c]"))
    prefix = default_corpus.prepare(BYTES)
    for suffix in (".bin", ".idx"):
        Path(prefix + suffix).unlink()
    for name in (prefix, f"{prefix}-other"):
        for kind in ("bin", "lock"):
            Path(f"{name}.{kind}.7-0123abcd.tmp").touch()
    default_corpus.prepare(BYTES)
    left = [f"{Path(prefix).name}-other.{kind}.7-0123abcd.tmp" for kind in ("bin", "lock")]
    assert sorted(path.name for path in cache_dir().glob("*.tmp")) == left


def test_a_killed_first_run_leaves_nothing_under_the_final_name_and_the_next_one_succeeds(few):
    process = run(
        "import dataclasses, time\n"
        "from dtmega.data import default_corpus\n"
        "from dtmega.data.tokenizers import load\n"
        "loaded, done = load.load_tokenizer('bytes'), []\n"
        "def encode(text):\n"
        "    done.append(text)\n"
        "    if len(done) == 20:\n"
        "        print('half', flush=True)\n"
        "        time.sleep(60)\n"
        "    return loaded.encode(text)\n"
        "default_corpus.prepare(dataclasses.replace(loaded, encode=encode))\n"
    )
    with process:
        assert process.stdout.readline() == "half\n"
        process.send_signal(signal.SIGKILL)
    assert [p.suffix for p in cache_dir().glob("stdlib-*") if p.suffix != ".lock"] == [".tmp"] * 2
    prefix = default_corpus.prepare(BYTES)
    assert len(IndexedDataset(prefix)) == len(few)
    assert not list(cache_dir().glob("*.tmp"))


def test_two_first_runs_at_once_build_once_and_agree():
    code = (
        "import sys\n"
        "from itertools import islice\n"
        "from dtmega.data import default_corpus\n"
        "from dtmega.data.indexed_files.dataset import IndexedDataset\n"
        "from dtmega.data.preparing import corpus\n"
        "from dtmega.data.tokenizers import load\n"
        "documents = corpus.documents\n"
        "corpus.documents = lambda: islice(documents(), 40)\n"
        "loaded = load.load_tokenizer('bytes')\n"
        "print('ready', flush=True)\n"
        "sys.stdin.readline()\n"
        "prefix = default_corpus.prepare(loaded)\n"
        "print(prefix, len(IndexedDataset(prefix)))\n"
    )
    with run(code, stdin=subprocess.PIPE) as one, run(code, stdin=subprocess.PIPE) as two:
        for process in (one, two):
            assert process.stdout.readline() == "ready\n"
        for process in (one, two):
            process.stdin.write("go\n")
            process.stdin.flush()
        (out_one, err_one), (out_two, err_two) = one.communicate(), two.communicate()
    assert out_one == out_two
    assert out_one.endswith(" 40\n")
    assert (err_one + err_two).count("tokenizing") == 1


# --------------------------------------------------------------------------------------------------- the vocabulary


def hugging_face_bpe(train_tokenizer, path):
    """A Hugging Face BPE from a .tiktoken file alone: a token's merge is the pair that lower ranks leave of it."""
    ranks = {}
    for line in path.read_bytes().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    char = {byte: char for char, byte in train_tokenizer.byte_level_alphabet().items()}
    spell = {token: "".join(char[byte] for byte in token) for token in ranks}

    def merge(token):
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            pairs = [ranks.get(a + b, len(ranks)) for a, b in pairwise(parts)]
            i = pairs.index(min(pairs))
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        return tuple(spell[part] for part in parts)

    merges = [merge(token) for token in sorted(ranks, key=ranks.__getitem__) if len(token) > 1]
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE({spell[t]: rank for t, rank in ranks.items()}, merges))
    bpe.pre_tokenizer = train_tokenizer.pre_tokenizer()
    return bpe


def test_the_shipped_vocabulary_gives_hugging_faces_ids_on_the_library(train_tokenizer):
    ours, theirs = load_tokenizer("stdlib-8k"), hugging_face_bpe(train_tokenizer, STDLIB_8K)
    for name, text in islice(corpus.documents(), 0, None, 9):
        assert ours.encode(text) == theirs.encode(text).ids, name


def test_the_shipped_vocabulary_has_8192_ids_the_last_of_which_ends_a_document():
    tokenizer = load_tokenizer("stdlib-8k")
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (8192, 8191)
    assert len(STDLIB_8K.read_bytes().splitlines()) == 8191


def test_the_shipped_vocabulary_packs_bytes_of_the_library_by_more_than_three_and_a_half():
    tokenizer = load_tokenizer("stdlib-8k")
    texts = [text for _, text in islice(corpus.documents(), 0, None, 9)]
    assert sum(len(text.encode()) for text in texts) > 3.5 * sum(len(tokenizer.encode(text)) for text in texts)


def test_training_exports_the_trainers_own_ids(train_tokenizer, tmp_path):
    texts = [text for _, text in islice(corpus.documents(), 20)]
    trained = train_tokenizer.train(texts, 600)
    (tmp_path / "small.tiktoken").write_bytes(train_tokenizer.export(trained))
    tokenizer = load_tokenizer(str(tmp_path / "small.tiktoken"))
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (600, 599)
    for text in texts:
        assert tokenizer.encode(text) == trained.encode(text).ids


def test_the_tool_writes_what_it_trained_on_all_documents(train_tokenizer, tmp_path, monkeypatch, few, capsys):
    monkeypatch.setattr(train_tokenizer, "VOCAB_SIZE", 600)
    train_tokenizer.main(tmp_path / "small.tiktoken")
    trained = train_tokenizer.train([text for _, text in few], 600)
    assert (tmp_path / "small.tiktoken").read_bytes() == train_tokenizer.export(trained)
    assert capsys.readouterr().out.startswith(f"{tmp_path}/small.tiktoken: 599 ranks from 40 documents, ")


def test_training_on_too_little_text_is_an_error(train_tokenizer):
    with pytest.raises(ValueError, match="expected text for 599 tokens"):
        train_tokenizer.train(["too little"], 600)
