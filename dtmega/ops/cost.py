"""The cost of a model, as arithmetic: parameters, FLOPs, and the peak that FLOP/s are measured against. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# Dense FLOP/s in bf16 or fp16, by a part of torch.cuda.get_device_name(); the first match counts. From the datasheets
# of NVIDIA A100, L40S, H100, H200, HGX B200 and GB200 NVL72 (those of Hopper and Blackwell state twice this number,
# "with sparsity") and of AMD Instinct MI300X.
PEAK_FLOPS = {
    "A100": 312e12,
    "L40S": 362e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "GB200": 2500e12,
    "B200": 2250e12,
    "MI300X": 1307e12,
}


def peak_flops(device_name: str, dtype: str) -> float | None:
    """FLOP/s of dense matrix products by the datasheet; None for a device or a dtype that the table does not have.

    Args:
        device_name: as `torch.cuda.get_device_name()` returns it.
        dtype: torch's name of the dtype.
    """
    if dtype not in ("bfloat16", "float16"):
        return None
    return next((flops for name, flops in PEAK_FLOPS.items() if name in device_name), None)


class Piece(NamedTuple):
    """The smallest unit that a pipeline can deal out, and its cost. The pieces of a model, in order, make up all of it.

    Attributes:
        name: "embed", "layers.0", ..., "head"; a layer's name ends in its number.
        elements: elements of its weights. A weight that several pieces share counts at the first one only.
        matmul_flops: FLOPs of its matrix products, forward and backward, per token. A weight costs 2 forward and 4
            backward (Kaplan et al. 2020, section 2.1); looking up a row of an embedding costs none.
        attention_flops: FLOPs of QK^T and PV, forward and backward, per token and key. Each product costs 2 H K
            forward and twice that backward for a key that the query sees (Narayanan et al. 2021, appendix): 12 H K
            together. A causal query sees half of the sequence on average, which makes it 6 H K.
        shared: elements of weights that an earlier piece has too, such as a tied head's.
        label_flops: FLOPs of the products that only tokens with a label need, per such token.
        sequence_flops: FLOPs of the products that are made once for a sequence, per sequence.
        decoder_flops: FLOPs of the products for the tokens of a decoder, per such token.
        decoder_attention_flops: FLOPs of the decoder's attention to itself, per token of the decoder and key there.
        cross_attention_flops: FLOPs of its attention to the encoder, per token of the decoder and key of the encoder.
        begins_decoder: True for the first piece of a decoder that stands behind an encoder.
    """

    name: str
    elements: int
    matmul_flops: int
    attention_flops: int
    shared: int = 0
    label_flops: int = 0
    sequence_flops: int = 0
    decoder_flops: int = 0
    decoder_attention_flops: int = 0
    cross_attention_flops: int = 0
    begins_decoder: bool = False

    @property
    def is_layer(self) -> bool:
        """True for a block of a stack, False for the ends of a stack (embedding, head)."""
        return self.name.rpartition(".")[2].isdigit()

    def flops_per_token(self, seq_len: int, labelled: float = 1.0, decoder_seq_len: int = 0) -> int:
        """Model FLOPs of forward and backward for one token of a sequence of `seq_len`; arguments as in the function.

        What is needed once a sequence, and all that a decoder of `decoder_seq_len` tokens needs, is spread evenly over
        the `seq_len` tokens.
        """
        every_token = self.matmul_flops + seq_len * self.attention_flops
        decoder_token = self.decoder_flops + decoder_seq_len * self.decoder_attention_flops
        decoder_token += seq_len * self.cross_attention_flops
        whole_sequence = self.sequence_flops + decoder_seq_len * decoder_token
        return every_token + round(labelled * self.label_flops + whole_sequence / seq_len)


def n_parameters(pieces: Sequence[Piece]) -> int:
    """Elements of all weights; shared ones count once."""
    return sum(piece.elements for piece in pieces)


def flops_per_token(pieces: Sequence[Piece], seq_len: int, labelled: float = 1.0, decoder_seq_len: int = 0) -> int:
    """Model FLOPs of forward and backward for one token of a sequence of `seq_len`, without those of recompute.

    Biases, norms, activations and softmax are left out, as is usual. Padding counts like text.

    Args:
        labelled: share of tokens with a label. It matters in a model whose head computes on no others.
        decoder_seq_len: tokens of the decoder, in a model that has one.
    """
    return sum(piece.flops_per_token(seq_len, labelled, decoder_seq_len) for piece in pieces)
