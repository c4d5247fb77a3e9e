"""Train on a Ray cluster: Ray Train places the ranks and restarts them; each starts train.py as its child process.

    pip install -c constraints.txt -e '.[ray]'
    python launch/ray_train.py --ranks 16 --gpus -- --config bloom-560m.toml --run.dir /shared/bloom-560m

What stands after `--` is for train.py. A signal to this process (SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2) makes the
run save and end; the same signal again ends it at once. The exit code is that of rank 0. docs/clusters.md says more.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.train.torch import TorchConfig, TorchTrainer

TRAIN = Path(__file__).resolve().parent.parent / "train.py"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
POLL_S = 1.0


def resuming_helps(code: int) -> bool:
    """True if the same command resumes the run: it was stopped (75), stuck (76), hung (77) or killed (< 0)."""
    return code < 0 or code in (75, 76, 77)


class Ended(Exception):
    """Raised in a worker of Ray to make Ray start all ranks again."""


@ray.remote(num_cpus=0)
class Stop:
    """A request to save and end, which the driver makes and the ranks look for."""

    def __init__(self) -> None:
        self._requested = False

    def request(self) -> None:
        self._requested = True

    def requested(self) -> bool:
        return self._requested


def run_rank(job: dict[str, Any]) -> int:
    """Run one rank until it ends, and return its exit code (128 + N if signal N has killed it).

    Ray Train calls this in each of its workers, with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT set. At
    that port the worker of rank 0 serves a store, as torchrun's agent does. So the variables added here are torchrun's:
    a rank waits for late ranks as long as [run] timeout_s, and is killed when its worker ends.

    Args:
        job: `arguments` of train.py, its working `folder`, and the actor `stop`.

    Raises:
        Ended: the same command resumes the run, and nobody has asked it to end.
    """
    context = ray.train.get_context()
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": context.get_experiment_name()}
    command = [sys.executable, str(TRAIN), *job["arguments"]]
    child = subprocess.Popen(command, cwd=job["folder"], env=os.environ | agent)
    signalled = False
    while child.poll() is None:
        time.sleep(POLL_S)
        if not signalled and ray.get(job["stop"].requested.remote()):
            signalled = True
            child.send_signal(signal.SIGTERM)
    code = child.returncode
    if resuming_helps(code) and not ray.get(job["stop"].requested.remote()):
        raise Ended(f"rank {context.get_world_rank()} has ended with {code}")
    return code if code >= 0 else 128 - code


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, required=True, help="number of processes that train")
    parser.add_argument("--gpus", action="store_true", help="each rank on a GPU of its own (default: on a CPU)")
    parser.add_argument("--max-failures", type=int, default=10, help="restarts of all ranks (default %(default)s)")
    parser.add_argument(
        "--storage", default="ray", help="shared folder for Ray Train's own files (default %(default)s)"
    )
    parser.add_argument("arguments", nargs="+", help="arguments of train.py, after --")
    args = parser.parse_args(argv)
    ray.init()
    stop = Stop.remote()
    trainer = TorchTrainer(
        run_rank,
        train_loop_config={"arguments": args.arguments, "folder": os.getcwd(), "stop": stop},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=args.ranks, use_gpu=args.gpus),
        run_config=ray.train.RunConfig(
            storage_path=str(Path(args.storage).resolve()),
            failure_config=ray.train.FailureConfig(max_failures=args.max_failures),
        ),
    )

    def save_and_end(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        stop.request.remote()

    for number in SIGNALS:
        signal.signal(number, save_and_end)
    # In a thread, because on the main thread Ray would take SIGINT for itself, and kill the ranks without saving.
    with ThreadPoolExecutor(1) as thread:
        try:
            return thread.submit(trainer.fit).result().return_value
        except ray.train.TrainingFailedError as error:
            print(error)
            return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
