"""Conversion of text to token files: reading text files, tokenising, merging, and the default corpus."""
