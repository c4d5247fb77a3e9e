"""`dtmega report`: draws a run, or a comparison of several runs, as one HTML page.

dtmega report runs/bloom
dtmega report runs/bloom runs/faster --output both.html
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from dtmega.cli.commands.arguments import local_path, path
from dtmega.cli.commands.used import check_is_folder
from dtmega.distributed import exit_codes
from dtmega.files import optional_imports

MAX_NAME_BYTES = 200  # file names may have 255 bytes, and the temporary file has a longer name than the page


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", type=path, nargs="+", metavar="RUN", help="run directory, such as runs/bloom; several are compared"
    )
    default = "report.html in the run directory; for several runs, report-with-OTHERS.html in the first one"
    parser.add_argument("--output", type=local_path, metavar="FILE", help=f"page to write (default: {default})")


def command(args: argparse.Namespace) -> int:
    optional_imports.check("plotly", "report", "the page")
    from dtmega.report import write

    for run in args.runs:
        check_is_folder(run)
    output = Path(args.output) if args.output else default_output(args.runs)
    write.write(args.runs, output)
    print(output)
    return exit_codes.DONE


def default_output(directories: Sequence[str]) -> Path:
    """The default path of the page.

    For one run, the page is report.html in the run directory. For several runs, the page is report-with-OTHERS.html in
    the directory of the first run.
    """
    first, *others = directories
    name = "-".join(Path(other).resolve().name for other in others)
    name = f"report-with-{name}.html" if others else "report.html"
    if len(os.fsencode(name)) > MAX_NAME_BYTES:
        name = f"report-with-{len(others)}-others.html"
    return Path(first, name)
