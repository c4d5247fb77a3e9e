"""Low-rank adapters over the tp axis. A layer's adapter, A [r, in] and B [out, r], is sharded like the layer's weight.

    the layer is sharded by   A            B            additional messages
    outputs (Column)          replicated   by outputs   none: A reads the gathered input
    outputs, strided          replicated   replicated   none: a rank selects the rows of B for its outputs
    inputs (Row)              by inputs    replicated   x A^T, r numbers per token, is reduced before B is applied
    nothing                   replicated   replicated   none

"Strided" means that the weight stacks several layers, such as q, k and v, and that each of these is sharded by itself.
If the layer is sharded by outputs, each rank computes only the contribution of its own outputs to A's gradient, so A's
gradient is all-reduced over tp. If the layer is sharded by inputs and the sequence is sharded too, each rank applies B
only to its own tokens, so B's gradient is all-reduced over tp.
"""

from __future__ import annotations

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard


def placement(name: str, of_weight: Placement | None, output_dim: int) -> Placement | None:
    """The tp placement of an adapter's parameter.

    Args:
        name: name of the parameter in its module, lora_a or lora_b.
        of_weight: placement of the layer's weight.
        output_dim: dim of the weight that contains the output features.
    """
    if of_weight is None or of_weight == Replicate():
        return of_weight
    assert isinstance(of_weight, Shard | _StridedShard)
    by_output, in_parts = of_weight.dim == output_dim, isinstance(of_weight, _StridedShard)
    if by_output != (name == "lora_b"):
        return Replicate()
    if by_output:
        # If tp sharded the rows with a stride, FSDP2 would have to shard dim 1, which has only r entries
        # (`shards.dim_to_cut`).
        return Replicate() if in_parts else Shard(0)
    return _StridedShard(1, split_factor=of_weight.split_factor) if in_parts else Shard(1)
