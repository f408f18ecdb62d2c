"""compute-sanitizer over the kernels of both passes."""

import pathlib
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


@pytest.mark.parametrize("tool, ctas", [("memcheck", 4), ("synccheck", 4), ("racecheck", 1)])
def test_sanitizer(tool, ctas):
    """racecheck, the slowest, sees the races inside a CTA only: one a rank is enough."""
    program = pathlib.Path(__file__).with_name("sanitizer_program.py")
    options = ["--tool", tool, "--error-exitcode", "9", "--kernel-regex", "kernel_substring=sm90"]
    run = subprocess.run(
        [TOOL, *options, sys.executable, str(program), str(ctas)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=program.parent,
    )
    report = run.stdout + run.stderr
    assert run.returncode == 0, report[-4000:]
    assert "all calls without a fault" in report, report[-4000:]
