"""Tensor operations for models, plans and the training loop, and the arithmetic of their cost.

Randomness as a function (`keyed.py`), attention under a rule (`attention.py`, `attention_rule.py`,
`key_value_cache.py`), cross-entropy over a vocabulary that may be cut (`cross_entropy.py`), the part of a tensor that a
rank holds (`shards.py`), optimizers (`optim.py`), float16's loss scale (`loss_scale.py`), parameters, FLOPs and bytes
(`cost.py`). Kernels that only a CPU needs are in `cpu/`.
"""
