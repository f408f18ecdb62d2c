"""The examples, run as a user runs them, with settings small enough for a test."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"

pytest.importorskip("orbax.checkpoint")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")


def run(script: str, *arguments: str, cwd: pathlib.Path, timeout: float = 240) -> str:
    """Standard output of an example that must succeed."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment |= {"JAX_PLATFORMS": "cpu"}
    result = subprocess.run(
        [sys.executable, EXAMPLES / script, *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    assert "Warning" not in result.stderr, result.stderr
    return result.stdout


def printed_losses(output: str) -> list[float]:
    return [float(value) for value in re.findall(r"^step +\d+: loss ([\d.]+)", output, re.M)]


def train_lm(cwd: pathlib.Path, *arguments: str) -> str:
    tiny = "--steps=8 --layers=2 --batch=8 --length=32 --learning-rate=0.01 --checkpoint-every=4"
    return run("train_lm.py", *tiny.split(), "--checkpoint-dir=run", *arguments, cwd=cwd)


def saved_losses(cwd: pathlib.Path) -> list[float]:
    """What the newest checkpoint of a run holds, all digits."""
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager((cwd / "run").absolute()) as manager:
        items = ocp.args.Composite(history=ocp.args.JsonRestore())
        return manager.restore(manager.latest_step(), args=items).history["loss"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """(directory, output) of a run of eight steps with the default implementation."""
    cwd = tmp_path_factory.mktemp("uninterrupted")
    return cwd, train_lm(cwd)


def test_quickstart_learns(tmp_path):
    losses = printed_losses(run("quickstart.py", cwd=tmp_path))
    assert losses[-1] < 0.5 * losses[0]


def test_data_is_a_function_of_seed_and_step(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    from lm import data

    training, held_out = data.stdlib_text()
    assert len(training) > 10 * len(held_out) > 10 * 100_000
    size = dict(batch=4, length=16)
    inputs, targets = data.training_batch(training, 7, seed=1, **size)
    np.testing.assert_array_equal(inputs[:, 1:], targets[:, :-1])
    again, _ = data.training_batch(training, 7, seed=1, **size)
    np.testing.assert_array_equal(inputs, again)
    for step, seed in ((8, 1), (7, 2)):
        assert (inputs != data.training_batch(training, step, seed=seed, **size)[0]).any()


def test_ngrams_count(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    from lm.data import NGram

    text = np.frombuffer(b"ab" * 500_000, np.uint8)
    inputs, targets = text[None, :-1], text[None, 1:]
    assert NGram(text, order=1).bits(inputs, targets) == pytest.approx(1.0, abs=0.01)
    assert NGram(text, order=2).bits(inputs, targets) == pytest.approx(0.0, abs=0.01)


def test_train_lm_learns_and_reports(uninterrupted):
    cwd, output = uninterrupted
    assert "fused implementation" in output
    losses = saved_losses(cwd)
    assert len(losses) == 8
    assert losses[0] == pytest.approx(np.log(256), rel=0.2)  # that of a guess
    assert losses[-1] < 0.8 * losses[0]
    for model in ("this model", "bigram counts", "unigram counts"):
        assert model in output
    assert (cwd / "train_lm.png").read_bytes().startswith(b"\x89PNG")


def test_train_lm_resumes_bit_for_bit(uninterrupted, tmp_path):
    shutil.copytree(uninterrupted[0] / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "8")  # as if the run had been killed after step 4
    assert saved_losses(tmp_path) == saved_losses(uninterrupted[0])[:4]
    output = train_lm(tmp_path, "--resume")
    assert "step     5" in output and "step     4" not in output
    assert saved_losses(tmp_path) == saved_losses(uninterrupted[0])


def test_train_lm_follows_the_same_curve_with_xla(uninterrupted, tmp_path):
    output = train_lm(tmp_path, "--implementation=xla")
    assert "xla implementation" in output
    np.testing.assert_allclose(
        saved_losses(tmp_path), saved_losses(uninterrupted[0]), rtol=1e-4, atol=0
    )


def test_train_lm_with_shared_expert_and_bias_balancing(tmp_path):
    output = train_lm(tmp_path, "--shared-experts=1", "--scoring=sigmoid", "--balance=bias")
    assert saved_losses(tmp_path)[-1] < 0.8 * saved_losses(tmp_path)[0]
    assert "A passage" in output


@pytest.mark.parametrize(
    "arguments, used", [((), "fused"), (("--expert-devices=8",), "xla")], ids=["inside", "across"]
)
def test_multihost_learns(tmp_path, arguments, used):
    output = run("multihost.py", "--local=2", *arguments, cwd=tmp_path)
    assert "2 processes" in output and f"implementation {used}" in output
    losses = printed_losses(output)
    assert losses[-1] < 0.9 * losses[0]
