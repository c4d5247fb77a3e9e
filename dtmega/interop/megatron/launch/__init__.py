"""Translate launch scripts of Megatron and its forks into configurations."""
