"""What the tests of the exchange of rows share, in one process and in two."""

import itertools

import numpy as np

import jax_mok
from jax_mok.bench import exchange
from jax_mok.bench.problem import Problem
from jax_mok.shapes import MoeShape

TOKENS = 301  # of a rank
EXPERTS, TOP_K = 8, 3  # experts of a rank
# 16 bytes; no multiple of what a warp moves at once; more than that, and 16 bytes.
HIDDEN = (8, 200, 2056)


def routed(ranks: int, routing: str) -> np.ndarray:
    """int32 [ranks, T, k]."""
    shape = MoeShape("rows", 8, 8, EXPERTS * ranks, TOP_K)
    ids = Problem(shape, TOKENS, ranks, routing=routing).expert_ids()
    return ids.reshape(ranks, TOKENS, TOP_K)


def places(x: np.ndarray) -> int:
    """Of each rank: more than can come to it."""
    return (len(x) - 1) * TOKENS + 3


def moves_of(ranks: int, routing: str) -> np.ndarray:
    return exchange.moves_of(routed(ranks, routing), EXPERTS * ranks)


def run(mesh, x, moves, mode, num_sms, *, lists=None, timeout_seconds=15.0):
    """(rows, ns) of one call. `lists`: instead of the right ones."""
    if lists is None:
        lists = exchange.lists_of(moves, len(x), mode, len(moves) + 1)
    spec = exchange.Spec(mode, places(x), num_sms, timeout_seconds)
    arrays = exchange.on_mesh(mesh, x), exchange.on_mesh(mesh, lists)
    return exchange.program(mesh, spec)(*arrays)


def count_wrong_rows(rows, x, moves) -> int:
    return exchange.count_wrong_rows(rows, x, moves, places(x))


def check(mesh, ranks: int, mode: str, routing: str) -> None:
    """Every place of every rank, bit for bit; never what an earlier call left in the heap."""
    moves = moves_of(ranks, routing)
    for seed, (hidden, num_sms) in enumerate(itertools.product(HIDDEN, (1, 48))):
        x = exchange.random_rows(ranks, TOKENS, hidden, seed)
        rows, ns = jax_mok.synchronize(run(mesh, x, moves, mode, num_sms))
        assert count_wrong_rows(rows, x, moves) == 0, (hidden, num_sms)
        ns = np.asarray(ns)
        assert ns.min() >= 0 and 0 < ns.max() < 1e9, ns


def bad_lists(ranks: int, mode: str, moves: np.ndarray) -> dict[str, np.ndarray]:
    """Lists with one move of rank 1 that it must not make."""
    maker = exchange.TARGET if mode == "pull" else exchange.SOURCE
    far = exchange.SOURCE if mode == "pull" else exchange.TARGET
    found = {}
    for name, column, value in (
        ("a rank that is not there", far, ranks),
        ("a rank below 0", far, -2),
        ("a row behind the last", exchange.SOURCE_ROW, TOKENS),
        ("a row before the first", exchange.SOURCE_ROW, -1),
        ("a place behind the last", exchange.TARGET_ROW, (ranks - 1) * TOKENS + 3),
        ("a place before the first", exchange.TARGET_ROW, np.iinfo(np.int32).min),
        ("the move of another rank", maker, 0),
    ):
        lists = exchange.lists_of(moves, ranks, mode, len(moves))
        lists[1, 5, column] = value
        found[name] = lists
    return found
