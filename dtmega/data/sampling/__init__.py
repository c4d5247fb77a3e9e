"""Compute which tokens the sample with a given index has: shuffle documents, cut them into samples, blend corpora."""
