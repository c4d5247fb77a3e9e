"""inference/lm_eval_harness.py: a run has the scores that lm-evaluation-harness's own class gives its export."""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dtmega import config
from dtmega.__main__ import main as command
from dtmega.data.tokenizers.load import load_tokenizer
from dtmega.ops.cross_entropy import IGNORED
from tests import ranks
from tests.models.test_bloom_definition import model_of
from tests.test_train import run

lm_eval = pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: pip install -e '.[eval]'")

# What it brings in warns of itself, and its Pool of another thread.
pytestmark = pytest.mark.filterwarnings("ignore")
TASKS = {
    "toy_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "toy_text": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}, {"metric": "byte_perplexity"}],
    },
    "toy_answer": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{said}}",
        "generation_kwargs": {"until": ["Z", "!!"], "max_gen_toks": 8, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
}


def write_tasks(folder: Path) -> None:
    """Questions about a text that counts, some of which a model that counts gets wrong."""
    rows = []
    for i in range(65, 85):
        text = "".join(chr(i + k) for k in range(6))
        choices = [chr(i + 6), chr(i + 7) + "x", "?"]
        said = "".join(chr(i + k) for k in range(6, 14)).split("Z")[0]
        rows.append({"question": text, "choices": choices, "answer": i % 3, "text": text * 9, "said": said})
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, task in TASKS.items():
        of_all = {"task": name, "dataset_path": "json", "test_split": "test", "metadata": {"version": 1.0}}
        loaded = {"dataset_kwargs": {"data_files": {"test": str(data)}}}
        (folder / f"{name}.yaml").write_text(json.dumps({**of_all, **loaded, **task}))  # JSON is YAML


@pytest.fixture(scope="module")
def folder(tmp_path_factory, corpus) -> Path:
    """A GPT that counts and has 40 positions, its export, and tasks."""
    folder = tmp_path_factory.mktemp("harness")
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    (folder / "tasks").mkdir()
    write_tasks(folder / "tasks")
    keys = {"model__name": "gpt", "model__max_position_embeddings": 40, "train__steps": 30, "eval__interval": 0}
    assert run(folder / "run", corpus, **keys) == 0
    with contextlib.redirect_stdout(io.StringIO()):
        assert command(["convert", "--from", "dtmega", str(folder / "run"), "--to", "hf", str(folder / "export")]) == 0
    return folder


def asked(folder: Path, *others: str) -> list[str]:
    return [
        "evaluate",
        str(folder / "run"),
        "--tasks",
        ",".join(TASKS),
        "--include-path",
        str(folder / "tasks"),
        *others,
    ]


def scores(folder: Path, results: dict[str, Any]) -> dict[tuple[str, str], float]:
    return {(task, key): value for task in TASKS for key, value in results[task].items() if isinstance(value, float)}


@pytest.fixture(scope="module")
def found(folder) -> dict[str, Any]:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert command(asked(folder)) == 0
    (path,) = (folder / "run" / "evaluations").iterdir()
    assert path.name == "step-00000030-toy_choice+toy_text+toy_answer.json"
    assert f"written: {path}" in output.getvalue()
    assert "|toy_choice|" in output.getvalue().replace(" ", "")
    return json.loads(path.read_text())


def test_the_scores_are_those_that_the_harness_gives_the_export(folder, found):
    from lm_eval import simple_evaluate  # pyright: ignore[reportMissingImports]
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    theirs = simple_evaluate(
        model="hf",
        model_args={"pretrained": str(folder / "export"), "device": "cpu", "dtype": "float32"},
        tasks=[*TASKS],
        task_manager=TaskManager(include_path=str(folder / "tasks"), include_defaults=False),
        batch_size=3,
        bootstrap_iters=1000,
        log_samples=False,
    )
    truth = scores(folder, theirs["results"])
    assert {task for task, _ in truth} == {*TASKS}
    assert 0 < truth["toy_choice", "acc,none"] < 1
    assert 0 < truth["toy_answer", "exact_match,none"] < 1
    assert scores(folder, found["results"]) == pytest.approx(truth, rel=1e-5)


def test_the_file_says_which_checkpoint_was_asked_and_how(folder, found):
    assert found["checkpoint"] == f"{folder}/run/checkpoints/step-00000030"
    assert (found["step"], found["limit"]) == (30, None)
    assert found["n-samples"]["toy_text"] == {"original": 20, "effective": 20}


def on_layouts(argv: list[str], output: str) -> list[dict[str, Any]]:
    """The results on two processes, with one layout after the other, as the first one has written them."""
    found = []
    for layout in (["--mesh.tp", "2"], ["--mesh.pp", "2"], []):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            assert command([*argv, "--output", output, *layout]) == 0
        if dist.get_rank() == 0:  # which writes it
            found.append(json.loads(Path(output).read_text())["results"])
    return found


def test_two_processes_give_the_scores_of_one_whatever_is_cut(folder, found):
    everywhere = ranks.run(2, on_layouts, asked(folder), str(folder / "two.json"))[0]
    for results in everywhere:
        assert scores(folder, results) == pytest.approx(scores(folder, found["results"]), rel=1e-5)


def test_a_context_is_read_as_the_prefixes_were_that_a_run_was_trained_on():
    from dtmega.inference.lm_eval_harness import RunLM
    from dtmega.models.generate import Sampling, generate

    tokenizer = load_tokenizer("bytes")
    model = model_of(vocab_size=tokenizer.vocab_size).eval()
    cfg = config.validate({"train": {"steps": 1}, "data": {"objective": "prefix-lm"}}, "test")
    used: Any = SimpleNamespace(model=model, tokenizer=tokenizer, cfg=cfg)
    asked = RunLM(used, batch_size=2)
    pairs = [(None, [5, 6, 7], [8, 9]), (None, [*range(20, 40)], [3]), (None, [4], [5, 6, 7])]
    for (_, context, follows), (found, _) in zip(pairs, asked._loglikelihood_tokens(pairs), strict=True):
        tokens = torch.tensor([context + follows])
        prefix = (torch.arange(tokens.shape[1]) < len(context)).unsqueeze(0)
        labels = torch.where(prefix, IGNORED, tokens).roll(-1)  # as in training
        assert found == pytest.approx(-model(tokens, labels, prefix=prefix)["lm"].item(), rel=1e-5)
    how = {"until": [], "max_gen_toks": 6, "do_sample": False}
    (said,) = asked.generate_until([SimpleNamespace(args=("question", how))])
    greedy = Sampling(tokenizer.vocab_size, frozenset(), temperature=0, prompt_is_prefix=True)
    assert said == tokenizer.decode(generate(model, tokenizer.encode("question"), 6, greedy))


def test_a_task_that_nobody_knows_and_a_place_for_the_scores_that_is_none_are_refused_in_a_line(folder, capsys):
    argv = asked(folder)
    argv[3] = "toy_choice,toy_nothing"
    assert command(argv) == 2
    assert "is called toy_nothing (--tasks, --include-path)" in capsys.readouterr().err
    argv = asked(folder)
    argv[1] = str(folder / "run" / "checkpoints" / "step-00000030")
    assert command(argv) == 2
    assert "is no run directory, so say where the scores go (--output FILE)" in capsys.readouterr().err
