"""Tokenizers, which turn text into token ids and back; their files and chat templates."""
