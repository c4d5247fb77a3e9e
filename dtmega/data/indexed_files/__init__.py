"""Megatron's `.bin/.idx` token files, the records of how they were made, and files that a node's processes share."""

MAX_RECORD_BYTES = 1 << 16  # size of the largest PREFIX.meta.json that is read
