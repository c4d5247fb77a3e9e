"""Training objectives: samples of a text, the rows made of them, and the sums that give a loss."""
