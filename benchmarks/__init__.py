"""Measurements, beside what a user would pick instead.

`python -m benchmarks` prints the table of speed (`__main__.py`); the other files are run one by one and say what they
measure. `RESULTS.md` has the last figures, with the machine that they come from.
"""
