"""Settings of a call (`Config`) and the expert's description (`Swiglu`, `SharedExpert`).

Everything here is static or a plain container: hashable where JAX needs it, checked when made.
"""

import dataclasses
import math
import numbers
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

Residuals = Literal["save", "recompute"]

# The largest row count of a ring that the native side can index.
_MAX_ROWS = 2**31 - 64


def _check_count(name: str, value: Any, *, least: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"Config.{name} must be an int or None, got {value!r}.")
    if not least <= value <= _MAX_ROWS:
        raise ValueError(f"Config.{name} must be in [{least}, {_MAX_ROWS}] or None, got {value}.")


def _is_number(value: Any) -> bool:
    """Python's numbers and NumPy's; True and False are none."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


@dataclasses.dataclass(frozen=True)
class Config:
    """How a call is carried out. No field changes what is computed; `None` = chosen from the shape.

    Attributes:
      fwd_num_comm_sms: GPU only: multiprocessors that only communicate in the forward pass; 0 =
        spare warps of the computing ones. Ignored on a CPU.
      bwd_num_comm_sms: the same in the backward pass.
      minibatch_size: rows (token copies) of one expert that are handed to its GEMM together;
        rounded up to the row tile.
      macrobatch_size: rows of the ring buffer: what is dispatched, computed and returned before
        the ring is used again; rounded up to the row tile. It bounds the memory of a call, whatever
        the routing.
      residuals: "save" keeps the gate and up projections of the last macrobatch (on a GPU its
        dispatched tokens too) for the backward pass, which recomputes the rest; "recompute" keeps
        nothing but the arguments. Both give the same bits. Under a `jax.checkpoint` that keeps
        nothing of the layer, "recompute" is the faster one: what is saved in the forward is thrown
        away there, and made again by a second forward.
      timeout_seconds: GPU only: how long a rank waits inside the kernel for another before all of
        them give up with `MokError`.
      weight_grad_dtype: dtype of the expert weights' gradients: None = that of the weights, or
        float32, the dtype in which they are accumulated.
      precision: None = the dtype of x. (MXFP8 does not exist yet and is refused.)
    """

    fwd_num_comm_sms: int | None = None
    bwd_num_comm_sms: int | None = None
    minibatch_size: int | None = None
    macrobatch_size: int | None = None
    residuals: Residuals = "save"
    timeout_seconds: float = 600.0
    weight_grad_dtype: Any = None
    precision: None = None

    def __post_init__(self):
        _check_count("fwd_num_comm_sms", self.fwd_num_comm_sms, least=0)
        _check_count("bwd_num_comm_sms", self.bwd_num_comm_sms, least=0)
        _check_count("minibatch_size", self.minibatch_size, least=1)
        _check_count("macrobatch_size", self.macrobatch_size, least=1)
        if self.residuals not in ("save", "recompute"):
            raise ValueError(
                f'Config.residuals must be "save" or "recompute", got {self.residuals!r}.'
            )
        if not (_is_number(self.timeout_seconds) and self.timeout_seconds > 0):
            raise ValueError(
                f"Config.timeout_seconds must be a positive number of seconds, "
                f"got {self.timeout_seconds!r}."
            )
        if self.weight_grad_dtype is not None:
            try:
                dtype = jnp.dtype(self.weight_grad_dtype)
            except TypeError:
                dtype = None
            if dtype != jnp.float32:
                got = repr(self.weight_grad_dtype) if dtype is None else dtype.name
                raise ValueError(f"Config.weight_grad_dtype must be None or float32, got {got}.")
            object.__setattr__(self, "weight_grad_dtype", dtype)
        if self.precision is not None:
            raise ValueError(
                f"Config.precision must be None (the dtype of x), got {self.precision!r}: "
                "low-precision dispatch is not implemented yet."
            )


@dataclasses.dataclass(frozen=True)
class Swiglu:
    """act(g) · (u + up_offset), act(g) = g · sigmoid(alpha · g).

    With `limit`, g is clamped from above and u from both sides first. The defaults are the plain
    SwiGLU of Shazeer (2020), arXiv:2002.05202; gpt-oss uses alpha 1.702, limit 7, up_offset 1.
    """

    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0

    def __post_init__(self):
        for name in ("alpha", "up_offset"):
            value = getattr(self, name)
            if not (_is_number(value) and math.isfinite(value)):
                raise ValueError(f"Swiglu.{name} must be a finite number, got {value!r}.")
        if self.limit is not None and not (
            _is_number(self.limit) and self.limit > 0 and math.isfinite(self.limit)
        ):
            raise ValueError(f"Swiglu.limit must be None or a positive number, got {self.limit!r}.")


@dataclasses.dataclass(frozen=True)
class Activation:
    """What the native side and the plain formulas are told: kind and the three numbers."""

    kind: Literal["swiglu", "geglu", "reglu"]
    alpha: float = 1.0
    limit: float = math.inf
    up_offset: float = 0.0

    @property
    def number(self) -> int:
        """What the native side calls `kind`."""
        return ACTIVATIONS.index(self.kind)

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """act(gate) · (up + up_offset); any shape, computed in the arguments' dtype."""
        if self.limit != math.inf:
            gate = jnp.minimum(gate, self.limit)
            up = jnp.clip(up, -self.limit, self.limit)
        if self.kind == "swiglu":
            activated = gate * jax.nn.sigmoid(self.alpha * gate)
        elif self.kind == "geglu":
            activated = jax.nn.gelu(gate, approximate=True)
        else:
            activated = jax.nn.relu(gate)
        return activated * (up + self.up_offset)


ACTIVATIONS = ("swiglu", "geglu", "reglu")


def resolve_activation(activation: Any) -> Activation:
    """The `Activation` that the `activation=` argument of `moe` names, or an error."""
    if isinstance(activation, Activation):
        return activation
    if isinstance(activation, Swiglu):
        limit = math.inf if activation.limit is None else float(activation.limit)
        return Activation("swiglu", float(activation.alpha), limit, float(activation.up_offset))
    if isinstance(activation, str) and activation in ACTIVATIONS:
        return Activation(activation)
    raise ValueError(
        f"activation must be one of {', '.join(map(repr, ACTIVATIONS))} or a jax_mok.Swiglu, "
        f"got {activation!r}."
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SharedExpert:
    """The weights of the experts that every token visits, side by side in one matrix.

    Attributes:
      w_gate: [H, S], S = number of shared experts times their intermediate size.
      w_up: [H, S].
      w_down: [S, H].
      gate: None, or float32 [...] with the leading dims of x: multiplies the shared output of each
        token (Qwen2-MoE's sigmoid gate, for instance).

    All are differentiable; the weights have the dtype of x.
    """

    w_gate: jax.Array
    w_up: jax.Array
    w_down: jax.Array
    gate: jax.Array | None = None


__all__ = ["Activation", "Config", "SharedExpert", "Swiglu", "resolve_activation"]
