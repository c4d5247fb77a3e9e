"""Find the tokens of sample g: order documents, cut documents into samples, and blend corpora."""
