"""compute-sanitizer over the kernels of both passes."""

import pathlib
import re
import shutil
import subprocess
import sys

import kernel_library as kl
import pytest

TOOL = shutil.which("compute-sanitizer")
REASON = kl.missing() or (None if TOOL else "needs compute-sanitizer")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]

KERNELS = ["--error-exitcode", "9", "--kernel-name", "kernel_substring=sm90"]


def run_tool(tool, ctas, *options):
    """(exit status, report) of a tool over a small layer on that many multiprocessors a rank."""
    program = pathlib.Path(__file__).with_name("sanitizer_program.py")
    run = subprocess.run(
        [TOOL, "--tool", tool, *options, *KERNELS, sys.executable, str(program), str(ctas)],
        capture_output=True,
        text=True,
        timeout=400,
        cwd=program.parent,
    )
    report = run.stdout + run.stderr
    assert "all calls without a fault" in report, report[-4000:]
    return run.returncode, report


@pytest.mark.parametrize("tool", ["memcheck", "synccheck"])
def test_sanitizer(tool):
    status, report = run_tool(tool, 4)
    assert status == 0, report[-4000:]


def test_races():
    """Of threads of a CTA over shared memory, which is all that racecheck sees; one CTA a rank.

    It follows one barrier between two threads, no chain of two. So it takes for a race (write after
    read) that the scheduler overwrites a tile of the ring: those who have read it arrive at `done`,
    whoever waits for that arrives at `released`, and the scheduler waits for that. A wrong order of
    reading would be another kind of hazard. The loader's progress is a race by design: a single
    volatile word that tells the dispatcher roughly how far ahead it is.
    """
    options = ["--racecheck-report", "hazard", "--print-limit", "100000", "--show-backtrace", "no"]
    _, report = run_tool("racecheck", 1, *options)
    hazards = re.findall(
        r"Error: Potential (\w+) hazard.*\n.*? Thread .* in (\S+):\d+\n.*? Thread .* in (\S+):\d+",
        report,
    )
    assert len(hazards) == report.count("Error: Potential"), report[-4000:]
    known = lambda kind, first, second: (
        (kind == "WAR" and second in ("forward_tiles.cuh", "backward_tiles.cuh"))
        or {first, second} == {"backward_loader.cuh", "dispatch.cuh"}
    )
    assert hazards, "racecheck says nothing even of the progress word: has it seen the kernels?"
    assert [h for h in hazards if not known(*h)] == []
