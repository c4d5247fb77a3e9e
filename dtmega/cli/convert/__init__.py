"""Convert weights from and to other programs' formats; inspect checkpoints.

    conversion.py     `python -m dtmega convert`: reads a source and writes a target
    sources.py        a reader for each format that `--from` accepts: Hugging Face directories, dtmega's runs,
                      DCP folders, Megatron checkpoints
    recognise.py      finds the family of a model that another program has stored
    to_checkpoint.py  writes a dtmega checkpoint (interop/hf/files/export.py writes a Hugging Face folder;
                      interop/megatron/write.py and write_core.py write Megatron checkpoints)
    card.py           an export's text files: a model card, the source's README and licence
    inspect.py        `python -m dtmega inspect`: describes and verifies a checkpoint; compares two checkpoints

interop/ reads other programs' files.
"""
