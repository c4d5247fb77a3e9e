"""Models and files of other projects: transformers, Megatron, and whatever torch has pickled."""
