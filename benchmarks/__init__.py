"""Measurements of dtmega, compared with the libraries that a user would choose instead.

`python -m benchmarks` prints the table of speeds (`__main__.py`). The docstring of each other script explains what the
script measures. `RESULTS.md` holds the latest figures and names the machine.
"""
