"""show.py: what is shown of a BERT and of a T5; of a decoder it is in test_generate.py and test_loop.py."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from dtmega import families
from dtmega.__main__ import main as command
from dtmega.config.families.bert import BertKeys
from dtmega.data.tokenizers.load import load_tokenizer
from dtmega.models.model import Model
from dtmega.models.show_masks import filled, masked
from dtmega.models.show_spans import answered
from tests.layouts import FAMILIES, PAIRS, write_data
from tests.resumed import Training, train_all

TOKENIZER = load_tokenizer("stdlib-wordpiece")
CLS, SEP, MASK, PAD = 2, 3, 4, 0


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


class Lookup(Model):
    """Gives id 100 + place a probability of 1/2 and the next two ids 1/4 and 1/8; records what it is called with.

    Ids that the tokenizer does not have are more probable than all others.
    """

    def __init__(self, longest: int | None = None) -> None:
        super().__init__()
        self.longest = longest
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.calls: list[dict[str, Any]] = []

    def forward(self, tokens: Tensor, document_ids: Tensor, *, places: Tensor) -> dict[str, Tensor]:
        self.calls.append({"tokens": tokens, "document_ids": document_ids, "training": self.training})
        logits = torch.full((*tokens.shape, TOKENIZER.vocab_size + 8), -30.0)
        for i in range(3):
            logits.scatter_(2, (100 + places + i)[..., None], math.log(2.0 ** -(i + 1)))
        logits[..., TOKENIZER.vocab_size :] = 50.0
        return {"logits": logits, "order": torch.zeros(1, 2)}


def test_each_mask_has_its_most_probable_words_with_their_probabilities():
    prompt = "def [MASK](self): return [MASK]"
    name, result = 2, 1 + len(ids("def")) + 1 + len(ids("(self): return"))
    first, second = (
        ", ".join(f"{TOKENIZER.decode([100 + place + i])} {share}%" for i, share in enumerate(("57.1", "28.6", "14.3")))
        for place in (name, result)
    )
    shown = filled(Lookup(), TOKENIZER, prompt, top_k=3)
    assert shown == f"{prompt}\n[MASK]: {first}\n[MASK]: {second}"


def test_a_prompt_stands_between_cls_and_sep_and_its_padding_is_another_document():
    model = Lookup()
    filled(model.train(), TOKENIZER, "a [MASK] b", multiple=3)
    (call,) = model.calls
    text = [CLS, *ids("a"), MASK, *ids("b"), SEP]
    assert call["tokens"].tolist() == [text + [PAD] * (192 - len(text))]
    assert call["document_ids"].tolist() == [[0] * len(text) + [1] * (192 - len(text))]
    assert (call["training"], model.training) == (False, True)


@pytest.mark.parametrize("multiple", [1, 2])
def test_a_prompt_may_fill_all_positions_and_no_more(multiple):
    model = Lookup(longest=9)
    filled(model, TOKENIZER, "[MASK]" + " a" * (6 if multiple == 1 else 5), multiple=multiple)
    assert model.calls[0]["tokens"].shape == (1, 9 // multiple * multiple)
    with pytest.raises(ValueError, match=f"10 tokens, and the model positions for {9 // multiple * multiple}"):
        filled(model, TOKENIZER, "[MASK]" + " a" * 7, multiple=multiple)


@pytest.mark.parametrize("prompt", ["def ", "", "[mask]"])
def test_a_prompt_without_a_mask_is_refused(prompt):
    with pytest.raises(ValueError, match=r"has no \[MASK\] to fill \(--prompt, \[eval\] prompt\)"):
        masked(TOKENIZER, prompt)


def test_masks_may_stand_side_by_side_and_be_all_there_is():
    assert masked(TOKENIZER, "[MASK][MASK]") == ([CLS, MASK, MASK, SEP], [1, 2])


def test_the_padding_of_a_prompt_does_not_change_what_a_bert_fills_in():
    cfg = BertKeys(vocab_size=8192, hidden_size=32, n_layers=2, n_heads=4, max_position_embeddings=128)
    torch.manual_seed(0)
    model = families.of(cfg).build(cfg)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.init_buffers(0)
    shown = {filled(model, TOKENIZER, "x = [MASK](y)", multiple=multiple) for multiple in (1, 96, 128)}
    assert len(shown) == 1


# ------------------------------------------------------------------------------------------------------------- answers

FIRST, START, END = 8194, 8192, 8193  # behind the 8,192 of this vocabulary: [BOS], [EOS], then sentinels


class Saying(Model):
    """Says what it is made with, and notes what it reads; ids that the run does not have are more probable."""

    def __init__(self, said: list[int]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.said = said
        self.read: list[int] = []

    def forward(
        self, tokens: Tensor, said: Tensor | None = None, *, document_ids: Tensor, places: Tensor, **_: Any
    ) -> Any:
        if said is None:
            self.read = tokens[document_ids == 0].tolist()
            return {"encoded": tokens}
        assert said[0, 0] == START
        logits = torch.full((*said.shape, FIRST + 100 + 8), -30.0)
        for place, i in enumerate(self.said):
            logits[0, place, i] = 9.0
        logits[..., FIRST + 100 :] = 50.0
        return logits


def show(prompt: str, said: list[int], **keys: Any) -> tuple[str, list[int]]:
    model = Saying(said)
    return answered(model, TOKENIZER, prompt, tokens=len(said), temperature=0, **keys), model.read


def test_each_span_that_is_hidden_is_shown_with_what_the_decoder_says_behind_its_sentinel():
    prompt = "def <extra_id_0>(self): return <extra_id_2>, <extra_id_1>"
    said = [*ids("nothing"), FIRST, *ids("name it"), FIRST + 2, *ids("result"), START, FIRST + 3, *ids("more"), END, 7]
    shown, read = show(prompt, said)
    assert shown == f"{prompt}\n<extra_id_0>: nothing name it\n<extra_id_2>: result\n<extra_id_1>: "
    return_, comma = ids("(self): return"), ids(",")
    assert read == [*ids("def"), FIRST, *return_, FIRST + 2, *comma, FIRST + 1, END]


def test_what_is_said_before_any_sentinel_counts_for_the_first_one_of_the_prompt():
    assert show("a <extra_id_3> <extra_id_0>", [*ids("x"), END])[0].endswith("\n<extra_id_3>: x\n<extra_id_0>: ")


def test_what_is_read_ends_as_in_the_samples_of_its_objective():
    assert show("a <extra_id_0>", [FIRST], objective="separate-spans")[1] == [*ids("a"), FIRST]
    assert show("a <extra_id_0>", [FIRST])[1] == [*ids("a"), FIRST, END]


def test_a_prompt_without_a_hidden_span_gets_one_at_its_end():
    shown, read = show("x = ", [FIRST, *ids("y"), END])
    assert shown == "x = <extra_id_0>\n<extra_id_0>: y"
    assert read == [*ids("x ="), FIRST, END]


def test_a_sentinel_that_the_run_did_not_have_is_refused():
    with pytest.raises(ValueError, match=r"<extra_id_3> does not exist: .* 0 to 2 \(--prompt, .*\[data\] sentinels"):
        show("<extra_id_3>", [], sentinels=3)


# -------------------------------------------------------------------------------------------------------------- runs

PROMPT = "w1 [MASK] w4[MASK] w6"
HIDDEN = "w1 w2 <extra_id_0> w5 w6 <extra_id_1>"
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "tp 2": (2, {"mesh.tp": 2} | PAIRS),
    "pp 2": (2, {"mesh.pp": 2}),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """Two steps of two debug models on each mesh; the folder has what was printed in stdout-0."""
    folder = tmp_path_factory.mktemp("runs")
    data = write_data(folder)
    short = {"train.steps": 2, "train.drift_interval": 0, "eval.interval": 0, "eval.sample_tokens": 9}
    trainings = []
    # A new T5 whose head is its embedding says what it has said before: nothing but an end.
    shows = {
        "bert": {"eval.prompt": PROMPT},
        "t5": {"eval.prompt": HIDDEN, "model.tied": False, "model.scale_head": False},
    }
    for family, of_family in shows.items():
        keys = FAMILIES[family] | data[family] | short | of_family
        trainings += [Training(n, keys | mesh, folder / family / name) for name, (n, mesh) in MESHES.items()]
    train_all(trainings)
    return {f"{training.folder.parent.name}, {training.folder.name}": training.folder for training in trainings}


def shown(run: Path) -> str:
    return (run / "stdout-0").read_text().partition("a sample:\n")[2].partition("\nwritten:")[0]


def test_a_run_ends_with_its_prompt_filled_alike_on_one_process_and_over_tp(runs):
    prompt, *fills = shown(runs["bert, 1"]).split("\n")
    assert prompt == PROMPT
    assert [len(re.findall(r"\S+ \d+\.\d%", line)) for line in fills] == [5, 5]
    assert shown(runs["bert, tp 2"]) == shown(runs["bert, 1"])


def test_a_pipeline_names_the_command_that_fills_and_that_fills_as_one_process_does(runs, capsys):
    assert (
        f"for a sample: python -m dtmega generate --run {runs['bert, pp 2']}"
        in (runs["bert, pp 2"] / "stdout-0").read_text()
    )
    assert command(["generate", "--run", str(runs["bert, pp 2"]), "--prompt", PROMPT]) == 0
    assert capsys.readouterr().out == f"{shown(runs['bert, 1'])}\n"
    assert command(["generate", "--run", str(runs["bert, 1"]), "--prompt", "[MASK]", "--top-k", "2"]) == 0
    assert len(re.findall(r"\d%", capsys.readouterr().out)) == 2


def test_a_run_of_a_t5_ends_with_its_hidden_spans_and_on_any_mesh_they_are_those_of_one_process(runs, capsys):
    prompt, *spans = shown(runs["t5, 1"]).split("\n")
    assert prompt == HIDDEN
    assert [line.partition(": ")[0] for line in spans] == ["<extra_id_0>", "<extra_id_1>"]
    assert re.search(r"w\d+ w\d+", shown(runs["t5, 1"]).removeprefix(HIDDEN))
    assert shown(runs["t5, tp 2"]) == shown(runs["t5, 1"])
    assert f"dtmega generate --run {runs['t5, pp 2']}" in (runs["t5, pp 2"] / "stdout-0").read_text()
    options = ["--tokens", "9", "--seed", "1234"]  # as the run's own
    for name in ("t5, 1", "t5, pp 2"):
        assert command(["generate", "--run", str(runs[name]), "--prompt", HIDDEN, *options]) == 0
        assert capsys.readouterr().out == f"{shown(runs['t5, 1'])}\n"


def test_a_run_of_a_t5_becomes_a_directory_with_which_transformers_says_the_same(runs, tmp_path, capsys):
    exported = tmp_path / "exported"
    assert command(["convert", "--from", "dtmega", str(runs["t5, tp 2"]), "--to", "hf", str(exported)]) == 0
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(exported)
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    (said,) = theirs.generate(**tokenizer(HIDDEN, return_tensors="pt"), do_sample=False, max_new_tokens=9)
    capsys.readouterr()
    greedy = ["--tokens", "9", "--temperature", "0"]
    assert command(["generate", "--run", str(runs["t5, 1"]), "--prompt", HIDDEN, *greedy]) == 0
    ours = capsys.readouterr().out.removeprefix(HIDDEN)
    words = re.findall(r"w\d+", tokenizer.decode(said))
    assert words
    assert re.findall(r"w\d+", ours) == words


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", "w1 "], "dtmega generate: 'w1 ' has no [MASK] to fill (--prompt, [eval] prompt)\n"),
        (["--prompt", "[MASK]", "--seed", "1"], "dtmega generate: --seed means nothing to a model of name = 'bert'\n"),
    ],
)
def test_what_cannot_be_filled_is_refused_in_one_line(runs, options, message, capsys):
    assert command(["generate", "--run", str(runs["bert, 1"]), *options]) == 2
    assert capsys.readouterr() == ("", message)
