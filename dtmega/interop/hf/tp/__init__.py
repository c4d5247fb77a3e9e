"""Tensor parallelism for `transformers` models: shards each module and proves that the results do not change."""
