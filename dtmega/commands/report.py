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
    default = "report.html in the run's directory; of several runs report-with-OTHERS.html in the first one's"
    parser.add_argument("--output", metavar="FILE", help=f"the page to write (default: {default})")
    parser.add_argument("--png", action="store_true", help="write the curves as a picture, too, beside the page")


def command(args: argparse.Namespace) -> int:
    from dtmega.report import write

    output = Path(args.output) if args.output else write.default_output(args.runs)
    for path in write.write(args.runs, output, png=args.png):
        print(path)
    return job.DONE
