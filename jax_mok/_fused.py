"""The fused implementation as one differentiable function of local arrays: a custom call forward,
one backward. Both are pure, so that remat, scan, CSE and dead-code elimination see what they need.
"""

import functools

import jax
from jax.ad_checkpoint import checkpoint_name

from jax_mok import ffi
from jax_mok.ffi import CallSpec, Operands

# Names for `jax.checkpoint_policies.save_only_these_names`: with both saved, a rematerialised layer
# does not run its forward call again.
OUTPUT_NAME = "jax_mok_output"
RESIDUAL_NAME = "jax_mok_gate_up"


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def fused(spec: CallSpec, topology: jax.Array, ids: jax.Array, ops: Operands) -> jax.Array:
    """y [T, H] of one rank.

    Args:
      spec: static facts.
      topology: int32 [4] = (rank in the expert group, index of the group, index of the device in
        the meeting, index of the meeting).
      ids: int32 [T, k].
      ops: the differentiable operands; the expert weights may be float32 where x is not: they are
        cast for the call, and their gradients come back without rounding.
    """
    return ffi.forward(spec, topology, ids, ops.with_weights_as_x(), save=False)[0]


def _forward(spec, topology, ids, ops):
    save = spec.residuals == "save"
    y, saved = ffi.forward(spec, topology, ids, ops.with_weights_as_x(), save=save)
    y = checkpoint_name(y, OUTPUT_NAME)
    saved = checkpoint_name(saved, RESIDUAL_NAME) if save else None
    return y, (topology, ids, ops, saved)


def _backward(spec, residuals, dy):
    topology, ids, ops, saved = residuals
    grads = ffi.backward(
        spec, topology, dy, ids, ops.with_weights_as_x(), saved, weight_grad_dtype=ops.w_gate.dtype
    )
    return None, None, grads


fused.defvjp(_forward, _backward)
