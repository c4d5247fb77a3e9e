"""Tokenizers, which turn text into token ids and back, with their files and chat templates."""
