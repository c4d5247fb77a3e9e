"""Tensor parallelism for `transformers` models: cuts each module and proves that the results do not change."""
