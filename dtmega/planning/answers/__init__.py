"""Questions that users ask a plan, and the answers: `dtmega plan` and `train.py --dry-run`.

job.py           the question: a configuration on a layout, a device, its memory
answer.py        the answer as data, and as JSON
comparisons.py   counts beside formulas of the literature
text.py          the answer in plain text
dry_run.py       `train.py --dry-run`
"""
