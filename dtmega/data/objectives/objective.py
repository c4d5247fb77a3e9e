"""Training objectives. An objective defines how text is cut into samples, which tensors a batch has, and the loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from dtmega.config import Data
from dtmega.data.indexed_files.dataset import IndexedDataset
from dtmega.data.objectives.rows import IGNORED, Rows
from dtmega.data.objectives.sums import Sum
from dtmega.data.sampling.samples import AnySamples
from dtmega.data.tokenizers.tokenizer import Tokenizer
from dtmega.ops import host


class Objective(Protocol):
    """A training objective.

    Attributes:
        sums: sums that a model returns if its inputs have labels; each sum may come from any pipeline stage.
        aim: description of the targets that a model learns to predict, for messages, such as "next tokens".
        reads: keys of [data] that this objective reads but some other objectives ignore; the samples depend on these
            keys.
        sentences: whether the objective reads texts that are split into sentences, one per sequence of the data set.
        conversations: whether the objective reads conversations (`indexed_files/conversations.py`).
        not_in_megatrons_order: reason why the objective cannot follow Megatron's orders ([data] order); '' if the
            objective can follow them.
        prompt_is_prefix: flag; if True, all tokens of a prompt see each other, like the tokens of a prefix in training;
            if False, each token sees only itself and the tokens before it.
        order: version number of the samples. Raise this number if a change alters sample g for the same data, keys and
            seed; runs that began with the old samples are then refused.
    """

    @property
    def sums(self) -> tuple[Sum, ...]: ...

    @property
    def aim(self) -> str: ...

    @property
    def reads(self) -> tuple[str, ...]: ...

    @property
    def sentences(self) -> bool: ...

    @property
    def conversations(self) -> bool: ...

    @property
    def not_in_megatrons_order(self) -> str: ...

    @property
    def prompt_is_prefix(self) -> bool: ...

    @property
    def order(self) -> int: ...

    def counts(self, microbatch: Mapping[str, Tensor]) -> dict[str, float]:
        """A microbatch's contribution to each count that divides a sum, keyed by count name.

        The names and their order are the same for all microbatches.
        """
        ...

    def check(self, tokenizer: Tokenizer, data: Data) -> None:
        """Check that the tokenizer has the required special tokens and that the lengths in [data] allow a sample.

        Raises:
            ValueError: a token is missing, or a length is too small; the message names the key and gives the missing
                token or the failed equation.
        """
        ...

    def n_added(self, tokenizer: Tokenizer, data: Data) -> int:
        """Number of ids that the samples add after the tokenizer's last id."""
        ...

    def samples(
        self, dataset: IndexedDataset, documents: tuple[int, int], data: Data, seed: int, split: str, corpus: int
    ) -> AnySamples:
        """Make the samples of one split from a range (start, stop) of one corpus's documents.

        Raises:
            ValueError: the documents are too small for a single sample.
        """
        ...

    def rows(self, samples: AnySamples, data: Data, tokenizer: Tokenizer) -> Rows:
        """Make the `Rows` that turn samples of one corpus or of a blend into the tensors of a batch."""
        ...

    def blank(self, data: Data, n_rows: int) -> dict[str, Tensor]:
        """Placeholder tensors without text, with the names, shapes and dtypes of a real batch.

        If memory depends on the number of labels, they have about as many labels as a real batch, or slightly more.
        """
        ...


def labelled(microbatch: Mapping[str, Tensor]) -> int:
    """Number of tokens with a label in a microbatch."""
    return int(host.read((microbatch["labels"] != IGNORED).sum()))
