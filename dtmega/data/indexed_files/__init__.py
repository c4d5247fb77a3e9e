"""Megatron's `.bin/.idx` token files, the records of how they were made, and files that a node's processes share."""
