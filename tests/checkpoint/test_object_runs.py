"""Runs whose checkpoints are in an object store, and commands on checkpoints there, as a user starts them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from dtmega import train
from dtmega.__main__ import main as command
from dtmega.checkpoint import resume
from dtmega.checkpoint.objects import Objects
from dtmega.checkpoint.resume import open_checkpoint
from dtmega.training import device_peaks
from tests import ranks
from tests.checkpoint.object_faults import BRISK, client
from tests.layouts import DEBUG, write_text
from tests.object_server import BUCKET, Server, serving
from tests.resumed import flags

pytest.importorskip("obstore", reason="obstore is not installed: pip install -e '.[s3]'")

URL = f"s3://{BUCKET}/runs/a"
SECRETS = {
    "AWS_ACCESS_KEY_ID": "AKIA0HUNTER1",
    "AWS_SECRET_ACCESS_KEY": "hunter2/secret",
    "AWS_SESSION_TOKEN": "hunter3-token",
}
STEPS, CUT = 4, 2
KEYS: dict[str, Any] = {
    **DEBUG,
    "model.n_layers": 2,
    "train.steps": STEPS,
    "optim.warmup": 1,
    "eval.interval": 0,
    "eval.sample_tokens": 0,
    "checkpoint.interval": CUT,
    "checkpoint.dir": URL,
}


class Said(NamedTuple):
    """The exit code of a command, and what it printed."""

    code: int
    output: str


class Done(NamedTuple):
    """Commands on one run in an object store, by name, and the folder that they have written to."""

    said: dict[str, Said]
    folder: Path
    server: Server


def calls(*argv: str) -> Said:
    """Run a command of dtmega, or train.py for "train"."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            code = train.main(list(argv[1:])) if argv[0] == "train" else command(list(argv))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    return Said(code, output.getvalue())


EXACT = {"run.exact": True, "train.drift_interval": 0, "log.tensorboard": True}
SAMPLE = ("--prompt", "w1 w2", "--tokens", "5")


def begin(environment: dict[str, str]) -> None:
    """Lead this process's clients to the store, and let it start runs of its own."""
    os.environ.update(environment)
    device_peaks.matmul_flops = lambda device, dtype: 1e12  # MFU is not looked at
    dist.destroy_process_group()


def run_and_look(environment: dict[str, str], data: dict[str, str], folder: Path) -> dict[str, Said]:
    """A run, and two looks at it; and the same with a store that does nothing."""
    begin(environment)
    said = {
        "train": calls("train", *flags(KEYS | EXACT | data, folder / "run")),
        "generate": calls("generate", URL, *SAMPLE),
        "inspect": calls("inspect", f"{URL}/step-00000002"),
    }
    with client(BRISK):
        os.environ["AWS_ENDPOINT_URL"] = environment["UNREACHABLE"]
        said["a start without the store"] = calls("train", *flags(KEYS | EXACT | data, folder / "run"))
        said["generate without the store"] = calls("generate", URL, *SAMPLE)
    return said


def evaluated(output: str) -> dict[str, Said]:
    """`dtmega evaluate` on the URL, with and without a place for the scores; the harness only says what it got."""
    name = "dtmega.inference.lm_eval_harness"
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__dict__.update(
        find_tasks=lambda tasks, include_path: None,
        evaluate=lambda trained, *options: {"of": trained.checkpoint, "step": trained.step},
        table=str,
    )
    argv = ("evaluate", URL, "--tasks", "mine")
    return {"evaluate": calls(*argv, "--output", output), "evaluate without a place": calls(*argv)}


def all_others(environment: dict[str, str], data: dict[str, str], folder: Path) -> dict[str, Said]:
    """The other commands on the same run."""
    begin(environment)
    run, hf = str(folder / "run"), ("--to", "hf")
    # A rate that moves no weight.
    still: dict[str, Any] = {"train.steps": 1, "optim.lr": 1e-30, "optim.min_lr": 0.0, "optim.warmup": 0}
    begun = {"model.init_from": URL, "checkpoint.dir": ""}
    return {
        "generate from the run": calls("generate", run, *SAMPLE),
        "convert": calls("convert", "--from", "dtmega", URL, *hf, str(folder / "hf")),
        "convert from the run": calls("convert", "--from", "dtmega", run, *hf, str(folder / "hf of the run")),
        "init_from": calls("train", *flags(KEYS | data | still | begun, folder / "begun")),
        **evaluated(str(folder / "scores.json")),
        "report": calls("report", run),
        "report of the URL": calls("report", URL),
        "replay": calls("replay", run, "--step", "3"),
        "replay of the URL": calls("replay", URL, "--step", "3"),
    }


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, str]:
    return write_text(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def done(tmp_path_factory, data) -> Iterator[Done]:
    folder = tmp_path_factory.mktemp("objects")
    with serving() as server, serving() as failing:
        failing.fault = lambda request: "503"
        environment = {**server.environment, **SECRETS, "UNREACHABLE": failing.url}
        (said,) = ranks.run(1, run_and_look, environment, data, folder)
        yield Done(said, folder, server)


@pytest.fixture(scope="module")
def everything(done, data) -> Done:
    (said,) = ranks.run(1, all_others, {**done.server.environment, **SECRETS}, data, done.folder)
    return done._replace(said=done.said | said)


@pytest.fixture
def at_url(done: Done, monkeypatch) -> str:
    """The run's URL, which this process can open."""
    for name, value in done.server.environment.items():
        monkeypatch.setenv(name, value)
    return URL


@pytest.mark.full
def test_a_checkpoint_at_a_url_generates_the_text_that_its_run_does(everything):
    text = everything.said["generate"]
    assert (text, text.code) == (everything.said["generate from the run"], 0)
    assert text.output.startswith("w1 w2")


def test_a_checkpoint_at_a_url_generates_text_and_is_inspected(done):
    assert (done.said["generate"].code, done.said["generate"].output[:5]) == (0, "w1 w2")
    said = done.said["inspect"]
    assert said.code == 0
    assert f"{URL}/step-00000002" in said.output


@pytest.mark.full
def test_a_checkpoint_at_a_url_is_converted_as_from_its_run(everything):
    assert (everything.said["convert"].code, everything.said["convert from the run"].code) == (0, 0)
    (name,) = [path.name for path in (everything.folder / "hf").glob("*.safetensors")]
    assert (everything.folder / "hf" / name).read_bytes() == (everything.folder / "hf of the run" / name).read_bytes()


@pytest.mark.full
def test_a_run_begins_from_the_weights_at_a_url(everything, at_url):
    assert everything.said["init_from"].code == 0, everything.said["init_from"].output
    begun, there = open_checkpoint(str(everything.folder / "begun")), open_checkpoint(at_url)
    names = [name for name in there.tensors if name.startswith("model/")]
    assert len(names) > 10
    for name in names:
        assert torch.equal(begun.read(name), there.read(name)), name


@pytest.mark.full
def test_a_checkpoint_at_a_url_is_evaluated_if_there_is_a_place_for_the_scores(everything):
    assert everything.said["evaluate"].code == 0, everything.said["evaluate"]
    scores = json.loads((everything.folder / "scores.json").read_text())
    assert scores == {"of": f"{URL}/step-00000004", "step": STEPS}
    refused = everything.said["evaluate without a place"]
    assert (refused.code, refused.output.count("\n")) == (2, 1)
    assert f"{URL} is no run directory, so say where the scores go (--output FILE)" in refused.output


@pytest.mark.full
def test_a_run_whose_checkpoints_are_at_a_url_is_reported_and_replayed(everything):
    assert everything.said["report"] == (0, f"{everything.folder / 'run' / 'report.html'}\n")
    assert everything.said["replay"].code == 0, everything.said["replay"].output


@pytest.mark.full
@pytest.mark.parametrize("name", ["report of the URL", "replay of the URL"])
def test_what_needs_a_run_directory_refuses_a_url_in_a_line(everything, name):
    said = everything.said[name]
    assert (said.code, said.output.count("\n")) == (2, 1)
    assert f"{URL} is no run directory" in said.output


@pytest.mark.parametrize("commands", ["done", pytest.param("everything", marks=pytest.mark.full)])
def test_no_file_and_no_line_of_a_run_has_a_credential_or_an_endpoint(request, commands):
    done: Done = request.getfixturevalue(commands)
    for name in ("a start without the store", "generate without the store"):
        assert (done.said[name].code, "503" in done.said[name].output) == (76, True), done.said[name]
    written = {name: said.output.encode() for name, said in done.said.items()}
    written |= {str(path): path.read_bytes() for path in done.folder.rglob("*") if path.is_file()}
    written |= {key: kept.data for key, kept in done.server.objects.items()}
    names = {path.rpartition("/")[2] for path in written}
    assert {"config.toml", "metrics.jsonl", "starts.jsonl", "exit.json", "manifest.json"} <= names
    assert any(name.startswith("events.out") for name in names)
    for forbidden in (*SECRETS.values(), f":{done.server.server_port}"):
        assert [path for path, content in written.items() if forbidden.encode() in content] == [], forbidden


# Two ranks that save while they train.


class Kept(NamedTuple):
    """A place for checkpoints, and the variables that lead there."""

    url: str
    environment: dict[str, str]


@contextlib.contextmanager
def moto() -> Iterator[Kept]:
    """Another implementation of S3, in a process of its own."""
    program = shutil.which("moto_server")
    if program is None:
        pytest.skip("moto_server is not on the PATH: pip install 'moto[server]', in a venv of its own")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    argv = [program, "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        environment = {**SECRETS, "AWS_ENDPOINT_URL": url, "AWS_REGION": "us-east-1"}
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1) as made:
                made.sendall(b"PUT /elsewhere HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\n\r\n")
                assert b"200" in made.recv(100)
                break
            time.sleep(0.2)
        yield Kept("s3://elsewhere/runs/a", environment)
    finally:
        server.kill()
        server.wait()


@contextlib.contextmanager
def ours() -> Iterator[Kept]:
    with serving() as server:
        yield Kept(URL, {**server.environment, **SECRETS})


def train_on_rank(environment: dict[str, str], keys: dict[str, Any], run_dir: Path, dies_in: int) -> None:
    """train.py on one of two ranks; rank 1 is killed in the save of step `dies_in`, while it uploads."""
    os.environ.update({**environment, "RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())})
    device_peaks.matmul_flops = lambda device, dtype: 1e12  # MFU is not looked at
    if dist.get_rank() == 1:
        honest = Objects.create

        @contextlib.contextmanager
        def create(self: Objects, folder: str, name: str) -> Iterator[Any]:
            with honest(self, folder, name) as file:
                yield file
                if folder == resume.name(dies_in):
                    os.kill(os.getpid(), signal.SIGKILL)

        Objects.create = create
    run_dir.mkdir(exist_ok=True)
    with (run_dir / f"stdout-{dist.get_rank()}").open("a") as file, contextlib.redirect_stdout(file):
        assert train.main(flags(keys, run_dir)) == 0


def losses(folder: Path) -> list[tuple[int, float, float]]:
    """Step, loss and gradient norm of each step of a run's record."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines if "loss" in line]


@pytest.mark.full
@pytest.mark.parametrize("place", [ours, moto])
def test_a_run_on_two_ranks_that_is_killed_in_a_save_goes_on_with_the_losses_of_one_that_is_not(tmp_path, place):
    keys = KEYS | write_text(tmp_path) | {"mesh.dp_shard": 2, "checkpoint.mode": "async", "train.steps": 9}
    ranks.run(2, train_on_rank, {}, {**keys, "checkpoint.dir": ""}, tmp_path / "truth", 0)
    with place() as kept, pytest.MonkeyPatch.context() as patch:
        keys["checkpoint.dir"] = kept.url
        folder = tmp_path / "run"
        ended = ranks.forks().run(2, train_on_rank, kept.environment, keys, folder, 6)
        assert ended[1].code == -signal.SIGKILL
        assert not ended[0].late
        assert ended[0].code != 0
        for name, value in kept.environment.items():
            patch.setenv(name, value)
        assert open_checkpoint(kept.url).manifest.step == 4
        ranks.run(2, train_on_rank, kept.environment, keys, folder, 0)
        assert open_checkpoint(kept.url).manifest.step == 9
        assert losses(folder) == losses(tmp_path / "truth")
        weights, truth = open_checkpoint(kept.url), open_checkpoint(str(tmp_path / "truth"))
        assert all(torch.equal(weights.read(name), truth.read(name)) for name in truth.tensors)
