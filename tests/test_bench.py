"""The benchmark: its rivals compute the same layer, what it counts is right, and it runs."""

import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("rich")
pytest.importorskip("matplotlib")
pytest.importorskip("optax")

from jax_mok import __main__, reference
from jax_mok.bench import candidates, latency, step, timing
from jax_mok.bench.problem import Problem
from jax_mok.shapes import MoeShape

SHAPE = MoeShape("small", 32, 48, 8, 3)


def relative(a, b) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.linalg.norm(a - b) / np.linalg.norm(b)


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_pipeline_is_the_same_layer(ranks):
    problem = Problem(SHAPE, 64 // ranks, ranks, "float32")
    setting = candidates.Setting(problem.mesh(), SHAPE.num_experts, "float32")
    layer = candidates.sorted_rows(setting, jax.lax.ragged_dot)
    arguments = problem.arguments()
    cotangent = jax.random.normal(jax.random.key(7), arguments[0].shape)

    def gradients(function, arguments):
        loss = lambda *a: jnp.sum(function(*a) * cotangent)
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 2, 3, 4, 5)))(*arguments)

    here = [jnp.asarray(np.asarray(a)) for a in arguments]  # on one device
    want = gradients(reference.moe, here)
    assert relative(jax.jit(layer)(*arguments), reference.moe(*here)) < 1e-5
    for name, a, b in zip(
        ("x", "weights", "gate", "up", "down"),
        *(g[1] for g in (gradients(layer, arguments), want)),
    ):
        assert relative(a, b) < 1e-5, name


def test_the_pipeline_drops_what_has_no_room():
    """All tokens to one of four ranks: it has room for 1.25 times its share, no more."""
    problem = Problem(SHAPE, 16, 4, "float32", "one-rank")
    setting = candidates.Setting(problem.mesh(), SHAPE.num_experts, "float32")
    y = jax.jit(candidates.sorted_rows(setting, jax.lax.ragged_dot))(*problem.arguments())
    assert np.isfinite(np.asarray(y)).all()
    assert (
        relative(y, reference.moe(*(jnp.asarray(np.asarray(a)) for a in problem.arguments()))) > 0.1
    )


def test_traffic_is_counted():
    ids = np.array(
        [
            [[0, 1, 2], [2, 3, -1]],  # rank 0 has experts 0 and 1
            [[0, 1, 3], [2, 3, -1]],
        ]
    )
    rows = latency.traffic(ids, 4)
    # Rank 1 gets from rank 0: token 0 for expert 2, token 1 for experts 2 and 3.
    # Rank 0 gets from rank 1: token 0 for experts 0 and 1.
    assert rows == latency.Traffic(
        pulled=2, pulled_without_dedup=3, pushed=3, pushed_if_summed=2, into_busiest=4
    )


def test_turns(monkeypatch):
    """Slow calls take part in fewer rounds; the order turns round from round to round."""
    order = []
    runs = {
        "fast": lambda: order.append("fast"),
        "slow": lambda: (order.append("slow"), time.sleep(0.05)) and None,
    }
    measured = timing.in_turns(runs, (), rounds=6, seconds=0.01)
    assert len(measured["fast"].rounds) == 6 and len(measured["slow"].rounds) == 2
    assert measured["slow"].median > 50
    names = [n for i, n in enumerate(order[2:]) if i == 0 or order[2:][i - 1] != n]
    assert names[:3] == ["fast", "slow", "fast"]


def test_disagreements_are_found():
    same = ([2.0, 1.0], [0.5, 0.4])
    find = lambda losses, norms: step.disagreements({"a": same, "b": (losses, norms)})
    assert find([2.0, 1.01], [0.505, 9.0]) == []
    assert len(find([2.0, 1.03], [0.5])) == 1
    assert len(find([2.0, 1.0], [0.52])) == 1
    assert len(find([2.0, float("nan")], [float("nan")])) == 2
    assert find([2.01], [0.5]) == []  # compared after the steps that both made


tokamax = ("tokamax", "tokamax[tuned]")


def bench(folder, *arguments) -> dict:
    """The JSON of a run that must succeed."""
    fast = ["--rounds=2", "--seconds=0.02", "--save=it", f"--folder={folder}"]
    assert __main__.main(["bench", *arguments, *fast]) == 0
    return json.loads((folder / "it.json").read_text())


SMALL = ("--hidden=64", "--intermediate=64", "--experts=8", "--top-k=2")


def test_backward_rows(tmp_path, capsys):
    record = bench(tmp_path, "--backward", "--tokens=32", "--ranks=2", *SMALL)
    rows = {r["candidate"]: r for r in record["problems"][0]["rows"]}
    assert list(rows) == ["jax_mok[save]", "jax_mok[recompute]", "xla", *tokamax, "torch"]
    for name in ("jax_mok[save]", "jax_mok[recompute]", "xla"):
        assert rows[name]["ms"] > 0 and rows[name]["temp_bytes"] >= 0
    # Kept: gate and up of the rows of a macrobatch, float32.
    save, recompute = rows["jax_mok[save]"], rows["jax_mok[recompute]"]
    assert save["temp_bytes"] - recompute["temp_bytes"] > 32 * 2 * 64 * 4
    assert "jax_mok[save]" in capsys.readouterr().out
    assert (tmp_path / "it.png").read_bytes().startswith(b"\x89PNG")


def test_sweep_of_minibatches_and_routings(tmp_path):
    sweep = ("--minibatch", "64", "128", "--routing", "uniform", "zipf")
    record = bench(tmp_path, "--tokens=64", "--ranks=1", "--candidates=jax_mok", *sweep, *SMALL)
    facts = [p["problem"] for p in record["problems"]]
    assert [(f["routing"], f["minibatch"]) for f in facts] == [
        ("uniform", 64),
        ("uniform", 128),
        ("zipf", 64),
        ("zipf", 128),
    ]
    assert facts[2]["imbalance"] > facts[0]["imbalance"] >= 1
    assert (tmp_path / "it.png").read_bytes().startswith(b"\x89PNG")


def test_sweep_of_minibatches_and_comm_sms(tmp_path):
    """A CPU has none of the latter, but takes the setting."""
    sweep = ("--minibatch", "64", "128", "--comm-sms", "0", "8")
    record = bench(tmp_path, "--tokens=64", "--ranks=1", "--candidates=jax_mok", *sweep, *SMALL)
    facts = [p["problem"] for p in record["problems"]]
    assert [(f["minibatch"], f["comm_sms"]) for f in facts] == [
        (64, 0),
        (64, 8),
        (128, 0),
        (128, 8),
    ]
    assert (tmp_path / "it.png").read_bytes().startswith(b"\x89PNG")


def test_step(tmp_path):
    """Both axes of the mesh, all candidates that a CPU has: the same losses, which fall."""
    small = ("--step", "--layers=1", "--sequence=16", "--tokens=32", "--ranks=2", *SMALL)
    record = bench(tmp_path, *small)
    rows = {r["candidate"]: r for r in record["rows"]}
    assert list(rows) == ["jax_mok[save]", "jax_mok[recompute]", "xla", *tokamax]
    assert record["stack"]["layers"] == 1 and record["without_experts_ms"] > 0
    for name in ("jax_mok[save]", "jax_mok[recompute]", "xla"):
        losses = rows[name]["losses"]
        assert losses[-1] < losses[0]
        np.testing.assert_allclose(losses, rows["xla"]["losses"][: len(losses)], rtol=1e-4)
        assert rows[name]["tokens_per_second"] == pytest.approx(
            32 * len(jax.devices()) / rows[name]["ms"] * 1e3
        )
    assert (tmp_path / "it.png").read_bytes().startswith(b"\x89PNG")


def test_step_fails_where_candidates_disagree(tmp_path, monkeypatch, capsys):
    wrong = lambda setting: lambda x, ids, weights, *experts: 3 * x + experts[2].sum()
    monkeypatch.setitem(candidates.LAYERS, "xla", wrong)
    arguments = ("--layers=1", "--sequence=16", "--tokens=16", "--ranks=1", *SMALL)
    fast = ("--rounds=1", "--seconds=0.01", "--candidates", "jax_mok", "xla")
    assert __main__.main(["bench", "--step", *arguments, *fast]) == 1
    assert "FAILED: loss" in capsys.readouterr().out


def test_latency(tmp_path, capsys):
    record = bench(tmp_path, "--latency", "--ranks=2", "--tokens=1", "--candidates", "jax_mok")
    assert [r["devices"] for r in record["latency"]] == [1, 2]
    assert all(r["us"] > 0 for r in record["latency"])
    (link,) = record["links"]
    # 64 tokens of two ranks, 8 of 16 experts each: nearly all go to both ranks, 4 rows on average.
    assert 60 <= link["pulled"] <= 64
    assert 200 < link["pulled_without_dedup"] < 312
    assert link["pushed_if_summed"] <= 64 < link["pushed"]
    assert record["exchange"] == []
    printed = capsys.readouterr().out
    assert "dispatch pulls" in printed and "push against pull: not run" in printed


def test_routing_to_one_rank():
    ids = Problem(SHAPE, 32, 4, routing="one-rank").expert_ids()
    assert ids.max() < 3  # two experts a rank, three to choose
    assert Problem(MoeShape("one", 8, 8, 64, 4), 32, 1, routing="one-rank").expert_ids().max() < 8


def test_torch_takes_turns_from_its_own_processes():
    torch = pytest.importorskip("torch")
    if not hasattr(torch, "_grouped_mm"):
        pytest.skip("this torch has no _grouped_mm")
    from jax_mok.bench import torch_pipeline

    shape = MoeShape("small", 64, 32, 8, 2)
    one = Problem(shape, 16, 1, "bfloat16")
    y = torch_pipeline.on_one_gpu(one, one.arguments(), backward=False)()
    want = reference.moe(
        *(jnp.asarray(a, jnp.float32) if a.dtype == jnp.bfloat16 else a for a in one.arguments())
    )
    assert relative(y.float(), want) < 2e-2

    run = torch_pipeline.Ranks(Problem(shape, 8, 2, "bfloat16"), backward=True, device="cpu")
    assert timing.in_turns({"torch": run}, (), rounds=2, seconds=0.01)["torch"].median > 0
    run.processes[1].kill()
    with pytest.raises((RuntimeError, BrokenPipeError)):
        timing.wait(run())
