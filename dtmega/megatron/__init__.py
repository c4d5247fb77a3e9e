"""The way from Megatron: its flags, the launch scripts that hold them, and its checkpoints.

Read `flags.py` first, the table of flags with the keys that they became; then `shell.py`, which finds the flags in a
script without running it, and `translate.py`, which makes a configuration of them. Of checkpoints `names.py` is the
first: tables of names, of which `forms.py` makes our families, and by which `write.py` cuts a model for their ranks.
To read one, `folder.py` finds it: its files are `saved.py`'s, `ranks.py`, `deepspeed.py` and `core.py` know the three
kinds of folders, `adam.py` and `zero.py` their optimizers, `parts.py` joins what the ranks hold, and
`vocabulary.py` and `recipe.py` say what model and run it is of.
"""
