"""Inference with trained models: opening a model from a checkpoint, and running lm-evaluation-harness on the model."""
