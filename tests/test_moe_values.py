"""Values and all gradients of `moe` against the readable definition."""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_mok

EXACT = 2e-6  # float32
BF16 = 8e-3  # bfloat16 results of float32 sums

OPTIONS = {
    "plain": dict(),
    "biases": dict(biases=True),
    "shared": dict(shared=16),
    "two shared, gated": dict(shared=48, shared_gate=True),
    "geglu": dict(activation="geglu", biases=True),
    "reglu": dict(activation="reglu"),
    "gpt-oss": dict(activation=jax_mok.Swiglu(1.702, 0.8, 1.0), biases=True),
    "unused slots": dict(unused=0.3, biases=True),
    "no slot used": dict(unused=1.1, shared=16),
    "top-1": dict(top_k=1),
    "all experts": dict(top_k=8),
    "one expert gets all": dict(top_k=1, experts=[5]),
    "first rank gets none": dict(top_k=2, experts=[2, 3, 4, 5, 6, 7], biases=True),
    "many experts, few tokens": dict(num_experts=64, top_k=4, tokens=(8,)),
    "odd sizes": dict(hidden=37, intermediate=29, tokens=(8, 5)),
}


@functools.cache
def case_and_reference(option):
    case = cases.make(**OPTIONS[option])
    return case, case.reference()


@pytest.mark.parametrize("ranks", [1, 4, 8])
@pytest.mark.parametrize("option", OPTIONS)
def test_values_and_gradients(option, ranks, implementation):
    case, want = case_and_reference(option)
    mesh = cases.mesh((ranks,), ("expert",), permute=ranks == 4)
    result = case.value_and_grads(mesh=mesh, implementation=implementation)
    cases.assert_close(result, want, EXACT)


def test_no_mesh(implementation):
    case = cases.make(biases=True, shared=16)
    for jit in (True, False):
        result = case.value_and_grads(jit=jit, implementation=implementation)
        cases.assert_close(result, case.reference(), EXACT)


def test_bfloat16(implementation):
    case = cases.make(
        dtype=jnp.bfloat16, tokens=(8, 32), hidden=64, intermediate=96, biases=True, shared=32
    )
    mesh = cases.mesh((4,), ("expert",))
    y, grads = case.value_and_grads(mesh=mesh, implementation=implementation)
    assert y.dtype == jnp.bfloat16
    assert all(
        g.dtype == a.dtype for g, a in zip(jax.tree.leaves(grads), jax.tree.leaves(case.args))
    )
    cases.assert_close((y, grads), case.reference(), BF16)


def test_each_expert_by_itself_in_bfloat16():
    """A fault in one small expert must not hide behind the norm of the whole tensor."""
    case = cases.make(dtype=jnp.bfloat16, tokens=(40,), hidden=64, intermediate=64, num_experts=16)
    _, grads = case.value_and_grads(mesh=cases.mesh((8,), ("expert",)), implementation="fused")
    _, want = case.reference()
    for name, got, expected in zip(("w_gate", "w_up", "w_down"), grads[2:5], want[2:5]):
        for expert in range(16):
            cases.assert_close(got[expert], expected[expert], BF16, f"{name}[{expert}]")


def test_float32_weights_of_a_bfloat16_layer(implementation):
    """Master weights: float32 gradients, not rounded to bfloat16 on the way."""
    case = cases.make(dtype=jnp.bfloat16, tokens=(64,), hidden=32, intermediate=32)
    wide = [w.astype(jnp.float32) for w in (case.w_gate, case.w_up, case.w_down)]
    case.w_gate, case.w_up, case.w_down = wide
    _, grads = case.value_and_grads(implementation=implementation)
    _, want = case.reference()
    assert all(g.dtype == jnp.float32 for g in grads[2:5])
    if implementation == "fused":
        for got, expected in zip(grads[2:5], want[2:5]):
            cases.assert_close(got, expected, 1e-5)
            assert not np.array_equal(got, got.astype(jnp.bfloat16).astype(jnp.float32))


@pytest.mark.parametrize("tokens", [(0,), (0, 4), (8, 0)])
def test_no_tokens(tokens, implementation):
    case = cases.make(tokens=tokens, biases=True, shared=8)
    y, grads = case.value_and_grads(
        mesh=cases.mesh((4,), ("expert",)), implementation=implementation
    )
    assert y.shape == (*tokens, 24)
    for grad in jax.tree.leaves(grads):
        assert not np.asarray(grad).any()


@pytest.mark.parametrize("hidden,intermediate", [(2880, 64), (64, 1408), (64, 768), (64, 2880)])
def test_widths_of_real_models(hidden, intermediate):
    case = cases.make(tokens=(24,), hidden=hidden, intermediate=intermediate, num_experts=4)
    result = case.value_and_grads(mesh=cases.mesh((2,), ("expert",)), implementation="fused")
    cases.assert_close(result, case.reference(), EXACT)


@pytest.mark.parametrize("name", sorted(jax_mok.shapes.SHAPES))
def test_named_models_scaled_down(name):
    shape = jax_mok.shapes.SHAPES[name].scaled_down(
        hidden_size=32, intermediate_size=16, num_experts=32
    )
    case = cases.make(
        tokens=(16,), hidden=32, intermediate=16, num_experts=32, top_k=shape.top_k,
        shared=16 * shape.num_shared_experts,
    )  # fmt: skip
    result = case.value_and_grads(mesh=cases.mesh((8,), ("expert",)), implementation="fused")
    cases.assert_close(result, case.reference(), EXACT)


def test_512_experts_one_each_and_more():
    case = cases.make(tokens=(64,), hidden=16, intermediate=16, num_experts=512, top_k=10)
    result = case.value_and_grads(mesh=cases.mesh((8,), ("expert",)), implementation="fused")
    cases.assert_close(result, case.reference(), EXACT)


def test_reference_itself_against_a_loop():
    """The oracle's oracle: one token at a time, in NumPy and float64."""
    case = cases.make(tokens=(5,), biases=True, shared=16, shared_gate=True, unused=0.2)
    f64 = lambda a: np.asarray(a, np.float64)
    silu = lambda g: g / (1 + np.exp(-g))
    want = np.zeros((5, 24))
    for t in range(5):
        x = f64(case.x)[t]
        for slot, expert in enumerate(np.asarray(case.ids)[t]):
            if expert < 0:
                continue
            g = x @ f64(case.w_gate)[expert] + f64(case.biases[0])[expert]
            u = x @ f64(case.w_up)[expert] + f64(case.biases[1])[expert]
            out = (silu(g) * u) @ f64(case.w_down)[expert] + f64(case.biases[2])[expert]
            want[t] += f64(case.weights)[t, slot] * out
        s = case.shared
        h = silu(x @ f64(s.w_gate)) * (x @ f64(s.w_up))
        want[t] += f64(s.gate)[t] * (h @ f64(s.w_down))
    assert cases.relative_l2(case.reference()[0], want) < 1e-6
