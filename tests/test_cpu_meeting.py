"""Meetings of the CPU engine: independent calls in one program, loops, groups, many devices, Python
threads, a device that never comes; and errors, which all devices get alike."""

import dataclasses
import os
import subprocess
import sys
import textwrap
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine import (
    NAMES,
    Layer,
    call,
    forward_local,
    mesh_of,
    registered,  # noqa: F401
    run,
    sharded,
)
from jax.sharding import PartitionSpec as P

from jax_mok import _core, ffi

# ---- meetings ----


def many_calls(layer, ranks, calls, with_psum):
    attributes = layer.attributes(ranks)

    def local(inputs):
        total = 0.0
        for i in range(calls):
            y = forward_local(inputs | {"x": inputs["x"] * (1.0 + i)}, attributes)[0]
            if with_psum:
                total += jax.lax.pcast(jax.lax.psum(y, "e"), "e", to="varying") * 0.5
            total += jnp.tanh(y)
        return total

    arrays = layer.arrays()
    return sharded(local, ranks, arrays, P("e")), arrays


@pytest.mark.parametrize("with_psum", [False, True])
def test_independent_calls_in_one_program(with_psum):
    """XLA runs them at once, in an order of its own for every device."""
    function, arrays = many_calls(Layer(tokens=256), 8, 6, with_psum)
    outputs = [function(arrays) for _ in range(4)]
    for output in outputs[1:]:
        np.testing.assert_array_equal(output, outputs[0])


def test_python_threads():
    functions = [many_calls(Layer(tokens=256, seed=s), 8, 2, True) for s in range(3)]
    want = [np.asarray(f(a)) for f, a in functions]
    failures = []

    def work(index):
        function, arrays = functions[index]
        for output in [function(arrays) for _ in range(5)]:
            if not np.array_equal(output, want[index]):
                failures.append(index)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_loop_and_call_counts():
    layer, ranks, steps = Layer(), 4, 3
    attributes = layer.attributes(ranks)

    def local(inputs):
        def step(x, _):
            return forward_local(inputs | {"x": x}, attributes)[0], None

        return jax.lax.scan(step, inputs["x"], None, length=steps)[0]

    arrays = layer.arrays()
    function = sharded(local, ranks, arrays, P("e"))
    jax.block_until_ready(function(arrays))
    before = _core.forward_calls(), _core.backward_calls()
    jax.block_until_ready(function(arrays))
    assert _core.forward_calls() - before[0] == steps * ranks
    assert _core.backward_calls() == before[1]


def test_groups_meet_apart():
    """Two groups of four ranks in one meeting: each sees its own tokens and weights only."""
    layer = Layer(tokens=32)
    first, second = layer.arrays(), dataclasses.replace(layer, seed=1).arrays()
    attributes = layer.attributes(4, world=8)
    mesh = mesh_of(2, 4)
    both = {n: np.concatenate([first[n], second[n]]) for n in first if first[n].size}
    specs = {n: P(("d", "e")) for n in both}

    def local(inputs):
        index = [jax.lax.axis_index(a).astype(jnp.int32) for a in ("e", "d", ("d", "e"))]
        inputs = {n: jnp.zeros(0) for n in NAMES} | inputs
        operands = (jnp.stack([*index, 0 * index[0]]), *(inputs[n] for n in NAMES))
        x = inputs["x"]
        return call(ffi.FORWARD, [(x.shape, x.dtype), ((0,), jnp.float32)], operands, attributes)[0]

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(specs,), out_specs=P(("d", "e")), check_vma=False
    )
    y = np.asarray(jax.jit(mapped)(both))
    np.testing.assert_array_equal(y[:32], run(layer, 4)["y"])
    np.testing.assert_array_equal(y[32:], run(dataclasses.replace(layer, seed=1), 4)["y"])


def in_subprocess(code, timeout=120, **environment):
    here = os.path.dirname(__file__)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([here, *sys.path])} | environment
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=env, capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_72_devices():
    code = """
        import engine, numpy as np, test_cpu_meeting as t
        t.ffi.register()
        layer = t.Layer(tokens=144, experts=144, top_k=4)
        engine.assert_same_bits(engine.run(layer, 72), engine.run(layer, 1))
        function, arrays = t.many_calls(layer, 72, 4, True)
        np.testing.assert_array_equal(function(arrays), function(arrays))
    """
    in_subprocess(code, XLA_FLAGS="--xla_force_host_platform_device_count=72")


# ---- errors ----


@pytest.mark.parametrize(
    "wrong,text",
    [
        ((2, 1, 8), r"expert_ids\[2, 1\] of rank 1 is 8; allowed are 0 to 7"),
        ((0, 0, -2), r"expert_ids\[0, 0\] of rank 1 is -2"),
        ((3, 1, "first"), r"expert_ids\[3, 1\] of rank 1 is \d, which an earlier slot"),
    ],
)
def test_bad_ids_fail_on_every_device(wrong, text):
    layer = Layer(tokens=32)
    arrays = layer.arrays()
    arrays["ids"] = np.tile(np.array([[0, 5]], np.int32), (32, 1))
    function, _ = many_calls(layer, 4, 1, True)
    jax.block_until_ready(function(arrays))
    token, slot, value = wrong
    bad = arrays | {"ids": arrays["ids"].copy()}
    bad["ids"][8 + token, slot] = bad["ids"][8 + token, 0] if value == "first" else value
    with pytest.raises(Exception, match=text):
        jax.block_until_ready(function(bad))
    jax.block_until_ready(function(arrays))


@pytest.mark.parametrize(
    "changes,attributes,text",
    [
        (
            {"w_up": (8, 24, 41)},
            {},
            r"w_up is float32 \[8, 24, 41\], expected float32 \[8, 24, 40\]",
        ),
        ({"w_down": (8, 24, 40)}, {}, "w_down is float32"),
        ({"weights": (32, 3)}, {}, "expert_weights is float32"),
        ({"b_gate": (8, 40)}, {}, r"b_up is float32 \[\]"),
        ({"s_scale": (5,)}, {}, r"s_scale is float32 \[5\]"),
        ({}, {"num_experts": 12}, r"w_gate is float32 \[8, 24, 40\], expected float32 \[12"),
        ({}, {"macrobatch_rows": 65}, "macrobatch_rows is 65, allowed are multiples of 64"),
        ({}, {"minibatch_rows": -64}, "minibatch_rows is -64"),
        ({}, {"activation": 3}, "activation is 3, allowed are 0 to 2"),
        ({}, {"world": 0}, "world is 0"),
    ],
)
def test_wrong_arguments_are_named(changes, attributes, text):
    layer = Layer()
    arrays = layer.arrays() | {n: np.zeros(s, np.float32) for n, s in changes.items()}

    def local(inputs):
        return forward_local(inputs, layer.attributes(1, **attributes))[0]

    with pytest.raises(Exception, match=text):
        jax.block_until_ready(sharded(local, 1, arrays, P("e"))(arrays))


def test_check():
    check = jax.jit(
        lambda flag: jax.ffi.ffi_call(ffi.CHECK, jax.ShapeDtypeStruct((1,), jnp.int32))(flag)
    )
    assert check(jnp.zeros(4, jnp.int32))[0] == 0
    with pytest.raises(Exception, match=r"expert_ids\[3, 1\] of one rank is 17; allowed"):
        jax.block_until_ready(check(jnp.array([1, 3, 1, 17], jnp.int32)))
    with pytest.raises(Exception, match=r"expert_ids\[3, 1\] of one rank is 4, which an earlier"):
        jax.block_until_ready(check(jnp.array([2, 3, 1, 4], jnp.int32)))


def test_a_device_that_never_comes():
    """The others get an error that says so, within the time set, and the next call works."""
    code = """
        import jax, numpy as np, pytest, test_cpu_meeting as t
        t.ffi.register()
        layer, ranks = t.Layer(), 4
        attributes = layer.attributes(ranks)

        def local(inputs):
            stays_away = (inputs["x"][0, 0] > 1e6) & (jax.lax.axis_index("e") == 2)
            come = lambda: t.forward_local(inputs, attributes)[0]
            return jax.lax.cond(stays_away, lambda: inputs["x"], come)

        arrays = layer.arrays()
        function = t.sharded(local, ranks, arrays, t.P("e"))
        want = np.asarray(function(arrays))
        late = arrays | {"x": np.full_like(arrays["x"], 1e9)}
        with pytest.raises(Exception, match=r"3 of 4 devices came to the call"):
            jax.block_until_ready(function(late))
        np.testing.assert_array_equal(function(arrays), want)
    """
    in_subprocess(code, JAX_MOK_TIMEOUT_SECONDS="0.5")
