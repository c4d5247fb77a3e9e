"""Conversion from and to Megatron: command-line flags, launch scripts and checkpoints.

Flags: `launch/flags.py` is the table of Megatron's flags and of the configuration keys that replace the flags, with
rows from `model_flags.py` and `expert_flags.py`. `bash/` finds the flags in a launch script without running the script.
`launch/translate.py` makes a configuration from flags.

Checkpoints: `names.py` has the tables of tensor names, and `forms.py` makes a `Format` for each family from a table;
`core_forms.py` has megatron-core's formats. To read a checkpoint, `folder.py` finds its folder. `ranks.py`
(Megatron-LM), `deepspeed.py` (Megatron-DeepSpeed) and `core.py` (megatron-core) open the three kinds of folders, and
`saved.py` decodes their files. `adam.py` and `zero.py` read optimizer states, `parts.py` joins the ranks' shards,
`vocabulary.py` determines the vocabulary size, and `recipe.py` derives the run's configuration. `write.py` cuts a
dtmega model for Megatron's ranks, and `write_core.py` writes a dtmega model for megatron-core.
"""
