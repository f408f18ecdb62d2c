"""What the tests of `route` share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jax_mok


@functools.lru_cache(None)
def _compiled(static):
    return jax.jit(lambda logits, arrays: jax_mok.route(logits, **dict(static), **arrays))


def route(logits, **settings):
    """`jax_mok.route` under jit, compiled once per settings and shapes."""
    arrays = {n: settings.pop(n) for n in ("selection_bias", "token_mask") if n in settings}
    return _compiled(tuple(sorted(settings.items())))(jnp.asarray(logits), arrays)


def logits_of(*shape, scale=2.0):
    """Random logits, the same at every call with this shape."""
    return np.random.default_rng(shape).normal(size=shape) * scale


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)
