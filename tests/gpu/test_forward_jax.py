"""The fused forward on one GPU, called as models call it: values, bits, transformations, command
buffers, and failures. Several ranks are virtual ranks of one call.
"""

import time

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_layers import (
    ROUTINGS,
    SHAPES,
    TOLERANCE,
    command_buffer_results,
    make,
    normalized,
    require_hopper,
    run,
    stacked,
    want,
)

import jax_mok
from jax_mok import _cuda
from jax_mok.ffi import FORWARD_CUDA

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def can_run():
    require_hopper()
    yield


def check(case, **options):
    error = cases.relative_l2(run(case, **options), want(case))
    assert error < TOLERANCE, error


@pytest.mark.parametrize("name", SHAPES)
def test_shape(name):
    check(make(**SHAPES[name]))


@pytest.mark.parametrize("routing", ROUTINGS)
def test_routing_over_virtual_ranks(routing):
    case = make(600, 512, 256, 32, 4, routing=routing, unused=0.1)
    with _cuda.testing(virtual_ranks=4):
        check(case)


@pytest.mark.parametrize("ranks", [8, 72])
def test_many_virtual_ranks(ranks):
    with _cuda.testing(virtual_ranks=ranks):
        check(make(ranks * 5, 256, 128, ranks * 2, 6))


def test_no_token_wants_anything():
    case = make(50, 128, 64, 8, 2, unused=1.0)
    assert not run(case).any()


def test_implementation_is_chosen():
    case = make(8, 128, 64, 8, 2)
    assert jax_mok.implementation_used(case.x, case.ids) == "fused"
    assert jax_mok.implementation_used(case.x.astype(jnp.float32), case.ids) == "xla"
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), case.args)
    y = jax.jit(lambda a: case.call(a))(wide)
    assert cases.relative_l2(y, want(case)) < 1e-2


def test_same_bits():
    """Across runs, ranks, settings and eager calls."""
    case = make(1536, 768, 384, 32, 6, routing="zipf", shared=128, unused=0.05)
    first = run(case)
    assert cases.relative_l2(first, want(case)) < TOLERANCE
    options = {
        "again": {},
        "12 comm SMs": dict(config=jax_mok.Config(fwd_num_comm_sms=12)),
        "minibatch": dict(config=jax_mok.Config(minibatch_size=128)),
        "macrobatch": dict(config=jax_mok.Config(minibatch_size=256, macrobatch_size=1024)),
        "smallest": dict(
            config=jax_mok.Config(minibatch_size=1, macrobatch_size=1), testing=dict(ring_size=1)
        ),
        "jitter": dict(testing=dict(jitter_seed=3)),
        "2 ranks": dict(testing=dict(virtual_ranks=2)),
        "4 ranks": dict(testing=dict(virtual_ranks=4)),
        "4 ranks, jitter, small": dict(
            config=jax_mok.Config(macrobatch_size=512),
            testing=dict(virtual_ranks=4, jitter_seed=9),
        ),
    }
    for name, option in options.items():
        with _cuda.testing(**option.pop("testing", {})):
            cases.assert_same_bits(run(case, **option), first, name)
    eager = jax_mok.synchronize(case.call(case.args, implementation="fused"))
    cases.assert_same_bits(eager, first, "eager")


@pytest.mark.parametrize("ranks", [1, 4])
def test_in_scan_as_in_a_row(ranks):
    case, layers = make(256, 256, 128, 16, 4), 6
    weights = stacked(case, layers)
    layer = lambda x, w: normalized(case.call((x, *w), implementation="fused"))

    def scanned(x, weights):
        return jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights)[0]

    def in_a_row(x, weights):
        for leaves in zip(*jax.tree.leaves(weights)):
            x = layer(x, jax.tree.unflatten(jax.tree.structure(weights), leaves))
        return x

    with _cuda.testing(virtual_ranks=ranks):
        before = jax_mok.call_counts()["forward"]
        y = jax_mok.synchronize(jax.jit(scanned)(case.x, weights))
        assert jax_mok.call_counts()["forward"] - before == layers
        cases.assert_same_bits(y, jax.jit(in_a_row)(case.x, weights))
    jax_mok.check_status()


def test_calls_that_do_not_depend_on_each_other():
    case = make(200, 256, 128, 16, 4)
    call = lambda x: case.call((x, *case.args[1:]), implementation="fused")
    many = jax.jit(lambda x: [call(x * (i + 1)) for i in range(12)])
    one = jax.jit(call)
    with _cuda.testing(virtual_ranks=4):
        for _ in range(3):
            for i, y in enumerate(jax_mok.synchronize(many(case.x))):
                cases.assert_same_bits(y, one(case.x * (i + 1)), f"call {i}")


def test_float32_weights_of_a_bfloat16_layer():
    case = make(100, 256, 128, 8, 2)
    masters = [w.astype(jnp.float32) for w in case.args[2:5]]
    call = lambda a: case.call(a, implementation="fused")
    args = (*case.args[:2], *masters, *case.args[5:])
    cases.assert_same_bits(jax.jit(call)(args), run(case))


def test_donated_input():
    case = make(128, 256, 128, 8, 2)
    first = run(case)
    donate = jax.jit(lambda x, a: case.call((x, *a), implementation="fused"), donate_argnums=0)
    cases.assert_same_bits(donate(case.x + 0, case.args[1:]), first)


def test_heap_is_shared_and_grows():
    small, large = make(32, 256, 128, 8, 2), make(4096, 512, 128, 8, 8)
    program = jax.jit(lambda a: small.call(a, implementation="fused"))
    first = program(small.args)
    heaps = jax_mok.peer_memory()
    run(large)
    grown = jax_mok.peer_memory()
    assert len(grown) - len(heaps) in (0, 1)  # 0: a larger one was there already
    assert all(h["bytes"] >= h["used_bytes"] > 0 and h["num_ranks"] >= 1 for h in grown)
    cases.assert_same_bits(program(small.args), first, "after the heap has grown")
    run(make(64, 256, 192, 8, 2))  # another layer, smaller than the largest
    assert len(jax_mok.peer_memory()) == len(grown)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("fault", ["too large", "negative", "repeated"])
def test_bad_ids(fault, ranks):
    """NaN in y, an error at the next synchronisation, and the next call works."""
    case = make(100, 256, 128, 16, 4)
    with _cuda.testing(virtual_ranks=ranks):
        call = jax.jit(lambda i: case.call(case.args, ids=i, implementation="fused"))
        good = jax_mok.synchronize(call(case.ids))
        bad = {"too large": 16, "negative": -2, "repeated": int(case.ids[97, 0])}[fault]
        y = call(case.ids.at[97, 2].set(bad))
        token = 97 - (ranks - 1) * (100 // ranks)
        why = ", which an earlier slot of the same token has" if fault == "repeated" else ";"
        where = rf"expert_ids\[{token}, 2\] of rank {ranks - 1} is {bad}"
        with pytest.raises(jax_mok.MokError, match=where + why):
            jax_mok.synchronize(y)
        assert np.isnan(np.asarray(y, np.float32)).all()
        jax_mok.check_status()  # said once
        cases.assert_same_bits(jax_mok.synchronize(call(case.ids)), good, "the call after it")


def test_rank_that_never_comes():
    case = make(100, 256, 128, 16, 4)
    config = jax_mok.Config(timeout_seconds=0.5)
    call = lambda: jax.jit(lambda a: case.call(a, implementation="fused", config=config))
    with _cuda.testing(virtual_ranks=4):
        good = jax_mok.synchronize(call()(case.args))
        with _cuda.testing(absent_rank=2):
            absent = call()
            start = time.monotonic()
            y = absent(case.args)
            with pytest.raises(jax_mok.MokError, match=r"phase start.*rank 2 did not come"):
                jax_mok.synchronize(y)
            assert time.monotonic() - start < 30
            assert np.isnan(np.asarray(y, np.float32)).all()
        cases.assert_same_bits(jax_mok.synchronize(call()(case.args)), good, "the call after it")


def test_calls_after_a_failure_in_one_program():
    """The failing call is in the middle of a program; those before and after it are right."""
    case = make(64, 256, 128, 8, 2)
    bad = case.ids.at[5, 0].set(99)

    def call(x, ids):
        return case.call((x, *case.args[1:]), ids=ids, implementation="fused")

    @jax.jit
    def program(x):
        first = call(x, case.ids)
        _, x = jax.lax.optimization_barrier((first, x))
        broken = call(x, bad)
        _, x = jax.lax.optimization_barrier((broken, x))
        return first, broken, call(x * 2, case.ids)

    first, broken, after = program(case.x)
    with pytest.raises(jax_mok.MokError, match="is 99"):
        jax_mok.synchronize((first, broken, after))
    assert np.isnan(np.asarray(broken, np.float32)).all()
    for x, y in ((case.x, first), (case.x * 2, after)):
        cases.assert_same_bits(jax_mok.synchronize(jax.jit(call)(x, case.ids)), y)


def test_same_bits_with_and_without_command_buffers():
    results = command_buffer_results("forward")
    assert results["on"] == results["off"]


def test_jittered_calls():
    """100 calls with random delays in all roles of four ranks, for several seeds."""
    case = make(128, 256, 128, 16, 4)
    with _cuda.testing(virtual_ranks=4):
        first = run(case)
    config = jax_mok.Config(minibatch_size=128, macrobatch_size=512)
    for seed in (1, 2, 3):
        with _cuda.testing(virtual_ranks=4, jitter_seed=seed, ring_size=128):
            call = jax.jit(lambda a: case.call(a, implementation="fused", config=config))
            for y in jax_mok.synchronize([call(case.args) for _ in range(100)]):
                cases.assert_same_bits(y, first, f"seed {seed}")


def test_moves_no_data_it_need_not():
    """One custom call in the compiled program, and no copy of a weight beside it."""
    case = make(256, 512, 256, 16, 4)
    compiled = jax.jit(lambda a: case.call(a, implementation="fused")).lower(case.args).compile()
    text = compiled.as_text()
    assert text.count(f'custom_call_target="{FORWARD_CUDA}"') == 1
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * case.w_gate.nbytes + (64 << 20)
