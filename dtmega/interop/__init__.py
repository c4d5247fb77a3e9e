"""Models and files from other projects: transformers, Megatron, and files pickled by torch."""
