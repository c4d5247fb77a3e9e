"""Tensor operations for models, plans and the training loop, and functions that compute a model's cost.

- `keyed.py`: random numbers without a generator
- `attention.py`, `attention_rule.py`, `key_value_cache.py`, `context_parallel.py`: attention
- `expert_parallel.py`: experts on several ranks
- `cross_entropy.py`, `head_gradient.py`, `softmax.py`, `compiled_softmax.py`: cross-entropy over a vocabulary
- `shards.py`: the part of a tensor that a rank holds
- `optim/`: optimizers
- `cost.py`: parameter and FLOP counts
- `ranges.py`: named ranges in profiles
- `cpu/`: kernels that only CPUs need
"""
