"""Conversion of weights from and to other programs, and the inspection of checkpoints: what users do beside a run.

    conversion.py     `python -m dtmega convert`: from a source to a target
    sources.py        a reader for each word that `--from` takes: directories of transformers, runs, DCP folders,
                      checkpoints of Megatron
    to_checkpoint.py  writes a checkpoint of dtmega (the other targets: interop/hf/files/export.py and
                      interop/megatron/write.py)
    card.py           the texts beside an export: a model card, the source's README and licence
    inspect.py        `python -m dtmega inspect`: the facts about a checkpoint, whether it is intact, how two differ

The files of other programs are read by interop/.
"""
