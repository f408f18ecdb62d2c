"""Faults that users of such systems reported in public, one by one, with the value that is right.

Those of bad arguments are in test_moe_errors.py, those of remat in test_moe_transforms.py, those of
hidden gathers and permuted meshes in test_moe_sharding.py, those of NaN logits in
test_routing_transforms.py.
"""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_mok

EXACT = 2e-6


def mesh(ranks=8):
    return cases.mesh((ranks,), ("expert",))


@pytest.mark.parametrize("tokens", [1, 7, 127, 128, 129, 4095])
def test_odd_token_counts(tokens):
    """Counts that no tile divides, on one rank."""
    case = cases.make(tokens=(tokens,), hidden=16, intermediate=16)
    result = case.value_and_grads(implementation="fused")
    cases.assert_close(result, case.reference(), EXACT)


@pytest.mark.parametrize("count", [1, 63, 64, 65, 128, 129])
def test_rows_of_an_expert_around_the_tile(count):
    """Expert 0 gets `count` rows, the others the rest: weight gradients expert by expert."""
    case = cases.make(tokens=(192,), hidden=16, intermediate=16, num_experts=3, top_k=1)
    ids = np.where(np.arange(192) < count, 0, 1 + np.arange(192) % 2)[:, None]
    case.ids = jnp.asarray(np.random.default_rng(0).permutation(ids), jnp.int32)
    _, grads = case.value_and_grads(implementation="fused")
    _, want = case.reference()
    for name, got, expected in zip(("w_gate", "w_up", "w_down"), grads[2:5], want[2:5]):
        for expert in range(3):
            cases.assert_close(got[expert], expected[expert], EXACT, f"{name}[{expert}]")


def test_one_token_per_rank(implementation):
    case = cases.make(tokens=(8,))
    result = case.value_and_grads(mesh=mesh(), implementation=implementation)
    cases.assert_close(result, case.reference(), EXACT)


def test_some_ranks_have_only_padding(implementation):
    """Ranks 0 and 5 bring no token that counts."""
    case = cases.make(tokens=(8, 4), biases=True)
    case.ids = case.ids.at[0].set(-1).at[5].set(-1)
    y, grads = case.value_and_grads(mesh=mesh(), implementation=implementation)
    cases.assert_close((y, grads), case.reference(), EXACT)
    assert not np.asarray(y)[[0, 5]].any()


@pytest.mark.parametrize("experts", [[3], [0], [7], [0, 1]])
def test_all_tokens_to_one_place(experts, implementation):
    """To one expert, or to one rank: the others get nothing and must not wait."""
    case = cases.make(tokens=(64,), top_k=len(experts), experts=experts)
    ranks = 8 if len(experts) == 1 else 4
    result = case.value_and_grads(mesh=mesh(ranks), implementation=implementation)
    cases.assert_close(result, case.reference(), EXACT)


def test_gradients_of_unused_experts_are_exactly_zero():
    """After a run in which every expert was busy with NaN: memory used again is not clean."""
    full = cases.make(tokens=(64,), biases=True)
    some = cases.make(tokens=(64,), biases=True, experts=[1, 4, 6])
    step = jax.jit(
        lambda args, ids: jax.grad(
            lambda a: full.loss(a, ids=ids, mesh=mesh(4), implementation="fused")
        )(args)
    )
    poison = jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), full.args)
    for _ in range(3):
        jax.block_until_ready(step(poison, full.ids))
        grads = step(full.args, some.ids)
        unused = [0, 2, 3, 5, 7]
        for leaf in jax.tree.leaves((grads[2:5], grads[5])):
            assert not np.asarray(leaf)[unused].any()
            assert np.isfinite(leaf).all()


def test_nan_of_a_token_stays_with_the_token():
    """In y and dx; the weight gradients of other experts stay finite too."""
    case = cases.make(tokens=(64,), top_k=2, biases=True)
    case.ids = case.ids.at[13].set(jnp.array([2, 5]))
    clean_y, clean = case.value_and_grads(mesh=mesh(4), implementation="fused")
    case.x = case.x.at[13].set(jnp.nan)
    y, grads = case.value_and_grads(mesh=mesh(4), implementation="fused")
    others = np.arange(64) != 13
    cases.assert_same_bits(y[others], clean_y[others])
    cases.assert_same_bits(grads[0][others], clean[0][others])
    assert np.isnan(y[13]).all()
    for expert in (0, 1, 3, 4, 6, 7):
        for got, want in zip(grads[2:5], clean[2:5]):
            cases.assert_same_bits(got[expert], want[expert])


def test_nan_in_weights_of_an_expert_that_nobody_chose(implementation):
    case = cases.make(tokens=(64,), experts=[0, 1, 2, 4, 5, 6, 7])
    want = case.reference()
    poisoned = cases.make(tokens=(64,), experts=[0, 1, 2, 4, 5, 6, 7])
    poisoned.w_gate, poisoned.w_up, poisoned.w_down = (
        w.at[3].set(jnp.nan) for w in (case.w_gate, case.w_up, case.w_down)
    )
    y, grads = poisoned.value_and_grads(mesh=mesh(4), implementation="fused")
    cases.assert_close((y, grads[0]), (want[0], want[1][0]), EXACT)


def test_infinite_and_zero_weights_of_slots():
    """A slot of weight 0 still has a gradient for its weight; unused slots have none."""
    case = cases.make(tokens=(32,), unused=0.2)
    case.weights = case.weights.at[::2].set(0)
    _, grads = case.value_and_grads(mesh=mesh(4), implementation="fused")
    _, want = case.reference()
    cases.assert_close(grads[1], want[1], EXACT)
    unused = np.asarray(case.ids) < 0
    assert not np.asarray(grads[1])[unused].any()
    assert np.asarray(grads[1])[~unused].all()


@pytest.mark.parametrize("top_k", [1, 2, 4, 6, 10, 16])
def test_top_k_larger_than_the_experts_of_a_rank(top_k, implementation):
    case = cases.make(tokens=(16,), hidden=16, intermediate=16, num_experts=16, top_k=top_k)
    result = case.value_and_grads(mesh=mesh(), implementation=implementation)
    cases.assert_close(result, case.reference(), EXACT)


def test_router_gets_its_gradient_from_all_ranks(implementation):
    """Not only from the experts that happen to be local."""
    case = cases.make(tokens=(32,))
    router = jax.random.normal(jax.random.key(0), (24, 8)) / 5

    def loss(router, moe):
        routing = jax_mok.route(case.x @ router, top_k=3)
        y = moe(case.x, routing.expert_ids, routing.expert_weights, *case.args[2:5])
        return jnp.sum(y * case.cotangent)

    layer = functools.partial(jax_mok.moe, mesh=mesh(4), implementation=implementation)
    got = jax.jit(jax.grad(lambda r: loss(r, layer)))(router)
    want = jax.jit(jax.grad(lambda r: loss(r, jax_mok.reference.moe)))(router)
    cases.assert_close(got, want, 1e-5)


def test_recomputation_routes_as_the_forward_did():
    """The ids are arguments of both directions: a near-tie cannot fall the other way."""
    case = cases.make(tokens=(64,), top_k=2)
    router = jnp.zeros((24, 8))  # all scores tie

    def block(x):
        routing = jax_mok.route(x @ router, top_k=2)
        return jax_mok.moe(
            x,
            routing.expert_ids,
            routing.expert_weights,
            *case.args[2:5],
            mesh=mesh(4),
            implementation="fused",
        )

    loss = lambda f: jax.jit(jax.grad(lambda x: jnp.sum(jnp.tanh(f(x)))))
    cases.assert_same_bits(loss(jax.checkpoint(block))(case.x), loss(block)(case.x))


def test_72_ranks():
    """A rack's worth of virtual devices on one machine, in a process of its own."""
    import os
    import subprocess
    import sys

    code = (
        "import cases\n"
        "case = cases.make(tokens=(72, 2), num_experts=144, top_k=8, biases=True)\n"
        "mesh = cases.mesh((72,), ('expert',), permute=True)\n"
        "got = case.value_and_grads(mesh=mesh, implementation='fused')\n"
        "cases.assert_close(got, case.reference(), 2e-6)\n"
        "print('right')"
    )
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=72"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.strip() == "right", done.stderr[-2000:]
