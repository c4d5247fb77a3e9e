"""Tokenizers: from text to token ids and back, their files, and the chat templates that come with them."""
