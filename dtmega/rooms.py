"""The rooms that only a key of the configuration opens, one function each: the statement that imports the room stands here.

    rooms.compiled_proof().prove(...)

A function returns the module that is the room's door. A run loads a room when it calls the room's function, and so loads
nothing that its configuration does not ask for (`tests/test_closure.py`). All other imports stand at the top of a file.
Type checkers, linters and `lint-imports` read the statements like any import; tests/test_house.py counts a call as an
import by the caller. Call these functions when something is set up, never in code that `torch.compile` traces.
"""

from __future__ import annotations

# Families: a record for each value of [model] name.


# Data: objectives, orders, preparing, object stores.


def next_token():
    """The objective of causal models that learn each token of running text."""
    from dtmega.data.objectives import next_token

    return next_token


def prefixes():
    """The objective of prefix language models: [data] objective = "prefix-lm"."""
    from dtmega.data.objectives import prefixes

    return prefixes


def conversations():
    """The objective whose samples are conversations: [data] objective = "conversations"."""
    from dtmega.data.objectives import conversations

    return conversations


def masked_tokens():
    """The objective of BERT."""
    from dtmega.data.objectives.denoising import masked

    return masked


def hidden_spans():
    """The objectives of T5."""
    from dtmega.data.objectives.denoising import span_objectives

    return span_objectives


def megatron_order():
    """Samples in the order of a Megatron run: [data] order."""
    from dtmega.data.megatron import order

    return order


def stdlib_corpus():
    """The default corpus, made where it is not there yet."""
    from dtmega.data.preparing import corpus

    return corpus


def shipped_conversations():
    """The default corpus of conversations."""
    from dtmega.data.preparing import conversations

    return conversations


def data_workers():
    """Processes that make batches: [data] num_workers."""
    from dtmega.data import workers

    return workers


def wordpiece():
    """Vocabularies of WordPieces: [data] tokenizer = "stdlib-wordpiece" or "bert:PATH"."""
    from dtmega.data.tokenizers import wordpiece

    return wordpiece


def confined_tokenizer():
    """A tokenizer.json as [data] tokenizer."""
    from dtmega.data.tokenizers import tokenizer_child

    return tokenizer_child


def stored_pairs():
    """Token files in an object store: a URL of a store as [data] path."""
    from dtmega.data.indexed_files import stored

    return stored


def stored_rows():
    """Rows of samples whose tokens are in an object store."""
    from dtmega.data.objectives import stored_rows

    return stored_rows


# Training: what a step may do beside training, and what a run may report.


def dry_run():
    """The check whether a run would start, without starting it: `--dry-run`."""
    from dtmega.planning.answers import dry_run

    return dry_run


def compiled_proof():
    """The proof that compiled blocks compute what eager blocks do: [compile] enable."""
    from dtmega.training import compiled_proof

    return compiled_proof


# Layouts: axes of the mesh, adapters, experts, optimizers.


# Checkpoints and files: object stores, starting weights, files of other programs.
