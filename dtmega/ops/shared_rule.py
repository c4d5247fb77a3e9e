"""The attention rule for sequences that are split over the cp ranks (context parallelism).

Each rank computes the queries of its own tokens, or of its own heads. To a kernel, a run of consecutive queries with
all earlier keys looks like new tokens with a key/value cache on a single device, so no special kernels are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtmega.ops.context_parallel import ContextParallel


class RunRule(NamedTuple):
    """The rule for a run of consecutive queries.

    Attributes:
        start, stop: range of the run within the queries that the rank computes.
        n_keys: number of keys, from the start of the sequence, that the queries may see.
        rule: attention rule for these queries and keys.
    """

    start: int
    stop: int
    n_keys: int
    rule: Any


class SharedRule(NamedTuple):
    """The rule for sequences that are split over the cp ranks.

    Attributes:
        context: cp ranks over which the sequences are split.
        runs: rules for the runs of queries that this rank computes.
        queries_balanced, keys_balanced: whether each rank holds two slices of the queries (or keys) instead of one.
    """

    context: ContextParallel
    runs: tuple[RunRule, ...]
    queries_balanced: bool
    keys_balanced: bool

    def with_table(self, table: Tensor) -> SharedRule:
        """Copy this rule with a different tensor for the table of all heads (`AttentionRule.with_table`)."""
        mine = self.context.own_heads(table) if self.context.by_heads else table
        runs = [run._replace(rule=run.rule.with_table(mine)) for run in self.runs]
        return self._replace(runs=tuple(runs))

    def with_window(self, window: int) -> SharedRule:
        """Copy this rule with a different window (`AttentionRule.with_window`)."""
        return self._replace(runs=tuple(run._replace(rule=run.rule.with_window(window)) for run in self.runs))


def shared_rule(part: Any, context: ContextParallel, crosses: bool, finish: Callable[[Any, bool], Any]) -> Any:
    """Complete the rule for sequences that are split over the cp ranks.

    Args:
        part: `AttentionRule` with this rank's parts of the query and key tensors.
        context: cp ranks over which the sequences are split.
        crosses: whether this is cross-attention, where keys and queries come from different tokens.
        finish: function that completes a rule for consecutive queries. The second argument of `finish` is True if the
            last key and the last query belong to the same token.
    """
    # Tokens under a causal mask are balanced over the ranks, and so are a decoder's queries in cross-attention.
    keys_balanced, queries_balanced = part.causal, part.causal or crosses

    def whole(tensor: Tensor | None, balanced: bool) -> Tensor | None:
        return None if tensor is None else context.whole(tensor, balanced)

    part = part._replace(
        query_places=part.query_places.to(torch.int32),
        key_places=whole(part.key_places.to(torch.int32), keys_balanced),
        key_documents=whole(part.key_documents, keys_balanced),
        prefix=whole(part.prefix, keys_balanced),
    )
    if context.by_heads:
        runs = [_run_of_heads(part, context, crosses, queries_balanced, finish)]
    else:
        runs = _runs_of_tokens(part, context, queries_balanced, finish)
    return part._replace(shared=SharedRule(context, tuple(runs), queries_balanced, keys_balanced))


def _run_of_heads(
    part: Any, context: ContextParallel, crosses: bool, balanced: bool, finish: Callable[[Any, bool], Any]
) -> RunRule:
    """The rule for all queries, with this rank's part of the heads."""
    documents = part.query_documents
    rule = part._replace(
        query_places=context.whole(part.query_places, balanced),
        query_documents=None if documents is None else context.whole(documents, balanced),
        slopes=None if part.slopes is None else context.own_heads(part.slopes),
        table=None if part.table is None else context.own_heads(part.table),
    )
    return RunRule(0, rule.query_places.shape[1], rule.key_places.shape[1], finish(rule, not crosses))


def _runs_of_tokens(
    part: Any, context: ContextParallel, balanced: bool, finish: Callable[[Any, bool], Any]
) -> list[RunRule]:
    """One rule for each run of this rank's queries, with all keys that the queries in the run may see."""
    # A causal query sees no later key, unless the key is part of a prefix.
    ends_with_queries = part.causal and part.prefix is None
    runs: list[RunRule] = []
    for run in context.runs(part.query_places.shape[1], balanced):
        queries = slice(run.start, run.stop)
        n_keys = run.place + run.stop - run.start if ends_with_queries else part.key_places.shape[1]
        documents = part.query_documents
        # Copy the tensors, because torch 2.13 cannot compile a block whose custom autograd function receives the
        # same tensor twice.
        rule = part._replace(
            query_places=part.query_places[:, queries].contiguous(),
            query_documents=None if documents is None else documents[:, queries].contiguous(),
            key_places=part.key_places[:, :n_keys].contiguous(),
            key_documents=None if documents is None else part.key_documents[:, :n_keys].contiguous(),
        )
        runs.append(RunRule(run.start, run.stop, n_keys, finish(rule, ends_with_queries)))
    return runs
