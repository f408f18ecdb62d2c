"""Tests of the linen layer: the same numbers as the NNX layer, collections, training, sharding,
linen's transformations, errors.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_mok
import jax_mok.flax
import jax_mok.linen

E, K, H, I = 8, 2, 16, 24  # noqa: E741
SIZES = {"num_experts": E, "top_k": K, "hidden_size": H, "intermediate_size": I}
SOWN = ["losses", "intermediates"]
EVERYTHING = {
    "scoring": "sigmoid",
    "selection_bias": True,
    "router_bias": True,
    "expert_bias": True,
    "num_groups": 4,
    "top_k_groups": 2,
    "scale": 2.5,
    "num_shared_experts": 2,
    "shared_intermediate_size": 10,
    "shared_gate": True,
    "activation": jax_mok.Swiglu(alpha=1.702, limit=7.0, up_offset=1.0),
    "bias_init": jax.nn.initializers.normal(0.3),
}


def tokens(*shape, seed=0):
    return np.random.default_rng((seed, *shape)).normal(size=shape).astype(np.float32)


def make(**settings):
    return jax_mok.linen.MoE(**(SIZES | settings))


def init(layer, x, seed=0):
    return jax.jit(layer.init)(jax.random.key(seed), x)


def close(a, b, tolerance=1e-5):
    """Relative L2 distance."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape
    assert np.linalg.norm(a - b) <= tolerance * max(np.linalg.norm(b), 1e-30)


def test_what_a_newcomer_writes():
    layer = jax_mok.linen.MoE(num_experts=8, top_k=2, hidden_size=16, intermediate_size=32)
    x = jnp.asarray(tokens(2, 3, 16))
    variables = layer.init(jax.random.key(0), x)
    y = layer.apply(variables, x)
    assert y.shape == x.shape and y.dtype == x.dtype
    assert set(variables) == {"params"}
    # Plain arrays in place of the boxes, as after a checkpoint, do as well.
    close(layer.apply(nn.unbox(variables), x), y)


@pytest.mark.parametrize("settings", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_the_same_numbers_as_nnx(settings):
    x, mask = tokens(11, H), np.arange(11) != 4
    layer = make(**settings)
    variables = nn.unbox(init(layer, x))
    twin = jax_mok.flax.MoE(**(SIZES | settings), rngs=nnx.Rngs(1))
    assert set(variables["params"]) == set(twin.parameter_names)
    for name, value in variables["params"].items():
        assert getattr(twin, name)[...].shape == value.shape
        getattr(twin, name).set_value(value)
    if "selection_bias" in settings:
        bias = jnp.linspace(-0.4, 0.4, E)
        variables["router_state"]["selection_bias"] = bias
        twin.selection_bias.set_value(bias)

    @jax.jit
    def run(params, x):
        def loss(params, x):
            all_variables = variables | {"params": params}
            y, sown = layer.apply(all_variables, x, token_mask=mask, mutable=SOWN)
            return jnp.sum(y**2) + jax_mok.linen.router_loss(sown), (y, sown)

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, x)

    @nnx.jit
    def run_twin(twin, x):
        def loss(twin, x):
            y, sown = nnx.capture(twin, nnx.Intermediate)(x, token_mask=mask)
            return jnp.sum(y**2) + jax_mok.flax.router_loss(sown), (y, sown)

        return nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True)(twin, x)

    (value, (y, sown)), (grads, dx) = run(variables["params"], x)
    (twin_value, (twin_y, twin_sown)), (twin_grads, twin_dx) = run_twin(twin, x)
    np.testing.assert_allclose(value, twin_value, rtol=1e-6)
    close(y, twin_y, 1e-6)
    close(dx, twin_dx, 1e-6)
    jax.tree.map(close, grads, nnx.to_pure_dict(twin_grads))
    for name in ("load_balance_loss", "z_loss", "expert_counts"):
        (a,), (b,) = (
            jax_mok.linen.sown_values(sown, name),
            jax_mok.flax.sown_values(twin_sown, name),
        )
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert sown["intermediates"]["expert_counts"][0].sum() == 10 * K


def test_sown_collections():
    layer, x = make(), tokens(12, H)
    variables = init(layer, x)
    apply = jax.jit(lambda x: layer.apply(variables, x, mutable=SOWN))
    _, sown = apply(x)
    routing = jax_mok.route(x @ variables["params"]["w_router"].value, top_k=K)
    assert set(sown) == {"losses", "intermediates"}
    np.testing.assert_allclose(
        sown["losses"]["load_balance_loss"], (routing.load_balance_loss,), rtol=1e-6
    )
    np.testing.assert_allclose(sown["losses"]["z_loss"], (routing.z_loss,), rtol=1e-6)
    np.testing.assert_array_equal(sown["intermediates"]["expert_counts"], (routing.counts,))
    total = jax_mok.linen.router_loss(sown, load_balance=2.0, z=0.0)
    np.testing.assert_allclose(total, 2 * routing.load_balance_loss, rtol=1e-6)


def test_training_with_remat_reduces_the_loss_and_balances_by_the_bias():
    class Block(nn.Module):
        update_bias: bool = False

        @nn.compact
        def __call__(self, x):
            moe = make(scoring="sigmoid", selection_bias=True, bias_update_rate=2e-2)
            return moe(nn.LayerNorm()(x), update_bias=self.update_bias)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x, update_bias=False):
            return nn.remat(Block)(update_bias)(x)

    model, x, target = Model(), tokens(128, H) + 0.7, tokens(128, H, seed=1)
    variables = nn.unbox(init(model, x))
    optimizer = optax.adam(1e-2)

    @jax.jit
    def step(params, router_state, opt_state):
        def loss_fn(params):
            variables = {"params": params, "router_state": router_state}
            y, new = model.apply(variables, x, update_bias=True, mutable=[*SOWN, "router_state"])
            return jnp.mean((y - target) ** 2), new

        (loss, new), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        counts = jax_mok.linen.sown_values(new, "expert_counts")[0]
        return optax.apply_updates(params, updates), new["router_state"], opt_state, loss, counts

    params, router_state = variables["params"], variables["router_state"]
    opt_state, losses, loads = optimizer.init(params), [], []
    for _ in range(40):
        params, router_state, opt_state, loss, counts = step(params, router_state, opt_state)
        losses.append(float(loss))
        loads.append(float(counts.max() / counts.mean()))
    assert losses[-1] < 0.8 * losses[0]
    assert loads[-1] < 1.4 and loads[-1] < loads[0]


def test_sharded_over_data_and_expert():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "expert"))
    layer, x = make(num_shared_experts=1, expert_bias=True), tokens(16, H)
    spec = nn.get_partition_spec(jax.eval_shape(layer.init, jax.random.key(0), x))
    assert spec["params"]["w_gate"] == spec["params"]["w_down"] == P("expert", None, None)
    assert spec["params"]["b_gate"] == P("expert", None)
    assert spec["params"]["w_router"] == P(None, None)
    shardings = jax.tree.map(lambda s: NamedSharding(mesh, s), spec)
    sharded_x = jax.device_put(x, NamedSharding(mesh, P(("data", "expert"))))

    def grads(params, x):
        return jax.grad(lambda p: jnp.sum(layer.apply({"params": p}, x) ** 2))(params)

    variables = init(layer, x)
    expected = jax.jit(grads)(nn.unbox(variables)["params"], x)
    with jax.set_mesh(mesh):
        sharded = jax.jit(layer.init, out_shardings=shardings)(jax.random.key(0), sharded_x)
        w = sharded["params"]["w_gate"].value
        assert w.sharding.is_equivalent_to(NamedSharding(mesh, P("expert")), 3)
        close(w, variables["params"]["w_gate"].value)
        got = jax.jit(grads)(sharded["params"], sharded_x)
    jax.tree.map(close, nn.unbox(got), expected)


def test_partition_names():
    layer = make(partition_names=("e", "h", "i"))
    spec = nn.get_partition_spec(jax.eval_shape(layer.init, jax.random.key(0), tokens(4, H)))
    assert spec["params"]["w_up"] == P("e", "h", "i")
    assert spec["params"]["w_down"] == P("e", "i", "h")


def test_scan_over_layers():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + make(scoring="sigmoid", selection_bias=True)(x), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            scan = nn.scan(
                nn.remat(Block),
                variable_axes=dict.fromkeys(("params", "router_state", *SOWN), 0),
                split_rngs={"params": True},
                length=2,
                metadata_params={nn.PARTITION_NAME: None},
            )
            return scan(name="blocks")(x, None)[0]

    model, x = Model(), tokens(8, H)
    boxed = init(model, x)
    assert boxed["params"]["blocks"]["MoE_0"]["w_gate"].names == (None, "expert", None, None)
    variables = nn.unbox(boxed)
    assert variables["params"]["blocks"]["MoE_0"]["w_gate"].shape == (2, E, H, I)

    def loop(variables, x):
        for i in range(2):
            layer = jax.tree.map(lambda a, i=i: a[i], variables)
            x, _ = Block().apply({n: v["blocks"] for n, v in layer.items()}, x, None)
        return x

    def loss(params, run):
        y, sown = run({**variables, "params": params})
        return jnp.sum(y**2), sown

    scanned = lambda v: model.apply(v, x, mutable=SOWN)
    value_and_grad = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)
    (value, sown), grads = value_and_grad(variables["params"], scanned)
    (expected, _), expected_grads = value_and_grad(
        variables["params"], lambda v: (loop(v, x), None)
    )
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    jax.tree.map(close, grads, expected_grads)
    (counts,) = jax_mok.linen.sown_values(sown, "expert_counts")
    assert counts.shape == (2, E) and (counts.sum(-1) == 8 * K).all()


def test_inside_shard_map():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "expert"))
    axes = ("data", "expert")
    layer, x = make(axis_name=axes), tokens(16, H)
    params = init(make(), x)["params"]
    specs = nn.get_partition_spec(params)

    def local(params, x):
        y, sown = layer.apply({"params": params}, x, mutable=SOWN)
        return y, sown["intermediates"]["expert_counts"][0]

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(specs, P(axes)), out_specs=(P(axes), P()))
    y, counts = jax.jit(mapped)(params, x)
    expected, sown = jax.jit(lambda p: make().apply({"params": p}, x, mutable=SOWN))(params)
    close(y, expected)
    np.testing.assert_array_equal(counts, sown["intermediates"]["expert_counts"][0])
    make_inside = jax.shard_map(
        lambda x: layer.init(jax.random.key(0), x), mesh=mesh, in_specs=P(axes), out_specs=P()
    )
    with pytest.raises(ValueError, match="outside of shard_map"):
        make_inside(x)


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"top_k": 9}, ["top_k", "9", "8"]),
        ({"intermediate_size": 0}, ["intermediate_size", "0"]),
        ({"shared_gate": True}, ["shared_gate", "num_shared_experts"]),
        ({"scoring": "tanh"}, ["scoring", "'tanh'"]),
        ({"hidden_size": 8}, ["hidden_size", "8", "(4, 16)"]),
        ({"dtype": jnp.float16}, ["dtype", "float16"]),
    ],
)
def test_errors(settings, words):
    with pytest.raises(ValueError) as info:
        jax.eval_shape(make(**settings).init, jax.random.key(0), jnp.zeros((4, H)))
    for word in words:
        assert word in str(info.value)


def test_errors_of_update_bias():
    x = jnp.zeros((4, H))
    layer = make(selection_bias=True)
    variables = init(layer, x)
    with pytest.raises(ValueError, match=r"mutable=\['router_state'"):
        layer.apply(variables, x, update_bias=True)
    with pytest.raises(ValueError, match="selection_bias=True"):
        make().apply({"params": variables["params"]}, x, update_bias=True)
