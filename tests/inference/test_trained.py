"""Using a run: its model on other layouts, several prompts, a checkpoint of any step, lines and conversations."""

from __future__ import annotations

import contextlib
import io
import shutil
from pathlib import Path

import pytest
import torch

from dtmega import config, mesh
from dtmega.__main__ import main as command
from dtmega.data.tokenizers.chat import Chat, find_template
from dtmega.data.tokenizers.load import load_tokenizer
from dtmega.data.tokenizers.tokenizer_json import to_json
from dtmega.distributed.agreement import Startup
from dtmega.inference.trained import check_mesh, inference_config, open_trained
from tests import ranks
from tests.test_train import run

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if messages[-1].content == 'no' %}{{ raise_exception('never') }}{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FEW = ["--tokens", "6", "--seed", "3"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, corpus) -> Path:
    """A GPT of 64 positions, with checkpoints of steps 2 and 4 and a tokenizer that has a chat template."""
    folder = tmp_path_factory.mktemp("use")
    (folder / "tokenizer.json").write_text(to_json("bytes"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "generation_config.json").write_text('{"eos_token_id": [256, 33]}')
    keys = {"model__name": "gpt", "model__max_position_embeddings": 64, "checkpoint__interval": 2}
    keys |= {"model__init_std": 0.3}  # attention that makes a difference
    keys |= {"data__tokenizer": folder / "tokenizer.json", "train__steps": 4, "eval__interval": 0}
    assert run(folder / "run", corpus, **keys) == 0
    return folder / "run"


def said(*argv: object) -> str:
    """What `dtmega generate` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert command(["generate", *map(str, argv)]) == 0
    return output.getvalue()


def test_several_prompts_stdin_and_a_step_say_what_each_says_alone(finished, monkeypatch):
    step = ["--run", finished, "--step", 2, *FEW]
    monkeypatch.setattr("sys.stdin", io.StringIO("two\nlines"))
    together = said(finished, *step[2:], "--prompt", "ABC", "--prompt", "-", "--prompt", "a longer one")
    alone = [said(*step, "--prompt", prompt) for prompt in ("ABC", "two\nlines", "a longer one")]
    assert together == "---\n".join(alone)
    assert together == said(
        *step, "--prompt", "ABC", "--prompt", "two\nlines", "--prompt", "a longer one", "--batch-size", 2
    )
    (finished.parent / "prompts").write_text("ABC\n\na longer one\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("a longer one"))
    lines = said(*step, "--prompts", finished.parent / "prompts", "--prompt", "ABC")
    assert lines == "---\n".join([alone[0], alone[0], alone[2]])
    assert said(*step, "--prompts", "-") == alone[2]
    assert alone[0] == said("--run", finished / "checkpoints" / "step-00000002", *FEW, "--prompt", "ABC")
    assert alone[0] != said("--run", finished, *FEW, "--prompt", "ABC")


def test_a_line_that_is_no_text_does_not_end_a_conversation(finished, monkeypatch):
    stdin = io.TextIOWrapper(io.BytesIO(b"ab\xffc\nABC\n"), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", stdin)
    answers = said("--run", finished, "--interactive", *FEW)
    monkeypatch.setattr("sys.stdin", io.StringIO("ABC\n"))
    good = said("--run", finished, "--interactive", *FEW)
    assert answers == f"(the line is not UTF-8: byte 0xff after 2 characters)\n{good}"


def test_a_step_that_was_not_saved_and_a_prompt_that_is_none_are_refused(finished, capsys):
    assert command(["generate", "--run", str(finished), "--step", "3", "--prompt", "x"]) == 2
    assert "has no checkpoint of step 3: expected one of 2, 4" in capsys.readouterr().err
    for runs in ([], [str(finished), "--run", str(finished)]):
        assert command(["generate", *runs, "--prompt", "x"]) == 2
        assert "expected one run: dtmega generate RUN, or --run PATH" in capsys.readouterr().err
    assert command(["generate", str(finished)]) == 2
    assert "there is no prompt: --prompt TEXT" in capsys.readouterr().err
    (finished.parent / "empty").write_text("\n")
    assert command(["generate", str(finished), "--prompts", str(finished.parent / "empty")]) == 2
    assert "empty has no line with a prompt (--prompts)" in capsys.readouterr().err
    assert command(["generate", str(finished), "--prompt", "x", "--prompt", 70 * "x"]) == 2
    assert "prompts 1 to 2: the prompt has 70 tokens, and the model positions for 64" in capsys.readouterr().err


def test_a_run_is_used_in_fp32_whole_and_without_what_was_for_training():
    of_training = {
        "precision": {"params": "bfloat16", "reduce": "bfloat16"},
        "mesh": {"pp": 2, "dp_shard": 4},
        "pipeline": {"schedule": "Interleaved1F1B", "virtual_stages": 3},
        "recompute": {"mode": "full"},
        "fsdp": {"cpu_offload": True},
        "compile": {"enable": True},
    }
    kept = {"model": {"name": "gpt", "n_layers": 6}, "train": {"steps": 3}, "run": {"seed": 5}}
    used = inference_config(config.validate(of_training | kept, "test"), {"tp": 2})
    for_two = {"mesh": {"tp": 2, "sequence_parallel": False}, "compile": {"enable": False}}
    assert used == config.validate(kept | for_two, "test")
    assert used.precision.params == "float32"


def test_ep_is_refused_for_a_model_without_experts():
    cfg = inference_config(config.validate({"train": {"steps": 1}}, "test"), {"dp_shard": 2, "ep": 2})
    with pytest.raises(ValueError, match=r"ep=2 divides the experts of a mixture, and name = 'bloom' has none here"):
        check_mesh(cfg, mesh.resolve(cfg.mesh, 2))


def everywhere(argv: list[str]) -> list[str]:
    """What two processes print, on one layout after the other."""
    found = []
    for layout in (["--mesh.tp", "2"], ["--mesh.pp", "2"], []):
        with contextlib.redirect_stdout(io.StringIO()) as output:
            assert command([*argv, *layout]) == 0
        found.append(output.getvalue())
    return found


def test_two_processes_say_what_one_says_cut_over_layers_stages_or_shards(finished, capsys):
    argv = ["--run", str(finished), *FEW, "--prompt", "ABC", "--prompt", "hello there"]
    first, second = ranks.run(2, everywhere, ["generate", *argv])
    assert first == [said(*argv)] * 3
    assert second == [""] * 3


@pytest.fixture(scope="module")
def of_prefixes(finished) -> Path:
    """The same weights in a run that was trained to go on from prefixes."""
    folder = finished.parent / "prefixes"
    shutil.copytree(finished, folder)
    toml = folder / "config.toml"
    toml.write_text(toml.read_text().replace('objective = "auto"', 'objective = "prefix-lm"'))
    return folder


def test_a_run_that_was_trained_on_prefixes_reads_prompts_as_such_on_each_layout(finished, of_prefixes):
    greedy = ["--tokens", "6", "--temperature", "0", "--prompt", "ABC", "--prompt", "hello there"]
    used = open_trained(str(of_prefixes), None, {}, Startup())
    truth = []
    for prompt in ("ABC", "hello there"):
        tokens = used.tokenizer.encode(prompt)
        prefix = [True] * len(tokens)
        for _ in range(6):
            logits = used.model(torch.tensor([tokens]), prefix=torch.tensor([prefix]))  # as in training
            tokens.append(int(logits[0, -1, : used.tokenizer.vocab_size].argmax()))
            prefix.append(False)
        truth.append(prompt + used.tokenizer.decode(tokens[len(prompt) :]) + "\n")
    expected = "---\n".join(truth)
    assert said(of_prefixes, *greedy) == expected != said(finished, *greedy)
    first, _ = ranks.run(2, everywhere, ["generate", "--run", str(of_prefixes), *greedy])
    assert first == [expected] * 3


def test_lines_of_stdin_are_prompts_and_one_that_is_too_long_is_not_the_end(finished, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("ABC\n\n" + 70 * "x" + "\nlast"))
    talk = said("--run", finished, "--interactive", *FEW)
    refused = "(the prompt has 70 tokens, and the model positions for 64)\n"
    first, last = (said("--run", finished, *FEW, "--prompt", prompt) for prompt in ("ABC", "last"))
    assert talk == first + refused + last


@pytest.mark.parametrize("trained", ["finished", "of_prefixes"])
def test_a_conversation_is_what_its_template_makes_of_all_that_was_said(trained, request, monkeypatch):
    finished = request.getfixturevalue(trained)
    first = "<user>Hi<assistant>"
    after_one = said("--run", finished, *FEW, "--prompt", first).removesuffix("\n")
    second = f"{after_one}<user>You<assistant>"
    after_two = said("--run", finished, *FEW, "--prompt", second)
    template = finished.parent / "chat_template.jinja"
    refused = f"({template}: the chat template refuses this conversation: never)\n"
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\nno\nYou\n"))
    talk = said("--run", finished, "--chat", "--interactive", *FEW)
    assert talk == after_one.removeprefix(first) + "\n" + refused + after_two.removeprefix(second)


def test_prompts_with_chat_are_conversations_of_their_own_answered_together(finished, capsys):
    step = ("--run", finished, *FEW)
    alone = []
    for message in ("Hi", "You there"):
        prompt = f"<user>{message}<assistant>"
        alone.append(said(*step, "--prompt", prompt).removeprefix(prompt))
    (finished.parent / "messages").write_text("Hi\nYou there\n")
    assert said(*step, "--chat", "--prompts", finished.parent / "messages") == "---\n".join(alone)
    assert command(["generate", str(finished), "--chat", "--prompt", "no"]) == 2
    assert "the chat template refuses this conversation: never" in capsys.readouterr().err
    assert command(["generate", str(finished), "--chat-template", "turns", "--prompt", "Hi"]) == 2
    assert "expected --chat with --chat-template" in capsys.readouterr().err


def test_a_given_template_takes_the_place_of_the_tokenizers_own(finished):
    shipped = said("--run", finished, *FEW, "--chat", "--chat-template", "turns", "--prompt", "Hi")
    template = finished.parent / "other.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}{{ 'assistant: ' }}")
    own = said("--run", finished, *FEW, "--chat", "--chat-template", template, "--prompt", "Hi")
    prompt = "user: Hiassistant: "
    assert own == said("--run", finished, *FEW, "--prompt", prompt).removeprefix(prompt) != shipped


def conversation(argv: list[str]) -> str:
    """What one of several processes prints of a conversation, of which the first one alone has the lines."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as output:
        patch.setattr("sys.stdin", io.StringIO("no\nHi\n" if mesh.rank() == 0 else ""))
        assert command([*argv, "--chat", "--interactive", "--mesh.tp", "2"]) == 0
    return output.getvalue()


def test_a_template_that_refuses_on_the_first_process_is_no_end_on_any(finished):
    first, second = ranks.run(2, conversation, ["generate", "--run", str(finished), *FEW])
    template = finished.parent / "chat_template.jinja"
    refused = f"({template}: the chat template refuses this conversation: never)\n"
    answer = said("--run", finished, *FEW, "--prompt", "<user>Hi<assistant>").removeprefix("<user>Hi<assistant>")
    assert (first, second) == (refused + answer, "")


def test_what_ends_a_turn_is_what_ends_a_document_and_what_the_directory_names(finished):
    tokenizer = load_tokenizer(str(finished.parent / "tokenizer.json"))
    chat = Chat(tokenizer, find_template(tokenizer))
    assert chat.end_ids == {256, 33}
