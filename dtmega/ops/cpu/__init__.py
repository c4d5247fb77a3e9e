"""Kernels and memory settings for runs on CPUs."""
