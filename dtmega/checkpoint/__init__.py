"""Saved states of a run: complete or not there, verified on read, and never unpickled.

    manifest.py      what a checkpoint says about itself: JSON, with a digest of every block of bytes
    files.py         the file operations it is made of, on a disk or under a URL
    reader.py        a finished one to read, verified on the way
    tensor_files.py  tensors of any layout to and from it, on torch.distributed.checkpoint
    run.py           the checkpoints of a run as it goes: save, publish, keep the newest
    resume.py        where a run goes on, and whether it may
    found.py         where it writes and what it goes on from: claimed by one rank, seen by all
    weights.py       weights to start from, whoever saved them

convert/ is what users do with them by hand.
"""
