"""The gradient of the fused layer on one GPU, called as models call it: every gradient against
float32 autodiff of the oracle, bits, residuals, remat and scan, command buffers, and failures.
Several ranks are virtual ranks of one call.
"""

import dataclasses
import functools
import time

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_policies
from jax_layers import (
    ROUTINGS,
    SHAPES,
    assert_gradients,
    command_buffer_results,
    gradient_errors,
    gradients,
    gradients_function,
    make,
    normalized,
    require_hopper,
    stacked,
)

import jax_mok
from jax_mok import _cuda
from jax_mok._fused import OUTPUT_NAME, RESIDUAL_NAME
from jax_mok.ffi import BACKWARD_CUDA, FORWARD_CUDA

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def can_run():
    require_hopper()
    yield


@pytest.mark.parametrize("name", SHAPES)
def test_shape(name):
    case = make(**SHAPES[name])
    assert_gradients(gradients(case), case)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_routing_over_virtual_ranks(routing):
    case = make(600, 512, 256, 32, 4, routing=routing, unused=0.1)
    with _cuda.testing(virtual_ranks=4):
        assert_gradients(gradients(case), case)


@pytest.mark.parametrize("ranks", [8, 72])
def test_many_virtual_ranks(ranks):
    case = make(ranks * 5, 256, 128, ranks * 2, 6, biases=True, shared=64, shared_gate=True)
    with _cuda.testing(virtual_ranks=ranks):
        assert_gradients(gradients(case), case)


def test_no_token_wants_anything():
    case = make(50, 128, 64, 8, 2, unused=1.0, biases=True)
    assert not any(leaf.any() for leaf in jax.tree.leaves(gradients(case)))


SETTINGS = {
    "again": {},
    "12 comm SMs": dict(bwd_num_comm_sms=12),
    "12 comm SMs in both passes": dict(fwd_num_comm_sms=12, bwd_num_comm_sms=12),
    "minibatch": dict(minibatch_size=128),
    "macrobatch": dict(minibatch_size=256, macrobatch_size=1024),
    "smallest": dict(minibatch_size=1, macrobatch_size=1, testing=dict(ring_size=1)),
    "jitter": dict(testing=dict(jitter_seed=3)),
}


@pytest.mark.parametrize("ranks", [1, 4])
def test_same_bits(ranks):
    """All gradients, across runs and settings, whatever is kept for the backward."""
    case = make(
        1536,
        768,
        384,
        32,
        6,
        routing="zipf",
        biases=True,
        shared=128,
        shared_gate=True,
        unused=0.05,
    )
    with _cuda.testing(virtual_ranks=ranks):
        first = gradients(case)
        assert_gradients(first, case)
        for name, settings in SETTINGS.items():
            options = dict(settings)
            with _cuda.testing(**options.pop("testing", {})):
                for residuals in ("save", "recompute"):
                    config = jax_mok.Config(residuals=residuals, **options)
                    cases.assert_same_bits(
                        gradients(case, config=config), first, f"{name}, {residuals}: "
                    )
        eager = case.value_and_grads(jit=False, implementation="fused")
        cases.assert_same_bits(jax_mok.synchronize(eager)[1], first, "eager")


def test_same_bits_on_any_number_of_ranks():
    """Of dx and d(expert_weights): each row is the work of one rank. The order in which an expert's
    rows are summed follows the ranks that they come from."""
    case = make(1536, 768, 384, 32, 6, routing="zipf", shared=128, unused=0.05)
    first = gradients(case)
    for ranks in (2, 4):
        with _cuda.testing(virtual_ranks=ranks):
            grads = gradients(case)
        cases.assert_same_bits(grads[0], first[0], f"dx of {ranks} ranks")
        cases.assert_same_bits(grads[1], first[1], f"d(expert_weights) of {ranks} ranks")
        errors = gradient_errors(grads, jax.tree.map(lambda a: a.astype(np.float32), first), case)
        assert all(error < 6e-3 for error in errors.values()), errors


@pytest.mark.parametrize("name", ["odd", "padded", "gpt-oss", "intermediate 1408", "geglu"])
def test_saved_as_recomputed(name):
    case = make(**SHAPES[name])
    saved = gradients(case, config=jax_mok.Config(residuals="save"))
    cases.assert_same_bits(gradients(case, config=jax_mok.Config(residuals="recompute")), saved)


def test_float32_weight_gradients():
    """They are what bfloat16 gradients are rounded from."""
    case = make(300, 256, 128, 8, 2, biases=True, shared=64)
    wide = lambda w: w.astype(jnp.float32)
    masters = dataclasses.replace(
        case, w_gate=wide(case.w_gate), w_up=wide(case.w_up), w_down=wide(case.w_down)
    )
    rounded = gradients(case)
    for config in (jax_mok.Config(), jax_mok.Config(weight_grad_dtype=jnp.float32)):
        grads = gradients(masters, config=config)
        assert all(g.dtype == jnp.float32 for g in grads[2:5])
        assert_gradients(grads, case)
        as_given = jax.tree.map(lambda g, r: g.astype(r.dtype), grads, rounded)
        cases.assert_same_bits(as_given, rounded)
        assert any((g != g.astype(jnp.bfloat16)).any() for g in grads[2:5])


def poison():
    """Fills what XLA's pool has free with NaN, in pieces of all sizes."""
    pieces = [jnp.full(1 << i, np.nan, jnp.float32) for i in range(10, 28)]
    jax.block_until_ready(pieces)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("residuals", ["save", "recompute"])
def test_after_poison(residuals, ranks):
    """Nothing of what the memory held before gets into a gradient: not from XLA's pool, nor from
    the ring and heap of a call whose every token was NaN."""
    case = make(500, 256, 192, 16, 4, routing="some empty", unused=0.2, biases=True, shared=64)
    config = jax_mok.Config(residuals=residuals, macrobatch_size=512)
    with _cuda.testing(virtual_ranks=ranks):
        run = jax.jit(gradients_function(case, config=config))
        good = jax.tree.map(np.asarray, jax_mok.synchronize(run(case.args, case.ids)))
        all_used = make(500, 256, 192, 16, 4).ids
        nan = (case.x * np.nan, *case.args[1:])
        for _ in range(2):
            broken = jax_mok.synchronize(run(nan, all_used))
            assert np.isnan(np.asarray(broken[1][0], np.float32)).any()
            del broken
            poison()
            cases.assert_same_bits(jax_mok.synchronize(run(case.args, case.ids)), good)
        assert_gradients(good[1], case)


REMAT = {
    "none": (lambda f: f, 1),
    "everything": (jax.checkpoint, 2),
    "named": (
        functools.partial(
            jax.checkpoint,
            policy=checkpoint_policies.save_only_these_names(OUTPUT_NAME, RESIDUAL_NAME),
        ),
        1,
    ),
}


def test_remat():
    """The bits do not change, and the calls are as many as the policy says."""
    case = make(300, 256, 128, 8, 2, shared=64)
    first = gradients(case)
    for name, (wrap, forward_calls) in REMAT.items():

        def loss(args, wrap=wrap):
            y = wrap(lambda a: case.call(a, implementation="fused"))(args)
            return jnp.sum(y.astype(jnp.float32) * case.cotangent.astype(jnp.float32))

        before = jax_mok.call_counts()
        value, grads = jax_mok.synchronize(jax.jit(jax.value_and_grad(loss))(case.args))
        after = jax_mok.call_counts()
        assert np.isfinite(value)
        cases.assert_same_bits(grads, first, name)
        assert after["backward"] - before["backward"] == 1, name
        assert after["forward"] - before["forward"] == forward_calls, name


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("remat", REMAT)
def test_scan_over_layers(remat, ranks):
    """Eight layers in a scan and in a row: the same gradients, and every call once, or as often as
    remat says."""
    case, layers = make(256, 256, 128, 16, 4), 8
    weights = stacked(case, layers)
    wrap, forward_calls = REMAT[remat]
    layer = lambda x, w: normalized(case.call((x, *w), implementation="fused"))

    def scanned(weights, x):
        step = wrap(lambda x, w: (layer(x, w), None))
        y = jax.lax.scan(step, x, weights)[0]
        return jnp.sum(y.astype(jnp.float32) * case.cotangent.astype(jnp.float32))

    def in_a_row(weights, x):
        for leaves in zip(*jax.tree.leaves(weights)):
            x = layer(x, jax.tree.unflatten(jax.tree.structure(weights), leaves))
        return jnp.sum(x.astype(jnp.float32) * case.cotangent.astype(jnp.float32))

    with _cuda.testing(virtual_ranks=ranks):
        before = jax_mok.call_counts()
        program = jax.jit(jax.value_and_grad(scanned, (0, 1)))
        grads = jax_mok.synchronize(program(weights, case.x))
        after = jax_mok.call_counts()
        assert after["forward"] - before["forward"] == forward_calls * layers
        assert after["backward"] - before["backward"] == layers
        row = jax_mok.synchronize(jax.jit(jax.value_and_grad(in_a_row, (0, 1)))(weights, case.x))
        cases.assert_close(grads, row, 1e-2)
        cases.assert_same_bits(jax_mok.synchronize(program(weights, case.x)), grads, "again")


def test_layers_that_do_not_depend_on_each_other():
    """Forward and backward calls of several layers in one program, in any order."""
    case = make(200, 256, 128, 16, 4)
    one = gradients_function(case)
    many = lambda args, ids: [one((args[0] * (i + 1), *args[1:]), ids) for i in range(6)]
    with _cuda.testing(virtual_ranks=4):
        results = jax_mok.synchronize(jax.jit(many)(case.args, case.ids))
        for i, result in enumerate(results):
            args = (case.x * (i + 1), *case.args[1:])
            cases.assert_same_bits(result, jax.jit(one)(args, case.ids), f"layer {i}")


def test_same_bits_with_and_without_command_buffers():
    results = command_buffer_results("gradient")
    assert results["on"] == results["off"]
    assert results["on"]["calls"]["backward"] == 2 * 5 * 7


@pytest.mark.parametrize("ranks", [1, 4])
def test_bad_ids(ranks):
    """NaN everywhere, an error at the next synchronisation, and the next call works."""
    case = make(100, 256, 128, 16, 4, biases=True, shared=64)
    with _cuda.testing(virtual_ranks=ranks):
        run = jax.jit(gradients_function(case))
        good = jax_mok.synchronize(run(case.args, case.ids))
        bad = run(case.args, case.ids.at[97, 2].set(16))
        token = 97 - (ranks - 1) * (100 // ranks)
        with pytest.raises(jax_mok.MokError, match=rf"expert_ids\[{token}, 2\].* is 16;"):
            jax_mok.synchronize(bad)
        for leaf in jax.tree.leaves(bad):
            assert np.isnan(np.asarray(leaf, np.float32)).all()
        jax_mok.check_status()  # said once
        cases.assert_same_bits(jax_mok.synchronize(run(case.args, case.ids)), good)


@pytest.mark.parametrize("residuals", ["save", "recompute"])
def test_rank_that_never_comes_to_the_backward(residuals):
    case = make(100, 256, 128, 16, 4, biases=True, shared=64)
    config = jax_mok.Config(timeout_seconds=0.5, residuals=residuals)
    program = lambda: jax.jit(gradients_function(case, config=config))
    with _cuda.testing(virtual_ranks=4):
        good = jax_mok.synchronize(program()(case.args, case.ids))
        with _cuda.testing(absent_rank=2, absent_in=("backward",)):
            absent = program()
            start = time.monotonic()
            y, grads = absent(case.args, case.ids)
            with pytest.raises(jax_mok.MokError, match=r"phase start.*rank 2 did not come"):
                jax_mok.synchronize((y, grads))
            assert time.monotonic() - start < 30
        cases.assert_same_bits(y, good[0], "y, whose forward went well")
        for leaf in jax.tree.leaves(grads):
            assert np.isnan(np.asarray(leaf, np.float32)).all()
        cases.assert_same_bits(
            jax_mok.synchronize(program()(case.args, case.ids)), good, "the call after it"
        )


def test_jittered_calls():
    """Forward and backward with random delays in all roles of four ranks, for several seeds, each
    call with another routing."""
    case = make(128, 256, 128, 16, 4)
    routings = [make(128, 256, 128, 16, 4, routing=r, seed=3).ids for r in ROUTINGS]
    with _cuda.testing(virtual_ranks=4):
        run = jax.jit(gradients_function(case))
        wanted = [jax_mok.synchronize(run(case.args, ids)) for ids in routings]
    config = jax_mok.Config(minibatch_size=128, macrobatch_size=512)
    for seed in (1, 2, 3):
        with _cuda.testing(virtual_ranks=4, jitter_seed=seed, ring_size=128):
            run = jax.jit(gradients_function(case, config=config))
            results = [run(case.args, ids) for ids in routings * 10]
            for i, result in enumerate(jax_mok.synchronize(results)):
                cases.assert_same_bits(result, wanted[i % len(routings)], f"seed {seed}, call {i}")


def test_memory_and_calls():
    """Two custom calls in the compiled gradient and no copy of a weight beside them; "recompute"
    keeps nothing of a layer, "save" a macrobatch."""
    case, layers, rows = make(2048, 512, 256, 16, 4), 8, 1024
    weights = stacked(case, layers)
    temp = {}
    for residuals in ("save", "recompute"):
        config = jax_mok.Config(residuals=residuals, macrobatch_size=rows)

        def loss(weights, x, config=config):
            step = lambda x, w: (
                normalized(case.call((x, *w), implementation="fused", config=config)),
                None,
            )
            y = jax.lax.scan(step, x, weights)[0]
            return jnp.sum(y.astype(jnp.float32))

        lowered = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(weights, case.x)
        compiled = lowered.compile()
        text = compiled.as_text()
        for target in (FORWARD_CUDA, BACKWARD_CUDA):
            assert text.count(f'custom_call_target="{target}"') == 1
        temp[residuals] = compiled.memory_analysis().temp_size_in_bytes
        print(residuals, temp[residuals])
    kept = layers * rows * (512 + 2 * 256) * 2
    assert kept <= temp["save"] - temp["recompute"] < 1.25 * kept
    jax_mok.synchronize(compiled(weights, case.x))
    print(jax_mok.peer_memory())


@pytest.mark.parametrize("seed", range(24))
def test_fuzz(seed):
    """Random layers, routings and settings; a fixed number of them, the same every time."""
    rng = np.random.default_rng(seed)
    pick = lambda *choices: choices[rng.integers(len(choices))]
    ranks = pick(1, 1, 2, 3, 4)
    experts = ranks * int(rng.integers(1, 12))
    shared = pick(0, 0, 64, 200)
    layer = dict(
        tokens=ranks * int(rng.integers(1, 300)),
        hidden=pick(64, 128, 200, 448, 1024),
        intermediate=pick(64, 72, 192, 640),
        num_experts=experts,
        top_k=int(rng.integers(1, min(experts, 9) + 1)),
        routing=pick(*ROUTINGS),
        unused=pick(0.0, 0.1, 0.7),
        biases=pick(False, True),
        shared=shared,
        shared_gate=shared > 0 and pick(False, True),
        # No limit that many values come near: there the derivative of the clamp jumps, and gate|up
        # are rounded to bfloat16.
        activation=pick("swiglu", "geglu", "reglu", jax_mok.Swiglu(1.702, 7.0, 1.0)),
        seed=seed,
    )
    config = jax_mok.Config(
        residuals=pick("save", "recompute"),
        bwd_num_comm_sms=pick(None, None, 8),
        minibatch_size=pick(None, 128, 512),
        macrobatch_size=pick(None, 1, 512, 2048),
    )
    print(ranks, layer, config)
    case = make(**layer)
    with _cuda.testing(virtual_ranks=ranks):
        grads = gradients(case, config=config)
    # Some of these have few and nearly cancelling terms.
    assert_gradients(grads, case, tolerance=2e-2)
