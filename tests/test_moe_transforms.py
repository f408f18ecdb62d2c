"""`moe` under JAX's transformations: remat, scan, vmap, donation, export, the compilation cache."""

import functools
import os
import subprocess
import sys

import cases
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import jax_mok
from jax_mok import ffi

EXACT = 2e-6
JAX_VERSION = tuple(int(part) for part in jax.__version__.split(".")[:2])


@pytest.fixture(scope="module")
def case():
    return cases.make(tokens=(8, 4), biases=True)


@pytest.fixture(scope="module")
def mesh():
    return cases.mesh((4,), ("expert",))


def counted(run, *args):
    """(forward, backward) executions of `run(*args)`, per device."""
    before = jax_mok.call_counts()
    jax.block_until_ready(run(*args))
    after = jax_mok.call_counts()
    return tuple(after[n] - before[n] for n in ("forward", "backward"))


REMAT = {
    # policy -> executions of the forward call in one gradient, with residuals "save"
    "no remat": 1,
    "full remat": 2,
    "named residuals": 1,
    "only the output named": 2,
}


def rematerialised(case, mesh, policy):
    def layer(args):
        # tanh: the gradient needs the layer's output as well as its residuals.
        return jnp.tanh(case.call(args, mesh=mesh, implementation="fused"))

    names = [jax_mok.OUTPUT_NAME]
    if policy == "named residuals":
        names.append(jax_mok.RESIDUAL_NAME)
    if policy == "no remat":
        return layer
    if policy == "full remat":
        return jax.checkpoint(layer)
    return jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names(*names))


@pytest.mark.parametrize("policy", REMAT)
def test_remat_runs_the_forward_exactly_as_often_as_it_should(case, mesh, policy):
    layer = rematerialised(case, mesh, policy)
    loss = lambda args: jnp.sum(jnp.sin(layer(args)))
    step = jax.jit(jax.value_and_grad(loss))
    lowered = step.lower(case.args)
    assert lowered.as_text().count(f"@{ffi.FORWARD}(") == REMAT[policy]
    assert lowered.as_text().count(f"@{ffi.BACKWARD}(") == 1
    # XLA may merge equal calls without effects. That of jaxlib 0.10 drops the barriers of remat
    # before it looks for them, as it does with any other operation on a CPU.
    compiled = lowered.compile().as_text().count(f'custom_call_target="{ffi.FORWARD}"')
    assert compiled == (REMAT[policy] if JAX_VERSION >= (0, 11) else 1)
    jax.block_until_ready(step(case.args))
    assert counted(step, case.args) == (compiled * 4, 1 * 4)


@pytest.mark.parametrize("policy", REMAT)
def test_remat_in_a_scan_runs_the_forward_exactly_as_often_as_it_should(case, mesh, policy):
    """One layer after the other, as in a model: here no XLA can merge forward and backward pass."""
    block = rematerialised(case, mesh, policy)

    def loss(x):
        x, _ = jax.lax.scan(lambda x, _: (block((x, *case.args[1:])), None), x, length=3)
        return jnp.sum(x)

    step = jax.jit(jax.grad(loss))
    jax.block_until_ready(step(case.x))
    assert counted(step, case.x) == (REMAT[policy] * 3 * 4, 3 * 4)


def test_remat_with_recompute_residuals_keeps_only_arguments(case, mesh):
    """With residuals="recompute" the backward call needs no forward call before it."""
    config = jax_mok.Config(residuals="recompute")
    layer = jax.checkpoint(
        lambda args: case.call(args, mesh=mesh, implementation="fused", config=config)
    )
    loss = lambda args: jnp.sum(layer(args) * case.cotangent)
    step = jax.jit(jax.grad(loss))
    jax.block_until_ready(step(case.args))
    assert counted(step, case.args) == (0, 4)


def test_forward_alone_saves_nothing(case, mesh):
    run = jax.jit(lambda args: case.call(args, mesh=mesh, implementation="fused"))
    hlo = run.lower(case.args).compile().as_text()
    (call,) = [line for line in hlo.splitlines() if f'"{ffi.FORWARD}"' in line]
    assert "f32[]" in call.split("custom-call(")[0]


@pytest.mark.parametrize("remat", [False, True])
def test_scan_over_layers(implementation, mesh, remat):
    layers = [cases.make(tokens=(8, 4), seed=s) for s in range(4)]
    first = layers[0]
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *[c.args[2:5] for c in layers])

    def run(x, weights):
        def body(x, w):
            layer = lambda x, w: first.call(
                (x, first.weights, *w, None, None), mesh=mesh, implementation=implementation
            )
            return x + (jax.checkpoint(layer) if remat else layer)(x, w), None

        return jax.lax.scan(body, x, weights)[0]

    def plain(x, weights):
        for i in range(4):
            w = [a[i] for a in weights]
            x = x + first.call((x, first.weights, *w, None, None), moe=jax_mok.reference.moe)
        return x

    loss = lambda f: jax.jit(
        jax.value_and_grad(lambda *a: jnp.sum(f(*a) * first.cotangent), argnums=(0, 1))
    )
    cases.assert_close(loss(run)(first.x, stacked), loss(plain)(first.x, stacked), 5e-6)


def test_value_and_grad_with_constant_ids(implementation, mesh):
    """The ids of a program that is compiled with them: XLA folds what depends on them alone."""
    case = cases.make(tokens=(16,))
    step = lambda **options: jax.jit(jax.value_and_grad(lambda a: case.loss(a, **options)))
    got = step(mesh=mesh, implementation=implementation)(case.args)
    cases.assert_close(got, step(moe=jax_mok.reference.moe)(case.args), 1e-5)


def test_grad_twice_gives_the_same(case, mesh):
    """A second backward through the same program, after the heap has been used, is as good."""
    step = jax.jit(jax.grad(lambda a: case.loss(a, mesh=mesh, implementation="fused")))
    first = step(case.args)
    poison = jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), case.args)
    jax.block_until_ready(step(poison))
    cases.assert_same_bits(step(case.args), first)


def test_vmap_over_tokens(case, mesh):
    xs = jnp.stack([case.x, case.x * 2, case.x - 1])
    run = jax.jit(lambda x: case.call((x, *case.args[1:]), mesh=mesh, implementation="fused"))
    cases.assert_same_bits(jax.vmap(run)(xs), jnp.stack([run(x) for x in xs]))


def test_vmap_of_gradients(case, mesh):
    """A weight gradient per example: not the sum that folding the batch into tokens would give."""

    def loss(w, x):
        y = case.call((x, case.weights, w, *case.args[3:]), mesh=mesh, implementation="fused")
        return jnp.sum(y * case.cotangent)

    grad = jax.jit(jax.grad(loss))
    xs = jnp.stack([case.x, case.x * 2])
    got = jax.jit(jax.vmap(grad, in_axes=(None, 0)))(case.w_gate, xs)
    cases.assert_same_bits(got, jnp.stack([grad(case.w_gate, x) for x in xs]))


def test_vmap_that_jax_cannot_do_says_what_to_do(case, mesh):
    run = lambda x: case.call((x, *case.args[1:]), mesh=mesh, implementation="xla")
    with pytest.raises(NotImplementedError, match="leading dims of x"):
        jax.vmap(run)(jnp.stack([case.x, case.x]))


@pytest.mark.parametrize("token_axes", [None, "expert"])
def test_vmap_over_a_mesh_axis_says_what_to_do(case, implementation, token_axes):
    mesh = cases.mesh((2, 4), ("data", "expert"))
    xs = jnp.stack([case.x, case.x * 2])

    def run(x, w_gate):
        args = (x, case.weights, w_gate, *case.args[3:])
        options = dict(token_axes=token_axes, implementation=implementation)
        return case.call(args, mesh=mesh, **options)

    vmap = functools.partial(jax.vmap, run, in_axes=(0, None))
    for function in (vmap(spmd_axis_name="data"), jax.jit(vmap(spmd_axis_name=("data",)))):
        with pytest.raises(ValueError, match=r"spmd_axis_name='data'.*leading dims of x"):
            function(xs, case.w_gate)
    # What it says: without the name.
    if implementation == "fused":
        want = jnp.stack([run(x, case.w_gate) for x in xs])
        cases.assert_same_bits(vmap()(xs, case.w_gate), want)


def test_donated_arguments(case, implementation, mesh):
    want = jax.jit(lambda a: case.call(a, mesh=mesh, implementation=implementation))(case.args)
    donated = jax.jit(
        lambda x, rest: case.call((x, *rest), mesh=mesh, implementation=implementation),
        donate_argnums=0,
    )
    cases.assert_same_bits(donated(jnp.array(case.x), case.args[1:]), want)


def test_export_round_trip(case, mesh):
    step = jax.jit(jax.grad(lambda a: case.loss(a, mesh=mesh, implementation="fused")))
    exported = jax.export.export(step, disabled_checks=jax_mok.disabled_safety_checks())(case.args)
    again = jax.export.deserialize(exported.serialize())
    devices = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    args = jax.device_put(case.args, devices)
    cases.assert_same_bits(jax.jit(again.call)(args), step(case.args))


def export_of_any_size(case, dims, **options):
    """A layer's value and gradients, exported with symbolic dims: T, H or I, as `dims` names them.
    JAX itself cannot run programs with such dims and a shard_map, so it is on one device."""
    (tokens, hidden, intermediate) = jax.export.symbolic_shape(dims)

    def run(x, ids, weights, w_gate, w_up, w_down):
        args = (x, weights, w_gate, w_up, w_down, None, None)
        y, vjp = jax.vjp(lambda a: case.call(a, ids=ids, **options), args)
        return y, vjp(jnp.cos(y))[0]

    shapes = (
        ((tokens, hidden), jnp.float32),
        ((tokens, 3), jnp.int32),
        ((tokens, 3), jnp.float32),
        ((8, hidden, intermediate), jnp.float32),
        ((8, hidden, intermediate), jnp.float32),
        ((8, intermediate, hidden), jnp.float32),
    )
    types = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    checks = jax_mok.disabled_safety_checks()
    exported = jax.export.export(jax.jit(run), disabled_checks=checks)(*types)
    return jax.jit(jax.export.deserialize(exported.serialize()).call), jax.jit(run)


@pytest.mark.parametrize("residuals", ["save", "recompute"])
def test_export_for_any_number_of_tokens(implementation, residuals):
    config = jax_mok.Config(residuals=residuals)
    case = cases.make(tokens=(1,))
    options = dict(implementation=implementation, config=config)
    exported, run = export_of_any_size(case, "t, 24, 40", **options)
    # 3000 tokens are more than the rings have room for.
    for tokens in (1, 7, 3000):
        c = cases.make(tokens=(tokens,))
        args = (c.x, c.ids, c.weights, c.w_gate, c.w_up, c.w_down)
        cases.assert_close(exported(*args), run(*args), EXACT, f"{tokens} tokens: ")
        if implementation == "fused":
            cases.assert_same_bits(exported(*args), run(*args))


@pytest.mark.parametrize("dims", ["16, h, 40", "16, 24, i", "t, h, i"])
def test_export_for_any_width(dims):
    """Not by the custom calls, and they say so; by default another implementation takes over."""
    case = cases.make(tokens=(16,))
    with pytest.raises(ValueError, match=r'only for the tokens, and x has dims .* Use "xla"'):
        export_of_any_size(case, dims, implementation="fused")
    exported, run = export_of_any_size(case, dims)
    args = (case.x, case.ids, case.weights, case.w_gate, case.w_up, case.w_down)
    cases.assert_close(exported(*args), run(*args), EXACT)


def test_no_pointers_in_the_program(case, mesh):
    """Attributes hold facts only: the same program comes out of every process and every trace."""
    lower = lambda: jax.jit(lambda a: case.call(a, mesh=mesh, implementation="fused")).lower(
        case.args
    )
    assert lower().as_text() == lower().as_text()


def test_many_independent_calls(implementation, mesh):
    """Calls that do not depend on each other, with sums over the ranks between, in one program."""
    case = cases.make(tokens=(64,), hidden=32)

    def run(args):
        total = 0.0
        for i in range(8):
            y = case.call((args[0] * (i + 1), *args[1:]), mesh=mesh, implementation=implementation)
            total = total + y * jnp.tanh(jnp.sum(y))
        return total

    want = sum(
        (lambda y: y * jnp.tanh(jnp.sum(y)))(
            case.call((case.x * (i + 1), *case.args[1:]), moe=jax_mok.reference.moe)
        )
        for i in range(8)
    )
    cases.assert_close(jax.jit(run)(case.args), want, 1e-5)


def test_several_python_threads(case, mesh):
    import concurrent.futures

    runs = [
        jax.jit(lambda a, i=i: case.call((a[0] * i, *a[1:]), mesh=mesh, implementation="fused"))
        for i in (1, 2, 3)
    ]
    want = [run(case.args) for run in runs]

    def repeat(run):
        return [jax.block_until_ready(run(case.args)) for _ in range(10)]

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        for results, expected in zip(pool.map(repeat, runs), want):
            for result in results:
                cases.assert_same_bits(result, expected)


def test_closures_and_numpy_arguments(case):
    """Arrays from NumPy are as good as JAX's."""
    as_numpy = jax.tree.map(np.asarray, case.args)
    run = functools.partial(case.call, ids=np.asarray(case.ids), implementation="fused")
    cases.assert_same_bits(run(as_numpy), run(case.args))


def test_compilation_cache(tmp_path):
    """A second process takes the program from the cache, and it is the right one."""
    code = (
        "import cases, jax, jax_mok\n"
        "case = cases.make(tokens=(8, 4), biases=True)\n"
        "grads = jax.jit(jax.grad(lambda a: case.loss(a, mesh=cases.mesh((4,), ('expert',)))))\n"
        "lowered = grads.lower(case.args)\n"
        "hits = []\n"
        "jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))\n"
        "result = lowered.compile()(case.args)\n"
        "print(any('cache_hit' in name for name in hits))\n"
        "print([float(abs(g).sum()).hex() for g in jax.tree.leaves(result)])\n"
    )
    env = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    run = functools.partial(subprocess.run, env=env, capture_output=True, text=True)
    outputs = [run([sys.executable, "-c", code], timeout=120) for _ in range(2)]
    assert all(o.returncode == 0 for o in outputs), outputs[0].stderr + outputs[1].stderr
    (first, want), (second, got) = (o.stdout.splitlines() for o in outputs)
    assert (first, second) == ("False", "True")
    assert got == want


def test_second_derivatives(case, mesh):
    """The plain-JAX path has them; the custom calls say that they have none."""

    def curvature(x, **options):
        norm = lambda x: jnp.sum(case.call((x, *case.args[1:]), **options) ** 2)
        return jax.grad(lambda x: jnp.sum(jax.grad(norm)(x) ** 2))(x)

    got = jax.jit(lambda x: curvature(x, mesh=mesh, implementation="xla"))(case.x)
    want = jax.jit(lambda x: curvature(x, moe=jax_mok.reference.moe))(case.x)
    cases.assert_close(got, want, 1e-5)
    with pytest.raises(ValueError, match=r"jax_mok_.* cannot be differentiated"):
        jax.jit(lambda x: curvature(x, mesh=mesh, implementation="fused"))(case.x)
