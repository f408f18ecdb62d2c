"""Tests of `route`: non-finite logits, gradients, transformations, sharding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from routes import logits_of, route, softmax

import jax_mok

# What is not a number

SETTINGS = [
    {},
    {"normalize": False},
    {"scoring": "sigmoid"},
    {"scoring": "sigmoid", "normalize": False, "scale": 2.5},
    {"scoring": "sqrt_softplus"},
    {"scoring": "sigmoid", "selection_bias": np.linspace(-1, 1, 8), "scale": 2.5},
    {"num_groups": 4, "top_k_groups": 2},
    {
        "scoring": "sigmoid",
        "selection_bias": np.linspace(1, -1, 8),
        "num_groups": 4,
        "top_k_groups": 2,
    },
]


MIX = logits_of(9, 3, scale=1.0).astype(np.float32)


def total(logits, mix=MIX, mask=None, coefficients=(0.3, 0.1), **settings):
    """A scalar that depends on every differentiable output, and the routing."""
    r = jax_mok.route(logits, top_k=3, token_mask=mask, **settings)
    balance, z = coefficients
    return jnp.sum(mix * r.expert_weights) + balance * r.load_balance_loss + z * r.z_loss, r


@functools.lru_cache(None)
def _value_and_grad(index):
    # One executable per setting, for all tests of 9 tokens and 8 experts.
    return jax.jit(jax.value_and_grad(functools.partial(total, **SETTINGS[index]), has_aux=True))


def evaluate(index, logits, mask=None, coefficients=(0.3, 0.1)):
    """(total, routing, gradient of total) with SETTINGS[index]."""
    logits = np.asarray(logits, np.float32)
    mask = np.ones(len(logits), bool) if mask is None else mask
    (value, routing), grad = _value_and_grad(index)(logits, MIX[: len(logits)], mask, coefficients)
    return value, routing, grad


every_setting = pytest.mark.parametrize("index", range(len(SETTINGS)))


@every_setting
def test_token_mask(index):
    logits = logits_of(9, 8)
    mask = np.array([1, 0, 1, 1, 0, 0, 1, 1, 1], bool)
    value, routing, grad = evaluate(index, np.where(mask[:, None], logits, np.nan), mask)
    np.testing.assert_array_equal(routing.expert_ids[~mask], -1)
    np.testing.assert_array_equal(routing.expert_weights[~mask], 0)
    np.testing.assert_array_equal(grad[~mask], 0)
    assert (np.asarray(routing.expert_ids)[mask] >= 0).all() and routing.counts.sum() == 3 * 6
    # Whatever else is in the padding changes nothing.
    other = evaluate(index, np.where(mask[:, None], logits, 9.0), mask)
    jax.tree.map(np.testing.assert_array_equal, other, (value, routing, grad))


def test_masked_tokens_are_as_if_they_were_not_there():
    logits, mask = logits_of(9, 8).astype(np.float32), np.arange(9) % 3 > 0
    (value, routing), grad = _value_and_grad(5)(logits, MIX, mask, (0.3, 0.1))
    (clean_value, clean), clean_grad = _value_and_grad(5)(
        logits[mask], MIX[mask], np.ones(6, bool), (0.3, 0.1)
    )
    np.testing.assert_array_equal(routing.expert_ids[mask], clean.expert_ids)
    np.testing.assert_array_equal(routing.counts, clean.counts)
    for a, b in [
        (routing.expert_weights[mask], clean.expert_weights),
        (grad[mask], clean_grad),
        (value, clean_value),
        (routing.load_balance_loss, clean.load_balance_loss),
        (routing.z_loss, clean.z_loss),
    ]:
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


@every_setting
def test_a_token_with_nan_is_masked_and_nothing_else(index):
    logits = logits_of(9, 8)
    mask = np.array([1, 0, 0, 1, 0, 0, 0, 1, 1], bool)
    broken = logits.copy()
    broken[1, 3], broken[2, 0], broken[4] = np.nan, -np.nan, np.nan
    broken[5, 7], broken[6] = np.inf, np.inf
    for got, masked in zip(evaluate(index, broken), evaluate(index, logits, mask)):
        jax.tree.map(np.testing.assert_array_equal, got, masked)


@every_setting
def test_huge_logits_give_finite_weights_and_gradients(index):
    for size in (200.0, 1e4, 3e38):
        logits = np.sign(logits_of(9, 8)) * size
        _, routing, grad = evaluate(index, logits, coefficients=(0.3, 0.0))
        assert np.isfinite(routing.expert_weights).all()
        assert np.isfinite(routing.load_balance_loss)
        assert np.isfinite(grad).all()


@every_setting
def test_gradient_against_finite_differences(index):
    # The counts in the load-balance loss are held fixed by its definition; a perturbation that does
    # not change the choice leaves them.
    order = np.argsort(logits_of(9, 8), axis=-1)
    logits, direction, h = 0.45 * order - 1.5, logits_of(8, 9, scale=1.0).T, 2e-3
    _, here, grad = evaluate(index, logits)
    ahead, back = (evaluate(index, logits + s * h * direction) for s in (1, -1))
    for side in (ahead, back):
        np.testing.assert_array_equal(here.expert_ids, side[1].expert_ids)
    slope = (ahead[0] - back[0]) / (2 * h)
    np.testing.assert_allclose(np.sum(grad * direction), slope, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("index", [i for i, s in enumerate(SETTINGS) if "num_groups" not in s])
def test_minus_infinity_takes_an_expert_out(index):
    settings = SETTINGS[index]
    logits = logits_of(9, 8)
    logits[:, 5] = -np.inf
    logits[0, :6] = -np.inf  # two experts left for three slots
    _, routing, grad = evaluate(index, logits)
    ids = np.asarray(routing.expert_ids)
    assert 5 not in ids and routing.counts[5] == 0
    assert sorted(ids[0]) == [-1, 6, 7]
    assert ids[0, 2] == -1 and routing.expert_weights[0, 2] == 0
    assert np.isfinite(grad).all() and (grad[:, 5] == 0).all() and (grad[0, :6] == 0).all()
    if settings.get("normalize", True):
        sums = np.sum(routing.expert_weights, -1)
        np.testing.assert_allclose(sums, settings.get("scale", 1.0), rtol=1e-6)
    # The others are as if the expert did not exist.
    if "selection_bias" in settings:
        settings = settings | {"selection_bias": np.delete(settings["selection_bias"], 5)}
    fewer = route(np.delete(logits, 5, axis=1)[1:].astype(np.float32), top_k=3, **settings)
    fewer_ids = np.asarray(fewer.expert_ids)
    np.testing.assert_array_equal(ids[1:], fewer_ids + (fewer_ids >= 5))
    np.testing.assert_allclose(routing.expert_weights[1:], fewer.expert_weights, rtol=1e-6)


def test_minus_infinity_everywhere_and_in_a_group():
    routing = route(jnp.full((2, 4), -jnp.inf), top_k=2)
    assert routing.expert_ids.tolist() == [[-1, -1]] * 2
    assert routing.load_balance_loss == 0 and routing.z_loss == 0
    # The second group has one usable expert, the third none: both are worth less than the first.
    inf = np.inf
    logits = jnp.array([[0.0, 0.1, 3.0, -inf, -inf, -inf]])
    routing = route(logits, top_k=3, scoring="sigmoid", num_groups=3, top_k_groups=2)
    assert routing.expert_ids.tolist() == [[2, 1, 0]]
    logits = jnp.array([[-inf, -inf, 3.0, -inf, -inf, -inf]])
    routing = route(logits, top_k=3, scoring="sigmoid", num_groups=3, top_k_groups=2)
    assert routing.expert_ids.tolist() == [[2, -1, -1]]


def test_minus_infinity_or_nan_in_the_bias_takes_an_expert_out_for_all():
    logits = jnp.asarray(logits_of(20, 4), jnp.float32)
    for bad in (-np.inf, np.nan):
        bias = np.array([0.0, bad, 0.0, 0.0], np.float32)
        routing = route(logits, top_k=3, scoring="sigmoid", selection_bias=bias)
        assert routing.counts[1] == 0 and routing.counts.sum() == 60


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrt_softplus"])
def test_normalised_weights_of_tiny_scores(scoring):
    # All chosen scores underflow in float32; their ratio does not.
    logits = jnp.array([[-200.0, -201.0, 0.0]])
    bias = jnp.array([0.0, 0.0, -9.0])
    routing = route(logits, top_k=2, scoring=scoring, selection_bias=bias)
    half = 0.5 if scoring == "sqrt_softplus" else 1.0
    assert sorted(routing.expert_ids[0].tolist()) == [0, 1]
    np.testing.assert_allclose(
        np.sort(routing.expert_weights[0]),
        np.sort(softmax(np.array([-200.0, -201.0]) * half)),
        rtol=1e-5,
    )


# Gradients


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrt_softplus"])
def test_gradient_against_a_dense_formulation(scoring, normalize):
    logits = jnp.asarray(logits_of(9, 8), jnp.float32)
    mix = jnp.asarray(logits_of(8, 9).T, jnp.float32)
    score = {
        "softmax": lambda x: jax.nn.softmax(x),
        "sigmoid": jax.nn.sigmoid,
        "sqrt_softplus": lambda x: jnp.sqrt(jax.nn.softplus(x)),
    }[scoring]
    ids = route(logits, top_k=3, scoring=scoring).expert_ids
    mask = jax.nn.one_hot(ids, 8).sum(-2)

    def sparse(logits):
        r = route(logits, top_k=3, scoring=scoring, normalize=normalize, scale=1.5)
        return jnp.sum(r.expert_weights * jnp.take_along_axis(mix, r.expert_ids, -1))

    def dense(logits):
        s = score(logits) * mask
        s = s / s.sum(-1, keepdims=True) if normalize else s
        return 1.5 * jnp.sum(s * mix)

    a, b = jax.jit(lambda x: (jax.grad(sparse)(x), jax.grad(dense)(x)))(logits)
    np.testing.assert_allclose(a, b, atol=2e-6)


def test_losses_gradient_against_a_dense_formulation():
    logits = jnp.asarray(logits_of(9, 8), jnp.float32)
    counts = route(logits, top_k=3).counts

    def dense(logits):
        p = jax.nn.softmax(logits).mean(0)
        z = jnp.mean(jax.nn.logsumexp(logits, axis=-1) ** 2)
        return 8 * jnp.sum(counts / counts.sum() * p) + 2 * z

    def ours(logits):
        r = route(logits, top_k=3)
        return r.load_balance_loss + 2 * r.z_loss

    a, b = jax.jit(lambda x: (jax.grad(ours)(x), jax.grad(dense)(x)))(logits)
    np.testing.assert_allclose(a, b, atol=1e-6)


def test_no_gradient_to_the_selection_bias():
    logits = jnp.asarray(logits_of(9, 8), jnp.float32)
    bias = jnp.asarray(logits_of(8), jnp.float32)
    grad, _ = jax.grad(lambda b: total(logits, scoring="sigmoid", selection_bias=b), has_aux=True)(
        bias
    )
    np.testing.assert_array_equal(grad, np.zeros(8))


# Shapes and transformations


def test_leading_dimensions():
    logits = jnp.asarray(logits_of(2, 3, 4, 8), jnp.float32)
    a = route(logits, top_k=2)
    b = route(logits.reshape(24, 8), top_k=2)
    assert a.expert_ids.shape == a.expert_weights.shape == (2, 3, 4, 2)
    np.testing.assert_array_equal(a.expert_ids.reshape(24, 2), b.expert_ids)
    np.testing.assert_allclose(a.load_balance_loss, b.load_balance_loss, rtol=1e-6)
    one = route(logits[0, 0, 0], top_k=2)
    np.testing.assert_array_equal(one.expert_ids, a.expert_ids[0, 0, 0])


def test_no_tokens():
    routing = route(jnp.zeros((0, 8)), top_k=2)
    assert routing.expert_ids.shape == (0, 2)
    assert routing.counts.tolist() == [0] * 8
    assert routing.load_balance_loss == 0 and routing.z_loss == 0


def test_vmap_with_and_without_axis_name():
    logits = jnp.asarray(logits_of(3, 10, 8), jnp.float32)
    mapped = jax.jit(jax.vmap(lambda x: route(x, top_k=2)))(logits)
    for i in range(3):
        one = route(logits[i], top_k=2)
        for a, b in zip(mapped, one):
            np.testing.assert_allclose(a[i], b, rtol=1e-6)
    joined = jax.jit(jax.vmap(lambda x: route(x, top_k=2, axis_name="b"), axis_name="b"))(logits)
    whole = route(logits, top_k=2)
    np.testing.assert_array_equal(joined.counts[0], whole.counts)
    np.testing.assert_allclose(joined.load_balance_loss[0], whole.load_balance_loss, rtol=1e-6)
    np.testing.assert_allclose(joined.z_loss[0], whole.z_loss, rtol=1e-6)


def mesh_of(axis_type=AxisType.Auto):
    devices = np.array(jax.devices()[:8]).reshape(2, 4)
    return jax.sharding.Mesh(devices, ("data", "expert"), axis_types=(axis_type,) * 2)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_sharded_jit_equals_one_device_and_gathers_nothing(axis_type):
    logits = logits_of(32, 8).astype(np.float32)
    logits[3, 2] = np.nan

    def loss(x):
        r = jax_mok.route(x, top_k=3, **SETTINGS[-1])
        return jnp.sum(jnp.cos(r.expert_weights)) + r.load_balance_loss + r.z_loss, r

    f = jax.jit(jax.value_and_grad(loss, has_aux=True))
    expected = f(logits)
    mesh = mesh_of(axis_type)
    sharded = jax.device_put(logits, NamedSharding(mesh, P(("data", "expert"))))
    with jax.set_mesh(mesh):
        compiled = f.lower(sharded).compile()
        got = compiled(sharded)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), got, expected)
    assert "all-gather" not in compiled.as_text()
    assert got[0][1].expert_ids.sharding.is_equivalent_to(sharded.sharding, 2)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_sums_over_the_named_axes(check_vma):
    logits = jnp.asarray(logits_of(32, 8), jnp.float32)
    axes = ("data", "expert")

    def local(x, axis_name):
        r = route(x, top_k=3, axis_name=axis_name)
        return r if axis_name else r._replace(counts=jax.lax.psum(r.counts, axes))

    token = P(axes)
    specs = jax_mok.Routing(token, token, P(), P(), P())
    for axis_name in (axes, None):
        if axis_name is None:  # losses stay local: one per device
            specs = jax_mok.Routing(token, token, P(), None, None)
            f = lambda x: local(x, None)._replace(load_balance_loss=None, z_loss=None)
        else:
            f = functools.partial(local, axis_name=axes)
        mapped = jax.jit(
            jax.shard_map(f, mesh=mesh_of(), in_specs=token, out_specs=specs, check_vma=check_vma)
        )
        whole = route(logits, top_k=3)
        for a, b in zip(mapped(logits), whole):
            if a is not None:
                np.testing.assert_allclose(a, b, rtol=1e-6)


def test_gradient_inside_shard_map():
    logits = jnp.asarray(logits_of(32, 8), jnp.float32)
    axes = ("data", "expert")

    @functools.partial(jax.shard_map, mesh=mesh_of(), in_specs=P(axes), out_specs=P(axes))
    def grad(x):
        def loss(x):
            r = route(x, top_k=3, axis_name=axes)
            weights = jnp.cos(r.expert_ids.astype(jnp.float32)) * r.expert_weights
            return jax.lax.psum(weights.sum(), axes) + r.load_balance_loss + r.z_loss

        return jax.grad(loss)(x)

    def whole(x):
        r = route(x, top_k=3)
        weights = jnp.cos(r.expert_ids.astype(jnp.float32)) * r.expert_weights
        return weights.sum() + r.load_balance_loss + r.z_loss

    np.testing.assert_allclose(jax.jit(grad)(logits), jax.grad(whole)(logits), rtol=1e-5, atol=1e-6)


def test_checkpoint_and_scan():
    logits = jnp.asarray(logits_of(3, 9, 8), jnp.float32)

    def loss(logits, wrap):
        body = wrap(lambda c, x: (c + total(x, scoring="sigmoid")[0], None))
        return jax.lax.scan(body, 0.0, logits)[0]

    keep = jax.checkpoint_policies.save_only_these_names("jax_mok_expert_ids")
    plain = jax.jit(jax.grad(loss), static_argnums=1)(logits, lambda f: f)
    for policy in (None, keep):
        remat = jax.jit(jax.grad(loss), static_argnums=1)(
            logits, functools.partial(jax.checkpoint, policy=policy)
        )
        np.testing.assert_allclose(remat, plain, rtol=1e-6, atol=1e-7)
