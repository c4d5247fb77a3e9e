"""Models and files from other projects: transformers, Megatron, and files pickled by torch.

`stored.py` finds what is known about a family's files, by the family's name.
"""
