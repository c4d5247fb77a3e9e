"""Training objectives: the samples of a text, the tensors made of them, and the sums that a loss is made of."""
