"""Claims about mesh.py; the lists are those in the comments of Megatron's `mpu/initialize.py`."""

import pytest

from dtmega import config, mesh

MEGATRON = mesh.resolve(config.Mesh(pp=4, tp=2), 16)  # its example: 16 GPUs, tp 2, pp 4


@pytest.mark.parametrize(
    ("axes", "lists"),
    [
        (("tp",), [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]]),
        (("pp",), [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]),
        (mesh.DATA, [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]),
        (mesh.DERIVED["model"], [[0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15]]),
    ],
)
def test_ranks_are_grouped_as_megatron_groups_them(axes, lists):
    assert mesh.rank_groups(MEGATRON, axes) == lists


def test_the_embedding_is_shared_by_the_first_and_the_last_stage():
    assert mesh.embedding_groups(MEGATRON) == [[0, 12], [1, 13], [2, 14], [3, 15]]
    assert mesh.embedding_groups(mesh.resolve(config.Mesh(tp=2), 4)) == [[0], [1], [2], [3]]


def test_the_description_prints_every_group():
    text = mesh.describe(MEGATRON)
    assert "tp           [0,1] [2,3] [4,5] [6,7] [8,9] [10,11] [12,13] [14,15]" in text
    assert "model        [0,1,4,5,8,9,12,13] [2,3,6,7,10,11,14,15]" in text
    assert [line.split()[0] for line in text.splitlines()] == [
        *mesh.AXES,
        *mesh.DERIVED,
        "embedding",
    ]


@pytest.mark.parametrize("sizes", [{"tp": 2, "pp": 2}, {"dp_replicate": 2, "tp": 2}, {"dp_replicate": 4}, {"pp": 8}])
def test_groups_of_one_name_hold_every_rank_once(sizes):
    resolved = mesh.resolve(config.Mesh(**sizes), 8)
    for axes in [*((axis,) for axis in mesh.AXES), mesh.DATA, *mesh.DERIVED.values()]:
        assert sorted(rank for group in mesh.rank_groups(resolved, axes) for rank in group) == list(range(8))


def test_ranks_that_compute_one_microbatch_have_one_data_rank():
    for group in mesh.rank_groups(MEGATRON, mesh.DERIVED["model"]):
        assert len({mesh.data_coordinate(MEGATRON, rank) for rank in group}) == 1
    assert mesh.data_coordinate(MEGATRON, 2) == (1, 2)


def test_minus_one_is_what_is_left():
    assert mesh.resolve(config.Mesh(dp_shard=-1, tp=2, pp=2), 16)["dp_shard"] == 4
    assert mesh.resolve(config.Mesh(dp_shard=1, dp_replicate=-1), 6)["dp_replicate"] == 6


@pytest.mark.parametrize(
    ("sizes", "world", "message"),
    [
        ({"tp": 3}, 16, "tp=3 does not make the 16 processes .*16 % 3 = 1"),
        ({"pp": 2, "dp_shard": 2}, 16, "4 != 16"),
        ({"tp": -1}, 16, "one of them"),
        ({"tp": 0}, 16, "positive"),
    ],
)
def test_sizes_that_do_not_multiply_to_the_world_show_the_equation(sizes, world, message):
    with pytest.raises(ValueError, match=message):
        mesh.resolve(config.Mesh(**sizes), world)
