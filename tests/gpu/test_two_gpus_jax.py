"""The fused layer and its gradient on two GPUs: in one process and in two, beside XLA's own
collectives, with weights gathered next to it, with one rank late or missing.
"""

import contextlib
import dataclasses
import gc
import hashlib
import threading
import time

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax_layers import (
    ROUTINGS,
    TOLERANCE,
    assert_gradients,
    gradients,
    gradients_function,
    in_two_processes,
    make,
    require_hopper,
    run,
    want,
)

import jax_mok
from jax_mok import _cuda

pytestmark = pytest.mark.gpu2

# A hang becomes an error that says who waits for what, before the test runner gives up.
QUICK = jax_mok.Config(timeout_seconds=15)
FLAGS = {
    "default": "--xla_gpu_autotune_level=0",
    "latency hiding": "--xla_gpu_autotune_level=0 --xla_gpu_enable_latency_hiding_scheduler=true",
}


def two_gpus(permuted=False) -> Mesh:
    devices = np.array(jax.devices("gpu")[:2])
    return Mesh(devices[::-1] if permuted else devices, ("expert",))


@pytest.fixture(autouse=True)
def can_run():
    require_hopper(two_gpus())
    yield


def placed(case, mesh):
    put = lambda spec: lambda a: jax.device_put(a, NamedSharding(mesh, spec))
    *args, shared = jax.tree.map(put(P("expert")), case.args)
    if shared is not None:
        weights = {n: put(P())(getattr(case.shared, n)) for n in ("w_gate", "w_up", "w_down")}
        shared = dataclasses.replace(shared, **weights)
    return (*args, shared), put(P("expert"))(case.ids)


def fused(case, args, ids, config=QUICK):
    return case.call(args, ids=ids, implementation="fused", config=config)


def run_on(mesh, case, config=QUICK):
    args, ids = placed(case, mesh)
    y = jax.jit(lambda a, i: fused(case, a, i, config))(args, ids)
    return np.asarray(jax_mok.synchronize(y))


def gradients_program(case, mesh, config=QUICK):
    """(args, ids) -> (y, gradients), jitted."""
    program = jax.jit(gradients_function(case, config=config))
    cotangent = jax.device_put(case.cotangent, NamedSharding(mesh, P("expert")))
    return lambda args, ids: program(args, ids, cotangent)


def gradients_on(mesh, case, config=QUICK):
    _, grads = gradients_program(case, mesh, config)(*placed(case, mesh))
    return jax.tree.map(np.asarray, jax_mok.synchronize(grads))


@pytest.mark.parametrize("routing", ROUTINGS)
def test_gradients_of_two_devices(routing):
    """Right; dx and d(expert_weights) have the bits of one GPU, all of them the same in every run
    and with every setting."""
    case = make(
        1000,
        512,
        256,
        32,
        4,
        routing=routing,
        unused=0.05,
        biases=True,
        shared=128,
        shared_gate=True,
    )
    grads, one = gradients_on(two_gpus(), case), gradients(case)
    assert_gradients(grads, case)
    cases.assert_same_bits(grads[:2], one[:2])
    for settings in (
        {},
        dict(residuals="recompute"),
        dict(fwd_num_comm_sms=12, bwd_num_comm_sms=12),
        dict(minibatch_size=256, macrobatch_size=1024),
    ):
        config = dataclasses.replace(QUICK, **settings)
        cases.assert_same_bits(gradients_on(two_gpus(), case, config), grads, str(settings))


@pytest.mark.parametrize("routing", ROUTINGS)
def test_two_devices_as_one(routing):
    """Right, and the bits of one GPU."""
    case = make(1000, 512, 256, 32, 4, routing=routing, unused=0.05)
    y = run_on(two_gpus(), case)
    assert cases.relative_l2(y, want(case)) < TOLERANCE
    cases.assert_same_bits(y, run(case))


def test_permuted_mesh():
    case = make(512, 256, 128, 16, 4, routing="zipf")
    first = run(case)
    for permuted in (False, True, False, True):
        cases.assert_same_bits(run_on(two_gpus(permuted), case), first, f"permuted: {permuted}")


def test_settings_give_the_same_bits():
    case = make(2048, 1024, 384, 32, 8, routing="zipf")
    first = run_on(two_gpus(), case)
    for settings in (
        dict(fwd_num_comm_sms=12),
        dict(minibatch_size=256, macrobatch_size=1024),
    ):
        config = dataclasses.replace(QUICK, **settings)
        cases.assert_same_bits(run_on(two_gpus(), case, config), first, str(settings))


def test_calls_that_do_not_depend_on_each_other():
    case, mesh = make(256, 256, 128, 16, 4), two_gpus()
    args, ids = placed(case, mesh)
    call = lambda x, rest, ids: fused(case, (x, *rest), ids)
    many = jax.jit(lambda x, rest, ids: [call(x * (i + 1), rest, ids) for i in range(12)])
    one = jax.jit(call)
    for _ in range(3):
        for i, y in enumerate(jax_mok.synchronize(many(args[0], args[1:], ids))):
            cases.assert_same_bits(y, one(args[0] * (i + 1), args[1:], ids), f"call {i}")


def beside_collectives(case, mesh):
    """Layers, sums and gathers that do not depend on each other, many of each, in one program.

    XLA runs the last sum as a kernel of its own that spins for its peer, on a computation stream,
    beside the last layers: a layer that held every multiprocessor until its own peer had come
    would keep that peer from being heard."""

    def local(args, ids):
        x, total = args[0], jnp.zeros((), jnp.float32)
        ys = []
        for i in range(8):
            ys.append(fused(case, (x * (i + 1), *args[1:]), ids))
            scaled = x.astype(jnp.float32) * (i + 1)
            total += jax.lax.psum(jnp.sum(scaled), "expert")
            total += jnp.sum(jax.lax.all_gather(scaled, "expert", tiled=True))
        return jnp.stack(ys, 1), jax.lax.psum(total, "expert")

    spec = P("expert")
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(spec, spec), out_specs=(spec, P()), check_vma=False
    )
    return jax.jit(mapped)


def test_beside_collectives():
    case, mesh = make(512, 512, 256, 16, 4), two_gpus()
    args, ids = placed(case, mesh)
    program = beside_collectives(case, mesh)
    one = jax.jit(lambda x, rest, ids: fused(case, (x, *rest), ids))
    wanted = [np.asarray(one(args[0] * (i + 1), args[1:], ids)) for i in range(8)]
    for _ in range(5):
        ys, total = jax_mok.synchronize(program(args, ids))
        assert np.isfinite(np.asarray(total))
        for i, y in enumerate(np.moveaxis(np.asarray(ys), 1, 0)):
            cases.assert_same_bits(np.ascontiguousarray(y), wanted[i], f"call {i}")


def load_and_unload(mesh, over):
    """Programs of one device that come and go: what the driver does for them may wait for GPUs."""
    seed = 0
    while not over.is_set():
        for device in mesh.devices.flat:
            seed += 1
            x = jax.device_put(np.full((64, 64), seed, np.float32), device)
            np.asarray(jax.jit(lambda x, s=seed: jnp.sin(x @ x) * s)(x))
        gc.collect()


@pytest.mark.slow
@pytest.mark.parametrize("host", ["quiet", "moving buffers", "loading programs"])
def test_beside_collectives_many_times(host):
    """With moving buffers XLA updates its command buffers in every run, right after the last call
    is launched."""
    case, mesh = make(512, 512, 256, 16, 4), two_gpus()
    args, ids = placed(case, mesh)
    program = beside_collectives(case, mesh)
    wanted = np.asarray(jax_mok.synchronize(program(args, ids))[0])
    over = threading.Event()
    thread = threading.Thread(target=load_and_unload, args=(mesh, over))
    if host == "loading programs":
        thread.start()
    try:
        kept = []
        for i in range(300):
            ys, _ = jax_mok.synchronize(program(args, ids))
            if host == "moving buffers":
                kept = [*kept, ys][-1 - i % 5 :]
            cases.assert_same_bits(np.asarray(ys), wanted, f"run {i}")
    finally:
        over.set()
        if thread.ident is not None:
            thread.join()


def fsdp_step(case, mesh, layers):
    """A training step whose dense weights are sharded over the mesh and gathered beside the layer,
    and whose gradients are scattered: collectives of XLA on both sides of every call."""
    args, ids = placed(case, mesh)
    hidden = case.x.shape[-1]
    dense = jax.random.normal(jax.random.key(5), (layers, hidden, hidden), jnp.float32)
    dense = (dense * hidden**-0.5).astype(jnp.bfloat16)
    dense = jax.device_put(dense, NamedSharding(mesh, P(None, "expert")))

    def loss(params, x):
        dense, experts = params

        def layer(x, w):
            x = jax.nn.gelu(x @ w)
            return x + fused(case, (x, *experts), ids), None

        y, _ = jax.lax.scan(jax.checkpoint(layer), x, dense)
        return jnp.mean(jnp.square(y.astype(jnp.float32)))

    @jax.jit
    def step(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return value, jax.tree.map(lambda p, g: (p - 0.1 * g).astype(p.dtype), params, grads)

    return step, (dense, args[1:]), args[0]


def test_fsdp_step():
    case, mesh = make(512, 256, 128, 16, 4), two_gpus()
    step, params, x = fsdp_step(case, mesh, layers=4)
    values = []
    for _ in range(5):
        value, params = step(params, x)
        values.append(float(jax_mok.synchronize(value)))
    assert np.isfinite(values).all() and values[-1] < values[0]


def test_bad_id_fails_on_every_rank():
    case, mesh = make(100, 256, 128, 16, 4), two_gpus()
    args, ids = placed(case, mesh)
    call = jax.jit(lambda a, i: fused(case, a, i))
    good = jax_mok.synchronize(call(args, ids))
    y = call(args, ids.at[97, 2].set(99))
    with pytest.raises(jax_mok.MokError, match=r"expert_ids\[47, 2\] of rank 1 is 99") as error:
        jax_mok.synchronize(y)
    assert "rank 0, phase" in str(error.value) and "rank 1, phase" in str(error.value)
    assert np.isnan(np.asarray(y, np.float32)).all()
    cases.assert_same_bits(jax_mok.synchronize(call(args, ids)), good)


def test_rank_that_never_comes():
    case, mesh = make(100, 256, 128, 16, 4), two_gpus()
    config = jax_mok.Config(timeout_seconds=0.5)
    good = run_on(mesh, case, config)
    with _cuda.testing(absent_rank=1), pytest.raises(jax_mok.MokError, match="rank 1 did not come"):
        run_on(mesh, case, config)
    cases.assert_same_bits(run_on(mesh, case, config), good)


def test_device_that_fails_before_its_call():
    """It misses the call, so the other gives it up. Then they are in step again, after one more
    failure at most."""
    case, mesh = make(100, 256, 128, 16, 4), two_gpus()
    config = jax_mok.Config(timeout_seconds=0.5)
    good = run_on(mesh, case, config)
    with (
        _cuda.testing(failing_rank=1),
        pytest.raises(Exception, match="a test asked for this failure"),
    ):
        run_on(mesh, case, config)
    time.sleep(2)
    with pytest.raises(jax_mok.MokError, match="rank 1 did not come"):
        jax_mok.check_status()
    with contextlib.suppress(jax_mok.MokError):
        run_on(mesh, case, config)
    for _ in range(3):
        cases.assert_same_bits(run_on(mesh, case, config), good)


@pytest.mark.slow
def test_jittered_calls():
    """10,000 calls with random delays in all roles of both ranks."""
    case, mesh = make(128, 256, 128, 16, 4), two_gpus()
    args, ids = placed(case, mesh)
    first = run_on(mesh, case)
    for seed in range(1, 11):
        with _cuda.testing(jitter_seed=seed, ring_size=128):
            config = dataclasses.replace(QUICK, minibatch_size=128, macrobatch_size=512)
            call = jax.jit(lambda a, i, c=config: fused(case, a, i, c))
            differ = jax.jit(lambda y, z: jnp.sum(y != z))
            counts = [differ(call(args, ids), first) for _ in range(1000)]
        assert sum(int(c) for c in jax_mok.synchronize(counts)) == 0, f"seed {seed}"


def test_rank_that_never_comes_to_the_backward():
    case, mesh = make(100, 256, 128, 16, 4, biases=True), two_gpus()
    config = jax_mok.Config(timeout_seconds=0.5)
    good = gradients_on(mesh, case, config)
    with (
        _cuda.testing(absent_rank=1, absent_in=("backward",)),
        pytest.raises(jax_mok.MokError, match="rank 1 did not come"),
    ):
        gradients_on(mesh, case, config)
    cases.assert_same_bits(gradients_on(mesh, case, config), good)


@pytest.mark.slow
def test_jittered_forward_and_backward_calls():
    """10,000 of them with random delays in all roles of both ranks, each with another routing than
    the one before: among them all tokens to one rank, none to the other."""
    case, mesh = make(128, 256, 128, 16, 4), two_gpus()
    args, _ = placed(case, mesh)
    put = lambda a: jax.device_put(a, NamedSharding(mesh, P("expert")))
    routings = [put(make(128, 256, 128, 16, 4, routing=r, seed=3).ids) for r in ROUTINGS]
    plain = gradients_program(case, mesh)
    wanted = [jax_mok.synchronize(plain(args, ids)) for ids in routings]

    @jax.jit
    def differ(results, wanted):
        pairs = zip(jax.tree.leaves(results), jax.tree.leaves(wanted))
        return sum(jnp.sum(a != b) for a, b in pairs)

    config = dataclasses.replace(QUICK, minibatch_size=128, macrobatch_size=512)
    for seed in range(1, 11):
        with _cuda.testing(jitter_seed=seed, ring_size=128):
            program = gradients_program(case, mesh, config)
            counts = []
            for i in range(1000):
                which = i % len(routings)
                counts.append(differ(program(args, routings[which]), wanted[which]))
                if i % 50 == 49:  # nor do the hosts run ahead without bounds
                    assert sum(int(c) for c in jax_mok.synchronize(counts)) == 0, f"seed {seed}"
                    counts = []


@pytest.mark.parametrize("flags", FLAGS)
def test_two_processes(flags):
    """One GPU each, joined by jax.distributed: the same code, and the bits of one GPU."""
    halves = in_two_processes("two_process_worker.py", FLAGS[flags])
    case = make(1000, 512, 256, 32, 4, routing="zipf", biases=True)
    y = run(case)
    for rank, half in enumerate(np.split(y, 2)):
        digest = hashlib.sha256(np.ascontiguousarray(half).tobytes()).hexdigest()
        assert halves[rank]["hash"] == digest, f"rank {rank}"
    grads = jax.tree.leaves(gradients_on(two_gpus(), case))
    for rank in range(2):
        parts = [np.ascontiguousarray(np.split(g, 2)[rank]) for g in grads]
        digests = [hashlib.sha256(part.tobytes()).hexdigest() for part in parts]
        assert halves[rank]["gradients"] == digests, f"gradients of rank {rank}"
    # Rank 0 misses its own word too, and may run out of time first.
    words = ("rank 0 did not come", "rank 0 gave the call up")
    assert any(w in halves[1]["error"] for w in words), halves
    assert "rank 0" in halves[0]["error"], halves
