"""From text to token files: readers of text, the tokenising itself, and the corpus that needs no download."""
