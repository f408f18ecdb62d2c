"""The benchmark of a training step on a GPU, with a trace that says where its time goes."""

import json

import pytest
from jax_layers import require_hopper

from jax_mok import __main__ as command_line
from jax_mok.profile import classify
from jax_mok.shapes import MoeShape

pytestmark = pytest.mark.gpu

optax = pytest.importorskip("optax")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")


SHAPE = MoeShape("small", 1024, 512, 32, 4)


def test_breakdown(tmp_path, capsys):
    """The kernels of the fused layer are found in the trace of the steps that have them, and what
    the kinds take adds up to about a step."""
    require_hopper()
    arguments = [
        *("bench", "--step", "--layers=1", "--ranks=1", "--sequence=512", "--tokens=4096"),
        *(f"--hidden={SHAPE.hidden_size}", f"--intermediate={SHAPE.intermediate_size}"),
        *(f"--experts={SHAPE.num_experts}", f"--top-k={SHAPE.top_k}"),
        *("--candidates", "jax_mok", "--rounds=3", "--seconds=0.1"),
        *(f"--trace={tmp_path / 'trace'}", f"--folder={tmp_path}", "--save=it"),
    ]
    assert command_line.main(arguments) == 0
    print(capsys.readouterr().out)
    record = json.loads((tmp_path / "it.json").read_text())
    least = 3 * SHAPE.flops(4096) / 1e12  # ms at 1000 TFLOP/s, more than a Hopper GPU can do
    for row in record["rows"]:
        kinds = row["ms_by_kind"]
        assert least < kinds[classify.JAX_MOK] < row["ms"]
        assert kinds[classify.GEMM] > 0 and kinds[classify.EXPERTS] == 0
        assert 0.5 < sum(kinds.values()) / row["ms"] < 3  # a trace costs time of its own
    assert record["without_experts_ms_by_kind"][classify.JAX_MOK] == 0
