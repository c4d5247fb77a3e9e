"""File logits.py: what is done to logits that nobody has computed gives what it gives to those of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtmega.interop.hf.logits import FusedHead, VocabLogits
from dtmega.ops import cross_entropy as loss_room

B, S, D, V = 2, 5, 8, 13
LABELS = torch.tensor([[3, -100, 12, 0, 7], [-100, -100, 1, 5, 11]])


def head(bias: bool, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    module = nn.Linear(D, V, bias, dtype=dtype)
    with torch.no_grad():
        module.weight.mul_(3)
    return module


def fused(module: nn.Linear) -> tuple[nn.Linear, FusedHead]:
    word = FusedHead()
    word.fuse(module)
    word.labelled = True
    return module, word


def hidden(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(B, S, D, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()


def both(change: Callable[[Any], Tensor], bias: bool = False) -> bool:
    """Compare a number made of the logits, and the gradients of it; were the logits of ours never computed?"""
    results, computed = [], []
    whole = VocabLogits.whole
    for module in (head(bias), fused(head(bias))[0]):
        h = hidden()
        with patch.object(VocabLogits, "whole", lambda self: (computed.append(1), whole(self))[1]):
            value = change(module(h))
        value.backward()
        assert type(value) is Tensor
        results.append([value.detach(), h.grad, *(p.grad for p in module.parameters())])
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)
    return not computed


def cross_entropy(logits: Any, labels: Tensor = LABELS, **options: Any) -> Tensor:
    return F.cross_entropy(logits.view(-1, V), labels.flatten(), **options)


FUSED: dict[str, Callable[[Any], Tensor]] = {
    "mean": cross_entropy,
    "sum": lambda x: cross_entropy(x, reduction="sum"),
    "smoothed": lambda x: cross_entropy(x, label_smoothing=0.2),
    "cast and flattened": lambda x: cross_entropy(x.float().contiguous().to(torch.float32).reshape(-1, V)),
    "flattened by a shape": lambda x: F.cross_entropy(x.view((B * S, V)), LABELS.flatten()),
    "to its device": lambda x: cross_entropy(x.to(torch.device("cpu"))),
    "multiplied": lambda x: cross_entropy(x * 0.7),
    "multiplied from the left": lambda x: cross_entropy(0.7 * x),
    "divided": lambda x: cross_entropy(x / 0.3),
    "capped": lambda x: cross_entropy(torch.tanh(x / 2.0) * 2.0),
    "capped by a method, to another scale": lambda x: cross_entropy((x * 0.5).tanh() * 3 / 2),
    "scaled and capped": lambda x: cross_entropy(torch.tanh(x * 1.5 / 2.0) * 2.0 * 0.5, label_smoothing=0.1),
}
# What the kernel has no form for: the whole logits are computed, and the numbers are right.
OTHERS: dict[str, Callable[[Any], Tensor]] = {
    "weighted": lambda x: cross_entropy(x, weight=torch.arange(1.0, V + 1)),
    "another index is ignored": lambda x: cross_entropy(x, LABELS.clamp(min=0), ignore_index=5),
    "one loss a token": lambda x: cross_entropy(x, reduction="none").square().sum(),
    "probabilities": lambda x: F.cross_entropy(x.view(-1, V), torch.full((B * S, V), 1.0 / V)),
    "three dims": lambda x: F.cross_entropy(x.transpose(1, 2), LABELS),
    "one token": lambda x: F.cross_entropy(x[0, 0], torch.tensor(3)),
    "another shape": lambda x: x.view(-1).square().sum(),
    "views of another last dim": lambda x: x.reshape(B, S * V).square().sum(),
    "a slice": lambda x: cross_entropy(torch.cat([x[:, 1:], x[:, :1]], 1)),
    "a negative factor": lambda x: cross_entropy(x * -2.0),
    "divided by a negative": lambda x: cross_entropy(x / -2.0),
    "times nothing": lambda x: cross_entropy(x * 0.0) + x.sum(),
    "times a tensor": lambda x: cross_entropy(x * torch.tensor(2.0)),
    "times a truth": lambda x: cross_entropy(x * True),
    "capped twice": lambda x: cross_entropy(torch.tanh(torch.tanh(x) * 2)),
    "rounded": lambda x: cross_entropy(torch.div(x, 0.3, rounding_mode="floor") + x),
    "added": lambda x: cross_entropy(x + 1.0) + x.square().mean(),
}


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("name", FUSED)
def test_a_loss_of_logits_is_torchs_and_they_are_never_computed(name: str, bias: bool):
    assert both(FUSED[name], bias)


@pytest.mark.parametrize("name", OTHERS)
def test_anything_else_computes_the_logits_and_is_torchs_too(name: str):
    assert not both(OTHERS[name])


def test_whatever_is_asked_of_them_is_answered_as_by_those_of_torch():
    theirs, ours = head(False)(hidden()), fused(head(False))[0](hidden())
    with patch.object(VocabLogits, "whole", side_effect=AssertionError):
        for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_cpu", "is_meta", "is_sparse"):
            assert getattr(ours, name) == getattr(theirs, name), name
        for name in ("size", "dim", "numel", "is_floating_point", "is_complex", "__len__"):
            assert getattr(ours, name)() == getattr(theirs, name)(), name
        assert ours.size(-1) == V
        assert ours.is_quantized is False
        assert (ours.float().dtype, ours.to(torch.bfloat16).dtype) == (torch.float32, torch.bfloat16)
    assert ours.to(torch.bfloat16).whole().dtype == torch.bfloat16


def test_of_bf16_logits_that_were_cast_the_loss_is_fp32():
    theirs = F.cross_entropy(head(False, torch.bfloat16)(hidden(torch.bfloat16)).float().view(-1, V), LABELS.flatten())
    ours = fused(head(False, torch.bfloat16))[0](hidden(torch.bfloat16)).float().view(-1, V)
    loss = F.cross_entropy(ours, LABELS.flatten())
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, theirs, rtol=1e-2, atol=0)


def test_a_forward_without_labels_or_with_a_fused_loss_switched_off_has_plain_logits():
    module, word = fused(head(True))
    word.labelled = False
    assert type(module(hidden())) is Tensor
    torch.testing.assert_close(module(hidden()), head(True)(hidden()))


def changed(module: nn.Linear, word: FusedHead) -> None:
    with torch.no_grad():
        module.weight.mul_(2)


def freed(module: nn.Linear, word: FusedHead) -> None:
    module.weight.untyped_storage().resize_(0)


def gathered_again(module: nn.Linear, word: FusedHead) -> None:
    word.gathered_by_fsdp = True
    module(hidden())


@pytest.mark.parametrize("stale", [changed, freed, gathered_again])
@pytest.mark.parametrize("use", [cross_entropy, lambda x: x + 1], ids=["loss", "logits"])
def test_logits_of_a_weight_that_is_another_now_are_refused(stale: Callable[..., None], use: Callable[[Any], Tensor]):
    module, word = fused(head(False))
    logits = module(hidden())
    with torch.no_grad():
        use(logits)
    stale(module, word)
    with pytest.raises(RuntimeError, match="use them before the optimizer's step"):
        use(logits)


def test_a_second_forward_makes_the_first_ones_logits_stale_only_where_fsdp_writes_over_the_weight():
    module, _ = fused(head(False))
    logits = module(hidden())
    module(hidden())
    torch.testing.assert_close(logits + 0, head(False)(hidden()))


@pytest.mark.parametrize("name", ["scaled and capped", "mean"])
def test_the_loss_sees_a_few_tokens_at_a_time(name: str):
    with patch.multiple(loss_room, CHUNK_TOKENS={"cpu": 3}, CHUNK_LOGITS=0):
        assert both(FUSED[name])


def test_changed_in_place_they_are_what_that_made_of_them():
    def masked(x: Any) -> Tensor:
        x[..., 3:] = -1.0
        x.mul_(0.5)
        return cross_entropy(x)

    assert not both(masked)
