"""Claims about plans/: what is cut over tp computes what one process does. One group of processes per layout."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from dtmega import families, plans
from dtmega.config.families.bloom import BloomKeys
from dtmega.models.bloom import Block, Bloom
from dtmega.models.layers import FusedAttention, KeyedDropout
from dtmega.ops import attention
from dtmega.ops import cross_entropy as loss_room
from dtmega.ops.attention_rule import alibi_slopes, attention_rule
from dtmega.plans import bloom
from dtmega.plans.styles import Column, Row, SequenceShard, ShardBuffer, Whole
from dtmega.plans.vocabulary import VocabEmbedding, VocabHead
from tests import ranks
from tests.ranks import message

B, S, V, HEADS = 2, 24, 131, {2: 6, 3: 6, 4: 8}
PLAIN: dict[str, Any] = {}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
CASES: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "dropout": DROPOUT,
    "post-layernorm, large epsilon": {"apply_residual_connection_post_layernorm": True, "layer_norm_eps": 0.1},
    "padded vocabulary": {"pad_vocab_to_multiple": 64},
    "smoothing, z-loss and weighted labels": {"pad_vocab_to_multiple": 64, "label_smoothing": 0.1, "z_loss": 1e-3},
}


def rows(x: Tensor, dim: int = 1) -> Tensor:
    """This rank's part of what every rank holds."""
    return x.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()].clone()


def gathered(x: Tensor, dim: int = 1) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.detach().contiguous())
    return torch.cat(parts, dim)


def error(ours: Tensor, truth: Tensor) -> float:
    return ((ours - truth).norm() / truth.norm()).item()


def far(ours: Tensor, truth: Tensor) -> float:
    """The largest absolute difference, as in Megatron's tests."""
    return (ours - truth).abs().max().item()


def small(heads: int, device: str = "cpu", **keys: Any) -> Bloom:
    cfg = BloomKeys(vocab_size=V, hidden_size=8 * heads, n_layers=2, n_heads=heads, **keys)
    with torch.device(device):
        return families.of(cfg).build(cfg)


def with_values(model: Bloom) -> Bloom:
    """Values of whole parameters from their names, biases and norms too, so that a missing or doubled term shows."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))) * 0.2)
    model.init_buffers(seed=1)
    return model


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(V, (B, S), generator=generator)
    labels = tokens.roll(-1, dims=1)
    labels[:, ::7] = -100
    places = torch.arange(S).repeat(B, 1)
    return {"tokens": tokens, "labels": labels, "sample_ids": torch.arange(B) + 5, "places": places}


def cut(heads: int, mesh: DeviceMesh, sequence_parallel: bool, **keys: Any) -> tuple[Bloom, list[str]]:
    model = with_values(small(heads, **keys))
    table = bloom.plan(model.cfg, sequence_parallel)
    partial = plans.apply_plan(model, mesh, table)
    plans.shard_buffers(model, mesh, table)
    return model, partial


def deviations(model: Bloom, partial: list[str], mesh: DeviceMesh, truth: Bloom, **more: Tensor) -> dict[str, float]:
    """Relative errors of the sum of all losses and of its gradients above 1e-7, after one forward and backward each.

    Args:
        more: rows of the batch beside tokens and labels.
    """
    loss, expected = (torch.cat([x.flatten() for x in m(**batch(), **more).values()]).sum() for m in (model, truth))
    loss.backward()
    expected.backward()
    plans.sum_partial_gradients(model, partial, mesh)
    found = {"loss": abs(loss.item() / expected.item() - 1)}
    for (name, p), q in zip(model.named_parameters(), truth.parameters(), strict=True):
        assert isinstance(p.grad, DTensor)
        assert q.grad is not None
        found[name] = error(p.grad.full_tensor(), q.grad)
    return found


def parity(mesh: DeviceMesh, heads: int) -> dict[str, dict[str, float]]:
    found = {}
    for case, keys in CASES.items():
        weights = {"label_weights": torch.linspace(0.1, 2, B * S).view(B, S)} if "weighted" in case else {}
        for sequence_parallel in (True, False):
            truth = with_values(small(heads, **keys))
            model, partial = cut(heads, mesh, sequence_parallel, **keys)
            found[f"{case}, sequence parallel {sequence_parallel}"] = deviations(model, partial, mesh, truth, **weights)
    return found


def embedding(mesh: DeviceMesh, sequence_parallel: bool) -> dict[str, Any]:
    """Megatron's test_parallel_embedding: b17 s23 V48 h16."""
    torch.manual_seed(1)
    seq_len = 24 if sequence_parallel else 23
    whole = nn.Embedding(48, 16).double()
    ours = nn.Embedding(48, 16).double()
    ours.load_state_dict(whole.state_dict())
    parallelize_module(ours, mesh, VocabEmbedding(sequence_parallel), src_data_rank=None)
    tokens, weights = torch.randint(48, (17, seq_len)), torch.randn(17, seq_len, 16).double()
    expected = (whole(tokens) * weights).sum()
    expected.backward()
    out = ours(tokens)
    (out * (rows(weights) if sequence_parallel else weights)).sum().backward()
    assert whole.weight.grad is not None
    assert isinstance(ours.weight.grad, DTensor)
    return {
        "out": far(out, rows(whole(tokens)) if sequence_parallel else whole(tokens)),
        "gradient": far(ours.weight.grad.to_local(), rows(whole.weight.grad, 0)),
    }


def linears(mesh: DeviceMesh, sequence_parallel: bool) -> dict[str, float]:
    """Megatron's column and row linear tests: with loss = sum(y * g): dW = g^T x, db = sum g, dx = g W."""
    torch.manual_seed(2)
    tp = mesh.size()
    x, g = torch.randn(7, 12, 13 * tp), torch.randn(7, 12, 17 * tp)
    part = rows if sequence_parallel else torch.clone
    found = {}
    for kind, style in (("column", Column(sequence_parallel).entering()), ("row", Row(sequence_parallel))):
        linear = nn.Linear(13 * tp, 17 * tp)
        weight, bias = linear.weight.detach(), linear.bias.detach()
        truth = {
            "y": x @ weight.T + bias,
            "dW": torch.einsum("bso,bsi->oi", g, x),
            "db": g.sum((0, 1)),
            "dx": g @ weight,
        }
        parallelize_module(linear, mesh, style, src_data_rank=None)
        outer, inner = (
            (part, functools.partial(rows, dim=2)) if kind == "column" else (functools.partial(rows, dim=2), part)
        )
        x_here = outer(x).requires_grad_()
        y = linear(x_here)
        (y * inner(g)).sum().backward()
        plans.sum_partial_gradients(linear, sorted(style.partial_gradients(linear, tp)), mesh)
        assert isinstance(linear.weight.grad, DTensor)
        assert isinstance(linear.bias.grad, DTensor)
        assert x_here.grad is not None
        ours = {
            "y": (y, inner(truth["y"])),
            "dW": (linear.weight.grad.full_tensor(), truth["dW"]),
            "db": (linear.bias.grad.full_tensor(), truth["db"]),
            "dx": (x_here.grad, outer(truth["dx"])),
        }
        found |= {f"{kind} {name}": error(*pair) for name, pair in ours.items()}
    return found


def blocks(mesh: DeviceMesh, sequence_parallel: bool) -> dict[str, float]:
    """Megatron's attention and layer tests: 3 heads a rank, K 7, b5 (s13 there; here tp must divide it)."""
    torch.manual_seed(3)
    heads = 3 * mesh.size()
    cfg = BloomKeys(hidden_size=7 * heads, n_heads=heads)
    x, g = torch.randn(5, 12, 7 * heads), torch.randn(5, 12, 7 * heads)
    part = rows if sequence_parallel else torch.clone
    places, head_ids = torch.arange(12).repeat(5, 1), torch.arange(heads, dtype=torch.int32)
    slopes = alibi_slopes(heads)
    rule, rule_here = (attention_rule(places, causal=True, slopes=s) for s in (slopes, rows(slopes, 0)))
    found = {}
    table = {p.removeprefix("layers.*."): s for p, s in bloom.plan(cfg, sequence_parallel).items() if "layers" in p}
    attn_table = {p[len("attn.") :]: s for p, s in table.items() if p == "attn" or p.startswith("attn.")}
    for kind, cls, plan in (("attention", FusedAttention, attn_table), ("block", Block, table)):
        whole, ours = cls(cfg, number=1), cls(cfg, number=1)
        ours.load_state_dict(whole.state_dict())
        plans.apply_plan(ours, mesh, plan)
        x_whole, x_here = x.clone().requires_grad_(), part(x).requires_grad_()
        keywords = {"places": places} if kind == "block" else {}
        expected = (whole(x_whole, rule, head_ids, None, **keywords) * g).sum()
        out = ours(x_here, rule_here, rows(head_ids, 0), None, **keywords)
        ((out * part(g)).sum()).backward()
        expected.backward()
        total = ((gathered(out) if sequence_parallel else out) * g).sum()
        assert x_here.grad is not None
        assert x_whole.grad is not None
        qkv = "qkv.weight" if kind == "attention" else "attn.qkv.weight"
        grad = ours.get_parameter(qkv).grad
        assert isinstance(grad, DTensor)
        found[f"{kind} loss"] = far(total, expected)
        found[f"{kind} dx"] = far(x_here.grad, part(x_whole.grad))
        expected_grad = whole.get_parameter(qkv).grad
        assert expected_grad is not None
        found[f"{kind} dqkv"] = far(grad.full_tensor(), expected_grad)
    return found


def masks(mesh: DeviceMesh, sequence_parallel: bool) -> dict[str, bool]:
    """Tell of each dropout site whether the mask of this rank's part is that of one process."""
    heads = HEADS[mesh.size()]
    truth = with_values(small(heads, **DROPOUT))
    model, _ = cut(heads, mesh, sequence_parallel, **DROPOUT)
    ones, ids, places = torch.ones(B, S, 8), batch()["sample_ids"], batch()["places"]
    part = rows if sequence_parallel else torch.clone
    found = {}
    for (name, ours), whole in zip(model.named_modules(), truth.modules(), strict=True):
        if isinstance(ours, KeyedDropout) and isinstance(whole, KeyedDropout) and not name.endswith("attn.dropout"):
            found[name] = torch.equal(ours(part(ones), ids, places), part(whole(ones, ids, places)))
    key = truth.get_buffer("layers.0.attn.dropout.key")
    probabilities = []
    for m in (model, truth):
        # Where q = k = 0 and v = 1, attention returns its probabilities, all 0 or 1 / (keys seen) / (1 - p).
        zeros, eye = torch.zeros(B, len(m.slopes), S, S), torch.eye(S).expand(B, len(m.slopes), S, S)
        rule, dropout = attention_rule(places, causal=True), attention.Dropout(0.1, key, m.head_ids, ids)
        probabilities.append(attention.attention(zeros, zeros, eye, rule, dropout))
    found["attention probabilities"] = torch.equal(probabilities[0], rows(probabilities[1]))
    return found


class Collectives(TorchDispatchMode):
    """Counts the collectives that are called inside."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def collectives(mesh: DeviceMesh, sequence_parallel: bool) -> list[dict[str, int]]:
    """The collectives of forward, backward (loss in chunks of 16 of 48 tokens) and the sum of partial gradients."""
    loss_room.CHUNK_TOKENS, loss_room.CHUNK_LOGITS = {"cpu": 16}, 0
    model, partial = cut(HEADS[mesh.size()], mesh, sequence_parallel)
    counted = []
    with Collectives() as mode:
        model(**batch())["lm"].backward()
        counted.append(dict(mode.counts))
        mode.counts.clear()
        plans.sum_partial_gradients(model, partial, mesh)
        counted.append(dict(mode.counts))
    return counted


def everything() -> dict[str, Any]:
    """All that is measured on one layout, so that its processes start once."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    found: dict[str, Any] = {"parity": parity(mesh, HEADS[mesh.size()])}
    for fn in (embedding, linears, blocks, masks, collectives):
        found |= {f"{fn.__name__}, sequence parallel {sp}": fn(mesh, sp) for sp in (True, False)}
    return found


@functools.cache
def on(tp: int) -> list[dict[str, Any]]:
    return ranks.run(tp, everything)


# Four ranks repeat what two and three show; test_parity.py trains on four.
MARKS = {tp: pytest.mark.full if tp == 4 else () for tp in HEADS}
over_layouts = pytest.mark.parametrize(
    ("tp", "sequence_parallel"), [pytest.param(tp, sp, marks=MARKS[tp]) for tp in HEADS for sp in (True, False)]
)
over_ranks = pytest.mark.parametrize("tp", [pytest.param(tp, marks=MARKS[tp]) for tp in HEADS])


@pytest.mark.parametrize("case", CASES)
@over_layouts
def test_loss_and_every_gradient_of_bloom_equal_one_process(tp: int, sequence_parallel: bool, case: str):
    for found in on(tp):
        errors = dict(found["parity"][f"{case}, sequence parallel {sequence_parallel}"])
        assert errors.pop("loss") < 1e-6
        assert {name: e for name, e in errors.items() if not e < 1e-5} == {}


@over_layouts
def test_vocab_parallel_embedding_and_its_gradient_are_those_of_one_process(tp: int, sequence_parallel: bool):
    for found in on(tp):
        errors = found[f"embedding, sequence parallel {sequence_parallel}"]
        assert max(errors.values()) < 1e-12


@over_layouts
def test_column_and_row_linears_have_the_gradients_of_the_closed_forms(tp: int, sequence_parallel: bool):
    for found in on(tp):
        errors = found[f"linears, sequence parallel {sequence_parallel}"]
        assert {name: e for name, e in errors.items() if not e < 1e-6} == {}


@over_layouts
def test_attention_and_block_are_those_of_one_process(tp: int, sequence_parallel: bool):
    for found in on(tp):
        errors = found[f"blocks, sequence parallel {sequence_parallel}"]
        bounds = {name: 5e-6 if name.startswith("attention") else 5e-5 for name in errors}
        assert {name: e for name, e in errors.items() if not e < bounds[name]} == {}


@over_layouts
def test_dropout_masks_are_bit_equal_to_those_of_one_process(tp: int, sequence_parallel: bool):
    for found in on(tp):
        equal = found[f"masks, sequence parallel {sequence_parallel}"]
        assert len(equal) == 1 + 2 * 2 + 1
        assert [name for name, same in equal.items() if not same] == []


@over_ranks
def test_sequence_parallel_collectives_are_four_a_layer_and_pass_and_two_gathers_again_in_backward(tp: int):
    n_layers, n_chunks = 2, B * S // 16
    ends = 1 + 1  # embedding and head
    for found in on(tp):
        step, after = found["collectives, sequence parallel True"]
        both_ways, again = 2 * (2 * n_layers) + ends, 2 * n_layers
        gathers = {"_allgather_base_": both_ways + again, "allgather_": n_chunks}
        assert step == {**gathers, "_reduce_scatter_base_": both_ways}
        assert after == {"allreduce_": 1}


@over_ranks
def test_without_sequence_parallelism_collectives_are_two_a_layer_and_pass_and_one_a_loss_chunk(tp: int):
    for found in on(tp):
        step, after = found["collectives, sequence parallel False"]
        assert step == {"allreduce_": 2 * 2 * 2 + 2, "allgather_": B * S // 16}
        assert after == {}


def stages(mesh: DeviceMesh) -> dict[str, Any]:
    """A pipeline's first stage (no layers) and last stage, one after the other."""
    first, last = with_values(small(6, **DROPOUT)), with_values(small(6, **DROPOUT))
    first.norm = first.head = None
    first.layers = nn.ModuleDict()
    last.embed = last.embed_norm = last.embed_dropout = None
    for stage in (first, last):
        plans.apply_plan(stage, mesh, bloom.plan(stage.cfg))
        plans.shard_buffers(stage, mesh, bloom.plan(stage.cfg))
    x = batch()
    h = first(x["tokens"], sample_ids=x["sample_ids"], places=x["places"])["hidden"]
    loss = last(**x, hidden=h)["lm"]
    return {"shape": tuple(h.shape), "error": error(loss, with_values(small(6, **DROPOUT))(**x)["lm"])}


def compiled(mesh: DeviceMesh) -> dict[str, Any]:
    model, partial = cut(6, mesh, True, hidden_dropout=0.1)
    called: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs = [m.graph for m in graph.modules() if isinstance(m, torch.fx.GraphModule)]
        called.extend(str(node.target) for one in graphs for node in one.nodes)
        return graph  # test_regions.py has autograd compile it, too, which takes as long again

    for block in model.layers.values():
        block.compile(fullgraph=True, backend=backend)
    replaced = [module.forward for module in model.modules() if "forward" in vars(module)]
    errors = deviations(model, partial, mesh, with_values(small(6, hidden_dropout=0.1)))
    return {
        "error": max(errors.values()),
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        "in place": [name for name in called if "copy_" in name],
        "plain functions": [inspect.isfunction(forward.__func__) for forward in replaced],
    }


def on_meta(mesh: DeviceMesh) -> dict[str, Any]:
    model = small(6, device="meta")
    partial = plans.apply_plan(model, mesh, bloom.plan(model.cfg))
    tied = [model.get_parameter("embed.weight") is model.get_parameter("head.weight")]
    model.to_empty(device="cpu")
    model.tie()
    tied.append(model.get_parameter("embed.weight") is model.get_parameter("head.weight"))
    cut = {name: p for name, p in model.named_parameters() if isinstance(p, DTensor)}
    return {
        "tied": tied,
        "partial": partial,
        "without sequence parallelism": plans.apply_plan(small(6), mesh, bloom.plan(model.cfg, False)),
        "shapes": {name.removeprefix("layers.0."): tuple(p.to_local().shape) for name, p in cut.items()},
        "names": [name for name, _ in model.named_parameters()],
    }


def logits(mesh: DeviceMesh) -> dict[str, float]:
    truth, (model, _) = with_values(small(6, pad_vocab_to_multiple=64)), cut(6, mesh, True, pad_vocab_to_multiple=64)
    ours, expected = model(batch()["tokens"]), truth(batch()["tokens"])
    (ours[..., 3::7] ** 2).sum().backward()
    (expected[..., 3::7] ** 2).sum().backward()
    grad, expected_grad = (m.get_parameter("layers.0.attn.qkv.weight").grad for m in (model, truth))
    assert isinstance(grad, DTensor)
    assert expected_grad is not None
    return {"logits": error(ours, expected), "gradient": error(grad.full_tensor(), expected_grad)}


def columns(mesh: DeviceMesh) -> list[list[int]]:
    model = nn.Module()
    model.register_buffer("table", torch.arange(12).view(3, 4))
    plans.shard_buffers(model, mesh, {"table": ShardBuffer(4, dim=1)})
    return model.get_buffer("table").tolist()


def refusals() -> dict[str, str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model, _ = cut(6, mesh, True)
    table = dict(bloom.plan(model.cfg))
    tokens = batch()["tokens"]

    def apply(changes: dict[str, Any], **keys: Any) -> str:
        cfg = BloomKeys(**{"vocab_size": V, "hidden_size": 48, "n_layers": 2, "n_heads": 6} | keys)
        with torch.device("meta"):
            fresh = families.of(cfg).build(cfg)
        return message(plans.apply_plan, fresh, mesh, {**bloom.plan(cfg), **changes})

    without = {name: style for name, style in table.items() if name != "layers.*.mlp.up"}
    return {
        "unknown": apply({"layers.*.attn.qkw": Column()}),
        "unknown buffer": apply({"slope": ShardBuffer(6)}),
        "matrix": message(plans.apply_plan, small(6), mesh, without),
        "heads": apply({}, n_heads=3),
        "ffn": apply({}, ffn_hidden_size=31),
        "rows": message(parallelize_module, nn.Linear(4, 5), mesh, Column()),
        "vocabulary": apply({}, vocab_size=1),
        "wrong module": apply({"layers.*.attn.qkv": VocabHead()}),
        "twice": message(plans.apply_plan, model, mesh, table),
        "buffers twice": message(plans.shard_buffers, model, mesh, table),
        "buffer": message(plans.apply_plan, small(3), mesh, {"slopes": ShardBuffer(3)}),
        "no places": message(parallelize_module, nn.Linear(4, 4), mesh, SequenceShard()),
        "tied in two ways": apply({"head": Whole()}),
        "odd sequence": message(model, tokens[:, :23]),
        "token V": message(model, torch.full((1, 2), V), error=IndexError),
        "token -1": message(model, torch.full((1, 2), -1), error=IndexError),
    }


def odds_and_ends() -> dict[str, Any]:
    """Claims that are shown on one layout for all."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return {fn.__name__: fn(mesh) for fn in (stages, compiled, on_meta, logits, columns)} | {"refusals": refusals()}


@functools.cache
def shown() -> list[dict[str, Any]]:
    return ranks.run(2, odds_and_ends)


def test_a_later_stage_knows_the_sequence_of_which_it_gets_a_part_and_needs_no_modules_of_others():
    for found in shown():
        assert found["stages"]["shape"] == (B, S // 2, 48)
        assert found["stages"]["error"] < 1e-6


def test_blocks_compile_without_graph_breaks_and_share_one_graph():
    for found in shown():
        assert found["compiled"]["graphs"] == 1
        assert found["compiled"]["error"] < 1e-5
        # torch 2.11 loses the gradient of a collective that writes to a given tensor; compiled, it ends in a copy_.
        assert found["compiled"]["in place"] == []
        # torch 2.11 breaks the graph at a bound method that is bound once more; 2.13 does not.
        assert found["compiled"]["plain functions"] == [True] * (2 * 10 + 5)  # of layers; ends, norms, a dropout


def test_a_meta_model_is_cut_and_tied_weights_stay_one_parameter():
    for rank, found in enumerate(shown()):
        assert found["on_meta"]["tied"] == [True, True]
        shapes = found["on_meta"]["shapes"]
        assert shapes["embed.weight"] == ((66, 65)[rank], 48)
        assert (shapes["attn.qkv.weight"], shapes["attn.qkv.bias"]) == ((72, 48), (72,))
        assert (shapes["attn.out.weight"], shapes["attn.out.bias"]) == ((48, 24), (48,))
        assert (shapes["mlp.up.weight"], shapes["mlp.down.weight"]) == ((96, 48), (48, 96))
        assert len(shapes) == len(found["on_meta"]["names"])  # every parameter is a DTensor


def test_gradients_are_partial_of_norms_and_row_biases_and_only_with_sequence_parallelism():
    (found, _) = shown()
    names = found["on_meta"]["names"]
    expected = [n for n in names if "norm" in n or n.endswith(("attn.out.bias", "mlp.down.bias"))]
    assert found["on_meta"]["partial"] == expected
    assert found["on_meta"]["without sequence parallelism"] == []


def test_logits_are_whole_and_trimmed_and_have_a_gradient():
    for found in shown():
        assert found["logits"]["logits"] < 1e-6
        assert found["logits"]["gradient"] < 1e-5


def test_a_buffer_is_cut_along_the_dim_that_the_plan_names():
    parts = [found["columns"] for found in shown()]
    assert parts == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 11]]]


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("unknown", "'layers.*.attn.qkw' of the plan matches nothing in Bloom; did you mean 'layers.*.attn.qkv'?"),
        ("unknown buffer", "'slope' of the plan matches nothing in Bloom; did you mean 'slopes'?"),
        ("matrix", "no row of the plan cuts layers.0.mlp.up.weight [192, 48]: a matrix needs a style"),
        ("heads", "tp=2 does not divide n_heads=3 ([mesh] tp, [model] n_heads)"),
        ("ffn", "tp=2 does not divide ffn_hidden_size=31 ([mesh] tp, [model] ffn_hidden_size)"),
        ("rows", "tp=2 does not divide 5: dim 0 of 'weight' [5, 4] of Linear ([mesh] tp)"),
        (
            "vocabulary",
            "tp=2 ranks x 1 rows leave a rank without any of 1: dim 0 of 'weight' [1, 48] of Embedding "
            "([mesh] tp, [model] vocab_size)",
        ),
        ("wrong module", "VocabHead is for a head with vocab_size and loss_terms(), not Linear"),
        ("twice", "VocabEmbedding cannot cut 'weight' of Embedding: another style did ((Shard(dim=0),))"),
        ("buffers twice", "'slopes' of the plan: expected a buffer with 6 in dim 0, got [3]"),
        ("buffer", "tp=2 does not divide 3, dim 0 of buffer 'slopes' ([mesh] tp)"),
        ("no places", "SequenceShard is for modules that are given places, Linear is not"),
        ("tied in two ways", "a tied parameter [131, 48] is cut in two ways: [(Shard(dim=0),), (Replicate(),)]"),
        (
            "odd sequence",
            "tp=2 does not divide a sequence of 23 tokens "
            "([mesh] tp, [data] seq_len, or [mesh] sequence_parallel = false)",
        ),
        ("token V", "index out of range in self"),
        ("token -1", "index out of range in self"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(what: str, expected: str):
    assert [found["refusals"][what] for found in shown()] == [expected] * 2


def with_fsdp(params: torch.dtype) -> dict[str, Any]:
    """dp 2 x tp 2, one sample a data rank."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp, dp = mesh["tp"], mesh["dp"]
    truth, (model, partial) = with_values(small(6)), cut(6, tp, True)
    policy = MixedPrecisionPolicy(param_dtype=params, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in (*model.layers.values(), model):
        fully_shard(module, mesh=dp, mp_policy=policy)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    seen = []
    up = model.get_submodule("layers.0.mlp.up")
    up.register_forward_pre_hook(
        lambda m, _: seen.append((m.weight.device_mesh is tp, m.weight.placements, m.weight.to_local().dtype))
    )
    x = batch()
    part = slice(dp.get_local_rank(), dp.get_local_rank() + 1)
    for microbatch in range(2):
        model.set_requires_gradient_sync(microbatch == 1)
        model(**{name: t[part] for name, t in x.items()})["lm"].backward()
        truth(**x)["lm"].backward()
    plans.sum_partial_gradients(model, partial, tp)
    errors = {}
    for (name, p), q in zip(model.named_parameters(), truth.parameters(), strict=True):
        assert isinstance(p.grad, DTensor)
        assert q.grad is not None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            errors[name] = error(p.grad.full_tensor(), q.grad)
    return {"errors": errors, "seen": seen}


@pytest.mark.parametrize(("params", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_with_fsdp_on_top_gradients_of_two_microbatches_equal_one_process(params: torch.dtype, bound: float):
    for found in ranks.run(4, with_fsdp, params):
        assert found["seen"] == [(True, (Shard(0),), params)] * 2
        assert {name: e for name, e in found["errors"].items() if not e < bound} == {}
