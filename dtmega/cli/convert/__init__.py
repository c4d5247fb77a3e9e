"""Convert weights from and to other programs' formats, and inspect checkpoints.

    conversion.py     `python -m dtmega convert`: reads a source and writes a target
    sources.py        a reader for each format that `--from` takes: Hugging Face directories, dtmega's runs, DCP
                      folders, Megatron checkpoints
    to_checkpoint.py  writes a dtmega checkpoint (for other targets: interop/hf/files/export.py and
                      interop/megatron/write.py and write_core.py)
    card.py           an export's text files: a model card, the source's README and licence
    inspect.py        `python -m dtmega inspect`: facts about a checkpoint, a check of its digests, a comparison of two

Other programs' files are read by interop/.
"""
