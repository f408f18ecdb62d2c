"""Where steps begin and end on a device.

A step lasts from the start of one execution of the main program to the start of the next, so that
the time in which the device waits for its host is part of it. In this order: steps that the trace
names; the line of executed modules; executions found from the kernels, which carry the name of
their program; marks of the host; else the whole trace is one step.
"""

import collections
import dataclasses
import itertools
import statistics

from jax_mok.profile.trace import Device, Kernel, Span

# A step this much longer than the median is no step like the others: it holds a compilation, a
# checkpoint, a pause.
_LONGEST = 2.0
# An op that every execution runs once is not alone: this share of a program's ops, or this number
# of them, has its count. Fewer are a branch of a conditional, or were cut off where the trace ends.
_COMMON_SHARE, _COMMON = 0.05, 5
# A program with less of the device's time than this is not what is trained: kernels in CUDA graphs
# may lack the name of their program, and what is left with names may be helpers.
_MAIN = 0.1


@dataclasses.dataclass(frozen=True)
class Steps:
    """source: what the steps were found from, in words. spans: [(start, end)] in ns, ascending,
    disjoint. left_out: how many steps were too long to be like the others."""

    source: str
    spans: list[tuple[float, float]]
    left_out: int = 0


def find(device: Device) -> Steps:
    starts, source = _starts(device)
    spans = [(s, e) for s, e in itertools.pairwise(starts) if e > s]
    if not spans:
        span = (device.kernels[0].start, max(k.end for k in device.kernels))
        return Steps("no repeated program found: the whole trace as one step", [span])
    median = statistics.median(end - start for start, end in spans)
    kept = [(s, e) for s, e in spans if e - s <= _LONGEST * median]
    return Steps(source, kept, len(spans) - len(kept))


def _starts(device: Device) -> tuple[list[float], str]:
    if len(device.steps) > 1:
        return [s.start for s in device.steps], "steps named in the trace"
    modules = _longest(device.modules)
    if len(modules) > 1:
        return [m.start for m in modules], f"executions of {modules[0].name}"
    groups: dict[tuple[str, int], list[Kernel]] = collections.defaultdict(list)
    for kernel in device.kernels:
        groups[kernel.program, kernel.program_id].append(kernel)
    total = {key: sum(k.end - k.start for k in kernels) for key, kernels in groups.items()}
    for key in sorted(groups, key=total.get, reverse=True):
        if key[0] and total[key] >= _MAIN * sum(total.values()):
            starts = _executions(groups[key])
            if len(starts) > 1:
                return starts, f"executions of {key[0]}, found from its kernels"
    marks = device.source.host_steps()
    if len(marks) > 1:
        return [s.start for s in marks], "step marks of the host"
    return _executions(device.kernels), "kernels that repeat (their programs are not named)"


def _longest(modules: list[Span]) -> list[Span]:
    """Executions of the program that took longest in all."""
    groups = collections.defaultdict(list)
    for span in modules:
        groups[span.name].append(span)
    return max(groups.values(), key=lambda g: sum(s.end - s.start for s in g), default=[])


def _executions(kernels: list[Kernel]) -> list[float]:
    """Starts of a program's executions.

    The op that marks them is the first in time of those that run once per execution: the smallest
    number of times that a fair share of the ops runs, for ops in loops run more often.
    """
    times = collections.defaultdict(list)
    for kernel in kernels:
        times[kernel.hlo_op, kernel.name].append(kernel.start)
    counts = collections.Counter(len(starts) for starts in times.values())
    enough = min(_COMMON_SHARE * len(times), _COMMON)
    once = min((n for n, ops in counts.items() if ops >= enough), default=0)
    return min((starts for starts in times.values() if len(starts) == once), default=[])
