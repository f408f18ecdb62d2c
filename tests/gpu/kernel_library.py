"""Builds csrc/cuda with nvcc alone and calls it through ctypes: kernel tests without JAX.

All ranks are virtual ranks of one launch on one GPU; torch holds the memory and is the oracle.
"""

import ctypes
import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

CSRC = pathlib.Path(__file__).resolve().parents[2] / "csrc"
SOURCES = ["cuda/forward_sm90.cu", "cuda/plan_kernels.cu", "cuda/launch.cu", "cuda/layout.cc"]
NVCC_FLAGS = [
    "-std=c++17",
    "-O3",
    "-gencode=arch=compute_90a,code=sm_90a",
    "-Xcompiler",
    "-fPIC",
    f"-I{CSRC}",
]
MAX_RANKS = 128


def build(folder=None):
    """Compiles the kernels into a shared library and returns its path."""
    folder = pathlib.Path(folder or tempfile.mkdtemp(prefix="mok_kernels_"))
    sources = [CSRC / s for s in SOURCES]
    sources.append(pathlib.Path(__file__).parent / "forward_c_api.cc")
    objects = [folder / (s.stem + ".o") for s in sources]

    def compile_one(pair):
        source, target = pair
        command = ["nvcc", *NVCC_FLAGS, "-c", str(source), "-o", str(target)]
        subprocess.run(command, check=True, timeout=300)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, zip(sources, objects)))
    library = folder / "libmok_kernels.so"
    subprocess.run(
        ["nvcc", *NVCC_FLAGS, "-shared", "-o", str(library), *map(str, objects)],
        check=True,
        timeout=120,
    )
    return library


def missing():
    """Why kernel tests cannot run here, or None."""
    if shutil.which("nvcc") is None:
        return "needs nvcc"
    try:
        import torch
    except ImportError:
        return "needs torch (memory and oracle of the kernel tests)"
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return "needs a Hopper GPU"
    return None


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
        ("num_comm_sms", ctypes.c_int32),
        ("minibatch_size", ctypes.c_int32),
        ("macrobatch_size", ctypes.c_int32),
        ("ring_size", ctypes.c_int32),
        ("timeout_seconds", ctypes.c_double),
        ("start_timeout_seconds", ctypes.c_double),
    ]


_POINTERS = (
    "x expert_ids expert_weights w_gate w_up w_down b_gate b_up b_down s_gate s_up s_down s_scale "
    "y workspace"
).split()


class _Buffers(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_void_p) for name in _POINTERS],
        ("heaps", ctypes.c_void_p * MAX_RANKS),
        ("status", ctypes.c_void_p),
    ]


class _Hooks(ctypes.Structure):
    _fields_ = [("jitter_seed", ctypes.c_uint32), ("absent_rank", ctypes.c_int32)]


STATUS_FIELDS = "code rank phase tile counter value target call".split()
ACTIVATIONS = {"swiglu": 0, "geglu": 1, "reglu": 2}


@dataclasses.dataclass(frozen=True)
class Problem:
    """Sizes and activation of a layer; `tokens` is per rank."""

    tokens: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    ranks: int = 1
    activation: str = "swiglu"
    alpha: float = 1.0
    limit: float = float("inf")
    up_offset: float = 0.0
    biases: bool = False
    shared: int = 0
    shared_gate: bool = False


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


class Kernels:
    """The library, and calls of it on torch tensors."""

    def __init__(self, path):
        import torch

        self.torch = torch
        self.lib = ctypes.CDLL(str(path))
        self.lib.mok_workspace_bytes.restype = ctypes.c_size_t
        self.lib.mok_heap_bytes.restype = ctypes.c_size_t
        self.lib.mok_plan_mismatches.restype = ctypes.c_long
        self.lib.mok_sizeof.restype = ctypes.c_size_t
        self.lib.mok_error.restype = ctypes.c_char_p
        for i, struct in enumerate((_Facts, _Buffers, _Hooks)):
            assert self.lib.mok_sizeof(i) == ctypes.sizeof(struct), struct
        torch.cuda.init()
        torch.zeros(1, device="cuda")
        self._ok(self.lib.mok_prepare())
        self.sms = torch.cuda.get_device_properties(0).multi_processor_count

    def _ok(self, code):
        if code != 0:
            raise RuntimeError(self.lib.mok_error(code).decode())

    def facts(self, problem, settings):
        p, s = problem, settings
        activation = _Activation(ACTIVATIONS[p.activation], p.alpha, p.limit, p.up_offset)
        return _Facts(
            p.ranks,
            p.ranks,
            p.tokens,
            p.hidden,
            p.intermediate,
            p.top_k,
            p.experts,
            activation,
            p.biases,
            p.shared,
            p.shared_gate,
            s.comm_sms,
            s.minibatch,
            s.macrobatch,
            s.ring,
            s.timeout,
            s.start_timeout,
        )

    def check(self, problem, settings=Settings()):
        message = ctypes.create_string_buffer(512)
        self.lib.mok_check(ctypes.byref(self.facts(problem, settings)), message, 512)
        return message.value.decode()


class Call:
    """Buffers of one layer under fixed settings; `run` can be repeated."""

    def __init__(self, kernels, problem, inputs, settings=Settings()):
        torch = kernels.torch
        self.kernels, self.problem, self.inputs, self.settings = kernels, problem, inputs, settings
        self.facts = kernels.facts(problem, settings)
        wrong = kernels.check(problem, settings)
        if wrong:
            raise ValueError(wrong)
        ranks = problem.ranks
        by = dict(dtype=torch.uint8, device="cuda")
        workspace_bytes = kernels.lib.mok_workspace_bytes(ctypes.byref(self.facts), kernels.sms)
        heap_bytes = kernels.lib.mok_heap_bytes(ctypes.byref(self.facts))
        heap_bytes = (heap_bytes + 1023) // 1024 * 1024
        self.workspace = torch.empty(workspace_bytes, **by)
        self.heap = torch.empty(heap_bytes * ranks, **by)
        self.status = torch.zeros(ranks, len(STATUS_FIELDS), dtype=torch.int32, device="cuda")
        self.y = torch.empty(ranks * problem.tokens, problem.hidden, dtype=torch.bfloat16).cuda()
        self.poison()
        stream = self._stream()
        self.buffers = _Buffers()
        for name in _POINTERS:
            tensor = {"y": self.y, "workspace": self.workspace}.get(name, inputs.get(name))
            if tensor is not None:
                assert tensor.is_contiguous()
                setattr(self.buffers, name, tensor.data_ptr())
        for r in range(ranks):
            self.buffers.heaps[r] = self.heap.data_ptr() + r * heap_bytes
            kernels._ok(kernels.lib.mok_init_heap(ctypes.c_void_p(self.buffers.heaps[r]), stream))
        self.buffers.status = self.status.data_ptr()

    def _stream(self):
        return ctypes.c_void_p(self.kernels.torch.cuda.current_stream().cuda_stream)

    def poison(self, heap=True):
        """Every byte 0xff: NaN as bf16 and fp32, -1 as a counter."""
        self.workspace.fill_(255)
        self.y.fill_(float("nan"))
        if heap:
            self.heap.fill_(255)

    def launch(self, **hooks):
        hooks = _Hooks(
            hooks.get("jitter_seed", self.settings.jitter_seed),
            hooks.get("absent_rank", self.settings.absent_rank),
        )
        code = self.kernels.lib.mok_launch(
            ctypes.byref(self.facts),
            0,
            ctypes.byref(self.buffers),
            self._stream(),
            ctypes.byref(hooks),
        )
        self.kernels._ok(code)

    def faults(self):
        """Status records with a fault, as dicts; clears them."""
        records = self.status.tolist()
        self.status.zero_()
        return [dict(zip(STATUS_FIELDS, r)) for r in records if r[0] != 0]

    def plan_mismatches(self):
        """Entries of the last call's device plan that differ from csrc/plan's, and rows shared."""
        workspace = self.workspace.cpu()
        ids = self.inputs["expert_ids"].cpu()
        shared_rows = ctypes.c_long()
        wrong = self.kernels.lib.mok_plan_mismatches(
            ctypes.byref(self.facts),
            self.kernels.sms,
            ctypes.byref(self.buffers),
            ctypes.c_void_p(workspace.data_ptr()),
            ctypes.c_void_p(ids.data_ptr()),
            ctypes.byref(shared_rows),
        )
        return wrong, shared_rows.value

    def run(self, **hooks):
        """One call; returns y and fails on any fault."""
        self.launch(**hooks)
        self.kernels.torch.cuda.synchronize()
        faults = self.faults()
        assert not faults, faults
        return self.y.clone()


def make_inputs(torch, problem, routing="uniform", unused=0.0, seed=0):
    """Random tensors of a layer. `routing`: uniform, zipf, one_rank, one_expert or some_empty."""
    p = problem
    gen = torch.Generator(device="cuda").manual_seed(seed)
    tokens = p.ranks * p.tokens

    def normal(*shape, scale=1.0, dtype=torch.bfloat16):
        return torch.randn(shape, generator=gen, device="cuda", dtype=dtype).mul_(scale)

    popularity = torch.zeros(p.experts, device="cuda")
    if routing == "zipf":
        popularity -= torch.log(torch.arange(1, p.experts + 1, device="cuda").float()) * 1.5
    elif routing == "one_rank":
        popularity[p.experts // p.ranks :] = -1e4
    elif routing == "one_expert":
        popularity[p.experts // 2] = 1e4
    elif routing == "some_empty":
        popularity[1::2] = -1e4
    noise = torch.rand(tokens, p.experts, generator=gen, device="cuda").clamp(1e-6, 1 - 1e-6)
    scores = popularity - torch.log(-torch.log(noise))
    ids = scores.topk(p.top_k, dim=1).indices.int()
    if unused > 0:
        ids[torch.rand(ids.shape, generator=gen, device="cuda") < unused] = -1
    weights = torch.rand(ids.shape, generator=gen, device="cuda") + 0.1
    weights /= weights.sum(1, keepdim=True)
    e, h, i, s = p.experts, p.hidden, p.intermediate, p.shared
    inputs = dict(
        x=normal(tokens, h),
        expert_ids=ids.contiguous(),
        expert_weights=weights.contiguous(),
        w_gate=normal(e, h, i, scale=h**-0.5),
        w_up=normal(e, h, i, scale=h**-0.5),
        w_down=normal(e, i, h, scale=i**-0.5),
    )
    if p.biases:
        inputs |= dict(b_gate=normal(e, i), b_up=normal(e, i), b_down=normal(e, h))
    if p.shared:
        inputs |= dict(
            s_gate=normal(h, s, scale=h**-0.5),
            s_up=normal(h, s, scale=h**-0.5),
            s_down=normal(s, h, scale=s**-0.5),
        )
    if p.shared_gate:
        inputs |= dict(s_scale=normal(tokens, dtype=torch.float32))
    return inputs


def reference(torch, problem, inputs):
    """The layer in float32, expert by expert."""
    p = problem
    torch.backends.cuda.matmul.allow_tf32 = False
    x = inputs["x"].float()
    y = torch.zeros_like(x)

    def act(g, u):
        g = torch.where(g > p.limit, torch.full_like(g, p.limit), g)
        u = u.clamp(-p.limit, p.limit)
        if p.activation == "swiglu":
            a = g * torch.sigmoid(p.alpha * g)
        elif p.activation == "geglu":
            a = torch.nn.functional.gelu(g, approximate="tanh")
        else:
            a = torch.relu(g)
        return a * (u + p.up_offset)

    for e in range(p.experts):
        token, slot = (inputs["expert_ids"] == e).nonzero(as_tuple=True)
        if len(token) == 0:
            continue
        g = x[token] @ inputs["w_gate"][e].float()
        u = x[token] @ inputs["w_up"][e].float()
        if p.biases:
            g, u = g + inputs["b_gate"][e].float(), u + inputs["b_up"][e].float()
        out = act(g, u) @ inputs["w_down"][e].float()
        if p.biases:
            out = out + inputs["b_down"][e].float()
        y.index_add_(0, token, out * inputs["expert_weights"][token, slot][:, None])
    if p.shared:
        out = act(x @ inputs["s_gate"].float(), x @ inputs["s_up"].float())
        out = out @ inputs["s_down"].float()
        y += out * (inputs["s_scale"][:, None] if p.shared_gate else 1.0)
    return y


def relative_l2(got, want):
    got, want = got.float(), want.float()
    return float((got - want).norm() / want.norm().clamp_min(1e-30))


if __name__ == "__main__":
    print(build(sys.argv[1] if len(sys.argv) > 1 else None))
