"""The custom calls: registration with XLA, and typed wrappers around `jax.ffi.ffi_call`.

Operands and results are those of the handlers in csrc/ffi. Nothing here knows about autodiff or
meshes.
"""

import dataclasses
import functools
import pathlib
import threading

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jax_mok import _core
from jax_mok.config import Activation

FORWARD = "jax_mok_forward"
BACKWARD = "jax_mok_backward"
CHECK = "jax_mok_check"
FORWARD_CUDA = "jax_mok_forward_cuda"
BACKWARD_CUDA = "jax_mok_backward_cuda"

_register_lock = threading.Lock()


def register() -> None:
    """Registers the custom calls with XLA. `moe` does it by itself when it is first traced.

    Only a program that never traces `moe` needs to call it: one that runs a deserialised
    `jax.export` artefact, say. It starts JAX's backend (the CPU handlers keep state, and XLA takes
    such handlers only once it is up), so call `jax.distributed.initialize` first.
    """
    with _register_lock:
        _register_once()


@functools.cache
def _register_once() -> None:
    from jax_mok import _cuda  # it builds on this file

    _cuda.register()
    jax.devices()
    try:
        jax.devices("cpu")
    except RuntimeError:  # JAX_PLATFORMS leaves the CPU out
        return
    _core.load_blas(_openblas_path())
    state = _core.meeting_type()
    jax.ffi.register_ffi_type("jax_mok_meeting", state, platform="cpu")
    for name, handler in _core.cpu_handlers().items():
        jax.ffi.register_ffi_target(name, handler, platform="cpu")


def _openblas_path() -> str:
    """Path of the OpenBLAS library that pip installed for us."""
    import scipy_openblas32

    directory = pathlib.Path(scipy_openblas32.get_lib_dir())
    names = ("libscipy_openblas.so", "libscipy_openblas.dylib", "scipy_openblas.dll")
    for name in names:
        if (directory / name).exists():
            return str(directory / name)
    raise ImportError(f"scipy-openblas32 is installed, but {directory} holds none of {names}.")


def disabled_safety_checks() -> list[jax.export.DisabledSafetyCheck]:
    """What to pass as `disabled_checks` to `jax.export.export` of a function that calls `moe`.

    JAX refuses to export custom calls whose stability it cannot vouch for; ours are stable within
    a minor version of jax_mok.
    """
    return [
        jax.export.DisabledSafetyCheck.custom_call(n)
        for n in (FORWARD, BACKWARD, CHECK, FORWARD_CUDA, BACKWARD_CUDA)
    ]


@dataclasses.dataclass(frozen=True)
class CallSpec:
    """The static part of a call: attributes of the custom call. Hashable."""

    num_ranks: int
    world: int
    num_experts: int
    macrobatch_rows: int
    minibatch_rows: int
    activation: Activation
    residuals: str

    def attributes(self, *, save: bool) -> dict[str, np.generic]:
        return {
            "num_ranks": np.int64(self.num_ranks),
            "world": np.int64(self.world),
            "num_experts": np.int64(self.num_experts),
            "macrobatch_rows": np.int64(self.macrobatch_rows),
            "minibatch_rows": np.int64(self.minibatch_rows),
            "save": np.int64(save),
            "activation": np.int64(self.activation.number),
            "alpha": np.float32(self.activation.alpha),
            "limit": np.float32(self.activation.limit),
            "up_offset": np.float32(self.activation.up_offset),
        }


def result_like(shape, dtype, like) -> jax.ShapeDtypeStruct:
    """Type of a result that varies over the same manual mesh axes as `like`.

    A plain ShapeDtypeStruct would make it silently non-varying inside shard_map, and gradients
    wrong.
    """
    aval = jax.typeof(like)
    if aval.sharding.mesh.empty:
        return jax.ShapeDtypeStruct(shape, dtype)
    return jax.ShapeDtypeStruct(
        shape,
        dtype,
        sharding=NamedSharding(aval.sharding.mesh, PartitionSpec()),
        manual_axis_type=aval.manual_axis_type,
    )


def absent(dtype) -> np.ndarray:
    """Stands for an optional operand that is not there: a scalar, where all others have dims.

    Not an empty array: autodiff may carry it over the edge of a shard_map, and jaxlib 0.11.2
    crashes while it compiles one with empty inputs. Absent results are scalars too; they hold
    nothing. NumPy's, so that it is a literal of the call: autodiff would move an operation that
    makes it out of loops, and out of the function that runs on another stream.
    """
    return np.zeros((), dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
    """Differentiable operands of a call, local to one rank.

    x [T, H]; expert_weights [T, k] float32; w_gate, w_up [E_local, H, I]; w_down [E_local, I, H];
    biases None or ([E_local, I], [E_local, I], [E_local, H]); shared None or ([H, S], [H, S],
    [S, H]); shared_gate None or [T] float32.
    """

    x: jax.Array
    expert_weights: jax.Array
    w_gate: jax.Array
    w_up: jax.Array
    w_down: jax.Array
    biases: tuple[jax.Array, jax.Array, jax.Array] | None
    shared: tuple[jax.Array, jax.Array, jax.Array] | None
    shared_gate: jax.Array | None

    def with_weights_as_x(self) -> "Operands":
        """The same with the routed experts' weights in the dtype of x, as the custom calls take
        them: they may be float32 where x is not."""
        cast = {n: getattr(self, n).astype(self.x.dtype) for n in ("w_gate", "w_up", "w_down")}
        return dataclasses.replace(self, **cast)

    def optional(self) -> list[jax.Array | np.ndarray]:
        """The optional operands in the order of the handlers, absent ones as scalars."""
        none = (None, None, None)
        arrays = [*(self.biases or none), *(self.shared or none)]
        arrays = [absent(self.x.dtype) if a is None else a for a in arrays]
        gate = absent(jnp.float32) if self.shared_gate is None else self.shared_gate
        return [*arrays, gate]

    def gradient_types(self, weight_grad_dtype, like) -> list[jax.ShapeDtypeStruct]:
        """Results of a backward call in the order of the handlers; see `result_like`."""
        weights = (self.w_gate, self.w_up, self.w_down)
        return [
            result_like(self.x.shape, self.x.dtype, like),
            result_like(self.expert_weights.shape, jnp.float32, like),
            *(result_like(w.shape, weight_grad_dtype, like) for w in weights),
            *(result_like(a.shape, a.dtype, like) for a in self.optional()),
        ]

    def gradients(self, results) -> "Operands":
        """The gradients of these operands among the results of a backward call."""
        dx, d_expert_weights, dw_gate, dw_up, dw_down, *rest = results
        return Operands(
            dx,
            d_expert_weights,
            dw_gate,
            dw_up,
            dw_down,
            tuple(rest[:3]) if self.biases is not None else None,
            tuple(rest[3:6]) if self.shared is not None else None,
            rest[6] if self.shared_gate is not None else None,
        )


def forward(spec: CallSpec, topology, ids, ops: Operands, *, save: bool):
    """y [T, H] in the dtype of x, and the saved gate|up ([macrobatch_rows, 2I], or a scalar)."""
    intermediate = ops.w_gate.shape[-1]
    saved_shape = (spec.macrobatch_rows, 2 * intermediate) if save else ()
    results = [
        result_like(ops.x.shape, ops.x.dtype, ops.x),
        result_like(saved_shape, jnp.float32, ops.x),
    ]
    call = jax.ffi.ffi_call(FORWARD, results, vmap_method="sequential")
    routed = (ops.x, ids, ops.expert_weights, ops.w_gate, ops.w_up, ops.w_down)
    return call(topology, *routed, *ops.optional(), **spec.attributes(save=save))


def backward(
    spec: CallSpec, topology, dy, ids, ops: Operands, saved, *, weight_grad_dtype
) -> Operands:
    """Gradients of every operand; those of the routed experts' weights in `weight_grad_dtype`."""
    results = ops.gradient_types(weight_grad_dtype, ops.x)
    call = jax.ffi.ffi_call(BACKWARD, results, vmap_method="sequential")
    grads = call(
        topology,
        dy,
        ops.x,
        ids,
        ops.expert_weights,
        ops.w_gate,
        ops.w_up,
        ops.w_down,
        *ops.optional(),
        absent(jnp.float32) if saved is None else saved,
        **spec.attributes(save=saved is not None),
    )
    return ops.gradients(grads)


def check(flag: jax.Array) -> jax.Array:
    """Fails the program, with the engine's words, if flag (int32 [4]) reports a bad expert id.

    flag = (kind, token, slot, id), kind 0 = all is well. CPU only. Returns flag's kind, int32 [1];
    the caller must use it, or XLA drops the call.
    """
    call = jax.ffi.ffi_call(CHECK, result_like((1,), jnp.int32, flag), vmap_method="sequential")
    return call(flag)
