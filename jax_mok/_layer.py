"""What the two Flax layers have in common: their settings, their parameters, and the forward pass.

No Flax here. `flax.py` and `linen.py` add what differs: how each API creates and stores variables.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_mok.config import Config, SharedExpert, resolve_activation
from jax_mok.moe import moe
from jax_mok.routing import Routing, route

Initializer = Callable[..., jax.Array]

default_kernel_init = jax.nn.initializers.lecun_normal()
default_bias_init = jax.nn.initializers.zeros

LOAD_BALANCE_LOSS, Z_LOSS, EXPERT_COUNTS = "load_balance_loss", "z_loss", "expert_counts"


class Parameter(NamedTuple):
    """How to make one parameter: its shape, the names of its dims, and its initialiser."""

    shape: tuple[int, ...]
    axes: tuple[Any, ...]
    init: Initializer


@dataclasses.dataclass(frozen=True)
class Settings:
    """The static arguments of a layer; `jax_mok.flax.MoE` describes them."""

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    scoring: str
    normalize: bool
    num_groups: int | None
    top_k_groups: int | None
    scale: float
    router_bias: bool
    selection_bias: bool
    bias_update_rate: float
    expert_bias: bool
    num_shared_experts: int
    shared_intermediate_size: int | None
    shared_gate: bool
    activation: Any
    dtype: Any
    param_dtype: Any
    router_dtype: Any
    partition_names: tuple[Any, Any, Any] | None
    expert_axis: Any
    token_axes: Any
    axis_name: Any
    mesh: Any
    config: Config | None
    implementation: str | None

    def __post_init__(self):
        for name, least in (
            ("num_experts", 1),
            ("top_k", 1),
            ("hidden_size", 1),
            ("intermediate_size", 1),
            ("num_shared_experts", 0),
            ("shared_intermediate_size", 1),
        ):
            value = getattr(self, name)
            if value is None and name == "shared_intermediate_size":
                continue
            try:
                ok = not isinstance(value, bool) and operator.index(value) >= least
            except TypeError:
                ok = False
            if not ok:
                raise ValueError(f"MoE: {name} must be an integer >= {least}, got {value!r}")
        if self.num_shared_experts == 0 and (self.shared_gate or self.shared_intermediate_size):
            raise ValueError(
                "MoE: num_shared_experts must be at least 1 where shared_gate or "
                f"shared_intermediate_size is given, got {self.num_shared_experts}"
            )
        if self.dtype is not None and jnp.dtype(self.dtype) not in (jnp.float32, jnp.bfloat16):
            raise ValueError(
                f"MoE: dtype must be None, float32 or bfloat16, got {jnp.dtype(self.dtype).name}"
            )
        for name in ("param_dtype", "router_dtype"):
            if not jnp.issubdtype(getattr(self, name), jnp.floating):
                raise ValueError(
                    f"MoE: {name} must be floating, got {jnp.dtype(getattr(self, name)).name}"
                )
        if self.partition_names is not None and len(self.partition_names) != 3:
            raise ValueError(
                "MoE: partition_names must be None or the names of the expert, hidden and "
                f"intermediate dims, got {self.partition_names!r}"
            )
        for name in ("partition_names", "expert_axis", "token_axes", "axis_name"):
            if isinstance(getattr(self, name), list):  # Flax hashes its static attributes
                object.__setattr__(self, name, tuple(getattr(self, name)))
        resolve_activation(self.activation)
        # `route` knows what it allows: ask it now rather than at the first call.
        logits = jax.ShapeDtypeStruct((1, self.num_experts), jnp.float32)
        jax.eval_shape(lambda logits: self._route(logits, None, None, axis_name=None), logits)

    def parameters(
        self, kernel: Initializer, router: Initializer, bias: Initializer, *, making: bool
    ) -> dict[str, Parameter]:
        """The trained parameters by name, in the order in which they are made.

        Shapes are global, and those of one rank inside a `shard_map` over `expert_axis`, where
        parameters can be used but not made.
        """
        ranks = _manual_ranks(self.expert_axis)
        if making and ranks > 1:
            raise ValueError(
                f"MoE: expert_axis {self.expert_axis!r} is manual here: make the parameters "
                "outside of shard_map, and pass them in sharded over it"
            )
        names = self.partition_names
        expert, hidden, inner = (self.expert_axis, None, None) if names is None else names
        h, i, e = self.hidden_size, self.intermediate_size, self.num_experts
        held = e // ranks
        made = {"w_router": Parameter((h, e), (hidden, None), router)}
        if self.router_bias:
            made["b_router"] = Parameter((e,), (None,), bias)
        made |= {
            "w_gate": Parameter((held, h, i), (expert, hidden, inner), _per_expert(kernel)),
            "w_up": Parameter((held, h, i), (expert, hidden, inner), _per_expert(kernel)),
            "w_down": Parameter((held, i, h), (expert, inner, hidden), _per_expert(kernel)),
        }
        if self.expert_bias:
            made |= {
                "b_gate": Parameter((held, i), (expert, inner), bias),
                "b_up": Parameter((held, i), (expert, inner), bias),
                "b_down": Parameter((held, h), (expert, hidden), bias),
            }
        if self.num_shared_experts:
            s = self.num_shared_experts * (self.shared_intermediate_size or i)
            made |= {
                "shared_w_gate": Parameter((h, s), (hidden, inner), kernel),
                "shared_w_up": Parameter((h, s), (hidden, inner), kernel),
                "shared_w_down": Parameter((s, h), (inner, hidden), kernel),
            }
        if self.shared_gate:
            made["shared_gate"] = Parameter((h, 1), (hidden, None), kernel)
        return made

    def apply(
        self,
        p: dict[str, jax.Array],
        selection_bias: jax.Array | None,
        x: jax.Array,
        token_mask: jax.Array | None,
    ) -> tuple[jax.Array, Routing]:
        """The forward pass: x [..., H] -> (y [..., H], routing)."""
        x = jnp.asarray(x)
        if x.ndim < 1 or x.shape[-1] != self.hidden_size:
            raise ValueError(
                f"MoE: x must have shape [..., hidden_size] = [..., {self.hidden_size}], "
                f"got {x.shape}"
            )
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"MoE: x must be floating, got {x.dtype.name}")
        if token_mask is not None:
            token_mask = jnp.asarray(token_mask)
            if token_mask.dtype != jnp.bool_ or token_mask.shape != x.shape[:-1]:
                raise ValueError(
                    f"MoE: token_mask must be bool of shape {x.shape[:-1]}, one per token, got "
                    f"{token_mask.dtype.name} of shape {token_mask.shape}"
                )
            x = jnp.where(token_mask[..., None], x, 0)
        dtype = self.dtype or jnp.promote_types(x.dtype, p["w_gate"].dtype)
        x = x.astype(dtype)

        # A token with a NaN or an infinity takes no part. In what the router multiplies with, it
        # is 0: the gradient of w_router is a sum over tokens, in which 0 * NaN would be NaN.
        finite = jnp.all(jnp.isfinite(x), axis=-1, keepdims=True)
        router_x = jnp.where(finite, x.astype(self.router_dtype), 0)
        project = lambda w: jnp.dot(
            router_x, w.astype(self.router_dtype), preferred_element_type=jnp.float32
        )
        logits = project(p["w_router"])
        if self.router_bias:
            logits = logits + p["b_router"].astype(jnp.float32)
        logits = jnp.where(finite, logits, jnp.nan)
        routing = self._route(logits, selection_bias, token_mask, axis_name=self.axis_name)

        # float32 weights of a bfloat16 layer go in as they are: their gradients stay unrounded.
        keep = p["w_gate"].dtype in (dtype, jnp.float32)
        weights = [p[n] if keep else p[n].astype(dtype) for n in ("w_gate", "w_up", "w_down")]
        cast = lambda *names: tuple(p[n].astype(dtype) for n in names)
        shared = None
        if self.num_shared_experts:
            x = jnp.where(finite, x, 0)
            gate = jax.nn.sigmoid(project(p["shared_gate"])[..., 0]) if self.shared_gate else None
            shared = SharedExpert(*cast("shared_w_gate", "shared_w_up", "shared_w_down"), gate)
        y = moe(
            x,
            routing.expert_ids,
            routing.expert_weights,
            *weights,
            biases=cast("b_gate", "b_up", "b_down") if self.expert_bias else None,
            shared=shared,
            activation=self.activation,
            expert_axis=self.expert_axis,
            token_axes=self.token_axes,
            mesh=self.mesh,
            config=self.config,
            implementation=self.implementation,
        )
        # A token that could not be routed must not look as if all were well.
        lost = routing.expert_ids[..., :1] < 0
        if token_mask is not None:
            lost &= token_mask[..., None]
        return jnp.where(lost, jnp.nan, y), routing

    def _route(self, logits, selection_bias, token_mask, *, axis_name) -> Routing:
        return route(
            logits,
            top_k=self.top_k,
            scoring=self.scoring,
            normalize=self.normalize,
            selection_bias=selection_bias,
            num_groups=self.num_groups,
            top_k_groups=self.top_k_groups,
            scale=self.scale,
            token_mask=token_mask,
            axis_name=axis_name,
        )


def sown_values(sown: Any, name: str) -> list[jax.Array]:
    """All values of one name that the MoE layers of a model have sown, in the model's order.

    Args:
      sown: what `nnx.capture`, `nnx.pop` or linen's `apply(..., mutable=...)` gave back.
      name: "load_balance_loss", "z_loss" or "expert_counts".

    Returns:
      A list of arrays, one per layer and call; layers under a scan are one array with a leading
      dim.
    """
    leaves = jax.tree_util.tree_leaves_with_path(sown)
    key = lambda k: getattr(k, "key", getattr(k, "name", None))
    return [leaf for path, leaf in leaves if any(key(k) == name for k in path)]


def router_loss(sown: Any, *, load_balance: float = 0.01, z: float = 0.001) -> jax.Array:
    """What the routers of a model add to its loss, summed over its MoE layers: float32 scalar.

    `load_balance * load_balance_loss + z * z_loss`; see `jax_mok.route` for both. The defaults are
    those of the Switch Transformer (0.01, arXiv:2101.03961) and ST-MoE (0.001, arXiv:2202.08906).

    Args:
      sown: what `nnx.capture`, `nnx.pop` or linen's `apply(..., mutable=...)` gave back.
      load_balance, z: the coefficients.
    """
    total = jnp.float32(0)
    for name, coefficient in ((LOAD_BALANCE_LOSS, load_balance), (Z_LOSS, z)):
        for value in sown_values(sown, name):
            total += coefficient * jnp.sum(value)
    return total


def _manual_ranks(expert_axis: Any) -> int:
    """Over how many ranks the experts are split where this is called: 1 outside of `shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    names = (expert_axis,) if isinstance(expert_axis, str) else tuple(expert_axis or ())
    return math.prod(mesh.shape[n] for n in names if n in mesh.manual_axes)


def _per_expert(init: Initializer) -> Initializer:
    """Draws every expert's matrix by itself, so that `init` sees the fans of one expert."""

    def stacked(key, shape, dtype):
        keys = jax.random.split(key, shape[0])
        return jax.vmap(lambda key: init(key, shape[1:], dtype))(keys)

    return stacked
