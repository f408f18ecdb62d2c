"""The fused implementation on NVIDIA GPUs: when it can run, and its two custom calls as one
differentiable function of local arrays, as `jax_mok._fused` is for the CPU engine.
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

from jax_mok import _core, _topology
from jax_mok._fused import OUTPUT_NAME, RESIDUAL_NAME
from jax_mok.config import Activation, Config
from jax_mok.errors import MokError
from jax_mok.ffi import BACKWARD_CUDA, FORWARD_CUDA, Operands, absent, result_like

try:
    from jax_mok import _cuda_core as core
except ImportError as e:
    # Left out when jax_mok was built, or built for another Python.
    core = None
    WHY_NO_CUDA = _core.why_no_cuda or str(e)
else:
    WHY_NO_CUDA = ""

# XLA orders everything with this annotation on one stream, its NCCL collectives among it: calls and
# those collectives then come in the same order on all devices, and none takes multiprocessors from
# another. Some small collectives of XLA are kernels of its own on other streams; against those a
# call helps itself, see BUILD.md.
STREAM = "gpu_stream:collective"

HOPPER = "9.0"
COLUMN_UNIT = 64  # the kernels take hidden and intermediate sizes in multiples of it
CALL_TIMEOUT_SECONDS = 60.0  # most that a wait takes once all ranks have come


@dataclasses.dataclass(frozen=True)
class Testing:
    """What only tests set; see `testing`."""

    virtual_ranks: int = 1
    ring_size: int = 0
    jitter_seed: int = 0
    absent_rank: int = -1
    absent_in: tuple[str, ...] = ("forward", "backward")
    failing_rank: int = -1
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
    absent_in: to the calls of which passes it does not come.
    failing_rank: this rank's device fails before the call, which it misses.
    assume_hopper: trace and lower for a Hopper GPU, whatever this machine has.
    """
    token = _testing.set(dataclasses.replace(_testing.get(), **options))
    try:
        yield
    finally:
        _testing.reset(token)


def options() -> Testing:
    """What `testing` has set."""
    return _testing.get()


def register() -> None:
    """Registers the custom calls; starts no backend and needs no GPU."""
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


@dataclasses.dataclass(frozen=True)
class Spec:
    """The static part of a call. Hashable."""

    num_ranks: int
    num_experts: int
    groups: tuple[tuple[int, ...], ...]
    activation: Activation
    config: Config
    testing: Testing

    def forward_facts(self, ids: jax.Array, ops: Operands, *, save: bool) -> dict[str, Any]:
        """What `read_facts` in csrc/ffi/cuda_facts.h reads, of a call with these operands."""
        return self._facts("forward", self.config.fwd_num_comm_sms, ids, ops, save)

    def backward_facts(
        self, ids: jax.Array, ops: Operands, *, save: bool, float32_weight_grads: bool
    ) -> dict[str, Any]:
        """What `read_backward_facts` there reads."""
        facts = self._facts("backward", self.config.bwd_num_comm_sms, ids, ops, save)
        return {**facts, "float32_weight_grads": np.int64(float32_weight_grads)}

    def _facts(self, which, num_comm_sms, ids, ops: Operands, save) -> dict[str, Any]:
        virtual = self.testing.virtual_ranks
        config, act = self.config, self.activation
        absent_rank = self.testing.absent_rank if which in self.testing.absent_in else -1
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
            "save": save,
            "num_comm_sms": num_comm_sms or 0,
            "minibatch_size": config.minibatch_size or 0,
            "macrobatch_size": config.macrobatch_size or 0,
            "ring_size": self.testing.ring_size,
            "activation": act.number,
            "jitter_seed": self.testing.jitter_seed,
            "absent_rank": absent_rank,
            "failing_rank": self.testing.failing_rank,
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
    )
    return _differentiable(spec, ids, ops)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(spec: Spec, ids: jax.Array, ops: Operands) -> jax.Array:
    return _forward_call(spec, ids, ops, save=False)[0]


def _forward(spec, ids, ops):
    save = spec.config.residuals == "save"
    y, saved = _forward_call(spec, ids, ops, save=save)
    y = checkpoint_name(y, OUTPUT_NAME)
    saved = tuple(checkpoint_name(s, RESIDUAL_NAME) for s in saved) if save else None
    return y, (ids, ops, saved)


def _backward(spec, residuals, dy):
    ids, ops, saved = residuals
    return None, _backward_call(spec, dy, ids, ops, saved)


_differentiable.defvjp(_forward, _backward)


def _forward_call(spec: Spec, ids: jax.Array, ops: Operands, *, save: bool):
    """y [T, H], and what the forward leaves for the backward: the dispatched tokens and gate|up of
    its last macrobatch (bfloat16 [rows, H] and [rows, 2I], H and I padded), or two scalars."""
    shape = ops.x.shape
    ops = _padded(ops.with_weights_as_x())
    facts = spec.forward_facts(ids, ops, save=save)
    _require(core.check(facts))
    rows = core.saved_rows(facts) * spec.testing.virtual_ranks
    widths = (ops.x.shape[1], 2 * ops.w_gate.shape[2])

    def results(like):
        types = [result_like(ops.x.shape, like.dtype, like)]
        for width in widths:
            types.append(result_like((rows, width) if save else (), like.dtype, like))
        return types

    workspace = core.workspace_bytes(facts)
    y, *saved = custom_call(spec, FORWARD_CUDA, facts, workspace, results, _operands, ids, ops)
    return _cut(y, shape), tuple(saved)


def _backward_call(spec: Spec, dy: jax.Array, ids: jax.Array, ops: Operands, saved) -> Operands:
    """Gradients of `ops`; `saved`: what the forward left, or None."""
    given = ops
    weight_grad_dtype = ops.w_gate.dtype
    ops = _padded(ops.with_weights_as_x())
    dy = _pad(dy, ops.x.shape)
    facts = spec.backward_facts(
        ids, ops, save=saved is not None, float32_weight_grads=weight_grad_dtype == jnp.float32
    )
    _require(core.check_backward(facts))
    # Every virtual rank has its own gradients of the shared experts, as every device has.
    ranks = spec.testing.virtual_ranks
    apart = ops
    if ranks > 1 and ops.shared is not None:
        stacked = lambda a: jax.ShapeDtypeStruct((ranks, *a.shape), a.dtype)
        apart = dataclasses.replace(ops, shared=tuple(map(stacked, ops.shared)))

    def operands(dy, ids, ops, saved):
        return (dy, *_operands(ids, ops), *(saved or (absent(dy.dtype), absent(dy.dtype))))

    workspace = core.backward_workspace_bytes(facts)
    results = functools.partial(apart.gradient_types, weight_grad_dtype)
    arguments = (dy, ids, ops, saved)
    grads = custom_call(spec, BACKWARD_CUDA, facts, workspace, results, operands, *arguments)
    grads = apart.gradients(grads)
    if apart is not ops:
        total = lambda g: g.astype(jnp.float32).sum(0).astype(g.dtype)
        grads = dataclasses.replace(grads, shared=tuple(map(total, grads.shared)))
    return jax.tree.map(lambda g, a: _cut(g, a.shape), grads, given)


def _operands(ids: jax.Array, ops: Operands) -> tuple[jax.Array, ...]:
    """Those that both calls take, in the order of the handlers."""
    routed = (ops.x, ids, ops.expert_weights, ops.w_gate, ops.w_up, ops.w_down)
    return (*routed, *ops.optional())


def _require(problem: str) -> None:
    if problem:
        raise ValueError(f"jax_mok.moe cannot run on this GPU: {problem}.")


def custom_call(
    spec: Any, target: str, facts, workspace: int, results, operands, *arguments
) -> list[jax.Array]:
    """Results of a custom call on the stream of the collectives.

    spec: `groups` of it, as `Spec` has them.
    workspace: bytes of scratch memory that the call gets from XLA's own pool.
    results: types, for an operand that says over which mesh axes they vary.
    operands: of the custom call, for `arguments`. The absent ones are made on that stream: outside,
      autodiff would carry them through loops.
    """
    places = [i for group in spec.groups for i in group] or [0]
    attributes = {**facts, "groups": np.asarray(places, np.int64)}

    def call(*arguments):
        given = operands(*arguments)
        types = [*results(given[0]), result_like((workspace,), jnp.uint8, given[0])]
        run = jax.ffi.ffi_call(target, types, vmap_method="sequential")
        return run(*given, **attributes)[:-1]

    on_stream = compute_on(call, compute_type=STREAM, out_memory_spaces=jax.memory.Space.Device)
    return on_stream(*arguments)


def _pad(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`array` with zeros behind it in every dim, up to `shape`."""
    if array.shape == shape:
        return array
    return jnp.pad(array, [(0, want - have) for have, want in zip(array.shape, shape)])


def _cut(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `_pad`."""
    if array.shape == shape:
        return array
    return jax.lax.slice(array, (0,) * array.ndim, shape)


def _padded(ops: Operands) -> Operands:
    """The same layer with zeros up to multiples of what the kernels take; mostly `ops` itself.

    Zero columns of the hidden layer stay zero through every activation, and zero rows of w_down
    would ignore them anyway.
    """
    up = lambda size: size + -size % COLUMN_UNIT
    e, h, i = ops.w_gate.shape
    s = ops.shared[0].shape[1] if ops.shared is not None else 0
    if (h, i, s) == (up(h), up(i), up(s)):
        return ops
    h, i, s = up(h), up(i), up(s)
    pad_all = lambda arrays, *shapes: arrays and tuple(map(_pad, arrays, shapes))
    return dataclasses.replace(
        ops,
        x=_pad(ops.x, (ops.x.shape[0], h)),
        w_gate=_pad(ops.w_gate, (e, h, i)),
        w_up=_pad(ops.w_up, (e, h, i)),
        w_down=_pad(ops.w_down, (e, i, h)),
        biases=pad_all(ops.biases, (e, i), (e, i), (e, h)),
        shared=pad_all(ops.shared, (h, s), (h, s), (s, h)),
    )


# What the kernels report: codes and phases as in csrc/cuda/forward.h.
_TIMEOUT, _PEER_FAULT, _ID_OUT_OF_RANGE, _ID_REPEATED, _MOVE_OUT_OF_RANGE = 1, 2, 3, 4, 5
_PHASES = (
    "start",
    "dispatch",
    "gate_up",
    "down",
    "combine",
    "grad_hidden",
    "grad_input",
    "grad_weight",
)


def check_status() -> None:
    """Raises `MokError` if a call on this process's GPUs has failed since this was last asked."""
    faults = core.take_faults() if core is not None else []
    if not faults:
        return
    # What a peer reports is only the echo of another fault.
    faults.sort(key=lambda f: (f["code"] == _PEER_FAULT, f["rank"]))
    raise MokError("jax_mok.moe failed on the GPU, and its results are NaN: " + _words(faults))


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
        return (
            where
            + f"rank {counter} "
            + ("gave the call up" if fault["value"] else "is at another call of its program")
        )
    if code in (_ID_OUT_OF_RANGE, _ID_REPEATED):
        # In the words of csrc/plan/host_plan.h, which has the other implementations' message.
        what = "; allowed are 0 to the number of experts - 1, and -1 for unused"
        if code == _ID_REPEATED:
            what = ", which an earlier slot of the same token has too; ids of a token must differ"
        return where + (
            f"expert_ids[{counter}, {fault['target']}] of rank {fault['tile']} is "
            f"{fault['value']}{what}"
        )
    if code == _MOVE_OUT_OF_RANGE:
        return where + (
            f"move {fault['tile']} of its list, row {counter} to row {fault['target']}, the other "
            f"rank being {fault['value']}, is not one that it can make"
        )
    return where + f"unknown fault {fault}"


def heaps() -> list[dict[str, int]]:
    """Peer memory of this process's GPUs."""
    return core.heaps() if core is not None else []


def call_counts() -> dict[str, int]:
    """Calls that were launched on this process's GPUs, by pass."""
    if core is None:
        return {"forward": 0, "backward": 0}
    return {"forward": core.forward_calls(), "backward": core.backward_calls()}
