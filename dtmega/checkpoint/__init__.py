"""Saved states of a run: complete or not there, verified on read, and never unpickled.

    manifest.py      the description of a checkpoint: JSON, with a digest of every block of bytes
    files.py         the file operations it is made of, on a disk or under a URL
    reader.py        a finished one to read, verified on the way
    tensor_files.py  tensors of any layout to and from it, on torch.distributed.checkpoint
    run.py           the checkpoints of a run as it goes: save, publish, keep the newest
    resume.py        the checkpoint that a run goes on from, if it may
    found.py         the folders it writes and the checkpoints it goes on from: claimed by one rank, seen by all
    weights.py       weights to start from, whoever saved them

What users do with checkpoints by hand is in convert/.
"""
