"""`dtmega evaluate`: scores a run on lm-evaluation-harness tasks.

dtmega evaluate runs/bloom --tasks lambada_openai,hellaswag
dtmega evaluate runs/bloom --tasks mine --include-path tasks/ --step 200
torchrun --nproc-per-node 2 -m dtmega evaluate runs/bloom --tasks mine --include-path tasks/ --mesh.tp 2
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from dtmega.cli.commands.arguments import integer, local_path, path
from dtmega.cli.commands.used import add_checkpoint_options, open_run, startup_of
from dtmega.distributed import exit_codes
from dtmega.files import atomic, optional_imports

LONGEST_NAME = 100  # maximum length of the task list in a file name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", type=path, help="a run directory (its newest checkpoint), or the folder of one checkpoint"
    )
    parser.add_argument("--tasks", required=True, metavar="A,B", help="names of tasks, separated by commas")
    parser.add_argument(
        "--include-path",
        type=local_path,
        metavar="DIR",
        help="a folder with your own tasks as YAML files; if all --tasks are there, nothing is downloaded",
    )
    parser.add_argument(
        "--num-fewshot", type=integer(0), metavar="N", help="solved examples shown before each question"
    )
    parser.add_argument(
        "--limit", type=integer(1), metavar="N", help="evaluate only the first N questions of each task"
    )
    parser.add_argument(
        "--batch-size", type=integer(1), default=8, metavar="N", help="texts evaluated at a time (default %(default)s)"
    )
    parser.add_argument(
        "--output",
        type=local_path,
        metavar="FILE",
        help="JSON file for the scores (default: RUN/evaluations/step-STEP-TASKS.json)",
    )
    add_checkpoint_options(parser)


def command(args: argparse.Namespace) -> int:
    from dtmega.checkpoint import manifest
    from dtmega.distributed.agreement import Refused
    from dtmega.models.show import CONTINUATION
    from dtmega.report.scores import FOLDER

    try:
        startup = startup_of("dtmega evaluate")
        with startup.step("tasks"):
            with optional_imports.needed("eval", "dtmega evaluate"):
                from dtmega.inference import lm_eval_harness
            tasks = [name.strip() for name in args.tasks.split(",") if name.strip()]
            known = lm_eval_harness.find_tasks(tasks, args.include_path)
            if not args.output and (Path(args.run, manifest.NAME).exists() or not Path(args.run).is_dir()):
                raise ValueError(f"{args.run} is no run directory, so say where the scores go (--output FILE)")
        trained = open_run(args.run, args, startup)
        with startup.step("model"):
            if trained.show is not CONTINUATION:
                name = trained.cfg.model.name
                raise ValueError(f"tasks need a model that continues texts, which one of name = '{name}' does not")
    except Refused as refused:
        return refused.exit_code
    scores = lm_eval_harness.evaluate(trained, tasks, known, args.batch_size, args.num_fewshot, args.limit)
    if startup.rank == 0:
        path = Path(args.output or Path(args.run, FOLDER, file_name(trained.step, tasks)))
        atomic.make_folder(path.parent)
        with atomic.replaced(path) as file:
            json.dump(scores, file, indent=1, default=_plain)
        print(lm_eval_harness.table(scores))
        print(f"written: {path}")
    return exit_codes.DONE


def file_name(step: int, tasks: list[str]) -> str:
    """The name of the file for a step's scores on the given tasks.

    If the step is evaluated again on these tasks, the new scores replace the file.
    """
    names = "+".join(task.replace("/", "-") for task in tasks)
    if len(names) > LONGEST_NAME:
        names = f"{names[: LONGEST_NAME - 10]}+{len(tasks)}-tasks"
    return f"step-{step:08d}-{names}.json"


def _plain(value: Any) -> Any:
    """Convert a value that JSON cannot hold: a NumPy number into a Python number, any other value into text."""
    return value.item() if hasattr(value, "item") else str(value)
