"""The tokens of sample g: the order of documents, the cut into samples, and blends of several corpora."""
