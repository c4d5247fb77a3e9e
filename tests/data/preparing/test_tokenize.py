"""Rooms tokenizer.py, text_files.py, tokenize.py: specs, kinds of files, what can go wrong with them."""

import base64
import gzip
import importlib.util
import json
import multiprocessing
import os
import re
import signal
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiktoken
import tokenizers
import zstandard

from dtmega.__main__ import main as command
from dtmega.data.indexed_files.dataset import IndexedDataset
from dtmega.data.preparing import input_files, text_files, tokenize, workers
from dtmega.data.tokenizers import load
from dtmega.data.tokenizers.load import GPT2_RANKS, STDLIB_8K, load_encoding, load_tokenizer
from dtmega.data.tokenizers.tokenizer import EOD
from dtmega.distributed import exit_codes

ROOT = Path(tokenize.__file__).parents[3]
LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
TEXTS = ["Hello, world", "Straße 12345\n\n\tdef f(x):\n        return x", "<|endoftext|> is text", "漢字 🙂"]


def run(folder, *inputs, options=("--workers", 1), tokenizer="bytes"):
    """The command on files of `folder`; its exit code."""
    paths = [folder / name for name in inputs]
    output = ["--output", folder / "out", "--overwrite"]
    argv = ["tokenize", "--input", *paths, "--tokenizer", tokenizer, *output, *options]
    return command(list(map(str, argv)))


def documents(folder, tokenizer="bytes"):
    dataset, loaded = IndexedDataset(folder / "out"), load_tokenizer(tokenizer)
    return [loaded.decode(dataset.get(i).tolist()) for i in range(len(dataset))]


def lines(texts):
    return "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)).encode()


# -------------------------------------------------------------------------------------------------------- tokenizers


@pytest.fixture(scope="module")
def json_path(tmp_path_factory):
    """A small tokenizer.json whose special token is named like GPT-2's."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<pad>", EOD],
        show_progress=False,
    )
    bpe.train_from_iterator(TEXTS * 10, trainer)
    bpe.enable_truncation(3)
    bpe.enable_padding(length=3)
    path = tmp_path_factory.mktemp("json") / "tokenizer.json"
    bpe.save(str(path))
    return path


@pytest.fixture(params=["stdlib-8k", "bytes", "file.tiktoken", "tokenizer.json"])
def spec(request, json_path):
    return {"file.tiktoken": str(STDLIB_8K), "tokenizer.json": str(json_path)}.get(request.param, request.param)


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_encode_and_decode(spec, text):
    tokenizer = load_tokenizer(spec)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_name_of_a_special_token_in_a_document_is_text(spec):
    tokenizer = load_tokenizer(spec)
    assert tokenizer.eod_id not in tokenizer.encode(f"a {EOD} b")
    assert tokenizer.decode([tokenizer.eod_id]) == EOD


def test_every_id_is_below_the_vocabulary_size(spec):
    tokenizer = load_tokenizer(spec)
    assert 0 <= tokenizer.eod_id < tokenizer.vocab_size
    assert max(max(tokenizer.encode(text)) for text in TEXTS) < tokenizer.vocab_size


def test_bytes_are_their_own_ids():
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.encode("aé\n" * 200) == list(("aé\n" * 200).encode())
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (257, 256)


def test_ids_that_are_no_utf8_decode_to_the_replacement_character():
    assert load_tokenizer("bytes").decode([0xC3, 0x41]) == "\ufffdA"


def test_the_fingerprint_is_of_the_vocabulary_not_of_its_path(tmp_path, json_path):
    (tmp_path / "copy.tiktoken").write_bytes(STDLIB_8K.read_bytes())
    specs = ["stdlib-8k", str(tmp_path / "copy.tiktoken"), "bytes", str(json_path)]
    stdlib, copy, *others = [load_tokenizer(s).fingerprint for s in specs]
    assert stdlib == copy
    assert len({stdlib, *others}) == 3


@pytest.mark.parametrize("blank", [" ", "\t", "\u3000"])
def test_a_million_blanks_in_a_row_are_encoded(blank):
    tokenizer = load_tokenizer("stdlib-8k")
    text = "a" + blank * 1_000_000 + "b"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_fifty_thousand_local_ranks_are_cut_by_gpt2s_rule(tmp_path):
    ranks = [bytes([i]) for i in range(256)] + [b"%06d" % i for i in range(GPT2_RANKS - 256)]
    path = tmp_path / "gpt2.tiktoken"
    path.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(token), i) for i, token in enumerate(ranks)))
    assert load_tokenizer(str(path)).encode("000007") == [256 + 7]  # cl100k's rule cuts digits by three


@pytest.mark.parametrize("spec", ["gpt3", "", "missing/file.txt"])
def test_an_unknown_spec_names_what_is_possible(spec):
    with pytest.raises(ValueError, match=r"stdlib-wordpiece, bytes, bert:PATH .* a path to a \.tiktoken file .*gpt2"):
        load_tokenizer(spec)


def test_a_spec_that_is_nearly_one_is_answered_with_the_one_to_write(tmp_path, json_path):
    (tmp_path / "vocab.txt").write_text("[PAD]")
    (tmp_path / "tokenizer.model").write_bytes(b"spm")
    for spec, answer in (
        (json_path.parent, f"is a folder: expected {json_path}"),
        (tmp_path, f"may make one: AutoTokenizer.from_pretrained('{tmp_path}').save_pretrained('{tmp_path}')"),
        (tmp_path / "vocab.txt", f"is bert:{tmp_path}/vocab.txt, or bert-cased:{tmp_path}/vocab.txt"),
        (tmp_path / "tokenizer.model", f"AutoTokenizer.from_pretrained('{tmp_path}').save_pretrained('{tmp_path}')"),
        ("meta-llama/Llama-3.2-1B", "hf download meta-llama/Llama-3.2-1B --local-dir Llama-3.2-1B"),
    ):
        with pytest.raises(ValueError, match=re.escape(answer)):
            load_tokenizer(str(spec))


@pytest.mark.parametrize("name", ["tokenizer.json", "ranks.tiktoken"])
def test_a_tokenizer_that_is_a_pointer_of_git_lfs_is_refused_with_the_command_that_fetches_it(tmp_path, name):
    (tmp_path / name).write_text(LFS_POINTER)
    with pytest.raises(ValueError, match=f"{name} is a pointer of Git LFS, not the file: run `git lfs pull`"):
        load_tokenizer(str(tmp_path / name))


@pytest.mark.parametrize("spec", ["missing.tiktoken", "missing.json"])
def test_a_missing_file_is_named(spec):
    with pytest.raises(ValueError, match=f"{spec}: expected a file, got 'No such file"):
        load_tokenizer(spec)


def test_a_tiktoken_name_without_a_network_says_to_pass_a_file(monkeypatch):
    def offline(name):
        raise ConnectionError

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    with pytest.raises(ValueError, match=r"could not download 'gpt2' \(ConnectionError\).*local \.tiktoken file"):
        load_tokenizer("gpt2")


SHIPPED = STDLIB_8K.read_bytes().splitlines(keepends=True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([SHIPPED[0], b"not-base64! 1\n"], ":2: expected a base64 token and its rank"),
        ([SHIPPED[0], b"YQ==\n"], ":2: expected a base64 token and its rank"),
        ([SHIPPED[0], b"YQ== one\n"], ":2: expected a base64 token and its rank"),
        ([*SHIPPED[:300], *SHIPPED[301:]], "each rank from 0 to 8189 once"),
        ([b"YWI= 0\n"], "all 256 single bytes"),
        ([b"\x80\x04\xff\n"], ":1: expected a base64"),
        ([], "all 256 single bytes"),
    ],
)
def test_a_malformed_tiktoken_file_is_named_with_its_line(tmp_path, content, message):
    (tmp_path / "bad.tiktoken").write_bytes(b"".join(content))
    with pytest.raises(ValueError, match=message) as error:
        load_tokenizer(str(tmp_path / "bad.tiktoken"))
    assert str(tmp_path / "bad.tiktoken") in str(error.value)


def test_a_json_that_is_no_tokenizer_is_named(tmp_path):
    (tmp_path / "bad.json").write_text('{"a": 1}')
    with pytest.raises(ValueError, match=r"bad\.json: expected a Hugging Face tokenizer\.json"):
        load_tokenizer(str(tmp_path / "bad.json"))


def test_a_tokenizer_json_without_an_end_of_document_is_refused(tmp_path):
    tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, [])).save(str(tmp_path / "no.json"))
    with pytest.raises(
        ValueError, match=r"no\.json: expected an end-of-document token, .* one of <\|endoftext\|>, </s>"
    ):
        load_tokenizer(str(tmp_path / "no.json"))


@pytest.mark.parametrize("said", ['"<pad>"', '{"content": "<pad>"}'])
def test_the_eos_token_of_a_models_directory_ends_its_documents(tmp_path, json_path, said: str):
    (tmp_path / "tokenizer.json").write_bytes(json_path.read_bytes())
    assert load_tokenizer(str(tmp_path / "tokenizer.json")).eod_id == 1
    (tmp_path / "tokenizer_config.json").write_text(f'{{"eos_token": {said}}}')
    assert load_tokenizer(str(tmp_path / "tokenizer.json")).eod_id == 0


EODS = ["<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "<|im_end|>", "<｜end▁of▁sentence｜>", "[EOS]", "[SEP]"]


def write_words(path, tokens):
    """A tokenizer.json of these tokens and their ids, which puts 0 before each text."""
    model = tokenizers.models.WordLevel(tokens, unk_token="a")
    loaded = tokenizers.Tokenizer(model)
    loaded.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    loaded.post_processor = tokenizers.processors.TemplateProcessing(single="a $0", special_tokens=[("a", 0)])
    loaded.save(str(path))
    return str(path)


@pytest.mark.parametrize("n", range(1, len(EODS) + 1))
def test_the_first_known_name_of_an_end_of_document_ends_documents(tmp_path, n):
    tokens = {"a": 0} | {name: 1 + i for i, name in enumerate(EODS[-n:][::-1])}
    assert load_tokenizer(write_words(tmp_path / "words.json", tokens)).eod_id == n


def test_the_ids_of_a_json_may_leave_gaps_and_a_text_gets_nothing_but_its_own(tmp_path):
    tokenizer = load_tokenizer(write_words(tmp_path / "words.json", {"a": 0, "b": 7, "</s>": 3}))
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (8, 3)
    assert tokenizer.encode("b b a") == [7, 7, 0]


def test_the_fingerprint_is_of_ranks_and_rule(monkeypatch):
    before = load_tokenizer("stdlib-8k").fingerprint
    monkeypatch.setattr(load, "GPT2_RANKS", 8191)  # now these are cut as GPT-2's are
    assert load_tokenizer("stdlib-8k").fingerprint != before


def test_the_fingerprint_of_a_name_of_tiktoken_is_of_the_name_and_of_how_many_ids_there_are(monkeypatch):
    ranks = load_encoding("bytes")[0]._mergeable_ranks
    found = set()
    for name, last in (("gpt2", 256), ("gpt2", 300), ("p50k_base", 300)):
        encoding = tiktoken.Encoding(name, pat_str=r"[\s\S]", mergeable_ranks=ranks, special_tokens={EOD: last})
        monkeypatch.setattr(tiktoken, "get_encoding", lambda _, encoding=encoding: encoding)
        loaded = load_tokenizer(name)
        assert (loaded.vocab_size, loaded.eod_id) == (last + 1, last)
        found.add(loaded.fingerprint)
    assert len(found) == 3


# ------------------------------------------------------------------------------------------------------------- kinds


def parquet(path, values, kind):
    pq.write_table(pa.table({"text": pa.array(values, kind), "id": range(len(values))}), path)


def write_kind(folder, kind):
    path = folder / f"in{kind}"
    zstd = zstandard.ZstdCompressor()
    if kind.startswith(".parquet"):
        path = folder / "in.parquet"
        kinds = {"large": pa.large_string(), "dictionary": pa.dictionary(pa.int32(), pa.string())}
        parquet(path, TEXTS, kinds.get(kind.partition("-")[2], pa.string()))
    elif kind.endswith(".gz"):
        path.write_bytes(gzip.compress(lines(TEXTS)))
    elif kind.endswith(".zst"):  # two frames: what `cat a.zst b.zst` makes
        path.write_bytes(zstd.compress(lines(TEXTS)[:50]) + zstd.compress(lines(TEXTS)[50:]))
    else:
        path.write_bytes(lines(TEXTS).replace(b"\n", b"\r\n") if kind == ".json" else lines(TEXTS).rstrip(b"\n"))
    return path.name


@pytest.mark.parametrize(
    "kind",
    [".jsonl", ".json", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".parquet", ".parquet-large", ".parquet-dictionary"],
)
@pytest.mark.parametrize("chunk", [7, 1 << 20])
def test_every_kind_of_file_gives_the_same_documents(tmp_path, monkeypatch, kind, chunk):
    monkeypatch.setattr(text_files, "CHUNK_BYTES", chunk * 8)
    monkeypatch.setattr(text_files, "PARQUET_ROWS", chunk)
    assert run(tmp_path, write_kind(tmp_path, kind)) == 0
    assert documents(tmp_path) == TEXTS


@pytest.mark.parametrize(
    ("suffix", "compress"), [("", bytes), (".gz", gzip.compress), (".zst", zstandard.ZstdCompressor().compress)]
)
def test_a_txt_file_is_one_document(tmp_path, suffix, compress):
    text = "line one\n\nline two\r\n"
    (tmp_path / f"in.txt{suffix}").write_bytes(compress(text.encode()))
    assert run(tmp_path, f"in.txt{suffix}") == 0
    assert documents(tmp_path) == [text]


def parts_of(text):
    """A part begins at a line with text after a blank one, but for the first: a loop over lines."""
    parts, after_blank = [""], False
    for line in text.splitlines(keepends=True):
        if line.strip() and after_blank and parts[-1].strip():
            parts.append("")
        parts[-1] += line
        after_blank = not line.strip()
    return parts


SPEECHES = {
    "speeches": "First Citizen:\nBefore we proceed.\n\nAll:\nSpeak, speak.\n\n\nFirst:\nYou are.\n",
    "indented, without a last newline": "a\n\n    b\n\n\tc",
    "blanks at both ends": "\n\n \na\n\nb\n\n\n",
    "lines of blanks, of Windows": "a\r\n \t\r\n\r\nb\r\n",
    "no blank line": "a\nb\nc",
    "letters of several bytes": "é\n\n漢字\n \n🙂\n",
}


@pytest.mark.parametrize("text", SPEECHES.values(), ids=SPEECHES)
@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 1 << 20])
def test_a_text_cut_at_blank_lines_is_its_parts_and_nothing_is_lost(tmp_path, monkeypatch, text, chunk):
    monkeypatch.setattr(text_files, "CHUNK_BYTES", chunk)
    (tmp_path / "in.txt").write_bytes(text.encode())
    assert run(tmp_path, "in.txt", options=["--split-documents", "blank-lines", "--workers", 1]) == 0
    assert documents(tmp_path) == parts_of(text)
    assert "".join(documents(tmp_path)) == text


@pytest.mark.parametrize("chunk", [1, 3, 8, 1 << 20])
def test_a_part_that_is_no_utf8_is_skipped_and_shown_with_its_line(tmp_path, monkeypatch, capsys, chunk):
    monkeypatch.setattr(text_files, "CHUNK_BYTES", chunk)
    (tmp_path / "in.txt").write_bytes(b"a\n\nb\n\xff\n\nc\n\nd\n\n\n\xff\n")
    assert run(tmp_path, "in.txt", options=["--split-documents", "blank-lines", "--workers", 1]) == 0
    assert documents(tmp_path) == ["a\n\n", "c\n\n", "d\n\n\n"]
    assert re.findall(r"in\.txt:(\d+): expected UTF-8, got b'\\xff'", capsys.readouterr().err) == ["3", "11"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32", "cp1252", "gb18030", "UTF-8"])
@pytest.mark.parametrize("chunk", [1, 3, 1 << 20])  # the first two cut characters apart
def test_text_of_another_encoding_is_the_text_that_python_decodes(tmp_path, monkeypatch, encoding, chunk):
    texts = ["ä€ one\n", "two €\n\n", "three ä"]
    (tmp_path / "in.txt").write_bytes("".join(texts).encode(encoding))
    (tmp_path / "in.jsonl").write_bytes("".join(f'{{"text": "{text.strip()}"}}\n' for text in texts).encode(encoding))
    monkeypatch.setattr(text_files, "CHUNK_BYTES", chunk)
    assert run(tmp_path, "in.txt", "in.jsonl", options=["--workers", 1, "--encoding", encoding]) == 0
    assert documents(tmp_path) == ["".join(texts), *(text.strip() for text in texts)]


@pytest.mark.parametrize("after", ["more".encode("utf-16-le"), b"", b"\xdc"])
def test_text_that_is_not_in_its_encoding_is_refused_with_file_and_byte(tmp_path, monkeypatch, capsys, after):
    monkeypatch.setattr(text_files, "CHUNK_BYTES", 3)
    half_a_pair = b"\x00\xd8"  # a high surrogate, which a second one must follow
    (tmp_path / "in.txt").write_bytes("text".encode("utf-16-le") + half_a_pair + after)
    assert run(tmp_path, "in.txt", options=["--workers", 1, "--encoding", "utf-16-le"]) == exit_codes.REFUSED
    assert re.search(r"in\.txt is not in utf-16-le: .* at byte 8 \(--encoding\)", capsys.readouterr().err)


@pytest.mark.parametrize("encoding", ["base64", "klingon"])
def test_an_encoding_that_is_none_of_text_is_refused(tmp_path, capsys, encoding):
    with pytest.raises(SystemExit):
        run(tmp_path, "in.txt", options=["--encoding", encoding])
    assert "expected an encoding such as latin-1, cp1252 or utf-16" in capsys.readouterr().err


def test_text_that_looks_like_utf16_is_refused_with_that_encoding(tmp_path, capsys):
    (tmp_path / "in.txt").write_bytes("hello".encode("utf-16"))
    assert run(tmp_path, "in.txt") == exit_codes.REFUSED
    expected = "in.txt:1: expected UTF-8, got b'\\xff' at byte 0; --encoding names another, such as utf-16"
    assert expected in capsys.readouterr().err


def test_token_files_are_written_over_only_where_that_was_asked_for(tmp_path, capsys):
    (tmp_path / "in.txt").write_text("a")
    argv = ["tokenize", "--input", f"{tmp_path}/in.txt", "--tokenizer", "bytes", "--output", f"{tmp_path}/out.bin"]
    assert command(argv) == 0
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out.bin", "out.idx", "out.meta.json"]
    (tmp_path / "in.txt").write_text("b")
    assert command(argv) == exit_codes.REFUSED
    assert f"{tmp_path}/out.bin is there: expected another --output, or --overwrite" in capsys.readouterr().err
    assert documents(tmp_path) == ["a"]
    assert command([*argv, "--overwrite"]) == 0
    assert documents(tmp_path) == ["b"]


def test_a_link_that_leads_nowhere_is_refused_with_where_it_leads(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").symlink_to("/no/such")
    for name in ("in", "in/a.txt"):
        assert run(tmp_path, name) == exit_codes.REFUSED
        assert "in/a.txt cannot be read (it is a link to /no/such, which is not there)" in capsys.readouterr().err


def test_a_text_cut_every_n_tokens_has_the_same_tokens(tmp_path):
    text = "".join(SPEECHES.values())
    (tmp_path / "in.txt").write_bytes(text.encode())
    assert run(tmp_path, "in.txt", options=["--split-documents", 7, "--workers", 1], tokenizer="stdlib-8k") == 0
    ids = load_tokenizer("stdlib-8k").encode(text)
    dataset = IndexedDataset(tmp_path / "out")
    assert [dataset.get(i).tolist() for i in range(len(dataset))] == [ids[i : i + 7] for i in range(0, len(ids), 7)]


@pytest.mark.parametrize(
    ("where", "ids"), [("blank-lines", [97, 10, 10, 256, 98, 256]), ("3", [97, 10, 10, 256, 98, 256])]
)
def test_append_eod_closes_each_part(tmp_path, where, ids):
    (tmp_path / "in.txt").write_text("a\n\nb")
    assert run(tmp_path, "in.txt", options=["--split-documents", where, "--append-eod", "--workers", 1]) == 0
    assert IndexedDataset(tmp_path / "out").tokens.tolist() == ids


def test_parts_are_those_of_txt_and_a_line_of_json_stays_whole(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_bytes(lines(["one\n\ntwo"]))
    (tmp_path / "b.txt").write_text("one\n\ntwo")
    options = ["--split-documents", "blank-lines", "--workers", 1]
    assert run(tmp_path, "a.jsonl", "b.txt", options=options) == 0
    assert documents(tmp_path) == ["one\n\ntwo", "one\n\n", "two"]
    assert run(tmp_path, "a.jsonl", "b.txt", options=["--split-documents", 3, "--workers", 1]) == 0
    assert documents(tmp_path) == ["one\n\ntwo", "one", "\n\nt", "wo"]
    assert run(tmp_path, "a.jsonl", options=options) == 2
    assert "--split-documents cuts .txt" in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["--split-documents", "blank-lines"], ["--split-documents", "9"]])
def test_a_byte_order_mark_at_the_start_of_a_file_is_no_text_and_elsewhere_it_is(tmp_path, options):
    (tmp_path / "a.txt").write_bytes("\ufeffa\n\n\ufeffb".encode())
    (tmp_path / "b.txt").write_bytes("\ufeffc".encode())
    assert run(tmp_path, "a.txt", "b.txt", options=[*options, "--workers", 1]) == 0
    assert "".join(documents(tmp_path)) == "a\n\n\ufeffbc"


def test_a_byte_order_mark_is_no_part_of_a_line_of_json_and_part_of_a_row(tmp_path):
    (tmp_path / "a.jsonl").write_bytes("\ufeff".encode() + lines(["a", "\ufeffb"]))
    parquet(tmp_path / "b.parquet", ["\ufeffc"], pa.string())
    assert run(tmp_path, "a.jsonl", "b.parquet") == 0
    assert documents(tmp_path) == ["a", "\ufeffb", "\ufeffc"]


def test_a_folder_stands_for_the_files_of_text_below_it_sorted_by_path(tmp_path):
    for name in ("c/b.txt", "c/a/z.jsonl", "c/a.md", "c/.hidden.txt", "c/.git/x.txt", "c/a/y.txt.gz"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        content = lines([name]) if name.endswith("jsonl") else name.encode()
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    assert run(tmp_path, "c") == 0
    assert documents(tmp_path) == ["c/a/y.txt.gz", "c/a/z.jsonl", "c/b.txt"]


def test_with_a_kind_a_folder_stands_for_all_files_below_it_but_hidden_ones(tmp_path):
    for name in ("c/b.rst", "c/a/z.md", "c/.git/x.txt", "c/readme"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert run(tmp_path, "c", options=("--workers", 1, "--kind", "txt")) == 0
    assert documents(tmp_path) == ["c/a/z.md", "c/b.rst", "c/readme"]


def test_two_stars_stand_for_folders_below(tmp_path):
    for name in ("a.txt", "b/a.txt", "b/c/a.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert run(tmp_path, "**/*.txt") == 0
    assert documents(tmp_path) == ["a.txt", "b/a.txt", "b/c/a.txt"]


def test_a_folder_without_text_is_named(tmp_path, capsys):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "a.md").touch()
    assert run(tmp_path, "c") == 2
    assert f"no file in --input '{tmp_path}/c' ends in .txt, .jsonl" in capsys.readouterr().err


@pytest.mark.parametrize("chunk", [5, 1 << 20])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], ["{}\n\na"]),
        (["--split-documents", "blank-lines"], ["{}\n\n", "a"]),
        (["--kind", "jsonl"], TEXTS),
    ],
)
def test_standard_input_is_text_or_what_kind_says(tmp_path, monkeypatch, options, expected, chunk):
    monkeypatch.setattr(text_files, "CHUNK_BYTES", chunk)
    content = lines(TEXTS) if "jsonl" in options else b"{}\n\na"
    end, start = os.pipe()
    os.write(start, content)
    os.close(start)
    argv = ["tokenize", "--input", "-", "--tokenizer", "bytes", "--output", str(tmp_path / "out"), "--workers", "1"]
    with open(end) as pipe:
        monkeypatch.setattr(sys, "stdin", pipe)
        assert command([*argv, *options]) == 0
    assert documents(tmp_path) == expected


def test_kind_reads_what_a_name_does_not_say(tmp_path):
    (tmp_path / "notes.md").write_text("# a")
    assert run(tmp_path, "notes.md", options=["--kind", "txt", "--workers", 1]) == 0
    assert documents(tmp_path) == ["# a"]


def test_a_progress_bar_is_for_terminals_only(tmp_path, capsys):
    (tmp_path / "in.txt").write_text("a")
    assert run(tmp_path, "in.txt") == 0
    assert capsys.readouterr().err == ""


def test_one_document_of_one_token_is_said_so(tmp_path, capsys):
    (tmp_path / "in.txt").write_text("a")
    assert run(tmp_path, "in.txt") == 0
    assert capsys.readouterr().out.startswith("1 document, 1 token, 0 skipped")


def test_append_eod_closes_each_document(tmp_path):
    (tmp_path / "in.jsonl").write_bytes(lines(["a", "bc"]))
    assert run(tmp_path, "in.jsonl", options=["--append-eod", "--workers", 1]) == 0
    assert IndexedDataset(tmp_path / "out").tokens.tolist() == [97, 256, 98, 99, 256]


def test_prepend_bos_begins_each_document_with_the_tokenizers_own_and_the_record_says_so(tmp_path, json_path, capsys):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(json_path.read_bytes())
    spec = str(folder / "tokenizer.json")
    (tmp_path / "in.txt").write_text("a\n\nb")
    options = ["--split-documents", "blank-lines", "--prepend-bos", "--append-eod", "--workers", 1]
    assert run(tmp_path, "in.txt", options=options, tokenizer=spec) == 2
    assert f"--prepend-bos: tokenizer '{spec}' names no bos_token" in capsys.readouterr().err
    (folder / "tokenizer_config.json").write_text('{"bos_token": {"content": "<pad>"}}')
    for n_words, whole in ((2, options), (1, ["--prepend-bos", "--workers", 1])):
        assert run(tmp_path, "in.txt", options=whole, tokenizer=spec) == 0
        parts = documents(tmp_path, spec)
        assert "".join(parts).replace("<pad>", "").replace(EOD, "") == "a\n\nb"
        assert [part.index("<pad>") for part in parts] == [0] * n_words
        assert json.loads((tmp_path / "out.meta.json").read_text())["first_id"] == 0
    assert run(tmp_path, "in.txt", options=["--split-sentences", "--prepend-bos"], tokenizer=spec) == 2
    assert "--prepend-bos with --split-sentences" in capsys.readouterr().err
    part = [
        "tokenize",
        "--input",
        tmp_path / "in.txt",
        "--tokenizer",
        spec,
        "--output",
        tmp_path / "p",
        "--part",
        "0/1",
    ]
    assert command([*map(str, part), "--workers", "1", "--prepend-bos"]) == 0
    assert command([*map(str, part), "--workers", "1"]) == 2
    assert "with other settings" in capsys.readouterr().err


def test_json_key_names_the_text(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"body": "a", "text": "b"}\n')
    assert run(tmp_path, "in.jsonl", options=["--json-key", "body", "--workers", 1]) == 0
    assert documents(tmp_path) == ["a"]


def test_files_come_in_the_order_of_the_patterns_by_name_and_once(tmp_path):
    for name in ("b1.txt", "a2.txt", "a1.txt", "a[1].txt"):
        (tmp_path / name).write_text(name)
    assert run(tmp_path, "b*.txt", "a?.txt", "*1.txt", "a[1].txt") == 0
    assert documents(tmp_path) == ["b1.txt", "a1.txt", "a2.txt", "a[1].txt"]


@pytest.fixture
def mixed(tmp_path, monkeypatch):
    """Many batches of every kind, among them malformed and empty records."""
    monkeypatch.setattr(text_files, "CHUNK_BYTES", 800)
    monkeypatch.setattr(text_files, "PARQUET_ROWS", 5)
    texts = [f"{i} " * (i % 90) for i in range(200)]
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines(texts) + b"{\n" + lines(texts[::-1])))
    (tmp_path / "b.txt").write_text("one document")
    parquet(tmp_path / "c.parquet", [*texts, None], pa.string())
    return ["a.jsonl.gz", "b.txt", "c.parquet"]


def test_the_output_is_the_same_for_any_number_of_workers(tmp_path, mixed):
    outputs = []
    for n_workers in (1, 2, 3):
        assert run(tmp_path, *mixed, tokenizer="stdlib-8k", options=["--append-eod", "--workers", n_workers]) == 0
        outputs.append([(tmp_path / f"out.{suffix}").read_bytes() for suffix in ("bin", "idx")])
    assert outputs[0] == outputs[1] == outputs[2]


def test_the_summary_counts_documents_tokens_and_what_was_skipped(tmp_path, mixed, capsys):
    assert run(tmp_path, *mixed) == 0
    dataset = IndexedDataset(tmp_path / "out")
    # texts 0, 90 and 180 are empty, three times; one line is no JSON, one row is null
    expected = f"592 documents, {dataset.n_tokens:,} tokens, 11 skipped (2 malformed, 9 empty), "
    out = capsys.readouterr().out
    assert out.startswith(expected)
    assert out.endswith(f"{tmp_path}/out.bin, {tmp_path}/out.idx\n")


# --------------------------------------------------------------------------------------------------------- malformed

MALFORMED = {
    b'{"text": "a"': "bad JSON",
    b"a": "bad JSON",
    b'{"txt": "a"}': r"expected an object with 'text' .* keys \['txt'\]",
    b'["text"]': "expected an object with 'text' .* got list",
    b'{"messages": []}': r".* got keys \['messages'\]; for conversations: --chat",
    b'{"prompt": "a", "completion": "b"}': r".* got keys .*; for conversations: --chat",
    b'{"text": 5}': "expected a string in 'text', got int",
    b'{"text": null}': "expected a string in 'text', got NoneType",
    b'{"text": "\xff"}': r"expected UTF-8, got b'\\xff' at byte 10; --encoding names another, such as latin-1",
    b'{"text": "\\ud83d"}': ".*surrogates not allowed",
    b"[" * 100_000: "bad JSON",
}


@pytest.mark.parametrize(("line", "message"), MALFORMED.items(), ids=range(len(MALFORMED)))
def test_a_malformed_line_is_skipped_and_shown_with_file_and_line(tmp_path, capsys, line, message):
    (tmp_path / "in.jsonl").write_bytes(lines(["a"]) + b"\n" + line + b"\n" + lines(["b"]))
    assert run(tmp_path, "in.jsonl") == 0
    assert documents(tmp_path) == ["a", "b"]
    out, err = capsys.readouterr()
    assert "1 malformed" in out
    (shown,) = [row for row in err.splitlines() if "skipped" in row]
    assert re.search(rf"in\.jsonl:3: {message}", shown)


def test_only_the_first_five_malformed_lines_are_shown(tmp_path, capsys):
    (tmp_path / "in.jsonl").write_bytes(b"{\n" * 20 + lines(["a"]))
    assert run(tmp_path, "in.jsonl") == 0
    out, err = capsys.readouterr()
    assert [f":{n}: bad JSON" in err for n in (1, 5, 6)] == [True, True, False]
    assert "20 malformed" in out


def test_line_numbers_go_on_from_batch_to_batch(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(text_files, "CHUNK_BYTES", 64)
    (tmp_path / "in.jsonl").write_bytes(lines(["a"] * 30) + b"{\n" + lines(["b"] * 5))
    assert run(tmp_path, "in.jsonl") == 0
    assert "in.jsonl:31: bad JSON" in capsys.readouterr().err


def test_a_parquet_of_one_long_string_in_many_rows_is_read_in_batches_of_its_bytes(tmp_path, monkeypatch):
    text = "ab" * 4 * 2**20
    rows = pa.array([0, None, *[0] * 998], pa.int32())
    table = pa.table({"text": pa.DictionaryArray.from_arrays(rows, pa.array([text])), "other": pa.array(range(1000))})
    pq.write_table(table, tmp_path / "in.parquet", compression="zstd")
    assert (tmp_path / "in.parquet").stat().st_size < 20_000
    used: list[int] = []
    first = 1
    for batch in text_files.read_batches(input_files.find_files([str(tmp_path / "in.parquet")]), "text"):
        assert isinstance(batch.data, list)
        assert batch.first == first
        first += len(batch.data)
        used.append(sum(len(row or b"") for row in batch.data))
        assert {row for row in batch.data if row is not None} == {text.encode()}
    assert (first, set(used)) == (1001, {len(text)})
    monkeypatch.setattr(text_files, "MAX_RECORD_BYTES", len(text) - 1)
    assert run(tmp_path, "in.parquet") == 2


def test_a_parquet_whose_rows_need_too_much_memory_is_refused_in_one_line(tmp_path):
    table = pa.table({"text": ["a" * 100 * 2**20, "b"]})
    pq.write_table(table, tmp_path / "in.parquet", compression="zstd", use_dictionary=False)
    # In a process of its own: this one may have memory left that other tests have freed, which no limit counts.
    program = (
        "import sys, dtmega.__main__; from dtmega.data.preparing import text_files; text_files.PARQUET_BYTES = 2**25;"
        "sys.exit(dtmega.__main__.main(sys.argv[1:]))"
    )
    words = ["tokenize", "--input", "in.parquet", "--tokenizer", "stdlib-8k", "--output", "out"]
    command = [sys.executable, "-c", program, *words]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith(
        "dtmega tokenize: in.parquet: some rows of 'text' need more than 33,554,432 bytes of memory"
    )


def test_a_parquet_row_that_is_no_utf8_is_one_malformed_row(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(text_files, "PARQUET_ROWS", 1)
    buffers = pa.array([b"good", b"\xff", b"fine"], pa.binary()).buffers()
    bad = pa.Array.from_buffers(pa.string(), 3, buffers)
    pq.write_table(pa.table({"text": bad}), tmp_path / "in.parquet")
    assert run(tmp_path, "in.parquet") == 0
    assert documents(tmp_path) == ["good", "fine"]
    assert "in.parquet:2: " in capsys.readouterr().err


@pytest.mark.parametrize(("n", "dtype"), [(65_499, "uint16"), (65_500, "int32"), (70_000, "int32")])
def test_the_dtype_of_the_output_is_megatrons_choice_for_the_tokenizer(tmp_path, n, dtype):
    tokens = {"a": 0, "</s>": n - 1}
    (tmp_path / "in.txt").write_text("a")
    options = ["--append-eod", "--workers", 1]
    assert run(tmp_path, "in.txt", tokenizer=write_words(tmp_path / "words.json", tokens), options=options) == 0
    dataset = IndexedDataset(tmp_path / "out")
    assert (dataset.dtype, dataset.tokens.tolist()) == (dtype, [0, n - 1])


@pytest.mark.parametrize("workers", [1, 2])
def test_strict_stops_and_leaves_what_was_there(tmp_path, capsys, workers):
    (tmp_path / "in.jsonl").write_bytes(lines(["before"]))
    assert run(tmp_path, "in.jsonl") == 0
    (tmp_path / "in.jsonl").write_bytes(lines(["a"]) + b"{\n" + lines(["b"]))
    assert run(tmp_path, "in.jsonl", options=["--strict", "--workers", workers]) == 2
    assert "in.jsonl:2: bad JSON" in capsys.readouterr().err
    assert documents(tmp_path) == ["before"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", "out.bin", "out.idx", "out.meta.json"]


# ----------------------------------------------------------------------------------------------------------- refused


def cut_zst():
    return zstandard.ZstdCompressor().compress(lines([str(i) for i in range(9999)]))[:-9]


def columns(**values):
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(values), sink)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("in.csv", b"a", r"in\.csv: expected a name that ends in \.txt, \.jsonl"),
        ("in.gz", b"a", r"in\.gz: expected a name that ends in"),
        ("in.parquet.gz", b"a", r"in\.parquet\.gz: expected a name that ends in"),
        ("in.jsonl", b"", "no documents in 1 file"),
        ("in.txt", b"", "no documents in 1 file .*1 empty"),
        ("in.jsonl", b"{\n", r"no documents in 1 file .*1 malformed, 0 empty\); the first: .*in\.jsonl:1: bad JSON"),
        ("in.jsonl.gz", b"no gzip", r"in\.jsonl\.gz: damaged or cut off"),
        ("in.jsonl.gz", gzip.compress(lines(TEXTS), mtime=0)[:-9], r"in\.jsonl\.gz: damaged or cut off"),
        ("in.jsonl.zst", b"no zstd", r"in\.jsonl\.zst: damaged or cut off"),
        ("in.jsonl.zst", cut_zst(), r"in\.jsonl\.zst: damaged or cut off"),
        ("in.parquet", b"no parquet", r"in\.parquet: damaged or cut off"),
        ("in.parquet", columns(txt=["a"]), r"in\.parquet: expected a column 'text' \(--json-key\), got \['txt'\]"),
        ("in.parquet", columns(text=[1]), r"in\.parquet: expected strings in 'text' \(--json-key\), got int64"),
    ],
)
def test_input_that_cannot_be_used_is_named_and_leaves_nothing(tmp_path, capsys, name, content, message):
    (tmp_path / name).write_bytes(content)
    assert run(tmp_path, name) == 2
    assert re.search(message, capsys.readouterr().err)
    assert [p.name for p in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("suffix", [".jsonl.zst", ".jsonl.gz", ".txt.zst", ".txt.gz"])
def test_a_few_bytes_that_decompress_to_one_endless_document_are_refused_long_before_its_end(
    tmp_path, monkeypatch, suffix
):
    monkeypatch.setattr(text_files, "MAX_RECORD_BYTES", 8 << 20)
    endless = b'{"text": "' + b"a" * (2 << 27)
    compress = gzip.compress if suffix.endswith(".gz") else zstandard.ZstdCompressor(level=1).compress
    (tmp_path / f"in{suffix}").write_bytes(compress(endless))
    del endless
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"the document in line 1 has more than 8,388,608 bytes when decompressed"):
        list(text_files.read_batches(input_files.find_files([str(tmp_path / f"in{suffix}")]), "text"))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 160 << 20


def test_a_plain_file_of_any_size_is_read_and_a_compressed_one_up_to_the_limit(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(text_files, "MAX_RECORD_BYTES", 9)
    (tmp_path / "a.txt").write_bytes(b"a" * 10)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"b" * 9))
    assert run(tmp_path, "a.txt", "b.txt.gz") == 0
    assert documents(tmp_path) == ["a" * 10, "b" * 9]
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"c" * 10))
    assert run(tmp_path, "c.txt.gz") == 2
    assert "more than 9 bytes when decompressed" in capsys.readouterr().err


def test_an_archive_of_long_windows_is_read(tmp_path):
    long = zstandard.ZstdCompressionParameters(window_log=28)  # `zstd --long=28`; 27 is what libraries take unasked
    stream = zstandard.ZstdCompressor(compression_params=long).compressobj()  # which does not know how little comes
    (tmp_path / "in.jsonl.zst").write_bytes(stream.compress(lines(TEXTS)) + stream.flush())
    assert run(tmp_path, "in.jsonl.zst") == 0
    assert documents(tmp_path) == TEXTS


def test_the_position_in_all_files_rises_to_their_size(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "CHUNK_BYTES", 16)
    monkeypatch.setattr(text_files, "PARQUET_ROWS", 1)
    names = [write_kind(tmp_path, kind) for kind in (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")]
    (tmp_path / "in.txt").write_bytes(b"a\n\n" * 20)
    files = input_files.find_files([str(tmp_path / name) for name in [*names, "in.txt"]])
    for at_blank_lines in (False, True):
        before_bytes = 0
        for file in files:
            read = [
                b.position_bytes
                for b in text_files.read_batches(files, "text", at_blank_lines=at_blank_lines)
                if b.path == file.path
            ]
            assert before_bytes < read[0] <= read[-1] == before_bytes + file.n_bytes
            assert sorted(read) == read
            before_bytes += file.n_bytes


def test_a_pattern_without_a_file_is_named(tmp_path, capsys):
    (tmp_path / "folder.txt").mkdir()
    assert run(tmp_path, "*.txt") == 2
    assert "no file matches --input" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "library"), [("in.jsonl.zst", "zstandard"), ("in.parquet", "pyarrow")])
def test_without_the_library_of_a_kind_it_says_what_to_install(tmp_path, monkeypatch, capsys, name, library):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda wanted: None if wanted == library else find_spec(wanted))
    (tmp_path / name).touch()
    assert run(tmp_path, name) == 2
    assert f"{name} needs {library}, which is not installed: pip install -e '.[data]'" in capsys.readouterr().err


def test_an_unknown_tokenizer_is_exit_code_2(tmp_path, capsys):
    (tmp_path / "in.txt").write_text("a")
    assert run(tmp_path, "in.txt", tokenizer="nonsense") == 2
    assert "unknown tokenizer" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------ interruption


def test_a_worker_killed_while_it_starts_ends_the_run_with_nothing_written(tmp_path, capsys):
    (tmp_path / "in.jsonl").write_bytes(lines(TEXTS))
    others = set(multiprocessing.active_children())

    def kill_first_worker():
        while not (workers := set(multiprocessing.active_children()) - others):
            time.sleep(0.001)
        workers.pop().kill()

    killer = threading.Thread(target=kill_first_worker)
    killer.start()
    code = run(tmp_path, "in.jsonl", options=["--workers", 2])
    killer.join()
    assert code == 1
    assert "a worker process died" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["in.jsonl"]


SCRIPT = """
import multiprocessing, sys
from dtmega.__main__ import main
from dtmega.data.preparing import text_files

def endless(files, column, at_blank_lines, encoding):
    for i in range(10**9):
        yield text_files.RecordBatch("in.jsonl", ".jsonl", i, b'{"text": "a"}', False, 0)
        if i == 20:
            print(*(child.pid for child in multiprocessing.active_children()), flush=True)

if __name__ == "__main__":
    text_files.read_batches = endless
    sys.exit(main(["tokenize", *sys.argv[1:]]))
"""


@pytest.fixture
def endless(tmp_path):
    """A run that never ends by itself, at work; its session is its own, as a terminal's job is."""
    (tmp_path / "in.jsonl").write_bytes(lines(["a"]))
    (tmp_path / "script.py").write_text(SCRIPT)
    options = ["--input", "in.jsonl", "--tokenizer", "bytes", "--output", "out", "--workers", "2"]
    process = subprocess.Popen(
        [sys.executable, "script.py", *options],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        process.workers = [int(pid) for pid in process.stdout.readline().split()]
        yield process
        process.kill()


def test_a_worker_killed_at_work_ends_the_run_with_nothing_written(tmp_path, endless):
    os.kill(endless.workers[1], signal.SIGKILL)
    _, err = endless.communicate(timeout=120)
    assert endless.returncode == 1
    assert "a worker process died" in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", "script.py"]


def test_ctrl_c_ends_the_run_with_nothing_written(tmp_path, endless):
    os.killpg(endless.pid, signal.SIGINT)  # a terminal sends it to the workers as well
    _, err = endless.communicate(timeout=120)
    assert endless.returncode == 130
    assert err.endswith("tokenize: interrupted; nothing was written to out\n")
    assert "Traceback" not in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", "script.py"]


def test_a_worker_whose_parent_ended_in_the_middle_of_a_message_ends_too():
    ours, theirs = multiprocessing.Pipe()
    worker = multiprocessing.get_context("fork").Process(target=in_a_fork, args=(theirs, ours))
    worker.start()
    theirs.close()
    os.write(ours.fileno(), struct.pack("!i", 1000) + b"not all of them")  # as a Ctrl-C during `send` leaves it
    ours.close()
    worker.join(timeout=120)
    assert worker.exitcode == 0


def test_a_worker_that_dies_in_the_middle_of_a_message_is_a_worker_that_died():
    ours, theirs = multiprocessing.Pipe()
    os.write(theirs.fileno(), struct.pack("!i", 1000) + b"not all of them")
    theirs.close()
    with pytest.raises(EOFError):
        workers._receive(ours)
    ours.close()


def in_a_fork(pipe, parents_end):
    parents_end.close()
    workers._serve(pipe, tokenize.Job("bytes", "text", append_eod=False, longest=0))


def test_kill_9_leaves_nothing_under_the_final_name_and_no_worker_behind(tmp_path, endless):
    endless.kill()
    endless.communicate(timeout=120)  # returns once the workers, which hold the pipes too, are gone
    assert not (tmp_path / "out.bin").exists()
    assert not (tmp_path / "out.idx").exists()


# ------------------------------------------------------------------------------------------------------------ record


@pytest.mark.parametrize("append_eod", [True, False])
def test_the_record_beside_the_bin_says_what_made_it(tmp_path, append_eod):
    (tmp_path / "in.jsonl").write_bytes(lines(TEXTS))
    assert run(tmp_path, "in.jsonl", options=["--append-eod"] if append_eod else []) == 0
    dataset = IndexedDataset(tmp_path / "out")
    assert json.loads((tmp_path / "out.meta.json").read_text()) == {
        "tokenizer": "bytes",
        "fingerprint": load_tokenizer("bytes").fingerprint,
        "eod_id": 256,
        "append_eod": append_eod,
        "sentences": False,
        "documents": len(dataset),
        "tokens": dataset.n_tokens,
        "min_id": min(dataset.tokens.tolist()),
        "max_id": max(dataset.tokens.tolist()),
    }


# --------------------------------------------------------------------------------------------------------- sentences

PROSE = "Dr. Smith came at 5 p.m. yesterday. He left.\n\nWho knows?"
CODE = "import os\n\n\ndef f(x):\n    return x.y. z\n \t\nf(1)\n"
FOUND = {
    "prose": ["Dr. Smith came at 5 p.m. yesterday. ", "He left.", "\n\n", "Who knows?"],
    "blocks": ["import os", "\ndef f(x):\n    return x.y. z", "f(1)\n"],
}


@pytest.mark.parametrize(("option", "text"), [([], PROSE), (["prose"], PROSE), (["blocks"], CODE)])
def test_a_sentence_is_a_sequence_and_a_line_of_json_a_document(tmp_path, option, text, capsys):
    (tmp_path / "in.jsonl").write_bytes(lines([text, "", text]))
    options = ["--split-sentences", *option, "--workers", 1]
    assert run(tmp_path, "in.jsonl", options=options) == 0
    expected = FOUND["blocks" if option == ["blocks"] else "prose"]
    assert documents(tmp_path) == expected * 2
    dataset = IndexedDataset(tmp_path / "out")
    assert dataset.document_index.tolist() == [0, len(expected), 2 * len(expected)]
    record = json.loads((tmp_path / "out.meta.json").read_text())
    assert (record["sentences"], record["append_eod"], record["documents"]) == (True, False, 2)
    said = f"2 documents of {2 * len(expected)} sentences, {dataset.n_tokens} tokens, 1 skipped (0 malformed, 1 empty)"
    assert said in capsys.readouterr().out


def test_a_part_of_a_txt_between_blank_lines_can_be_a_document_of_sentences(tmp_path):
    (tmp_path / "in.txt").write_text("One. Two.\n\nThree. Four. Five.\n")
    options = ["--split-sentences", "--split-documents", "blank-lines", "--workers", 1]
    assert run(tmp_path, "in.txt", options=options, tokenizer="stdlib-wordpiece") == 0
    assert documents(tmp_path, "stdlib-wordpiece") == ["One.", "Two.", "Three.", "Four.", "Five."]
    assert IndexedDataset(tmp_path / "out").document_index.tolist() == [0, 2, 5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--append-eod"], "--append-eod with --split-sentences"),
        (["--split-documents", 100], "--split-documents 100 would cut within sentences"),
        (
            ["blocks", "--split-documents", "blank-lines"],
            "a document of each block that --split-sentences",
        ),
        (["lines"], "invalid choice: 'lines'"),
    ],
)
def test_what_would_spoil_sentences_is_refused(tmp_path, options, message, capsys):
    (tmp_path / "in.txt").write_text("One. Two.\n")
    try:
        code = run(tmp_path, "in.txt", options=["--split-sentences", *options])
    except SystemExit as refused:
        code = refused.code
    assert code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out.bin").exists()
