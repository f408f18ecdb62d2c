"""The lower layer: the custom calls by themselves give what the differentiable op gives."""

import cases
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jax_mok
from jax_mok import ops


@pytest.fixture(scope="module")
def case():
    return cases.make(tokens=(64,), biases=True, shared=16, shared_gate=True)


def arguments(case, ids=None):
    args = case.args
    return (args[0], case.ids if ids is None else ids, *args[1:5]), dict(
        biases=args[5], shared=args[6]
    )


@pytest.mark.parametrize("residuals", ["save", "recompute"])
def test_one_device(case, residuals):
    config = jax_mok.Config(residuals=residuals)
    args, options = arguments(case)
    y, saved = jax.jit(lambda *a: ops.forward(*a, **options, config=config))(*args)
    assert (saved is None) == (residuals == "recompute")
    grads = jax.jit(lambda dy, s, *a: ops.backward(dy, s, *a, **options, config=config))(
        case.cotangent, saved, *args
    )
    want_y, want = case.value_and_grads(implementation="fused")
    cases.assert_same_bits((y, *jax.tree.leaves(grads)), (want_y, *jax.tree.leaves(want)))


def test_inside_shard_map(case):
    mesh = cases.mesh((4,), ("expert",), permute=True)
    args, _ = arguments(case)

    def local(dy, *args):
        y, saved = ops.forward(*args, expert_axis="expert")
        grads = ops.backward(dy, saved, *args, expert_axis="expert")
        return y, grads.x, grads.w_gate, grads.w_up, grads.w_down

    mapped = jax.shard_map(local, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
    got = jax.jit(mapped)(case.cotangent, *args)
    case = cases.make(tokens=(64,), biases=True, shared=16, shared_gate=True)
    case.biases = case.shared = None
    y, grads = case.value_and_grads(mesh=mesh, implementation="fused")
    cases.assert_same_bits(got, (y, grads[0], *grads[2:5]))


def test_float32_weight_gradients():
    case = cases.make(tokens=(64,), dtype=jnp.bfloat16)
    args, _ = arguments(case)
    _, saved = ops.forward(*args)
    grads = ops.backward(case.cotangent, saved, *args, weight_grad_dtype=jnp.float32)
    assert grads.w_gate.dtype == jnp.float32 and grads.x.dtype == jnp.bfloat16
    rounded = ops.backward(case.cotangent, saved, *args)
    cases.assert_same_bits(grads.w_up.astype(jnp.bfloat16), rounded.w_up)


def test_errors(case):
    args, options = arguments(case)
    _, saved = ops.forward(*args, **options)
    bad = [
        (lambda: ops.forward(args[0][None], *args[1:]), "x must have|leading dims"),
        (lambda: ops.backward(case.cotangent[1:], saved, *args, **options), "dy must be"),
        (lambda: ops.backward(case.cotangent, saved[1:], *args, **options), "saved must have"),
        (
            lambda: ops.backward(case.cotangent, saved, *args, weight_grad_dtype=jnp.float16),
            "weight_grad_dtype",
        ),
    ]
    for call, words in bad:
        with pytest.raises(ValueError, match=words):
            call()
    with jax.set_mesh(cases.mesh((4,), ("expert",))), pytest.raises(ValueError, match="manual"):
        ops.forward(*args, **options, expert_axis="expert")
