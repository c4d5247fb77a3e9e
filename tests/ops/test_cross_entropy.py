"""Claims about ops/cross_entropy.py and ops/vocab_loss.py; the truth is F.cross_entropy of whole logits."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

from dtmega.ops import compiled_softmax, head_gradient, softmax
from dtmega.ops import cross_entropy as room
from dtmega.ops.compiled_softmax import CompiledPasses
from dtmega.ops.cpu import features
from dtmega.ops.cross_entropy import linear_cross_entropy
from dtmega.ops.vocab_loss import vocab_parallel_cross_entropy
from tests import ranks

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 0.01},
    "both": {"label_smoothing": 0.1, "z_loss": 0.01},
    "padding": {"n_valid": 100, "label_smoothing": 0.1, "z_loss": 0.01},
    "soft cap": {"softcap": 5.0},  # logits have a standard deviation of 4
    "soft cap and the rest": {"softcap": 5.0, "n_valid": 100, "label_smoothing": 0.1, "z_loss": 0.01},
}
OPTIONS |= {f"bias, {name}": {"bias": True, **OPTIONS[name]} for name in ("plain", "padding", "soft cap and the rest")}


def truth(
    logits: Tensor,
    labels: Tensor,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    n_valid: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Losses of tokens in fp64."""
    logits = logits.double()[..., :n_valid].flatten(0, -2)
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    losses = F.cross_entropy(logits, labels.flatten(), reduction="none", label_smoothing=label_smoothing)
    return (losses + z_loss * logits.logsumexp(-1).square() * (labels.flatten() != -100)).view(labels.shape)


def with_bias(options: str, v: int) -> tuple[dict[str, Any], Tensor | None]:
    """The other options, and a bias [v] if one is among them."""
    others = {name: value for name, value in OPTIONS[options].items() if name != "bias"}
    if others == OPTIONS[options]:
        return others, None
    return others, (2 * torch.randn(v, generator=torch.Generator().manual_seed(v))).requires_grad_()


def case(n: int, v: int, d: int = 16, labels_below: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n * v)
    h = torch.randn(n, d, generator=generator, requires_grad=True)
    w = torch.randn(v, d, generator=generator, requires_grad=True)
    labels = torch.randint(labels_below or v, (n,), generator=generator)
    labels[::5] = -100
    return h, w, labels


def small_chunks(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    monkeypatch.setattr(room, "CHUNK_TOKENS", {"cpu": tokens})
    monkeypatch.setattr(room, "CHUNK_LOGITS", 0)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_loss_and_gradients_are_those_of_cross_entropy_for_any_chunk(monkeypatch, chunk: int, options: str):
    small_chunks(monkeypatch, chunk)
    monkeypatch.setattr(softmax, "SLICE_LOGITS", {"cpu": 131 * 5})
    h, w, labels = case(64, 131, labels_below=100)
    others, bias = with_bias(options, 131)
    inputs = [x for x in (h, w, bias) if x is not None]
    expected = truth(F.linear(h, w, bias), labels, **others).sum() / 3
    expected_grads = torch.autograd.grad(expected, inputs)
    loss = linear_cross_entropy(h, w, labels, bias=bias, **others) / 3
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    for ours, whole in zip(torch.autograd.grad(loss, inputs), expected_grads, strict=True):
        torch.testing.assert_close(ours, whole, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("options", OPTIONS)
def test_weighted_losses_and_their_gradients_are_those_of_cross_entropy_times_the_weights(monkeypatch, options: str):
    small_chunks(monkeypatch, 7)
    h, w, labels = case(64, 131, labels_below=100)
    weights = torch.linspace(0, 2, 64)
    others, bias = with_bias(options, 131)
    inputs = [x for x in (h, w, bias) if x is not None]
    expected = (truth(F.linear(h, w, bias), labels, **others) * weights).sum() / 3
    expected_grads = torch.autograd.grad(expected, inputs)
    loss = linear_cross_entropy(h, w, labels, bias=bias, label_weights=weights, **others) / 3
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    for ours, whole in zip(torch.autograd.grad(loss, inputs), expected_grads, strict=True):
        torch.testing.assert_close(ours, whole, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("options", ["plain", "bias, soft cap and the rest"])
def test_compiled_losses_and_their_gradients_are_those_of_cross_entropy(monkeypatch, options: str):
    small_chunks(monkeypatch, 40)
    monkeypatch.setattr(softmax, "SLICE_LOGITS", {"cpu": 131 * 15})
    h, w, labels = case(64, 131, labels_below=100)
    others, bias = with_bias(options, 131)
    inputs = [x for x in (h, w, bias) if x is not None]
    weights = torch.linspace(0, 2, 64)
    expected = (truth(F.linear(h, w, bias), labels, **others) * weights).sum() / 3
    expected_grads = torch.autograd.grad(expected, inputs)
    loss = linear_cross_entropy(h, w, labels, bias=bias, label_weights=weights, passes=CompiledPasses, **others) / 3
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    for ours, whole in zip(torch.autograd.grad(loss, inputs), expected_grads, strict=True):
        torch.testing.assert_close(ours, whole, rtol=1e-5, atol=2e-6)


def test_chunks_of_any_length_share_the_two_compiled_passes(monkeypatch):
    small_chunks(monkeypatch, 40)
    monkeypatch.setattr(softmax, "SLICE_LOGITS", {"cpu": 131 * 15})
    traced = CompileCounter()
    compiled = functools.cache(lambda function: torch.compile(function, backend=traced, dynamic=True))
    monkeypatch.setattr(compiled_softmax, "compiled_pass", compiled)
    for n in (64, 59):
        h, w, labels = case(n, 131, labels_below=100)
        linear_cross_entropy(h, w, labels, n_valid=100, label_smoothing=0.1, passes=CompiledPasses)
    assert traced.frame_count == 2


def test_padding_rows_have_no_gradient():
    h, w, labels = case(64, 131, labels_below=100)
    others, bias = with_bias("bias, soft cap and the rest", 131)
    linear_cross_entropy(h, w, labels, bias=bias, **others).backward()
    assert w.grad is not None
    assert bias is not None
    assert bias.grad is not None
    assert (w.grad[100:] == 0).all()
    assert (w.grad[:100] != 0).any(1).all()
    assert (bias.grad[100:] == 0).all()
    assert (bias.grad[:100] != 0).all()


def test_logits_a_thousand_times_too_large_are_no_problem():
    h, w, labels = case(64, 131)
    loss = linear_cross_entropy(h * 1000, w, labels)
    torch.testing.assert_close(loss, F.cross_entropy(h @ w.T * 1000, labels, ignore_index=-100, reduction="sum"))


def test_labels_that_are_all_ignored_give_zero_and_no_gradient():
    h, w, labels = case(8, 131)
    loss = linear_cross_entropy(h, w, torch.full_like(labels, -100), label_smoothing=0.1, z_loss=0.1)
    loss.backward()
    assert loss.item() == 0
    assert h.grad is not None
    assert w.grad is not None
    assert (h.grad == 0).all()
    assert (w.grad == 0).all()


def test_no_tokens_give_zero_and_gradients_of_zeros():
    h, w, labels = case(8, 131)
    bias = torch.randn(131, requires_grad=True)
    inputs = [h[:0].detach().requires_grad_(), w, bias]
    loss = linear_cross_entropy(inputs[0], w, labels[:0], bias=bias, z_loss=0.1)
    loss.backward()
    assert loss.item() == 0
    for x in inputs:
        assert x.grad is not None
        assert torch.equal(x.grad, torch.zeros_like(x))


@pytest.mark.parametrize("label", [-1, 100, 131])
def test_a_label_outside_the_vocabulary_is_an_error(label: int):
    h, w, labels = case(8, 131, labels_below=100)
    labels[3] = label
    with pytest.raises(RuntimeError, match="index -1 is out of bounds"):
        linear_cross_entropy(h, w, labels, n_valid=100)


class Products(TorchDispatchMode):
    """Counts matrix products, those that read their first factor across, and the numbers in the largest result."""

    products = across = largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("mm", "addmm", "addmm_"):
            self.products += 1
            self.across += not args[-2].is_contiguous()
        self.largest = max(self.largest, out.numel() if isinstance(out, Tensor) else 0)
        return out


@pytest.mark.parametrize(
    ("h_needs", "w_needs", "grad", "products"), [(1, 1, 1, 3), (1, 0, 1, 2), (0, 1, 1, 2), (0, 0, 1, 1), (1, 1, 0, 1)]
)
def test_a_chunk_costs_one_product_and_one_for_each_gradient_asked_for(monkeypatch, h_needs, w_needs, grad, products):
    small_chunks(monkeypatch, 16)
    h, w, labels = case(64, 131)
    with Products() as counted, torch.set_grad_enabled(bool(grad)):
        loss = linear_cross_entropy(h.requires_grad_(bool(h_needs)), w.requires_grad_(bool(w_needs)), labels)
    assert counted.products == 64 // 16 * products
    assert loss.requires_grad == (products > 1)


@pytest.mark.parametrize(("tokens", "logits", "chunk"), [(16, 0, 16), (16, 131 * 32, 32), (16, 131 * 33 - 1, 32)])
def test_a_chunk_is_of_so_many_tokens_or_of_so_many_logits_if_these_are_more(monkeypatch, tokens, logits, chunk):
    monkeypatch.setattr(room, "CHUNK_TOKENS", {"cpu": tokens})
    monkeypatch.setattr(room, "CHUNK_LOGITS", logits)
    h, w, labels = case(64, 131)
    with Products() as counted:
        linear_cross_entropy(h.detach(), w.detach(), labels)
    assert counted.products == 64 // chunk


def test_the_logits_of_all_tokens_never_live_at_once(monkeypatch):
    small_chunks(monkeypatch, 16)
    h, w, labels = case(1024, 131)
    for softcap in (None, 5.0):
        with Products() as counted:
            linear_cross_entropy(h, w, labels, softcap=softcap).backward()
        assert counted.largest == 1024 * 16  # h and dh; a chunk has 16 x 131 logits


def test_loss_without_gradients_is_the_same():
    h, w, labels = case(64, 131)
    with torch.no_grad():
        quiet = linear_cross_entropy(h, w, labels)
    assert torch.equal(quiet, linear_cross_entropy(h, w, labels).detach())


@pytest.mark.parametrize("transpose_from", [512, 513])
@pytest.mark.parametrize("chunk", [512, 256, 4])
def test_in_bf16_only_products_are_rounded_and_sums_over_chunks_are_fp32(monkeypatch, chunk: int, transpose_from: int):
    monkeypatch.setattr(features, "HAS_TILES", True)
    monkeypatch.setattr(head_gradient, "TRANSPOSE_FROM_TOKENS", transpose_from)  # of 512 tokens here
    monkeypatch.setattr(head_gradient, "PRODUCT_COLUMNS", 300)
    small_chunks(monkeypatch, chunk)
    h, w, labels = (x.bfloat16() if x.is_floating_point() else x for x in case(512, 1000))
    logits = (h @ w.T).float().detach().requires_grad_()
    expected = truth(logits, labels, label_smoothing=0.1, z_loss=0.01).sum()
    (dlogits,) = torch.autograd.grad(expected, logits)
    h, w = (x.detach().requires_grad_() for x in (h, w))
    loss = linear_cross_entropy(h, w, labels, label_smoothing=0.1, z_loss=0.01)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    loss.backward()
    for ours, whole in ((h.grad, dlogits @ w.float()), (w.grad, dlogits.T @ h.float())):
        assert ours is not None
        assert ours.dtype == torch.bfloat16
        assert ours.is_contiguous()
        # Each of dlogits, a chunk's product and the result is rounded to 2^-9; 128 sums of them would be 2e-2.
        assert (ours.float() - whole).norm() / whole.norm() < 3e-3


@pytest.mark.parametrize("tiles", [True, False])
def test_of_many_tokens_in_bf16_no_product_reads_its_first_factor_across_where_that_is_slow(monkeypatch, tiles: bool):
    monkeypatch.setattr(features, "HAS_TILES", tiles)
    monkeypatch.setattr(head_gradient, "TRANSPOSE_FROM_TOKENS", 64)
    for chunk in (64, 32, 16):
        small_chunks(monkeypatch, chunk)
        plain = 64 // chunk
        for dtype, across in ((torch.bfloat16, 0 if tiles else plain), (torch.float32, plain)):
            h, w, labels = (x.to(dtype) if x.is_floating_point() else x for x in case(64, 131))
            with Products() as counted:
                linear_cross_entropy(h, w.requires_grad_(), labels)
            assert counted.across == across


def test_in_bf16_the_gradient_of_the_bias_is_rounded_once():
    # All have the same label: added one by one in bf16, 4,096 derivatives of -1 would stop at -256.
    h, w = torch.zeros(4096, 16, dtype=torch.bfloat16), torch.zeros(1000, 16, dtype=torch.bfloat16)
    bias = torch.zeros(1000, dtype=torch.bfloat16, requires_grad=True)
    linear_cross_entropy(h, w, torch.full((4096,), 7), bias=bias).backward()
    assert bias.grad is not None
    assert bias.grad.dtype == torch.bfloat16
    assert bias.grad[7].item() == pytest.approx(-4096 * 0.999, rel=2**-8)


def test_inputs_are_left_untouched():
    h, w, labels = case(64, 131)
    before = [x.detach().clone() for x in (h, w, labels)]
    linear_cross_entropy(h, w, labels, n_valid=131).backward()
    assert all(torch.equal(a, b.detach()) for a, b in zip(before, (h, w, labels), strict=True))


def test_inputs_need_not_be_contiguous():
    h, w, labels = case(64, 131)
    expected = linear_cross_entropy(h, w, labels)
    expected_grads = torch.autograd.grad(expected, (h, w))
    strided = [x.detach().t().contiguous().t().requires_grad_() for x in (h, w)]
    loss = linear_cross_entropy(strided[0], strided[1], torch.stack([labels, labels], 1)[:, 0])
    for ours, plain in zip(torch.autograd.grad(loss, strided), expected_grads, strict=True):
        torch.testing.assert_close(ours, plain)


def test_a_second_backward_raises_because_the_first_used_the_buffers_up():
    h, w, labels = case(64, 131)
    loss = linear_cross_entropy(h, w, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_backward_may_go_to_the_input_first_and_to_the_weight_later():
    h, w, labels = case(64, 131)
    bias = torch.zeros(131, requires_grad=True)
    expected = torch.autograd.grad(linear_cross_entropy(h, w, labels, bias=bias), (h, w, bias))
    loss = linear_cross_entropy(h, w, labels, bias=bias)
    ours = [*torch.autograd.grad(loss, h, retain_graph=True), *torch.autograd.grad(loss, (w, bias))]
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def test_losses_of_given_logits_have_the_shape_of_the_target_and_its_gradients():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, 131, 5, generator=generator).transpose(1, 2).requires_grad_()
    before = logits.detach().clone()
    target = torch.randint(100, (3, 5), generator=generator)
    target[0, 1] = -100
    weights = torch.randn(3, 5, generator=generator)
    options = OPTIONS["padding"]
    losses = vocab_parallel_cross_entropy(logits, target, **options)
    expected = truth(logits, target, **options)
    torch.testing.assert_close(losses.double(), expected)
    (ours,) = torch.autograd.grad((losses * weights).sum(), logits)
    (whole,) = torch.autograd.grad((expected * weights).sum(), logits)
    torch.testing.assert_close(ours, whole)
    assert torch.equal(logits, before)
    total = vocab_parallel_cross_entropy(logits, target, reduction="sum", **options)
    torch.testing.assert_close(total, losses.sum())


def test_a_target_is_looked_for_from_where_the_columns_are_said_to_begin():
    generator = torch.Generator().manual_seed(1)
    logits, target = torch.randn(7, 81, generator=generator), torch.randint(50, 131, (7,), generator=generator)
    losses = vocab_parallel_cross_entropy(logits, target, vocab_start=50, n_valid=131)
    torch.testing.assert_close(losses.double(), truth(logits, target - 50))


def test_smoothing_adds_up_logits_of_bf16_in_fp32():
    # Of 1,000 logits around 8 the sum has a rounding of 16 in bf16, a thousandth of which would be in each loss.
    logits = (8 + torch.randn(7, 1000, generator=torch.Generator().manual_seed(1))).bfloat16()
    losses = vocab_parallel_cross_entropy(logits, torch.arange(7), label_smoothing=0.5)
    torch.testing.assert_close(losses.double(), truth(logits, torch.arange(7), label_smoothing=0.5), rtol=1e-6, atol=0)


def test_given_logits_are_left_untouched_though_some_are_padding():
    logits = torch.randn(5, 131, generator=torch.Generator().manual_seed(1)).requires_grad_()
    before = logits.detach().clone()
    vocab_parallel_cross_entropy(logits, torch.arange(5), n_valid=100, reduction="sum").backward()
    assert torch.equal(logits, before)


def test_shapes_that_do_not_fit_and_unknown_reductions_are_refused():
    with pytest.raises(ValueError, match=r"logits \[3, 5, 7\] need a target \[3, 5\], got \[3, 4\]"):
        vocab_parallel_cross_entropy(torch.zeros(3, 5, 7), torch.zeros(3, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="reduction is 'none' or 'sum', got 'mean'"):
        vocab_parallel_cross_entropy(torch.zeros(3, 7), torch.zeros(3, dtype=torch.int64), reduction="mean")  # type: ignore[arg-type]


def cut_vocabulary() -> dict[str, dict[str, float]]:
    """Errors of everything on a vocabulary cut over the ranks, and whether the caller's tensors are as before."""
    group, tp, me = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    found: dict[str, dict[str, float]] = {}

    # Megatron's test_cross_entropy: b13 s17 V = 11 tp, logits x 1000.
    generator = torch.Generator().manual_seed(2)
    logits = (torch.randn(13, 17, 11 * tp, generator=generator) * 1000).requires_grad_()
    target = torch.randint(11 * tp, (13, 17), generator=generator)
    shard = logits.detach().chunk(tp, -1)[me].requires_grad_()  # not contiguous
    before = shard.detach().clone()
    losses, expected = vocab_parallel_cross_entropy(shard, target, group), truth(logits, target)
    losses.mean().backward()
    expected.mean().backward()
    assert shard.grad is not None
    assert logits.grad is not None
    found["logits x 1000"] = {
        "loss": (losses - expected).norm().item() / expected.norm().item(),
        "gradient": (shard.grad - logits.grad.chunk(tp, -1)[me]).abs().max().item(),
        "changed": float(not torch.equal(shard, before)),
    }

    # The head's kernel, V = 131 uneven, in chunks that follow from sizes the ranks agree in.
    room.CHUNK_TOKENS, room.CHUNK_LOGITS = {"cpu": 1}, 2 * 131
    for name in OPTIONS:
        h, w, labels = case(64, 131, labels_below=100)
        others, bias = with_bias(name, 131)
        cut = [x for x in (w, bias) if x is not None]
        expected = truth(F.linear(h, w, bias), labels, **others).sum()
        dh, *dcut = torch.autograd.grad(expected, (h, *cut))
        parts = [x.detach().chunk(tp)[me].requires_grad_() for x in cut]
        loss = linear_cross_entropy(
            h, parts[0], labels, bias=parts[1] if len(parts) > 1 else None, group=group, **others
        )
        our_dh, *our_dcut = torch.autograd.grad(loss, (h, *parts))
        dist.all_reduce(our_dh)
        found[name] = {
            "loss": abs(loss.item() / expected.item() - 1),
            "dh": ((our_dh - dh).norm() / dh.norm()).item(),
        }
        for what, ours, whole in zip(("dweight", "dbias"), our_dcut, dcut, strict=False):
            found[name][what] = (ours - whole.chunk(tp)[me]).norm().item() / whole.norm().item()
        none = linear_cross_entropy(
            h[:0], parts[0], labels[:0], bias=parts[-1] if bias is not None else None, group=group
        )
        found[name]["no tokens"] = none.item()

    # The last rank has no columns.
    h, w, labels = case(64, 131)
    logits = (h @ w.T).detach().requires_grad_()
    expected = truth(logits, labels, label_smoothing=0.1, z_loss=0.01)
    (dlogits,) = torch.autograd.grad(expected.sum(), logits)
    dh, dw = torch.autograd.grad(truth(h @ w.T, labels, label_smoothing=0.1, z_loss=0.01).sum(), (h, w))
    cuts = [*w.detach().chunk(tp - 1), w.detach()[:0]]
    columns = [len(cut) for cut in cuts]
    part, shard = cuts[me].requires_grad_(), logits.detach().split(columns, -1)[me].requires_grad_()
    fused = linear_cross_entropy(h, part, labels, group=group, label_smoothing=0.1, z_loss=0.01)
    our_dh, our_dw = torch.autograd.grad(fused, (h, part))
    dist.all_reduce(our_dh)
    start = sum(columns[:me])  # without n_valid: how many there are together the ranks tell each other all the same
    losses = vocab_parallel_cross_entropy(shard, labels, group, label_smoothing=0.1, z_loss=0.01, vocab_start=start)
    (ours,) = torch.autograd.grad(losses.sum(), shard)
    found["a rank without columns"] = {
        "fused": abs(fused.item() / expected.sum().item() - 1),
        "dh": ((our_dh - dh).norm() / dh.norm()).item(),
        "dweight": (our_dw - dw.split(columns)[me]).norm().item() / dw.norm().item(),
        "loss": (losses - expected).norm().item() / expected.norm().item(),
        "gradient": (ours - dlogits.split(columns, -1)[me]).norm().item() / dlogits.norm().item(),
    }
    return found


@functools.cache
def cut_over(tp: int) -> list[dict[str, dict[str, float]]]:
    return ranks.run(tp, cut_vocabulary)


@pytest.mark.parametrize("what", ["logits x 1000", *OPTIONS, "a rank without columns"])
@pytest.mark.parametrize("tp", [2, 3, 4])
def test_over_a_cut_vocabulary_loss_and_full_gradient_are_those_of_whole_logits(tp: int, what: str):
    for found in cut_over(tp):
        assert {name: e for name, e in found[what].items() if not e < 1e-6} == {}
