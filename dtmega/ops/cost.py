"""The cost of a model, computed without torch: parameters, FLOPs, and the peak FLOP/s of devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# Dense FLOP/s in bf16 or fp16. A key is a substring of torch.cuda.get_device_name(), and the first matching key wins.
# The numbers are from the datasheets of NVIDIA A100, L40S, H100, H200, HGX B200 and GB200 NVL72, and of AMD Instinct
# MI300X. The datasheets for Hopper and Blackwell state twice these numbers, "with sparsity".
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
    """A device's peak FLOP/s for dense matrix products; None if PEAK_FLOPS lacks the device or the dtype.

    Args:
        device_name: name that `torch.cuda.get_device_name()` returns.
        dtype: torch's name for the dtype.
    """
    if dtype not in ("bfloat16", "float16"):
        return None
    return next((flops for name, flops in PEAK_FLOPS.items() if name in device_name), None)


class Piece(NamedTuple):
    """The smallest unit that a pipeline can assign to a stage, with its costs. A model is a sequence of pieces.

    Attributes:
        name: name of the piece: "embed", "layers.0", ..., "head"; a layer's name ends in its number.
        elements: number of elements in the piece's weights. A weight shared by several pieces counts only in the first
            piece that has it.
        matmul_flops: FLOPs of the piece's matrix products, forward and backward, per token. Each weight element costs
            2 FLOPs in forward and 4 in backward (Kaplan et al. 2020, section 2.1). An element of a frozen weight costs
            only 2 in backward. An embedding look-up costs nothing.
        attention_flops: FLOPs of QK^T and PV, forward and backward, per token and key. For a key that the query sees,
            each product costs 2 H K in forward and 4 H K in backward (Narayanan et al. 2021, appendix), so both
            products cost 12 H K. A causal query sees half of the sequence on average, which halves the cost to 6 H K.
        shared: number of elements in weights that this piece shares with an earlier piece, such as a tied head's
            weight.
        label_flops: FLOPs of the products that only labelled tokens need, per labelled token.
        sequence_flops: FLOPs of the products that are computed once per sequence.
        decoder_flops: FLOPs of the products for decoder tokens, per decoder token.
        decoder_attention_flops: FLOPs of the decoder's self-attention, per decoder token and decoder key.
        cross_attention_flops: FLOPs of the decoder's attention to the encoder, per decoder token and encoder key.
        begins_decoder: whether the piece is the first of a decoder that follows an encoder.
        window: largest number of keys that a query sees; 0 for no limit.
        expert_elements: number of elements in the stacked weights of a mixture's experts, a part of `elements`.
        experts_per_token: number of the mixture's experts that a token uses; 0 if the piece is not a mixture.
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
    window: int = 0
    expert_elements: int = 0
    experts_per_token: int = 0

    @property
    def is_layer(self) -> bool:
        """True for a layer, False for the pieces at the ends of a stack (embedding, head)."""
        return self.name.rpartition(".")[2].isdigit()

    def attention_per_token(self, seq_len: int) -> int:
        """FLOPs of QK^T and PV for one token in a sequence of `seq_len` tokens.

        On average, a causal query sees S / 2 of the S keys. With a window of W < S, the average is only
        W - W^2 / (2 S) keys: the first W queries see W / 2 keys on average, and all later queries see W keys.
        """
        twice_seen = seq_len
        if 0 < self.window < seq_len:
            twice_seen = 2 * self.window - self.window**2 / seq_len
        return round(twice_seen * self.attention_flops)

    def flops_per_token(self, seq_len: int, labelled: float = 1.0, decoder_seq_len: int = 0) -> int:
        """The piece's model FLOPs for one token. See `flops_per_token` for the arguments.

        FLOPs needed once per sequence, and all FLOPs for the `decoder_seq_len` tokens of a decoder, are spread evenly
        over the `seq_len` tokens.
        """
        every_token = self.matmul_flops + self.attention_per_token(seq_len)
        decoder_token = self.decoder_flops + decoder_seq_len * self.decoder_attention_flops
        decoder_token += seq_len * self.cross_attention_flops
        whole_sequence = self.sequence_flops + decoder_seq_len * decoder_token
        return every_token + round(labelled * self.label_flops + whole_sequence / seq_len)


def n_parameters(pieces: Sequence[Piece]) -> int:
    """The number of elements in all weights. Shared weights count once."""
    return sum(piece.elements for piece in pieces)


def flops_per_token(pieces: Sequence[Piece], seq_len: int, labelled: float = 1.0, decoder_seq_len: int = 0) -> int:
    """Model FLOPs of forward and backward for one token in a sequence of `seq_len` tokens, without recomputation.

    Biases, norms, activations and softmax are not counted, as usual. Padding is counted like text.

    Args:
        pieces: pieces of the whole model.
        seq_len: number of tokens in the sequence, or in the encoder's sequence if the model is an encoder-decoder.
        labelled: fraction of tokens with a label, which matters only if the model's head skips unlabelled tokens.
        decoder_seq_len: number of tokens in the decoder's sequence; 0 if the model is not an encoder-decoder.
    """
    return sum(piece.flops_per_token(seq_len, labelled, decoder_seq_len) for piece in pieces)
