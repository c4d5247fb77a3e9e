"""The tokens of sample g: ordering documents, cutting them into samples, and blending several corpora."""
