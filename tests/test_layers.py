"""Claims about models/layers.py."""

import pytest
import torch
import torch.nn.functional as F

from dtmega.models import layers
from dtmega.models.layers import KeyedDropout, linear_cross_entropy


def case(n: int, v: int, d: int = 16):
    generator = torch.Generator().manual_seed(n * v)
    h = torch.randn(n, d, generator=generator, requires_grad=True)
    w = torch.randn(v, d, generator=generator, requires_grad=True)
    labels = torch.randint(v, (n,), generator=generator)
    labels[::5] = -100
    return h, w, labels


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_loss_and_gradients_are_those_of_cross_entropy_for_any_chunk(monkeypatch, chunk):
    monkeypatch.setattr(layers, "CHUNK_TOKENS", {"cpu": chunk})
    monkeypatch.setattr(layers, "CHUNK_LOGITS", 0)
    h, w, labels = case(64, 131)
    expected = F.cross_entropy(h @ w.T, labels, ignore_index=-100, reduction="sum") / 3
    expected_grads = torch.autograd.grad(expected, (h, w))
    loss = linear_cross_entropy(h, w, labels) / 3
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for ours, truth in zip(torch.autograd.grad(loss, (h, w)), expected_grads, strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-5, atol=1e-6)


def test_logits_a_thousand_times_too_large_are_no_problem():
    h, w, labels = case(64, 131)
    loss = linear_cross_entropy(h * 1000, w, labels)
    torch.testing.assert_close(loss, F.cross_entropy(h @ w.T * 1000, labels, ignore_index=-100, reduction="sum"))


def test_loss_without_gradients_is_the_same_and_leaves_none():
    h, w, labels = case(64, 131)
    with torch.no_grad():
        quiet = linear_cross_entropy(h, w, labels)
    assert not quiet.requires_grad
    assert torch.equal(quiet, linear_cross_entropy(h, w, labels).detach())


def test_bf16_loss_is_close_to_fp64_because_softmax_and_sums_are_fp32():
    h, w, labels = case(512, 1000)
    truth = F.cross_entropy((h.double() @ w.double().T), labels, ignore_index=-100, reduction="sum")
    loss = linear_cross_entropy(h.bfloat16(), w.bfloat16(), labels)
    assert loss.dtype == torch.float32
    assert abs(loss.item() / truth.item() - 1) < 2e-3


def test_inputs_are_left_untouched():
    h, w, labels = case(64, 131)
    before = [x.detach().clone() for x in (h, w, labels)]
    linear_cross_entropy(h, w, labels).backward()
    assert all(torch.equal(a, b.detach()) for a, b in zip(before, (h, w, labels), strict=True))


def dropped(x: torch.Tensor, sample_ids: list[int], offset: int = 0) -> torch.Tensor:
    site = KeyedDropout(0.1)
    site.key.fill_(1234)
    site.position_offset = offset
    return site(x, torch.tensor(sample_ids))


def test_a_dropout_mask_is_the_same_when_batch_and_sequence_are_cut():
    x = torch.ones(4, 96, 32)
    whole = dropped(x, [5, 6, 7, 2**40])
    assert torch.equal(dropped(x[2:, 48:], [7, 2**40], offset=48), whole[2:, 48:])


def test_samples_positions_and_channels_are_dropped_independently():
    mask = (dropped(torch.ones(4, 96, 32), [0, 1, 2, 3]) == 0).double()
    assert mask.mean().item() == pytest.approx(0.1, abs=0.01)
    rows = mask.flatten(0, 1)
    assert len({tuple(row.tolist()) for row in rows}) > 0.9 * len(rows)


def test_dropout_in_evaluation_is_the_identity():
    site = KeyedDropout(0.5).eval()
    x = torch.ones(1, 2, 3)
    assert site(x, None) is x
