"""Checkpoints of a run: complete or absent, verified on every read and never unpickled.

    manifest.py      description of a checkpoint: JSON, with a digest of every block of bytes
    cover.py         check that a tensor's stored boxes cover the tensor exactly
    files.py         file operations that checkpoints need, on a disk
    remote.py        the same under a URL
    objects.py       the same in an object store
    reader.py        a finished checkpoint, verified while it is read
    tensor_files.py  tensors of any layout, written and read through torch.distributed.checkpoint
    pieces.py        tensors held as several boxes on one rank, for tensor_files.py
    staging.py       host-memory copies of tensors, which an asynchronous save writes
    run.py           saves during training: writes and publishes checkpoints; keeps the newest checkpoints
    resume.py        finds the checkpoint that a run resumes from; refuses a checkpoint of a different run
    changes.py       treatment of configuration keys that have changed when a run resumes
    found.py         startup of a run: rank 0 claims folders and finds checkpoints, and all ranks open the checkpoints
    weights.py       initial weights, from a checkpoint or from another program's files

The commands that convert and inspect checkpoints are in cli/convert/.
"""
