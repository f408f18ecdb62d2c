"""The layer as one writes it in JAX for speed, with any `ragged_dot`: what jax_mok competes with.

Rows are sorted by expert, gathered, multiplied in the dtype of x, and gathered back; the gradients
of both gathers are gathers too, so that there is no scatter-add in either pass. Over several ranks
tokens are all-gathered and results reduce-scattered in the dtype of x, which beat
`ragged_all_to_all` by far where both were measured.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint

# Rows that a rank makes room for, as a multiple of its even share: what MaxText calls its buffer
# factor. Rows beyond are dropped, and the benchmark of the step would see it in the loss.
ROOM = 1.25


def layer(x, ids, weights, w_gate, w_up, w_down, *, num_experts, expert_axis, ragged_dot):
    """y [T, H] of one rank; arguments are local, as for `jax_mok.moe`, and no id is -1."""
    first = 0
    if expert_axis is not None:
        gather = lambda a: jax.lax.all_gather(a, expert_axis, axis=0, tiled=True)
        x, ids, weights = gather(x), gather(ids), gather(weights)
        first = jax.lax.axis_index(expert_axis) * w_gate.shape[0]
    rows, groups = _plan(ids - first, w_gate.shape[0], num_experts)
    dot = lambda a, w: ragged_dot(a, w, groups)

    picked = _dispatch(rows, x)
    gate, up = dot(picked, w_gate), dot(picked, w_up)
    if expert_axis is not None:  # rows past the last group hold anything
        held = (rows.slot_of >= 0)[:, None]
        gate, up = jnp.where(held, gate, 0), jnp.where(held, up, 0)
    out = dot(_activate(gate, up), w_down)
    y = _combine(rows, out, weights).astype(x.dtype)
    if expert_axis is not None:
        y = jax.lax.psum_scatter(y, expert_axis, scatter_dimension=0, tiled=True)
    return y


class _Rows(NamedTuple):
    """Who is where; -1 = nobody, nowhere."""

    slot_of: jax.Array  # [R], slot (token * k + i) of each row
    row_of: jax.Array  # [N, k], row of each slot


def _plan(local_ids, num_local: int, num_experts: int):
    """(rows, group sizes [num_local]): rows sorted by expert, those of others last or left out."""
    tokens, top_k = local_ids.shape
    ranks = num_experts // num_local
    room = tokens * top_k if ranks == 1 else int(np.ceil(ROOM * tokens * top_k / ranks))
    flat = local_ids.reshape(-1)
    key = jnp.where((flat >= 0) & (flat < num_local), flat, num_local)
    order = jnp.argsort(key, stable=True)
    place = jnp.zeros_like(order).at[order].set(jnp.arange(order.size), unique_indices=True)
    counts = (key[:, None] == jnp.arange(num_local)).sum(axis=0)  # much faster than a scatter-add
    ends = jnp.minimum(jnp.cumsum(counts), room)
    groups = jnp.diff(ends, prepend=0).astype(jnp.int32)
    held = ends[-1]
    slot_of = jnp.where(jnp.arange(room) < held, order[:room], -1)
    row_of = jnp.where(place < held, place, -1).reshape(tokens, top_k)
    return _Rows(slot_of, row_of), groups


def _take(table, index):
    """table[index], and 0 where the index is -1."""
    return jnp.where((index >= 0)[..., None], table[jnp.maximum(index, 0)], 0)


def _by_rows(a):
    """`a` with one row after the other in memory, as the next product takes it. XLA would rather
    make it in the layout of the transpose that the gradient needs later, element by element."""
    return with_layout_constraint(a, Layout(major_to_minor=(0, 1)))


@jax.custom_vjp
def _dispatch(rows: _Rows, x):
    """[R, H]: the token of each row."""
    top_k = rows.row_of.shape[1]
    return _by_rows(x[jnp.maximum(rows.slot_of, 0) // top_k])


def _dispatch_forward(rows, x):
    return _dispatch(rows, x), rows


def _dispatch_backward(rows, d_picked):
    dx = _take(d_picked, rows.row_of).astype(jnp.float32).sum(axis=1)
    return None, dx.astype(d_picked.dtype)


_dispatch.defvjp(_dispatch_forward, _dispatch_backward)


@jax.custom_vjp
def _activate(gate, up):
    """SwiGLU, computed in float32."""
    hidden = jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)
    return _by_rows(hidden.astype(gate.dtype))


def _activate_forward(gate, up):
    # float32 values are computed anew for the gradient: XLA would rather write them out.
    return _activate(gate, up), jax.lax.optimization_barrier((gate, up))


def _activate_backward(residuals, d_hidden):
    gate, up = (a.astype(jnp.float32) for a in residuals)
    sigmoid, d_hidden = jax.nn.sigmoid(gate), d_hidden.astype(jnp.float32)
    d_gate = d_hidden * up * sigmoid * (1 + gate * (1 - sigmoid))
    return tuple(d.astype(residuals[0].dtype) for d in (d_gate, d_hidden * gate * sigmoid))


_activate.defvjp(_activate_forward, _activate_backward)


@jax.custom_vjp
def _combine(rows: _Rows, out, weights):
    """float32 [N, H]: the weighted sum of each token's rows."""
    return jnp.einsum("nkh,nk->nh", _take(out, rows.row_of).astype(jnp.float32), weights)


def _combine_forward(rows, out, weights):
    return _combine(rows, out, weights), (rows, out, weights)


def _combine_backward(residuals, dy):
    rows, out, weights = residuals
    top_k = weights.shape[1]
    d_weights = jnp.einsum("nkh,nh->nk", _take(out, rows.row_of).astype(jnp.float32), dy)
    weight_of = jnp.where(rows.slot_of >= 0, weights.reshape(-1)[rows.slot_of], 0)
    d_out = dy[jnp.maximum(rows.slot_of, 0) // top_k] * weight_of[:, None]
    return None, d_out.astype(out.dtype), d_weights


_combine.defvjp(_combine_forward, _combine_backward)
