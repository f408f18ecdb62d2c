"""`python -m jax_mok doctor` says what runs here and why the rest does not."""

import subprocess
import sys

import jax

from jax_mok import _cuda, doctor


def test_report():
    parts = dict(doctor.report())
    choices = "\n".join(parts["What moe would pick (implementation=None)"])
    assert "bfloat16, one device: " in choices and "float32, one device: " in choices
    assert f"experts over {len(jax.devices())} devices" in choices
    assert any(line.startswith("jax ") for line in parts["Installed"])
    kernels = " ".join(parts["CUDA kernels"])
    assert _cuda.WHY_NO_CUDA in kernels if _cuda.core is None else "sm_90a" in kernels


def test_other_gpus_are_named(monkeypatch):
    class Core:
        @staticmethod
        def devices():
            common = dict(multiprocessors=108, memory_bytes=80 << 30, cooperative_launch=True)
            return [
                dict(name="A100", compute_capability=(8, 0), peers=[], **common),
                dict(name="H200", compute_capability=(9, 0), peers=[], **common),
            ]

    monkeypatch.setattr(_cuda, "core", Core)
    text = "\n".join(doctor._gpus())
    assert "0: A100, compute capability 8.0 (cannot run the kernels)" in text
    assert "1: H200, compute capability 9.0 (can run the kernels)" in text
    assert "no peer-to-peer access to [1]" in text


def test_command(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "jax_mok", "doctor"],
        cwd=tmp_path,  # not the source tree, which lacks the native module
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "What moe would pick" in done.stdout
