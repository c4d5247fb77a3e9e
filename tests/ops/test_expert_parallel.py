"""Experts divided over ranks with different tokens, against one process that has all experts and all tokens.

The ep groups of four ranks are {0, 2} and {1, 3}, which no default would choose. In the cases of `CASES` the tokens of
the ranks differ in number, and some experts have no token.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from dtmega import config, families, mesh
from dtmega.models.experts import Experts
from dtmega.ops.expert_parallel import Exchange, divide
from dtmega.ops.shards import full_tensor, local
from dtmega.training.checks import check
from tests import ranks

E, D, F, K = 6, 8, 12, 2
# The experts of each token, by rank: [N, K].
CASES: dict[str, list[list[list[int]]]] = {
    "an expert without a token": [[[0, 3], [2, 5]], [[5, 0]], [[3, 2], [0, 5], [5, 3]], [[2, 3], [0, 2]]],
    "one token": [[[4, 1]], [[1, 4]], [[4, 1]], [[0, 5]]],
    "all tokens for one rank": [[[0, 1]] * 3, [[2, 0]] * 2, [[1, 0]], [[2, 1]] * 4],
    "dropped pairs, with number 6": [[[6, 3], [2, 5]], [[6, 6]], [[3, 6], [0, 5], [6, 3]], [[2, 3], [0, 2]]],
}


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def experts() -> Experts:
    found = Experts(E, D, F).double()
    for seed, parameter in enumerate(found.parameters()):
        parameter.data = drawn(*parameter.shape, seed=seed)
    return found


def tokens(case: str, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """The activations [1, N, D], experts and weights of a rank's tokens."""
    numbers = torch.tensor(CASES[case][rank])
    n = len(numbers)
    weights = drawn(n, K, seed=20 + rank).masked_fill(numbers == E, 0.0)
    return drawn(1, n, D, seed=10 + rank).requires_grad_(), numbers, weights.requires_grad_()


def result_of(module: Experts, inputs: tuple[Tensor, Tensor, Tensor], rank: int) -> list[Tensor]:
    """The module's output, and the gradients of the activations and of the weights."""
    x, numbers, weights = inputs
    out = module(x, numbers, weights)
    out.backward(drawn(*out.shape, seed=30 + rank))
    assert x.grad is not None
    assert weights.grad is not None
    return [out.detach(), x.grad, weights.grad]


def divided() -> dict[str, Any]:
    """What a rank of four computes with its part of the experts: outputs, and gradients summed by nobody else."""
    rank = dist.get_rank()
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "efsdp"))
    found: dict[str, Any] = {}
    for case in CASES:
        module = experts()
        divide(module, grid["ep"])
        results = result_of(module, tokens(case, rank), rank)
        gradients = []
        for parameter in module.parameters():
            assert parameter.grad is not None
            part = local(parameter.grad)
            dist.all_reduce(part, group=grid.get_group("efsdp"))
            gradients.append(full_tensor(parameter.grad))
        found[case] = results, gradients
    module = experts()
    module.up.requires_grad_(False)
    divide(module, grid["ep"])
    found["trained"] = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    return found


@pytest.fixture(scope="module")
def by_rank() -> list[dict[str, Any]]:
    return ranks.run(4, divided)


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_of_divided_experts_equal_those_of_one_process(by_rank, case):
    module = experts()
    for rank, found in enumerate(by_rank):
        expected = result_of(module, tokens(case, rank), rank)
        for here, there in zip(found[case][0], expected, strict=True):
            torch.testing.assert_close(here, there, rtol=1e-12, atol=1e-12)
    for found in by_rank:
        for gradient, parameter in zip(found[case][1], module.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-12, atol=1e-12)


def test_a_frozen_weight_of_divided_experts_stays_frozen(by_rank):
    assert [found["trained"] for found in by_rank] == [["gate", "down"]] * 4


def sent_around() -> Any:
    """Rows that say their rank and expert, where they arrive, and what comes back."""
    rank = dist.get_rank()
    n_rows = torch.tensor([[1, 0, 2, 1, 0, 0], [0, 3, 0, 0, 0, 1], [0] * 6][rank])
    owners = torch.arange(6).repeat_interleave(n_rows)
    rows = torch.stack([torch.full_like(owners, rank), owners], dim=1).float()
    group = dist.group.WORLD
    assert group is not None
    arrived = Exchange(group)(rows, n_rows)  # pyright: ignore[reportCallIssue]  # torch.compiler.disable has no type for methods
    return rows, arrived.rows, arrived.experts, arrived.give_back(2 * arrived.rows)


def test_rows_arrive_where_their_expert_is_in_the_order_of_ranks_and_come_back_in_their_own():
    found = ranks.run(3, sent_around)
    for rank, (_, arrived, numbers, _) in enumerate(found):
        everything = torch.cat([rows for rows, *_ in found])
        expected = everything[(everything[:, 1] // 2).long() == rank]
        assert torch.equal(arrived, expected)
        assert torch.equal(numbers, (expected[:, 1] % 2).long())
    for rows, *_, back in found:
        assert torch.equal(back, 2 * rows)


def test_groups_of_experts_are_neighbours_among_the_ranks_that_share_parameters():
    sizes = {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "cp": 2, "tp": 2}
    assert mesh.expert_groups(sizes, 2) == {
        "ep": [[0, 2], [4, 6], [1, 3], [5, 7]],
        "efsdp": [[0, 4], [2, 6], [1, 5], [3, 7]],
    }


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"mesh": {"ep": 2}, "model": {"name": "llama"}}, "name = 'llama' has none here: expected ep=1"),
        ({"mesh": {"ep": 4}, "model": {"n_experts": 6}}, "ep=4 does not divide n_experts=6: 6 % 4 = 2"),
        ({"mesh": {"ep": 3}, "model": {}}, "ep=3 does not divide dp_shard=4 x cp=1: 4 % 3 = 1"),
        ({"mesh": {"ep": 2}, "model": {}, "recompute": {"mode": "selective"}}, "expected mode = 'full' or 'none'"),
    ],
)
def test_ep_is_refused_where_it_divides_nothing(keys, words):
    model = {"name": "moe", "vocab_size": 128} | keys["model"]
    cfg = config.validate(keys | {"model": model, "train": {"steps": 1}}, "test")
    with pytest.raises(ValueError, match=words):
        check(families.resolve(cfg), mesh.resolve(cfg.mesh, 4), torch.device("cpu"))


def slices() -> tuple[list[int], list[int], list[str]]:
    """The ranks that share this rank's experts out, those that have the same experts, and the dims of the latter."""
    sizes = {"pp": 1, "dp_replicate": 2, "dp_shard": 4, "cp": 1, "tp": 1}
    world = mesh.start(torch.device("cpu"), sizes, ep=2)
    assert world.experts is not None
    held, sharded = world.experts
    return held.mesh.flatten().tolist(), sorted(sharded.mesh.flatten().tolist()), list(sharded.mesh_dim_names or ())


def test_with_copies_of_shards_the_gradients_of_an_expert_are_summed_over_the_copies_too():
    found = ranks.run(8, slices)
    assert [held for held, *_ in found] == [[rank - rank % 2, rank - rank % 2 + 1] for rank in range(8)]
    assert [sharded for _, sharded, _ in found] == [[0, 2, 4, 6], [1, 3, 5, 7]] * 4
    assert {tuple(dims) for *_, dims in found} == {("dp_replicate", "efsdp")}


@pytest.mark.parametrize("ep", [0, -1])
def test_an_ep_that_is_no_number_of_ranks_is_refused(ep: int):
    with pytest.raises(ValueError, match=rf"ep={ep}: expected a positive number of ranks \(\[mesh\] ep\)"):
        mesh.resolve(config.Mesh.model_construct(ep=ep), 4)
