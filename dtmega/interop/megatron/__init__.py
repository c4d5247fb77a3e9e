"""Conversion from and to Megatron: command-line flags, launch scripts and checkpoints.

Flags: `launch/flags.py` has the table that maps Megatron's flags to configuration keys; `model_flags.py` and
`expert_flags.py` hold parts of the table. `bash/` finds the flags in a launch script without running the script.
`launch/translate.py` turns flags into a configuration.

Checkpoints: `names.py` has one table of tensor names per family, and `forms.py` builds each family's `Format` from its
table; `core_forms.py` has megatron-core's formats. `folder.py` locates a checkpoint's folder. `ranks.py` (Megatron-LM),
`deepspeed.py` (Megatron-DeepSpeed) and `core.py` (megatron-core) open the three kinds of folders, and `saved.py`
decodes the files inside. `adam.py` and `zero.py` read optimizer states, `parts.py` joins the ranks' shards,
`vocabulary.py` determines the vocabulary size, and `recipe.py` derives the run's configuration. `write.py` shards a
dtmega model for Megatron's ranks, and `write_core.py` writes a dtmega model for megatron-core.
"""
