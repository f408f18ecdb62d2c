"""The plain-JAX implementation: all-gather, sort, `ragged_dot`, reduce-scatter.

It runs on every backend and over any number of processes, is differentiated by JAX itself, and is
what the fused implementation is compared with.
"""

import jax
import jax.numpy as jnp

from jax_mok import ffi
from jax_mok.config import Activation
from jax_mok.ffi import Operands


def moe(
    ids: jax.Array,
    ops: Operands,
    *,
    activation: Activation,
    expert_axes: tuple[str, ...],
    manual_axes: tuple[str, ...],
    num_experts: int,
    platform: str,
    ragged_dot=jax.lax.ragged_dot,
) -> jax.Array:
    """y [T, H] of one rank; arguments are local, as for `jax_mok._fused.fused`.

    Every rank of the expert group gets all tokens of the group, computes what its experts add to
    each of them, and the sums are scattered back. `ragged_dot`: another function that means what
    JAX's does, to compare them.
    """
    bad = _bad_ids(ids, num_experts)
    x, all_ids, weights = ops.x, ids, ops.expert_weights
    first = 0
    num_local = ops.w_gate.shape[0]
    if expert_axes:
        gather = lambda a: jax.lax.all_gather(a, expert_axes, axis=0, tiled=True)
        x, all_ids, weights = gather(x), gather(all_ids), gather(weights)
        first = jax.lax.axis_index(expert_axes) * num_local
    y = _experts(x, all_ids - first, weights, ops, activation, ragged_dot)
    if expert_axes:
        y = jax.lax.psum_scatter(y, expert_axes, scatter_dimension=0, tiled=True)
    if ops.shared is not None:
        y = y + _shared(ops, activation)
    return _agree(bad, y.astype(ops.x.dtype), manual_axes, platform)


def _dot(a, b):
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)


def _experts(x, local_ids, weights, ops: Operands, activation: Activation, ragged_dot):
    """Σ over the slots that chose one of my experts; float32 [N, H] for the N gathered tokens."""
    num_tokens, top_k = local_ids.shape
    num_local = ops.w_gate.shape[0]
    capacity = num_tokens * min(top_k, num_local)  # ids are distinct within a token

    flat = local_ids.reshape(-1)
    mine = (flat >= 0) & (flat < num_local)
    key = jnp.where(mine, flat, num_local)
    order = jnp.argsort(key, stable=True)[:capacity]
    expert, valid = key[order], mine[order]
    token = order // top_k
    group_sizes = jnp.zeros(num_local + 1, jnp.int32).at[key].add(1)[:num_local]

    def ragged(rows, w):
        try:
            return ragged_dot(
                rows, w.astype(rows.dtype), group_sizes, preferred_element_type=jnp.float32
            )
        except NotImplementedError as e:
            raise NotImplementedError(
                f'implementation="xla" cannot be vmapped like this ({e}): put the batch dims into '
                'the leading dims of x, or use implementation="fused".'
            ) from e

    def bias(b):
        return b.astype(jnp.float32)[jnp.minimum(expert, num_local - 1)]

    # Rows past the last group hold anything: clear them before and after, so that neither values
    # nor gradients see them.
    clear = lambda a: jnp.where(valid[:, None], a, 0)
    rows = clear(x[token])
    gate, up = ragged(rows, ops.w_gate), ragged(rows, ops.w_up)
    if ops.biases is not None:
        gate, up = gate + bias(ops.biases[0]), up + bias(ops.biases[1])
    hidden = activation(clear(gate), clear(up)).astype(x.dtype)
    out = ragged(clear(hidden), ops.w_down)
    if ops.biases is not None:
        out = out + bias(ops.biases[2])
    out = clear(out) * jnp.where(valid, weights.reshape(-1)[order], 0)[:, None]
    return jnp.zeros((num_tokens, x.shape[1]), jnp.float32).at[token].add(out)


def _shared(ops: Operands, activation: Activation) -> jax.Array:
    w_gate, w_up, w_down = ops.shared
    hidden = activation(_dot(ops.x, w_gate), _dot(ops.x, w_up)).astype(ops.x.dtype)
    out = _dot(hidden, w_down)
    return out if ops.shared_gate is None else ops.shared_gate[:, None] * out


def _bad_ids(ids: jax.Array, num_experts: int) -> jax.Array:
    """int32 [4]: (kind, token, slot, id) of the first bad id of this rank; kind 0 = none.

    Kind 1: outside [-1, num_experts); kind 2: repeated within its token.
    """
    num_tokens, top_k = ids.shape
    if num_tokens == 0:
        return jnp.zeros(4, jnp.int32) + 0 * ids.sum(dtype=jnp.int32)
    outside = (ids < -1) | (ids >= num_experts)
    earlier = jnp.tril(jnp.ones((top_k, top_k), bool), -1)
    same = ids[:, :, None] == ids[:, None, :]
    repeated = (same & earlier[None] & (ids >= 0)[:, :, None]).any(-1)
    kind = jnp.where(outside, 1, jnp.where(repeated, 2, 0)).reshape(-1)
    first = jnp.argmax(kind > 0)
    # Sums with one term, not indexing: XLA's CPU compiler makes a broken fusion of such slices in
    # some programs with constant ids ("Failed to translate module to LLVM IR", jaxlib 0.10, 0.11).
    there = jnp.arange(kind.size) == first
    pick = lambda a: jnp.sum(jnp.where(there, a, 0), dtype=jnp.int32)
    found = [pick(kind), first // top_k, first % top_k, pick(ids.reshape(-1))]
    return jnp.stack([jnp.asarray(f, jnp.int32) for f in found])


def _agree(bad, y, manual_axes, platform):
    """y, if no rank saw a bad id; else an error (CPU) or NaN, on all ranks alike.

    One rank that fails alone would leave the others waiting in the next collective.
    """
    if manual_axes:
        # Which rank reports does not matter, but all must report the same: the one with the
        # largest (kind, token, slot, id).
        index = jax.lax.axis_index(manual_axes)
        reporter = jnp.where(bad[0] > 0, index, -1)
        last = jax.lax.pmax(reporter, manual_axes)
        bad = jax.lax.psum(jnp.where((reporter == last) & (last >= 0), bad, 0), manual_axes)
    kind = ffi.check(bad)[0] if platform == "cpu" else bad[0]
    return jnp.where(kind == 0, y, jnp.nan)
