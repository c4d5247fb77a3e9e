"""`dtmega report`: draws a run, or a comparison of several runs, as one HTML page.

dtmega report runs/bloom
dtmega report runs/bloom runs/faster --output both.html
"""

from __future__ import annotations

import argparse
from pathlib import Path

from dtmega.cli.commands.arguments import local_path, path
from dtmega.cli.commands.used import check_is_folder
from dtmega.distributed import exit_codes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", type=path, nargs="+", metavar="RUN", help="run directory, such as runs/bloom; several are compared"
    )
    default = "report.html in the run directory; for several runs, report-with-OTHERS.html in the first one"
    parser.add_argument("--output", type=local_path, metavar="FILE", help=f"page to write (default: {default})")


def command(args: argparse.Namespace) -> int:
    from dtmega.report import write

    for run in args.runs:
        check_is_folder(run)
    output = Path(args.output) if args.output else write.default_output(args.runs)
    write.write(args.runs, output)
    print(output)
    return exit_codes.DONE
