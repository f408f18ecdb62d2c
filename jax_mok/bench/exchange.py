"""Push against pull: the rows of a dispatch, moved over the links by the ranks that get them, as
the kernels do it, or by the ranks that have them, with as many multiprocessors.

What is moved: every token that experts of another rank want, once a rank, in the order of the
schedule that a call makes. A rank takes its time inside the kernel, from its start, right after a
meeting of all ranks, until all that it moves has landed; what counts is the slowest rank.
"""

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_mok
from jax_mok import _cuda, _topology, ffi, ops
from jax_mok.bench import report, timing
from jax_mok.bench.problem import ROUTINGS, Problem
from jax_mok.shapes import MoeShape

EXCHANGE_CUDA = "jax_mok_exchange_cuda"
MODES = ("pull", "push")
SMS = (16, 132)  # multiprocessors of a rank that move rows: some, and all of an H200
VIRTUAL_RANKS, VIRTUAL_TOKENS = 4, 1024
CALLS = 5  # of a mode in a round
NOTHING_CAME = 0xFFFF  # 16 bits of a place that got no row

SOURCE, SOURCE_ROW, TARGET, TARGET_ROW = range(4)  # columns of moves


def moves_of(expert_ids: np.ndarray, num_experts: int) -> np.ndarray:
    """int32 [moves, 4]: the rows that a dispatch moves between ranks; expert_ids [ranks, T, k].

    Places of a target follow each other in the order of its schedule, which takes turns between the
    sources. Moves of one place number follow each other, so that a source takes turns between
    the targets.
    """
    found = []
    for rank in range(len(expert_ids)):
        plan = ops.schedule(expert_ids, num_experts=num_experts, rank=rank)
        source, token, _ = plan.rows.T
        here = (source >= 0) & (source != rank) & (plan.first_use < 0)
        place = np.arange(here.sum(), dtype=np.int32)
        found.append(np.stack([source[here], token[here], np.full_like(place, rank), place], 1))
    moves = np.concatenate(found)
    return moves[np.lexsort((moves[:, TARGET], moves[:, TARGET_ROW]))]


def lists_of(moves: np.ndarray, num_ranks: int, mode: str, length: int) -> np.ndarray:
    """int32 [ranks, length, 4]: the moves that each rank makes; what is left over is -1."""
    who = moves[:, TARGET if mode == "pull" else SOURCE]
    lists = np.full((num_ranks, length, 4), -1, np.int32)
    for rank, its in enumerate(lists):
        mine = moves[who == rank]
        its[: len(mine)] = mine
    return lists


@dataclasses.dataclass(frozen=True)
class Spec:
    """The static part of a call; sizes of one rank."""

    mode: str
    num_rows: int  # places for rows that come
    num_sms: int
    timeout_seconds: float = 600.0
    groups: tuple[tuple[int, ...], ...] = ()

    def facts(self, x: jax.Array, moves: jax.Array) -> dict[str, Any]:
        """What `read_exchange_facts` in csrc/ffi/cuda_facts.h reads, and the tests' wishes."""
        if self.mode not in MODES:
            raise ValueError(f"mode must be one of {MODES}, got {self.mode!r}.")
        options = _cuda.options()
        virtual = options.virtual_ranks
        if x.ndim != 2 or x.shape[0] % virtual or x.dtype != jnp.bfloat16:
            raise ValueError(
                f"x must be bfloat16 [T, H], T a multiple of {virtual} virtual ranks, "
                f"got {x.dtype.name} {x.shape}."
            )
        if moves.shape[1:] != (4,) or moves.shape[0] % virtual or moves.dtype != jnp.int32:
            raise ValueError(
                f"moves must be int32 [N, 4], N a multiple of {virtual} virtual ranks, "
                f"got {moves.dtype.name} {moves.shape}."
            )
        integers = {
            "num_ranks": (len(self.groups[0]) if self.groups else 1) * virtual,
            "num_virtual_ranks": virtual,
            "num_tokens": x.shape[0] // virtual,
            "num_rows": self.num_rows,
            "num_moves": moves.shape[0] // virtual,
            "row_bytes": x.shape[1] * x.dtype.itemsize,
            "num_sms": self.num_sms,
            "push": self.mode == "push",
            "jitter_seed": options.jitter_seed,
            "absent_rank": options.absent_rank,
            "failing_rank": options.failing_rank,
        }
        reals = {
            "timeout_seconds": min(self.timeout_seconds, _cuda.CALL_TIMEOUT_SECONDS),
            "start_timeout_seconds": self.timeout_seconds,
        }
        facts = {k: np.int64(v) for k, v in integers.items()}
        facts |= {k: np.float64(v) for k, v in reals.items()}
        if problem := _cuda.core.check_exchange(facts):
            raise ValueError(f"rows cannot be exchanged like this: {problem}.")
        return facts


def exchange(x: jax.Array, moves: jax.Array, spec: Spec) -> tuple[jax.Array, jax.Array]:
    """One rank's side, inside a shard_map over the axis "expert".

    Args:
      x: bfloat16 [T, H], H a multiple of 8.
      moves: int32 [N, 4], this rank's list; with virtual ranks theirs, one after the other, as all
        arrays are.
      spec: its groups are found here.

    Returns:
      (rows [spec.num_rows, H], ns int32 [1]): what came, 0xFFFF words where nothing did, and how
      long this rank moved rows, -1 after a fault (`jax_mok.check_status` tells which).

    Raises:
      ValueError: an argument out of its range.
    """
    topology = _topology.find(None, "expert", ())
    spec = dataclasses.replace(spec, groups=topology.groups())
    facts = spec.facts(x, moves)
    virtual = int(facts["num_virtual_ranks"])
    results = lambda like: [
        ffi.result_like((virtual * spec.num_rows, x.shape[1]), x.dtype, like),
        ffi.result_like((virtual,), jnp.int32, like),
    ]
    workspace = _cuda.core.exchange_workspace_bytes(facts)
    operands = lambda x, moves: (x, moves)
    return tuple(
        _cuda.custom_call(spec, EXCHANGE_CUDA, facts, workspace, results, operands, x, moves)
    )


def program(mesh: Mesh, spec: Spec):
    """(x [ranks · T, H], moves [ranks · N, 4]) -> (rows [ranks · num_rows, H], ns [ranks]), jitted;
    ns is on all devices."""
    ffi.register()
    ranks = P("expert")
    mapped = jax.shard_map(
        lambda x, moves: exchange(x, moves, spec),
        mesh=mesh,
        in_specs=(ranks, ranks),
        out_specs=(ranks, ranks),
    )
    return jax.jit(mapped, out_shardings=(NamedSharding(mesh, ranks), NamedSharding(mesh, P())))


def on_mesh(mesh: Mesh, array: np.ndarray) -> jax.Array:
    """`array` [ranks, N, columns] as [ranks · N, columns], split over the mesh."""
    flat = array.reshape(-1, array.shape[-1])
    return jax.make_array_from_callback(
        flat.shape, NamedSharding(mesh, P("expert")), lambda index: flat[index]
    )


def random_rows(ranks: int, tokens: int, hidden: int, seed: int = 0) -> np.ndarray:
    """bfloat16 [ranks, tokens, hidden] of any bits."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 1 << 16, (ranks, tokens, hidden), np.uint16).view(jnp.bfloat16)


def wanted_rows(x: np.ndarray, moves: np.ndarray, rank: int, num_rows: int) -> np.ndarray:
    """uint16 [num_rows, H]: the bits of what a rank should get."""
    m = moves[moves[:, TARGET] == rank]
    want = np.full((num_rows, x.shape[-1]), NOTHING_CAME, np.uint16)
    want[m[:, TARGET_ROW]] = x.view(np.uint16)[m[:, SOURCE], m[:, SOURCE_ROW]]
    return want


def count_wrong_rows(rows: jax.Array, x: np.ndarray, moves: np.ndarray, num_rows: int) -> int:
    """Places of this process's ranks that do not hold, bit for bit, what they should."""
    wrong = 0
    for shard in rows.addressable_shards:
        got = np.asarray(shard.data).view(np.uint16).reshape(-1, num_rows, x.shape[-1])
        first = (shard.index[0].start or 0) // num_rows
        for rank, its in enumerate(got, first):
            wrong += int((its != wanted_rows(x, moves, rank, num_rows)).any(axis=1).sum())
    return wrong


def compare(shape: MoeShape, tokens: int, ranks: int, sms, rounds: int) -> list[dict]:
    """Rows of a table, which it prints: every routing, pulled and pushed; or says why not.

    Args:
      shape: of the layer; it gets eight experts a rank.
      tokens: of a rank; fewer are taken for virtual ranks.
      ranks: devices; 1 = virtual ranks of one GPU instead.
      sms: multiprocessors of a rank that move rows, each measured.
      rounds: of both modes in turns.
    """
    mesh = Mesh(np.array(jax.devices()[:ranks]), ("expert",), axis_types=(AxisType.Auto,))
    topology = _topology.find(mesh, "expert", ())
    why = _cuda.why_not(topology) if _cuda.handles(topology) else "only GPUs have it"
    if why:
        print(f"push against pull: not run: {why}")
        return []
    virtual = ranks == 1
    if virtual:
        ranks, tokens = VIRTUAL_RANKS, min(tokens, VIRTUAL_TOKENS)
    shape = dataclasses.replace(
        shape, num_experts=8 * ranks, hidden_size=-(-shape.hidden_size // 8) * 8
    )
    problems = [Problem(shape, tokens, ranks, "bfloat16", routing) for routing in ROUTINGS]
    ids = lambda problem: problem.expert_ids().reshape(ranks, tokens, shape.top_k)
    moves = {p.routing: moves_of(ids(p), shape.num_experts) for p in problems}
    with _cuda.testing(virtual_ranks=ranks) if virtual else contextlib.nullcontext():
        rows = _measure(mesh, moves, random_rows(ranks, tokens, shape.hidden_size), sms, rounds)
    for row in rows:
        row |= {"ranks": ranks, "virtual": virtual, "tokens": tokens}
    links = f"{ranks} virtual ranks of one GPU: no links" if virtual else f"{ranks} ranks"
    report.print_table(
        f"push against pull: {links}; {tokens} tokens each, k {shape.top_k}, "
        f"E {shape.num_experts}, H {shape.hidden_size}, bfloat16",
        [
            ("routing", lambda r: r["routing"]),
            ("SMs", lambda r: str(r["sms"])),
            ("mode", lambda r: r["mode"]),
            ("ms", lambda r: f"{r['ms']:.3f}"),
            ("min-max", lambda r: f"{r['spread_ms'][0]:.3f}-{r['spread_ms'][1]:.3f}"),
            ("most into a rank, MB", lambda r: f"{r['most_in'] * r['row_bytes'] / 1e6:.1f}"),
            ("out of a rank", lambda r: f"{r['most_out'] * r['row_bytes'] / 1e6:.1f}"),
            ("GB/s of the busiest rank", lambda r: f"{r['gb_per_s_of_busiest_rank']:.1f}"),
        ],
        rows,
    )
    return rows


def _measure(mesh, moves: dict[str, np.ndarray], x: np.ndarray, sms, rounds: int) -> list[dict]:
    """A row for every routing, number of multiprocessors and mode, all with arrays of one size: so
    they share their programs and the peer heap. Results are checked with the first number."""
    ranks, _, hidden = x.shape
    row_bytes = hidden * x.dtype.itemsize
    into, out = (
        {routing: int(np.bincount(m[:, c]).max(initial=0)) for routing, m in moves.items()}
        for c in (TARGET, SOURCE)
    )
    num_rows = max(1, *into.values())
    lists = {
        mode: {
            routing: on_mesh(mesh, lists_of(m, ranks, mode, max(1, *most.values())))
            for routing, m in moves.items()
        }
        for mode, most in zip(MODES, (into, out))
    }
    tokens, rows = on_mesh(mesh, x), []
    for num_sms in sms:
        runs = {}
        for mode in MODES:
            run = program(mesh, Spec(mode, num_rows, num_sms))
            runs[mode] = run.lower(tokens, next(iter(lists[mode].values()))).compile()
        for routing in moves:
            calls = {m: functools.partial(runs[m], tokens, lists[m][routing]) for m in MODES}
            if num_sms == sms[0]:
                for mode, call in calls.items():
                    got, _ = jax_mok.synchronize(call())
                    wrong = count_wrong_rows(got, x, moves[routing], num_rows)
                    if wrong:
                        raise AssertionError(f"{routing}, {mode}: {wrong} wrong rows.")
            for mode, measured in _in_turns(calls, rounds).items():
                busiest = max(into[routing], out[routing]) * row_bytes
                rows.append(
                    {
                        "routing": routing,
                        "sms": num_sms,
                        "mode": mode,
                        "ms": measured.median,
                        "spread_ms": measured.spread,
                        "row_bytes": row_bytes,
                        "moves": len(moves[routing]),
                        "most_in": into[routing],
                        "most_out": out[routing],
                        "gb_per_s_of_busiest_rank": busiest / measured.median / 1e6,
                    }
                )
    return rows


def _in_turns(calls: dict, rounds: int) -> dict[str, timing.Measurement]:
    """As `timing.in_turns`, by the kernels' own clocks: the slowest rank of each call."""
    measured: dict[str, list[float]] = {mode: [] for mode in calls}
    for index in range(rounds):
        for mode in list(calls)[:: 1 if index % 2 == 0 else -1]:
            for _ in range(CALLS):
                _, ns = jax_mok.synchronize(calls[mode]())
                measured[mode].append(int(np.asarray(ns).max()) / 1e6)
    return {mode: timing.Measurement(ms) for mode, ms in measured.items()}
