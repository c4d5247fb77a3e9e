"""Plan a run before it is paid for: the real step on pretended devices, priced on a fabric, searched over layouts.

`counting/` runs one rank's `parallelize` and `train_step` without values, and counts memory, messages and FLOPs.
`plan.py` plans a whole job from one rank for each role. `prices/` predicts the time and the money of the counted work.
`search/` compares layouts, and `answers/` puts into words what `dtmega plan` and `train --dry-run` answer.
"""
