"""Claims about how ranks start together: one job or none, and why not is said once; by ranks started by hand.

Each rank is a process with RANK, WORLD_SIZE and MASTER_* in its environment, forked from a warm server: so what is
claimed holds without a launcher that ends the others.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import transformers

import dtmega
from dtmega import config, families, mesh, train
from dtmega.checkpoint import found, manifest
from dtmega.checkpoint.files import Disk
from dtmega.checkpoint.manifest import Damaged
from dtmega.checkpoint.remote import Remote
from dtmega.checkpoint.resume import open_checkpoint
from dtmega.distributed import agreement, exit_codes, process
from dtmega.distributed.agreement import Startup
from dtmega.distributed.watchdog import Watch
from dtmega.training import start as start_steps
from tests import keys as table_of_keys
from tests import ranks
from tests.distributed.test_process import free_port
from tests.layouts import write_text
from tests.resumed import KEYS, flags

SMALL = KEYS | {
    "model.hidden_size": 16,
    "model.n_layers": 1,
    "model.n_heads": 2,
    "batch.global_batch_size": 2,
    "batch.rampup": [],
    "train.steps": 2,
    "checkpoint.interval": 1,
    "eval.interval": 0,
}


class Start(NamedTuple):
    """The end of one rank.

    Attributes:
        code: that main returned.
    """

    code: int
    stdout: str
    stderr: str


def start(folder: Path, *keys: dict[str, Any], plant: Callable[[], object] = tuple) -> list[Start]:
    """train.py on as many ranks as there are keys, each with its own, in `folder`/run."""
    argvs = [flags(SMALL | own, folder / "run") for own in keys]
    return ranks.run(len(keys), _one_rank, argvs, free_port(), plant)


def _one_rank(argvs: Sequence[list[str]], port: int, plant: Callable[[], object]) -> Start:
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= place | {"RANK": str(rank), "WORLD_SIZE": str(len(argvs))}
    plant()
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = train.main(argvs[rank])
    return Start(code, out.getvalue(), err.getvalue())


def said(started: list[Start]) -> list[str]:
    """Every line on stderr, of all ranks."""
    return [line for one in started for line in one.stderr.splitlines()]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> dict[str, str]:
    return write_text(tmp_path_factory.mktemp("text"))


def test_ranks_of_one_job_start(tmp_path, text):
    started = start(tmp_path, text, text)
    assert ([one.code for one in started], said(started)) == ([0, 0], [])
    assert (tmp_path / "run" / "checkpoints" / "step-00000002").is_dir()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"optim.lr": 0.02}, "[optim] lr is 0.01 on rank 0, 0.02 on rank 1"),
        ({"mesh.tp": 2}, "[mesh] tp is 1 on rank 0, 2 on rank 1"),  # which would hang in the making of groups
        ({"run.seed": 1, "log.interval": 3}, "[log] interval is 10 on rank 0, 3 on rank 1; [run] seed is 1234 on rank"),
    ],
)
def test_ranks_with_other_keys_are_refused_with_one_line_that_names_keys_and_ranks(tmp_path, text, other, message):
    started = start(tmp_path, text, text | other)
    assert [one.code for one in started] == [exit_codes.REFUSED, exit_codes.REFUSED]
    (line,) = said(started)
    assert line.startswith("dtmega: the ranks do not have the same configuration: " + message)
    assert not (tmp_path / "run").exists()


def test_ranks_with_another_bin_under_the_same_name_are_refused_and_where_it_lies_does_not_matter(tmp_path, text):
    for suffix in (".bin", ".idx"):
        shutil.copy(text["data.path"] + suffix, tmp_path / f"text{suffix}")
    moved = text | {"data.path": str(tmp_path / "text")}
    assert [one.code for one in start(tmp_path, text, moved)] == [0, 0]
    content = bytearray((tmp_path / "text.bin").read_bytes())
    content[1000] = 9 if content[1000] != 9 else 10
    (tmp_path / "text.bin").write_bytes(content)
    started = start(tmp_path / "other", text, moved)
    assert [one.code for one in started] == [exit_codes.REFUSED, exit_codes.REFUSED]
    (line,) = said(started)
    assert line.startswith("dtmega: the ranks do not have the same data: [data] path is [")
    assert line.endswith("on rank 1")


def test_data_that_is_missing_on_some_ranks_is_said_once_with_their_numbers(tmp_path, text):
    three = text | {"batch.global_batch_size": 3}
    missing = three | {"data.path": str(tmp_path / "no" / "such")}
    started = start(tmp_path, three, missing, missing)
    assert [one.code for one in started] == [exit_codes.REFUSED] * 3
    (line,) = said(started)
    assert line.startswith("dtmega: ranks 1, 2: ")
    assert "no/such" in line


@pytest.mark.parametrize("wrong", [{"optim.lr": "fast"}, {"model.vocab_size": 5}])
def test_what_is_wrong_on_all_ranks_is_said_once(tmp_path, text, wrong):
    started = start(tmp_path, text | wrong, text | wrong)
    assert [one.code for one in started] == [exit_codes.REFUSED, exit_codes.REFUSED]
    (line,) = said(started)
    assert not line.startswith("dtmega: rank")


def rank_1_fails(error: Exception) -> None:
    if mesh.rank() == 1:

        def parallelize(*args: object) -> None:
            raise error

        start_steps.parallelize = parallelize


def test_a_refusal_of_one_rank_after_the_process_group_is_made_ends_all(tmp_path, text):
    started = start(tmp_path, text, text, plant=partial(rank_1_fails, ValueError("no such layer")))
    assert ([one.code for one in started], said(started)) == ([2, 2], ["dtmega: rank 1: no such layer"])


def test_what_nobody_expected_on_one_rank_ends_all_with_its_traceback_once(tmp_path, text):
    started = start(tmp_path, text, text, plant=partial(rank_1_fails, TypeError("not foreseen")))
    assert [one.code for one in started] == [1, 1]
    assert said(started)[0] == "dtmega: rank 1: Traceback (most recent call last):"
    assert said(started).count("TypeError: not foreseen") == 1


def rank_1_refuses_while_rank_0_is_away(folder: Path) -> None:
    agreement.PATIENCE_S = 0.2
    rank_1_fails(ValueError("no such layer"))
    honest = start_steps.parallelize

    def parallelize(*args: Any) -> Any:
        while not (folder / "rank 1 has left").exists():
            time.sleep(0.01)
        return honest(*args)

    if mesh.rank() == 0:
        start_steps.parallelize = parallelize
    main = train.main

    def leaving(argv: list[str]) -> int:
        code = main(argv)
        (folder / f"rank {mesh.rank()} has left").touch()
        return code

    train.main = leaving


def test_a_rank_whose_refusal_nobody_reads_says_it_and_leaves_and_the_others_follow(tmp_path, text):
    started = start(tmp_path, text, text, plant=partial(rank_1_refuses_while_rank_0_is_away, tmp_path))
    assert [one.code for one in started] == [exit_codes.REFUSED, exit_codes.REFUSED]
    assert [one.stderr for one in started] == ["", "dtmega: rank 1: no such layer\n"]


def test_damaged_checkpoints_are_named_once_and_all_ranks_leave_with_3(tmp_path, text):
    assert [one.code for one in start(tmp_path, text, text)] == [0, 0]
    for path in tmp_path.glob("run/checkpoints/*/manifest.json"):
        path.write_text("{")
    started = start(tmp_path, text, text)
    assert [one.code for one in started] == [exit_codes.DAMAGED, exit_codes.DAMAGED]
    assert len(said(started)) == len({*said(started)}) == 2
    assert all("damaged: " in line for line in said(started))


def elsewhere(folders: list[Path]) -> None:
    os.chdir(folders[mesh.rank()])


def test_ranks_that_do_not_see_the_files_of_rank_0_are_named(tmp_path, text):
    folders = [tmp_path / "node 0", tmp_path / "node 1"]
    for folder in folders:
        folder.mkdir()
    started = start(Path(), text, text, plant=partial(elsewhere, folders))
    assert [one.code for one in started] == [exit_codes.REFUSED, exit_codes.REFUSED]
    (line,) = said(started)
    assert line.startswith("dtmega: rank 1: cannot see what rank 0 has written in run/checkpoints")
    assert [path.name for path in (folders[0] / "run" / "checkpoints").iterdir()] == [".lock"]


def written_again(source: Path, target: Path) -> None:
    """The same checkpoint but for the version that wrote it, whole as the first one is."""
    shutil.copytree(source, target)
    checkpoint = open_checkpoint(str(target))
    checkpoint.manifest.state["versions"]["python"] = "another"
    (target / manifest.NAME).write_bytes(manifest.dump(checkpoint.manifest))


@pytest.mark.parametrize("key", ["checkpoint.resume", "model.init_from"])
def test_ranks_that_would_go_on_from_other_checkpoints_of_one_name_are_refused(tmp_path, text, key):
    folders = [tmp_path / "node 0", tmp_path / "node 1"]
    assert alone(tmp_path / "first", text | {"train.steps": 1}) == 0
    for folder, write in zip(folders, (shutil.copytree, written_again), strict=True):
        write(tmp_path / "first" / "checkpoints" / "step-00000001", folder / "step-00000001")
    keys = text | {key: "./step-00000001"}
    started = start(tmp_path, keys, keys, plant=partial(elsewhere, folders))
    assert [one.code for one in started] == [exit_codes.REFUSED, exit_codes.REFUSED]
    (line,) = said(started)
    assert line.startswith("dtmega: the ranks do not have the same checkpoints: step-00000001 is ")


def rank_1_reads_nothing() -> None:
    """Its file system is late, or another one."""
    if mesh.rank() == 1:

        def missing(*args: object) -> None:
            raise Damaged("manifest.json is missing")

        found.Checkpoint = missing


def test_a_checkpoint_that_only_rank_0_can_read_is_refused_with_the_rank_and_advice(tmp_path, text):
    assert alone(tmp_path / "run", text) == 0
    keys = text | {"train.steps": 3}
    started = start(tmp_path, keys, keys, plant=rank_1_reads_nothing)
    assert [one.code for one in started] == [exit_codes.REFUSED, exit_codes.REFUSED]
    (line,) = said(started)
    assert line.startswith("dtmega: rank 1: cannot read what rank 0 has found, ")
    assert line.endswith(
        "/step-00000001: manifest.json is missing; all ranks need one file system there ([run] dir, [checkpoint] dir)"
    )


def test_where_a_library_behind_a_url_refuses_to_write_the_run_is_refused_with_the_key(
    tmp_path, text, monkeypatch, capsys
):
    def refuse(*args: object) -> None:
        raise RuntimeError("403 Forbidden")

    monkeypatch.setattr(Remote, "make", refuse)
    assert alone(tmp_path / "run", text | {"checkpoint.dir": "memory://refused"}) == exit_codes.REFUSED
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == "dtmega: cannot write to memory://refused/: 403 Forbidden ([run] dir, [checkpoint] dir)"


def nothing(path: Path) -> None:
    """A link to where nothing can be made."""
    path.symlink_to("/proc/nowhere/file")


@pytest.mark.parametrize(
    ("name", "plant", "message"),
    [
        (".lock", Path.mkdir, "cannot write to .*run: Is a directory"),
        ("config.toml", Path.mkdir, "files of the run: .* Is a directory: .*config.toml"),
        ("metrics.jsonl", nothing, "files of the run: .* No such file or directory: .*metrics.jsonl"),
        ("tensorboard", Path.touch, "files of the run: .* (File exists|Not a directory): .*tensorboard"),
        ("checkpoints", Path.touch, r"cannot write to .*checkpoints: .* \(\[checkpoint\] dir\)"),
    ],
)
def test_what_cannot_be_written_is_one_line_and_exit_code_2(tmp_path, text, name, plant, message):
    (tmp_path / "run").mkdir()
    plant(tmp_path / "run" / name)
    (one,) = start(tmp_path, text | {"log.tensorboard": True})
    assert one.code == exit_codes.REFUSED
    (line,) = said([one])
    assert re.match(f"dtmega: {message}", line), line


def test_a_checkpoint_folder_that_cannot_be_made_names_its_key(tmp_path, text):
    (tmp_path / "file").touch()
    (one,) = start(tmp_path, text | {"checkpoint.dir": str(tmp_path / "file" / "checkpoints")})
    assert one.code == exit_codes.REFUSED
    (line,) = said([one])
    assert re.match(r"dtmega: cannot write to .*checkpoints: Not a directory \(\[checkpoint\] dir\)$", line)


def test_what_only_rank_0_cannot_write_is_said_once_and_ends_all_ranks(tmp_path, text):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tensorboard").touch()
    keys = text | {"log.tensorboard": True}
    started = start(tmp_path, keys, keys)
    assert [one.code for one in started] == [exit_codes.REFUSED, exit_codes.REFUSED]
    (line,) = said(started)
    assert "tensorboard" in line


def full_disk() -> None:
    """When the process says in the lock that it is its own."""

    def ftruncate(fd: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    process.os.ftruncate = ftruncate


def test_a_disk_that_is_full_at_the_start_is_one_line(tmp_path, text):
    (one,) = start(tmp_path, text, plant=full_disk)
    assert one.code == exit_codes.REFUSED
    (line,) = said([one])
    assert re.match(r"dtmega: cannot write to .*run: No space left on device \(\[run\] dir\)$", line)


# One process is enough for these.


def alone(folder: Path, keys: dict[str, Any]) -> int:
    try:
        return train.main(flags(SMALL | keys, folder))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_a_checkpoint_that_the_run_before_publishes_before_it_ends_is_the_one_to_go_on_from(tmp_path, text, capsys):
    """The same command again, while the first one still saves."""
    assert alone(tmp_path / "run", text) == 0
    newest = tmp_path / "run" / "checkpoints" / "step-00000002"
    newest.rename(tmp_path / "being saved")
    first = process.Claim(tmp_path / "run")

    def publish_and_leave() -> None:
        (tmp_path / "being saved").rename(newest)
        first.close()

    threading.Timer(0.5, publish_and_leave).start()
    assert alone(tmp_path / "run", text | {"train.steps": 3}) == 0
    assert "resumed at step 2" in capsys.readouterr().out
    assert not [*tmp_path.glob("run/checkpoints/superseded-*")]


def configuration(**values: Any) -> config.Config:
    sections: dict[str, dict[str, Any]] = {"train": {"steps": 1}}
    for key, value in values.items():
        section, _, name = key.partition("__")
        sections.setdefault(section, {})[name] = value
    return config.validate(sections, "a test")


@pytest.mark.parametrize("shared", ["elsewhere", "a/checkpoints"])
def test_two_runs_on_one_folder_of_checkpoints_are_refused(tmp_path, monkeypatch, shared):
    monkeypatch.setattr(found, "Claim", partial(process.Claim, patience_s=0))
    monkeypatch.chdir(tmp_path)
    first = {"run__dir": "a"} if shared == "a/checkpoints" else {"run__dir": "a", "checkpoint__dir": shared}
    claims = [*found.claims(configuration(**first))]
    second = found.claims(configuration(run__dir="b", checkpoint__dir=shared))
    claims.append(next(second))
    with pytest.raises(ValueError, match=rf"^{shared} is being written by process .* \(\[checkpoint\] dir\)$"):
        next(second)
    for claim in claims:
        claim.close()


def test_a_run_may_keep_its_checkpoints_in_the_run_directory_itself(tmp_path):
    for claim in [*found.claims(configuration(run__dir=str(tmp_path), checkpoint__dir=str(tmp_path)))]:
        claim.close()


def test_a_url_cannot_be_claimed_and_that_is_said(tmp_path, capsys):
    (claim,) = found.claims(configuration(run__dir=str(tmp_path), checkpoint__dir="memory://a-run"))
    claim.close()
    assert (
        "memory://a-run cannot be locked: a second run that writes there would not be noticed"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("resumed", "advice"),
    [
        ("auto", "; the same command goes on from there"),
        ("none", "; with --checkpoint.resume auto the same command goes on from there; as it is, it would start anew"),
        (
            "step-00000001",
            "; with --checkpoint.resume auto the same command goes on from there; as it is, it would go back",
        ),
    ],
)
def test_the_message_of_a_stop_names_the_command_that_goes_on(tmp_path, text, capsys, resumed, advice):
    if resumed == "step-00000001":
        assert alone(tmp_path, text) == 0
        resumed = str(tmp_path / "checkpoints" / resumed)
    assert alone(tmp_path, text | {"train.steps": 4, "train.exit_interval": 3, "checkpoint.resume": resumed}) == 0
    assert advice in capsys.readouterr().out


def test_reading_a_checkpoint_is_work_that_is_waited_for(tmp_path, text, monkeypatch):
    assert alone(tmp_path, text) == 0
    phases: list[str] = []
    met: list[Startup] = []
    beat, wait_for_all = Watch.beat, Startup.wait_for_all

    def noted_beat(self: Watch, step: int, phase: str, *rest: Any) -> None:
        phases.append(phase)
        beat(self, step, phase, *rest)

    def noted_wait(self: Startup) -> None:
        met.append(self)
        wait_for_all(self)

    monkeypatch.setattr(Watch, "beat", noted_beat)
    monkeypatch.setattr(Startup, "wait_for_all", noted_wait)
    assert alone(tmp_path, text | {"train.steps": 3}) == 0
    tensors = open_checkpoint(str(tmp_path)).manifest.tensors
    assert (phases.count("load"), len(met)) == (len(tensors), 1)


@pytest.mark.parametrize("name", ["bloom", "hf"])
def test_ranks_compare_every_key_but_where_the_data_lie_and_versions_and_device(name):
    rows = [row for row in table_of_keys.read() if row.family in ([], ["--model.name", name])]
    keys_of_all = {f"[{row.section}] {row.key}" for row in rows} - {"[data] path", "[data] tokenizer"}
    versions = {"dtmega": dtmega.__version__, "torch": torch.__version__}
    versions |= {"transformers": transformers.__version__} if name == "hf" else {}
    cfg = configuration(model__name=name, optim__lr=0.5)
    compared = agreement.same_job(cfg, torch.device("cuda", 3), families.of(cfg.model).libraries)
    assert compared.keys() == keys_of_all | versions.keys() | {"device"}
    assert (compared["[optim] lr"], compared["device"]) == (0.5, "cuda")
    assert {k: compared[k] for k in versions} == versions


def test_a_run_watches_for_its_timeout_and_collectives_give_up_after_twice_that(tmp_path, text, monkeypatch):
    seen: dict[str, Any] = {}
    begin, watching = mesh.start, train.Watch

    def start(device: Any, sizes: Any, timeout_s: float, store: Any, *, ep: int) -> Any:
        seen["collective"] = timeout_s
        return begin(device, sizes, timeout_s, store, ep=ep)

    def watch(grace_s: float, timeout_s: float, rank: int, *others: Any) -> Watch:
        seen.update(grace=grace_s, hang=timeout_s, rank=rank)
        return watching(grace_s, timeout_s, rank, *others)

    monkeypatch.setattr(mesh, "start", start)
    monkeypatch.setattr(train, "Watch", watch)
    assert alone(tmp_path, text | {"run.timeout_s": 50.0, "run.grace_s": 7.0, "train.steps": 1}) == 0
    assert seen == {"grace": 7.0, "hang": 50.0, "collective": 100.0, "rank": 0}


def test_a_reader_keeps_what_a_run_that_goes_on_deletes(tmp_path, text):
    once = text | {"checkpoint.keep": 1}
    assert alone(tmp_path, once) == 0
    checkpoint = open_checkpoint(str(tmp_path))
    assert alone(tmp_path, once | {"train.steps": 3}) == 0
    assert not Path(checkpoint.path).exists()
    checkpoint.verify()
    assert checkpoint.bytes_read == sum(checkpoint.manifest.files.values())


def test_a_checkpoint_that_is_deleted_while_it_is_opened_is_not_taken_for_damaged(tmp_path, text, monkeypatch):
    assert alone(tmp_path, text) == 0
    honest = Disk.open

    def open_late(self: Disk, folder: str, name: str) -> Any:
        if folder == "step-00000002" and name != "manifest.json":
            shutil.rmtree(self.root / folder)
        return honest(self, folder, name)

    monkeypatch.setattr(Disk, "open", open_late)
    assert open_checkpoint(str(tmp_path)).folder == "step-00000001"
