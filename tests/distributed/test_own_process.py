"""distributed/own_process.py: what a caller learns of an error in the other process."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import operator
from dtmega.distributed import own_process

if __name__ == "__main__":
    try:
        own_process.run(operator.truediv, 1, 0)
    except OSError as error:
        print(error)
"""


def test_an_unexpected_error_is_one_line_and_its_traceback_is_printed_once():
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    line = "truediv has failed, with the traceback above: ZeroDivisionError: division by zero\n"
    assert ended.stdout == line
    assert ended.stderr.count("Traceback (most recent call last)") == 1
    assert ended.stderr.endswith("ZeroDivisionError: division by zero\n")
