"""The parts of a training run: the parallel model, a step, evaluation, and the record of what happened.

`dtmega/train.py` calls these parts in order.
"""
