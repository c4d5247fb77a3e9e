"""Models and files of other projects: transformers, Megatron, and files that torch has pickled."""
