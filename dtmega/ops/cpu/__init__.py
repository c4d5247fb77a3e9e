"""Kernels and memory settings for CPUs, which runs on GPUs do not use."""
