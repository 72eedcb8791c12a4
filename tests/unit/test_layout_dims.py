"""Where each rank stands: every axis deals all ranks into groups, once."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.layout.config import ParallelConfig
from train.layout.dims import AXES, ParallelDims

DEGREES = st.integers(1, 4)
DIMS = st.builds(ParallelDims, pp=DEGREES, dp_replicate=DEGREES, dp_shard=DEGREES, cp=DEGREES, tp=DEGREES)
SETS_OF_AXES = st.lists(st.sampled_from(AXES), min_size=1, max_size=5, unique=True)


@pytest.mark.req("C5")
@given(DIMS)
def test_a_rank_and_its_coordinates_are_inverse(dims: ParallelDims) -> None:
    places = [dims.coordinates(rank) for rank in range(dims.ranks)]
    assert [dims.rank(**place) for place in places] == list(range(dims.ranks))
    assert [tuple(place.values()) for place in places] == list(itertools.product(*map(range, dims.shape)))


@pytest.mark.req("C5")
@given(DIMS, SETS_OF_AXES)
def test_every_rank_is_in_one_group_and_its_members_agree(dims: ParallelDims, axes: list[str]) -> None:
    groups = {tuple(dims.group(axes, rank)) for rank in range(dims.ranks)}
    assert sorted(itertools.chain.from_iterable(groups)) == list(range(dims.ranks))
    for group in groups:
        assert len(group) == math.prod(getattr(dims, axis) for axis in axes)
        assert list(group) == sorted(group)
        for axis in set(AXES) - set(axes):
            assert len({dims.coordinates(rank)[axis] for rank in group}) == 1


@pytest.mark.req("A5")
@given(DIMS, st.integers(1, 12))
def test_an_axis_spans_nodes_if_some_group_does(dims: ParallelDims, ranks_per_node: int) -> None:
    for axis in AXES:
        nodes = [
            {member // ranks_per_node for member in dims.group(axis, rank)} for rank in range(dims.ranks)
        ]
        assert dims.spans_nodes(axis, ranks_per_node) == any(len(one) > 1 for one in nodes)


@pytest.mark.req("A5")
@given(DIMS)
def test_tensor_parallel_ranks_are_neighbours_and_copies_are_farthest_apart(dims: ParallelDims) -> None:
    tp = dims.group("tp")
    assert tp == list(range(dims.tp))
    if dims.dp_replicate > 1 and dims.dp_shard > 1:
        near, far = dims.group("dp_shard"), dims.group("dp_replicate")
        assert far[1] - far[0] >= len(near) * (near[1] - near[0])


@pytest.mark.req("C5")
@given(DIMS, st.integers(0, 3), st.booleans(), st.booleans())
def test_degrees_that_are_left_open_take_what_the_others_leave(
    dims: ParallelDims, zero: int, open_shard: bool, open_replicate: bool
) -> None:
    parallel = ParallelConfig(
        pp=dims.pp,
        cp=dims.cp,
        tp=dims.tp,
        zero=zero,
        dp_replicate=None if open_replicate else dims.dp_replicate,
        dp_shard=None if open_shard else dims.dp_shard,
    )
    found = ParallelDims.of(parallel, dims.ranks)
    assert (found.ranks, found.dp) == (dims.ranks, dims.dp)
    if not (open_shard and open_replicate):
        assert found == dims
    else:
        assert (found.dp_shard if zero == 0 else found.dp_replicate) == 1
