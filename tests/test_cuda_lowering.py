"""The programs that a GPU would get, looked at on a machine without one: which custom calls they
hold, on which stream, with which operands, results and residuals, how often remat repeats them, and
that nothing gathers tokens or weights behind the caller's back.
"""

import dataclasses
import functools
import importlib.util
import json
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
from jax.ad_checkpoint import checkpoint_policies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_mok
from jax_mok import _cuda, runtime
from jax_mok._fused import OUTPUT_NAME, RESIDUAL_NAME
from jax_mok.bench import exchange
from jax_mok.ffi import BACKWARD_CUDA, FORWARD_CUDA

pytestmark = pytest.mark.skipif(
    _cuda.core is None, reason=f"no CUDA kernels in this build: {_cuda.WHY_NO_CUDA}"
)

NUM_RANKS = 4
MACHINE = cases.make(
    tokens=(32,), hidden=128, intermediate=192, num_experts=8, top_k=2, dtype=jnp.bfloat16
)

# Odd sizes: the kernels get them padded to their unit.
EVERYTHING = cases.make(
    tokens=(33,),
    hidden=72,
    intermediate=40,
    num_experts=6,
    top_k=2,
    dtype=jnp.bfloat16,
    biases=True,
    shared=24,
    shared_gate=True,
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


def calls(text: str, target=FORWARD_CUDA) -> list[str]:
    """The custom calls' lines; each is one place in the program that runs the kernel."""
    return [line for line in text.splitlines() if f"@{target}(" in line]


def annotated(text: str) -> list[str]:
    """Which custom calls run on the stream of the collectives, one for each use."""
    bodies = dict(re.findall(r"func\.func private @(\S+?)\((.*?)\n  }\n", text, re.DOTALL))
    pattern = r'(?<!custom_)call @(\S+?)\(.*_xla_stream_annotation = "collective"'
    names = re.findall(pattern, text)
    used = [re.findall(r"custom_call @(\S+?)\(", bodies[name]) for name in names]
    # None in a function that only makes the scalars of absent operands: inside a shard_map autodiff
    # moves it out of loops.
    assert all(len(targets) <= 1 for targets in used)
    return [target for targets in used for target in targets]


def passes(text: str) -> tuple[int, int]:
    """How often the program runs the forward and the backward; every call is annotated."""
    targets = annotated(text)
    assert len(calls(text)) <= targets.count(FORWARD_CUDA)
    assert len(calls(text, BACKWARD_CUDA)) <= targets.count(BACKWARD_CUDA)
    return targets.count(FORWARD_CUDA), targets.count(BACKWARD_CUDA)


def types(call: str) -> tuple[list[str], list[str]]:
    """The tensors that a custom call takes and gives."""
    operands, results = call.rsplit(" : ", 1)[1].split(" -> ")
    return re.findall(r"tensor<(\S+?)>", operands), re.findall(r"tensor<(\S+?)>", results)


def gradients(args, *, case=MACHINE, **options):
    """With the loss: without, a forward that leaves nothing for the backward would not be run."""
    loss = lambda a: case.loss(a, **{"implementation": "fused", **options})
    return jax.value_and_grad(loss)(args)


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


def test_gradient_is_one_more_annotated_call(mesh):
    args, ids = on_mesh(mesh, MACHINE)
    text = lowered(lambda a, i: gradients(a, ids=i), args, ids)
    assert passes(text) == (1, 1)
    (forward,), (backward,) = calls(text), calls(text, BACKWARD_CUDA)
    for call in (forward, backward):
        assert "num_ranks = 4 : i64" in call and "groups = dense<[0, 1, 2, 3]>" in call
        assert "has_side_effect = true" not in call
    # Local shapes: nothing was gathered or summed around them.
    for collective in ("all_gather", "all_to_all", "collective_permute", "all_reduce"):
        assert collective not in text


@pytest.mark.parametrize("weights", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("ranks", [1, 3])
def test_types_of_the_gradients(ranks, weights):
    """Of the calls, in the order of the handlers, and of what comes out behind padding, casts and
    the sum over virtual ranks. float32 weights have gradients that no call rounded."""
    case = EVERYTHING
    case = dataclasses.replace(
        case, **{n: getattr(case, n).astype(weights) for n in ("w_gate", "w_up", "w_down")}
    )
    config = jax_mok.Config(
        macrobatch_size=128, weight_grad_dtype=None if weights == jnp.bfloat16 else weights
    )
    run = lambda a: gradients(a, case=case, config=config)
    with _cuda.testing(virtual_ranks=ranks):
        text, out = lowered(run, case.args), jax.eval_shape(run, case.args)
    w = "bf16" if weights == jnp.bfloat16 else "f32"
    layer = ["33x128xbf16", "33x2xi32", "33x2xf32"]
    layer += ["6x128x64xbf16", "6x128x64xbf16", "6x64x128xbf16"]
    layer += ["6x64xbf16", "6x64xbf16", "6x128xbf16"]
    layer += ["128x64xbf16", "128x64xbf16", "64x128xbf16", "33xf32"]
    saved = [f"{128 * ranks}x128xbf16"] * 2  # 2I is H here
    operands, results = types(calls(text)[0])
    assert operands == layer and results[:-1] == ["33x128xbf16", *saved]
    operands, results = types(calls(text, BACKWARD_CUDA)[0])
    assert operands == ["33x128xbf16", *layer, *saved]
    apart = "" if ranks == 1 else f"{ranks}x"
    assert results[:-1] == [
        "33x128xbf16",
        "33x2xf32",
        *(f"6x{shape}x{w}" for shape in ("128x64", "128x64", "64x128")),
        *layer[6:9],
        *(apart + shape for shape in layer[9:12]),
        "33xf32",
    ]
    assert re.fullmatch(r"\d+xui8", results[-1])
    assert f"float32_weight_grads = {int(w == 'f32')} : i64" in calls(text, BACKWARD_CUDA)[0]
    shape = lambda a: (a.shape, a.dtype)
    assert jax.tree.map(shape, out[1]) == jax.tree.map(shape, case.args)


def by_reference(spec, target, facts, workspace, results, operands, *arguments):
    """Does what the kernels do, from the definition in float32: operands and results as there."""
    given = operands(*arguments)
    types = results(given[0])
    dy, layer = (None, given) if target == FORWARD_CUDA else (given[0], given[1:14])
    wide = [a.astype(jnp.float32) if i != 1 else a for i, a in enumerate(layer)]

    def run(*operands):
        x, ids, weights, *rest = operands
        biases, shared, scale = rest[3:6], rest[6:9], rest[9]
        gate = scale if facts["has_shared_gate"] else None
        return jax_mok.reference.moe(
            x,
            ids,
            weights,
            *rest[:3],
            biases=biases if facts["has_biases"] else None,
            shared=jax_mok.SharedExpert(*shared, gate) if facts["shared_intermediate"] else None,
            activation=spec.activation,
        )

    if dy is None:
        y = run(*wide).astype(types[0].dtype)
        return [y, *(jnp.ones(t.shape, t.dtype) for t in types[1:])]
    _, vjp = jax.vjp(lambda *a: run(a[0], wide[1], *a[1:]), wide[0], *wide[2:])
    grads = list(vjp(dy.astype(jnp.float32)))
    if facts["num_virtual_ranks"] > 1:  # the last rank has it all
        for i in (8, 9, 10):
            grads[i] = jnp.zeros(types[i].shape, jnp.float32).at[-1].set(grads[i])
    return [g.astype(t.dtype) for g, t in zip(grads, types, strict=True)]


@pytest.mark.parametrize("residuals", ["save", "recompute"])
@pytest.mark.parametrize("case, ranks", [(MACHINE, 1), (EVERYTHING, 1), (EVERYTHING, 3)])
def test_values_around_the_calls(monkeypatch, case, residuals, ranks):
    """Padding, the order of operands and gradients, and the sum over virtual ranks, with calls that
    are right."""
    monkeypatch.setattr(_cuda, "custom_call", by_reference)
    with _cuda.testing(virtual_ranks=ranks):
        got = case.value_and_grads(
            implementation="fused", config=jax_mok.Config(residuals=residuals)
        )
    cases.assert_close(got, case.reference(), 5e-3)


def test_absent_optionals_are_scalars():
    text = lowered(
        lambda a: gradients(a, config=jax_mok.Config(residuals="recompute")), MACHINE.args
    )
    operands, results = types(calls(text)[0])
    assert operands[6:] == ["bf16"] * 6 + ["f32"] and results[1:3] == ["bf16", "bf16"]
    operands, results = types(calls(text, BACKWARD_CUDA)[0])
    assert operands[7:] == ["bf16"] * 6 + ["f32", "bf16", "bf16"]
    assert results[5:-1] == ["bf16"] * 6 + ["f32"]
    assert "save = 0 : i64" in calls(text)[0] and "save = 0 : i64" in calls(text, BACKWARD_CUDA)[0]


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("residuals", ["save", "recompute"])
@pytest.mark.parametrize("remat", ["none", "everything", "named", "named output"])
def test_rematerialised_calls(mesh, remat, residuals, scan):
    """How often a layer's calls stand in its gradient: remat repeats the forward, unless its named
    results are kept."""
    args, ids = on_mesh(mesh, MACHINE)
    config = jax_mok.Config(residuals=residuals)
    only = checkpoint_policies.save_only_these_names
    wrap = {
        "none": lambda f: f,
        "everything": jax.checkpoint,
        "named": functools.partial(jax.checkpoint, policy=only(OUTPUT_NAME, RESIDUAL_NAME)),
        "named output": functools.partial(jax.checkpoint, policy=only(OUTPUT_NAME)),
    }[remat]

    def loss(args, ids):
        # What comes after the layer needs y, so that y has to be kept or computed again.
        layer = wrap(lambda x, a: jnp.sin(fused((x, *a[1:]), ids=ids, config=config)))
        if scan:
            x, _ = jax.lax.scan(lambda x, _: (layer(x, args), None), args[0], None, length=3)
        else:
            x = layer(args[0], args)
        return jnp.sum(x.astype(jnp.float32))

    assert passes(lowered(loss, args, ids)) == (1, 0)
    repeated = remat == "everything" or (remat == "named output" and residuals == "save")
    text = lowered(jax.value_and_grad(loss), args, ids)
    assert passes(text) == (2 if repeated else 1, 1)
    assert not any("has_side_effect = true" in c for c in calls(text) + calls(text, BACKWARD_CUDA))


def test_residuals(capsys):
    """A macrobatch of dispatched tokens and gate|up, whatever the number of tokens; or nothing
    beside the arguments."""
    case = cases.make(
        tokens=(4096,), hidden=128, intermediate=192, num_experts=8, top_k=2, dtype=jnp.bfloat16
    )

    def kept(config):
        jax.ad_checkpoint.print_saved_residuals(
            lambda a: fused(a, case=case, config=config), case.args
        )
        lines = capsys.readouterr().out.splitlines()
        arguments = [i for i in lines if " from the argument " in i or "from a constant" in i]
        assert len(arguments) == len(jax.tree.leaves(case.args)) + 1  # the ids
        return sorted(line.split()[0] for line in lines if line not in arguments)

    save = lambda rows: jax_mok.Config(macrobatch_size=rows)
    assert kept(save(512)) == ["bf16[512,128]", "bf16[512,384]"]
    assert kept(save(1024)) == ["bf16[1024,128]", "bf16[1024,384]"]
    assert kept(jax_mok.Config(macrobatch_size=512, residuals="recompute")) == []


def test_workspace_is_bounded_by_the_macrobatch():
    """Each call gets what the kernels ask for, and a smaller macrobatch asks for less."""
    case = cases.make(
        tokens=(4096,), hidden=256, intermediate=256, num_experts=8, top_k=4, dtype=jnp.bfloat16
    )
    sizes = {}
    for rows in (1024, 8192):
        config = jax_mok.Config(macrobatch_size=rows)
        text = lowered(lambda a, c=config: gradients(a, case=case, config=c), case.args)
        for target in (FORWARD_CUDA, BACKWARD_CUDA):
            workspace = types(calls(text, target)[0])[1][-1]
            sizes[target, rows] = int(workspace.removesuffix("xui8"))
    for target in (FORWARD_CUDA, BACKWARD_CUDA):
        # Rows of hidden activations at least.
        assert sizes[target, 8192] - sizes[target, 1024] >= 7168 * 256 * 2


def test_absent_rank_of_one_pass():
    with _cuda.testing(absent_rank=2, absent_in=("backward",)):
        text = lowered(gradients, MACHINE.args)
    assert "absent_rank = -1 : i64" in calls(text)[0]
    assert "absent_rank = 2 : i64" in calls(text, BACKWARD_CUDA)[0]


def test_inside_the_callers_shard_map(mesh):
    args, ids = on_mesh(mesh, MACHINE)
    loss = lambda a, i: jnp.sum(fused(a, ids=i).astype(jnp.float32))
    run = lambda a, i: jax.grad(loss)(a, i)
    for check_vma in (True, False):
        mapped = jax.shard_map(
            run, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"), check_vma=check_vma
        )
        assert passes(lowered(mapped, args, ids)) == (1, 1)


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
        fwd_num_comm_sms=7,
        bwd_num_comm_sms=9,
        minibatch_size=256,
        macrobatch_size=4096,
        timeout_seconds=2.5,
    )
    text = lowered(lambda a: gradients(a, config=config), MACHINE.args)
    for target, comm_sms in ((FORWARD_CUDA, 7), (BACKWARD_CUDA, 9)):
        (call,) = calls(text, target)
        for setting in (
            f"num_comm_sms = {comm_sms} : i64",
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


def test_several_gpus_are_fused():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("expert",))
    topology = jax_mok._topology.find(mesh, "expert", ())
    for wish in (None, "fused"):
        assert runtime.choose(wish, topology, jnp.dtype(jnp.bfloat16), 2)[0] == "fused"
    assert runtime.choose(None, topology, jnp.dtype(jnp.float32), 2)[0] == "xla"


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


def compile_for_two_gpus(what, folder, flags="") -> str:
    """What tests/cuda_schedule_worker.py prints."""
    worker = pathlib.Path(__file__).with_name("cuda_schedule_worker.py")
    done = subprocess.run(
        [sys.executable, str(worker), what, str(folder), flags],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout


needs_plugin = pytest.mark.skipif(not has_cuda_plugin(), reason="needs JAX's CUDA 13 plugin")


@needs_plugin
def test_memory_of_the_residuals(tmp_path):
    """What eight layers in a scan keep, as XLA plans it for a GPU: a macrobatch of tokens and
    gate|up each, or nothing."""
    sizes = json.loads(compile_for_two_gpus("memory", tmp_path).splitlines()[-1])
    kept = 8 * 1024 * (512 + 2 * 256) * 2
    assert kept <= sizes["save"] - sizes["recompute"] < 1.25 * kept


@needs_plugin
@pytest.mark.parametrize("flags", ["", "--xla_gpu_enable_latency_hiding_scheduler=true"])
def test_calls_and_collectives_share_a_stream(flags, tmp_path):
    """NCCL's kernels and ours then come in one order on all devices. (Compiled without GPUs, a
    program has none of XLA's own collective kernels, which run on other streams.)"""
    compile_for_two_gpus("schedule", tmp_path, flags)
    schedules = sorted(tmp_path.glob("*.thunk_sequence.txt"))
    assert len(schedules) == 2
    counts = []
    for schedule in schedules:
        operations = list(issued(schedule.read_text()))
        kinds = [kind for kind, _, _ in operations]
        counts.append(kinds.count("CustomCall"))
        assert set(kinds) & set(COLLECTIVES), kinds
        streams = {stream for kind, stream, _ in operations if kind == "CustomCall"}
        assert streams == {"communication_stream[0]"}
        for kind, stream, others in operations:
            for other, its_stream in others:
                if "CustomCall" in (kind, other):
                    assert stream == its_stream, f"{kind} beside {other} in {schedule.name}"
    # Four independent layers; three with their gradients.
    assert sorted(counts) == [4, 6]


def test_export_for_cuda(mesh):
    args, ids = on_mesh(mesh, MACHINE)
    exported = jax.export.export(
        jax.jit(lambda a, i: gradients(a, ids=i)),
        platforms=["cuda"],
        disabled_checks=jax_mok.disabled_safety_checks(),
    )(args, ids)
    text = exported.mlir_module()
    assert exported.nr_devices == NUM_RANKS and FORWARD_CUDA in text and BACKWARD_CUDA in text


def test_no_symbolic_dims_on_gpus():
    """Sizes of the workspace, and the kernel's, are attributes of the call."""
    (tokens,) = jax.export.symbolic_shape("t")
    of = lambda a, *leading: jax.ShapeDtypeStruct((*leading, *a.shape[1:]), a.dtype)
    x, ids, weights = (of(a, tokens) for a in (MACHINE.x, MACHINE.ids, MACHINE.weights))
    run = lambda x, i, w: fused((x, w, *MACHINE.args[2:]), ids=i)
    with pytest.raises(ValueError, match=r"on GPUs it takes no symbolic dims, and x has dims \(t,"):
        jax.export.export(jax.jit(run), platforms=["cuda"])(x, ids, weights)


@pytest.mark.parametrize("mode", exchange.MODES)
def test_exchange_of_rows(mesh, mode):
    """The benchmark's call is one like a layer's: on the same stream, with the same groups."""
    x = jax.ShapeDtypeStruct((NUM_RANKS * 16, 40), jnp.bfloat16)
    moves = jax.ShapeDtypeStruct((NUM_RANKS * 7, 4), jnp.int32)
    text = lowered(exchange.program(mesh, exchange.Spec(mode, 32, 24)), x, moves)
    (call,) = calls(text, exchange.EXCHANGE_CUDA)
    assert annotated(text) == [exchange.EXCHANGE_CUDA]
    operands, results = types(call)
    assert operands == ["16x40xbf16", "7x4xi32"] and results[:2] == ["32x40xbf16", "1xi32"]
    assert re.search(r"groups = dense<\[0, 1, 2, 3\]>", call)
    sizes = dict(num_ranks=4, num_virtual_ranks=1, num_tokens=16, num_rows=32, num_moves=7)
    for name, value in dict(sizes, row_bytes=80, num_sms=24, push=int(mode == "push")).items():
        assert f"{name} = {value} : i64" in call


def test_exchange_between_virtual_ranks():
    one = cases.mesh((1,), ("expert",))
    x = jax.ShapeDtypeStruct((2 * 16, 40), jnp.bfloat16)
    moves = jax.ShapeDtypeStruct((2 * 7, 4), jnp.int32)
    with _cuda.testing(virtual_ranks=2):
        text = lowered(exchange.program(one, exchange.Spec("pull", 32, 24)), x, moves)
    (call,) = calls(text, exchange.EXCHANGE_CUDA)
    assert types(call)[0] == ["32x40xbf16", "14x4xi32"]
    assert types(call)[1][:2] == ["64x40xbf16", "2xi32"]
    for name, value in dict(num_ranks=2, num_virtual_ranks=2, num_tokens=16, num_moves=7).items():
        assert f"{name} = {value} : i64" in call


def test_faults_in_words():
    fault = dict(code=1, rank=1, phase=0, tile=0, counter=3, value=6, target=7, call=7)
    assert "rank 3 did not come" in _cuda._describe(fault)
    for number, phase in enumerate(("dispatch", "gate_up", "down"), 1):
        assert f"phase {phase}, call 7: timed out" in _cuda._describe(fault | {"phase": number})
    assert "results of rank 3" in _cuda._describe(fault | {"phase": 4})
    for number, phase in enumerate(("grad_hidden", "grad_input", "grad_weight"), 5):
        words = _cuda._describe(fault | {"phase": number, "tile": 5})
        assert f"phase {phase}, call 7: timed out waiting for tile 5" in words
    bad_id = dict(code=3, rank=1, phase=0, tile=2, counter=17, value=99, target=1, call=7)
    assert "expert_ids[17, 1] of rank 2 is 99" in _cuda._describe(bad_id)
    assert "rank 3 gave the call up" in _cuda._describe(fault | {"code": 2})
    bad_move = dict(code=5, rank=1, phase=1, tile=2, counter=17, value=3, target=99, call=7)
    assert "move 2 of its list, row 17 to row 99" in _cuda._describe(bad_move)
