"""Coming from Megatron: its flags, the launch scripts that hold them, and its checkpoints.

Read `flags.py` first, the table of flags with the keys that they became; then `shell.py`, which finds the flags in a
script without running it, and `translate.py`, which makes a configuration of them. Of checkpoints `names.py` is the
first: tables of names, by which `write.py` cuts a model for Megatron's ranks. To read one, `folder.py` finds it: its
files are `saved.py`'s, `ranks.py` and `deepspeed.py` know the two kinds of folders, `adam.py` and `zero.py` their
optimizers, `parts.py` joins what ranks hold, and `vocabulary.py` and `recipe.py` say what model and run it is of.
"""
