"""Tensor parallelism of models of `transformers`: how each module is cut, and the proof of it."""
