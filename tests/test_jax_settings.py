"""JAX's own settings and older ways to use it: none of them may stand in the way of `moe`."""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_mok

EXACT = 2e-6


@pytest.fixture(scope="module")
def mesh():
    return cases.mesh((4,), ("expert",))


@pytest.fixture(scope="module")
def case():
    return cases.make(biases=True, shared=16, shared_gate=True, unused=0.2)


@pytest.fixture(scope="module")
def want(case):
    return case.reference()


ROUTES = {
    "plain": dict(),
    "bias": dict(selection_bias=np.zeros(32, np.float32)),
    "groups": dict(selection_bias=np.zeros(32, np.float32), num_groups=4, top_k_groups=2),
    "mask": dict(token_mask=np.ones((3, 8), bool)),
    "many": dict(top_k=20),
}


@pytest.mark.parametrize("options", ROUTES)
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrt_softplus"])
def test_route_without_implicit_promotion(scoring, options):
    """Some models forbid implicit broadcasts over new dims and implicit changes of dtype."""
    logits = jax.random.normal(jax.random.key(0), (3, 8, 32), jnp.bfloat16)

    def run(logits):
        routing = jax_mok.route(logits, **dict(top_k=3, scoring=scoring) | ROUTES[options])
        bias = jax_mok.update_selection_bias(jnp.zeros(32), routing.counts, 1e-3)
        return jnp.sum(routing.expert_weights) + routing.z_loss, (routing, bias)

    expected = jax.grad(run, has_aux=True)(logits)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        got = jax.grad(run, has_aux=True)(logits)
    cases.assert_close(got, expected, 1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_moe_without_implicit_promotion(dtype, implementation, mesh):
    case = cases.make(dtype=dtype, biases=True, shared=16, shared_gate=True)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        case.value_and_grads(mesh=mesh, implementation=implementation)


def test_64_bit_jax(case, want, mesh, implementation):
    """Python's numbers and indices are wide there; nothing of the layer may be."""
    with jax.enable_x64(True):
        result = case.value_and_grads(mesh=mesh, implementation=implementation)
        assert {a.dtype for a in jax.tree.leaves(result)} == {jnp.dtype(jnp.float32)}
        cases.assert_close(result, want, EXACT)
        wide = jax.tree.map(lambda a: a.dtype, jax_mok.route(jnp.ones((4, 8)), top_k=2))
        assert wide == (jnp.int32, jnp.float32, jnp.int32, jnp.float32, jnp.float32)


def test_debug_nans(case, want, mesh, implementation):
    with jax.debug_nans(True):
        result = case.value_and_grads(mesh=mesh, implementation=implementation)
    cases.assert_close(result, want, EXACT)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("on_mesh", [False, True])
def test_debug_nans_reports_a_nan_of_the_layer(mesh, implementation, on_mesh, jit):
    """Finite arguments, y that is not: an error, and no search for it without end."""
    case = cases.make(tokens=(16,))
    case.x, case.w_gate, case.w_up = case.x * 1e30, case.w_gate * 1e20, case.w_up * 1e20
    run = lambda args: case.call(
        args, mesh=mesh if on_mesh else None, implementation=implementation
    )
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        jax.block_until_ready((jax.jit(run) if jit else run)(case.args))


def test_disable_jit(case, want, mesh, implementation):
    with jax.disable_jit():
        y = case.call(case.args, mesh=mesh, implementation=implementation)
    cases.assert_close(y, want[0], EXACT)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_mesh_as_a_context(case, want, mesh, implementation):
    """`with mesh:`, from before `jax.set_mesh`."""
    with mesh:
        result = case.value_and_grads(implementation=implementation)
    cases.assert_close(result, want, EXACT)
