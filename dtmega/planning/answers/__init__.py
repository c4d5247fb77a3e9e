"""The questions that users ask the planner, and the answers: `dtmega plan` and `train.py --dry-run`.

job.py           the question: a configuration, a layout, a device and the device's memory
answer.py        the answer as data, and as JSON
comparisons.py   comparisons of counts with formulas from the literature
text.py          the answer in plain text
dry_run.py       `train.py --dry-run`
"""
