"""Plan a run before paying for it: run the real step on fake devices, predict its cost, and search for layouts.

`counting/` runs one rank's `parallelize` and `train_step` without values and counts memory, messages and FLOPs.
`plan.py` plans a whole job by counting one rank for each role. `prices/` predicts the time and the price of the
counted work. `search/` compares layouts. `answers/` writes the answers of `dtmega plan` and `train --dry-run`.
"""
