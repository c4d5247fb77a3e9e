"""Trained models in use: a model opened from a checkpoint, and lm-evaluation-harness on it."""
