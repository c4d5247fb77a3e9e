"""Conversion from and to Megatron: command-line flags, the launch scripts that contain them, and checkpoints.

Flags: `flags.py` is the table of flags and of the configuration keys that replace them. `shell.py` finds the flags in a
launch script without running it, and `translate.py` turns them into a configuration.

Checkpoints: `names.py` is the table of tensor names, from which `forms.py` makes a `Format` for each family;
`core_forms.py` has the formats of megatron-core. To read a checkpoint, `folder.py` finds its folder; `ranks.py`
(Megatron-LM), `deepspeed.py` (Megatron-DeepSpeed) and `core.py` (megatron-core) open the three kinds of folders, whose
files `saved.py` decodes. `adam.py` and `zero.py` read the optimizers, and `parts.py` joins the shards of the ranks.
`vocabulary.py` works out the size of the vocabulary, and `recipe.py` the configuration of the run. `write.py` cuts a
dtmega model for Megatron's ranks, and `write_core.py` writes it for megatron-core.
"""
