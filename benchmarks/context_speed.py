"""Compare the CPU time of a rank's attention under context parallelism with matrix products alone and with other forms.

    OMP_NUM_THREADS=1 python benchmarks/context_speed.py [--seq-len 2048] [--dtype bfloat16] [--cp 2] [--rounds 11]

ALiBi under a causal mask, B 1, 8 heads of 64, forward and backward, in one process that plays one rank of cp: the keys
and values that other ranks would send are there already, in forward and in backward, so no message is counted. All
forms take turns, and of each the median of CPU time counts. The table gives, for the rank's queries:

    gather             [mesh] cp_form "gather": two runs of consecutive queries, each with a strip of biases
    heads              [mesh] cp_form "heads": all queries, for 1 / cp of the heads
    products alone     only the seven matrix products of gather's chunks, without softmax and bias: two in forward, and
                       five in backward, which computes the scores again instead of keeping them
    without again      the products alone, without the second computation of the scores: the lower bound
    pair by pair       gather without the runs: each pair of a query and a key gets its own bias
    1 / cp of one      the time of attention over whole sequences in one process, divided by cp

The script compares the outputs of gather, heads and pair by pair with the output of one process.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.rows.measure import check_tensors, interleaved
from dtmega.ops.attention import attention
from dtmega.ops.attention_rule import AttentionRule, alibi_slopes, attention_rule
from dtmega.ops.context_parallel import ContextParallel
from dtmega.ops.cpu.attention import _chunks

N_HEADS, HEAD_DIM = 8, 64
AT_MOST = 1.6  # what the issue allows: attention over its products alone
WITHIN = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # relative distance of outputs


class Place(NamedTuple):
    """Stand-in for a process group: the number of cp ranks, and the number of this rank."""

    cp: int
    number: int

    def size(self) -> int:
        return self.cp

    def rank(self) -> int:
        return self.number


class Alone(ContextParallel):
    """A rank that exchanges no messages, because its inputs already contain the tensors of the other ranks."""

    def whole(self, part: Tensor, balanced: bool) -> Tensor:
        n_tokens = part.shape[1] * self.group.size()
        assert part.dtype == torch.int32, "only places are asked for here"
        return torch.arange(n_tokens, dtype=part.dtype).expand(part.shape[0], -1)

    def gather(self, keys: Tensor, balanced: bool) -> Tensor:
        return keys

    def to_heads(self, x: Tensor, balanced: bool) -> Tensor:
        return x

    def to_tokens(self, x: Tensor, balanced: bool) -> Tensor:
        return x


def rule_of_rank(seq_len: int, place: Place, slopes: Tensor, by_heads: bool) -> AttentionRule:
    context = Alone(cast(Any, place), by_heads=by_heads, keeps_gathered=True)
    return attention_rule(own_places(seq_len, place), causal=True, slopes=slopes, context=context)


def own_places(seq_len: int, place: Place) -> Tensor:
    """The places of the rank's tokens, [1, S / cp]."""
    return ContextParallel(cast(Any, place)).slice(torch.arange(seq_len)[None], balanced=True)


def chunks_of(rule: AttentionRule, dtype: torch.dtype) -> list[Any]:
    """The chunks of queries that the kernel for this dtype works on."""
    return _chunks(rule) if dtype == torch.bfloat16 else list(rule.chunks())


class Products:
    """The matrix products of a rank's attention, forward and backward, and nothing else.

    Args:
        rule: the rank's rule in the form `gather`.
        tensors: queries, keys, values and the gradient of the output, [1, H, S / cp or S, K].
        again: True to compute the scores again in backward.
    """

    def __init__(self, rule: AttentionRule, tensors: Sequence[Tensor], again: bool) -> None:
        assert rule.shared is not None
        self.again = again
        q, k, v, gradient = (x.detach()[0] for x in tensors)
        self.parts: list[list[Tensor]] = []
        self.n_pairs = 0
        for run in rule.shared.runs:
            for chunk in chunks_of(run.rule, q.dtype):
                queries = slice(run.start + chunk.start, run.start + chunk.stop)
                keys = slice(chunk.first, chunk.last)
                self.parts.append([q[:, queries], k[:, keys], v[:, keys], gradient[:, queries]])
                self.n_pairs += (chunk.stop - chunk.start) * (chunk.last - chunk.first)
        largest = max(part[0].shape[1] * part[1].shape[1] for part in self.parts)
        self.scores = q.new_zeros(len(q) * largest)
        self.dscores = q.new_zeros(len(q) * largest)
        self.results = [[torch.empty_like(x) for x in (part[0], part[0])] for part in self.parts]
        self.dk = torch.zeros_like(k)
        self.dv = torch.zeros_like(v)

    def __call__(self) -> None:
        for (q, k, v, gradient), (out, dq) in zip(self.parts, self.results, strict=True):
            shape = len(q), q.shape[1], k.shape[1]
            size = shape[0] * shape[1] * shape[2]
            scores, dscores = self.scores[:size].view(shape), self.dscores[:size].view(shape)
            torch.bmm(q, k.mT, out=scores)
            # The time of a product does not depend on its values, except for denormal numbers, which do not occur here.
            torch.bmm(scores, v, out=out)
            if self.again:
                torch.bmm(q, k.mT, out=scores)
            torch.bmm(gradient, v.mT, out=dscores)
            torch.bmm(dscores, k, out=dq)
            for to, left, right in ((self.dk, dscores, q), (self.dv, scores, gradient)):
                part = to[:, : k.shape[1]]
                torch.baddbmm(part, left.mT, right, out=part)


def both_ways(
    form: Callable[..., Tensor], inputs: Sequence[Tensor], gradient: Tensor
) -> tuple[Callable[[], object], Callable[[], Tensor]]:
    """A function that runs a form's forward and backward, and a function that runs only the forward."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    return lambda: torch.autograd.grad(form(*leaves), leaves, gradient), lambda: form(*leaves).detach()


def forms(seq_len: int, place: Place, dtype: torch.dtype) -> tuple[dict[str, Callable[[], object]], float]:
    """The forms to time, by name, and the share of the computed pairs that causality allows.

    Raises:
        AssertionError: a form's output differs from one process's output.
    """
    torch.manual_seed(0)
    q, k, v, gradient = (torch.randn(1, N_HEADS, seq_len, HEAD_DIM).to(dtype) for _ in range(4))
    slopes = alibi_slopes(N_HEADS)
    own = own_places(seq_len, place)
    mine = own[0]
    per_rank = N_HEADS // place.cp
    of_rank = slice(place.number * per_rank, (place.number + 1) * per_rank)
    one = attention_rule(torch.arange(seq_len)[None], causal=True, slopes=slopes)
    by_gather = rule_of_rank(seq_len, place, slopes, by_heads=False)
    by_heads = rule_of_rank(seq_len, place, slopes, by_heads=True)
    by_pairs = attention_rule(own, causal=True, slopes=slopes, key_places=torch.arange(seq_len)[None])
    tokens = q[:, :, mine], k, v
    heads = q[:, of_rank], k[:, of_rank], v[:, of_rank]
    given = {
        "gather": (by_gather, tokens, gradient[:, :, mine]),
        "heads": (by_heads, heads, gradient[:, of_rank]),
        "pair by pair": (by_pairs, tokens, gradient[:, :, mine]),
        "one process": (one, (q, k, v), gradient),
    }
    timed: dict[str, Callable[[], object]] = {}
    outputs: dict[str, Tensor] = {}
    for name, (rule, inputs, up) in given.items():
        timed[name], forward = both_ways(lambda q, k, v, rule=rule: attention(q, k, v, rule), inputs, up)
        outputs[name] = forward()
    whole = outputs["one process"]
    check_tensors(outputs["gather"], whole[:, :, mine], WITHIN[dtype])
    check_tensors(outputs["pair by pair"], whole[:, :, mine], WITHIN[dtype])
    check_tensors(outputs["heads"], whole[:, of_rank], WITHIN[dtype])
    products = Products(by_gather, (*tokens, gradient[:, :, mine]), again=True)
    timed["products alone"] = products
    timed["without again"] = Products(by_gather, (*tokens, gradient[:, :, mine]), again=False)
    return timed, float((mine + 1).sum()) / products.n_pairs


def table(ms: Mapping[str, float], cp: int) -> str:
    """Format one line for each form: the name, CPU milliseconds, and the ratio to the products alone."""
    alone_ms = ms["products alone"]
    rows = {name: ms[name] for name in ("gather", "heads", "products alone", "without again", "pair by pair")}
    rows[f"1 / {cp} of one"] = ms["one process"] / cp
    return "\n".join(f"  {name:<16} {each:8.1f} ms {each / alone_ms:7.2f}" for name, each in rows.items())


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--cp", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=11)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dtype = getattr(torch, arguments.dtype)
    worst = 0.0
    for number in range(arguments.cp):
        started_s = time.process_time()
        timed, allowed = forms(arguments.seq_len, Place(arguments.cp, number), dtype)
        times = interleaved(timed, arguments.rounds)
        ms = {name: statistics.median(each) for name, each in times.items()}
        of_rounds = [a / b for a, b in zip(times["gather"], times["products alone"], strict=True)]
        ratio = ms["gather"] / ms["products alone"]
        worst = max(worst, ratio)
        print(
            f"S {arguments.seq_len}, {arguments.dtype}, rank {number} of cp {arguments.cp}: {ratio:.2f} of its "
            f"products alone (rounds {min(of_rounds):.2f} to {max(of_rounds):.2f}); {allowed:.0%} of the computed "
            f"pairs are allowed; {time.process_time() - started_s:.0f} CPU s",
            flush=True,
        )
        print(table(ms, arguments.cp), flush=True)
    print(f"at most {AT_MOST}: {'yes' if worst <= AT_MOST else 'no'}, {worst:.2f}")
    return 0 if worst <= AT_MOST else 1


if __name__ == "__main__":
    sys.exit(main())
