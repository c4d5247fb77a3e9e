"""The parts of a training run: the parallel model, the optimizer step, the evaluation, and the record of the run.

`dtmega/train.py` calls these parts in order.
"""
