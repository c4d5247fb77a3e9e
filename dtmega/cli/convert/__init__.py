"""Conversion of weights from and to other programs, and inspection of checkpoints.

    conversion.py     `python -m dtmega convert`: from a source to a target
    sources.py        a reader for each format that `--from` takes: Hugging Face directories, dtmega's runs, DCP
                      folders, checkpoints of Megatron
    to_checkpoint.py  writes a checkpoint of dtmega (the other targets: interop/hf/files/export.py and
                      interop/megatron/write.py and write_core.py)
    card.py           text files of an export: a model card, the source's README and licence
    inspect.py        `python -m dtmega inspect`: facts about a checkpoint, a check of its digests, and how two differ

The files of other programs are read by interop/.
"""
