"""Data parallelism: sharded weights, master weights in float32, and sums of gradients over ranks.

- `wrapped.py` shards weights over ranks with FSDP2; `sends.py` has FSDP2's messages on CPUs
- `masters.py` casts weights that one rank holds as a whole
- `replicas.py` sums the gradients of whole copies
- `shard_sums.py` sums gradients over ranks after each microbatch of a pipeline
- `exact.py`, `slots.py`, `digests.py` sum gradients as integers

`training/choices.py` chooses between them.
"""
