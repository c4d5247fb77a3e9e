"""Kernels and memory for CPUs: a GPU needs nothing from here."""
