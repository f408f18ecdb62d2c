"""What the layer computes, written to be read: the definition that every implementation is tested
against. It visits every expert with every token, so it is slow, and it runs anywhere JAX does.
"""

import jax
import jax.numpy as jnp

from jax_mok.config import resolve_activation


def moe(
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
    precision=jax.lax.Precision.HIGHEST,
):
    """y[t] = Σ_k expert_weights[t, k] · expert_{expert_ids[t, k]}(x[t]) + gate[t] · shared(x[t]).

    expert_e(x) = (act(x · w_gate[e] + b_gate[e], x · w_up[e] + b_up[e])) · w_down[e] + b_down[e].
    Shapes are those of `jax_mok.moe` (global); everything is computed in float32 (float64 for
    float64 arguments) and returned in the dtype of x. Slots whose id is -1 add nothing.
    """
    act = resolve_activation(activation)
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    wide = lambda a: a.astype(dtype)
    dot = lambda a, b: jnp.matmul(wide(a), wide(b), precision=precision)

    hidden = x.shape[-1]
    tokens = x.reshape(-1, hidden)
    ids = expert_ids.reshape(tokens.shape[0], -1)
    weights = wide(expert_weights).reshape(ids.shape)

    def add_expert(y, expert):
        gate, up = dot(tokens, w_gate[expert]), dot(tokens, w_up[expert])
        if biases is not None:
            gate, up = gate + wide(biases[0][expert]), up + wide(biases[1][expert])
        out = dot(act(gate, up), w_down[expert])
        if biases is not None:
            out = out + wide(biases[2][expert])
        chosen = ids == expert
        weight = jnp.where(chosen, weights, 0).sum(-1, keepdims=True)
        # `where`, not a product with 0: a NaN that this expert would make of a token that did not
        # choose it must not reach the token.
        return y + jnp.where(chosen.any(-1, keepdims=True), weight * out, 0), None

    y = jnp.zeros(tokens.shape, dtype)
    y, _ = jax.lax.scan(add_expert, y, jnp.arange(w_gate.shape[0]))
    if shared is not None:
        out = dot(act(dot(tokens, shared.w_gate), dot(tokens, shared.w_up)), shared.w_down)
        y = y + (out if shared.gate is None else wide(shared.gate).reshape(-1, 1) * out)
    return y.astype(x.dtype).reshape(x.shape)
