"""Times of the steps of one device: kinds of kernels, overlaps, what jax_mok could save."""

import collections
import dataclasses

import numpy as np

from jax_mok.profile import classify, steps
from jax_mok.profile.classify import Classifier, Label
from jax_mok.profile.trace import Device, Run


@dataclasses.dataclass(frozen=True)
class Saving:
    """ms per step in which nothing runs but what jax_mok takes away.

    communication: only collectives of MoE dispatch and combine run.
    rearranging: only those and sorts, gathers and scatters of MoE layers, less the former.
    """

    communication: float
    rearranging: float

    @property
    def total(self) -> float:
        return self.communication + self.rearranging


@dataclasses.dataclass(frozen=True)
class Row:
    """Kernels of one op in one scope: ms per step, one after the other, overlaps not regarded."""

    label: Label
    ms: float
    calls: float


@dataclasses.dataclass(frozen=True)
class DeviceTimes:
    """Times of a device in ms per step, means over the steps.

    step: length of a step; longest and shortest of those counted.
    busy: per kind, time in which at least one kernel of it runs.
    alone: per kind, its part of the step: an instant counts for the first kind that runs then, in
      the order of KINDS. With `idle` they add up to `step`.
    idle: nothing runs.
    by_scope, at_most: savings, from scope names alone and with all that may belong to MoE layers.
    unplaced: time in which only communication runs that is not counted to MoE layers.
    uncounted: kernel time of copies and other compute in MoE scopes, part of no saving.
    unknown: kernel time of which the trace says no more than the kernel's name.
    rows: kernels by label, longest first.
    """

    name: str
    host: str
    steps: steps.Steps
    step: float
    shortest: float
    longest: float
    busy: dict[str, float]
    alone: dict[str, float]
    idle: float
    by_scope: Saving
    at_most: Saving
    unplaced: float
    uncounted: float
    unknown: float
    rows: list[Row]

    @property
    def exposed(self) -> float:
        """Communication that nothing hides, ms per step."""
        return self.alone[classify.COMMUNICATION]

    @property
    def compute(self) -> float:
        """Time in which something else than communication runs, ms per step."""
        return self.step - self.idle - self.exposed


def analyse(run: Run, classifier: Classifier) -> list[DeviceTimes]:
    return [device_times(device, classifier) for device in run.devices]


def slowest(devices: list[DeviceTimes]) -> DeviceTimes:
    """The device that computes longest in a step: what the others wait for in their collectives."""
    return max(devices, key=lambda d: d.compute)


class Timeline:
    """The time of the steps, cut wherever a kernel or a step begins or ends.

    `segments` of it are boolean arrays, one entry per piece.
    """

    def __init__(self, starts: np.ndarray, ends: np.ndarray, spans: list[tuple[float, float]]):
        edges = np.array(spans, dtype=np.float64)
        points, at = np.unique(np.concatenate([starts, ends, edges.ravel()]), return_inverse=True)
        self._first, self._last = at[: len(starts)], at[len(starts) : 2 * len(starts)]
        inside = np.zeros(len(points), dtype=np.int64)
        marks = at[2 * len(starts) :].reshape(-1, 2)
        np.add.at(inside, marks[:, 0], 1)
        np.add.at(inside, marks[:, 1], -1)
        self._points = points
        self._inside = np.cumsum(inside)[:-1] > 0
        self._lengths = np.diff(points) * self._inside

    def covered(self, kernels: np.ndarray) -> np.ndarray:
        """Segments in which at least one of the kernels (a mask) runs."""
        change = np.zeros(len(self._lengths) + 1, dtype=np.int64)
        np.add.at(change, self._first[kernels], 1)
        np.add.at(change, self._last[kernels], -1)
        return np.cumsum(change)[:-1] > 0

    def length(self, segments: np.ndarray) -> float:
        """ns within the steps."""
        return float(self._lengths[segments].sum())

    def pieces(self, segments: np.ndarray) -> list[tuple[float, float]]:
        """(start, length) in ns of the stretches that the segments form within the steps."""
        edges = np.diff(np.concatenate([[0], segments & self._inside, [0]]))
        starts, ends = (self._points[np.flatnonzero(edges == sign)] for sign in (1, -1))
        return [(float(s), float(e - s)) for s, e in zip(starts, ends)]


def device_times(device: Device, classifier: Classifier) -> DeviceTimes:
    found = steps.find(device)
    lengths = np.array([end - start for start, end in found.spans])
    count = len(lengths)
    first, last = found.spans[0][0], found.spans[-1][1]
    kernels, labels = _within(device, classifier, first, last)
    starts = np.array([k.start for k in kernels], dtype=np.float64)
    ends = np.array([k.end for k in kernels], dtype=np.float64)
    line = Timeline(starts, ends, found.spans)
    per_step = lambda segments: line.length(segments) / count / 1e6

    mask = lambda of: np.fromiter((of(label) for label in labels), dtype=bool, count=len(labels))
    busy, alone = {}, {}
    running = np.zeros_like(line.covered(np.zeros(len(labels), dtype=bool)))
    for kind in classify.KINDS:
        covered = line.covered(mask(lambda label: label.kind == kind))  # noqa: B023
        busy[kind] = per_step(covered)
        alone[kind] = per_step(covered & ~running)
        running |= covered

    communication = mask(lambda label: label.kind == classify.COMMUNICATION)
    only = lambda some: line.covered(some) & ~line.covered(~some)

    def saving(moe: np.ndarray) -> Saving:
        exposed = per_step(only(moe & communication))
        return Saving(exposed, per_step(only(moe)) - exposed)

    inside = _share_inside(starts, ends, found.spans)
    sums, calls = collections.Counter(), collections.Counter()
    unknown = uncounted = 0.0
    for label, start, end, share in zip(labels, starts, ends, inside):
        if share:
            ms = float((end - start) * share) / count / 1e6
            sums[label] += ms
            calls[label] += float(share) / count
            unknown += 0.0 if label.known else ms
            if label.inside and label.kind in (classify.COPY, classify.OTHER):
                uncounted += ms
    placed = mask(lambda label: label.moe is not None)
    return DeviceTimes(
        name=device.name,
        host=device.host,
        steps=found,
        step=float(lengths.mean()) / 1e6,
        shortest=float(lengths.min()) / 1e6,
        longest=float(lengths.max()) / 1e6,
        busy=busy,
        alone=alone,
        idle=per_step(~running),
        by_scope=saving(mask(lambda label: label.moe == classify.BY_SCOPE)),
        at_most=saving(placed),
        unplaced=per_step(only(communication) & ~line.covered(placed)),
        uncounted=uncounted,
        unknown=unknown,
        rows=[Row(label, ms, calls[label]) for label, ms in sums.most_common()],
    )


@dataclasses.dataclass(frozen=True)
class Drawing:
    """One step of a device, for a picture: stretches of time as (start, length) in ms.

    running: per kind; moe: those of them in which kernels of MoE dispatch or combine run; exposed:
    communication that nothing hides.
    """

    length: float
    running: dict[str, list[tuple[float, float]]]
    moe: dict[str, list[tuple[float, float]]]
    exposed: list[tuple[float, float]]


def draw(device: Device, span: tuple[float, float], classifier: Classifier) -> Drawing:
    first, last = span
    kernels, labels = _within(device, classifier, first, last)
    starts, ends = (np.array([getattr(k, at) for k in kernels]) for at in ("start", "end"))
    line = Timeline(starts, ends, [span])
    in_ms = lambda segments: [((s - first) / 1e6, n / 1e6) for s, n in line.pieces(segments)]
    moe = np.array([label.moe is not None for label in labels])
    running, of_moe = {}, {}
    for kind in classify.KINDS:
        some = np.array([label.kind == kind for label in labels])
        running[kind] = in_ms(line.covered(some))
        of_moe[kind] = in_ms(line.covered(some & moe))
        if kind == classify.COMMUNICATION:
            exposed = in_ms(line.covered(some) & ~line.covered(~some))
    return Drawing((last - first) / 1e6, running, of_moe, exposed)


def _within(device: Device, classifier: Classifier, first: float, last: float):
    """Kernels that run between two times, and their labels."""
    pairs = zip(device.kernels, classifier.labels(device))
    pairs = [(k, label) for k, label in pairs if k.end > first and k.start < last]
    return [k for k, _ in pairs], [label for _, label in pairs]


def _share_inside(starts, ends, spans) -> np.ndarray:
    """Which part of each kernel lies within the steps, 0 to 1."""
    edges = np.array(spans, dtype=np.float64)
    length = np.concatenate([[0.0], np.cumsum(edges[:, 1] - edges[:, 0])])

    def before(t):
        """ns of steps before each time."""
        index = np.searchsorted(edges[:, 0], t, side="right") - 1
        into = np.minimum(t, edges[index, 1]) - edges[index, 0]
        return np.where(index < 0, 0.0, length[index] + np.maximum(into, 0))

    return (before(ends) - before(starts)) / (ends - starts)
