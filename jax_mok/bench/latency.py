"""`bench --latency`: what a call costs when there is next to nothing to compute, and how much of
what the links can carry a call reaches.

Calls with few tokens run in a chain inside one jit: nothing between them but the result of one
being the input of the next. Several ranks beside one rank tell what it costs to meet: on several
devices over the links, on one GPU between virtual ranks (parts of one kernel).

The links are measured with a layer whose experts do almost nothing. Rows and bytes that cross them
are counted exactly, from the schedule that the call makes. Then the rows of a dispatch are moved by
themselves, pulled and pushed.
"""

import contextlib
import dataclasses

import jax
import numpy as np

import jax_mok
from jax_mok import _cuda, ops
from jax_mok.bench import candidates, exchange, report, timing
from jax_mok.bench.problem import Problem, dtype_of
from jax_mok.shapes import MoeShape

CHAIN = 40  # calls in a program
VIRTUAL_RANKS = (2, 4, 8)
# As many bytes per row as DeepSeek-V3 has, and hardly anything to multiply.
LINK_SHAPE = MoeShape("links", 7168, 64, 0, 8)
LINK_TOKENS = 8192


def main(args) -> int:
    dtype, on_cpu = dtype_of(args), jax.default_backend() == "cpu"
    ranks = args.ranks or len(jax.devices())
    names = [n for n in args.candidates if n in candidates.LAYERS]
    print(report.environment(), flush=True)
    chain = 8 if on_cpu else CHAIN
    tokens = args.tokens or [1, 4, 16, 64]
    rows = []
    for virtual, real in _topologies(ranks, on_cpu):
        for count in tokens:
            rows += _latencies(names, count, virtual, real, chain, dtype, args)
    same = lambda row: (row["candidate"], row["tokens"])
    one_rank = {same(r): r["us"] for r in rows if "us" in r and _all_ranks(r) == 1}
    report.print_table(
        f"chains of {chain} calls: H 128, I 128, one expert per rank, {dtype}",
        [
            ("candidate", lambda r: r["candidate"]),
            ("ranks", lambda r: _ranks(r)),
            ("tokens per rank", lambda r: str(r["tokens"])),
            ("us per call", lambda r: f"{r['us']:.2f}"),
            ("min-max", lambda r: f"{r['spread_us'][0]:.2f}-{r['spread_us'][1]:.2f}"),
            ("beside one rank", lambda r: f"{r['us'] - one_rank[same(r)]:+.2f} us"),
        ],
        rows,
    )
    links = [_links(args, ranks, dtype, routing) for routing in args.routing if ranks > 1]
    if not links:
        print("links: a single device has none")
    sms = [n for n in args.comm_sms if n] or exchange.SMS
    exchanged = exchange.compare(_link_shape(args), LINK_TOKENS, ranks, sms, args.rounds)
    if args.save:
        record = {
            "environment": report.environment(),
            "chain": chain,
            "latency": rows,
            "links": links,
            "exchange": exchanged,
        }
        print(f"kept in {report.save(args.save, record, args.folder)}")
    return 0


def _topologies(ranks: int, on_cpu: bool) -> list[tuple[int, int]]:
    """(virtual ranks, devices) to measure, one rank first."""
    virtual = [] if on_cpu else [(v, 1) for v in VIRTUAL_RANKS]
    return [(1, 1), *virtual, *([(1, ranks)] if ranks > 1 else [])]


def _all_ranks(row) -> int:
    return row["virtual_ranks"] * row["devices"]


def _ranks(row) -> str:
    if row["virtual_ranks"] > 1:
        return f"{row['virtual_ranks']} virtual"
    return f"{row['devices']} device{'s' if row['devices'] > 1 else ''}"


def _latencies(names, tokens, virtual, devices, chain, dtype, args) -> list[dict]:
    """Rows of all candidates for one number of ranks and tokens."""
    all_ranks = virtual * devices
    shape = MoeShape("latency", 128, 128, all_ranks, min(2, all_ranks))
    problem = Problem(shape, tokens * virtual, devices, dtype)
    arguments = problem.arguments()
    runs, rows = {}, []
    for name in names:
        if virtual > 1 and not candidates.is_ours(name):
            continue  # others know no virtual ranks
        facts = {
            "candidate": name,
            "virtual_ranks": virtual,
            "devices": devices,
            "tokens": tokens,
        }
        try:
            run = _chain(name, problem, arguments, virtual, chain)
            timing.wait(run(*arguments))
            jax_mok.check_status()
        except candidates.Unavailable as e:
            if virtual * devices == 1:
                print(f"{name}: not run: {e}")
            continue
        except Exception as e:  # a rival that fails is a result of the run, not its end
            if candidates.is_ours(name):
                raise
            rows.append({**facts, "why_not": f"{type(e).__name__}: {str(e)[:200]}"})
            continue
        runs[name] = run
        rows.append(facts)
    times = timing.in_turns(runs, arguments, rounds=args.rounds, seconds=args.seconds)
    jax_mok.check_status()
    for row in rows:
        if row["candidate"] in times:
            measured = times[row["candidate"]]
            us = [ms * 1e3 / chain for ms in (measured.median, *measured.spread)]
            row |= {"us": us[0], "spread_us": us[1:]}
    return rows


def _chain(name: str, problem: Problem, arguments, virtual: int, calls: int):
    """A compiled program of `calls` calls, each of the result of the one before."""
    layer = candidates.LAYERS[name](candidates.Setting.of(problem))

    def run(x, *others):
        for _ in range(calls):
            x = layer(x, *others)
        return x

    options = _cuda.testing(virtual_ranks=virtual) if virtual > 1 else contextlib.nullcontext()
    with options:
        return jax.jit(run).lower(*arguments).compile()


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Rows that cross links in one forward call, of the busiest rank in each direction.

    A token's row is *pulled* by the rank of its expert; its result is *pushed* back.
    """

    pulled: int  # as it is: a token comes once, however many of a rank's experts want it
    pulled_without_dedup: int  # if it came once for each of them
    pushed: int  # as it is: one row for each expert, since the source sums them in slot order
    pushed_if_summed: int  # if each rank summed the results of its experts for a token first
    into_busiest: int  # rows that reach the busiest rank, pulled and pushed together


def traffic(expert_ids: np.ndarray, num_experts: int) -> Traffic:
    """Counted from the schedules of all ranks; expert_ids [ranks, T, k].

    With rings that hold all rows of a rank, as the GPU kernels have by default unless a rank gets
    more than twice its share: without that a token is pulled once for each expert.
    """
    ranks = len(expert_ids)
    pulled, copies, out, out_summed = (np.zeros((ranks, ranks), int) for _ in range(4))
    for rank in range(ranks):
        plan = ops.schedule(expert_ids, num_experts=num_experts, rank=rank)
        source, first = plan.rows[:, 0], plan.first_use < 0
        for other in range(ranks):
            here = source == other
            if other != rank:
                copies[rank, other] = here.sum()
                pulled[rank, other] = (here & first).sum()
                out[other, rank] = here.sum()
                out_summed[other, rank] = (here & first).sum()
    most = lambda a: int(a.sum(axis=1).max())  # rows that come to the rank of the first index
    return Traffic(most(pulled), most(copies), most(out), most(out_summed), most(pulled + out))


def _link_shape(args) -> MoeShape:
    if args.hidden or jax.default_backend() == "cpu":
        return dataclasses.replace(LINK_SHAPE, hidden_size=args.hidden or 256)
    return LINK_SHAPE


def _links(args, ranks: int, dtype: str, routing: str) -> dict:
    """A layer that moves rows and computes little: what crosses the links, and how fast."""
    on_cpu = jax.default_backend() == "cpu"
    shape = dataclasses.replace(_link_shape(args), num_experts=8 * ranks)
    problem = Problem(shape, 64 if on_cpu else LINK_TOKENS, ranks, dtype, routing)
    ids = problem.expert_ids().reshape(ranks, problem.tokens, shape.top_k)
    rows = traffic(ids, shape.num_experts)
    # A ring for whatever the routing brings, so that the count above is what happens.
    ring = _most_rows(ids, shape.num_experts)
    arguments = problem.arguments()
    layer = candidates.fused(candidates.Setting.of(problem), macrobatch_size=ring)
    run = jax.jit(layer).lower(*arguments).compile()
    timing.wait(run(*arguments))
    times = timing.in_turns({"": run}, arguments, rounds=args.rounds, seconds=args.seconds)[""]
    jax_mok.check_status()
    row_bytes = shape.hidden_size * np.dtype(jax.numpy.dtype(dtype)).itemsize
    rate = rows.into_busiest * row_bytes / times.median / 1e6
    result = {
        "routing": routing,
        "ranks": ranks,
        "tokens": problem.tokens,
        "row_bytes": row_bytes,
        "ms": times.median,
        "spread_ms": times.spread,
        "gb_per_s_into_busiest_rank": rate,
        **dataclasses.asdict(rows),
    }
    mb = lambda count: f"{count * row_bytes / 1e6:.1f} MB"
    print(
        f"links, {routing}: {ranks} ranks, {problem.tokens} tokens each, k {shape.top_k}, "
        f"E {shape.num_experts}, H {shape.hidden_size}, I {shape.intermediate_size}: "
        f"{times.median:.3f} ms, {rate:.1f} GB/s into the busiest rank\n"
        f"  dispatch pulls {mb(rows.pulled)} (a copy for every expert: "
        f"{mb(rows.pulled_without_dedup)})\n"
        f"  combine pushes {mb(rows.pushed)}; a combine that pulls would move the same, or "
        f"{mb(rows.pushed_if_summed)} if the experts' rank summed first, which this one does not "
        "(the order of the sum would depend on the number of ranks)",
        flush=True,
    )
    return result


def _most_rows(ids: np.ndarray, num_experts: int) -> int:
    """Rows of the busiest rank, padding included."""
    ranks = range(len(ids))
    plans = (ops.schedule(ids, num_experts=num_experts, rank=rank) for rank in ranks)
    return max(1, max(plan.num_blocks * plan.block_rows for plan in plans))
