"""The cost of a model in numbers, without torch: parameters, FLOPs, and the peak FLOP/s of devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# Dense FLOP/s in bf16 or fp16, by a part of torch.cuda.get_device_name(); the first match counts. The numbers are from
# the datasheets of NVIDIA A100, L40S, H100, H200, HGX B200 and GB200 NVL72, and of AMD Instinct MI300X. The datasheets
# of Hopper and Blackwell state twice this number, "with sparsity".
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
    """FLOP/s of dense matrix products, from the datasheet; None if the table does not have the device or the dtype.

    Args:
        device_name: name that `torch.cuda.get_device_name()` returns.
        dtype: torch's name of the dtype.
    """
    if dtype not in ("bfloat16", "float16"):
        return None
    return next((flops for name, flops in PEAK_FLOPS.items() if name in device_name), None)


class Piece(NamedTuple):
    """The smallest unit that a pipeline can assign to a stage, and its cost. A model is the sequence of its pieces.

    Attributes:
        name: name of the piece: "embed", "layers.0", ..., "head"; a layer's name ends in its number.
        elements: number of elements in the piece's weights. A weight that several pieces share counts only in the first
            of them.
        matmul_flops: FLOPs of the piece's matrix products, forward and backward, per token. An element of a weight
            costs 2 in forward and 4 in backward (Kaplan et al. 2020, section 2.1); looking up a row of an embedding
            costs none.
        attention_flops: FLOPs of QK^T and PV, forward and backward, per token and key. For a key that the query sees,
            each product costs 2 H K in forward and twice that in backward (Narayanan et al. 2021, appendix): 12 H K
            together. A causal query sees half of the sequence on average, which reduces this to 6 H K.
        shared: number of elements in weights that an earlier piece has too, such as the weight of a tied head.
        label_flops: FLOPs of the products that only tokens with a label need, per such token.
        sequence_flops: FLOPs of the products that are computed once for a sequence, per sequence.
        decoder_flops: FLOPs of the products for the tokens of a decoder, per such token.
        decoder_attention_flops: FLOPs of the decoder's self-attention, per token and key of the decoder.
        cross_attention_flops: FLOPs of the decoder's attention to the encoder, per token of the decoder and key of the
            encoder.
        begins_decoder: True for the first piece of a decoder that follows an encoder.
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
        """True for a layer, False for the pieces at the ends of a stack (embedding, head)."""
        return self.name.rpartition(".")[2].isdigit()

    def flops_per_token(self, seq_len: int, labelled: float = 1.0, decoder_seq_len: int = 0) -> int:
        """Model FLOPs of the piece for one token, as in the function `flops_per_token`.

        The FLOPs that a sequence needs once, and all FLOPs of a decoder with `decoder_seq_len` tokens, are spread
        evenly over the `seq_len` tokens.
        """
        every_token = self.matmul_flops + seq_len * self.attention_flops
        decoder_token = self.decoder_flops + decoder_seq_len * self.decoder_attention_flops
        decoder_token += seq_len * self.cross_attention_flops
        whole_sequence = self.sequence_flops + decoder_seq_len * decoder_token
        return every_token + round(labelled * self.label_flops + whole_sequence / seq_len)


def n_parameters(pieces: Sequence[Piece]) -> int:
    """The number of elements in all weights. Shared weights count once."""
    return sum(piece.elements for piece in pieces)


def flops_per_token(pieces: Sequence[Piece], seq_len: int, labelled: float = 1.0, decoder_seq_len: int = 0) -> int:
    """Model FLOPs of forward and backward for one token of a sequence of `seq_len` tokens, without recomputation.

    Biases, norms, activations and softmax are left out, as is usual. Padding counts like text.

    Args:
        pieces: pieces of the whole model.
        seq_len: number of tokens in the sequence; in a model with encoder and decoder, of the encoder's.
        labelled: share of tokens with a label. It matters only if the model's head computes just these tokens.
        decoder_seq_len: number of tokens in the decoder's sequence; 0 in a model without encoder and decoder.
    """
    return sum(piece.flops_per_token(seq_len, labelled, decoder_seq_len) for piece in pieces)
