"""Meshes and shard_map: where `moe` may be called, and what moves between the devices."""

import contextlib
import functools
import re

import cases
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_mok
from jax_mok import ffi

EXACT = 2e-6


@pytest.fixture(scope="module")
def case():
    return cases.make(biases=True, shared=16, shared_gate=True)


@pytest.fixture(scope="module")
def want(case):
    return case.reference()


MESHES = {
    "expert": ((8,), ("expert",)),
    "data x expert": ((2, 4), ("data", "expert")),
    "expert x data": ((4, 2), ("expert", "data")),
    "data x expert x tensor": ((2, 2, 2), ("data", "expert", "tensor")),
}


def specs(tokens, case=None):
    """Of the differentiable arguments; without `case`, those of a layer with everything."""
    expert = P("expert")
    biases, shared = (expert,) * 3, jax_mok.SharedExpert(P(), P(), P(), tokens)
    if case is not None:
        biases = biases if case.biases is not None else None
        shared = shared if case.shared is not None else None
    return (tokens, tokens, expert, expert, expert, biases, shared)


def placed(case, mesh, tokens):
    put = lambda a, s: jax.device_put(a, NamedSharding(mesh, s))
    args = jax.tree.map(put, case.args, specs(tokens, case))
    return args, put(case.ids, tokens)


@pytest.mark.parametrize("permute", [False, True])
@pytest.mark.parametrize("name", MESHES)
def test_plain_jit_on_every_mesh(case, want, name, permute, implementation):
    """The mesh given; gradients of what is replicated are summed once."""
    mesh = cases.mesh(*MESHES[name], permute=permute)
    result = case.value_and_grads(mesh=mesh, implementation=implementation)
    cases.assert_close(result, want, EXACT)


@pytest.mark.parametrize("name", MESHES)
def test_mesh_found_on_the_arguments(case, want, name, implementation):
    shape, names = MESHES[name]
    mesh = cases.mesh(shape, names, permute=True)
    tokens = P(tuple(n for n in names if n != "tensor"))
    args, ids = placed(case, mesh, tokens)

    @jax.jit
    def run(args, ids):
        y, vjp = jax.vjp(lambda a: case.call(a, ids=ids, implementation=implementation), args)
        return y, vjp(case.cotangent)[0]

    cases.assert_close(run(args, ids), want, EXACT)
    hlo = run.lower(args, ids).compile().as_text()
    if implementation == "fused":
        assert ffi.FORWARD in hlo and ffi.BACKWARD in hlo


def test_mesh_of_the_context(case, want, implementation):
    mesh = cases.mesh((2, 4), ("data", "expert"))
    with jax.set_mesh(mesh):
        cases.assert_close(case.value_and_grads(implementation=implementation), want, EXACT)


def test_token_axes(case, want, implementation):
    mesh = cases.mesh((2, 2, 2), ("data", "expert", "tensor"))
    result = case.value_and_grads(
        mesh=mesh, token_axes=("data", "expert"), implementation=implementation
    )
    cases.assert_close(result, want, EXACT)


def test_experts_over_two_axes(case, want, implementation):
    mesh = cases.mesh((2, 4), ("rack", "gpu"), permute=True)
    result = case.value_and_grads(
        mesh=mesh, expert_axis=("rack", "gpu"), implementation=implementation
    )
    cases.assert_close(result, want, EXACT)


def test_every_device_holds_all_experts(case, want, implementation):
    """Plain data parallelism: the experts' gradients are summed over the devices."""
    mesh = cases.mesh((8,), ("data",))
    tokens = P("data")
    shared = jax_mok.SharedExpert(P(), P(), P(), tokens)
    everywhere = (tokens, tokens, P(), P(), P(), (P(),) * 3, shared)
    put = lambda a, s: jax.device_put(a, NamedSharding(mesh, s))
    args, ids = jax.tree.map(put, case.args, everywhere), put(case.ids, tokens)
    cotangent = put(case.cotangent, tokens)

    @jax.jit
    def run(args, ids, cotangent):
        layer = lambda a: case.call(a, ids=ids, expert_axis=None, implementation=implementation)
        y, vjp = jax.vjp(layer, args)
        return y, vjp(cotangent)[0]

    cases.assert_close(run(args, ids, cotangent), want, EXACT)


@pytest.mark.parametrize("tokens", [P("data"), P(("data", "expert")), P(None, "data"), P()])
def test_explicit_mesh(case, want, tokens, implementation):
    """Axes whose sharding is part of the types: y is sharded as x is."""
    mesh = cases.mesh((2, 4), ("data", "expert"), axis_type=AxisType.Explicit)
    with jax.set_mesh(mesh):
        args, ids = placed(case, mesh, tokens)
        cotangent = jax.device_put(case.cotangent, NamedSharding(mesh, tokens))

        @jax.jit
        def run(args, ids):
            y, vjp = jax.vjp(lambda a: case.call(a, ids=ids, implementation=implementation), args)
            assert jax.typeof(y).sharding == jax.typeof(args[0]).sharding
            return y, vjp(cotangent)[0]

        cases.assert_close(run(args, ids), want, EXACT)


@pytest.mark.parametrize("explicit", ["data", "expert"])
def test_mesh_with_explicit_and_automatic_axes(case, want, explicit, implementation):
    types = {True: AxisType.Explicit, False: AxisType.Auto}
    names = ("data", "expert")
    mesh = jax.sharding.Mesh(
        np.array(jax.devices()).reshape(2, 4),
        names,
        axis_types=tuple(types[n == explicit] for n in names),
    )
    with jax.set_mesh(mesh):
        args, ids = placed(case, mesh, P(explicit))

        @jax.jit
        def run(args, ids):
            y, vjp = jax.vjp(lambda a: case.call(a, ids=ids, implementation=implementation), args)
            assert jax.typeof(y).sharding == jax.typeof(args[0]).sharding
            cotangent = jax.sharding.reshard(case.cotangent, jax.typeof(y).sharding)
            return y, vjp(cotangent)[0]

        cases.assert_close(run(args, ids), want, EXACT)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", ["expert", "data x expert"])
def test_inside_the_callers_shard_map(case, want, name, check_vma, implementation):
    shape, names = MESHES[name]
    mesh = cases.mesh(shape, names, permute=True)
    tokens = P(names)

    def local(args, ids):
        assert args[2].shape[0] == 8 // mesh.shape["expert"]
        return case.call(args, ids=ids, implementation=implementation)

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(specs(tokens), tokens), out_specs=tokens, check_vma=check_vma
    )
    y, vjp = jax.vjp(jax.jit(lambda a: mapped(a, case.ids)), case.args)
    cases.assert_close((y, vjp(case.cotangent)[0]), want, EXACT)


def test_gradient_taken_inside_the_callers_shard_map(case, want, implementation):
    """A training step written per device, with its own psum of the loss."""
    mesh = cases.mesh((2, 4), ("data", "expert"))
    tokens = P(("data", "expert"))

    def step(args, ids, cotangent):
        def loss(args):
            y = case.call(args, ids=ids, implementation=implementation)
            return jax.lax.psum(jnp.sum(y * cotangent), ("data", "expert"))

        return jax.grad(loss)(args)

    mapped = jax.jit(
        jax.shard_map(
            step, mesh=mesh, in_specs=(specs(tokens), tokens, tokens), out_specs=specs(tokens)
        )
    )
    cases.assert_close(mapped(case.args, case.ids, case.cotangent), want[1], EXACT)


@pytest.mark.parametrize("data", [AxisType.Auto, AxisType.Explicit])
def test_caller_makes_only_some_axes_manual(implementation, data):
    """The data axis left to the compiler or to the types: the layer makes it manual by itself."""
    case = cases.make(tokens=(8, 6), biases=True)
    mesh = jax.sharding.Mesh(
        np.array(jax.devices()).reshape(2, 4),
        ("data", "expert"),
        axis_types=(data, AxisType.Auto),
    )
    tokens, expert = P("expert"), P("expert")
    mapped = jax.shard_map(
        lambda x, ids, w, *weights: jax_mok.moe(x, ids, w, *weights, implementation=implementation),
        mesh=mesh,
        in_specs=(tokens, tokens, tokens, expert, expert, expert),
        out_specs=tokens,
        axis_names={"expert"},
    )
    args = (case.x, case.ids, case.weights, case.w_gate, case.w_up, case.w_down)
    case.biases = None
    with jax.set_mesh(mesh) if data == AxisType.Explicit else contextlib.nullcontext():
        cases.assert_close(jax.jit(mapped)(*args), case.reference()[0], EXACT)


def _collectives(hlo: str) -> dict[str, list[int]]:
    """Sizes, in elements, of what each kind of collective in the program returns."""
    found: dict[str, list[int]] = {}
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    pattern = rf"= \(?\w+\[([\d,]*)\][^=]*? ({kinds})"
    for dims, kind in re.findall(pattern, hlo):
        size = int(np.prod([int(d) for d in dims.split(",") if d] or [1]))
        found.setdefault(kind, []).append(size)
    return found


@pytest.mark.parametrize("name", MESHES)
def test_no_hidden_resharding(name):
    """With arguments placed as the layer wants them, the fused path moves nothing through XLA but
    the gradients of what is replicated."""
    shape, names = MESHES[name]
    mesh = cases.mesh(shape, names)
    case = cases.make(tokens=(16, 4))
    args, ids = placed(case, mesh, P(names))
    cotangent = jax.device_put(case.cotangent, NamedSharding(mesh, P(names)))

    def forward(args, ids):
        return case.call(args, ids=ids, implementation="fused")

    assert not _collectives(jax.jit(forward).lower(args, ids).compile().as_text())

    @jax.jit
    def step(args, ids, cotangent):
        return jax.vjp(functools.partial(forward, ids=ids), args)[1](cotangent)[0]

    found = _collectives(step.lower(args, ids, cotangent).compile().as_text())
    replicas = mesh.size // mesh.shape["expert"]
    assert set(found) <= ({"all-reduce"} if replicas > 1 else set()), found


def test_the_check_would_see_a_gather():
    """The collectives path does gather: the pattern above is not blind."""
    case = cases.make(tokens=(16, 4))
    mesh = cases.mesh((8,), ("expert",))
    args, ids = placed(case, mesh, P("expert"))
    run = jax.jit(lambda a, i: case.call(a, ids=i, implementation="xla"))
    assert "all-gather" in _collectives(run.lower(args, ids).compile().as_text())


ABSTRACT = ["arguments", "outputs", "context", "shard_map", "export", "shapes only"]


@pytest.mark.parametrize("devices_from", ABSTRACT)
def test_abstract_mesh(devices_from, implementation):
    """It has no devices: they come from elsewhere, or are not needed yet."""
    case = cases.make(tokens=(16,))
    mesh = cases.mesh((4,), ("expert",))
    abstract = mesh.abstract_mesh
    everywhere = NamedSharding(mesh, P())
    run = lambda args: case.call(args, mesh=abstract, implementation=implementation)
    if devices_from == "arguments":
        y = jax.jit(run)(jax.device_put(case.args, everywhere))
    elif devices_from == "outputs":
        y = jax.jit(run, out_shardings=everywhere)(case.args)
    elif devices_from == "context":
        with jax.set_mesh(mesh):
            y = jax.jit(run)(case.args)
    elif devices_from == "shard_map":
        tokens = P("expert")
        inside = lambda args, ids: case.call(
            args, ids=ids, mesh=abstract, implementation=implementation
        )
        y = jax.shard_map(inside, mesh=mesh, in_specs=(tokens, tokens), out_specs=tokens)(
            case.args, case.ids
        )
    elif devices_from == "export":
        checks = jax_mok.disabled_safety_checks()
        exported = jax.export.export(jax.jit(run), disabled_checks=checks)(case.args)
        y = jax.jit(exported.call)(jax.device_put(case.args, everywhere))
    else:
        y = jax.eval_shape(run, case.args)
        assert (y.shape, y.dtype) == (case.x.shape, case.x.dtype)
        return
    cases.assert_close(y, case.reference()[0], EXACT)


def test_implementation_used(caplog):
    mesh = cases.mesh((8,), ("expert",))
    assert jax_mok.implementation_used(mesh=mesh) == "fused"
    assert jax_mok.implementation_used(mesh=mesh, implementation="xla") == "xla"
    assert jax_mok.implementation_used() == "fused"
    case = cases.make(tokens=(8,))
    with caplog.at_level("INFO", logger="jax_mok"):
        case.call(case.args, mesh=mesh)
    assert "implementation fused" in caplog.text
