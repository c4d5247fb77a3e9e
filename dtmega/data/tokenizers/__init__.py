"""Tokenizers, tokenizer files and chat templates. A tokenizer turns text into token ids and back."""
