"""Determinism as a contract: equality of bits, not closeness."""

import dataclasses

import cases
import jax
import jax.numpy as jnp
import pytest

import jax_mok
from jax_mok import Config


def run(case, ranks=4, **config):
    return case.value_and_grads(
        mesh=cases.mesh((ranks,), ("expert",)), implementation="fused", config=Config(**config)
    )


CASES = {
    "float32": dict(tokens=(8, 20), biases=True, shared=16, unused=0.1),
    "bfloat16": dict(tokens=(8, 20), dtype=jnp.bfloat16, biases=True, shared=16),
    "skewed": dict(tokens=(160,), top_k=2, experts=[1, 2, 3]),
    "odd widths": dict(tokens=(8, 20), hidden=37, intermediate=29),
    "wide": dict(tokens=(80,), hidden=264, intermediate=136, num_experts=8, top_k=2),
    # Experts of three row tiles in macrobatches of five: some begin and end with a cut one.
    "cut": dict(tokens=(1280,), num_experts=16, top_k=2, biases=True),
    "cut, bfloat16": dict(tokens=(1280,), num_experts=16, top_k=2, dtype=jnp.bfloat16, biases=True),
}


@pytest.fixture(params=CASES, scope="module")
def case(request):
    return cases.make(**CASES[request.param])


@pytest.fixture(scope="module")
def want(case):
    return run(case)


def test_again(case, want):
    for _ in range(3):
        cases.assert_same_bits(run(case), want)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_number_of_threads(case, want, threads):
    jax_mok.set_num_threads(threads)
    try:
        cases.assert_same_bits(run(case), want)
    finally:
        jax_mok.set_num_threads(0)


@pytest.mark.parametrize("macrobatch", [1, 64, 192, 320, 10_000])
@pytest.mark.parametrize("residuals", ["save", "recompute"])
def test_ring_and_residuals(case, want, macrobatch, residuals):
    result = run(case, macrobatch_size=macrobatch, residuals=residuals)
    cases.assert_same_bits(result, want)


@pytest.mark.parametrize("minibatch", [1, 64, 1000])
def test_minibatch(case, want, minibatch):
    cases.assert_same_bits(run(case, minibatch_size=minibatch), want)


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_number_of_ranks(case, want, ranks):
    """Forward, dx, and every gradient of the routed experts.

    The shared experts' weights are replicated: their gradients are summed over the ranks by JAX,
    in an order that depends on how many there are.
    """
    drop = lambda result: (result[0], result[1][:6])
    cases.assert_same_bits(drop(run(case, ranks)), drop(want))


def test_settings_that_only_concern_gpus(case, want):
    result = run(case, fwd_num_comm_sms=8, bwd_num_comm_sms=4, timeout_seconds=1.0)
    cases.assert_same_bits(result, want)


def test_jit_or_not(case, want):
    eager = case.value_and_grads(
        jit=False, mesh=cases.mesh((4,), ("expert",)), implementation="fused"
    )
    cases.assert_same_bits((eager[0], eager[1][:5]), (want[0], want[1][:5]))


def test_a_token_by_itself(case):
    """A token's output depends on nothing but the token: not on who else chose the expert."""
    y = run(case)[0].reshape(-1, case.x.shape[-1])
    take = lambda a: a.reshape(-1, *a.shape[case.x.ndim - 1 :])[:4]
    few = dataclasses.replace(
        case,
        x=take(case.x),
        ids=take(case.ids),
        weights=take(case.weights),
        cotangent=take(case.cotangent),
    )
    if few.shared is not None and few.shared.gate is not None:
        few.shared = dataclasses.replace(few.shared, gate=take(few.shared.gate))
    alone = jax.jit(lambda args: few.call(args, implementation="fused"))(few.args)
    cases.assert_same_bits(alone, y[:4])
