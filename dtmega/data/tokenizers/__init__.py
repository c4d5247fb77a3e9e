"""Vocabularies: text to token ids and back, files of tokenizers, chat templates."""
