"""The tokens of sample g: the order of documents, the samples cut out of them, and blends of several corpora."""
