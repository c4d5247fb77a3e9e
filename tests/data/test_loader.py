"""Batches: masks against Megatron's loop, slices against the global batch, resume against never stopping; signals."""

import multiprocessing
import os
import random
import select
import signal
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from dtmega.config import Batch, Data
from dtmega.data import loader, workers
from dtmega.data.indexed_files.dataset import IndexedDataset
from dtmega.data.indexed_files.writer import IndexedWriter
from dtmega.data.loader import TrainBatches, eval_batches
from dtmega.data.lost import DataLost
from dtmega.data.objectives.next_token import NextTokenRows, document_ids, position_ids
from dtmega.data.objectives.rows import IGNORED, Rows
from dtmega.data.sampling.samples import Samples
from tests.ranks import forks

EOD = 0
S = 8
# Two workers on a machine of one core are what torch warns of.
MANY_WORKERS = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    prefix = tmp_path_factory.mktemp("data") / "corpus"
    rng = np.random.default_rng(0)
    with IndexedWriter(prefix, np.dtype("<u2")) as writer:
        for length in rng.integers(1, 12, 60):
            writer.add([*rng.integers(1, 1000, length), EOD])
    return Samples(IndexedDataset(prefix), (0, 60), S, 1234, "train")


def train_batches(samples, rank=0, world=1, workers=0, rampup=(), start_sample=0, **flags):
    data = Data(seq_len=S, num_workers=workers, **flags)
    batch = Batch(micro_batch_size=2, global_batch_size=16, rampup=list(rampup))
    return TrainBatches(NextTokenRows(samples, data, EOD), data, batch, rank, world, start_sample=start_sample)


def take(batches, steps):
    """Per step: global size, and sample ids, tokens and labels of this rank."""
    return [
        (step.first_sample, step.samples, *(torch.cat([m[k] for m in step.microbatches]).tolist() for k in KEYS))
        for step in islice(batches, steps)
    ]


KEYS = ("sample_ids", "tokens", "labels", "places")


def megatron_masks(tokens, eod_mask_loss, reset_position_ids, reset_attention_mask):
    """`get_ltor_masks_and_position_ids`: loss mask [B, S], positions [B, S], may attend [B, S, S]."""
    size, length = tokens.shape
    loss_mask = torch.ones(size, length)
    if eod_mask_loss:
        loss_mask[tokens == EOD] = 0.0
    attention_mask = torch.tril(torch.ones(size, length, length))
    positions = torch.arange(length).repeat(size, 1)
    for b in range(size):
        eod_index = positions[b, tokens[b] == EOD].clone()
        prev_index = 0
        for i in eod_index.tolist():
            if reset_attention_mask:
                attention_mask[b, (i + 1) :, : (i + 1)] = 0
            if reset_position_ids:
                positions[b, (i + 1) :] -= i + 1 - prev_index
                prev_index = i + 1
    return loss_mask, positions, attention_mask > 0.5


@pytest.fixture
def tokens():
    tokens = torch.randint(0, 4, (64, 16), generator=torch.Generator().manual_seed(0))
    tokens[0], tokens[1] = EOD, 1
    tokens[2, 0] = tokens[3, -1] = EOD
    return tokens


def test_positions_start_again_where_megatrons_do(tokens):
    _, positions, _ = megatron_masks(tokens, False, True, False)
    assert torch.equal(position_ids(tokens, EOD), positions)


def test_equal_document_ids_are_where_megatron_allows_attention(tokens):
    _, _, allowed = megatron_masks(tokens, False, False, True)
    ids = document_ids(tokens, EOD)
    assert torch.equal((ids.unsqueeze(2) == ids.unsqueeze(1)).tril(), allowed)


def test_document_ids_count_from_0_within_the_sample():
    ids = document_ids(torch.tensor([[5, EOD, EOD, 7, 8, EOD, 9]]), EOD)
    assert ids.tolist() == [[0, 0, 1, 2, 2, 2, 3]]


def test_eod_mask_loss_ignores_the_labels_that_megatron_gives_no_loss(samples):
    plain, masked = (next(train_batches(samples, eod_mask_loss=on)).microbatches for on in (False, True))
    for a, b in zip(plain, masked, strict=True):
        loss_mask, _, _ = megatron_masks(a["tokens"], True, False, False)
        assert torch.equal(b["labels"], torch.where(loss_mask > 0, a["labels"], IGNORED))


def test_a_microbatch_holds_the_samples_it_names(samples):
    for microbatch in next(train_batches(samples)).microbatches:
        for i, g in enumerate(microbatch["sample_ids"].tolist()):
            row = [*microbatch["tokens"][i].tolist(), int(microbatch["labels"][i, -1])]
            assert row == samples[g].tolist()
            assert microbatch["labels"][i].tolist() == row[1:]
            assert microbatch["places"][i].tolist() == list(range(S))


@pytest.mark.parametrize(
    ("flag", "more"), [("reset_position_ids", {"position_ids"}), ("reset_attention_mask", {"document_ids"})]
)
def test_positions_and_documents_come_only_when_asked_for(samples, flag, more):
    for on in (False, True):
        (microbatch, *_) = next(train_batches(samples, **{flag: on})).microbatches
        assert set(microbatch) == {*KEYS} | (more if on else set())


def test_tensors_are_contiguous_int64_of_the_micro_batch_size(samples):
    flags = {"reset_position_ids": True, "reset_attention_mask": True}
    for microbatch in next(train_batches(samples, **flags)).microbatches:
        for name, tensor in microbatch.items():
            assert (tensor.dtype, tensor.is_contiguous()) == (torch.int64, True)
            assert list(tensor.shape) == ([2] if name == "sample_ids" else [2, S])


@pytest.mark.parametrize("world", [2, 4])
def test_the_ranks_slices_together_are_the_global_batch(samples, world):
    ranks = [take(train_batches(samples, rank, world), 3) for rank in range(world)]
    for whole, *parts in zip(take(train_batches(samples), 3), *ranks, strict=True):
        joined = [[row for part in parts for row in part[k]] for k in range(2, 2 + len(KEYS))]
        assert (*parts[0][:2], *joined) == whole


def test_global_batches_grow_with_the_ramp_up(samples):
    # 6 increments of 2 over 60 samples, so one for each 10 consumed samples, and the full size after the 60th.
    steps = take(train_batches(samples, rampup=(4, 2, 60)), 10)
    assert [step[1] for step in steps] == [4, 4, 4, 6, 6, 8, 10, 12, 14, 16]
    assert [g for step in steps for g in step[2]] == list(range(84))
    assert [step[0] for step in steps] == [step[2][0] for step in steps]


@pytest.mark.parametrize(("rampup", "world", "size"), [((), 3, 16), ((4, 4, 60), 4, 4), ((8, 4, 60), 4, 12)])
def test_each_size_of_the_ramp_up_must_divide_before_training_starts(samples, rampup, world, size):
    unit = 2 * world
    with pytest.raises(ValueError, match=rf"{size} sequences .* 2 x {world} = {unit}: {size} % {unit} = "):
        train_batches(samples, 0, world, rampup=rampup)


@pytest.mark.parametrize("stop", range(6))
def test_resume_at_any_step_continues_as_if_it_never_stopped(samples, stop):
    first, second = (train_batches(samples, rampup=(4, 4, 40)) for _ in range(2))
    expected = take(second, 6)
    assert take(first, stop) == expected[:stop]
    second.load_state_dict(first.state_dict())
    assert take(second, 6 - stop) == expected[stop:]


def states():
    """Of the global generators."""
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002


# Each worker imports torch. That a run goes on with one is in test_train.py.
@MANY_WORKERS
@pytest.mark.parametrize(
    ("before", "after"), [*(pytest.param(*n, marks=pytest.mark.full) for n in ((1, 2), (0, 1))), (2, 0)]
)
def test_neither_the_number_of_workers_nor_what_they_prefetched_is_seen_on_resume_or_moves_generators(
    samples, before, after
):
    generators = states()
    expected = take(train_batches(samples), 9)
    first = train_batches(samples, workers=before)
    assert take(first, 3) == expected[:3]
    second = train_batches(samples, workers=after)
    second.load_state_dict(first.state_dict())
    first.close()
    assert take(second, 6) == expected[3:]
    second.close()
    assert states() == generators


@pytest.mark.parametrize("sending", [True, False])
def test_a_worker_that_is_killed_is_named(samples, monkeypatch, sending):
    """Also where torch meets a broken connection, because the worker was sending a batch."""
    others = set(multiprocessing.active_children())
    batches = train_batches(samples, workers=1)
    next(batches)
    (worker,) = set(multiprocessing.active_children()) - others
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    if sending:
        monkeypatch.setattr(batches._iterator, "_iterator", map(os.close, [-1]))
    expected = rf"data worker with process number {worker.pid} was killed by SIGKILL .*\[data\] num_workers"
    with pytest.raises(DataLost, match=expected) as lost:
        take(batches, 10)  # more than was prefetched
    assert lost.value.is_temporary
    batches.close()


def test_resume_at_another_number_of_ranks_continues_at_the_same_sample(samples):
    first = train_batches(samples, 1, 2)
    take(first, 3)
    second = train_batches(samples)
    second.load_state_dict(first.state_dict())
    assert take(second, 2) == take(train_batches(samples), 5)[3:]


def test_the_state_is_the_number_of_delivered_samples(samples):
    batches = train_batches(samples, rank=1, world=2, start_sample=100)
    take(batches, 2)
    assert batches.state_dict() == {"samples": 132}


class SlowRows(Rows):
    """Each batch takes longer than a trainer should wait."""

    def __getitem__(self, indices):
        time.sleep(2 * loader.MOMENT_S)
        return {}


def test_left_to_itself_a_loader_has_a_worker_only_where_a_batch_takes_long(samples, monkeypatch):
    started = []
    monkeypatch.setattr(workers, "StatefulDataLoader", lambda *_, num_workers, **__: [started.append(num_workers)])
    data, batch = Data(seq_len=S), Batch(micro_batch_size=2, global_batch_size=16)
    slow = TrainBatches(SlowRows(), data, batch, 0, 1)
    slow.start()
    slow.close()
    assert started == [1]
    monkeypatch.setattr(loader, "MOMENT_S", 60.0)
    TrainBatches(NextTokenRows(samples, data, EOD), data, batch, 0, 1).start()
    assert started == [1]


def test_what_was_started_early_is_kept_for_the_sample_it_is_at_and_dropped_for_another(samples):
    batches = train_batches(samples)
    batches.start()
    early = batches._iterator
    batches.load_state_dict({"samples": 0})
    next(batches)
    assert early is not None
    assert next(early)["sample_ids"].tolist() == list(range(16, 32))
    batches.load_state_dict({"samples": 48})
    assert next(batches).microbatches[0]["sample_ids"].tolist() == [48, 49]


def test_the_global_generators_are_not_moved(samples):
    before = states()
    next(train_batches(samples))
    assert states() == before


def evaluate(samples, rank=0, world=1, steps=3):
    batch = Batch(micro_batch_size=2, global_batch_size=16, rampup=[4, 4, 1000])
    rows = NextTokenRows(samples, Data(seq_len=S), EOD)
    return take(eval_batches(rows, batch, rank, world, steps), steps + 1)


def test_evaluation_reads_the_same_full_batches_each_time(samples):
    first = evaluate(samples)
    assert [step[:3] for step in first] == [(k, 16, list(range(k, k + 16))) for k in (0, 16, 32)]
    assert evaluate(samples) == first


def test_an_evaluation_whose_batch_does_not_divide_is_refused(samples):
    with pytest.raises(ValueError, match=r"16 sequences .* 2 x 3 = 6: 16 % 6 = "):
        evaluate(samples, 0, 3)


def test_evaluation_is_sliced_over_ranks_as_training_is(samples):
    for whole, a, b in zip(evaluate(samples), evaluate(samples, 0, 2), evaluate(samples, 1, 2), strict=True):
        assert a[2] + b[2] == whole[2]


def test_evaluation_of_a_small_split_goes_on_into_its_next_epoch(samples):
    in_an_epoch = samples.n_tokens // S
    steps = in_an_epoch // 16 + 2
    seen = [g for step in evaluate(samples, steps=steps) for g in step[2]]
    assert seen == list(range(16 * steps))


TRAINER = """
import multiprocessing, os, signal, sys
from dtmega.config import Batch, Data
from dtmega.data.indexed_files.dataset import IndexedDataset
from dtmega.data.loader import TrainBatches
from dtmega.data.objectives.next_token import NextTokenRows
from dtmega.data.sampling.samples import Samples

def main(prefix, ending):
    heard = set()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, frame: heard.add(number))
    samples = Samples(IndexedDataset(prefix), (0, 60), 8, 1234, "train")
    data = Data(seq_len=8, num_workers=1)
    batches = TrainBatches(NextTokenRows(samples, data, 0), data, Batch(), 0, 1)
    print("starting", flush=True)
    next(batches)
    print(*(process.pid for process in multiprocessing.active_children()), flush=True)
    sys.stdin.readline()
    for _ in range(10):  # more than was prefetched
        next(batches)
    print(len(heard), flush=True)
    if ending == "exception":
        raise KeyError("the frames of this traceback keep the batches alive")

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


@pytest.fixture
def start_trainer(samples, tmp_path):
    """Starts a trainer with one worker in a process group of its own; it waits for a line on stdin to go on."""
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER)
    started = []

    def start(ending):
        command = [sys.executable, "-W", "error", str(script), samples.dataset.prefix, ending]
        root = str(Path(__file__).resolve().parents[2])
        env = os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        started.append(subprocess.Popen(command, env=env, text=True, start_new_session=True, **pipes))
        assert started[-1].stdout.readline() == "starting\n", started[-1].stderr.read()
        return started[-1]

    yield start
    for trainer in started:
        trainer.kill()
        trainer.communicate()


def send_all(trainer):
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        os.killpg(trainer.pid, number)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("ending", [pytest.param("return", marks=pytest.mark.full), "exception"])
def test_workers_sit_out_signals_to_the_process_group_and_do_not_keep_a_trainer_that_ends(start_trainer, ending):
    trainer = start_trainer(ending)
    for _ in range(3):
        while not select.select([trainer.stdout], [], [], 0.05)[0]:  # while the worker imports
            send_all(trainer)
        send_all(trainer)
    out, err = trainer.communicate("go on\n", timeout=120)
    assert out.splitlines()[1:] == ["5"]
    if ending == "return":
        assert (trainer.returncode, err) == (0, "")
    else:
        assert err.startswith("Traceback (most recent call last):\n  File")
        assert (trainer.returncode, err.splitlines()[-1].partition(":")[0]) == (1, "KeyError")


def end_by_itself(rows, folder: str, killed: bool) -> None:
    """A trainer with one worker, whose number it leaves in a file; it ends by SIGKILL, or says how many are left.

    stderr goes to a pipe, also that of what it has started.
    """
    os.dup2(os.open(Path(folder, "stderr"), os.O_WRONLY), sys.stderr.fileno())
    batches = TrainBatches(rows, Data(seq_len=S, num_workers=1), Batch(), 0, 1)
    next(batches)
    (worker,) = multiprocessing.active_children()
    Path(folder, "worker").write_text(str(worker.pid))
    if killed:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(10):  # more than was prefetched
        next(batches)
    batches.close()
    os._exit(len(multiprocessing.active_children()))


def ended(samples, folder: Path, killed: bool) -> tuple[int, int, str]:
    """Exit code of such a trainer, its worker, and what was said on stderr until the last of its processes was gone."""
    os.mkfifo(folder / "stderr")
    reader = os.open(folder / "stderr", os.O_RDONLY | os.O_NONBLOCK)
    rows = NextTokenRows(samples, Data(seq_len=S, num_workers=1), EOD)
    (trainer,) = forks().run(1, end_by_itself, rows, str(folder), killed)
    os.set_blocking(reader, True)
    with open(reader) as stderr:
        said = stderr.read()
    return trainer.code, int((folder / "worker").read_text()), said


def test_workers_end_with_a_trainer_that_is_killed(samples, tmp_path):
    code, worker, _ = ended(samples, tmp_path, killed=True)
    assert code == -signal.SIGKILL
    deadline = time.monotonic() + 60
    while is_running(worker) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_running(worker)


def test_a_closed_loader_leaves_nothing_behind(samples, tmp_path):
    code, worker, said = ended(samples, tmp_path, killed=False)
    assert (code, is_running(worker), said) == (0, False, "")
