"""Pushing against pulling: what the benchmark moves is what a dispatch moves, and what it may not
move is refused. Needs no GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_mok import _cuda
from jax_mok.bench import exchange, latency
from jax_mok.bench.problem import ROUTINGS, Problem
from jax_mok.shapes import MoeShape

TOKENS, TOP_K = 24, 3

needs_kernels = pytest.mark.skipif(
    _cuda.core is None, reason=f"no CUDA kernels in this build: {_cuda.WHY_NO_CUDA}"
)


def routed(ranks, routing) -> np.ndarray:
    """int32 [ranks, T, k] for four experts a rank, some slots unused."""
    shape = MoeShape("small", 8, 8, 4 * ranks, TOP_K)
    ids = Problem(shape, TOKENS, ranks, routing=routing).expert_ids()
    ids[np.random.default_rng(1).random(ids.shape) < 0.1] = -1
    return ids.reshape(ranks, TOKENS, TOP_K)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_moves(ranks, routing):
    """Every token goes once to each other rank that has experts for it, into a place of its own."""
    ids = routed(ranks, routing)
    moves = exchange.moves_of(ids, 4 * ranks)
    wanted = {
        (source, token, expert // 4)
        for (source, token, _), expert in np.ndenumerate(ids)
        if expert >= 0 and expert // 4 != source
    }
    assert sorted(map(tuple, moves[:, :3].tolist())) == sorted(wanted)
    for rank in range(ranks):
        places = moves[moves[:, exchange.TARGET] == rank, exchange.TARGET_ROW]
        assert places.tolist() == list(range(len(places)))
    # As many as the dispatch of a layer pulls.
    into = np.bincount(moves[:, exchange.TARGET])
    assert into.max() == latency.traffic(ids, 4 * ranks).pulled


@pytest.mark.parametrize("mode", exchange.MODES)
def test_lists(mode):
    """Every move is made once, by the rank whose business it is, in the order of places."""
    moves = exchange.moves_of(routed(4, "zipf"), 16)
    lists = exchange.lists_of(moves, 4, mode, len(moves))
    assert lists.shape == (4, len(moves), 4) and lists.dtype == np.int32
    who = exchange.TARGET if mode == "pull" else exchange.SOURCE
    made = []
    for rank, its in enumerate(lists):
        own = its[its[:, 0] >= 0]
        assert (own[:, who] == rank).all() and (its[len(own) :] == -1).all()
        assert (np.diff(own[:, exchange.TARGET_ROW]) >= 0).all()
        made += own.tolist()
    assert sorted(made) == sorted(moves.tolist())


def test_wrong_rows_are_counted():
    ids = routed(2, "uniform")
    moves = exchange.moves_of(ids, 8)
    x = exchange.random_rows(2, TOKENS, 8)
    rows = np.full((2, TOKENS + 1, 8), exchange.NOTHING_CAME, np.uint16)
    m = moves.T
    rows[m[2], m[3]] = x.view(np.uint16)[m[0], m[1]]

    def wrong():
        flat = jnp.asarray(rows.reshape(-1, 8).view(jnp.bfloat16))
        return exchange.count_wrong_rows(flat, x, moves, TOKENS + 1)

    assert wrong() == 0
    rows[1, TOKENS, 7] = 1  # where nothing came
    rows[0, 0] = rows[0, 1]
    assert wrong() == 2


def test_not_on_a_cpu(capsys):
    assert exchange.compare(latency.LINK_SHAPE, 64, 2, (16,), 1) == []
    assert "push against pull: not run: only GPUs have it" in capsys.readouterr().out


def facts(mode="pull", x=(16, 40), moves=(7, 4), dtype=jnp.bfloat16, num_rows=32, num_sms=24):
    spec = exchange.Spec(mode, num_rows, num_sms, groups=((0, 1),))
    arrays = jax.ShapeDtypeStruct(x, dtype), jax.ShapeDtypeStruct(moves, jnp.int32)
    return spec.facts(*arrays)


@needs_kernels
@pytest.mark.parametrize(
    "options, words",
    [
        (dict(x=(16, 44)), "row_bytes is 88; allowed: multiples of 16"),
        (dict(x=(16, 4)), "row_bytes is 8; allowed: 16 to"),
        (dict(x=(0, 40)), "num_tokens is 0"),
        (dict(num_rows=0), "num_rows is 0"),
        (dict(num_sms=0), "num_sms is 0"),
        (dict(moves=(0, 4)), "num_moves is 0"),
        (dict(moves=(7, 3)), r"moves must be int32 \[N, 4\].*got int32 \(7, 3\)"),
        (dict(moves=(28,)), r"moves must be int32 \[N, 4\].*got int32 \(28,\)"),
        (dict(dtype=jnp.float32), r"x must be bfloat16 \[T, H\].*got float32"),
        (dict(mode="shove"), r"mode must be one of \('pull', 'push'\), got 'shove'"),
    ],
)
def test_errors(options, words):
    facts()
    with pytest.raises(ValueError, match=words):
        facts(**options)


@needs_kernels
def test_lists_of_virtual_ranks_are_equally_long():
    with _cuda.testing(virtual_ranks=2), pytest.raises(ValueError, match="2 virtual ranks"):
        facts(moves=(7, 4))


@needs_kernels
@pytest.mark.parametrize("mode", exchange.MODES)
def test_moves_that_a_kernel_makes(mode):
    """Nobody reads or writes outside of the rows, nor makes the move of another rank."""
    allows = lambda rank, *move: _cuda.core.allows_move(facts(mode), rank, move)
    maker, other = (1, 0) if mode == "pull" else (0, 1)
    assert allows(maker, 0, 0, 1, 0) and allows(maker, 0, 15, 1, 31)
    assert not allows(other, 0, 0, 1, 0)
    for bad in ((0, 16, 1, 0), (0, -1, 1, 0), (0, 0, 1, 32), (0, 0, 1, -1)):
        assert not allows(maker, *bad)
    for stranger in (-1, 2, 2**31 - 1):
        assert not allows(1, stranger, 0, 1, 0) and not allows(0, 0, 0, stranger, 0)
        assert not allows(stranger, stranger, 0, stranger, 0)
