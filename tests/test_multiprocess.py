"""Several processes through `jax.distributed`: the numbers of one process with as many devices."""

import pathlib
import socket
import subprocess
import sys

import cases
import numpy as np
import pytest

WORKER = pathlib.Path(__file__).with_name("multiprocess_worker.py")


def run(count, layout, implementation, out, timeout=240):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, WORKER, str(rank), str(count), str(port), layout, implementation, out],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        outputs = [p.communicate(timeout=timeout)[0] for p in processes]
    finally:
        for p in processes:
            p.kill()
    assert all(p.returncode == 0 for p in processes), "\n".join(outputs)
    loaded = np.load(out)
    return str(loaded["used"]), [loaded[f"arr_{i}"] for i in range(len(loaded.files) - 1)]


@pytest.mark.parametrize(
    "layout, implementation, expected",
    [
        ("inside", "auto", "fused"),  # every expert group within a process
        ("across", "auto", "xla"),  # expert groups over both processes
        ("inside", "xla", "xla"),
    ],
)
def test_two_processes_of_four_devices(tmp_path, layout, implementation, expected):
    used, got = run(2, layout, implementation, str(tmp_path / "two.npz"))
    assert used == expected
    _, want = run(1, layout, implementation, str(tmp_path / "one.npz"))
    cases.assert_close(got, want, 5e-6)


def test_fused_over_two_processes_is_refused(tmp_path):
    with pytest.raises(AssertionError, match="several processes"):
        run(2, "across", "fused", str(tmp_path / "refused.npz"), timeout=60)
