"""Room data/tokenizers/wordpiece.py and its tool: transformers' tokenizer of 2018, in plain Python, is the truth."""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
import tokenizers
from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

from dtmega.data.preparing import corpus
from dtmega.data.tokenizers import wordpiece
from dtmega.data.tokenizers.load import load_tokenizer
from dtmega.data.tokenizers.tokenizer_json import to_json
from dtmega.data.tokenizers.wordpiece import STDLIB_WORDPIECE

ROOT = Path(wordpiece.__file__).parents[3]
SPECIAL = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n"
# Accents, capitals without small letters, Chinese, blanks and controls, marks of all kinds.
ALPHABET = "aAbBéÉßİıŁσςЖй漢字ｱ가🙂0१ \t\n\r\u00a0\u3000\u2028\u0085\u200b\u0000\ufffd_-'’“.,$~`^"


@pytest.fixture
def vocabulary(tmp_path) -> Path:
    """A vocab.txt in which every letter and some longer pieces of ALPHABET are found, within words too."""
    letters = [*"abeéłσςßжйı漢字ｱ가0१_-'.$ABEÉŁЖ"]
    pieces = [*letters, *(f"##{letter}" for letter in letters), "aa", "##ab", "##abb", "ea", "Ba", "##éa", "00"]
    path = tmp_path / "vocab.txt"
    path.write_text(SPECIAL + "".join(f"{piece}\n" for piece in pieces), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("train_wordpiece", ROOT / "tools" / "train_wordpiece.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def random_texts(n: int, alphabet: str = ALPHABET) -> list[str]:
    rng = random.Random(0)
    return ["".join(rng.choices(alphabet, k=rng.randrange(1, 40))) for _ in range(n)]


def theirs(path: Path, lower: bool, text: str) -> list[int]:
    tokenizer = BertTokenizerLegacy(str(path), do_lower_case=lower)
    return tokenizer.convert_tokens_to_ids(tokenizer.tokenize(text))


@pytest.mark.parametrize(("kind", "lower"), [("bert", True), ("bert-cased", False)])
def test_the_library_of_python_gets_the_ids_of_berts_own_tokenizer(kind, lower):
    ours = load_tokenizer(f"{kind}:{STDLIB_WORDPIECE}")
    for name, text in islice(corpus.documents(), 3, None, 80):
        assert ours.encode(text) == theirs(STDLIB_WORDPIECE, lower, text), name


# That of plain Python joins accents that stand apart before it looks for cased words; neither the fast one does, nor
# Google's.
@pytest.mark.parametrize(("kind", "lower", "more"), [("bert", True, "e\u0301"), ("bert-cased", False, "")])
def test_accents_scripts_blanks_and_marks_in_any_order_get_the_ids_of_berts_own_tokenizer(
    kind, lower, more, vocabulary
):
    ours = load_tokenizer(f"{kind}:{vocabulary}")
    for text in [*random_texts(300, ALPHABET + more), "a" * 100, "a" * 101, ""]:
        assert ours.encode(text) == theirs(vocabulary, lower, text), repr(text)


def test_the_shipped_vocabulary_is_cased_and_has_8192_ids_with_berts_special_ones_first():
    tokenizer = load_tokenizer("stdlib-wordpiece")
    assert tokenizer.encode("class Thread") == load_tokenizer(f"bert-cased:{STDLIB_WORDPIECE}").encode("class Thread")
    special = (tokenizer.pad_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id)
    assert (tokenizer.vocab_size, special) == (8192, (0, 2, 3, 4))
    assert tokenizer.special_ids == set(special)
    assert tokenizer.eod_id == tokenizer.sep_id


def test_the_shipped_vocabulary_packs_bytes_of_the_library_by_more_than_three_and_a_half_and_knows_every_word():
    tokenizer = load_tokenizer("stdlib-wordpiece")
    texts = [text for _, text in islice(corpus.documents(), 0, None, 40)]
    ids = [tokenizer.encode(text) for text in texts]
    assert sum(len(text.encode()) for text in texts) > 3.5 * sum(map(len, ids))
    assert not any(1 in of_text for of_text in ids)


@pytest.mark.parametrize("spec", ["stdlib-wordpiece", f"bert:{STDLIB_WORDPIECE}"])
def test_a_text_that_spells_a_special_token_is_text(spec):
    tokenizer = load_tokenizer(spec)
    ids = tokenizer.encode("[CLS] a [MASK] [PAD][SEP] [UNK]")
    assert tokenizer.special_ids.isdisjoint(ids)
    assert tokenizer.decode(ids).count("[") == 5


def test_whole_words_are_what_starts_without_the_mark_of_a_continuation(vocabulary):
    tokenizer = load_tokenizer(f"bert-cased:{vocabulary}")
    tokens = vocabulary.read_text(encoding="utf-8").splitlines()
    assert tokenizer.continuing_ids == {i for i, token in enumerate(tokens) if token.startswith("##")}
    assert [i in tokenizer.continuing_ids for i in tokenizer.encode("aab ea0 0")] == [False, True, False, True, False]


def test_a_vocabulary_of_bytes_has_an_end_of_document_and_nothing_that_masking_needs():
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id, tokenizer.pad_id) == (None,) * 4
    assert (tokenizer.special_ids, tokenizer.continuing_ids) == ({256}, set())


@pytest.mark.parametrize("kind", ["bert", "bert-cased"])
def test_a_tokenizer_json_of_the_vocabulary_is_the_same_tokenizer(kind, vocabulary, tmp_path):
    ours = load_tokenizer(f"{kind}:{vocabulary}")
    path = tmp_path / "tokenizer.json"
    path.write_text(to_json(f"{kind}:{vocabulary}"), encoding="utf-8")
    again = load_tokenizer(str(path))
    for text in [*random_texts(50), "[MASK] a [SEP]b"]:
        assert again.encode(text) == ours.encode(text)
    named = ("vocab_size", "eod_id", "special_ids", "continuing_ids", "cls_id", "sep_id", "mask_id", "pad_id")
    for name in named:
        assert getattr(again, name) == getattr(ours, name), name


def test_a_tokenizer_json_whose_words_keep_their_marks_is_refused(vocabulary, tmp_path):
    loaded = tokenizers.Tokenizer.from_str(to_json(f"bert:{vocabulary}"))
    loaded.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    loaded.normalizer = None
    loaded.save(str(tmp_path / "blanks.json"))
    with pytest.raises(ValueError, match=r"blanks\.json: expected a pre_tokenizer .* text \[CLS\] becomes id 2"):
        load_tokenizer(str(tmp_path / "blanks.json"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"missing \[PAD\]"),
        (SPECIAL.replace("[UNK]\n", "").encode(), r"missing \[UNK\]"),
        (SPECIAL.replace("[MASK]\n", "").encode(), r"missing \[MASK\]"),
        (f"{SPECIAL}a\nb\na\n".encode(), ":8: expected each token once, got 'a', as in line 6"),
        (f"{SPECIAL}caf\xe9\n".encode("latin-1"), ":6: expected UTF-8, got byte 0xe9"),
    ],
)
def test_a_malformed_vocabulary_is_named_with_its_line(tmp_path, content, message):
    (tmp_path / "vocab.txt").write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        load_tokenizer(f"bert:{tmp_path}/vocab.txt")
    assert str(error.value).startswith(f"{tmp_path}/vocab.txt:")


@pytest.mark.parametrize(("spec", "message"), [("bert:", "file, got"), ("bert", "unknown"), ("bert:no.txt", "No such")])
def test_a_spec_without_a_vocabulary_is_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        load_tokenizer(spec)


def test_line_ends_of_windows_are_no_part_of_a_token_and_those_of_unicode_are(tmp_path):
    unix, windows = tmp_path / "unix.txt", tmp_path / "windows.txt"
    unix.write_bytes(f"{SPECIAL}a\n\u2028\nb\n".encode())
    windows.write_bytes(unix.read_bytes().replace(b"\n", b"\r\n"))
    loaded = [load_tokenizer(f"bert:{path}") for path in (unix, windows)]
    assert [(one.vocab_size, one.fingerprint) for one in loaded] == [(8, loaded[0].fingerprint)] * 2
    assert loaded[1].encode("a b") == [5, 7]


def test_case_is_part_of_the_fingerprint(vocabulary):
    assert load_tokenizer(f"bert:{vocabulary}").fingerprint != load_tokenizer(f"bert-cased:{vocabulary}").fingerprint


# ---------------------------------------------------------------------------------------------------------- the tool


def test_another_process_makes_the_same_vocabulary(tool):
    code = (
        "import sys; sys.path.insert(0, 'tools')\n"
        "from itertools import islice\n"
        "from train_wordpiece import corpus, train\n"
        "print(train([text for _, text in islice(corpus.documents(), 6)], 600))\n"
    )
    again = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert again.stdout == f"{tool.train([text for _, text in islice(corpus.documents(), 6)], 600)}\n"


def test_the_tool_writes_what_it_trained_on_all_documents(tool, tmp_path, monkeypatch, capsys):
    few = list(islice(corpus.documents(), 6))
    monkeypatch.setattr(corpus, "documents", lambda: iter(few))
    monkeypatch.setattr(tool, "VOCAB_SIZE", 600)
    tool.main(tmp_path / "small.txt")
    assert (tmp_path / "small.txt").read_text().splitlines() == tool.train([text for _, text in few], 600)
    assert capsys.readouterr().out.startswith(f"{tmp_path}/small.txt: 600 WordPieces from 6 documents, ")
    loaded = load_tokenizer(f"bert-cased:{tmp_path}/small.txt")
    assert all(1 not in loaded.encode(text) for _, text in few)


def test_training_on_too_little_text_is_an_error(tool):
    with pytest.raises(ValueError, match="expected text for 600 tokens"):
        tool.train(["too little"], 600)
