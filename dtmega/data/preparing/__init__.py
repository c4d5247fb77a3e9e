"""From text to token files: the reading of text files, tokenising, merging, and the default corpus."""
