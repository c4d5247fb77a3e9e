"""Claims about models/layers.py."""

import torch

from dtmega.models.layers import KeyedDropout


def dropped(x: torch.Tensor, sample_ids: list[int], shard: int = 0) -> torch.Tensor:
    site = KeyedDropout(0.1)
    site.key.fill_(1234)
    site.sequence_shard = shard
    return site(x, torch.tensor(sample_ids))


def test_a_dropout_mask_is_the_same_when_batch_and_sequence_are_cut():
    x = torch.ones(4, 96, 32)
    whole = dropped(x, [5, 6, 7, 2**40])
    assert torch.equal(dropped(x[2:, 48:], [7, 2**40], shard=1), whole[2:, 48:])


def test_dropout_in_evaluation_is_the_identity():
    site = KeyedDropout(0.5).eval()
    x = torch.ones(1, 2, 3)
    assert site(x, None) is x
