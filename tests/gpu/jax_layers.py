"""Layers for the GPU tests through JAX: made on the device, with an oracle that compiles once a
shape, however many experts there are.
"""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np

import jax_mok
from jax_mok.config import resolve_activation

TOLERANCE = 6e-3  # relative L2 of bfloat16 results against float32

ROUTINGS = ("uniform", "zipf", "one rank", "one expert", "some empty")


def routed_ids(routing, count, num_experts, top_k, *, unused=0.0, seed=0) -> np.ndarray:
    """int32 [count, top_k], distinct within a token."""
    rng = np.random.default_rng(seed)
    popularity = np.ones(num_experts)
    if routing == "zipf":
        popularity = 1.0 / np.arange(1, num_experts + 1) ** 1.2
    elif routing == "one rank":  # all to the first experts: one rank's, of any number of ranks
        popularity[max(top_k, num_experts // 4) :] = 0
    elif routing == "some empty":
        popularity[::3] = 0 if num_experts // 3 * 2 >= top_k else 1
    noise = rng.gumbel(size=(count, num_experts))
    with np.errstate(divide="ignore"):
        scores = np.log(popularity) + noise
    ids = np.argsort(-scores, axis=1)[:, :top_k].astype(np.int32)
    if routing == "one expert":
        ids[:, 0], ids[:, 1:] = num_experts // 2, -1
    ids[rng.random(ids.shape) < unused] = -1
    return ids


def make(
    tokens,
    hidden,
    intermediate,
    num_experts,
    top_k,
    *,
    routing="uniform",
    unused=0.0,
    biases=False,
    shared=0,
    shared_gate=False,
    activation="swiglu",
    seed=0,
) -> cases.Case:
    ids = routed_ids(routing, tokens, num_experts, top_k, unused=unused, seed=seed)
    sizes = (tokens, hidden, intermediate, num_experts, top_k, shared)
    arrays = _random_arrays(sizes, biases, shared_gate, jax.random.key(seed))
    return cases.Case(ids=jnp.asarray(ids), activation=activation, **arrays)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _random_arrays(sizes, biases, shared_gate, key):
    """In one program: compiling one for every array would take longer than the tests."""
    t, h, i, e, k, s = sizes
    keys = iter(jax.random.split(key, 16))
    normal = lambda *shape, scale=1.0: (
        scale * jax.random.normal(next(keys), shape, jnp.float32)
    ).astype(jnp.bfloat16)
    scale_in, scale_out = h**-0.5, i**-0.5
    return dict(
        x=normal(t, h),
        weights=jax.random.uniform(next(keys), (t, k)),
        w_gate=normal(e, h, i, scale=scale_in),
        w_up=normal(e, h, i, scale=scale_in),
        w_down=normal(e, i, h, scale=scale_out),
        biases=(normal(e, i, scale=0.3), normal(e, i, scale=0.3), normal(e, h, scale=0.3))
        if biases
        else None,
        shared=jax_mok.SharedExpert(
            normal(h, s, scale=scale_in),
            normal(h, s, scale=scale_in),
            normal(s, h, scale=scale_out),
            jax.random.uniform(next(keys), (t,)) if shared_gate else None,
        )
        if s
        else None,
        cotangent=normal(t, h),
    )


def reference(
    x,
    expert_ids,
    expert_weights,
    w_gate,
    w_up,
    w_down,
    *,
    biases=None,
    shared=None,
    activation="swiglu",
):
    """`jax_mok.reference.moe` with a loop over the experts that is not unrolled; float32."""
    act = resolve_activation(activation)
    wide = lambda a: a.astype(jnp.float32)
    dot = lambda a, b: jnp.matmul(a, wide(b), precision=jax.lax.Precision.HIGHEST)
    x = wide(x)
    zeros = (jnp.zeros(w_gate.shape[0]),) * 3

    def one(y, expert):
        index, gate_, up_, down_, b_gate, b_up, b_down = expert
        chosen = expert_ids == index
        gate, up = dot(x, gate_) + wide(b_gate), dot(x, up_) + wide(b_up)
        out = dot(act(gate, up), down_) + wide(b_down)
        weight = jnp.where(chosen, expert_weights, 0).sum(-1, keepdims=True)
        return y + jnp.where(chosen.any(-1, keepdims=True), weight * out, 0), None

    indices = jnp.arange(w_gate.shape[0])
    experts = (indices, w_gate, w_up, w_down, *(biases or zeros))
    y, _ = jax.lax.scan(one, jnp.zeros_like(x), experts)
    if shared is not None:
        out = dot(act(dot(x, shared.w_gate), dot(x, shared.w_up)), shared.w_down)
        y = y + (out if shared.gate is None else shared.gate[:, None] * out)
    return y


def want(case) -> np.ndarray:
    """What the layer should give, in float32."""
    return np.asarray(jax.jit(lambda a: case.call(a, moe=reference))(case.args))


def run(case, **options) -> np.ndarray:
    """One jitted call on one device, checked for faults; traced anew each time."""
    y = jax.jit(lambda a, i: case.call(a, ids=i, **{"implementation": "fused", **options}))
    return np.asarray(jax_mok.synchronize(y(case.args, case.ids)))
