"""Builds csrc/cuda with nvcc alone and calls it through ctypes: kernel tests without JAX.

All ranks are virtual ranks of one launch on one GPU; torch holds the memory.
"""

import ctypes
import dataclasses
import functools
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import kernel_cases

CSRC = pathlib.Path(__file__).resolve().parents[2] / "csrc"
NVCC_FLAGS = [
    "-std=c++17",
    "-O3",
    "-lineinfo",  # for compute-sanitizer
    "-gencode=arch=compute_90a,code=sm_90a",
    "-Xcompiler",
    "-fPIC",
    f"-I{CSRC}",
]
MAX_RANKS = 128


def sources():
    """All kernels, their layouts, and the C interface; not what needs NCCL."""
    folder = CSRC / "cuda"
    found = [*sorted(folder.glob("*.cu")), *sorted(folder.glob("*layout.cc"))]
    return [*found, pathlib.Path(__file__).parent / "kernel_c_api.cc"]


def build(folder=None):
    """Compiles the kernels into a shared library and returns its path."""
    folder = pathlib.Path(folder or tempfile.mkdtemp(prefix="mok_kernels_"))

    def compile_one(source):
        target = folder / (source.name + ".o")
        command = ["nvcc", *NVCC_FLAGS, "-c", str(source), "-o", str(target)]
        subprocess.run(command, check=True, timeout=500)
        return str(target)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sources()))
    library = folder / "libmok_kernels.so"
    subprocess.run(
        ["nvcc", *NVCC_FLAGS, "-shared", "-o", str(library), *objects], check=True, timeout=120
    )
    return library


def missing():
    """Why kernel tests cannot run here, or None."""
    if shutil.which("nvcc") is None and "JAX_MOK_KERNEL_LIBRARY" not in os.environ:
        return "needs nvcc"
    try:
        import torch
    except ImportError:
        return "needs torch (memory and oracle of the kernel tests)"
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return "needs a Hopper GPU"
    return None


@functools.cache
def load():
    """The kernels of JAX_MOK_KERNEL_LIBRARY, or built now; once per process."""
    if built := os.environ.get("JAX_MOK_KERNEL_LIBRARY"):
        return Kernels(built)
    with tempfile.TemporaryDirectory(prefix="mok_kernels_") as folder:
        return Kernels(build(folder))


class _Activation(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_int32),
        ("alpha", ctypes.c_float),
        ("limit", ctypes.c_float),
        ("up_offset", ctypes.c_float),
    ]


class _Facts(ctypes.Structure):
    _fields_ = [
        ("num_ranks", ctypes.c_int32),
        ("num_virtual_ranks", ctypes.c_int32),
        ("num_tokens", ctypes.c_int32),
        ("hidden", ctypes.c_int32),
        ("intermediate", ctypes.c_int32),
        ("top_k", ctypes.c_int32),
        ("num_experts", ctypes.c_int32),
        ("activation", _Activation),
        ("has_biases", ctypes.c_bool),
        ("shared_intermediate", ctypes.c_int32),
        ("has_shared_gate", ctypes.c_bool),
        ("save", ctypes.c_bool),
        ("num_comm_sms", ctypes.c_int32),
        ("minibatch_size", ctypes.c_int32),
        ("macrobatch_size", ctypes.c_int32),
        ("ring_size", ctypes.c_int32),
        ("order", ctypes.c_int32),
        ("timeout_seconds", ctypes.c_double),
        ("start_timeout_seconds", ctypes.c_double),
    ]


class _BackwardFacts(_Facts):
    _fields_ = [("float32_weight_grads", ctypes.c_bool)]


def _buffers_structure(name, pointers):
    fields = [
        *[(pointer, ctypes.c_void_p) for pointer in pointers.split()],
        ("heaps", ctypes.c_void_p * MAX_RANKS),
        ("status", ctypes.c_void_p),
        ("call_id", ctypes.c_uint64),
    ]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


_WEIGHTS = "w_gate w_up w_down b_gate b_up b_down s_gate s_up s_down s_scale "
_Buffers = _buffers_structure(
    "_Buffers",
    "x expert_ids expert_weights " + _WEIGHTS + "y saved_x saved_gate_up workspace",
)
_BackwardBuffers = _buffers_structure(
    "_BackwardBuffers",
    "x dy expert_ids expert_weights "
    + _WEIGHTS
    + "saved_x saved_gate_up dx d_expert_weights dw_gate dw_up dw_down db_gate db_up db_down "
    "ds_gate ds_up ds_down ds_scale workspace",
)


class _Hooks(ctypes.Structure):
    _fields_ = [
        ("jitter_seed", ctypes.c_uint32),
        ("absent_rank", ctypes.c_int32),
        ("num_sms", ctypes.c_int32),
        ("stuck_phase", ctypes.c_int32),
    ]


def _hooks(values):
    return _Hooks(**{"absent_rank": -1, "stuck_phase": -1, **values})


PHASES = "start dispatch gate_up down combine grad_hidden grad_input grad_weight".split()
STATUS_FIELDS = "code rank phase tile counter value target call".split()
ACTIVATIONS = {"swiglu": 0, "geglu": 1, "reglu": 2}


@dataclasses.dataclass(frozen=True)
class Settings:
    comm_sms: int = 0
    minibatch: int = 0
    macrobatch: int = 0
    ring: int = 0
    timeout: float = 5.0
    start_timeout: float = 5.0
    jitter_seed: int = 0
    absent_rank: int = -1
    save: bool = False  # of a forward: leave residuals for the backward
    float32_weight_grads: bool = False  # of a backward
    order: int = 0  # of a forward: 1: all gate|up tiles, then all down tiles; 2: they take turns


# Settings that must not change a bit.
SAME_BITS = {
    "comm 4": Settings(comm_sms=4),
    "comm 16": Settings(comm_sms=16),
    "comm 40": Settings(comm_sms=40),
    "minibatch 128": Settings(minibatch=128),
    "minibatch 512": Settings(minibatch=512),
    "turns": Settings(order=2),
    "turns, macrobatch 640": Settings(order=2, minibatch=256, macrobatch=640),
    "smallest ring": Settings(minibatch=128, ring=128),
    "smallest macrobatch": Settings(minibatch=128, ring=128, macrobatch=128),
    "macrobatch 640": Settings(minibatch=384, macrobatch=640),
    "small ring, comm 8": Settings(minibatch=256, ring=128, macrobatch=1024, comm_sms=8),
}


def load_library(path):
    """The library with its result types, its structures checked against those above."""
    lib = ctypes.CDLL(str(path))
    for name in (
        "mok_workspace_bytes mok_heap_bytes mok_backward_workspace_bytes mok_backward_heap_bytes "
        "mok_heap_control_bytes mok_sizeof"
    ).split():
        getattr(lib, name).restype = ctypes.c_size_t
    lib.mok_saved_rows.restype = ctypes.c_int64
    lib.mok_plan_mismatches.restype = ctypes.c_long
    lib.mok_error.restype = ctypes.c_char_p
    structures = {
        b"ForwardFacts": _Facts,
        b"ForwardBuffers": _Buffers,
        b"TestHooks": _Hooks,
        b"Status": ctypes.c_int32 * len(STATUS_FIELDS),
        b"BackwardFacts": _BackwardFacts,
        b"BackwardBuffers": _BackwardBuffers,
    }
    for name, structure in structures.items():
        assert lib.mok_sizeof(name) == ctypes.sizeof(structure), name
    return lib


class Kernels:
    """The library, and the GPU it runs on."""

    def __init__(self, path):
        import torch

        self.torch = torch
        self.device = "cuda"
        self.lib = load_library(path)
        torch.cuda.init()
        torch.zeros(1, device="cuda")
        self.succeed(self.lib.mok_prepare())

    def succeed(self, code):
        if code != 0:
            raise RuntimeError(self.lib.mok_error(code).decode())

    def stream(self):
        return ctypes.c_void_p(self.torch.cuda.current_stream().cuda_stream)

    def synchronize(self):
        self.torch.cuda.synchronize()

    def facts(self, problem, settings, structure=_Facts):
        p, s = problem, settings
        return structure(
            p.ranks,
            p.ranks,
            p.tokens,
            p.hidden,
            p.intermediate,
            p.top_k,
            p.experts,
            _Activation(ACTIVATIONS[p.activation], p.alpha, p.limit, p.up_offset),
            p.biases,
            p.shared,
            p.shared_gate,
            s.save,
            s.comm_sms,
            s.minibatch,
            s.macrobatch,
            s.ring,
            s.order,
            s.timeout,
            s.start_timeout,
        )

    def backward_facts(self, problem, settings):
        facts = self.facts(problem, settings, _BackwardFacts)
        facts.float32_weight_grads = settings.float32_weight_grads
        return facts

    def check(self, problem, settings=Settings()):
        """What the forward says against these facts, or nothing."""
        return self._check(self.lib.mok_check, self.facts(problem, settings))

    def check_backward(self, problem, settings=Settings()):
        return self._check(self.lib.mok_check_backward, self.backward_facts(problem, settings))

    def _check(self, function, facts):
        message = ctypes.create_string_buffer(512)
        function(ctypes.byref(facts), message, 512)
        return message.value.decode()


class Storage:
    """Device memory by name: calls that never run at once can share it."""

    def __init__(self, kernels):
        self.kernels, self.tensors = kernels, {}

    def take(self, name, shape, dtype):
        """A tensor in the memory of that name, which begins with all bytes 0xff."""
        torch = self.kernels.torch
        size = dtype.itemsize
        for n in shape:
            size *= n
        have = self.tensors.get(name)
        if have is None or have.numel() < size:
            have = torch.full((size,), 255, dtype=torch.uint8, device=self.kernels.device)
            self.tensors[name] = have
        return have[:size].view(dtype).view(shape)

    def heaps(self, ranks, size):
        """[ranks, size] bytes, ready for calls; only calls with heaps of this size share it."""
        size = (size + 1023) // 1024 * 1024
        name = ("heaps", ranks, size)
        new = name not in self.tensors
        heaps = self.take(name, (ranks, size), self.kernels.torch.uint8)
        if new:
            for heap in heaps:
                address = ctypes.c_void_p(heap.data_ptr())
                self.kernels.succeed(self.kernels.lib.mok_init_heap(address, self.kernels.stream()))
        return heaps


class _LayerCall:
    """What forward and backward calls have in common. `run` can be repeated."""

    def __init__(self, kernels, problem, inputs, settings, storage):
        self.kernels, self.problem, self.inputs, self.settings = kernels, problem, inputs, settings
        self.storage = storage or Storage(kernels)
        self.outputs = {}

    def _prepare(self, launch, buffers, workspace_bytes, tensors):
        """`tensors`: outputs and residuals; the rest of the buffers are inputs by their names."""
        torch, lib, p = self.kernels.torch, self.kernels.lib, self.problem
        self._launch, self.buffers = launch, buffers
        self.workspace = self.storage.take("workspace", (workspace_bytes,), torch.uint8)
        heap_bytes = max(  # one heap serves the forward and the backward
            lib.mok_heap_bytes(ctypes.byref(self.kernels.facts(p, self.settings))),
            lib.mok_backward_heap_bytes(
                ctypes.byref(self.kernels.backward_facts(p, self.settings))
            ),
        )
        self.heaps = self.storage.heaps(p.ranks, heap_bytes)
        self.status = torch.zeros(
            p.ranks, len(STATUS_FIELDS), dtype=torch.int32, device=self.kernels.device
        )
        tensors = self.inputs | tensors | {"workspace": self.workspace, "status": self.status}
        for name, kind in buffers._fields_:
            if kind is ctypes.c_void_p and name in tensors:
                assert tensors[name].is_contiguous(), name
                setattr(buffers, name, tensors[name].data_ptr())
        for r in range(p.ranks):
            buffers.heaps[r] = self.heaps[r].data_ptr()

    def poison(self):
        """Every byte that a call may not rely on 0xff: NaN as bf16 and fp32, -1 as a counter."""
        self.workspace.fill_(255)
        self.heaps[:, self.kernels.lib.mok_heap_control_bytes() :].fill_(255)
        for tensor in self.outputs.values():
            tensor.fill_(float("nan"))

    def launch(self, **hooks):
        s = self.settings
        hooks = _hooks({"jitter_seed": s.jitter_seed, "absent_rank": s.absent_rank, **hooks})
        code = self._launch(
            ctypes.byref(self.facts),
            0,
            ctypes.byref(self.buffers),
            self.kernels.stream(),
            ctypes.byref(hooks),
        )
        self.kernels.succeed(code)

    def faults(self):
        """Status records with a fault, as dicts; clears them."""
        records = self.status.tolist()
        self.status.zero_()
        return [dict(zip(STATUS_FIELDS, r)) for r in records if r[0] != 0]

    def _run(self, **hooks):
        """One call into poisoned memory; fails on any fault."""
        self.poison()
        self.launch(**hooks)
        self.kernels.synchronize()
        faults = self.faults()
        assert not faults, faults


class Call(_LayerCall):
    """A forward: buffers of one layer under fixed settings."""

    def __init__(self, kernels, problem, inputs, settings=Settings(), storage=None):
        super().__init__(kernels, problem, inputs, settings, storage)
        torch, lib, p = kernels.torch, kernels.lib, problem
        if wrong := kernels.check(problem, settings):
            raise ValueError(wrong)
        self.facts = kernels.facts(problem, settings)
        take, bf16 = self.storage.take, torch.bfloat16
        self.y = take("y", (p.ranks * p.tokens, p.hidden), bf16)
        self.outputs = {"y": self.y}
        if settings.save:  # never shared: a backward reads it after other calls have run
            rows = p.ranks * lib.mok_saved_rows(ctypes.byref(self.facts))
            own = Storage(kernels)
            self.outputs["saved_x"] = own.take("saved_x", (rows, p.hidden), bf16)
            self.outputs["saved_gate_up"] = own.take("gate_up", (rows, 2 * p.intermediate), bf16)
        size = lib.mok_workspace_bytes(ctypes.byref(self.facts))
        self._prepare(lib.mok_launch, _Buffers(), size, self.outputs)

    def run(self, **hooks):
        """One call into poisoned memory; returns y and fails on any fault."""
        self._run(**hooks)
        return self.y.clone()

    def plan_mismatches(self):
        """Entries of the last call's device plan that differ from csrc/plan's, and rows shared."""
        workspace = self.workspace.cpu()
        ids = self.inputs["expert_ids"].cpu()
        shared_rows = ctypes.c_long()
        wrong = self.kernels.lib.mok_plan_mismatches(
            ctypes.byref(self.facts),
            ctypes.byref(self.buffers),
            ctypes.c_void_p(workspace.data_ptr()),
            ctypes.c_void_p(ids.data_ptr()),
            ctypes.byref(shared_rows),
        )
        return wrong, shared_rows.value


class BackwardCall(_LayerCall):
    """A backward. `saved`: a forward Call with settings.save, whose last run it differentiates.

    `outputs` holds the gradients under their names in csrc/cuda/backward.h; those of the weights of
    shared experts are per rank. With `saved`, the two calls share their heaps and workspace.
    """

    def __init__(self, kernels, problem, inputs, settings=None, saved=None, storage=None):
        settings = settings or (saved.settings if saved else Settings())
        settings = dataclasses.replace(settings, save=saved is not None)
        super().__init__(
            kernels, problem, inputs, settings, storage or (saved.storage if saved else None)
        )
        torch, lib, p = kernels.torch, kernels.lib, problem
        if wrong := kernels.check_backward(problem, settings):
            raise ValueError(wrong)
        self.facts = kernels.backward_facts(problem, settings)
        residuals = {}
        if saved:
            assert saved.settings.save and saved.problem == problem
            residuals = {n: saved.outputs[n] for n in ("saved_x", "saved_gate_up")}
        self.residuals = residuals  # alive as long as this call
        of_experts = torch.float32 if settings.float32_weight_grads else torch.bfloat16
        for name in kernel_cases.GRADIENTS:
            if name not in inputs:
                continue
            shape, dtype = tuple(inputs[name].shape), inputs[name].dtype
            if name in ("w_gate", "w_up", "w_down"):
                dtype = of_experts
            elif name in ("s_gate", "s_up", "s_down"):
                shape = (p.ranks, *shape)
            gradient = kernel_cases.gradient_name(name)
            self.outputs[gradient] = self.storage.take(gradient, shape, dtype)
        size = lib.mok_backward_workspace_bytes(ctypes.byref(self.facts))
        self._prepare(lib.mok_launch_backward, _BackwardBuffers(), size, self.outputs | residuals)

    def run(self, **hooks):
        """One call into poisoned memory; returns copies of the gradients, fails on any fault."""
        self._run(**hooks)
        return {name: t.clone() for name, t in self.outputs.items()}


STAGES = "publish copy plan work sum".split()


class Peers:
    """The ranks of one layer as launches of their own, as on several GPUs: each on a stream and on
    its share of the multiprocessors of this one. `outputs`: y or the gradients, of all ranks."""

    def __init__(self, kernels, problem, inputs, settings=Settings(), backward=False):
        torch, lib, p = kernels.torch, kernels.lib, problem
        self.kernels, self.problem, self.inputs = kernels, problem, inputs
        multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
        self._num_sms = (multiprocessors - 4) // p.ranks  # some are left to those that wait
        facts, backward_facts = kernels.facts(p, settings), kernels.backward_facts(p, settings)
        facts.num_virtual_ranks = backward_facts.num_virtual_ranks = 1
        heap_bytes = max(
            lib.mok_heap_bytes(ctypes.byref(facts)),
            lib.mok_backward_heap_bytes(ctypes.byref(backward_facts)),
        )
        self._heaps = Storage(kernels).heaps(p.ranks, heap_bytes)
        if backward:
            self._facts, self._launch_stage = backward_facts, lib.mok_launch_backward_stage
            size, buffers = lib.mok_backward_workspace_bytes, _BackwardBuffers
            names = [n for n in kernel_cases.GRADIENTS if n in inputs]
            self.outputs = {
                kernel_cases.gradient_name(n): torch.full_like(inputs[n], float("nan"))
                for n in names
            }
        else:
            self._facts, self._launch_stage = facts, lib.mok_launch_stage
            size, buffers = lib.mok_workspace_bytes, _Buffers
            self.outputs = {"y": torch.full_like(inputs["x"], float("nan"))}
        size = size(ctypes.byref(self._facts))
        # Every byte is part of a NaN, and no counter.
        workspaces = torch.full((p.ranks, size), 255, dtype=torch.uint8, device=kernels.device)
        self._status = torch.zeros(
            p.ranks, len(STATUS_FIELDS), dtype=torch.int32, device=kernels.device
        )
        self._tensors = inputs | self.outputs | {"workspace": workspaces, "status": self._status}
        self._buffers = [buffers() for _ in range(p.ranks)]
        self.streams = [torch.cuda.Stream() for _ in range(p.ranks)]
        for rank, of_rank in enumerate(self._buffers):
            for name, kind in buffers._fields_:
                if kind is ctypes.c_void_p and name in self._tensors:
                    tensor = self._tensors[name]
                    part = tensor.numel() // p.ranks * tensor.element_size()
                    setattr(of_rank, name, tensor.data_ptr() + rank * part)
            for r in range(p.ranks):
                of_rank.heaps[r] = self._heaps[r].data_ptr()
        kernels.synchronize()

    def launch(self, rank, stages=STAGES, call_id=0, **hooks):
        buffers = self._buffers[rank]
        buffers.call_id = call_id
        hooks = _hooks({"num_sms": self._num_sms, **hooks})
        for stage in stages:
            code = self._launch_stage(
                STAGES.index(stage),
                ctypes.byref(self._facts),
                rank,
                ctypes.byref(buffers),
                ctypes.c_void_p(self.streams[rank].cuda_stream),
                ctypes.byref(hooks),
            )
            self.kernels.succeed(code)

    def run(self, call_id=0, **hooks):
        """A call of all ranks; returns copies of the outputs and fails on any fault."""
        self.kernels.synchronize()
        for tensor in self.outputs.values():
            tensor.fill_(float("nan"))
        self.kernels.synchronize()
        for rank in range(self.problem.ranks):
            self.launch(rank, call_id=call_id, **hooks)
        self.kernels.synchronize()
        assert not self.faults()
        return {name: t.clone() for name, t in self.outputs.items()}

    def is_nan(self, rank):
        """Whether all that a rank's call has left is."""
        parts = [t.chunk(self.problem.ranks)[rank] for t in self.outputs.values()]
        return all(bool(part.isnan().all()) for part in parts)

    def faults(self):
        """{rank: its status record}, of those with a fault; clears them."""
        records = self._status.tolist()
        self._status.zero_()
        self.kernels.synchronize()
        return {i: dict(zip(STATUS_FIELDS, r)) for i, r in enumerate(records) if r[0] != 0}


def check_bad_id(call, fault):
    """A call with one bad id (`fault`: high, negative or repeated), which is put right again: every
    rank reports it alike, and all that the call writes is NaN."""
    p, ids = call.problem, call.inputs["expert_ids"]
    token, slot = p.ranks * p.tokens - 3, 2
    good = ids[token].clone()
    bad = {"high": p.experts, "negative": -2, "repeated": int(good[0])}[fault]
    ids[token, slot] = bad
    faults = _failing(call)
    ids[token] = good
    assert [f["rank"] for f in faults] == list(range(p.ranks))
    for f in faults:
        assert f["code"] == (4 if fault == "repeated" else 3)
        place = (p.ranks - 1, p.tokens - 3, slot, bad)
        assert (f["tile"], f["counter"], f["target"], f["value"]) == place


def check_absent_rank(call, absent):
    """A call to which a rank never comes: every rank leaves in time and says who was missing, and
    all that the call writes is NaN."""
    began = time.monotonic()
    faults = _failing(call, absent_rank=absent)
    assert time.monotonic() - began < 2
    assert [f["rank"] for f in faults] == list(range(call.problem.ranks))
    assert all(f["code"] == 1 and f["phase"] == 0 and f["counter"] == absent for f in faults)


def check_stuck(call, phase):
    """A call in which a CTA stops amid its tiles, while others have theirs under way: every rank
    leaves in time, and all that the call writes is NaN."""
    began = time.monotonic()
    faults = _failing(call, stuck_phase=PHASES.index(phase))
    assert time.monotonic() - began < 2
    assert [f["rank"] for f in faults] == list(range(call.problem.ranks))
    assert faults[0]["code"] == 1  # the rank itself ran out of time


def check_given_up_anywhere(call, check_good):
    """Waits that may last from one to some hundred microseconds: calls are given up wherever they
    happen to be. Each is right or says that it is not, and leaves nothing but NaN then."""
    settings = call.facts.timeout_seconds
    given_up = 0
    for microseconds in (1, 2, 3, 5, 8, 12, 20, 30, 50, 80, 120, 200):
        for _ in range(6):
            call.poison()
            call.facts.timeout_seconds = microseconds * 1e-6
            call.launch()
            call.kernels.synchronize()
            if not call.faults():
                check_good()
            else:
                given_up += 1
                for name, tensor in call.outputs.items():
                    assert tensor.isnan().all(), (microseconds, name)
    call.facts.timeout_seconds = settings
    assert given_up > 0


def _failing(call, **hooks):
    """The faults of a call that fails."""
    call.launch(**hooks)
    call.kernels.synchronize()
    for name, tensor in call.outputs.items():
        assert tensor.isnan().all(), name
    return call.faults()


if __name__ == "__main__":
    print(build(sys.argv[1] if len(sys.argv) > 1 else None))
