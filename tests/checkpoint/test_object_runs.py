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
import time
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
from tests.checkpoint.object_server import BUCKET, Server, serving
from tests.layouts import DEBUG, write_text
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


def work(environment: dict[str, str], data: dict[str, str], folder: Path) -> dict[str, Said]:
    """A run with [run] exact, and all commands on it."""
    os.environ.update(environment)
    device_peaks.matmul_flops = lambda device, dtype: 1e12  # MFU is not looked at
    dist.destroy_process_group()
    keys = KEYS | data
    run = str(folder / "run")
    exact = {"run.exact": True, "train.drift_interval": 0, "log.tensorboard": True}
    # A rate that moves no weight.
    still = {
        "train.steps": 1,
        "optim.lr": 1e-30,
        "optim.min_lr": 0.0,
        "model.init_from": URL,
        "checkpoint.dir": "",
        "optim.warmup": 0,
    }
    sample = ("--prompt", "w1 w2", "--tokens", "5")
    hf = ("--to", "hf")
    said = {
        "train": calls("train", *flags(keys | exact, folder / "run")),
        "generate": calls("generate", URL, *sample),
        "generate from the run": calls("generate", run, *sample),
        "inspect": calls("inspect", f"{URL}/step-00000002"),
        "convert": calls("convert", "--from", "dtmega", URL, *hf, str(folder / "hf")),
        "convert from the run": calls("convert", "--from", "dtmega", run, *hf, str(folder / "hf of the run")),
        "init_from": calls("train", *flags(keys | still, folder / "begun")),
        "report": calls("report", run),
        "report of the URL": calls("report", URL),
        "replay": calls("replay", run, "--step", "3"),
        "replay of the URL": calls("replay", URL, "--step", "3"),
    }
    with client(BRISK):
        os.environ["AWS_ENDPOINT_URL"] = environment["UNREACHABLE"]
        said["a start without the store"] = calls("train", *flags(keys | exact, folder / "run"))
        said["generate without the store"] = calls("generate", URL, *sample)
    return said


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> Iterator[Done]:
    folder = tmp_path_factory.mktemp("objects")
    data = write_text(tmp_path_factory.mktemp("data"))
    with serving() as server, serving() as failing:
        failing.fault = lambda request: "503"
        environment = {**server.environment, **SECRETS, "UNREACHABLE": failing.url}
        (said,) = ranks.run(1, work, environment, data, folder)
        yield Done(said, folder, server)


@pytest.fixture
def at_url(done: Done, monkeypatch) -> str:
    """The run's URL, which this process can open."""
    for name, value in done.server.environment.items():
        monkeypatch.setenv(name, value)
    return URL


def test_a_checkpoint_at_a_url_generates_the_text_that_its_run_does(done):
    text = done.said["generate"]
    assert (text, text.code) == (done.said["generate from the run"], 0)
    assert text.output.startswith("w1 w2")


def test_a_checkpoint_at_a_url_is_inspected(done):
    said = done.said["inspect"]
    assert said.code == 0
    assert f"{URL}/step-00000002" in said.output


def test_a_checkpoint_at_a_url_is_converted_as_from_its_run(done):
    assert (done.said["convert"].code, done.said["convert from the run"].code) == (0, 0)
    (name,) = [path.name for path in (done.folder / "hf").glob("*.safetensors")]
    assert (done.folder / "hf" / name).read_bytes() == (done.folder / "hf of the run" / name).read_bytes()


def test_a_run_begins_from_the_weights_at_a_url(done, at_url):
    assert done.said["init_from"].code == 0, done.said["init_from"].output
    begun, there = open_checkpoint(str(done.folder / "begun")), open_checkpoint(at_url)
    names = [name for name in there.tensors if name.startswith("model/")]
    assert len(names) > 10
    for name in names:
        assert torch.equal(begun.read(name), there.read(name)), name


def test_a_run_whose_checkpoints_are_at_a_url_is_reported_and_replayed(done):
    assert done.said["report"] == (0, f"{done.folder / 'run' / 'report.html'}\n")
    assert done.said["replay"].code == 0, done.said["replay"].output


@pytest.mark.parametrize("name", ["report of the URL", "replay of the URL"])
def test_what_needs_a_run_directory_refuses_a_url_in_a_line(done, name):
    said = done.said[name]
    assert (said.code, said.output.count("\n")) == (2, 1)
    assert f"{URL} is no run directory" in said.output


def test_no_file_and_no_line_of_a_run_has_a_credential_or_an_endpoint(done):
    for name in ("a start without the store", "generate without the store"):
        assert (done.said[name].code, "503" in done.said[name].output) == (2, True), done.said[name]
    written = {name: said.output.encode() for name, said in done.said.items()}
    written |= {str(path): path.read_bytes() for path in done.folder.rglob("*") if path.is_file()}
    written |= {key: kept.data for key, kept in done.server.objects.items()}
    ends = {path.rpartition(".")[2] for path in written}
    assert {"toml", "jsonl", "json", "html", "bin"} <= ends
    assert any("events.out" in path for path in written)
    port = str(done.server.server_port)
    for forbidden in (*SECRETS.values(), f"127.0.0.1:{port}", f":{port}"):
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
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen([program, "-H", "127.0.0.1", "-p", str(port)], **silent)
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


def train_on_rank(environment: dict[str, str], keys: dict[str, Any], folder: Path, dies_in: int) -> None:
    """train.py on one of two ranks; rank 1 is killed in the save of step `dies_in`, while it uploads."""
    os.environ.update({**environment, "RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())})
    device_peaks.matmul_flops = lambda device, dtype: 1e12  # MFU is not looked at
    if dist.get_rank() == 1:
        honest = Objects.create

        @contextlib.contextmanager
        def create(self: Objects, where: str, name: str) -> Iterator[Any]:
            with honest(self, where, name) as file:
                yield file
                if where == resume.name(dies_in):
                    os.kill(os.getpid(), signal.SIGKILL)

        Objects.create = create
    folder.mkdir(exist_ok=True)
    with (folder / f"stdout-{dist.get_rank()}").open("a") as file, contextlib.redirect_stdout(file):
        assert train.main(flags(keys, folder)) == 0


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
