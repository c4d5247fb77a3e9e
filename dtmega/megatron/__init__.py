"""Coming from Megatron: its flags, and the launch scripts that hold them.

Read `flags.py` first, the table of flags with the keys that they became; then `shell.py`, which finds the flags in a
script without running it, and `translate.py`, which makes a configuration of them.
"""
