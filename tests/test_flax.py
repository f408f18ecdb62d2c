"""Tests of the NNX layer: values against plain numpy, training, sharding, sown values, the
selection bias, NNX's transformations, padding and NaN, errors.
"""

import functools
import importlib
import operator
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_mok
import jax_mok.flax

E, K, H, I = 8, 2, 16, 24  # noqa: E741
SIZES = {"num_experts": E, "top_k": K, "hidden_size": H, "intermediate_size": I}

MODELS = {
    "mixtral": {},
    "gpt_oss": {
        "router_bias": True,
        "expert_bias": True,
        "activation": jax_mok.Swiglu(alpha=1.702, limit=7.0, up_offset=1.0),
        "bias_init": jax.nn.initializers.normal(0.5),
    },
    "qwen2_moe": {
        "normalize": False,
        "num_shared_experts": 2,
        "shared_intermediate_size": 10,
        "shared_gate": True,
    },
    "deepseek_v3": {
        "scoring": "sigmoid",
        "selection_bias": True,
        "num_groups": 4,
        "top_k_groups": 2,
        "scale": 2.5,
        "num_shared_experts": 1,
    },
}


def tokens(*shape, seed=0):
    return np.random.default_rng((seed, *shape)).normal(size=shape).astype(np.float32)


def make(seed=0, **settings):
    return jax_mok.flax.MoE(**(SIZES | settings), rngs=nnx.Rngs(seed))


@nnx.jit
def call(layer, x):
    return layer(x)


def params_of(layer):
    return {n: np.asarray(getattr(layer, n)[...], np.float64) for n in layer.parameter_names}


def numpy_moe(p, x, settings):
    """The layer in float64, one token and one expert at a time. No groups, no selection bias."""
    sigmoid = lambda a: 1 / (1 + np.exp(-a))
    swiglu = settings.get("activation", jax_mok.Swiglu())

    def mlp(row, w_gate, w_up, w_down, b_gate=0, b_up=0, b_down=0):
        g, u = row @ w_gate + b_gate, row @ w_up + b_up
        if swiglu.limit is not None:
            g, u = np.minimum(g, swiglu.limit), np.clip(u, -swiglu.limit, swiglu.limit)
        return (g * sigmoid(swiglu.alpha * g) * (u + swiglu.up_offset)) @ w_down + b_down

    y = np.zeros(x.shape)
    for t, row in enumerate(x.astype(np.float64)):
        logits = row @ p["w_router"] + p.get("b_router", 0)
        scores = np.exp(logits) / np.exp(logits).sum()
        if settings.get("scoring") == "sigmoid":
            scores = sigmoid(logits)
        chosen = np.argsort(-scores, kind="stable")[:K]
        if settings.get("num_groups"):
            size = E // settings["num_groups"]
            worth = np.sort(scores.reshape(-1, size), -1)[:, -2:].sum(-1)
            kept = np.argsort(-worth, kind="stable")[: settings["top_k_groups"]]
            inside = np.isin(np.arange(E) // size, kept)
            chosen = np.argsort(-np.where(inside, scores, -1), kind="stable")[:K]
        weights = scores[chosen]
        if settings.get("normalize", True):
            weights = weights / weights.sum()
        for e, weight in zip(chosen, settings.get("scale", 1.0) * weights):
            names = ("w_gate", "w_up", "w_down")
            biases = ("b_gate", "b_up", "b_down") if settings.get("expert_bias") else ()
            y[t] += weight * mlp(row, *(p[n][e] for n in names + biases))
        if settings.get("num_shared_experts"):
            gate = sigmoid(row @ p["shared_gate"][:, 0]) if settings.get("shared_gate") else 1
            y[t] += gate * mlp(row, p["shared_w_gate"], p["shared_w_up"], p["shared_w_down"])
    return y


def close(a, b, tolerance=1e-5):
    """Relative L2 distance."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape
    assert np.linalg.norm(a - b) <= tolerance * max(np.linalg.norm(b), 1e-30)


# Values


def test_what_a_newcomer_writes():
    layer = jax_mok.flax.MoE(
        num_experts=8, top_k=2, hidden_size=16, intermediate_size=32, rngs=nnx.Rngs(0)
    )
    x = jnp.asarray(tokens(2, 3, 16))
    y = layer(x)
    assert y.shape == x.shape and y.dtype == x.dtype
    close(y.reshape(6, 16), numpy_moe(params_of(layer), np.asarray(x).reshape(6, 16), {}))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("implementation", [None, "xla"])
def test_values_of_model_families(model, implementation):
    settings = MODELS[model]
    layer = make(implementation=implementation, **settings)
    x = tokens(13, H)
    close(call(layer, x), numpy_moe(params_of(layer), x, settings))


def test_initial_scale_is_that_of_one_expert():
    layer = make(hidden_size=64, intermediate_size=48)
    for name, fan_in in ("w_gate", 64), ("w_up", 64), ("w_down", 48), ("w_router", 64):
        np.testing.assert_allclose(np.std(getattr(layer, name)[...]), fan_in**-0.5, rtol=0.1)
    w = np.asarray(layer.w_gate[...])
    assert len(np.unique(w[:, 0, 0])) == E  # no two experts alike


def test_dtypes():
    x = jnp.asarray(tokens(6, H)).astype(jnp.bfloat16).astype(jnp.float32)
    layer = make(dtype=jnp.bfloat16)
    y = call(layer, x)
    assert y.dtype == jnp.bfloat16 and layer.w_gate[...].dtype == jnp.float32
    close(y, call(make(), x), 2e-2)
    low = make(param_dtype=jnp.bfloat16)
    for dtype in (jnp.float32, jnp.bfloat16):
        assert nnx.eval_shape(lambda m, x: m(x), low, x.astype(dtype)).dtype == dtype
    grads = nnx.eval_shape(nnx.grad(lambda m: m(x).astype(jnp.float32).sum()), layer)
    assert {a.dtype for a in jax.tree.leaves(grads)} == {jnp.dtype(jnp.float32)}


# Training


def test_training_reduces_the_loss_and_balances():
    layer = make(num_shared_experts=1)
    optimizer = nnx.Optimizer(layer, optax.adam(1e-2), wrt=nnx.Param)
    x, target = tokens(64, H), tokens(64, H, seed=1)

    @nnx.jit
    def step(layer, optimizer):
        def loss_fn(layer):
            y, sown = nnx.capture(layer, nnx.Intermediate)(x)
            loss = jnp.mean((y - target) ** 2)
            return loss + jax_mok.flax.router_loss(sown), (loss, sown)

        (_, (loss, sown)), grads = nnx.value_and_grad(loss_fn, has_aux=True)(layer)
        optimizer.update(layer, grads)
        return loss, jax_mok.flax.sown_values(sown, "expert_counts")[0]

    losses = []
    for _ in range(25):
        loss, counts = step(layer, optimizer)
        losses.append(float(loss))
    assert losses[-1] < 0.7 * losses[0]
    assert counts.sum() == 64 * K


def test_every_parameter_gets_a_gradient():
    settings = {"router_bias": True, "expert_bias": True, "num_shared_experts": 1}
    layer = make(shared_gate=True, **settings)
    x = tokens(64, H)
    grads = nnx.jit(nnx.grad(lambda m: jnp.sum(m(x) ** 2)))(layer)
    grads = nnx.to_pure_dict(grads)
    assert set(grads) == set(layer.parameter_names)
    for name, grad in grads.items():
        assert np.linalg.norm(grad) > 0, name
        if grad.shape[0] == E and name != "b_router":
            assert all(np.linalg.norm(g) > 0 for g in grad), name


# Sown values


def test_captured_values_are_those_of_route():
    layer = make(router_bias=True)
    x = tokens(12, H)
    _, sown = nnx.capture(call, nnx.Intermediate)(layer, x)
    routing = jax_mok.route(x @ layer.w_router[...] + layer.b_router[...], top_k=K)
    (balance,), (z,), (counts,) = (
        jax_mok.flax.sown_values(sown, n) for n in ("load_balance_loss", "z_loss", "expert_counts")
    )
    np.testing.assert_allclose(balance, routing.load_balance_loss, rtol=1e-6)
    np.testing.assert_allclose(z, routing.z_loss, rtol=1e-6)
    np.testing.assert_array_equal(counts, routing.counts)
    expected = 0.5 * balance + 0.25 * z
    total = jax_mok.flax.router_loss(sown, load_balance=0.5, z=0.25)
    np.testing.assert_allclose(total, expected, rtol=1e-6)
    assert not jax.tree.leaves(nnx.state(layer, nnx.Intermediate))
    # A layer that is called twice sows twice.
    _, sown = nnx.capture(lambda m, x: call(m, call(m, x)), nnx.Intermediate)(layer, x)
    assert len(jax_mok.flax.sown_values(sown, "z_loss")) == 2


def test_without_capture_the_last_call_is_kept():
    layer = make()
    for _ in range(3):
        call(layer, tokens(12, H))
    kept = nnx.pop(layer, nnx.Intermediate)
    assert len(jax_mok.flax.sown_values(kept, "z_loss")) == 1
    assert int(kept["expert_counts"][0].sum()) == 12 * K
    assert not jax.tree.leaves(nnx.state(layer, nnx.Intermediate))


def test_a_layer_that_is_closed_over_works():
    layer, x = make(), jnp.asarray(tokens(5, H))
    close(jax.jit(lambda x: layer(x))(x), call(make(), x))
    jax.eval_shape(jax.grad(lambda x: layer(x).sum()), x)


# Selection bias


def test_selection_bias_balances_the_load():
    layer = make(scoring="sigmoid", selection_bias=True, bias_update_rate=2e-2)
    x = tokens(256, H) + 0.7  # a mean that some experts like
    before = nnx.state(layer, nnx.Param)

    @nnx.jit
    def step(layer):
        _, sown = nnx.capture(lambda m: m(x, update_bias=True), nnx.Intermediate)(layer)
        return jax_mok.flax.sown_values(sown, "expert_counts")[0]

    counts = [np.asarray(step(layer)) for _ in range(60)]
    assert counts[0].max() > 1.5 * counts[0].mean()
    assert counts[-1].max() < 1.25 * counts[-1].mean()
    assert isinstance(layer.selection_bias, jax_mok.flax.RouterState)
    jax.tree.map(np.testing.assert_array_equal, before, nnx.state(layer, nnx.Param))


def test_selection_bias_update_by_hand_and_no_gradient():
    layer = make(scoring="sigmoid", selection_bias=True)
    layer.update_selection_bias(jnp.array([9, 1, 1, 1, 1, 1, 1, 1]), rate=0.5)
    np.testing.assert_array_equal(layer.selection_bias[...], [-0.5] + [0.5] * 7)
    layer.update_selection_bias(jnp.full(8, 3))
    np.testing.assert_array_equal(layer.selection_bias[...], [-0.5] + [0.5] * 7)
    grads = nnx.eval_shape(nnx.grad(lambda m: m(tokens(4, H)).sum()), layer)
    assert set(nnx.to_pure_dict(grads)) == set(layer.parameter_names)
    with pytest.raises(ValueError, match="selection_bias=True"):
        make().update_selection_bias(jnp.zeros(8, jnp.int32))


# Sharding


def mesh_of(axis_type=AxisType.Auto):
    devices = np.array(jax.devices()[:8]).reshape(2, 4)
    return jax.sharding.Mesh(devices, ("data", "expert"), axis_types=(axis_type,) * 2)


def loss_and_grads(layer, x):
    loss, grads = nnx.jit(nnx.value_and_grad(lambda m, x: jnp.sum(m(x) ** 2)))(layer, x)
    return loss, nnx.to_pure_dict(grads)


@functools.cache
def on_one_device():
    """The expected output, loss and gradients of the sharded tests."""
    layer, x = make(num_shared_experts=1, expert_bias=True), tokens(16, H)
    return call(layer, x), *loss_and_grads(layer, x)


@pytest.mark.parametrize(
    "how", ["set_mesh", "explicit", "mesh argument", "named sharding", "created under jit"]
)
def test_on_a_mesh(how):
    mesh = mesh_of(AxisType.Explicit if how == "explicit" else AxisType.Auto)
    new = functools.partial(make, num_shared_experts=1, expert_bias=True)
    x = jax.device_put(tokens(16, H), NamedSharding(mesh, P(("data", "expert"))))
    # Gradients only for two of the ways: the program is the same for the others.
    run = loss_and_grads if how in ("set_mesh", "explicit") else call
    if how == "mesh argument":
        layer = new(mesh=mesh)
        got = run(layer, x)
    elif how == "named sharding":
        layer = new()
        state = nnx.state(layer)
        nnx.update(layer, jax.device_put(state, nnx.get_named_sharding(state, mesh)))
        got = run(layer, x)
    else:
        with jax.set_mesh(mesh):
            layer = nnx.jit(new)() if how == "created under jit" else new()
            got = run(layer, x)
    expert = NamedSharding(mesh, P("expert"))
    for name in ("w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down"):
        value = getattr(layer, name)[...]
        assert value.sharding.is_equivalent_to(expert, value.ndim), name
    assert layer.w_router[...].sharding.is_fully_replicated
    y, loss, grads = on_one_device()
    if run is call:
        close(got, y)
    else:
        np.testing.assert_allclose(got[0], loss, rtol=1e-5)
        jax.tree.map(close, got[1], grads)


def test_metadata_names():
    layer = make(expert_bias=True, num_shared_experts=1, partition_names=("e", "h", "i"))
    spec = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(layer, nnx.Param)))
    assert spec["w_router"] == P("h", None)
    assert spec["w_gate"] == spec["w_up"] == P("e", "h", "i")
    assert spec["w_down"] == P("e", "i", "h")
    assert spec["b_gate"] == P("e", "i") and spec["b_down"] == P("e", "h")
    assert spec["shared_w_gate"] == P("h", "i") and spec["shared_w_down"] == P("i", "h")
    spec = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(make(), nnx.Param)))
    assert spec["w_gate"] == spec["w_down"] == P("expert", None, None)


def test_optimizer_on_a_mesh():
    with jax.set_mesh(mesh_of()):
        layer = make()
        optimizer = nnx.Optimizer(layer, optax.adam(1e-2), wrt=nnx.Param)
        x = tokens(16, H)

        @nnx.jit
        def step(layer, optimizer):
            loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - 1) ** 2))(layer)
            optimizer.update(layer, grads)
            return loss

        losses = [float(step(layer, optimizer)) for _ in range(4)]
    assert losses[-1] < losses[0]
    assert layer.w_gate[...].sharding.spec[0] == "expert"


def test_inside_shard_map():
    mesh, axes = mesh_of(), ("data", "expert")
    layer = make(axis_name=axes, partition_names=("expert", None, None))
    graph, params, rest = nnx.split(layer, nnx.Param, ...)
    specs = nnx.get_partition_spec(params)
    x = tokens(16, H)

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(specs, P(axes)), out_specs=(P(axes), P(), P())
    )
    def local(params, x):
        layer = nnx.merge(graph, params, rest)
        y, sown = nnx.capture(layer, nnx.Intermediate)(x)
        get = lambda n: jax_mok.flax.sown_values(sown, n)[0]
        return y, get("load_balance_loss"), get("expert_counts")

    y, balance, counts = local(params, x)
    whole, sown = nnx.jit(nnx.capture(lambda m, x: m(x), nnx.Intermediate))(make(), x)
    close(y, whole)
    np.testing.assert_allclose(balance, sown["load_balance_loss"][0], rtol=1e-5)
    np.testing.assert_array_equal(counts, sown["expert_counts"][0])


# NNX transformations


class Block(nnx.Module):
    """A residual MoE block, as models stack them."""

    def __init__(self, *, rngs, **settings):
        self.norm = nnx.RMSNorm(H, rngs=rngs)
        self.moe = jax_mok.flax.MoE(**(SIZES | settings), rngs=rngs)

    def __call__(self, x):
        return x + self.moe(self.norm(x))


def test_remat_gives_the_same_gradients():
    x = tokens(8, H)
    block = Block(rngs=nnx.Rngs(0))
    plain = nnx.jit(nnx.grad(lambda m: jnp.sum(m(x) ** 2)))(block)
    remat = nnx.jit(nnx.grad(lambda m: jnp.sum(nnx.remat(lambda m, x: m(x))(m, x) ** 2)))(block)
    jax.tree.map(close, remat, plain)


def test_scan_over_layers():
    x = jnp.asarray(tokens(8, H))

    @nnx.split_rngs(splits=2)
    @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: None})
    def create(rngs):
        return Block(rngs=rngs, scoring="sigmoid", selection_bias=True)

    stack = create(nnx.Rngs(0))
    assert stack.moe.w_gate[...].shape == (2, E, H, I)
    assert stack.moe.w_gate.get_metadata("out_sharding") == (None, "expert", None, None)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def scan(block, x):
        return block(x)

    def loop(stack, x):
        graph, state = nnx.split(stack)
        for i in range(2):
            x = nnx.merge(graph, jax.tree.map(operator.itemgetter(i), state))(x)
        return x

    def value_and_grad(run):
        return nnx.jit(nnx.value_and_grad(lambda m: jnp.sum(run(m, x) ** 2)))(stack)

    expected, expected_grads = value_and_grad(loop)
    value, grads = value_and_grad(scan)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    jax.tree.map(close, nnx.to_pure_dict(grads), nnx.to_pure_dict(expected_grads))
    kept = nnx.pop(stack, nnx.Intermediate)
    (counts,) = jax_mok.flax.sown_values(kept, "expert_counts")
    assert counts.shape == (2, E) and (counts.sum(-1) == 8 * K).all()


def test_split_and_merge_and_two_layers_share_a_trace():
    layer = make()
    graph, state = nnx.split(layer)
    assert hash(graph) == hash(nnx.split(make(seed=1))[0])
    x = tokens(13, H)
    close(call(nnx.merge(graph, state), x), call(layer, x))


# Padding and NaN


@pytest.mark.parametrize("model", ["mixtral", "qwen2_moe"])
def test_padding_and_nan_stay_where_they_are(model):
    settings = MODELS[model]
    layer = make(**settings)
    x = tokens(9, H)
    mask = np.array([1, 1, 0, 1, 1, 1, 0, 1, 1], bool)
    bad = np.array([0, 0, 0, 0, 1, 0, 0, 1, 0], bool)
    broken = x.copy()
    broken[~mask] = np.nan
    broken[4, 3], broken[7] = np.nan, np.inf
    good = mask & ~bad

    @nnx.jit
    def run(layer, x, mask):
        def loss(layer, x):
            y, sown = nnx.capture(layer, nnx.Intermediate)(x, token_mask=mask)
            return jnp.sum(jnp.where(good[:, None], y, 0) ** 2) + jax_mok.flax.router_loss(sown), y

        grad = nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        (value, y), grads = grad(layer, x)
        return value, y, grads

    value, y, (grads, dx) = run(layer, broken, mask)
    clean_value, clean_y, (clean_grads, clean_dx) = run(layer, x, good)
    np.testing.assert_allclose(value, clean_value, rtol=1e-6)
    close(y[good], clean_y[good])
    assert np.isnan(y[bad]).all() and (np.asarray(y[~mask]) == 0).all()
    jax.tree.map(close, grads, clean_grads)
    close(np.asarray(dx)[good], np.asarray(clean_dx)[good])
    assert (np.asarray(dx)[~good] == 0).all()


def test_no_tokens():
    assert make()(jnp.zeros((0, H))).shape == (0, H)


# Errors


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"num_experts": 0}, ["num_experts", "0"]),
        ({"top_k": 9}, ["top_k", "9", "8"]),
        ({"top_k": 1.5}, ["top_k", "1.5"]),
        ({"hidden_size": -1}, ["hidden_size", "-1"]),
        ({"intermediate_size": 0}, ["intermediate_size", "0"]),
        ({"num_shared_experts": -1}, ["num_shared_experts", "-1"]),
        ({"shared_gate": True}, ["shared_gate", "num_shared_experts"]),
        ({"scoring": "tanh"}, ["scoring", "'tanh'", "'softmax'"]),
        ({"num_groups": 3, "top_k_groups": 1}, ["num_groups", "3", "8"]),
        ({"activation": "tanh"}, ["activation", "'tanh'", "swiglu"]),
        ({"dtype": jnp.float16}, ["dtype", "float16", "bfloat16"]),
        ({"param_dtype": jnp.int32}, ["param_dtype", "int32"]),
        ({"partition_names": ("a",)}, ["partition_names", "('a',)"]),
    ],
)
def test_errors_when_made(settings, words):
    with pytest.raises(ValueError) as info:
        make(**settings)
    for word in words:
        assert word in str(info.value)


def test_errors_when_called():
    layer = make()
    with pytest.raises(ValueError, match=r"\[\.\.\., 16\], got \(4, 8\)"):
        layer(jnp.zeros((4, 8)))
    with pytest.raises(TypeError, match="int32"):
        layer(jnp.zeros((4, H), jnp.int32))
    with pytest.raises(ValueError, match=r"token_mask must be bool of shape \(4,\)"):
        layer(jnp.zeros((4, H)), token_mask=jnp.ones(3, bool))
    with pytest.raises(ValueError, match="selection_bias=True"):
        layer(jnp.zeros((4, H)), update_bias=True)


def test_without_flax_the_error_names_the_extra(monkeypatch):
    for name in ("jax_mok.flax", "jax_mok.linen"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setitem(sys.modules, "flax", None)
        with pytest.raises(ImportError, match=r"pip install 'jax_mok\[flax\]'"):
            importlib.import_module(name)


def test_importing_jax_mok_does_not_import_flax():
    code = "import sys, jax_mok; assert 'flax' not in sys.modules and 'optax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
