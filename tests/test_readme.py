"""The README's example runs as it stands, and learns."""

import pathlib
import re
import subprocess
import sys

import pytest

README = pathlib.Path(__file__).parent.parent / "README.md"


def test_flax_example():
    pytest.importorskip("flax")
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    (example,) = [b for b in blocks if "class Block" in b]
    done = subprocess.run(
        [sys.executable, "-c", example.replace("range(50)", "range(12)")],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    losses = [float(line.split()[1]) for line in done.stdout.splitlines()]
    assert len(losses) == 12 and losses[-1] < 0.8 * losses[0]
