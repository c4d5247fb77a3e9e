"""Plan a run before it is paid for: the real step on pretended devices, priced on a fabric, searched over layouts.

`role.py` runs one rank's `parallelize` and `train_step` without values and counts memory, messages and FLOPs.
`fabric.py` and `step_time.py` turn these counts into a predicted time, and `search/` compares layouts.
"""
