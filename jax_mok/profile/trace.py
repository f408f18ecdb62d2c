"""Finds the files of a traced run and reads GPU kernels from them, with JAX's own reader."""

import collections
import dataclasses
import pathlib
import re
from typing import Any

from jax.profiler import ProfileData

from jax_mok.profile.hlo import Programs

_GPU_PLANE = re.compile(r"^/device:GPU:\d+")
_TIMESTAMP = re.compile(r"^\d{4}_\d\d_\d\d_\d\d_\d\d_\d\d")
# Lines of a device plane that a tool derived from the streams, as far as steps are concerned.
_STEPS, _MODULES = "Steps", "XLA Modules"
# Events on streams that are no work of the device.
_NO_WORK = re.compile(r"^(MemoryAlloc|MemoryFree|MemoryResidency|Overhead)", re.IGNORECASE)


class TraceError(ValueError):
    """A trace that cannot be analysed, and why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """One piece of work on a stream of a GPU. Times in ns; op_name, hlo_op and program are empty
    where the trace has none."""

    name: str
    start: float
    end: float
    stream: str
    hlo_op: str = ""
    program: str = ""
    program_id: int = -1
    op_name: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """A step or a program's execution, as a line of the device plane or of the host has it; ns."""

    name: str
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Device:
    """One GPU of one host: kernels by start, and the steps and executions that the trace names."""

    name: str
    host: str
    kernels: list[Kernel]
    steps: list[Span]
    modules: list[Span]
    programs: Programs
    source: "TraceFile"


class TraceFile:
    """One *.xplane.pb file: what one host wrote."""

    def __init__(self, path: pathlib.Path):
        self.path = path
        content = path.read_bytes()
        try:
            self.data = ProfileData.from_serialized_xspace(content)
            self.programs = Programs(content)
        except (RuntimeError, ValueError, IndexError) as e:
            raise TraceError(f"{path} is not a whole trace file: {e}") from e

    @property
    def host(self) -> str:
        return self.path.name.removesuffix(".xplane.pb")

    def devices(self) -> list[Device]:
        """GPUs on which something ran."""
        devices = []
        for plane in self.data.planes:
            if _GPU_PLANE.match(plane.name):
                device = self._device(plane)
                if device.kernels:
                    devices.append(device)
        return devices

    def _device(self, plane: Any) -> Device:
        kernels, spans = [], {_STEPS: [], _MODULES: []}
        for line in plane.lines:
            name = line.name
            if name.startswith("Stream"):
                kernels += [k for k in (_kernel(e, name) for e in line.events) if k is not None]
            elif name in spans:
                spans[name] += [Span(e.name, e.start_ns, e.end_ns) for e in line.events]
        kernels.sort(key=lambda k: (k.start, k.end))
        for line in spans.values():
            line.sort(key=lambda s: s.start)
        name = plane.name.removeprefix("/device:")
        return Device(name, self.host, kernels, spans[_STEPS], spans[_MODULES], self.programs, self)

    def host_steps(self) -> list[Span]:
        """`jax.profiler.StepTraceAnnotation`s, which are times of the host."""
        steps = []
        for plane in self.data.planes:
            if not plane.name.startswith("/host:CPU"):
                continue
            for line in plane.lines:
                for event in line.events:
                    if any(name == "step_num" for name, _ in event.stats):
                        steps.append(Span(event.name, event.start_ns, event.end_ns))
        return sorted(steps, key=lambda s: s.start)

    def contents(self) -> str:
        """Planes with their numbers of events, for errors."""
        found = []
        for plane in self.data.planes:
            lines = [sum(1 for _ in line.events) for line in plane.lines]
            found.append(f"{plane.name} ({sum(lines)} events in {len(lines)} lines)")
        return ", ".join(found) or "nothing"


def _kernel(event: Any, stream: str) -> Kernel | None:
    duration = event.duration_ns
    name = event.name
    if duration <= 0 or _NO_WORK.match(name):
        return None
    stats = {key: value for key, value in event.stats if key is not None}
    # XLA's annotations: `prefix` is common to all op names of the program, `name` is the rest.
    # `op_name` is there whole where annotations are detailed.
    parts = [str(stats.get(key, "")).strip("/") for key in ("prefix", "name")]
    op_name = str(stats.get("op_name", "")) or "/".join(p for p in parts if p)
    try:
        program_id = int(stats.get("program_id", -1))
    except ValueError:
        program_id = -1
    hlo_op = str(stats.get("hlo_op", ""))
    if hlo_op.startswith("command_buffer"):  # the whole CUDA graph, no instruction of the HLO
        hlo_op = ""
    start = event.start_ns
    return Kernel(
        name,
        start,
        start + duration,
        stream,
        hlo_op,
        str(stats.get("hlo_module", "")),
        program_id,
        op_name,
    )


@dataclasses.dataclass(frozen=True)
class Run:
    """A traced run: name of its folder, its GPUs, names of the other runs beside it."""

    name: str
    files: list[pathlib.Path]
    devices: list[Device]
    others: list[str]


def read(place: str | pathlib.Path, run: str | None = None) -> Run:
    """The GPUs of a run.

    Args:
      place: what was given to `jax.profiler.trace`, a folder below it, or one *.xplane.pb file.
      run: name of the run's folder, where there are several; None = the newest.

    Raises:
      TraceError: no trace there, no such run, or nothing of a GPU in it.
    """
    name, paths, others = _find(pathlib.Path(place), run)
    files = [TraceFile(path) for path in paths]
    devices = [device for file in files for device in file.devices()]
    if not devices:
        raise TraceError(_no_gpu(files))
    return Run(name, paths, devices, others)


def _find(place: pathlib.Path, run: str | None):
    if place.is_file():
        return place.resolve().parent.name, [place], []
    if not place.exists():
        raise TraceError(f"{place} does not exist.")
    runs = collections.defaultdict(list)
    for path in sorted(place.rglob("*.xplane.pb")):
        runs[path.parent].append(path)
    if not runs:
        raise TraceError(
            f"{place} holds no trace: no *.xplane.pb file in it or below. "
            "`with jax.profiler.trace(FOLDER):` around a few steps writes "
            "FOLDER/plugins/profile/DATE/HOST.xplane.pb."
        )
    # Folders of JAX are named after the time; others are told apart by their files.
    timed = all(_TIMESTAMP.match(folder.name) for folder in runs)
    age = lambda folder: max(path.stat().st_mtime for path in runs[folder])
    order = sorted(runs, key=lambda folder: folder.name if timed else age(folder))
    if run is not None:
        chosen = [folder for folder in order if folder.name == run]
        if len(chosen) != 1:
            names = ", ".join(folder.name for folder in order)
            many = f"{len(chosen)} runs" if chosen else "no run"
            raise TraceError(f"{place} holds {many} of the name {run!r}; it holds: {names}.")
    else:
        chosen = order[-1:]
    others = [folder.name for folder in order if folder != chosen[0]]
    return chosen[0].name, runs[chosen[0]], others


def _no_gpu(files: list[TraceFile]) -> str:
    found = "; ".join(f"{file.path.name}: {file.contents()}" for file in files)
    planes = [plane.name for file in files for plane in file.data.planes]
    if any(_GPU_PLANE.match(name) for name in planes):
        why = (
            "It has planes of GPUs, but no kernels on them: nothing ran there while it was "
            "taken, or CUPTI was not allowed to look."
        )
    elif any(name.startswith("/device:TPU") for name in planes):
        why = "It is a trace of TPUs; jax_mok has kernels for GPUs only."
    else:
        why = "It is a trace of CPUs: take one of a run on GPUs."
    return f"No GPU kernels in this trace. {why} Found {found}."
