"""Claims about models/layers.py."""

import torch

from dtmega.models.layers import KeyedDropout

PLACES = torch.arange(96).repeat(4, 1)


def dropped(x: torch.Tensor, sample_ids: list[int], places: torch.Tensor) -> torch.Tensor:
    site = KeyedDropout(0.1)
    site.key.fill_(1234)
    return site(x, torch.tensor(sample_ids), places)


def test_a_dropout_mask_is_the_same_when_batch_and_sequence_are_cut_in_any_order():
    x = torch.ones(4, 96, 32)
    whole = dropped(x, [5, 6, 7, 2**40], PLACES)
    assert torch.equal(dropped(x[2:, 48:], [7, 2**40], PLACES[2:, 48:]), whole[2:, 48:])
    slices = torch.cat([torch.arange(24), torch.arange(72, 96)])
    assert torch.equal(dropped(x[:, slices], [5, 6, 7, 2**40], PLACES[:, slices]), whole[:, slices])


def test_dropout_in_evaluation_is_the_identity():
    site = KeyedDropout(0.5).eval()
    x = torch.ones(1, 2, 3)
    assert site(x, None, PLACES[:1, :2]) is x
