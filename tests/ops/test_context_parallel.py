"""Claims about context_parallel.py; the truth is torch's own attention over all pairs, on one process, in fp64."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.multiprocessing.reductions import StorageWeakRef

from dtmega import config, families
from dtmega.ops import attention_rule as R
from dtmega.ops import context_parallel, keyed, sequence_exchange
from dtmega.ops.attention import Dropout, attention
from dtmega.ops.attention_rule import alibi_slopes, attention_rule
from dtmega.ops.block_mask import block_mask
from dtmega.ops.context_parallel import ContextParallel, RunRule, SharedRule
from tests import ranks

# Number of ranks -> the two slices of each rank, as in the figure of Llama 3's paper, section 3.3.2.
HELD = {2: [(0, 3), (1, 2)], 3: [(0, 5), (1, 4), (2, 3)], 4: [(0, 7), (1, 6), (2, 5), (3, 4)]}
B, H, S, T, K = 2, 6, 24, 18, 4  # S queries; T keys, if these belong to other tokens
M = 5  # the largest distance with an entry of its own in the table


def places_of(rank: int, n: int, balanced: bool, length: int = S) -> list[int]:
    """The places that a rank holds, from HELD."""
    held, n_slices = (HELD[n][rank], 2 * n) if balanced else ((rank,), n)
    size = length // n_slices
    return [place for number in held for place in range(number * size, (number + 1) * size)]


def alone(rank: int, n: int) -> ContextParallel:
    """The view of one rank, without a group."""
    group: Any = SimpleNamespace(size=lambda: n, rank=lambda: rank)
    return ContextParallel(group)


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("n", HELD)
def test_the_ranks_hold_each_token_once(n, balanced):
    row = torch.arange(2 * S).view(2, S)
    held = [alone(rank, n).slice(row, balanced) for rank in range(n)]
    assert [part.tolist() for part in held] == [row[:, places_of(r, n, balanced)].tolist() for r in range(n)]
    assert sorted(torch.cat(held, 1)[0].tolist()) == list(range(S))


@pytest.mark.parametrize("n", HELD)
def test_every_rank_has_the_same_number_of_pairs_to_compute_under_a_causal_mask(n):
    row = torch.arange(S)[None]
    assert len({int((alone(rank, n).slice(row, True) + 1).sum()) for rank in range(n)}) == 1


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("n", HELD)
def test_a_run_is_of_consecutive_places_and_the_runs_are_all_that_a_rank_holds(n, balanced):
    for rank in range(n):
        found: list[int] = []
        for start, stop, place in alone(rank, n).runs(S // n, balanced):
            assert start == len(found)
            found += range(place, place + stop - start)
        assert found == places_of(rank, n, balanced)


@pytest.mark.parametrize("has_places", [False, True])
def test_a_rank_gets_its_part_of_each_text_and_the_places_in_the_whole_one(has_places):
    with torch.device("meta"):
        model = families.build(config.validate({"train": {"steps": 1}, "model": {"name": "t5"}}, "test"))
    rows = {"tokens": torch.arange(6) + 10, "decoder_tokens": torch.arange(12) + 30, "labels": torch.arange(12) + 50}
    if has_places:  # as the loader's rows do
        rows |= {"places": torch.arange(6), "decoder_places": torch.arange(12)}
    batch = {name: row[None] for name, row in rows.items()} | {"sample_ids": torch.tensor([7])}
    parts = model.part_of(batch, alone(1, 3))
    found = {name: part.flatten().tolist() for name, part in parts.items()}
    encoder, decoder = [2, 3], [2, 3, 8, 9]
    assert found == {
        "tokens": [place + 10 for place in encoder],
        "places": encoder,
        "decoder_tokens": [place + 30 for place in decoder],
        "decoder_places": decoder,
        "labels": [place + 50 for place in decoder],
        "sample_ids": [7],
    }


@pytest.mark.parametrize("rank", range(3))
def test_the_table_of_a_layer_reaches_each_run_and_so_does_its_window(rank):
    rule = attention_rule(torch.arange(S)[None], causal=True, table=torch.zeros(H, 2 * M + 1), window=9)
    runs = (RunRule(0, 4, 4, rule), RunRule(4, 8, S, rule))
    table = torch.arange(H * (2 * M + 1.0)).view(H, -1)
    tokens = SharedRule(alone(rank, 3), runs, True, True).with_table(table).with_window(2)
    assert [run.rule.window for run in tokens.runs] == [2, 2]
    assert all(torch.equal(run.rule.table, table) for run in tokens.runs)
    heads = SharedRule(alone(rank, 3)._replace(by_heads=True), runs[:1], True, True).with_table(table)
    assert torch.equal(heads.runs[0].rule.table, table[2 * rank : 2 * rank + 2])


class Rule(NamedTuple):
    """A rule of attention over all tokens.

    Attributes:
        keywords: arguments of `attention_rule` for the whole sequences.
        allowed: [B, 1, queries, keys] bool.
        added: what is added to the scores, [1, H, queries, keys].
        crosses: True if the keys belong to other tokens.
    """

    keywords: dict[str, Any]
    allowed: Tensor
    added: Tensor | float
    crosses: bool


WORDS = {
    "both ways": (),
    "causal": ("causal",),
    "BLOOM": ("causal", "slopes"),
    "BLOOM in documents": ("causal", "slopes", "documents"),
    "window": ("causal", "window"),
    "prefix": ("causal", "prefix"),
    "prefix in documents": ("causal", "prefix", "documents"),
    "BERT": ("documents",),
    "T5's encoder": ("documents", "table"),
    "T5's decoder": ("causal", "table"),
    "cross": ("cross", "documents"),
    "everything": ("causal", "prefix", "documents", "window", "slopes", "table"),
}
CASES = [(name, form) for name in WORDS for form in ("gather", "heads")]


def said_twice(words: tuple[str, ...], table: Tensor) -> Rule:
    """A rule as keywords, and over all pairs."""
    causal, crosses = "causal" in words, "cross" in words
    n_keys = T if crosses else S
    queries, keys = torch.arange(S).repeat(B, 1), torch.arange(n_keys).repeat(B, 1)
    # Documents begin within slices, elsewhere in each row. A decoder's text sees the first document of its encoder's.
    ids = torch.stack([(queries[0] >= 7).long() + (queries[0] >= 20), (queries[1] >= 15).long()])
    query_ids, key_ids = (torch.zeros_like(queries), ids[:, :T]) if crosses else (ids, ids)
    prefix = keys < torch.tensor([[3], [16]])
    distance = keys[:, None, None, :] - queries[:, None, :, None]
    allowed = torch.ones_like(distance, dtype=torch.bool)
    added: Tensor | float = 0.0
    keywords: dict[str, Any] = {"places": queries, "causal": causal}
    if crosses:
        keywords |= {"key_places": keys}
    if causal:
        allowed = distance <= 0
    if "prefix" in words:
        keywords |= {"prefix": prefix}
        allowed = allowed | prefix[:, None, None, :]
    if "window" in words:
        keywords |= {"window": 9}
        allowed = allowed & (distance.abs() < 9)
    if "documents" in words:
        keywords |= {"document_ids": query_ids} | ({"key_document_ids": key_ids} if crosses else {})
        allowed = allowed & (query_ids[:, None, :, None] == key_ids[:, None, None, :])
    if "slopes" in words:
        keywords |= {"slopes": alibi_slopes(H).double()}
        added = added + alibi_slopes(H).double()[:, None, None] * distance
    if "table" in words:
        keywords |= {"table": table}
        added = added + table[:, distance[0, 0].clamp(-M, M) + M]
    return Rule(keywords, allowed, added, crosses)


def inputs(n: int, crosses: bool) -> list[Tensor]:
    """Queries, keys, values, the table, and the weights of the outputs in the loss, the same on every process."""
    generator = torch.Generator().manual_seed(n)
    keys = (B, n, T if crosses else S, K)  # as few heads of keys as n ranks can divide
    shapes = [(B, H, S, K), keys, keys, (H, 2 * M + 1), (B, H, S, K)]
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


def truth(n: int, name: str) -> list[Tensor]:
    """The output, and the gradients of queries, keys, values and table, of torch's attention."""
    *given, weights = inputs(n, name == "cross")
    q, k, v, table = (x.requires_grad_() for x in given)
    rule = said_twice(WORDS[name], table)
    mask = torch.zeros(()).double().masked_fill(~rule.allowed, -torch.inf) + rule.added
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    has_table = "table" in WORDS[name]
    gradients = torch.autograd.grad((out * weights).sum(), [q, k, v, *([table] if has_table else [])])
    return [out.detach(), *gradients]


def of_rank(
    name: str,
    by_heads: bool,
    dropout: Dropout | None = None,
    flex: bool = False,
    keeps: bool = False,
    attend: Callable[..., Tensor] = attention,
) -> list[Tensor]:
    """The same of this rank's tokens; of the table, this rank's part of the sum."""
    assert dist.group.WORLD is not None
    context = ContextParallel(dist.group.WORLD, by_heads, keeps)
    n = context.group.size()
    *given, table, weights = inputs(n, name == "cross")
    table.requires_grad_()
    whole = said_twice(WORDS[name], table)
    keys_balanced = whole.keywords["causal"]
    queries_balanced = keys_balanced or whole.crosses
    keywords: dict[str, Any] = {}
    for keyword, value in whole.keywords.items():
        is_row = isinstance(value, Tensor) and value.shape[0] == B
        of_keys = keyword in ("key_places", "key_document_ids", "prefix")
        keywords[keyword] = context.slice(value, keys_balanced if of_keys else queries_balanced) if is_row else value

    def part(x: Tensor, balanced: bool) -> Tensor:
        return context.slice(x.transpose(1, 2), balanced).transpose(1, 2)

    q, k, v = (
        part(x, balanced).detach().requires_grad_()
        for x, balanced in zip(given, (queries_balanced, keys_balanced, keys_balanced), strict=True)
    )
    rule = attention_rule(**keywords, context=context)
    if flex:
        assert rule.shared is not None
        runs = [run._replace(rule=_for_flex(run.rule)) for run in rule.shared.runs]
        rule = rule._replace(shared=rule.shared._replace(runs=tuple(runs)))
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
            return [attention(q.detach(), k.detach(), v.detach(), rule)]
    out = attend(q, k, v, rule, dropout)
    has_table = "table" in WORDS[name]
    loss = (out * part(weights, queries_balanced)).sum()
    return [out.detach(), *torch.autograd.grad(loss, [q, k, v, *([table] if has_table else [])])]


def _for_flex(rule: R.AttentionRule) -> R.AttentionRule:
    return rule._replace(strip=None, block_mask=block_mask(rule))


DROPOUT = Dropout(
    0.3, torch.tensor(keyed.key(1, "site"), dtype=torch.int32), torch.arange(H, dtype=torch.int32), torch.tensor([5, 9])
)
IN_FLEX = [
    ("prefix in documents", "gather"),
    # FlexAttention takes half a second in eager.
    pytest.param("BLOOM in documents", "gather", marks=pytest.mark.full),
    pytest.param("cross", "gather", marks=pytest.mark.full),
    pytest.param("prefix in documents", "heads", marks=pytest.mark.full),
]


def computed_here() -> dict[Any, Any]:
    """Every result of this rank that a test asks for."""
    R.CHUNK_QUERIES["cpu"] = 4  # so that a run has several
    assert dist.group.WORLD is not None
    found: dict[Any, Any] = {case: of_rank(case[0], case[1] == "heads") for case in CASES}
    for name, form in CASES:
        found[name, form, "dropped"] = of_rank(name, form == "heads", DROPOUT)
    for name in WORDS:
        found[name, "kept"] = of_rank(name, False, keeps=True)
        found[name, "kept", "dropped"] = of_rank(name, False, DROPOUT, keeps=True)
    found["alive"] = {(keeps, dropped): alive(keeps, dropped) for keeps in (False, True) for dropped in (False, True)}
    found["again"] = of_rank("BLOOM in documents", False)
    context = ContextParallel(dist.group.WORLD)
    n, rank = context.group.size(), context.group.rank()
    for balanced in (True, False):
        for row in ROWS:
            found["whole", balanced, row.dtype] = context.whole(context.slice(row, balanced), balanced)
    keys = torch.ones(1, 1, 2, 1, requires_grad=True)
    gathered = context.gather(keys, balanced=True)
    (found["order"],) = torch.autograd.grad(gathered, keys, torch.full_like(gathered, OF_RANKS[rank]))
    x = inputs(n, False)[0][:, :, : S // n]
    heads = context.to_heads(x, balanced=True)
    found["shape of heads"] = tuple(heads.shape)
    found["back"] = torch.equal(context.to_tokens(heads, balanced=True), x)
    return found


def alive(keeps: bool, dropped: bool) -> list[bool]:
    """Whether keys and values of all tokens are in memory: after forward, and after a backward that keeps its graph."""
    assert dist.group.WORLD is not None
    context = ContextParallel(dist.group.WORLD, keeps_gathered=keeps)
    seen: list[StorageWeakRef] = []

    def join(*args: Any, **kwargs: Any) -> Tensor:
        joined = in_order(*args, **kwargs)
        seen.append(StorageWeakRef(joined.untyped_storage()))
        return joined

    rule = attention_rule(context.slice(torch.arange(S).repeat(B, 1), True), causal=True, context=context)
    shape = (B, H, S // context.group.size(), K)
    q, k, v = (torch.ones(shape, requires_grad=True) for _ in range(3))
    in_order, found = sequence_exchange.in_order, list[bool]()
    with patch.object(context_parallel, "in_order", join), patch.object(sequence_exchange, "in_order", join):
        out = attention(q, k, v, rule, DROPOUT if dropped else None)
        found.append(not all(storage.expired() for storage in seen))
        torch.autograd.grad(out.sum(), [q, k, v], retain_graph=True)
        found.append(not all(storage.expired() for storage in seen))
    assert len(seen) == (1 if keeps else 2)
    return found


ROWS = [torch.arange(B * S).view(B, S), torch.arange(B * S).view(B, S) % 3 == 0]
# In fp32 the last one takes away what the second one was added to, and could not change: 0, and in other orders 1.
OF_RANKS = [2.0**24, 1.0, -(2.0**24)]


@functools.cache
def computed(n: int) -> list[dict[Any, Any]]:
    return ranks.run(n, computed_here)


def in_flex(name: str, form: str) -> dict[Any, Any]:
    """The output of this rank's tokens, as on a GPU."""
    return {(name, form, "flex"): of_rank(name, form == "heads", flex=True)}


def joined(n: int, case: tuple[str, ...], results: list[dict[Any, Any]] | None = None) -> list[Tensor]:
    """The ranks' results, by the tables of this file: tokens at their places, and the sum of the tables' parts."""
    found = [here[case] for here in results or computed(n)]
    keys_balanced = "causal" in WORDS[case[0]]
    queries_balanced = keys_balanced or case[0] == "cross"
    whole: list[Tensor] = []
    for i, (first, *_) in enumerate(zip(*found, strict=True)):
        if i == 4:
            whole.append(torch.stack([here[i] for here in found]).sum(0))
            continue
        balanced = keys_balanced if i in (2, 3) else queries_balanced
        length = first.shape[2] * n
        x = first.new_full((*first.shape[:2], length, K), torch.nan)
        for rank, here in enumerate(found):
            x[:, :, places_of(rank, n, balanced, length)] = here[i]
        whole.append(x)
    return whole


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(("name", "form"), CASES)
def test_outputs_and_gradients_are_those_of_torchs_attention_on_one_process(n, name, form):
    torch.testing.assert_close(joined(n, (name, form)), truth(n, name), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("name", WORDS)
def test_the_masks_of_dropout_are_those_of_one_process(n, name):
    *given, weights = inputs(n, name == "cross")
    q, k, v, table = (x.requires_grad_() for x in given)
    out = attention(q, k, v, attention_rule(**said_twice(WORDS[name], table).keywords), DROPOUT)
    has_table = "table" in WORDS[name]
    gradients = torch.autograd.grad((out * weights).sum(), [q, k, v, *([table] if has_table else [])])
    for form in ("gather", "heads"):
        found = joined(n, (name, form, "dropped"))
        torch.testing.assert_close(found, [out.detach(), *gradients], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("name", WORDS)
def test_keys_that_are_gathered_again_in_backward_give_the_bits_of_keys_that_are_kept(n, name):
    for here in computed(n):
        for dropped in ((), ("dropped",)):
            both = zip(here[(name, "gather", *dropped)], here[(name, "kept", *dropped)], strict=True)
            assert all(torch.equal(again, kept) for again, kept in both)


@pytest.mark.parametrize("dropped", [False, True])
def test_keys_of_all_tokens_are_freed_after_forward_and_after_backward_unless_they_are_kept(dropped):
    for here in computed(2):
        assert here["alive"][False, dropped] == [False, False]
        assert here["alive"][True, dropped] == [True, True]


def compiled(name: str) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """The results of a compiled block that gathers again, those of one that keeps, and each graph's all-gathers."""
    n_gathers: list[int] = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        gather = torch.ops._c10d_functional.all_gather_into_tensor.default
        n_gathers.append(len(graph.graph.find_nodes(op="call_function", target=gather)))
        return make_boxed_func(graph)

    results: list[list[Tensor]] = []
    for keeps in (False, True):
        torch._dynamo.reset()
        backend = aot_autograd(fw_compiler=count, partition_fn=min_cut_rematerialization_partition)
        attend = torch.compile(attention, backend=backend, fullgraph=True, dynamic=False)
        results.append(of_rank(name, False, keeps=keeps, attend=attend))
    again, kept = results
    return again, kept, n_gathers


def test_a_compiled_block_gathers_again_and_gives_the_same_bits():
    for here in ranks.run(2, compiled, "BLOOM"):
        again, kept, n_gathers = here
        assert all(torch.equal(*both) for both in zip(again, kept, strict=True))
        assert n_gathers == [1, 1, 1, 0]  # forward and backward of the two


@pytest.mark.parametrize(("name", "form"), IN_FLEX)
def test_flex_attention_sees_the_same_pairs(name, form):
    out = joined(2, (name, form, "flex"), ranks.run(2, in_flex, name, form))
    torch.testing.assert_close(out, truth(2, name)[:1], atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("row", ROWS, ids=["numbers", "bools"])
def test_the_parts_of_a_row_join_to_the_row(n, balanced, row):
    for here in computed(n):
        assert torch.equal(here["whole", balanced, row.dtype], row)


@pytest.mark.parametrize("n", [2, 3])
def test_two_runs_give_the_same_bits(n):
    for here in computed(n):
        both = zip(here["again"], here["BLOOM in documents", "gather"], strict=True)
        assert all(torch.equal(again, first) for again, first in both)


def test_gradients_of_keys_are_added_in_the_order_of_the_ranks():
    assert [here["order"].flatten().tolist() for here in computed(3)] == [[0.0, 0.0]] * 3


@pytest.mark.parametrize("n", [2, 3])
def test_a_rank_has_a_part_of_the_heads_of_all_tokens_and_gets_its_tokens_back(n):
    for here in computed(n):
        assert here["shape of heads"] == (B, H // n, S, K)
        assert here["back"]
