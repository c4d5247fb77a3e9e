"""Megatron's `.bin/.idx` token files, the record beside them, and files that the processes of a node share."""
