"""Training objectives: their samples, the tensors made from the samples, and the sums that make up the loss."""
