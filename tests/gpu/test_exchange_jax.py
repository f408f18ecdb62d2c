"""The benchmark's exchange of rows on GPUs: every row that is pulled or pushed arrives, between
virtual ranks of one GPU, on two GPUs in one process and in two; what a rank may not move stays
where it is.
"""

import exchange_cases
import jax
import numpy as np
import pytest
from exchange_cases import TOKENS, count_wrong_rows, moves_of, places
from jax.sharding import Mesh
from jax_layers import in_two_processes, require_hopper

import jax_mok
from jax_mok import _cuda
from jax_mok.bench import exchange, latency
from jax_mok.bench.problem import ROUTINGS


def gpus(count: int) -> Mesh:
    mesh = Mesh(np.array(jax.devices("gpu")[:count]), ("expert",))
    require_hopper(mesh)
    return mesh


@pytest.mark.gpu
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("mode", exchange.MODES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_virtual_ranks(ranks, mode, routing):
    mesh = gpus(1)
    with _cuda.testing(virtual_ranks=ranks):
        exchange_cases.check(mesh, ranks, mode, routing)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", exchange.MODES)
def test_moves_out_of_range(mode):
    """An error that names the move; no place but its own is the worse for it, and the next call is
    right."""
    mesh, ranks = gpus(1), 2
    moves, x = moves_of(ranks, "uniform"), exchange.random_rows(ranks, TOKENS, 200)
    maker = exchange.TARGET if mode == "pull" else exchange.SOURCE
    with _cuda.testing(virtual_ranks=ranks):
        for name, lists in exchange_cases.bad_lists(ranks, mode, moves).items():
            rows, ns = exchange_cases.run(mesh, x, moves, mode, 16, lists=lists)
            with pytest.raises(jax_mok.MokError, match=r"rank 1.*move 5 of its list"):
                jax_mok.synchronize(rows)
            assert np.asarray(ns)[1] == -1 and np.asarray(ns)[0] >= 0, name
            # Warps of the rank may leave their shares: what did come is right.
            got = np.asarray(rows).view(np.uint16).reshape(ranks, places(x), -1)
            want = np.stack([exchange.wanted_rows(x, moves, r, places(x)) for r in range(ranks)])
            nothing = (got == exchange.NOTHING_CAME).all(axis=2)
            assert ((got == want).all(axis=2) | nothing).all(), name
            assert nothing[tuple(moves[moves[:, maker] == 1][5, exchange.TARGET :])], name
            rows, _ = jax_mok.synchronize(exchange_cases.run(mesh, x, moves, mode, 16))
            assert count_wrong_rows(rows, x, moves) == 0, name


@pytest.mark.gpu
def test_bench(capsys):
    """On one GPU between virtual ranks, and it says so."""
    gpus(1)
    pytest.importorskip("rich")
    rows = exchange.compare(latency.LINK_SHAPE, 64, 1, exchange.SMS, 2)
    assert "4 virtual ranks of one GPU: no links" in capsys.readouterr().out
    assert len(rows) == len(ROUTINGS) * len(exchange.MODES) * len(exchange.SMS)
    for row in rows:
        assert row["virtual"] and row["ms"] > 0 and row["gb_per_s_of_busiest_rank"] > 0
        if row["routing"] == "one-rank":
            assert row["most_in"] == 3 * 64 and row["most_out"] == 64


@pytest.mark.gpu2
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("mode", exchange.MODES)
def test_two_gpus(mode, routing):
    exchange_cases.check(gpus(2), 2, mode, routing)


@pytest.mark.gpu2
@pytest.mark.parametrize("mode", exchange.MODES)
def test_a_fault_on_two_gpus(mode):
    """A move out of range, a rank that never comes: errors on both, and the next call is right."""
    mesh = gpus(2)
    moves, x = moves_of(2, "zipf"), exchange.random_rows(2, TOKENS, 200)
    lists = exchange_cases.bad_lists(2, mode, moves)["a row behind the last"]
    with pytest.raises(jax_mok.MokError, match=r"rank 1.*move 5 of its list"):
        jax_mok.synchronize(exchange_cases.run(mesh, x, moves, mode, 16, lists=lists))
    with _cuda.testing(absent_rank=1):
        late = exchange_cases.run(mesh, x, moves, mode, 16, timeout_seconds=0.5)
        with pytest.raises(jax_mok.MokError, match="rank 1 did not come"):
            jax_mok.synchronize(late)
    rows, _ = jax_mok.synchronize(exchange_cases.run(mesh, x, moves, mode, 16))
    assert count_wrong_rows(rows, x, moves) == 0


@pytest.mark.gpu2
def test_two_processes():
    """One GPU each."""
    gpus(2)
    results = in_two_processes("exchange_worker.py", "--xla_gpu_autotune_level=0")
    checked = len(ROUTINGS) * len(exchange.MODES)
    assert [r["checked"] for r in results] == [checked, checked]
