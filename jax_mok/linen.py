"""The MoE layer as a Flax linen module: router, experts, shared experts. Needs `jax_mok[flax]`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

try:
    from flax import linen as nn
    from flax.core import meta
except ImportError as e:
    raise ImportError(
        "jax_mok.linen needs Flax, which is not installed: pip install 'jax_mok[flax]'"
    ) from e

from jax_mok import _layer
from jax_mok._layer import Initializer, router_loss, sown_values
from jax_mok.config import Config
from jax_mok.routing import update_selection_bias

__all__ = ["ROUTER_STATE", "MoE", "router_loss", "sown_values"]

#: Collection of what a router keeps that no optimizer trains: its selection bias.
ROUTER_STATE = "router_state"


class MoE(nn.Module):
    """Mixture of experts: every token is sent to `top_k` of `num_experts` gated MLPs.

    The linen twin of `jax_mok.flax.MoE`, which describes the computation and the arguments: they
    are the same here, as are names and shapes of the parameters.

    Example:
      >>> layer = jax_mok.linen.MoE(num_experts=8, top_k=2, hidden_size=64, intermediate_size=128)
      >>> variables = layer.init(jax.random.key(0), x)
      >>> y = layer.apply(variables, x)  # x and y: [..., 64]

    With the router's losses, where `model` holds any number of such layers:
      >>> y, sown = model.apply(variables, x, mutable=["losses", "intermediates"])
      >>> loss = task_loss(y) + jax_mok.linen.router_loss(sown)

    Collections:
      params: the parameters, boxed with the names of their dims (`nn.with_partitioning`): use
        `nn.get_partition_spec` for shardings and `nn.unbox` or `nn.meta.unbox` for plain arrays.
      router_state: `selection_bias` float32 [E], if `selection_bias=True`; not trained. It is
        updated by `apply(..., update_bias=True, mutable=["router_state"])`, or by hand with
        `jax_mok.update_selection_bias`.
      losses: sown `load_balance_loss` and `z_loss`, float32 scalars, without coefficients.
      intermediates: sown `expert_counts`, int32 [E].

    Under `nn.scan`, give `variable_axes={"params": 0, "router_state": 0, "losses": 0,
    "intermediates": 0}` and `metadata_params={nn.PARTITION_NAME: None}` or a name.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    scoring: str = "softmax"
    normalize: bool = True
    num_groups: int | None = None
    top_k_groups: int | None = None
    scale: float = 1.0
    router_bias: bool = False
    selection_bias: bool = False
    bias_update_rate: float = 1e-3
    expert_bias: bool = False
    num_shared_experts: int = 0
    shared_intermediate_size: int | None = None
    shared_gate: bool = False
    activation: Any = "swiglu"
    dtype: Any = None
    param_dtype: Any = jnp.float32
    router_dtype: Any = jnp.float32
    kernel_init: Initializer = _layer.default_kernel_init
    router_init: Initializer = _layer.default_kernel_init
    bias_init: Initializer = _layer.default_bias_init
    partition_names: tuple[Any, Any, Any] | None = None
    expert_axis: str | tuple[str, ...] | None = "expert"
    token_axes: str | tuple[str, ...] | None = None
    axis_name: str | tuple[str, ...] | None = None
    mesh: Any = None
    config: Config | None = None
    implementation: str | None = None

    @nn.compact
    def __call__(
        self, x: jax.Array, *, token_mask: jax.Array | None = None, update_bias: bool = False
    ) -> jax.Array:
        """Runs the layer.

        Args:
          x: [..., H], floating.
          token_mask: None or bool [...]. False marks padding: y is 0 there, whatever x holds, and
            the token goes to no expert and counts in no loss.
          update_bias: whether to take one step of the selection bias with this call's counts,
            after they were used; the collection "router_state" must be mutable.

        Returns:
          y: [..., H], in `dtype`.
        """
        fields = _layer.Settings.__dataclass_fields__
        settings = _layer.Settings(**{name: getattr(self, name) for name in fields})
        p = {}
        parameters = settings.parameters(
            self.kernel_init,
            self.router_init,
            self.bias_init,
            making=self.is_initializing(),
        )
        for name, parameter in parameters.items():
            init = nn.with_partitioning(parameter.init, parameter.axes)
            boxed = self.param(name, init, parameter.shape, self.param_dtype, unbox=False)
            # Without the constraint that unboxing applies by default: it fails where the mesh has
            # no such axis or the axis is manual, and `jax_mok.moe` lays the weights out anyway.
            is_boxed = isinstance(boxed, meta.Partitioned)
            p[name] = boxed.unbox(apply_constraint=False) if is_boxed else boxed
        bias = None
        if self.selection_bias:
            zeros = lambda: jnp.zeros(self.num_experts, jnp.float32)
            bias = self.variable(ROUTER_STATE, "selection_bias", zeros)
        elif update_bias:
            raise ValueError(
                "MoE: update_bias=True needs a layer made with selection_bias=True, "
                "got selection_bias=False"
            )
        y, routing = settings.apply(p, None if bias is None else bias.value, x, token_mask)
        if self.is_initializing():
            return y  # else `init` would return losses, and every later call append to them
        self.sow("losses", _layer.LOAD_BALANCE_LOSS, routing.load_balance_loss)
        self.sow("losses", _layer.Z_LOSS, routing.z_loss)
        self.sow("intermediates", _layer.EXPERT_COUNTS, routing.counts)
        if update_bias:
            if not self.is_mutable_collection(ROUTER_STATE):
                raise ValueError(
                    f"MoE: update_bias=True writes the collection {ROUTER_STATE!r}: pass "
                    f"mutable=[{ROUTER_STATE!r}, ...] to apply"
                )
            bias.value = update_selection_bias(bias.value, routing.counts, self.bias_update_rate)
        return y
