"""Weights between this house and others: what users do by hand with checkpoints, beside a run.

    conversion.py     what `python -m dtmega convert` does: from a source to a target
    sources.py        what `--from` names: directories of transformers, runs, DCP folders, checkpoints of Megatron's
    to_checkpoint.py  writes a checkpoint of ours; others: interop/hf/files/export.py, interop/megatron/write.py
    card.py           texts beside an export: a model card, the source's README and licence
    inspect.py        what `python -m dtmega inspect` prints: what a checkpoint is, if it is intact, how two differ

Other people's files are read by foreign/, hf/ and megatron/.
"""
