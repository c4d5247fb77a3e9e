"""Translate launch scripts for Megatron and its forks into dtmega configurations."""
