"""Where the time of a candidate goes: a trace of a few calls, read as `profile` reads any run's."""

import pathlib
from collections.abc import Callable

import jax

from jax_mok.bench import report, timing
from jax_mok.profile import analysis, classify, trace

CALLS = 5  # the last of them has no successor, by which a step's end is known
IDLE = "idle"


def trace_calls(run: Callable, folder: pathlib.Path) -> dict[str, float]:
    """ms of a call by kind of work, which add up to the call; kinds are those of
    `jax_mok.profile.classify.KINDS`, and "idle". Of the device that computes longest.

    `run()` starts a call and has run before. The trace stays in `folder`.
    """
    timing.wait(run())
    with jax.profiler.trace(folder):
        for _ in range(CALLS):
            last = run()
        timing.wait(last)
    times = analysis.slowest(analysis.analyse(trace.read(folder), classify.Classifier()))
    return {**times.alone, IDLE: times.idle}


def print_breakdown(rows: list[dict]) -> None:
    """`rows`: of candidates; those with "ms_by_kind" are shown."""
    rows = [row for row in rows if "ms_by_kind" in row]
    kinds = [k for k in (*classify.KINDS, IDLE) if any(row["ms_by_kind"][k] for row in rows)]
    column = lambda kind: (kind, lambda row: f"{row['ms_by_kind'][kind]:.2f}")
    title = "ms per step, from a trace: an instant counts for the first kind, from the left"
    report.print_table(
        title, [("candidate", lambda row: row["candidate"]), *map(column, kinds)], rows
    )
