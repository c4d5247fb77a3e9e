"""Kernels and memory settings that only runs on CPUs use."""
