"""Routing: from router logits to expert ids, their weights, and the statistics that training needs.

Pure JAX, no collectives unless `axis_name` asks for them, and neither gathers nor scatters, so that
it partitions along the tokens under `jit` and works under `vmap`, `grad` and `shard_map` as it is.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

__all__ = ["EXPERT_IDS_NAME", "Routing", "route", "update_selection_bias"]

#: `expert_ids` carries this name: `jax.checkpoint_policies.save_only_these_names(EXPERT_IDS_NAME)`
#: keeps the choice, so that rematerialisation can never take another one.
EXPERT_IDS_NAME = "jax_mok_expert_ids"

_SCORINGS = ("softmax", "sigmoid", "sqrt_softplus")

# Up to this top_k, one pass over the keys per slot is faster than sorting them.
_MAX_PASSES = 16

# Beyond it the square in the z-loss overflows, and 0 times its derivative is NaN.
_MAX_Z = 1e16


class Routing(NamedTuple):
    """What `route` returns.

    Attributes:
      expert_ids: int32 [..., k]. Distinct in a token, best first; -1 where a slot is unused.
      expert_weights: float32 [..., k]. 0 where the id is -1. Differentiable.
      counts: int32 [E]. How many slots went to each expert.
      load_balance_loss: float32 scalar. Differentiable; 1 when the load is even.
      z_loss: float32 scalar. Differentiable.
    """

    expert_ids: jax.Array
    expert_weights: jax.Array
    counts: jax.Array
    load_balance_loss: jax.Array
    z_loss: jax.Array


def route(
    logits: jax.Array,
    *,
    top_k: int,
    scoring: str = "softmax",
    normalize: bool = True,
    selection_bias: jax.Array | None = None,
    num_groups: int | None = None,
    top_k_groups: int | None = None,
    scale: float = 1.0,
    token_mask: jax.Array | None = None,
    axis_name: str | tuple[str, ...] | None = None,
) -> Routing:
    """Chooses `top_k` experts for every token.

    With logits l [E] of one token, everything in float32:

    * score `s`: `softmax(l)`, `sigmoid(l)`, or `sqrt(softplus(l))`;
    * choice: the `top_k` largest `s + selection_bias`, ties to the lower id. With groups, only
      experts of the `top_k_groups` best groups can be chosen; groups are runs of `E / num_groups`
      neighbouring experts, and a group's score is the sum of its two largest `s + selection_bias`
      (DeepSeek-V3, arXiv:2412.19437, section 2.1.2). Without a bias the logits themselves are
      compared, which is the same choice and stays exact where scores saturate;
    * weight: `scale * s`, divided by the sum of the chosen scores if `normalize`. The bias is not
      in it (arXiv:2408.15664).

    | model | arguments |
    |---|---|
    | Mixtral (softmax over the top-k logits), Qwen3 (`norm_topk_prob`) | the defaults |
    | OLMoE, Qwen2-MoE (`norm_topk_prob=False`) | `normalize=False` |
    | gpt-oss (softmax over the chosen logits) | the defaults; its router has a bias on the logits |
    | DeepSeek-V3 | `scoring="sigmoid", selection_bias=b, num_groups=8, top_k_groups=4, scale=2.5` |
    | Kimi-K2, GLM-4.5 | as DeepSeek-V3 without groups, with their own `scale` |
    | DeepSeek-V4 | `scoring="sqrt_softplus", selection_bias=b` and its `scale` |
    | Llama-4 | `top_k=1, scoring="sigmoid", normalize=False` (it weighs the expert's input) |

    The losses, means over the tokens that take part:

    * `load_balance_loss = E * sum_e f_e * P_e` (GShard, arXiv:2006.16668; Switch Transformer,
      arXiv:2101.03961, eq. 4), where f_e is the share of all used slots that went to expert e, and
      P_e the mean of `s_e / sum(s)`. It is 1 when the load is even, whatever `top_k`; definitions
      that count shares of tokens rather than of slots are `top_k` times as large;
    * `z_loss = mean(logsumexp(l) ** 2)` (ST-MoE, arXiv:2202.08906, eq. 5).

    What is not a number never becomes an id. A token whose logits hold a NaN or +inf, or are all
    -inf, is masked: ids -1, weights 0, no part in counts and losses, gradient 0. A single logit
    of -inf takes that expert out for that token; if fewer than `top_k` experts are left, the last
    slots are unused (-1). A `selection_bias` of -inf or NaN takes an expert out for
    all tokens.

    Args:
      logits: [..., E], any float dtype.
      top_k: experts per token, 1 to E.
      scoring: "softmax", "sigmoid" or "sqrt_softplus".
      normalize: whether the weights of a token sum to `scale`.
      selection_bias: None or [E]; no gradient flows to it, see `update_selection_bias`.
      num_groups, top_k_groups: both or neither.
      scale: factor on the weights.
      token_mask: None or bool [...]; False marks padding, which is masked as above.
      axis_name: inside `shard_map` or `vmap(axis_name=...)`, the axis or axes that hold further
        tokens: counts and both losses are then those of all tokens together. Under plain `jit`
        they already are.

    Returns:
      A `Routing`.

    Raises:
      ValueError, TypeError: at trace time; the message names the argument.

    Example:
      >>> logits = jnp.array([[1.0, 3.0, 2.0, 0.0]])
      >>> r = jax_mok.route(logits, top_k=2)
      >>> r.expert_ids, r.expert_weights
      ([[1, 2]], [[0.731, 0.269]])
    """
    logits = jnp.asarray(logits)
    top_k, group_shape = _check(
        logits, top_k, scoring, selection_bias, num_groups, top_k_groups, token_mask
    )
    return _route(
        logits,
        selection_bias,
        token_mask,
        top_k=top_k,
        scoring=scoring,
        normalize=bool(normalize),
        group_shape=group_shape,
        top_k_groups=None if group_shape is None else operator.index(top_k_groups),
        scale=scale,
        axis_name=tuple(axis_name) if isinstance(axis_name, list) else axis_name,
    )


# One compilation where `route` is called outside of jit; inlined where it is called inside.
@functools.partial(
    jax.jit,
    static_argnames=("top_k", "scoring", "normalize", "group_shape", "top_k_groups", "axis_name"),
    inline=True,
)
def _route(
    logits,
    selection_bias,
    token_mask,
    *,
    top_k,
    scoring,
    normalize,
    group_shape,
    top_k_groups,
    scale,
    axis_name,
) -> Routing:
    """`route` with checked arguments; `group_shape` is (groups, experts per group) or None."""
    num_experts = logits.shape[-1]
    logits = logits.astype(jnp.float32)

    # `token_ok`: tokens that take part; `usable`: experts that such a token may choose. Unusable
    # entries become 0 before any arithmetic, so that no NaN can come back through a derivative.
    undefined = jnp.any(jnp.isnan(logits) | (logits == jnp.inf), axis=-1)
    token_ok = ~undefined & jnp.any(logits > -jnp.inf, axis=-1)
    if token_mask is not None:
        token_ok &= token_mask
    usable = token_ok[..., None] & (logits > -jnp.inf)
    logits = jnp.where(usable, logits, 0.0)

    log_scores = _log_scores(logits, scoring)
    shares = _masked_softmax(log_scores, usable)
    scores = shares if scoring == "softmax" else jnp.exp(log_scores)

    key = logits
    if selection_bias is not None:
        bias = jnp.asarray(selection_bias, jnp.float32)
        key = scores + jnp.expand_dims(bias, range(logits.ndim - 1))
    if group_shape is not None:
        group_key = scores if selection_bias is None else key
        usable_here = usable & _in_best_groups(group_key, usable, group_shape, top_k_groups)
    else:
        usable_here = usable
    ids, slot_ok = _choose(key, usable_here, top_k)

    if normalize:
        # In logarithms: it cannot become 0 / 0 when all chosen scores are tiny.
        weights = _masked_softmax(_pick(ids, log_scores), slot_ok)
    else:
        weights = jnp.where(slot_ok, _pick(ids, scores), 0.0)
    weights = weights * jnp.asarray(scale, jnp.float32)

    tokens = tuple(range(logits.ndim - 1))
    totals = dict(
        counts=jnp.sum(_hits(ids, num_experts), axis=tokens, dtype=jnp.int32),
        shares=jnp.sum(shares, axis=tokens),
        num_tokens=jnp.sum(token_ok, dtype=jnp.int32),
        z=jnp.sum(jnp.clip(_masked_logsumexp(logits, usable), -_MAX_Z, _MAX_Z) ** 2),
    )
    if axis_name is not None:
        totals = jax.lax.psum(totals, axis_name)
    counts = totals["counts"]
    num_tokens = jnp.maximum(totals["num_tokens"], 1).astype(jnp.float32)
    num_slots = jnp.maximum(jnp.sum(counts), 1).astype(jnp.float32)
    balance = num_experts * jnp.sum(
        (counts.astype(jnp.float32) / num_slots) * (totals["shares"] / num_tokens)
    )
    return Routing(ids, weights, counts, balance, totals["z"] / num_tokens)


def update_selection_bias(bias: jax.Array, counts: jax.Array, rate: float) -> jax.Array:
    """One step of load balancing without a loss: `bias + rate * sign(mean(counts) - counts)`.

    Raises the bias of experts that got fewer tokens than the mean and lowers that of the others
    (arXiv:2408.15664, algorithm 1). To be called once per optimizer step, outside of the gradient,
    with the counts of the whole batch.

    Args:
      bias: [..., E], e.g. one row per layer.
      counts: int or float [..., E], as `Routing.counts`.
      rate: step, 1e-3 in DeepSeek-V3.

    Returns:
      The new bias, of the dtype and shape of `bias`.
    """
    bias, counts = jnp.asarray(bias), jnp.asarray(counts)
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        raise TypeError(f"jax_mok.update_selection_bias: bias must be floating, got {bias.dtype}")
    if bias.ndim < 1 or bias.shape != counts.shape:
        raise ValueError(
            "jax_mok.update_selection_bias: bias and counts must have the same shape [..., E], "
            f"got {bias.shape} and {counts.shape}"
        )
    if jnp.issubdtype(counts.dtype, jnp.integer):
        # Exact also where float32 cannot hold the counts: the mean is `whole + rest / E`.
        total = jnp.sum(counts, axis=-1, keepdims=True, dtype=counts.dtype)
        whole, rest = total // counts.shape[-1], total % counts.shape[-1]
        above = (whole == counts) & (rest > 0)
        direction = jnp.sign(whole - counts) + above.astype(counts.dtype)
    else:
        direction = jnp.sign(jnp.mean(counts, axis=-1, keepdims=True) - counts)
    return bias + jnp.asarray(rate, bias.dtype) * direction.astype(bias.dtype)


def _log_scores(logits: jax.Array, scoring: str) -> jax.Array:
    """log(score), for softmax up to a term that is the same for all experts of a token."""
    if scoring == "softmax":
        return logits
    if scoring == "sigmoid":
        return jax.nn.log_sigmoid(logits)
    # log(softplus(l)) is l to within float32 below -20, where softplus itself underflows later on.
    small = logits < -20.0
    softplus = jax.nn.softplus(jnp.where(small, 0.0, logits))
    return 0.5 * jnp.where(small, logits, jnp.log(softplus))


def _masked_softmax(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Softmax over the entries of the last axis where `mask`; 0 elsewhere, also in empty rows."""
    top = jax.lax.stop_gradient(x)
    top = jnp.max(top, axis=-1, keepdims=True, where=mask, initial=-jnp.inf)
    e = jnp.where(mask, jnp.exp(jnp.where(mask, x - jnp.where(mask, top, 0.0), 0.0)), 0.0)
    total = jnp.sum(e, axis=-1, keepdims=True)
    return e / jnp.where(total > 0, total, 1.0)


def _masked_logsumexp(x: jax.Array, mask: jax.Array) -> jax.Array:
    """log(sum(exp(x))) over the entries of the last axis where `mask`; 0 for empty rows."""
    top = jnp.max(jax.lax.stop_gradient(x), axis=-1, where=mask, initial=-jnp.inf)
    top = jnp.where(jnp.any(mask, axis=-1), top, 0.0)
    e = jnp.where(mask, jnp.exp(jnp.where(mask, x - top[..., None], 0.0)), 0.0)
    total = jnp.sum(e, axis=-1)
    return top + jnp.log(jnp.where(total > 0, total, 1.0))


def _pick(ids: jax.Array, values: jax.Array) -> jax.Array:
    """The values [..., E] of the experts `ids`, [..., k]: sums with one term, hence exact.

    Not a gather, whose derivative is a scatter: slow where determinism is asked of the compiler.
    """
    index = _expert_index(values.shape[-1], ids.ndim)
    if ids.shape[-1] > _MAX_PASSES:
        hit = ids[..., None] == index[..., None, :]
        return jnp.sum(jnp.where(hit, values[..., None, :], 0.0), axis=-1)
    # Slot by slot, so that nothing of size [..., k, E] comes into being.
    slots = (ids[..., j : j + 1] == index for j in range(ids.shape[-1]))
    return jnp.stack([jnp.sum(jnp.where(hit, values, 0.0), axis=-1) for hit in slots], axis=-1)


def _hits(ids: jax.Array, num_experts: int) -> jax.Array:
    """How often (0 or 1) each expert is among the `ids` of a token: int32 [..., E]."""
    index = _expert_index(num_experts, ids.ndim)
    if ids.shape[-1] > _MAX_PASSES:
        return jnp.sum(ids[..., None] == index[..., None, :], axis=-2, dtype=jnp.int32)
    hit = ids[..., :1] == index
    for j in range(1, ids.shape[-1]):
        hit |= ids[..., j : j + 1] == index
    return hit.astype(jnp.int32)


def _expert_index(num_experts: int, ndim: int) -> jax.Array:
    """0, 1, … along the last of `ndim` dims: some models forbid JAX to add dims by itself."""
    return jax.lax.broadcasted_iota(jnp.int32, (1,) * (ndim - 1) + (num_experts,), ndim - 1)


def _choose(key: jax.Array, usable: jax.Array, top_k: int) -> tuple[jax.Array, jax.Array]:
    """Ids int32 [..., k] of the largest keys among the usable ones, and which slots are used."""
    best, ids = _largest(jnp.where(usable, key, -jnp.inf), top_k)
    slot_ok = best > -jnp.inf
    ids = jnp.where(slot_ok, ids, -1)
    return checkpoint_name(ids, EXPERT_IDS_NAME), slot_ok


def _largest(key: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k largest of the last axis and where they are, ties to the lower index.

    Not `jax.lax.top_k`: that gathers all tokens to every device when they are sharded, and does
    not promise an order of ties on every backend.
    """
    # -0 and +0 must be a tie (adding 0 would be folded away), and NaN must lose.
    key = jax.lax.stop_gradient(key)
    key = jnp.where(key == 0, 0.0, jnp.where(key > -jnp.inf, key, -jnp.inf))
    axis = key.ndim - 1
    index = jax.lax.broadcasted_iota(jnp.int32, key.shape, axis)
    if k > _MAX_PASSES:
        key, index = jax.lax.sort((-key, index), dimension=axis, is_stable=True, num_keys=1)
        return -key[..., :k], index[..., :k]
    values, ids = [], []
    for _ in range(k):
        # Two plain reductions; compilers make slow code of an argmax.
        best = jnp.max(key, axis=-1, keepdims=True)
        first = jnp.min(jnp.where(key == best, index, key.shape[-1]), axis=-1, keepdims=True)
        values.append(best)
        ids.append(first)
        key = jnp.where(index == first, -jnp.inf, key)
    return jnp.concatenate(values, axis=-1), jnp.concatenate(ids, axis=-1)


def _in_best_groups(
    key: jax.Array, usable: jax.Array, group_shape: tuple[int, int], top_k_groups: int
) -> jax.Array:
    """Bool [..., E]: whether an expert belongs to one of the best groups of its token."""
    num_groups, group_size = group_shape
    key = jnp.where(usable, key, -jnp.inf)
    best, _ = _largest(key.reshape(*key.shape[:-1], *group_shape), min(2, group_size))
    # A group with one usable expert is worth that one; a group with none is not chosen.
    group_key = best[..., 0] + jnp.sum(jnp.where(best > -jnp.inf, best, 0.0)[..., 1:], axis=-1)
    ids, _ = _choose(group_key, group_key > -jnp.inf, top_k_groups)
    in_group = _hits(ids, num_groups) > 0
    return jnp.repeat(in_group, group_size, axis=-1)


def _check(
    logits: jax.Array,
    top_k: Any,
    scoring: str,
    selection_bias: Any,
    num_groups: Any,
    top_k_groups: Any,
    token_mask: Any,
) -> tuple[int, tuple[int, int] | None]:
    """Raises what `route` promises to raise; returns top_k and (groups, experts per group)."""
    if logits.ndim < 1 or logits.shape[-1] < 1:
        raise ValueError(
            f"jax_mok.route: logits must have shape [..., E] with E >= 1, got {logits.shape}"
        )
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise TypeError(f"jax_mok.route: logits must be floating, got {logits.dtype}")
    num_experts = logits.shape[-1]
    if scoring not in _SCORINGS:
        allowed = ", ".join(map(repr, _SCORINGS))
        raise ValueError(f"jax_mok.route: scoring must be one of {allowed}, got {scoring!r}")
    top_k = _integer("top_k", top_k)
    if not 1 <= top_k <= num_experts:
        raise ValueError(
            f"jax_mok.route: top_k must be from 1 to the number of experts, {num_experts} "
            f"(logits have shape {logits.shape}), got {top_k}"
        )
    if selection_bias is not None and np.shape(selection_bias) != (num_experts,):
        raise ValueError(
            f"jax_mok.route: selection_bias must have shape ({num_experts},), one value per "
            f"expert, got {np.shape(selection_bias)}"
        )
    if token_mask is not None:
        token_mask = jnp.asarray(token_mask)
        if token_mask.dtype != jnp.bool_ or token_mask.shape != logits.shape[:-1]:
            raise ValueError(
                f"jax_mok.route: token_mask must be bool of shape {logits.shape[:-1]}, one per "
                f"token, got {token_mask.dtype} of shape {token_mask.shape}"
            )
    if (num_groups is None) != (top_k_groups is None):
        raise ValueError(
            "jax_mok.route: num_groups and top_k_groups must be given together, got "
            f"num_groups={num_groups} and top_k_groups={top_k_groups}"
        )
    if num_groups is None:
        return top_k, None
    num_groups = _integer("num_groups", num_groups)
    top_k_groups = _integer("top_k_groups", top_k_groups)
    if num_groups < 1 or num_experts % num_groups:
        raise ValueError(
            f"jax_mok.route: num_groups must divide the number of experts, {num_experts}, "
            f"got {num_groups}"
        )
    if not 1 <= top_k_groups <= num_groups:
        raise ValueError(
            f"jax_mok.route: top_k_groups must be from 1 to num_groups, {num_groups}, "
            f"got {top_k_groups}"
        )
    group_size = num_experts // num_groups
    if top_k > top_k_groups * group_size:
        raise ValueError(
            f"jax_mok.route: top_k must be at most top_k_groups * E / num_groups = "
            f"{top_k_groups * group_size}, the experts of the chosen groups, got {top_k}"
        )
    return top_k, (num_groups, group_size)


def _integer(name: str, value: Any) -> int:
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"jax_mok.route: {name} must be an integer, got {value!r}")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"jax_mok.route: {name} must be an integer, got {value!r}") from None
