"""`dtmega report`: one page with the curves, layouts, differences and samples of one run or of several.

dtmega report runs/bloom
dtmega report runs/bloom runs/faster --output both.html --png
"""

from __future__ import annotations

import argparse
from pathlib import Path

from dtmega import job


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="run directories, such as runs/bloom; several are compared"
    )
    parser.add_argument("--output", metavar="FILE", help="the page to write (default: report.html in the first run's)")
    parser.add_argument("--png", action="store_true", help="write the curves as a picture, too, beside the page")


def command(args: argparse.Namespace) -> int:
    from dtmega.report import write

    for path in write.write(args.runs, Path(args.output or Path(args.runs[0], "report.html")), png=args.png):
        print(path)
    return job.DONE
