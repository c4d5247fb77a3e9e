"""Kernels and memory settings for CPUs. A run on GPUs uses none of them."""
