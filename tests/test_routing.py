"""Tests of `route`: against numpy oracles written from the model families' definitions, losses,
ties, properties, the update of the selection bias, and the errors.
"""

import functools
import itertools

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from routes import logits_of, route, softmax

import jax_mok


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def top(scores, k):
    """Ids of the k largest, best first, ties to the lower id."""
    return np.argsort(-scores, axis=-1, kind="stable")[..., :k]


# Oracles in float64: logits [T, E] -> (ids [T, k], weights [T, k]).


def mixtral(logits, k):
    """Softmax over the k largest logits."""
    ids = top(logits, k)
    return ids, softmax(np.take_along_axis(logits, ids, -1))


def qwen3(logits, k, norm_topk_prob):
    """Softmax over all experts, then the k largest, normalised or not."""
    probs = softmax(logits)
    ids = top(probs, k)
    weights = np.take_along_axis(probs, ids, -1)
    return ids, weights / weights.sum(-1, keepdims=True) if norm_topk_prob else weights


def gpt_oss(x, kernel, bias, k):
    """A router with a bias; the k largest logits, softmax over them."""
    return mixtral(x @ kernel + bias, k)


def deepseek_v3(logits, k, bias, groups, kept, scale, score=sigmoid):
    """Token by token as in the report: groups by their two best, experts by score + bias."""
    ids, weights = [], []
    for row in logits:
        s = score(row)
        biased = s + bias
        size = len(row) // groups
        worth = [sum(sorted(biased[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
        kept_groups = sorted(range(groups), key=lambda g: (-worth[g], g))[:kept]
        allowed = [e for e in range(len(row)) if e // size in kept_groups]
        chosen = sorted(allowed, key=lambda e: (-biased[e], e))[:k]
        ids.append(chosen)
        weights.append(scale * s[chosen] / s[chosen].sum())
    return np.array(ids), np.array(weights)


def llama4(logits):
    """The best expert, weighed with the sigmoid of its logit."""
    ids = top(logits, 1)
    return ids, sigmoid(np.take_along_axis(logits, ids, -1))


def assert_routing(routing, ids, weights, num_experts):
    np.testing.assert_array_equal(routing.expert_ids, ids)
    np.testing.assert_allclose(routing.expert_weights, weights, rtol=2e-6, atol=1e-12)
    np.testing.assert_array_equal(
        routing.counts, np.bincount(ids[ids >= 0].ravel(), minlength=num_experts)
    )
    assert routing.expert_ids.dtype == routing.counts.dtype == jnp.int32
    assert routing.expert_weights.dtype == jnp.float32
    assert routing.load_balance_loss.dtype == routing.z_loss.dtype == jnp.float32
    assert routing.load_balance_loss.shape == routing.z_loss.shape == ()


# Model families


@pytest.mark.parametrize("num_experts, k", [(8, 2), (8, 8), (1, 1), (60, 4), (40, 17), (128, 8)])
def test_mixtral_and_qwen3(num_experts, k):
    logits = logits_of(33, num_experts)
    routing = route(jnp.asarray(logits, jnp.float32), top_k=k)
    assert_routing(routing, *mixtral(logits, k), num_experts)
    assert_routing(routing, *qwen3(logits, k, norm_topk_prob=True), num_experts)


def test_unnormalised_softmax():
    logits = logits_of(33, 16)
    routing = route(jnp.asarray(logits, jnp.float32), top_k=4, normalize=False)
    assert_routing(routing, *qwen3(logits, 4, norm_topk_prob=False), 16)


def test_gpt_oss():
    x, kernel, bias = logits_of(33, 12), logits_of(12, 32, scale=0.5), logits_of(32, scale=0.5)
    logits = jnp.asarray(x @ kernel + bias, jnp.float32)
    assert_routing(route(logits, top_k=4), *gpt_oss(x, kernel, bias, 4), 32)


@pytest.mark.parametrize("groups, kept", [(8, 4), (4, 1), (1, 1), (32, 9)])
def test_deepseek_v3(groups, kept):
    logits, bias = logits_of(64, 32), logits_of(32, scale=0.3)
    routing = route(
        jnp.asarray(logits, jnp.float32),
        top_k=6,
        scoring="sigmoid",
        selection_bias=jnp.asarray(bias, jnp.float32),
        num_groups=groups,
        top_k_groups=kept,
        scale=2.5,
    )
    assert_routing(routing, *deepseek_v3(logits, 6, bias, groups, kept, 2.5), 32)
    np.testing.assert_allclose(routing.expert_weights.sum(-1), 2.5, rtol=1e-6)


def test_groups_without_bias():
    logits = logits_of(64, 24)
    for scoring, score in ("softmax", softmax), ("sigmoid", sigmoid):
        routing = route(
            jnp.asarray(logits, jnp.float32), top_k=3, scoring=scoring, num_groups=6, top_k_groups=2
        )
        assert_routing(routing, *deepseek_v3(logits, 3, 0.0, 6, 2, 1.0, score), 24)


def test_sqrt_softplus():
    logits, bias = logits_of(64, 24), logits_of(24, scale=0.3)
    routing = route(
        jnp.asarray(logits, jnp.float32),
        top_k=6,
        scoring="sqrt_softplus",
        selection_bias=jnp.asarray(bias, jnp.float32),
        scale=1.5,
    )
    score = lambda x: np.sqrt(np.log1p(np.exp(x)))
    assert_routing(routing, *deepseek_v3(logits, 6, bias, 1, 1, 1.5, score), 24)


def test_llama4():
    logits = logits_of(64, 16)
    routing = route(jnp.asarray(logits, jnp.float32), top_k=1, scoring="sigmoid", normalize=False)
    assert_routing(routing, *llama4(logits), 16)


def test_bias_changes_the_choice_and_not_the_weight():
    logits = jnp.array([[3.0, 2.0, 1.0, 0.0]])
    bias = jnp.array([0.0, 0.0, 0.0, 5.0])
    routing = route(logits, top_k=2, scoring="sigmoid", normalize=False, selection_bias=bias)
    assert routing.expert_ids.tolist() == [[3, 0]]
    np.testing.assert_allclose(routing.expert_weights, sigmoid(np.array([[0.0, 3.0]])), rtol=1e-6)


# Losses


def losses_by_definition(logits, ids, score):
    """Load balance and z-loss in float64, by loops over tokens and experts."""
    experts = logits.shape[-1]
    f = np.array([(ids == e).sum() for e in range(experts)]) / ids.size
    s = score(logits)
    p = np.mean([row / row.sum() for row in s], axis=0)
    z = np.mean([np.log(np.exp(row).sum()) ** 2 for row in logits])
    return experts * np.sum(f * p), z


@pytest.mark.parametrize(
    "scoring, score",
    [
        ("softmax", softmax),
        ("sigmoid", sigmoid),
        ("sqrt_softplus", lambda x: np.sqrt(np.log1p(np.exp(x)))),
    ],
)
def test_losses(scoring, score):
    logits = logits_of(50, 8)
    routing = route(jnp.asarray(logits, jnp.float32), top_k=2, scoring=scoring)
    balance, z = losses_by_definition(logits, np.asarray(routing.expert_ids), score)
    np.testing.assert_allclose(routing.load_balance_loss, balance, rtol=1e-5)
    np.testing.assert_allclose(routing.z_loss, z, rtol=1e-5)


def test_load_balance_loss_is_one_when_even_and_grows_to_e():
    even = jnp.asarray(np.eye(4, dtype=np.float32) * 1e-3)
    np.testing.assert_allclose(route(even, top_k=1).load_balance_loss, 1.0, rtol=1e-5)
    skewed = jnp.zeros((16, 4)).at[:, 2].set(50.0)
    np.testing.assert_allclose(route(skewed, top_k=1).load_balance_loss, 4.0, rtol=1e-5)


# Ties


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "scoring, dtype",
    [("softmax", jnp.float32), ("sigmoid", jnp.bfloat16), ("sqrt_softplus", jnp.float16)],
)
def test_ties_go_to_the_lower_id(scoring, dtype, bias):
    # With all optimisations: a vectorised exp must not tell equal logits apart by their place.
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        _test_ties(scoring, dtype, bias)
    finally:
        jax.config.update("jax_disable_most_optimizations", True)


def _test_ties(scoring, dtype, bias):
    # Few distinct values: every token has ties, also at the edge of the top k.
    values = np.round(logits_of(200, 37)) * 0.37
    settings = {"selection_bias": np.zeros(37, np.float32)} if bias else {}
    routing = route(jnp.asarray(values, dtype), top_k=6, scoring=scoring, **settings)
    np.testing.assert_array_equal(routing.expert_ids, top(values, 6))


def test_all_equal_and_signed_zeros():
    assert route(jnp.zeros((1, 9)), top_k=3).expert_ids.tolist() == [[0, 1, 2]]
    signed = jnp.array([[-0.0, 0.0, -0.0, 0.0]])
    assert route(signed, top_k=4).expert_ids.tolist() == [[0, 1, 2, 3]]


def test_ties_between_groups():
    routing = route(jnp.zeros((1, 12)), top_k=4, scoring="sigmoid", num_groups=4, top_k_groups=2)
    assert routing.expert_ids.tolist() == [[0, 1, 2, 3]]
    assert set(routing.expert_ids[0].tolist()) <= set(range(6))


def test_bf16_logits_are_scored_in_float32():
    logits = jnp.asarray(logits_of(40, 16), jnp.bfloat16)
    a = route(logits, top_k=4, scoring="sigmoid")
    b = route(logits.astype(jnp.float32), top_k=4, scoring="sigmoid")
    for x, y in zip(a, b):
        np.testing.assert_array_equal(x, y)


# Properties


@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
@hypothesis.given(
    logits=hnp.arrays(
        np.float32,
        (6, 12),
        elements=st.one_of(
            st.floats(width=32, allow_subnormal=False),
            st.sampled_from([0.0, -0.0, 1.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 88.8, 3e38]),
        ),
    ),
    settings=st.sampled_from(
        [
            {"top_k": 4},
            {"top_k": 12, "normalize": False},
            {"top_k": 1, "scoring": "sigmoid", "normalize": False},
            {"top_k": 12, "scoring": "sqrt_softplus"},
            {"top_k": 4, "scoring": "sigmoid", "biased": True},
            {"top_k": 5, "scoring": "sigmoid", "num_groups": 4, "top_k_groups": 2},
        ]
    ),
)
def test_ids_are_distinct_in_range_and_deterministic(logits, settings):
    settings = dict(settings)
    k, grouped, biased = settings["top_k"], "num_groups" in settings, settings.pop("biased", False)
    if biased:
        settings["selection_bias"] = np.linspace(0.5, -0.5, 12, dtype=np.float32)
    run = functools.partial(route, logits, **settings)
    routing = run()
    for a, b in zip(routing, run()):
        np.testing.assert_array_equal(a, b)
    ids, weights = np.asarray(routing.expert_ids), np.asarray(routing.expert_weights)
    assert ((ids >= -1) & (ids < 12)).all()
    assert np.isfinite(weights).all() and (weights >= 0).all() and (weights[ids < 0] == 0).all()
    np.testing.assert_array_equal(routing.counts, np.bincount(ids[ids >= 0], minlength=12))
    assert np.isfinite(routing.load_balance_loss)
    for row, logit in zip(ids, logits):
        used = row[row >= 0].tolist()
        assert len(set(used)) == len(used)
        assert (row[len(used) :] == -1).all()
        broken = np.isnan(logit).any() or (logit == np.inf).any()
        usable = 0 if broken else int((logit > -np.inf).sum())
        assert len(used) <= min(k, usable)
        if not grouped:
            assert len(used) == min(k, usable)
        if not grouped and not biased and not broken:
            order = top(np.where(logit == 0, 0.0, logit), 12)
            assert used == [e for e in order if logit[e] > -np.inf][:k]


# Selection bias update


def test_update_selection_bias():
    bias = jnp.array([0.0, 0.5, -0.5, 0.0])
    new = jax_mok.update_selection_bias(bias, jnp.array([10, 2, 4, 4], jnp.int32), 0.1)
    np.testing.assert_allclose(new, [-0.1, 0.6, -0.4, 0.1], rtol=1e-6)
    even = jax_mok.update_selection_bias(bias, jnp.full(4, 7, jnp.int32), 0.1)
    np.testing.assert_array_equal(even, bias)
    # A mean that is not a whole number: counts on both sides of it.
    new = jax_mok.update_selection_bias(jnp.zeros(3), jnp.array([1, 1, 2]), 1.0)
    np.testing.assert_array_equal(new, [1, 1, -1])
    stacked = jax_mok.update_selection_bias(jnp.zeros((2, 2)), jnp.array([[3, 1], [1, 1]]), 1.0)
    np.testing.assert_array_equal(stacked, [[-1, 1], [0, 0]])
    floating = jax_mok.update_selection_bias(jnp.zeros(3), jnp.array([1.0, 1.0, 2.0]), 1.0)
    np.testing.assert_array_equal(floating, [1, 1, -1])


def test_update_selection_bias_is_exact_for_large_counts():
    counts = jnp.array(
        [2**24 + 1, 2**24, 2**24, 2**24], jnp.int32
    )  # float32 cannot tell them apart
    new = jax_mok.update_selection_bias(jnp.zeros(4), counts, 1.0)
    np.testing.assert_array_equal(new, [-1, 1, 1, 1])


def test_update_selection_bias_balances_a_skewed_router():
    base = logits_of(256, 8, scale=1.0) + np.linspace(2, -2, 8)
    logits = jnp.asarray(base, jnp.float32)

    @jax.jit
    def step(bias):
        r = route(logits, top_k=2, scoring="sigmoid", selection_bias=bias)
        return jax_mok.update_selection_bias(bias, r.counts, 1e-2), r.counts

    bias = jnp.zeros(8)
    first = None
    for _ in range(100):
        bias, counts = step(bias)
        first = counts if first is None else first
    assert first.max() > 1.8 * first.mean()
    assert counts.max() < 1.2 * counts.mean()


# Errors

E8 = np.zeros((4, 8), np.float32)


@pytest.mark.parametrize(
    "logits, settings, error, words",
    [
        (np.float32(0), {"top_k": 1}, ValueError, ["logits", "[..., E]", "()"]),
        (np.zeros((4, 0), np.float32), {"top_k": 1}, ValueError, ["logits", "(4, 0)"]),
        (np.zeros((4, 8), np.int32), {"top_k": 1}, TypeError, ["logits", "int32"]),
        (E8, {"top_k": 9}, ValueError, ["top_k", "9", "8"]),
        (E8, {"top_k": 0}, ValueError, ["top_k", "0", "1"]),
        (E8, {"top_k": -1}, ValueError, ["top_k", "-1"]),
        (E8, {"top_k": 2.0}, TypeError, ["top_k", "2.0", "integer"]),
        (E8, {"top_k": True}, TypeError, ["top_k", "True"]),
        (E8, {"top_k": 2, "scoring": "relu"}, ValueError, ["scoring", "'relu'", "'sigmoid'"]),
        (E8, {"top_k": 2, "num_groups": 3, "top_k_groups": 1}, ValueError, ["num_groups", "3"]),
        (E8, {"top_k": 2, "num_groups": 0, "top_k_groups": 1}, ValueError, ["num_groups", "0"]),
        (E8, {"top_k": 2, "num_groups": 4, "top_k_groups": 5}, ValueError, ["top_k_groups", "5"]),
        (E8, {"top_k": 2, "num_groups": 4, "top_k_groups": 0}, ValueError, ["top_k_groups", "0"]),
        (E8, {"top_k": 3, "num_groups": 4, "top_k_groups": 1}, ValueError, ["top_k", "3", "2"]),
        (E8, {"top_k": 2, "num_groups": 4}, ValueError, ["top_k_groups", "together"]),
        (E8, {"top_k": 2, "selection_bias": np.zeros(7)}, ValueError, ["selection_bias", "(7,)"]),
        (E8, {"top_k": 2, "selection_bias": 0.0}, ValueError, ["selection_bias", "()", "(8,)"]),
        (E8, {"top_k": 2, "token_mask": np.ones(4)}, ValueError, ["token_mask", "bool"]),
        (E8, {"top_k": 2, "token_mask": np.ones(3, bool)}, ValueError, ["token_mask", "(3,)"]),
    ],
)
def test_errors(logits, settings, error, words):
    for f in (jax_mok.route, jax.jit(jax_mok.route, static_argnames=("top_k", "scoring"))):
        if f is not jax_mok.route and set(settings) - {"top_k", "scoring"}:
            continue
        with pytest.raises(error) as info:
            f(logits, **settings)
        for word in ["jax_mok.route", *words]:
            assert word in str(info.value)


def test_errors_of_update_selection_bias():
    with pytest.raises(ValueError, match=r"\(4,\) and \(3,\)"):
        jax_mok.update_selection_bias(jnp.zeros(4), jnp.zeros(3, jnp.int32), 0.1)
    with pytest.raises(TypeError, match="int32"):
        jax_mok.update_selection_bias(jnp.zeros(4, jnp.int32), jnp.zeros(4, jnp.int32), 0.1)


def test_numpy_integers_are_fine():
    a = route(jnp.asarray(E8), top_k=np.int64(2), num_groups=np.int32(4), top_k_groups=2)
    assert list(itertools.chain(*a.expert_ids.tolist())) == [0, 1] * 4
