"""Compare the numbers of two commits, bit for bit: `python benchmarks/commits.py OLD [NEW]`.

    python benchmarks/commits.py HEAD               the working tree beside its last commit
    python benchmarks/commits.py main~3 main        one commit beside another
    python benchmarks/commits.py HEAD --only pp moe only rows whose names contain one of these words

Each small configuration trains for ten steps on one process, on two along each axis that its family has, and as an
exact run, on CPU processes of this machine with one thread each. A row is equal if both trees agree in every loss, norm
and validation loss, and in the digest of each tensor of the last checkpoint. A row that a tree refuses is not equal.
The exit code is 1 if a row is not equal.

The rows of a commit are kept in `.cache/commits` under the commit, the version of torch and the row, so that a second
comparison with the same commit trains only on the other side.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / ".cache" / "commits"
LIMIT_S = 300
SHOWN_NAMES = 3  # tensors that a row names if they differ

SHORT = {
    "run.device": "cpu",
    "precision.params": "float32",
    "train.steps": 10,
    "train.drift_interval": 1,
    "data.num_workers": 0,
    "batch.micro_batch_size": 1,
    "batch.global_batch_size": 4,
    "eval.interval": 5,
    "eval.steps": 1,
    "eval.sample_tokens": 4,
    "log.tensorboard": False,
    "log.params_norm": True,
    "checkpoint.interval": 0,
}
SHORTER = {"data.seq_len": 64}
# The shipped T5 pairs lengths of encoder and decoder, and conversations must fit into a row.
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "bloom": SHORTER,
    "gpt": SHORTER,
    "llama": SHORTER,
    "prefix-lm": SHORTER,
    "moe": SHORTER,
    "bert": SHORTER,
    "t5": {},
    "sft": {"train.epochs": 0, "model.init_from": ""},
    "hf": SHORTER | {"data.tokenizer": "stdlib-8k"},
}
EXACT = {"run.exact": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "dp_shard 2": {"mesh.dp_shard": 2},
    "dp_replicate 2": {"mesh.dp_replicate": 2},
    "tp 2": {"mesh.tp": 2},
    "pp 2": {"mesh.pp": 2},
    "cp 2": {"mesh.cp": 2},
    "ep 2": {"mesh.dp_shard": 2, "mesh.ep": 2},
    "exact": EXACT,
    "exact, dp_shard 2": EXACT | {"mesh.dp_shard": 2},
}


def rows(words: list[str]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Name of each row whose name contains one of the words -> its configuration, and its keys."""
    every = {
        f"{name}, {layout}": (name, SHORT | keys | axes)
        for name, keys in CONFIGURATIONS.items()
        for layout, axes in LAYOUTS.items()
        if layout != "ep 2" or name == "moe"
    }
    return {name: row for name, row in every.items() if any(word in name for word in words)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", help="commit")
    parser.add_argument("new", nargs="?", help="commit (the working tree)")
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD")
    parser.add_argument("--rows-of", type=Path, help=argparse.SUPPRESS)  # the tree of this process
    args = parser.parse_args()
    if args.rows_of:
        train_rows(args.rows_of, json.loads(sys.stdin.read()))
        return 0
    asked = rows(args.only)
    old = results(args.old, asked)
    new = results(args.new, asked)
    different = 0
    for name in asked:
        verdict = difference(old[name], new[name])
        different += verdict != ""
        print(f"{name}: {verdict or 'equal'}")
    print(f"{len(asked) - different} of {len(asked)} rows are equal")
    return 1 if different else 0


def difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Description of the first difference between two results; '' if there is none."""
    for which, result in (("old", old), ("new", new)):
        if "refused" in result:
            return f"the {which} tree refuses it: {result['refused']}"
    for line in range(max(len(old["metrics"]), len(new["metrics"]))):
        before, after = (result["metrics"][line : line + 1] for result in (old, new))
        if before != after:
            return f"metrics line {line + 1}: {before}, then {after}"
    names = [
        name
        for name in sorted(old["tensors"].keys() | new["tensors"].keys())
        if old["tensors"].get(name) != new["tensors"].get(name)
    ]
    return f"{len(names)} tensors differ, such as {', '.join(names[:SHOWN_NAMES])}" if names else ""


def results(commit: str | None, asked: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """The result of each row, from `.cache/commits` or trained now.

    Args:
        commit: name of the commit; None for the working tree, whose results are not kept.
        asked: rows, from `rows`.
    """
    if commit is None:
        return trained(ROOT, asked, None)
    full_name = git("rev-parse", f"{commit}^{{commit}}").strip()
    import torch

    kept = {name: KEPT / f"{digest(full_name, torch.__version__, name, row)}.json" for name, row in asked.items()}
    missing = {name: asked[name] for name, path in kept.items() if not path.exists()}
    if missing:
        with tempfile.TemporaryDirectory() as folder:
            archive = subprocess.run(["git", "-C", ROOT, "archive", full_name], check=True, capture_output=True).stdout
            subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
            trained(Path(folder), missing, kept)
    return {name: json.loads(path.read_text()) for name, path in kept.items()}


def trained(
    tree: Path, asked: dict[str, tuple[str, dict[str, Any]]], kept: dict[str, Path] | None
) -> dict[str, dict[str, Any]]:
    """Train the rows with the code of a tree, in a process of its own. Each result is written to its path in `kept`."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        child = subprocess.Popen(
            [sys.executable, __file__, "-", "--rows-of", str(tree)],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(json.dumps(asked))
        child.stdin.close()
        for line in child.stdout:
            name, result = json.loads(line)
            found[name] = result
            if kept is not None:
                kept[name].parent.mkdir(parents=True, exist_ok=True)
                kept[name].write_text(json.dumps(result))
        if child.wait():
            raise SystemExit(f"the rows of {tree} ended with exit code {child.returncode}")
    return found


def train_rows(tree: Path, asked: dict[str, tuple[str, dict[str, Any]]]) -> None:
    """Train the rows in the current folder, and print the name and result of each as a line of JSON.

    The ranks are forked from this process, which has imported dtmega from `tree` and has no thread.
    """
    import dtmega.train

    assert Path(dtmega.train.__file__).is_relative_to(tree), dtmega.train.__file__
    for number, (name, (configuration, keys)) in enumerate(asked.items()):
        run_dir = Path("runs", str(number))
        if configuration == "hf":
            keys = keys | {"model.path": hugging_face_folder()}
        started_s = time.monotonic()
        argv = ["--config", str(tree / "configs" / f"{configuration}.toml"), *flags(keys | {"run.dir": str(run_dir)})]
        n_processes = math.prod(n for key, n in keys.items() if key.startswith("mesh.") and key != "mesh.ep")
        ended = run_ranks(n_processes, argv, run_dir.with_suffix(".log"))
        result = result_of(run_dir) if ended == "" else {"refused": ended}
        print(f"{name}: {time.monotonic() - started_s:.0f} s", file=sys.stderr, flush=True)
        print(json.dumps([name, result]), flush=True)


def flags(keys: dict[str, Any]) -> list[str]:
    """The keys as arguments of the command line."""
    words = []
    for key, value in keys.items():
        words += [f"--{key}", str(value).lower() if isinstance(value, bool) else str(value)]
    return words


def run_ranks(n_processes: int, argv: list[str], log: Path) -> str:
    """Train on forked processes. Returns '' if all ended with 0, else the last line that they printed."""
    log.parent.mkdir(exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ranks = [fork_rank(rank, n_processes, port, argv, log) for rank in range(n_processes)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
    if not any(codes):
        return ""
    lines = log.read_text().strip().splitlines()
    return f"exit code {max(codes)}: {lines[-1] if lines else ''}"


def fork_rank(rank: int, n_processes: int, port: int, argv: list[str], log: Path) -> int:
    """Fork one rank. Returns its process id."""
    process_id = os.fork()
    if process_id:
        return process_id
    import torch

    from dtmega.train import run_and_leave

    # torch replaces its pool of threads, which a fork loses, when a thread first asks for it.
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n_processes)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with log.open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    run_and_leave(argv)


def result_of(run_dir: Path) -> dict[str, Any]:
    """The numbers of a run that has ended: each line of its metrics, and the digest of each tensor it has saved."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    wanted = ("step", "loss", "grad_norm", "params_norm", "lr", "tokens", "val_loss", "test_loss", "dropped")
    metrics = [{name: line[name] for name in wanted if name in line} for line in lines]
    (checkpoint,) = (run_dir / "checkpoints").glob("step-*")
    return {"metrics": metrics, "tensors": dict(tensor_digests(checkpoint))}


def tensor_digests(checkpoint: Path) -> Iterator[tuple[str, str]]:
    """Name and digest of each whole tensor of a checkpoint, however ranks have divided it.

    Reads the format that `dtmega/checkpoint/manifest.py` describes, without dtmega.
    """
    import torch

    for name, entry in json.loads((checkpoint / "manifest.json").read_bytes())["content"]["tensors"].items():
        dtype = getattr(torch, entry["dtype"])
        whole = torch.empty(entry["shape"], dtype=dtype)
        for offsets, sizes, file, start, _ in entry["chunks"]:
            with (checkpoint / file).open("rb") as stream:
                stream.seek(start)
                raw = bytearray(stream.read(math.prod(sizes) * dtype.itemsize))
            box = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
            whole[box] = torch.frombuffer(raw, dtype=dtype).reshape(sizes)
        words = whole.reshape(-1).view(torch.uint8).numpy().tobytes()
        yield name, digest(entry["dtype"], entry["shape"], words.hex())


def hugging_face_folder() -> str:
    """A folder with a small Llama of transformers, in the current folder."""
    folder = Path("hf").absolute()
    if not folder.exists():
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
        LlamaForCausalLM(LlamaConfig(vocab_size=8192, num_key_value_heads=2, **sizes)).save_pretrained(folder)
    return str(folder)


def digest(*parts: Any) -> str:
    """Digest of values that JSON can write."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def git(*words: str) -> str:
    """What git prints."""
    return subprocess.run(["git", "-C", ROOT, *words], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
