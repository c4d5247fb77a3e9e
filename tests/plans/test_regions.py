"""Claims about the regions of plans/styles.py: layers like a Llama's on two ranks, by numbers, collectives, bytes."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.testing._internal.distributed import fake_pg  # noqa: F401  # the backend "fake"
from torch.utils._python_dispatch import TorchDispatchMode

from dtmega import config, plans
from dtmega.ops.shards import local
from dtmega.plans import mappings, products
from dtmega.plans.styles import Column, Enter, KVColumn, Norm, Plan, Row
from dtmega.training.recompute import recompute
from tests import ranks
from tests.ranks import message

# Two heads of keys on four ranks are in test_parity.py and interop/hf/tp/test_plan.py; each rank compiles for seconds.
TP, B, S, H, KV_HEADS, K, FFN, LAYERS = 2, 2, 10, 8, 1, 4, 24, 2
D = H * K


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(D, D, bias=False)
        self.k = nn.Linear(D, KV_HEADS * K, bias=False)
        self.v = nn.Linear(D, KV_HEADS * K)
        self.out = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (-1, K)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        each = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(each, dim=1) for x in (k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(D, FFN, bias=False), nn.Linear(D, FFN, bias=False)
        self.down = nn.Linear(FFN, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn_norm, self.attn = nn.RMSNorm(D, eps=0.1), Attention()
        self.mlp_norm, self.mlp = nn.LayerNorm(D, eps=0.1), MLP()

    def forward(self, h: Tensor) -> Tensor:
        h = h + self.attn(self.attn_norm(h))
        return h + self.mlp(self.mlp_norm(h))


def table(sp: bool) -> Plan:
    return {
        "*.attn_norm": Norm(sp),
        "*.attn": Enter(sp),
        "*.attn.q": Column(sp),
        "*.attn.k": KVColumn(KV_HEADS, sp),
        "*.attn.v": KVColumn(KV_HEADS, sp),
        "*.attn.out": Row(sp),
        "*.mlp_norm": Norm(sp),
        "*.mlp": Enter(sp),
        "*.mlp.gate": Column(sp),
        "*.mlp.up": Column(sp),
        "*.mlp.down": Row(sp),
    }


def layers() -> nn.Sequential:
    """Alike in all processes; biases and norms are not left at 0 and 1."""
    model = nn.Sequential(*(Block() for _ in range(LAYERS)))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))) * 0.2)
    return model


class Moves(TorchDispatchMode):
    """Counts the collectives that are called inside."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[kind_of(func)] += 1
        return func(*args, **(kwargs or {}))


def kind_of(func: Any) -> str:
    name = str(func).replace("_", "")
    return next((kind for kind in ("allgather", "reducescatter", "allreduce") if kind in name), "")


def counting(counts: Counter[str]) -> Callable[[torch.fx.GraphModule, Any], Any]:
    """A compiler that counts the collectives of a graph."""

    def compiler(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        counts.update(kind_of(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph)

    return compiler


def error(ours: Tensor, truth: Tensor) -> float:
    return ((ours - truth).norm() / truth.norm()).item()


@contextlib.contextmanager
def compiling_apart(how: str) -> Iterator[None]:
    """Compile some parts of each region and not the others, as Dynamo does where a graph breaks inside of a region."""
    calls = itertools.count()

    def apart(part: str, honest: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            compiled = part in how or ("every other" in how and next(calls) % 2 == 1)
            with patch.object(torch.compiler, "is_compiling", lambda: compiled):
                return honest(*args)

        return call

    product = patch.object(products.Region, "product", apart("products", products.Region.product))
    with product, patch.object(products, "again", apart("ends", products.again)):
        yield


def measured(mesh: DeviceMesh, sp: bool, how: str) -> dict[str, Any]:
    """Relative errors of a forward and backward, their moves, and the bytes that forward keeps for backward."""
    generator = torch.Generator().manual_seed(3)
    x, towards = (torch.randn(B, S, D, generator=generator) for _ in range(2))
    whole, model = layers(), layers()
    partial = plans.apply_plan(model, mesh, table(sp))
    blocks = list(model.children())
    if how.startswith(("kept", "recomputed")):
        plans.keep_gathered(model)
    if how.startswith("recomputed"):
        stage: Any = SimpleNamespace(blocks=lambda: blocks)
        recompute(stage, config.Recompute(mode="selective" if how.endswith("selective") else "full"))
    forward, backward = Moves(), Moves()
    modes: list[Any] = [forward, backward]
    if how == "compiled":
        compilers = {"fw_compiler": counting(forward.counts), "bw_compiler": counting(backward.counts)}
        backend = aot_autograd(**compilers, partition_fn=min_cut_rematerialization_partition)
        for block in blocks:
            block.compile(fullgraph=True, backend=backend)
        modes = [contextlib.nullcontext()] * 2  # which a compiled block refuses

    def mine(t: Tensor) -> Tensor:
        return t.chunk(TP, 1)[mesh.get_local_rank()].clone() if sp else t.clone()

    given, leaf = mine(x).requires_grad_(), x.requires_grad_()
    kept: dict[int, int] = {}

    def keep(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    # No claim counts what recomputed blocks keep, and torch 2.14 warns of hooks around selective recomputation.
    keeping = torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t)
    apart = compiling_apart(how) if how in APART else contextlib.nullcontext()
    with modes[0], contextlib.nullcontext() if how.startswith("recomputed") else keeping, apart:
        out = model(given)
    with modes[1]:
        (out * mine(towards)).sum().backward()
    plans.sum_partial_gradients(model, partial, mesh)
    expected = whole(leaf)
    (expected * towards).sum().backward()
    bits = [given.grad, *(local(p.grad) for p in model.parameters())]
    errors = {"output": error(out, mine(expected)), "dx": error(given.grad, mine(leaf.grad))}
    for (name, p), q in zip(model.named_parameters(), whole.named_parameters(), strict=True):
        errors[name] = error(p.grad.full_tensor(), q[1].grad)
        if p.placements == (Replicate(),):
            errors[f"{name} here"] = error(p.grad.to_local(), q[1].grad)
    return {
        "errors": errors,
        "bits": bits,
        "partial": partial,
        "moves": [{kind: n for kind, n in m.counts.items() if kind} for m in (forward, backward)],
        "kept_bytes": sum(kept.values()),
    }


class Feed(nn.Module):
    """A region of one product."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, FFN), nn.Linear(FFN, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Order(TorchDispatchMode):
    """What happens, in a few words: "dX" and "dW" are products whose result has a row for each token, and others."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.words += word_of(func, out)
        return out


def word_of(func: Any, out: Any) -> list[str]:
    if "mm" in str(func):
        return ["dX" if len(out) == B * S else "dW"]
    return [kind] if (kind := kind_of(func)) else ["wait"] if "wait" in str(func) else []


def orders(mesh: DeviceMesh, sp: bool) -> dict[str, list[str]]:
    """The words of a backward: of regions with one product, with two and with three, and of one that is compiled."""

    def backward(model: nn.Module, plan: Plan) -> list[str]:
        plans.apply_plan(model, mesh, plan)
        x = torch.randn(B, S // TP if sp else S, D, requires_grad=True)
        out = model(x).sum()
        order, honest = Order(), mappings.Started.wait

        def wait(self: mappings.Started) -> Tensor:
            order.words.append("wait")
            return honest(self)

        with patch.object(mappings.Started, "wait", wait), order:
            out.backward()
        return order.words

    words: list[str] = []

    def compiler(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        for node in graph.graph.nodes:
            words.extend(word_of(node.target, node.meta.get("val")))
        return make_boxed_func(graph)

    feed: Plan = {"": Enter(sp), "up": Column(sp), "down": Row(sp)}
    found = {"one": backward(Feed(), feed)}
    found["two"] = backward(MLP(), {"": Enter(sp), "gate": Column(sp), "up": Column(sp), "down": Row(sp)})
    kv = {"k": KVColumn(KV_HEADS, sp), "v": KVColumn(KV_HEADS, sp)}
    found["three"] = backward(Attention(), {"": Enter(sp), "q": Column(sp), **kv, "out": Row(sp)})
    compiled = Feed()
    plans.apply_plan(compiled, mesh, feed)
    compiled.compile(
        fullgraph=True,
        backend=aot_autograd(
            fw_compiler=lambda graph, _: make_boxed_func(graph),
            bw_compiler=compiler,
            partition_fn=min_cut_rematerialization_partition,
        ),
    )
    compiled(torch.randn(B, S // TP if sp else S, D, requires_grad=True)).sum().backward()
    return found | {"compiled": words}


def left_over(mesh: DeviceMesh, sp: bool) -> int:
    """The regions that outlive a forward whose result is dropped, until a collector of cycles comes."""
    model = Attention()
    kv = {"k": KVColumn(KV_HEADS, sp), "v": KVColumn(KV_HEADS, sp)}
    plans.apply_plan(model, mesh, {"": Enter(sp), "q": Column(sp), **kv, "out": Row(sp)})
    gc.collect()
    before = regions()  # of other claims
    gc.disable()
    try:
        model(torch.randn(B, S // TP if sp else S, D, requires_grad=True))
        # gloo's thread says that a sum is done before it lets go of the tensor, and so of the tensor's graph.
        until = time.monotonic() + 10
        while (n_left := len(regions()) - len(before)) and time.monotonic() < until:
            time.sleep(0.01)
        return n_left
    finally:
        gc.enable()


def regions() -> list[products.Region]:
    return [thing for thing in gc.get_objects() if isinstance(thing, products.Region)]


HOWS = ("gathered again", "kept", "compiled", "recomputed", "recomputed, selective")
APART = ("only products are compiled", "only ends are compiled", "every other one is compiled")
CASES = [*((True, how) for how in HOWS), (False, "kept"), (False, "gathered again")]


def everything() -> dict[Any, Any]:
    mesh = init_device_mesh("cpu", (TP,), mesh_dim_names=("tp",))
    # What one rank launches is what all launch, and to compile takes seconds: the first one alone, without the others.
    alone = DeviceMesh.from_group(dist.new_group(backend="fake"), "cpu", mesh_dim_names=("tp",))
    found: dict[Any, Any] = {case: measured(mesh, *case) for case in CASES}
    found |= {(True, how): measured(mesh, True, how) for how in APART}
    found["left over"] = [left_over(mesh, sp) for sp in (True, False)]
    if dist.get_rank() == 0:
        found["orders"] = {sp: orders(alone, sp) for sp in (True, False)}
    without = {name: word for name, word in table(True).items() if name != "*.mlp"}
    found["never"] = message(plans.apply_plan, layers(), mesh, without)
    found["twice"] = message(plans.apply_plan, layers(), mesh, {**table(True), "*.mlp.up": Column().entering()})
    return found


@functools.cache
def on_two() -> list[dict[Any, Any]]:
    return ranks.run(TP, everything)


@pytest.mark.parametrize(("sp", "how"), [*CASES, *((True, how) for how in APART)])
def test_outputs_and_gradients_are_those_of_one_process_with_heads_of_keys_fewer_than_ranks(sp: bool, how: str):
    for found in on_two():
        assert {name: e for name, e in found[sp, how]["errors"].items() if not e < 1e-5} == {}


def test_a_layer_costs_two_gathers_and_two_scatters_each_way_and_two_gathers_again():
    both = {"allgather": 2 * LAYERS, "reducescatter": 2 * LAYERS}
    twice = {**both, "allgather": 4 * LAYERS}
    for found in on_two():
        assert found[True, "gathered again"]["moves"] == [both, twice]
        assert found[True, "kept"]["moves"] == [both, both]
        assert found[False, "kept"]["moves"] == [{"allreduce": 2 * LAYERS}] * 2


def test_a_compiled_block_gathers_again_and_in_backward():
    for found in on_two():
        # Of the one graph that both layers share.
        assert found[True, "compiled"]["moves"] == [
            {"allgather": 2, "reducescatter": 2},
            {"allgather": 4, "reducescatter": 2},
        ]


def test_regions_that_gather_again_keep_a_tp_th_of_their_inputs():
    gathered_bytes, inputs = 4 * B * S * D, 2 * LAYERS
    for found in on_two():
        kept, again = (found[True, how]["kept_bytes"] for how in ("kept", "gathered again"))
        assert kept - again == inputs * (gathered_bytes - gathered_bytes // TP)


@pytest.mark.parametrize("sp", [True, False])
def test_regions_that_compute_while_gradients_travel_have_the_bits_of_those_that_wait(sp: bool):
    for found in on_two():
        for overlapped, blocking in zip(found[sp, "gathered again"]["bits"], found[sp, "kept"]["bits"], strict=True):
            assert torch.equal(overlapped, blocking)


def test_a_weights_gradient_is_computed_while_that_of_the_input_is_summed():
    orders_of = on_two()[0]["orders"]
    whole, cut = orders_of[False], orders_of[True]
    row = ["dW", "dX"]  # by torch
    last = ["dX", "allreduce", "dW", "wait"]
    assert whole["one"] == [*row, *last]
    assert whole["two"] == [*row, "dX", "dW", *last]
    assert whole["three"] == [*row, "dX", "dW", "dX", "dW", *last]
    # The input is gathered again while the gradient of the region's output is, and while products of that are made.
    begin = ["allgather", "allgather", *row]
    last = ["dX", "reducescatter", "dW", "wait"]
    assert cut["one"] == [*begin, "dX", "reducescatter", "wait", "dW", "wait"]
    assert cut["two"] == [*begin, "dX", "wait", "dW", *last]
    assert cut["three"] == [*begin, "dX", "wait", "dW", "dX", "dW", *last]


def test_in_a_compiled_region_of_one_product_the_sum_is_begun_before_the_weights_gradient_and_awaited_behind_it():
    for sp, sum_ in ((True, "reducescatter"), (False, "allreduce")):
        words = on_two()[0]["orders"][sp]["compiled"]
        assert words[words.index(sum_) :] == [sum_, "dW", "wait"]


def test_a_region_goes_with_its_graph():
    for found in on_two():
        assert found["left over"] == [0, 0]


def test_gradients_of_copied_heads_are_partial_with_and_without_sequence_parallelism():
    copied = {"k.weight", "v.weight", "v.bias"}
    for found in on_two():
        assert {name.partition("attn.")[2] for name in found[False, "kept"]["partial"]} == copied
        of_tokens = {"0.attn_norm.weight", "0.mlp_norm.weight", "0.mlp_norm.bias", "0.attn.out.bias"}
        names = {name for name in found[True, "kept"]["partial"] if name.startswith("0.")}
        assert names == of_tokens | {f"0.attn.{name}" for name in copied}


def test_an_input_that_is_taken_in_twice_or_not_at_all_is_refused():
    for found in on_two():
        assert "the input of 0.mlp.gate passes 0 Enters of the plan [], expected one: an Enter" in found["never"]
        assert "the input of 0.mlp.up passes 2 Enters of the plan ['0.mlp', '0.mlp.up'], expected one" in found["twice"]
