"""Context parallelism: each sequence is split over the cp ranks, and attention exchanges keys and values, or heads.

Each rank holds S / cp tokens of each sequence. Under a causal mask, rank r holds slices r and 2 cp - 1 - r of 2 cp
slices, so that all ranks compute the same number of token pairs (Llama 3, arXiv:2407.21783, section 3.3.2). With
attention in both directions, rank r holds slice r of cp slices. Everything outside attention works on single tokens
and needs no communication, because the batch contains the tokens' global positions.

Attention has two forms:

    gather   each rank has the keys and values of all tokens    [B, G, S/cp, K] -> [B, G, S, K]
    heads    each rank has all tokens, for a part of the heads  [B, H, S/cp, K] -> [B, H/cp, S, K]

Each rank computes the queries of its own tokens, or of its own heads. To a kernel, a run of consecutive queries with
all earlier keys looks like new tokens with a key/value cache on a single device, so no special kernels are needed.

In the form `gather`, backward gathers keys and values again instead of keeping them. In recomputed blocks, the
recomputation just before backward has already gathered the keys and values again, so backward does not gather a third
time.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dtmega.ops.attention import attention, is_kernel, needs_formula
from dtmega.ops.attention_rule import AttentionRule
from dtmega.ops.keyed import Dropout
from dtmega.ops.sequence_exchange import Gather, GatheredAgain, Redistribute, all_gather, in_order, part_of_rank

Finish = Callable[[AttentionRule, bool], AttentionRule]


class ContextParallel(NamedTuple):
    """The cp ranks, over which each sequence is split, and the form of their attention.

    Attributes:
        group: process group of the cp ranks.
        by_heads: whether attention has the form `heads`; if False, attention has the form `gather`.
        keeps_gathered: whether to keep gathered keys and values for backward, as in recomputed blocks; if False,
            backward gathers them again.
    """

    group: dist.ProcessGroup
    by_heads: bool = False
    keeps_gathered: bool = False

    def slice(self, row: Tensor, balanced: bool) -> Tensor:
        """This rank's part, [B, S / cp, ...], of a tensor with one entry per token, [B, S, ...].

        Args:
            row: tensor of the whole sequences, [B, S, ...].
            balanced: whether the part consists of two slices, one from each half of the sequence; if False, the part is
                a single slice.
        """
        return part_of_rank(row, self.group.rank(), self.group.size(), dim=1, balanced=balanced).contiguous()

    def whole(self, part: Tensor, balanced: bool) -> Tensor:
        """Join the ranks' parts into one tensor of whole sequences, [B, S, ...], which carries no gradient."""
        # gloo cannot gather bools.
        numbers = part.to(torch.uint8) if part.dtype == torch.bool else part
        return in_order(all_gather(numbers, self.group), dim=1, balanced=balanced).to(part.dtype)

    def runs(self, length: int, balanced: bool) -> list[Run]:
        """The runs of consecutive tokens that this rank holds.

        Args:
            length: S / cp, the number of tokens that this rank holds.
            balanced: whether this rank holds two slices instead of one, as in `slice`.
        """
        n, rank = self.group.size(), self.group.rank()
        if not balanced:
            return [Run(0, length, rank * length)]
        half = length // 2
        return [Run(0, half, rank * half), Run(half, length, (2 * n - 1 - rank) * half)]

    def gather(self, keys: Tensor, balanced: bool) -> Tensor:
        """Gather the ranks' keys or values [B, G, S / cp, K] into [B, G, S, K], in the order of the sequence."""
        return cast(Tensor, Gather.apply(keys, self.group, balanced))

    def gathering_again(self, gathered: Tensor, parts: list[Tensor], balanced: bool) -> saved_tensors_hooks:
        """In the `with` block, make autograd keep `parts` for backward instead of views of `gathered`.

        Args:
            gathered: result of `gather`.
            parts: tensors whose concatenation along the last dim was passed to `gather`.
            balanced: value of `balanced` that was passed to `gather`.
        """
        again = GatheredAgain(gathered, parts, self.group, balanced)
        return saved_tensors_hooks(again.pack, again.unpack)

    def to_heads(self, x: Tensor, balanced: bool) -> Tensor:
        """Turn all heads of this rank's tokens, [B, H, S / cp, K], into some heads of all tokens, [B, H / cp, S, K]."""
        return cast(Tensor, Redistribute.apply(x, self.group, balanced, True))

    def to_tokens(self, x: Tensor, balanced: bool) -> Tensor:
        """Undo `to_heads`."""
        return cast(Tensor, Redistribute.apply(x, self.group, balanced, False))

    def own_heads(self, per_head: Tensor) -> Tensor:
        """This rank's rows of a tensor [H, ...] with one row per head, for attention in the form `heads`."""
        return per_head.chunk(self.group.size())[self.group.rank()]

    def shared(self, part: AttentionRule, crosses: bool, finish: Finish) -> AttentionRule:
        """Complete the rule for sequences that are split over the cp ranks.

        Args:
            part: rule with this rank's parts of the query and key tensors.
            crosses: whether this is cross-attention, where keys and queries come from different tokens.
            finish: function that completes a rule for consecutive queries. The second argument of `finish` is True if
                the last key and the last query belong to the same token.
        """
        # Tokens under a causal mask are balanced over the ranks, and so are a decoder's queries in cross-attention.
        keys_balanced, queries_balanced = part.causal, part.causal or crosses

        def whole(tensor: Tensor | None, balanced: bool) -> Tensor | None:
            return None if tensor is None else self.whole(tensor, balanced)

        part = part._replace(
            query_places=part.query_places.to(torch.int32),
            key_places=self.whole(part.key_places.to(torch.int32), keys_balanced),
            key_documents=whole(part.key_documents, keys_balanced),
            prefix=whole(part.prefix, keys_balanced),
        )
        if self.by_heads:
            runs = [self._run_of_heads(part, crosses, queries_balanced, finish)]
        else:
            runs = self._runs_of_tokens(part, queries_balanced, finish)
        return part._replace(shared=SharedRule(self, tuple(runs), queries_balanced, keys_balanced))

    def _run_of_heads(self, part: AttentionRule, crosses: bool, balanced: bool, finish: Finish) -> RunRule:
        """The rule for all queries, with this rank's part of the heads."""
        documents = part.query_documents
        rule = part._replace(
            query_places=self.whole(part.query_places, balanced),
            query_documents=None if documents is None else self.whole(documents, balanced),
            slopes=None if part.slopes is None else self.own_heads(part.slopes),
            table=None if part.table is None else self.own_heads(part.table),
        )
        return RunRule(0, rule.query_places.shape[1], rule.key_places.shape[1], finish(rule, not crosses))

    def _runs_of_tokens(self, part: AttentionRule, balanced: bool, finish: Finish) -> list[RunRule]:
        """One rule for each run of this rank's queries, with all keys that the queries in the run may see."""
        # A causal query sees no later key, unless the key is part of a prefix.
        ends_with_queries = part.causal and part.prefix is None
        runs: list[RunRule] = []
        for run in self.runs(part.query_places.shape[1], balanced):
            queries = slice(run.start, run.stop)
            n_keys = run.place + run.stop - run.start if ends_with_queries else part.key_places.shape[1]
            documents, of_keys = part.query_documents, part.key_documents
            # Copy the tensors, because torch 2.13 cannot compile a block whose custom autograd function receives the
            # same tensor twice.
            rule = part._replace(
                query_places=part.query_places[:, queries].contiguous(),
                query_documents=None if documents is None else documents[:, queries].contiguous(),
                key_places=part.key_places[:, :n_keys].contiguous(),
                key_documents=None if of_keys is None else of_keys[:, :n_keys].contiguous(),
            )
            runs.append(RunRule(run.start, run.stop, n_keys, finish(rule, ends_with_queries)))
        return runs


class Run(NamedTuple):
    """A run of consecutive tokens.

    Attributes:
        start, stop: bounds of the run among the tokens that the rank holds.
        place: index of the run's first token in the whole sequence.
    """

    start: int
    stop: int
    place: int


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
    rule: AttentionRule


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

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, dropout: Dropout | None, scale: float | None, softcap: float | None
    ) -> Tensor:
        """Compute attention for this rank's tokens, [B, H, S / cp, K]; the arguments are those of `attention`."""
        context = self.context
        if context.by_heads:
            if dropout is not None:
                dropout = dropout._replace(head_ids=context.own_heads(dropout.head_ids))
            q = context.to_heads(q, self.queries_balanced)
            k, v = (context.to_heads(x, self.keys_balanced) for x in (k, v))
            out = attention(q, k, v, self.runs[0].rule, dropout, scale, softcap)
            return context.to_tokens(out, self.queries_balanced)
        if context.keeps_gathered or not torch.is_grad_enabled():
            return self._over_all_keys(q, k, v, dropout, scale, softcap)
        if not torch.compiler.is_compiling():
            return self._over_all_keys(q, k, v, dropout, scale, softcap, again=True)
        # In a compiled block, Inductor chooses the tensors to keep for backward from those that the policy allows. The
        # plain formula has no kernel whose results could be kept, and recomputing it would cost more than keeping the
        # keys.
        if dropout is not None or any(needs_formula(run.rule, softcap) for run in self.runs):
            return self._over_all_keys(q, k, v, dropout, scale, softcap)

        def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self._over_all_keys(q, k, v, None, scale, softcap)

        keywords: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        return checkpoint(compute, q, k, v, context_fn=_keeping_results_of_kernels, **keywords)

    def _over_all_keys(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout: Dropout | None,
        scale: float | None,
        softcap: float | None,
        again: bool = False,
    ) -> Tensor:
        """Gather the keys and values of all tokens and compute attention for this rank's tokens.

        Args:
            again: whether to gather keys and values again in backward, instead of keeping them.
        """
        context = self.context
        # One message carries keys and values.
        parts = [k, v]
        gathered = context.gather(torch.cat(parts, dim=-1), self.keys_balanced)
        k, v = gathered.split([k.shape[-1], v.shape[-1]], dim=-1)
        outs: list[Tensor] = []
        keeping = context.gathering_again(gathered, parts, self.keys_balanced) if again else contextlib.nullcontext()
        with keeping:
            for run in self.runs:
                queries = q[:, :, run.start : run.stop]
                run_k, run_v = k[:, :, : run.n_keys], v[:, :, : run.n_keys]
                outs.append(attention(queries, run_k, run_v, run.rule, dropout, scale, softcap))
        return torch.cat(outs, dim=2)


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep the kernels' results and recompute the remaining operations: the gather and the slicing of its result."""
    return CheckpointPolicy.MUST_SAVE if is_kernel(op) else CheckpointPolicy.MUST_RECOMPUTE


_keeping_results_of_kernels = functools.partial(create_selective_checkpoint_contexts, _policy)
