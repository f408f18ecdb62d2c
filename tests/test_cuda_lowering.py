"""The program that a GPU would get, looked at on a machine without one: which custom calls it
holds, on which stream, and that nothing gathers tokens or weights behind the caller's back.
"""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_mok
from jax_mok import _cuda, runtime
from jax_mok.ffi import FORWARD_CUDA

pytestmark = pytest.mark.skipif(
    _cuda.core is None, reason=f"no CUDA kernels in this build: {_cuda.WHY_NO_CUDA}"
)

NUM_RANKS = 4
MACHINE = cases.make(
    tokens=(32,), hidden=128, intermediate=192, num_experts=8, top_k=2, dtype=jnp.bfloat16
)


@pytest.fixture(autouse=True)
def hopper():
    with _cuda.testing(assume_hopper=True):
        yield


@pytest.fixture
def mesh():
    return cases.mesh((NUM_RANKS,), ("expert",))


def lowered(function, *args) -> str:
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def fused(args, *, case=MACHINE, **options):
    return case.call(args, implementation="fused", **options)


def calls(text: str) -> list[str]:
    """The custom calls' lines; each is one place in the program that runs the kernel."""
    return [line for line in text.splitlines() if f"@{FORWARD_CUDA}(" in line]


def annotated(text: str) -> list[str]:
    """Names of the functions that run on the stream of the collectives, one for each use."""
    pattern = r'(?<!custom_)call @(\S+?)\(.*_xla_stream_annotation = "collective"'
    return re.findall(pattern, text)


def on_mesh(mesh, case):
    put = lambda spec: lambda a: jax.device_put(a, NamedSharding(mesh, spec))
    args = jax.tree.map(put(P("expert")), case.args)
    return args, put(P("expert"))(case.ids)


def test_forward_is_one_annotated_call(mesh):
    args, ids = on_mesh(mesh, MACHINE)
    text = lowered(lambda a, i: fused(a, ids=i), args, ids)
    assert len(calls(text)) == 1 and len(annotated(text)) == 1
    call = calls(text)[0]
    assert "num_ranks = 4 : i64" in call and "num_virtual_ranks = 1 : i64" in call
    assert re.search(r"groups = dense<\[0, 1, 2, 3\]>", call)
    # Local shapes: nothing was gathered before it.
    assert "tensor<8x128xbf16>" in call and "tensor<2x128x192xbf16>" in call
    for gather in ("all_gather", "all_to_all", "collective_permute", "all_reduce"):
        assert gather not in text


def test_groups_follow_the_mesh():
    mesh = cases.mesh((2, 2, 2), ("data", "expert", "model"))
    put = lambda spec: lambda a: jax.device_put(a, NamedSharding(mesh, spec))
    args = jax.tree.map(put(P(("expert",))), MACHINE.args)
    text = lowered(lambda a, i: fused(a, ids=i), args, MACHINE.ids)
    flat = "0, 2, 1, 3, 4, 6, 5, 7"
    assert f"groups = dense<[{flat}]>" in calls(text)[0]


def test_two_expert_axes_in_the_callers_order():
    mesh = cases.mesh((2, 2, 2), ("a", "b", "c"))
    topology = jax_mok._topology.find(mesh, ("c", "a"), ())
    assert topology.groups() == ((0, 4, 1, 5), (2, 6, 3, 7))


def test_under_grad_scan_and_checkpoint(mesh):
    """The forward stands twice in the gradient of a rematerialised layer, and only there."""
    args, ids = on_mesh(mesh, MACHINE)

    def loss(args, ids):
        layer = jax.checkpoint(lambda x, a: fused((x, *a[1:]), ids=ids).astype(x.dtype))
        step = lambda x, _: (layer(x, args), None)
        y, _ = jax.lax.scan(step, args[0], None, length=3)
        return jnp.sum(y.astype(jnp.float32))

    assert len(annotated(lowered(loss, args, ids))) == 1
    text = lowered(jax.grad(loss), args, ids)
    assert len(annotated(text)) == 2
    # The rematerialised call feeds nothing while gradients come from the plain implementation,
    # which has its own forward; XLA drops it. What counts is that it is no obstacle.
    assert "has_side_effect = true" not in "".join(calls(text))


def test_gradient_gathers_tokens_not_weights(mesh):
    """The plain implementation, which the gradient takes, moves tokens and leaves experts."""
    args, ids = on_mesh(mesh, MACHINE)
    text = lowered(jax.grad(lambda a, i: MACHINE.loss(a, ids=i)), args, ids)
    gathered = re.findall(r"stablehlo\.all_gather.*?-> tensor<(\S+?)>", text, re.DOTALL)
    assert gathered, "the plain implementation gathers the tokens"
    assert not [g for g in gathered if g.startswith("8x128x192") or g.startswith("8x192x128")]


def test_inside_the_callers_shard_map(mesh):
    args, ids = on_mesh(mesh, MACHINE)
    run = lambda a, i: fused(a, ids=i)
    mapped = jax.shard_map(run, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
    assert len(annotated(lowered(mapped, args, ids))) == 1


def test_odd_sizes_are_padded_to_the_kernels_unit():
    case = cases.make(
        tokens=(5,),
        hidden=72,
        intermediate=40,
        num_experts=4,
        top_k=2,
        dtype=jnp.bfloat16,
        biases=True,
        shared=24,
        shared_gate=True,
    )
    text = lowered(lambda a: fused(a, case=case), case.args)
    (call,) = calls(text)
    for shape in ("5x128", "4x128x64", "4x64x128", "4x64", "4x128", "128x64", "64x128"):
        assert f"tensor<{shape}xbf16>" in call
    assert "tensor<5x72xbf16>" not in call


def test_virtual_ranks_share_one_call():
    with _cuda.testing(virtual_ranks=4):
        text = lowered(lambda a: fused(a), MACHINE.args)
    (call,) = calls(text)
    assert "num_ranks = 4 : i64" in call and "num_virtual_ranks = 4 : i64" in call
    assert "num_tokens = 8 : i64" in call and "tensor<8x128x192xbf16>" in call


def test_virtual_ranks_must_divide():
    with _cuda.testing(virtual_ranks=3), pytest.raises(ValueError, match="3 virtual ranks"):
        lowered(lambda a: fused(a), MACHINE.args)


def test_settings_reach_the_kernel():
    config = jax_mok.Config(
        fwd_num_comm_sms=7, minibatch_size=256, macrobatch_size=4096, timeout_seconds=2.5
    )
    (call,) = calls(lowered(lambda a: fused(a, config=config), MACHINE.args))
    for setting in (
        "num_comm_sms = 7 : i64",
        "minibatch_size = 256 : i64",
        "macrobatch_size = 4096 : i64",
        "timeout_seconds = 2.500000e+00 : f64",
        "start_timeout_seconds = 2.500000e+00 : f64",
    ):
        assert setting in call


def test_float32_falls_back_with_a_reason():
    topology = jax_mok._topology.find(None, None, ())
    chosen, reason = runtime.choose(None, topology, jnp.dtype(jnp.float32), 2)
    assert chosen == "xla" and "bfloat16" in reason
    with pytest.raises(ValueError, match="bfloat16, not in float32"):
        runtime.choose("fused", topology, jnp.dtype(jnp.float32), 2)
    assert jax_mok.implementation_used(np.zeros((2, 64), jnp.bfloat16), expert_axis=None) == "fused"
    assert jax_mok.implementation_used(np.zeros((2, 64), np.float32), expert_axis=None) == "xla"


def test_several_gpus_have_to_be_asked_for():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("expert",))
    topology = jax_mok._topology.find(mesh, "expert", ())
    chosen, reason = runtime.choose(None, topology, jnp.dtype(jnp.bfloat16), 2)
    assert chosen == "xla" and "has to be asked for" in reason
    assert runtime.choose("fused", topology, jnp.dtype(jnp.bfloat16), 2)[0] == "fused"


def test_reason_says_where_gradients_come_from():
    topology = jax_mok._topology.find(None, None, ())
    chosen, reason = runtime.choose(None, topology, jnp.dtype(jnp.bfloat16), 2)
    assert chosen == "fused" and "gradients by plain JAX" in reason


def test_more_slots_than_the_kernels_take():
    topology = jax_mok._topology.find(None, None, ())
    chosen, reason = runtime.choose(None, topology, jnp.dtype(jnp.bfloat16), 33)
    assert chosen == "xla" and "32 slots" in reason


def has_cuda_plugin() -> bool:
    found = importlib.util.find_spec
    return found("jax_plugins") is not None and found("jax_plugins.xla_cuda13") is not None


COLLECTIVES = ("AllReduce", "AllGather", "ReduceScatter", "AllToAll", "CollectivePermute")


def issued(text: str):
    """(kind, stream, what else is under way as (kind, stream)) of each operation of a schedule as
    XLA dumps it: calls and collectives, in the order of their issue."""
    under_way = {}  # by the id of its start
    start = None  # the one that the operations further to the right belong to: (indent, id, stream)
    for line in text.splitlines():
        match = re.match(r"( *)\d+: k(\w+)", line)
        if not match:
            continue
        indent, kind = len(match[1]), match[2]
        if start is not None and indent <= start[0]:
            start = None
        name = re.search(r"async_id=(\d+)", line)
        if kind == "AsyncStart":
            start = indent, name[1], re.search(r"stream=(\w+\[\d+\])", line)[1]
        elif kind == "AsyncDone":
            under_way.pop(name[1], None)
        elif kind in COLLECTIVES or kind == "CustomCall":
            stream = start[2] if start else "main"
            yield kind, stream, list(under_way.values())
            if start:
                under_way[start[1]] = kind, stream


@pytest.mark.skipif(not has_cuda_plugin(), reason="needs JAX's CUDA 13 plugin")
@pytest.mark.parametrize("flags", ["", "--xla_gpu_enable_latency_hiding_scheduler=true"])
def test_nothing_that_waits_for_a_peer_runs_beside_a_call(flags, tmp_path):
    """A call holds every multiprocessor until its peers have come. A collective of XLA on another
    stream meanwhile, a synchronous one on the main stream say, would be a deadlock."""
    worker = pathlib.Path(__file__).with_name("cuda_schedule_worker.py")
    subprocess.run(
        [sys.executable, str(worker), str(tmp_path), flags],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        check=True,
    )
    schedules = sorted(tmp_path.glob("*.thunk_sequence.txt"))
    assert len(schedules) == 2
    for schedule in schedules:
        operations = list(issued(schedule.read_text()))
        kinds = [kind for kind, _, _ in operations]
        assert kinds.count("CustomCall") >= 3 and set(kinds) & set(COLLECTIVES), kinds
        streams = {stream for kind, stream, _ in operations if kind == "CustomCall"}
        assert streams == {"communication_stream[0]"}
        for kind, stream, others in operations:
            for other, its_stream in others:
                if "CustomCall" in (kind, other):
                    assert stream == its_stream, f"{kind} beside {other} in {schedule.name}"


def test_export_for_cuda(mesh):
    args, ids = on_mesh(mesh, MACHINE)
    exported = jax.export.export(
        jax.jit(lambda a, i: fused(a, ids=i)),
        platforms=["cuda"],
        disabled_checks=jax_mok.disabled_safety_checks(),
    )(args, ids)
    assert exported.nr_devices == NUM_RANKS and FORWARD_CUDA in exported.mlir_module()


def test_faults_in_words():
    fault = dict(code=1, rank=1, phase=0, tile=0, counter=3, value=6, target=7, call=7)
    assert "rank 3 did not come" in _cuda._describe(fault)
    assert "phase gate_up" in _cuda._describe(fault | {"phase": 2})
    bad_id = dict(code=3, rank=1, phase=0, tile=2, counter=17, value=99, target=1, call=7)
    assert "expert_ids[17, 1] of rank 2 is 99" in _cuda._describe(bad_id)
    assert "rank 3 gave the call up" in _cuda._describe(fault | {"code": 2})
