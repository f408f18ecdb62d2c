"""`python -m jax_mok profile` on traces made by hand, with known numbers, read by JAX's reader.

Times in these traces are in ms unless a name says otherwise.
"""

import dataclasses
import gzip
import json
import os
import pathlib
import re
import subprocess
import sys

import cases
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.profiler import ProfileData

from jax_mok import __main__ as command_line
from jax_mok.profile import analysis, classify, hlo, origin, steps, trace
from jax_mok.profile.classify import Classifier

MS = 1_000_000_000  # ps


@dataclasses.dataclass
class Event:
    name: str
    start: float
    end: float
    stats: dict = dataclasses.field(default_factory=dict)


def op(name, start, end, hlo_op="", scope="", program="jit_step", program_id=7, prefix="jit(step)"):
    """A kernel with the stats that XLA's annotations leave."""
    stats = dict(correlation_id=1, tf_op="XlaModule:")
    if program:
        stats |= dict(hlo_module=program, program_id=program_id)
    if hlo_op:
        stats["hlo_op"] = hlo_op
    if scope:
        stats |= dict(prefix=prefix, name=scope)
    return Event(name, start, end, stats)


def gemm(start, end, scope="mlp/dot_general", hlo_op="dot.1", **kw):
    return op("nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_NNT", start, end, hlo_op, scope, **kw)


def expert(start, end, **kw):
    return gemm(start, end, scope="moe/experts/dot_general", hlo_op="dot.2", **kw)


def all_to_all(start, end, scope="moe/dispatch/all_to_all", hlo_op="all-to-all-start.1", **kw):
    return op("ncclDevKernel_SendRecv(x)", start, end, hlo_op, scope, **kw)


def all_gather(start, end, scope="dense/dot_general", **kw):
    return op("ncclDevKernel_AllGather_RING_LL(x)", start, end, "all-gather-start.1", scope, **kw)


def sort(start, end, scope="moe/sort", **kw):
    return op("sort_2", start, end, "sort.2", scope, **kw)


def gather(start, end, scope="moe/gather", **kw):
    return op("loop_gather_fusion", start, end, "loop_gather_fusion", scope, **kw)


def shifted(event, by):
    return dataclasses.replace(event, start=event.start + by, end=event.end + by)


def repeated(events, times, period):
    return [shifted(e, i * period) for i in range(times) for e in events]


def quoted(text) -> str:
    text = text if isinstance(text, bytes) else text.encode()
    return '"' + "".join(f"\\{byte:03o}" for byte in text) + '"'


def plane(name, lines, protos=None) -> str:
    """Text form of an XPlane: lines = {name: [Event]}; protos = {program id: HloProto}."""
    events, stats, out = {}, {}, [f"name: {quoted(name)}"]
    number = lambda table, key: table.setdefault(key, len(table) + 1)

    def stat(key, value):
        field = f"str_value: {quoted(value)}" if isinstance(value, str) else f"int64_value: {value}"
        return f"stats {{ metadata_id: {number(stats, key)} {field} }}"

    for i, (line, contents) in enumerate(lines.items()):
        out.append(f"lines {{ id: {i} name: {quoted(line)} timestamp_ns: 1000")
        for e in contents:
            at, length = round(e.start * MS), round((e.end - e.start) * MS)
            out.append(f"events {{ metadata_id: {number(events, e.name)} offset_ps: {at}")
            out.append(f"duration_ps: {length} {' '.join(stat(*s) for s in e.stats.items())} }}")
        out.append("}")
    entry = "value {{ id: {1} name: {0} }} }}".format
    out += [f"event_metadata {{ key: {i} {entry(quoted(n), i)}" for n, i in events.items()]
    for program_id, proto in (protos or {}).items():
        # As XLA does: the key means nothing, the name holds the program's id.
        value = f"metadata_id: {number(stats, 'Hlo Proto')} bytes_value: {quoted(proto)}"
        value = f"id: 1 name: {quoted(f'jit_step({program_id})')} stats {{ {value} }}"
        out.append(f"event_metadata {{ key: 1 value {{ {value} }} }}")
    out += [f"stat_metadata {{ key: {i} {entry(quoted(n), i)}" for n, i in stats.items()]
    return f"planes {{ {' '.join(out)} }}"


def gpu(lines, number=0) -> str:
    return plane(f"/device:GPU:{number}", lines)


def write(folder: pathlib.Path, *planes, run="2026_01_02_03_04_05", host="host0") -> pathlib.Path:
    """A trace below `folder`, as jax.profiler lays it down; returns `folder`."""
    below = folder / "plugins" / "profile" / run
    below.mkdir(parents=True, exist_ok=True)
    serialized = ProfileData.text_proto_to_serialized_xspace(" ".join(planes))
    assert planes == () or serialized, "the text form is wrong"
    (below / f"{host}.xplane.pb").write_bytes(serialized)
    return folder


def times(folder, experts=None, **kw) -> list[analysis.DeviceTimes]:
    return analysis.analyse(trace.read(folder, **kw), Classifier(experts))


def close(value):
    return pytest.approx(value, abs=1e-5)


# One step of 20 ms. Exposed: all-to-all 10-12 and 13-14 and 17-18, all-gather 18-19; a sort from
# 12 to 13 that nothing hides, a gather that a GEMM hides, idle 19-20.
COMPUTE = [expert(0, 6), gemm(6, 10), sort(12, 13), gather(14, 17)]
OTHERS = [all_to_all(8, 12), all_to_all(13, 15), all_to_all(16, 18), all_gather(17.5, 19)]
HIDING = [gemm(14.5, 16.5)]


def test_known_overlaps(tmp_path):
    streams = {
        "Stream #13(Compute)": repeated(COMPUTE, 4, 20),
        "Stream #14(Compute)": repeated(OTHERS, 4, 20),
        "Stream #15(Compute)": repeated(HIDING, 4, 20),
    }
    (d,) = times(write(tmp_path, gpu(streams)))
    assert d.steps.source == "executions of jit_step, found from its kernels"
    assert len(d.steps.spans) == 3 and d.step == close(20)
    assert d.busy == {
        classify.EXPERTS: close(6),
        classify.JAX_MOK: 0,
        classify.GEMM: close(6),
        classify.OTHER: 0,
        classify.SORT: close(1),
        classify.GATHER: close(3),
        classify.COPY: 0,
        classify.COMMUNICATION: close(4 + 2 + 3),
    }
    # The gather is alone from 14 to 14.5 and from 16.5 to 17, at times beside communication.
    assert d.alone[classify.GEMM] == close(6) and d.alone[classify.GATHER] == close(1)
    assert d.exposed == close(2 + 1 + 2) and d.idle == close(1)
    assert sum(d.alone.values()) + d.idle == close(d.step)
    # Of MoE alone: 10-12, 13-14 and 17-17.5; then the all-gather runs beside it, or alone.
    assert d.by_scope.communication == close(3.5)
    assert d.by_scope.rearranging == close(1 + 0.5 + 0.5)
    assert d.at_most == d.by_scope
    assert d.unplaced == close(1)
    assert d.unknown == 0
    ops = {(r.label.kind, r.label.op): (r.ms, r.calls) for r in d.rows}
    assert ops[classify.COMMUNICATION, "all-to-all"] == (close(8), close(3))
    assert ops[classify.SORT, "sort"] == (close(1), close(1))


def test_drawing_of_a_step(tmp_path):
    lines = {f"Stream #{i}": events for i, events in enumerate((COMPUTE, OTHERS, HIDING))}
    (device,) = trace.read(write(tmp_path, gpu(lines))).devices
    step = analysis.draw(device, (1000.0, 1000.0 + 20e6), Classifier())
    close_to = lambda *pieces: [(close(a), close(b)) for a, b in pieces]
    assert step.running[classify.COMMUNICATION] == close_to((8, 4), (13, 2), (16, 3))
    assert step.moe[classify.COMMUNICATION] == close_to((8, 4), (13, 2), (16, 2))
    assert step.exposed == close_to((10, 2), (13, 1), (17, 2))
    assert step.running[classify.GEMM] == close_to((6, 4), (14.5, 2))
    assert step.length == close(20) and step.moe[classify.EXPERTS] == []


def test_nested_kernels_count_once(tmp_path):
    """Communication in communication, compute in compute, and two alike at the same time."""
    dots = [gemm(*at, hlo_op=f"dot.{i}") for i, at in enumerate(((0, 10), (2, 4), (0, 10)))]
    spans = ((20, 30), (22, 25), (29, 32), (20, 30))
    sent = [all_to_all(*at, hlo_op=f"all-to-all-start.{i}") for i, at in enumerate(spans)]
    streams = {
        "Stream #1": [dots[0], sent[0]],
        "Stream #2": [dots[1], *sent[1:3]],
        "Stream #3": [dots[2], sent[3]],
    }
    (d,) = times(write(tmp_path, gpu(streams)))
    assert len(d.steps.spans) == 1 and "whole trace" in d.steps.source
    assert d.step == close(32)
    assert d.busy[classify.GEMM] == close(10)
    assert d.exposed == d.busy[classify.COMMUNICATION] == close(12)
    assert d.idle == close(10)
    assert d.by_scope.total == close(12)


def test_kernels_that_cross_the_end_of_a_step(tmp_path):
    # The mark of a step is the op that comes first; the collective runs on into the next step.
    step = [gemm(0, 2), all_to_all(8, 11)]
    (d,) = times(write(tmp_path, gpu({"Stream #1": repeated(step, 5, 10)})))
    assert len(d.steps.spans) == 4 and d.step == close(10)
    # In each step 2 ms at its end; the 1 ms before it lies under the GEMM of the next.
    assert d.exposed == close(2)
    assert d.busy[classify.COMMUNICATION] == close(2 + 3 / 4)
    ((row),) = [r for r in d.rows if r.label.kind == classify.COMMUNICATION]
    assert row.ms == close(2 + 3 / 4)


def test_two_devices_and_the_one_that_others_wait_for(tmp_path):
    fast = [gemm(0, 4), all_to_all(4, 10)]
    slow = [gemm(0, 8), all_to_all(8, 10)]
    planes = [gpu({"Stream #1": repeated(s, 3, 10)}, number=i) for i, s in enumerate((fast, slow))]
    devices = times(write(tmp_path, *planes))
    assert [d.name for d in devices] == ["GPU:0", "GPU:1"]
    assert [d.exposed for d in devices] == [close(6), close(2)]
    assert analysis.slowest(devices).name == "GPU:1"


def test_hosts_of_one_run_are_read_together(tmp_path):
    for host in ("a", "b"):
        write(tmp_path, gpu({"Stream #1": repeated([gemm(0, 4)], 3, 10)}), host=host)
    assert [(d.host, d.name) for d in times(tmp_path)] == [("a", "GPU:0"), ("b", "GPU:0")]


class TestSteps:
    def test_loops_and_helpers_are_no_steps(self, tmp_path):
        """8 layers in a loop, ops around it, a small program between, one long pause."""
        layer = [expert(0, 1), sort(1, 2)]
        step = [
            gather(0, 1, scope="embed/gather"),
            *repeated([shifted(e, 1) for e in layer], 8, 2),
            op("loop_add_fusion", 17, 18, "loop_add_fusion.3", "loss/add"),
        ]
        helper = [
            op("loop_convert_fusion", at, at + 0.5, "convert.1", program="jit_helper", program_id=9)
            for at in (18.5, 18.8)
        ]
        events = repeated([*step, *helper], 5, 20)
        events += [shifted(e, 200) for e in repeated(step, 2, 20)]
        (d,) = times(write(tmp_path, gpu({"Stream #1": events})))
        assert d.step == close(20) and len(d.steps.spans) == 5 and d.steps.left_out == 1
        assert d.busy[classify.EXPERTS] == close(8)

    def test_a_trace_that_begins_within_a_step(self, tmp_path):
        step = [gemm(0, 2), sort(3, 4), expert(5, 6)]
        events = repeated(step, 4, 10)[1:]  # the first GEMM was before the trace
        (d,) = times(write(tmp_path, gpu({"Stream #1": events})))
        assert d.step == close(10) and d.busy[classify.EXPERTS] == close(1)

    def test_line_of_modules(self, tmp_path):
        events = repeated([gemm(1, 2, program="")], 4, 10)
        modules = repeated([Event("jit_step(7)", 0, 8), Event("jit_helper(9)", 9, 9.5)], 4, 10)
        lines = {"Stream #1": events, "XLA Modules": modules}
        (d,) = times(write(tmp_path, gpu(lines)))
        assert d.steps.source == "executions of jit_step(7)"
        assert d.step == close(10) and d.busy[classify.GEMM] == close(1)

    def test_line_of_steps_comes_first(self, tmp_path):
        lines = {
            "Steps": [Event(str(i), 20 * i, 20 * i + 19) for i in range(3)],
            "XLA Modules": repeated([Event("jit_step(7)", 0, 8)], 6, 10),
            "Stream #1": repeated([gemm(1, 2)], 6, 10),
        }
        (d,) = times(write(tmp_path, gpu(lines)))
        assert d.steps.source == "steps named in the trace" and d.step == close(20)

    def test_marks_of_the_host_where_no_kernel_names_its_program(self, tmp_path):
        kernels = repeated([op("nvjet_a", 1, 2, program=""), op("b", 3, 4, program="")], 6, 10)
        marks = [Event("train", 20 * i, 20 * i + 5, dict(step_num=i)) for i in range(3)]
        host = plane("/host:CPU", {"python": [Event("other", 0, 50), *marks]})
        (d,) = times(write(tmp_path, gpu({"Stream #1": kernels}), host))
        assert d.steps.source == "step marks of the host" and d.step == close(20)
        assert d.unknown == close(4)

    def test_kernels_that_repeat_where_there_is_nothing_else(self, tmp_path):
        kernels = repeated([op("nvjet_a", 1, 2, program=""), op("b", 3, 4, program="")], 6, 10)
        (d,) = times(write(tmp_path, gpu({"Stream #1": kernels})))
        assert "programs are not named" in d.steps.source and d.step == close(10)

    def test_a_small_program_does_not_mark_the_steps(self, tmp_path):
        """What trains runs in a CUDA graph, nameless; a helper, twice a step, has a name."""
        helper = op("h", 0, 0.1, "h.1", program="jit_helper", program_id=9)
        step = [shifted(helper, 8), shifted(helper, 9), op("nvjet_a", 1, 6, program="")]
        (d,) = times(write(tmp_path, gpu({"Stream #1": repeated(step, 4, 10)})))
        assert d.step == close(10)


class TestKinds:
    @pytest.mark.parametrize(
        "name, hlo_op, op_name, kind, moe",
        [
            ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)", "", "", classify.COMMUNICATION, None),
            ("ncclDevKernel_SendRecv(x)", "", "", classify.COMMUNICATION, "name"),
            ("ncclDevKernel_SendRecv(x)", "all-to-all.2", "a/b", classify.COMMUNICATION, "name"),
            ("ncclDevKernel_SendRecv(x)", "collective-permute-start", "pipe/x", None, None),
            ("ncclDevKernel_AllGather_RING_LL(x)", "all-gather-start", "moe/g", None, "scope"),
            ("ncclDevKernel_AllReduce_Sum_f32(x)", "all-reduce-start", "moe/p", None, "all-reduce"),
            ("MemcpyP2P", "", "", classify.COMMUNICATION, "name"),
            ("MemcpyD2D", "ragged-all-to-all.1", "x", classify.COMMUNICATION, "name"),
            ("void deep_ep::intranode::dispatch<8>(x)", "", "", classify.COMMUNICATION, "name"),
            ("MemcpyD2D", "copy.4", "moe/x", classify.COPY, None),
            ("Memset", "", "", classify.COPY, None),
            ("nvjet_sm90_hsh_128x256", "", "", classify.GEMM, None),
            ("nvjet_sm90_hsh_128x256", "custom-call.1", "moe/dot_general", classify.EXPERTS, None),
            ("gemm_fusion_dot_3", "gemm_fusion_dot.3", "Experts_0/dot", classify.EXPERTS, None),
            ("gemm_fusion_dot_3", "gemm_fusion_dot.3", "moe/router/dot", classify.GEMM, None),
            ("mosaic_gpu_kernel", "custom-call.9", "x/ragged_dot", classify.EXPERTS, None),
            ("ragged_contracting_dim_dot_sm90_mosaic_gpu_kernel", "", "", classify.EXPERTS, None),
            ("pallas_gmm_kernel", "custom-call.9", "x/pallas_call", classify.EXPERTS, None),
            ("void cutlass::Kernel<GroupProblemShape<x>>", "", "", classify.EXPERTS, None),
            ("cudnn_generated_fort_native_sdpa_sm90_flash", "", "", classify.GEMM, None),
            ("fmha_cutlassF_bf16", "custom-call.2", "MoE_Net/attn/fmha", classify.GEMM, None),
            (
                "void cub::DeviceRadixSortOnesweepKernel<x>",
                "custom-call.3",
                "moe/sort",
                None,
                "scope",
            ),
            ("sort_2", "sort.2", "sampling/sort", classify.SORT, None),
            ("sort_2", "", "", classify.SORT, "name"),
            ("topk_kernel", "custom-call.5", "moe/router/top_k", classify.SORT, None),
            ("input_scatter_fusion", "input_scatter_fusion", "moe/scatter-add", None, "scope"),
            (
                "loop_gather_fusion",
                "loop_gather_fusion",
                "moe_net/embed/take",
                classify.GATHER,
                None,
            ),
            ("loop_transpose_fusion", "loop_transpose_fusion", "x", classify.COPY, None),
            ("loop_add_fusion", "loop_add_fusion.2", "moe/add", classify.OTHER, None),
            ("void jax_mok::cuda::forward_sm90<x>", "custom-call", "x", classify.JAX_MOK, None),
        ],
    )
    def test_names(self, name, hlo_op, op_name, kind, moe):
        kernel = trace.Kernel(name, 0, 1, "Stream", hlo_op, "jit_f", 1, op_name)
        label = Classifier().label(kernel, None)
        assert label.moe == moe
        if kind is not None:
            assert label.kind == kind

    def test_the_name_of_the_jitted_function_is_no_scope(self):
        kernel = dict(start=0, end=1, stream="s", hlo_op="sort.1", program="jit_moe_step")
        of = lambda op_name: Classifier().label(
            trace.Kernel("sort_1", op_name=op_name, **kernel), None
        )
        assert of("jit(moe_step)/sampling/sort").moe is None
        assert of("jit(moe_step)/transpose(jvp(Block))/moe/sort").moe == classify.BY_SCOPE
        assert of("jit(step)/jvp(MoE)/while/body/sort").scope == "jvp(MoE)"

    def test_more_scopes_by_the_option(self, tmp_path):
        step = [gemm(0, 1, scope="switch_ffn/dot_general"), sort(1, 2, scope="switch_ffn/sort")]
        write(tmp_path, gpu({"Stream #1": repeated(step, 3, 4)}))
        (plain,), (named,) = times(tmp_path), times(tmp_path, experts="switch_ffn")
        assert plain.busy[classify.EXPERTS] == 0 and plain.at_most.total == 0
        assert named.busy[classify.EXPERTS] == close(1) and named.by_scope.total == close(1)

    def test_range_of_what_could_be_saved(self, tmp_path):
        step = [
            gemm(0, 1),
            all_to_all(1, 3),  # by its scope
            all_to_all(3, 6, scope="x/all_to_all"),  # by its op alone
            op("ncclDevKernel_AllReduce(x)", 6, 7, "all-reduce-start.1", "moe/dot_general"),
            gather(7, 8, scope=""),  # by its kernel name alone
        ]
        (d,) = times(write(tmp_path, gpu({"Stream #1": repeated(step, 3, 10)})))
        assert d.by_scope.total == close(2)
        assert d.at_most.communication == close(2 + 3 + 1)
        assert d.at_most.rearranging == close(1)
        assert d.unknown == 0  # the gather has its HLO op


def hlo_proto(function, *arguments) -> tuple[bytes, dict[str, str]]:
    """HloProto of a function compiled for this machine, and its instructions' op names."""
    compiled = jax.jit(function).lower(*arguments).compile()
    (module,) = compiled.runtime_executable().hlo_modules()
    content = module.as_serialized_hlo_module_proto()
    size, length = len(content), b""
    while size > 127:
        length, size = length + bytes([size & 127 | 128]), size >> 7
    return b"\x0a" + length + bytes([size]) + content


def test_what_the_layer_runs_lies_in_a_moe_scope(implementation):
    """Of a model whose own scopes say nothing: forward and backward, by any implementation."""
    case = cases.make(tokens=(16,))
    mesh = cases.mesh((4,), ("expert",))
    loss = lambda a: case.loss(a, mesh=mesh, implementation=implementation)

    def step(args):
        return jax.value_and_grad(loss)(args), jnp.tanh(args[0])  # tanh: the model's own

    text = jax.jit(step).lower(case.args).compile().as_text()
    pattern = r' (custom-call|all-gather|reduce-scatter|gather|tanh)\(.*op_name="(jit\(step\)/.*?)"'
    kernel = dict(start=0, end=1, stream="s", program="jit_step")
    found = {True: set(), False: set()}
    for opcode, op_name in re.findall(pattern, text):
        kernel_of_it = trace.Kernel(opcode, hlo_op=opcode, op_name=op_name, **kernel)
        label = Classifier().label(kernel_of_it, None)
        found[label.inside].add((opcode, "transpose" in op_name))
    both = lambda *opcodes: {(opcode, back) for opcode in opcodes for back in (False, True)}
    if implementation == "fused":
        assert both("custom-call") <= found[True]
    else:
        assert both("all-gather", "reduce-scatter", "gather") <= found[True], found
    assert found[False] == {("tanh", False)}


def test_hlo_tells_what_a_fusion_holds(tmp_path):
    """XLA names a fusion after its root; the gather inside it, and its scope, are in the HLO."""

    def step(x, i):
        with jax.named_scope("moe"):
            rows = x[i]
        return rows * 2 + 1

    proto = hlo_proto(step, jnp.ones((64, 32)), jnp.arange(16))
    programs = plane("/host:metadata", {}, {7: proto})
    parsed = hlo.Programs(ProfileData.text_proto_to_serialized_xspace(programs))
    assert len(parsed) == 1
    found = {
        name: i
        for name, i in parsed[7].instructions.items()
        if i.opcode == "fusion" and any(opcode == "gather" for opcode, _ in i.inner)
    }
    assert found, sorted(parsed[7].instructions)
    name, instruction = next(iter(found.items()))
    assert "moe/gather" in dict(instruction.inner)["gather"]
    assert parsed[8].instructions == {}

    fusion = dict(scope="add", program_id=7)
    annotated = [op("fusion_kernel", 0, 3, name, **fusion)]
    (d,) = times(write(tmp_path / "a", gpu({"Stream #1": annotated}), programs))
    assert d.by_scope.rearranging == d.busy[classify.GATHER] == close(3)
    # In a CUDA graph from before the trace: nothing but the kernel's name, which is XLA's.
    nameless = [op(name.replace(".", "_"), 0, 3, program="")]
    (d,) = times(write(tmp_path / "b", gpu({"Stream #1": nameless}), programs))
    assert d.by_scope.rearranging == close(3) and d.unknown == 0


TRACES = pathlib.Path(__file__).parent / "traces"


def unpacked(name: str, folder: pathlib.Path) -> pathlib.Path:
    """A real trace of one H200 (jax 0.11.2, CUDA 13.0), cut down to one step or two and to what is
    read.

    h200_train_step, h200_fused_forward: three layers in a scan, attention and MoE (4096 tokens,
    H 1024, I 512, 16 experts, top-4), the MoE in the scopes moe and moe/router, everything in CUDA
    graphs that were made before the trace.
    """
    path = folder / f"{name}.xplane.pb"
    path.write_bytes(gzip.decompress((TRACES / f"{path.name}.gz").read_bytes()))
    return path


def test_real_trace_of_a_training_step(tmp_path):
    """implementation="xla", forward and backward. Kernels carry nothing but their names here."""
    (d,) = times(unpacked("h200_train_step", tmp_path))
    assert d.steps.source == "executions of jit_train_step, found from its kernels"
    assert len(d.steps.spans) == 1 and 33 < d.step < 34
    assert d.unknown == 0 and d.exposed == 0
    calls = lambda *of: sum(r.calls for r in d.rows if (r.label.kind, r.label.op) == of)
    # cuBLAS: of a layer's products with experts' weights, gate and up are one; six backward.
    assert calls(classify.EXPERTS, "custom-call") == close(3 * (2 + 6))
    # Of attention four, and the two of the output layer's gradients, outside the scan.
    assert calls(classify.GEMM, "custom-call") == close(3 * 4 + 2)
    # The router's products are not the experts'.
    router = [r for r in d.rows if "router" in r.label.scope and r.label.kind == classify.GEMM]
    assert sum(r.calls for r in router) == close(3 * 3)
    # One sort of the (token, slot) pairs a layer, for which XLA makes six kernels.
    assert calls(classify.SORT, "sort") == close(3 * 6)
    assert d.by_scope == d.at_most and d.by_scope.communication == 0
    assert 0.9 * (d.busy[classify.SORT] + d.busy[classify.GATHER]) < d.by_scope.rearranging < 3.5
    assert sum(d.alone.values()) + d.idle == pytest.approx(d.step)


def test_real_trace_of_the_fused_forward(tmp_path):
    (d,) = times(unpacked("h200_fused_forward", tmp_path))
    fused = [r for r in d.rows if r.label.kind == classify.JAX_MOK]
    # Three layers; four kernels of the plan and the one that computes.
    assert sum(r.calls for r in fused) == close(3 * 5)
    assert d.busy[classify.JAX_MOK] == close(sum(r.ms for r in fused)) and d.step < 1.7
    assert d.busy[classify.EXPERTS] == d.at_most.total == 0


def test_real_trace_of_a_step_with_tokamax(tmp_path):
    """`bench --step --layers 1`: attention and MoE, rematerialised, AdamW; 16384 tokens, H 2048,
    I 768, 128 experts, top-8. The experts' kernels are Mosaic's and carry only their names."""
    (d,) = times(unpacked("h200_step_tokamax", tmp_path))
    assert d.steps.source == "executions of jit_step, found from its kernels"
    # Three products forward, three again for the backward, six in it.
    experts = [r for r in d.rows if r.label.kind == classify.EXPERTS]
    assert sum(r.calls for r in experts) == close(12)
    assert d.busy[classify.EXPERTS] == close(sum(r.ms for r in experts))
    assert 15 < d.busy[classify.EXPERTS] < 15.3
    assert 0 < d.busy[classify.GEMM] < 8.1 and d.unknown < 4.4
    assert d.by_scope == d.at_most and 1.9 < d.by_scope.rearranging < 2.1


def test_real_trace_of_a_step_with_the_fused_layer(tmp_path):
    """The same step; nothing of the layer is recomputed before its backward."""
    (d,) = times(unpacked("h200_step_fused", tmp_path))
    calls = {r.label.scope: r.calls for r in d.rows if r.label.kind == classify.JAX_MOK}
    # Four kernels of the plan and the one that computes, in each pass.
    backward = "transpose(jvp(jvp()))/checkpoint/jit(_block)/moe"
    assert calls == {"jvp(jit(_block))/moe": close(5), backward: close(5)}
    assert 8 < d.busy[classify.JAX_MOK] < 8.5 and d.busy[classify.EXPERTS] == 0
    assert d.at_most.total == d.unknown == 0


def test_library_kernels_are_found_by_their_place():
    """In a loop's body: a, call.1, b, call.2, call.3; b and a have kernels of their own names."""
    target = "__cublas$lt$matmul"
    of = lambda name, scope, target="": hlo.Instruction(name, "x", target, scope, ())

    def program(*scopes, targets=(target,) * 3):
        calls = [of(f"call.{i}", *pair) for i, pair in enumerate(zip(scopes, targets), start=1)]
        a, b = of("a.1", "a"), of("b.1", "b")
        body = [a, calls[0], b, *calls[1:]]
        return hlo.Program({i.name: i for i in body}, [[i.name for i in body]])

    def found(program, *names):
        kernels = [trace.Kernel(n, i, i + 1, "s", "", "f", 1) for i, n in enumerate(names)]
        return [i and i.name for i in origin.origins(kernels, {1: program})]

    other_scopes = program("moe/dot", "attn/dot", "moe/dot")
    loop = ["a_1", "lib", "b_1", "lib", "lib", "a_1", "lib", "b_1"]
    assert found(other_scopes, *loop) == [
        *("a.1", "call.1", "b.1", "call.2", "call.3", "a.1", "call.1", "b.1")
    ]
    # Three kernels of two calls: which is whose cannot be told, unless it does not matter.
    split = ["b_1", "lib", "lib", "lib", "a_1"]
    assert found(other_scopes, *split) == ["b.1", None, None, None, "a.1"]
    same_scope = program("moe/dot", "moe/dot", "moe/dot")
    assert found(same_scope, *split) == ["b.1", "call.2", "call.2", "call.2", "a.1"]
    # Kernels of Mosaic and those of libraries do not stand for each other.
    mixed = program("moe/dot", "moe/dot", "moe/dot", targets=(target, "mosaic_gpu_v2", target))
    mosaic = "ragged_dot_mosaic_gpu_kernel"
    assert found(mixed, "b_1", mosaic, "lib", "lib", "a_1")[1:-1] == ["call.2", "call.3", "call.3"]
    assert found(same_scope, "b_1", mosaic, "lib", "lib", "a_1")[1:-1] == [None, "call.2", "call.3"]
    # Copies in between are no calls; a kernel after the last known one stays unknown.
    copies = ["a_1", "memcpy128", "lib", "Memset 0", "b_1", "lib"]
    assert found(other_scopes, *copies) == ["a.1", None, "call.1", None, "b.1", None]


KERNELS = st.lists(
    st.tuples(
        st.integers(0, 30),
        st.integers(1, 12),
        st.sampled_from([expert, gemm, sort, gather, all_to_all, all_gather]),
    ),
    min_size=1,
    max_size=12,
)


@hypothesis.given(KERNELS)
def test_times_are_those_of_counting_every_instant(kernels):
    events = [kind(start, start + length) for start, length, kind in kernels]
    made = [
        trace.Kernel(
            e.name,
            e.start * 1e6,
            e.end * 1e6,
            "Stream #1",
            e.stats["hlo_op"],
            op_name="jit(step)/" + e.stats["name"],
        )
        for e in events
    ]
    labels = [Classifier().label(k, None) for k in made]
    spans = [(0.0, 10e6), (15e6, 40e6)]
    starts, ends = (np.array([getattr(k, f) for k in made]) for f in ("start", "end"))
    line = analysis.Timeline(starts, ends, spans)
    moe = np.array([label.moe is not None for label in labels])
    running = [
        {i for i, k in enumerate(made) if k.start <= (t + 0.5) * 1e6 < k.end}
        for t in (*range(10), *range(15, 40))
    ]
    assert line.length(line.covered(np.ones(len(made), bool))) == sum(map(bool, running)) * 1e6
    only = sum(bool(now) and all(moe[i] for i in now) for now in running)
    assert line.length(line.covered(moe) & ~line.covered(~moe)) == only * 1e6
    shares = analysis._share_inside(starts, ends, spans)
    inside = [sum(i in now for now in running) for i in range(len(made))]
    np.testing.assert_allclose(shares * (ends - starts), np.array(inside) * 1e6)


def run_command(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-P", "-m", "jax_mok", "profile", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"COLUMNS": "150"},
    )


def test_command(tmp_path):
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    streams = {"Stream #13": repeated(COMPUTE, 4, 20), "Stream #14": repeated(OTHERS, 4, 20)}
    planes = [gpu(streams, number=i) for i in range(2)]
    write(tmp_path, *planes)
    kept, picture = tmp_path / "out.json", tmp_path / "out.png"
    done = run_command(tmp_path, "--json", kept, "--picture", picture)
    assert done.returncode == 0, done.stderr
    for text in ("not hidden ms", "by scope names", "upper bound", "GPU:1"):
        assert text in done.stdout
    record = json.loads(kept.read_text())
    first = record["devices"][0]
    assert first["steps"]["mean_ms"] == close(20) and first["steps"]["count"] == 3
    # 10-12 and 13-14 and 17-17.5, and the sort between; the gather is not hidden here.
    assert first["could_save"]["by_scope"]["total_ms"] == close(3.5 + 1 + 3)
    assert first["could_save"]["at_most"]["share_of_step"] == close(7.5 / 20)
    assert picture.read_bytes()[:4] == b"\x89PNG"


def failure(capsys, *arguments) -> str:
    assert command_line.main(["profile", *map(str, arguments)]) == 2
    return capsys.readouterr().err


class TestErrors:
    def test_no_trace(self, tmp_path, capsys):
        assert "no *.xplane.pb" in failure(capsys, tmp_path)
        assert "does not exist" in failure(capsys, tmp_path / "nowhere")

    def test_a_real_trace_of_a_cpu(self, tmp_path, capsys):
        with jax.profiler.trace(tmp_path):
            jax.jit(lambda x: jnp.sin(x).sum())(jnp.ones(100)).block_until_ready()
        message = failure(capsys, tmp_path)
        assert "No GPU kernels" in message and "a trace of CPUs" in message
        assert "/host:CPU (" in message

    def test_a_gpu_on_which_nothing_ran(self, tmp_path, capsys):
        write(tmp_path, gpu({"Stream #1": [Event("MemoryAlloc", 0, 1)]}))
        assert "no kernels on them" in failure(capsys, tmp_path)

    def test_a_broken_file(self, tmp_path, capsys):
        write(tmp_path, gpu({"Stream #1": [gemm(0, 1)]}))
        (path,) = tmp_path.rglob("*.xplane.pb")
        path.write_bytes(path.read_bytes()[:-3])
        assert "not a whole trace file" in failure(capsys, tmp_path)

    def test_a_wrong_pattern(self, tmp_path, capsys):
        assert "no regular expression" in failure(capsys, tmp_path, "--experts", "(")

    @pytest.mark.parametrize("missing, options", [("rich", []), ("matplotlib", ["--picture", "x"])])
    def test_without_the_extra(self, tmp_path, capsys, monkeypatch, missing, options):
        pytest.importorskip("rich")
        found = __import__("importlib.util").util.find_spec
        hide = lambda name, *a: None if name == missing else found(name, *a)
        monkeypatch.setattr("importlib.util.find_spec", hide)
        assert "pip install 'jax_mok[bench]'" in failure(capsys, tmp_path, *options)


def test_the_newest_run_or_the_one_that_is_named(tmp_path, capsys):
    for run, length in (("2026_01_02_03_04_05", 10), ("2026_01_03_00_00_00", 20)):
        write(tmp_path, gpu({"Stream #1": repeated([gemm(0, 4)], 3, length)}), run=run)
    found = trace.read(tmp_path)
    assert (found.name, found.others) == ("2026_01_03_00_00_00", ["2026_01_02_03_04_05"])
    (d,) = times(tmp_path, run="2026_01_02_03_04_05")
    assert d.step == close(10)
    (path,) = (tmp_path / "plugins" / "profile" / "2026_01_02_03_04_05").iterdir()
    assert times(path)[0].step == close(10)  # a file itself
    message = failure(capsys, tmp_path, "--run", "2025")
    assert "no run of the name '2025'" in message and "2026_01_03_00_00_00" in message


def test_steps_of_one_kernel_each():
    """The least that can be a step."""
    kernels = [trace.Kernel("a", i * 10.0, i * 10.0 + 1, "s", "a", "jit_f", 1) for i in range(3)]
    device = trace.Device("GPU:0", "h", kernels, [], [], hlo.Programs(b""), source=None)
    assert steps.find(device).spans == [(0.0, 10.0), (10.0, 20.0)]
