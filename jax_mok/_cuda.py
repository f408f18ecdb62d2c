"""The fused implementation on NVIDIA GPUs: when it can run, the custom call, and its gradient.

The forward is one custom call. There is no backward kernel yet: gradients are those of the
plain-JAX implementation (`jax_mok.xla`), which computes the forward once more.
"""

import contextlib
import contextvars
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.compute_on import compute_on

from jax_mok import _core, _topology, xla
from jax_mok._fused import OUTPUT_NAME
from jax_mok.config import Activation, Config
from jax_mok.errors import MokError
from jax_mok.ffi import FORWARD_CUDA, Operands, result_like

try:
    from jax_mok import _cuda_core as core
except ImportError as e:
    # Left out when jax_mok was built, or built for another Python.
    core = None
    WHY_NO_CUDA = _core.why_no_cuda or str(e)
else:
    WHY_NO_CUDA = ""

# XLA orders everything with this annotation on one stream, its own collectives among it. A kernel
# that holds every multiprocessor until its peers have come must not run beside a collective that
# waits for a multiprocessor here and there: the two would wait for each other.
STREAM = "gpu_stream:collective"

HOPPER = "9.0"
COLUMN_UNIT = 64  # the kernels take hidden and intermediate sizes in multiples of it
MULTIPROCESSORS = 132  # of a whole H100 or H200, where there is none to ask
CALL_TIMEOUT_SECONDS = 60.0  # most that a wait takes once all ranks have come

GRADIENT_NOTE = "gradients by plain JAX, there is no CUDA backward kernel yet"


@dataclasses.dataclass(frozen=True)
class Testing:
    """What only tests set; see `testing`."""

    virtual_ranks: int = 1
    ring_size: int = 0
    jitter_seed: int = 0
    absent_rank: int = -1
    assume_hopper: bool = False


_NO_TESTING = Testing()
_testing = contextvars.ContextVar("jax_mok_cuda_testing", default=_NO_TESTING)


@contextlib.contextmanager
def testing(**options):
    """Private, for tests: calls that are traced inside are made with these options.

    virtual_ranks: a call on one GPU runs the protocol of that many ranks, each on a share of the
      multiprocessors, each with its share of the tokens and experts.
    ring_size: rows of the token ring.
    jitter_seed: not 0: random delays all over the kernel.
    absent_rank: this rank never comes.
    assume_hopper: trace and lower for a Hopper GPU, whatever this machine has.
    """
    token = _testing.set(dataclasses.replace(_testing.get(), **options))
    try:
        yield
    finally:
        _testing.reset(token)


def register() -> None:
    """Registers the custom call; starts no backend and needs no GPU."""
    if core is None:
        return
    for name, stages in core.handlers().items():
        jax.ffi.register_ffi_target(name, stages, platform="CUDA")


def handles(topology: _topology.Topology) -> bool:
    """Whether a call on `topology` runs on GPUs, and so is this file's business."""
    return _testing.get().assume_hopper or topology.platform in ("gpu", "cuda")


def why_not(topology: _topology.Topology, *, dtype: Any = None, top_k: int | None = None) -> str:
    """Why a call on `topology` cannot run here; empty if it can. None = not known yet."""
    if core is None:
        return f"this installation has no CUDA kernels: {WHY_NO_CUDA}"
    if dtype is not None and dtype != jnp.bfloat16:
        return f"the CUDA kernels take x in bfloat16, not in {jnp.dtype(dtype).name}"
    if top_k is not None and top_k > core.max_top_k:
        return f"the CUDA kernels take at most {core.max_top_k} slots per token, not {top_k}"
    if topology.num_ranks > core.max_ranks:
        return f"the CUDA kernels take at most {core.max_ranks} ranks, not {topology.num_ranks}"
    if _testing.get().assume_hopper:
        return ""
    devices = _devices(topology)
    mine = [d for d in devices if d.process_index == jax.process_index()]
    for device in mine:
        version = device.client.platform_version
        if "cuda" not in version.lower():
            return f"{device} is not one of CUDA's ({version.splitlines()[0]})"
        capability = getattr(device, "compute_capability", "unknown")
        if capability != HOPPER:
            return (
                f"the CUDA kernels are for Hopper (compute capability {HOPPER}), and {device} "
                f"({device.device_kind}) has {capability}"
            )
    if topology.num_ranks == 1 or _topology.concrete_mesh(topology.mesh) is None:
        return ""
    for group in topology.groups():
        why = _why_not_linked([devices[i] for i in group])
        if why:
            return why
    return ""


def _devices(topology) -> list:
    """The devices of the call in the order of XLA's numbers for them; GPUs of this process where
    the mesh does not say."""
    mesh = _topology.concrete_mesh(topology.mesh)
    return jax.local_devices(backend="gpu") if mesh is None else list(mesh.devices.flat)


def _why_not_linked(group) -> str:
    """Why the devices of an expert group cannot reach each other's memory; empty if they may."""
    domains = {getattr(d, "slice_index", None) for d in group}
    if len(domains) > 1:
        names = ", ".join(sorted(map(str, domains)))
        return f"the ranks of the expert axis lie in several NVLink domains (slices {names})"
    mine = [d.local_hardware_id for d in group if d.process_index == jax.process_index()]
    for a in mine:
        for b in mine:
            if a != b and not _can_access_peer(a, b):
                return f"GPU {a} has no peer-to-peer access to GPU {b}"
    return ""


@functools.cache
def _can_access_peer(a: int, b: int) -> bool:
    return core.can_access_peer(a, b)


@functools.cache
def _multiprocessors() -> int:
    """Of this machine's GPUs, the most; of a Hopper GPU where there is none."""
    try:
        devices = jax.local_devices(backend="gpu")
    except RuntimeError:
        return MULTIPROCESSORS
    counts = [core.device_limits(d.local_hardware_id)["multiprocessors"] for d in devices]
    return max(counts, default=MULTIPROCESSORS)


@dataclasses.dataclass(frozen=True)
class Spec:
    """The static part of a call. Hashable."""

    num_ranks: int
    num_experts: int
    groups: tuple[tuple[int, ...], ...]
    activation: Activation
    config: Config
    testing: Testing
    multiprocessors: int
    # For the gradient:
    expert_axes: tuple[str, ...]
    all_axes: tuple[str, ...]

    def facts(self, ids: jax.Array, ops: Operands) -> dict[str, Any]:
        """What csrc/ffi/cuda_facts.h reads, of a call with these operands."""
        virtual = self.testing.virtual_ranks
        config, act = self.config, self.activation
        integers = {
            "num_ranks": self.num_ranks * virtual,
            "num_virtual_ranks": virtual,
            "num_tokens": ops.x.shape[0] // virtual,
            "hidden": ops.x.shape[1],
            "intermediate": ops.w_gate.shape[2],
            "top_k": ids.shape[1],
            "num_experts": self.num_experts,
            "has_biases": ops.biases is not None,
            "shared_intermediate": 0 if ops.shared is None else ops.shared[0].shape[1],
            "has_shared_gate": ops.shared_gate is not None,
            "num_comm_sms": config.fwd_num_comm_sms or 0,
            "minibatch_size": config.minibatch_size or 0,
            "macrobatch_size": config.macrobatch_size or 0,
            "ring_size": self.testing.ring_size,
            "activation": act.number,
            "jitter_seed": self.testing.jitter_seed,
            "absent_rank": self.testing.absent_rank,
        }
        reals = {
            "alpha": act.alpha,
            "limit": act.limit,
            "up_offset": act.up_offset,
            "timeout_seconds": min(config.timeout_seconds, CALL_TIMEOUT_SECONDS),
            "start_timeout_seconds": config.timeout_seconds,
        }
        return {
            **{k: np.int64(v) for k, v in integers.items()},
            **{k: np.float64(v) for k, v in reals.items()},
        }


def moe(
    ids: jax.Array,
    ops: Operands,
    *,
    topology: _topology.Topology,
    activation: Activation,
    config: Config,
    num_experts: int,
) -> jax.Array:
    """y [T, H] of one rank; arguments are local, as for `jax_mok._fused.fused`."""
    options = _testing.get()
    if options.virtual_ranks > 1:
        if topology.num_ranks > 1:
            raise ValueError("virtual_ranks is for a call on one GPU.")
        for name, count in (("tokens", ids.shape[0]), ("experts", num_experts)):
            if count % options.virtual_ranks:
                raise ValueError(
                    f"{count} {name} cannot be shared among {options.virtual_ranks} virtual ranks."
                )
    spec = Spec(
        num_ranks=topology.num_ranks,
        num_experts=num_experts,
        groups=topology.groups(),
        activation=activation,
        config=config,
        testing=options,
        multiprocessors=MULTIPROCESSORS if options.assume_hopper else _multiprocessors(),
        expert_axes=topology.expert_axes,
        all_axes=topology.all_axes,
    )
    return _differentiable(spec, ids, ops)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(spec: Spec, ids: jax.Array, ops: Operands) -> jax.Array:
    return _forward_call(spec, ids, ops.with_weights_as_x())


def _forward(spec, ids, ops):
    y = _forward_call(spec, ids, ops.with_weights_as_x())
    return checkpoint_name(y, OUTPUT_NAME), (ids, ops)


def _backward(spec, residuals, dy):
    ids, ops = residuals
    plain = functools.partial(
        xla.moe,
        ids,
        activation=spec.activation,
        expert_axes=spec.expert_axes,
        manual_axes=spec.all_axes,
        num_experts=spec.num_experts,
        platform="gpu",
    )
    _, vjp = jax.vjp(plain, ops)
    return None, vjp(dy)[0]


_differentiable.defvjp(_forward, _backward)


def _forward_call(spec: Spec, ids: jax.Array, ops: Operands) -> jax.Array:
    hidden = ops.x.shape[1]
    ops = _padded(ops)
    facts = spec.facts(ids, ops)
    problem = core.check(facts)
    if problem:
        raise ValueError(f"jax_mok.moe cannot run on this GPU: {problem}.")
    workspace = core.workspace_bytes(facts, spec.multiprocessors)
    places = [i for group in spec.groups for i in group] or [0]
    attributes = {**facts, "groups": np.asarray(places, np.int64)}

    def call(x, *others):
        results = [
            result_like(x.shape, x.dtype, x),
            result_like((workspace,), jnp.uint8, x),  # scratch memory from XLA's own pool
        ]
        run = jax.ffi.ffi_call(FORWARD_CUDA, results, vmap_method="sequential")
        return run(x, *others, **attributes)[0]

    on_stream = compute_on(call, compute_type=STREAM, out_memory_spaces=jax.memory.Space.Device)
    routed = (ops.x, ids, ops.expert_weights, ops.w_gate, ops.w_up, ops.w_down)
    y = on_stream(*routed, *ops.optional())
    return y if y.shape[1] == hidden else y[:, :hidden]


def _padded(ops: Operands) -> Operands:
    """The same layer with zeros up to multiples of what the kernels take; mostly `ops` itself.

    Zero columns of the hidden layer stay zero through every activation, and zero rows of w_down
    would ignore them anyway.
    """
    more = lambda size: -size % COLUMN_UNIT
    h, i = more(ops.x.shape[1]), more(ops.w_gate.shape[2])
    s = more(ops.shared[0].shape[1]) if ops.shared is not None else 0
    if h == i == s == 0:
        return ops

    def pad(array, *widths):
        widths = [(0, 0)] * (array.ndim - len(widths)) + [(0, w) for w in widths]
        return jnp.pad(array, widths) if any(w for _, w in widths) else array

    return dataclasses.replace(
        ops,
        x=pad(ops.x, h),
        w_gate=pad(ops.w_gate, h, i),
        w_up=pad(ops.w_up, h, i),
        w_down=pad(ops.w_down, i, h),
        biases=ops.biases and tuple(pad(b, w) for b, w in zip(ops.biases, (i, i, h))),
        shared=ops.shared
        and (pad(ops.shared[0], h, s), pad(ops.shared[1], h, s), pad(ops.shared[2], s, h)),
    )


# What the kernels report: codes and phases as in csrc/cuda/forward.h.
_TIMEOUT, _PEER_FAULT, _ID_OUT_OF_RANGE, _ID_REPEATED = 1, 2, 3, 4
_PHASES = ("start", "dispatch", "gate_up", "down", "combine")


def check_status() -> None:
    """Raises `MokError` if a call on this process's GPUs has failed since this was last asked."""
    faults = core.take_faults() if core is not None else []
    if not faults:
        return
    # What a peer reports is only the echo of another fault.
    faults.sort(key=lambda f: (f["code"] == _PEER_FAULT, f["rank"]))
    raise MokError("jax_mok.moe failed on the GPU, and its output is NaN: " + _words(faults))


def _words(faults) -> str:
    lines = [_describe(f) for f in faults]
    return lines[0] + "".join(f"\n  also: {line}" for line in lines[1:])


def _describe(fault: dict[str, int]) -> str:
    code, rank, counter = fault["code"], fault["rank"], fault["counter"]
    phase = _PHASES[fault["phase"]] if 0 <= fault["phase"] < len(_PHASES) else fault["phase"]
    where = f"rank {rank}, phase {phase}, call {fault['call']}: "
    if code == _TIMEOUT and phase == "start":
        return where + f"rank {counter} did not come within Config.timeout_seconds"
    if code == _TIMEOUT and phase == "combine":
        return where + f"timed out waiting for the results of rank {counter}"
    if code == _TIMEOUT:
        return where + (
            f"timed out waiting for tile {fault['tile']}: counter {counter} was {fault['value']}, "
            f"not {fault['target']}"
        )
    if code == _PEER_FAULT:
        return where + f"rank {counter} gave the call up"
    if code in (_ID_OUT_OF_RANGE, _ID_REPEATED):
        what = "allowed are 0 to the number of experts - 1, and -1 for unused"
        if code == _ID_REPEATED:
            what = "which an earlier slot of the same token has too"
        return where + (
            f"expert_ids[{counter}, {fault['target']}] of rank {fault['tile']} is "
            f"{fault['value']}; {what}"
        )
    return where + f"unknown fault {fault}"


def heaps() -> list[dict[str, int]]:
    """Peer memory of this process's GPUs."""
    return core.heaps() if core is not None else []


def num_calls() -> int:
    """Forward calls of this process's GPUs, replays of command buffers included."""
    return sum(heap["calls"] for heap in heaps())
