"""ops.schedule: the plan of one rank against NumPy, and its errors."""

import collections

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_mok import ops


@st.composite
def problems(draw):
    """(ids [n, T, k], num_experts, rank, keyword arguments of schedule)."""
    num_ranks = draw(st.integers(1, 5))
    num_local = draw(st.integers(1, 6))
    num_experts = num_ranks * num_local
    top_k = draw(st.integers(1, min(5, num_experts)))
    tokens = draw(st.integers(0, 20))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    skew = draw(st.sampled_from([0.0, 1.0, 3.0]))
    noise = rng.gumbel(size=(num_ranks, tokens, num_experts))
    ids = np.argsort(noise - skew * np.arange(num_experts), axis=-1)[..., -top_k:]
    ids = np.where(rng.random(ids.shape) < draw(st.sampled_from([0.0, 0.3, 1.0])), -1, ids)
    options = dict(
        num_experts=num_experts,
        rank=draw(st.integers(0, num_ranks - 1)),
        block_rows=draw(st.integers(1, 5)),
        minibatch_size=draw(st.none() | st.integers(1, 12)),
        macrobatch_size=draw(st.none() | st.integers(1, 40)),
        source_order=draw(st.sampled_from(["interleaved", "sequential"])),
        tiles_per_block=(draw(st.integers(1, 3)), draw(st.integers(1, 3))),
    )
    return ids.astype(np.int32), options


def rows_of_expert(ids, expert, source_order):
    """The (rank, token, slot) of an expert's rows, in order."""
    found = np.argwhere(ids == expert)  # sorted by (rank, token, slot)
    if source_order == "interleaved":
        seen = collections.Counter()
        turn = []
        for source, _, _ in found:
            turn.append(seen[source])
            seen[source] += 1
        found = found[np.lexsort((found[:, 0], turn))] if len(found) else found
    return found


@given(problems())
def test_rows_match_numpy(problem):
    ids, options = problem
    plan = ops.schedule(ids, **options)
    num_local = options["num_experts"] // len(ids)
    experts = options["rank"] * num_local + np.arange(num_local)
    np.testing.assert_array_equal(
        plan.counts, [[(of_rank == e).sum() for e in experts] for of_rank in ids]
    )
    np.testing.assert_array_equal(plan.expert_rows, plan.counts.sum(0))
    blocks = -(-plan.expert_rows // plan.block_rows)
    np.testing.assert_array_equal(plan.expert_first_block, np.r_[0, np.cumsum(blocks)])
    np.testing.assert_array_equal(plan.block_expert, np.repeat(np.arange(num_local), blocks))
    expected = np.full((plan.num_blocks * plan.block_rows, 3), -1)
    for local, expert in enumerate(experts):
        rows = rows_of_expert(ids, expert, options["source_order"])
        first = plan.expert_first_block[local] * plan.block_rows
        expected[first : first + len(rows)] = rows
    np.testing.assert_array_equal(plan.rows, expected)


@given(problems())
def test_groups_cut_the_blocks(problem):
    ids, options = problem
    plan = ops.schedule(ids, **options)
    size = plan.macrobatch_blocks
    for pieces in (plan.groups, plan.segments):
        covered = [b for first, count, _ in pieces for b in range(first, first + count)]
        assert covered == list(range(plan.num_blocks))
        for first, count, expert in pieces:
            assert (plan.block_expert[first : first + count] == expert).all()
            assert first // size == (first + count - 1) // size
    macrobatch = np.arange(plan.num_blocks) // size
    assert len(plan.segments) == len(set(zip(macrobatch, plan.block_expert)))
    if options["minibatch_size"] is not None:
        limit = -(-options["minibatch_size"] // plan.block_rows)
        assert all(count <= limit for _, count, _ in plan.groups)


@given(problems())
def test_every_tile_once_in_order(problem):
    ids, options = problem
    plan = ops.schedule(ids, **options)
    per_block = options["tiles_per_block"]

    def all_tiles(phases):
        return {
            (phase, b, n)
            for phase, tiles in zip(phases, per_block)
            for b in range(plan.num_blocks)
            for n in range(tiles)
        }

    forward = [tuple(t) for t in plan.tiles.tolist()]
    assert len(forward) == len(set(forward))
    assert set(forward) == all_tiles((ops.GATE_UP, ops.DOWN))
    order = [(b // plan.macrobatch_blocks, phase) for phase, b, _ in forward]
    assert order == sorted(order)

    backward = [tuple(t) for t in plan.backward_tiles.tolist()]
    weight = {(ops.GRAD_WEIGHT, first + n - 1, 0) for first, n, _ in plan.segments.tolist()}
    assert len(backward) == len(set(backward))
    assert set(backward) == all_tiles((ops.GRAD_HIDDEN, ops.GRAD_INPUT)) | weight
    order = [(-(b // plan.macrobatch_blocks), phase) for phase, b, _ in backward]
    assert order == sorted(order)


@given(problems())
def test_first_use_finds_what_need_not_be_fetched_again(problem):
    ids, options = problem
    plan = ops.schedule(ids, **options)
    seen = {}
    for i, (source, token, _) in enumerate(plan.rows.tolist()):
        key = (i // (plan.block_rows * plan.macrobatch_blocks), source, token)
        expected = -1 if source < 0 else seen.setdefault(key, i)
        assert plan.first_use[i] == (-1 if expected == i else expected)


@given(problems())
def test_every_slot_goes_to_one_row_of_one_rank(problem):
    ids, options = problem
    slots = collections.Counter()
    for rank in range(len(ids)):
        plan = ops.schedule(ids, **{**options, "rank": rank})
        slots.update(map(tuple, plan.rows[plan.rows[:, 0] >= 0].tolist()))
    assert slots == collections.Counter(map(tuple, np.argwhere(ids >= 0).tolist()))


def test_macrobatch_size_changes_no_row():
    ids = np.argsort(np.random.default_rng(0).random((3, 50, 12)), axis=-1)[..., :4]
    whole = ops.schedule(ids, num_experts=12, rank=1, block_rows=4)
    assert whole.num_macrobatches == 1
    for size in (1, 4, 5, 40):
        part = ops.schedule(ids, num_experts=12, rank=1, block_rows=4, macrobatch_size=size)
        assert part.macrobatch_blocks == -(-size // 4)
        np.testing.assert_array_equal(part.rows, whole.rows)


def test_sequential_sums_do_not_depend_on_the_number_of_ranks():
    ids = np.argsort(np.random.default_rng(1).random((1, 24, 12)), axis=-1)[..., :3]

    def rows(num_ranks):
        parts = ids.reshape(num_ranks, 24 // num_ranks, 3)
        found = []
        for rank in range(num_ranks):
            plan = ops.schedule(
                parts, num_experts=12, rank=rank, block_rows=64, source_order="sequential"
            )
            real = plan.rows[plan.rows[:, 0] >= 0]
            found += [(s * parts.shape[1] + t, k) for s, t, k in real.tolist()]
        return found

    assert rows(1) == rows(2) == rows(3) == rows(4) == rows(12)


def test_written_by_hand():
    ids = [[[2, 3], [2, 0], [1, 2]], [[0, 1], [3, 2], [-1, 2]]]
    plan = ops.schedule(ids, num_experts=4, rank=1, block_rows=2)
    assert plan.expert_rows.tolist() == [5, 2]
    assert plan.block_expert.tolist() == [0, 0, 0, 1]
    assert plan.rows.tolist() == [
        [0, 0, 0],
        [1, 1, 1],
        [0, 1, 0],
        [1, 2, 1],
        [0, 2, 1],
        [-1, -1, -1],
        [0, 0, 1],
        [1, 1, 0],
    ]
    assert plan.first_use.tolist() == [-1, -1, -1, -1, -1, -1, 0, 1]
    assert plan.groups.tolist() == [[0, 3, 0], [3, 1, 1]]


@pytest.mark.parametrize("shape", [(1, 0, 4), (5, 0, 2)])
def test_no_tokens(shape):
    plan = ops.schedule(np.zeros(shape, np.int32), num_experts=10)
    assert plan.num_blocks == plan.num_macrobatches == 0
    assert plan.rows.shape == plan.groups.shape == plan.tiles.shape == (0, 3)
    assert plan.first_use.shape == (0,) and plan.counts.shape == (shape[0], 10 // shape[0])
    assert not plan.expert_rows.any()


def test_arrays_are_int32_and_read_only():
    plan = ops.schedule(jnp.array([[0, 1]]), num_experts=2)
    for name, value in vars(plan).items():
        if isinstance(value, np.ndarray):
            assert value.dtype == np.int32, name
            assert not value.flags.writeable, name


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64, np.uint64])
def test_any_integers_will_do(dtype):
    plan = ops.schedule(np.array([[0, 2], [1, 0]], dtype), num_experts=3, block_rows=4)
    assert plan.expert_rows.tolist() == [2, 1, 1]


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        ([[0, 4]], {}, r"expert_ids\[0, 1\] of rank 0 is 4; allowed are 0 to 3, and -1"),
        ([[[0, 1]], [[-2, 1]]], {}, r"expert_ids\[0, 0\] of rank 1 is -2"),
        ([[0, 1], [3, 3]], {}, r"expert_ids\[1, 1\] of rank 0 is 3, which an earlier slot"),
        ([[0, 2**40]], {}, r"expert_ids must fit in int32, got 1099511627776"),
        ([0, 1], {}, r"expert_ids must have shape .*, got \(2,\)"),
        (np.zeros((0, 1, 1), int), {}, "at least one rank"),
        (np.zeros((1, 1, 0), int), {}, "one slot"),
        (np.zeros((3, 1, 1), int), {}, "num_experts must be a multiple of .* 3, got 4"),
        ([[0, 1]], {"num_experts": 0}, r"num_experts must be in \[1, 2147483647\], got 0"),
        ([[0, 1]], {"rank": 1}, r"rank must be in \[0, 0\], got 1"),
        ([[0, 1]], {"rank": -1}, r"rank must be in .* got -1"),
        ([[0, 1]], {"block_rows": 0}, "block_rows must be"),
        ([[0, 1]], {"minibatch_size": 0}, "minibatch_size must be"),
        ([[0, 1]], {"macrobatch_size": -5}, "macrobatch_size must be .* got -5"),
        ([[0, 1]], {"tiles_per_block": (1, 0)}, r"tiles_per_block\[1\] must be"),
        ([[0, 1]], {"tiles_per_block": (2**30, 1)}, "gate_up_tiles"),
        ([[0, 1]], {"source_order": "random"}, "source_order must be .* got 'random'"),
    ],
)
def test_errors_name_the_argument(ids, options, message):
    with pytest.raises(ValueError, match=message):
        ops.schedule(ids, **{"num_experts": 4, **options})


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        ([[0.0, 1.0]], {}, "expert_ids must be integers, got dtype float64"),
        ([[True]], {}, "expert_ids must be integers, got dtype bool"),
        ([[0, 1]], {"rank": 0.0}, "rank must be an int, got 0.0"),
        ([[0, 1]], {"macrobatch_size": True}, "macrobatch_size must be an int, got True"),
    ],
)
def test_type_errors(ids, options, message):
    with pytest.raises(TypeError, match=message):
        ops.schedule(ids, **{"num_experts": 4, **options})
