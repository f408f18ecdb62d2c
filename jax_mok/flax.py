"""The MoE layer as a Flax NNX module: router, experts, shared experts. Needs `jax_mok[flax]`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

try:
    from flax import config as flax_config
    from flax import errors, nnx
    from flax.core import spmd
except ImportError as e:
    raise ImportError(
        "jax_mok.flax needs Flax, which is not installed: pip install 'jax_mok[flax]'"
    ) from e

from jax_mok import _layer
from jax_mok._layer import Initializer, router_loss, sown_values
from jax_mok.config import Config
from jax_mok.routing import update_selection_bias

__all__ = ["MoE", "RouterState", "router_loss", "sown_values"]


class RouterState(nnx.Variable):
    """What a router keeps that no optimizer trains: its selection bias."""


class MoE(nnx.Module):
    """Mixture of experts: every token is sent to `top_k` of `num_experts` gated MLPs.

        y[t] = sum over the chosen e of weight[t, e] * down_e(act(gate_e(x[t]), up_e(x[t])))
               + the shared experts' output

    Example:
      >>> layer = jax_mok.flax.MoE(
      ...     num_experts=8, top_k=2, hidden_size=64, intermediate_size=128, rngs=nnx.Rngs(0)
      ... )
      >>> y = layer(x)  # x and y: [..., 64]

    With the router's losses, where `model` holds any number of such layers:
      >>> def loss_fn(model, batch):
      ...     y, sown = nnx.capture(model, nnx.Intermediate)(batch)
      ...     return task_loss(y, batch) + jax_mok.flax.router_loss(sown)

    Every call sows, as `nnx.Intermediate`: `load_balance_loss` and `z_loss` (float32 scalars,
    without coefficients) and `expert_counts` (int32 [E]); see `jax_mok.route`. `nnx.capture` hands
    them out; without it the layer keeps those of its last call, and `nnx.pop(model,
    nnx.Intermediate)` takes them. `router_loss` and `sown_values` find them in a model.

    Over several devices: the experts are sharded over the mesh axis `expert_axis` and the tokens
    over `token_axes`. Make the layer, and call it, under `jax.set_mesh(mesh)`, or give it `mesh`;
    the parameters then lie where they belong. They carry the names of their dims, so that
    `nnx.get_partition_spec` and `nnx.get_named_sharding` work too.

    A token with a NaN or an infinity in it, or in its logits, gets y = NaN and has no part in
    anything else: not in other tokens, losses or gradients.

    Parameters (`nnx.Param`): `w_router` [H, E], `w_gate`, `w_up` [E, H, I], `w_down` [E, I, H];
    where asked for `b_router` [E], `b_gate`, `b_up` [E, I], `b_down` [E, H], `shared_w_gate`,
    `shared_w_up` [H, S], `shared_w_down` [S, H], `shared_gate` [H, 1]. `jax_mok.linen.MoE` has the
    same ones. The selection bias is a `RouterState` [E].

    Args:
      num_experts: E.
      top_k: experts per token.
      hidden_size: H.
      intermediate_size: I of one expert.
      scoring, normalize, num_groups, top_k_groups, scale: see `jax_mok.route`, also for which
        model has which.
      router_bias: whether the logits have a trained bias (gpt-oss).
      selection_bias: whether the choice has a bias that is not trained but updated from the load,
        for balancing without a loss (DeepSeek-V3): `layer(x, update_bias=True)` in training, or
        `layer.update_selection_bias(counts)`.
      bias_update_rate: the step of that update.
      expert_bias: whether the experts' projections have biases.
      num_shared_experts: experts that every token visits; they are one MLP of n times the size.
      shared_intermediate_size: size of one shared expert; None: `intermediate_size`.
      shared_gate: whether sigmoid(x . shared_gate) scales the shared output (Qwen2-MoE).
      activation: "swiglu", "geglu", "reglu" or a `jax_mok.Swiglu`.
      dtype: of the computation and of y, float32 or bfloat16; None: what x and the parameters
        promote to.
      param_dtype: of the parameters. float32 parameters get gradients that were never rounded.
      router_dtype: of the router's product; logits and scores are float32 in any case.
      kernel_init: initialiser of the experts' matrices, called for one expert at a time.
      router_init: initialiser of `w_router`.
      bias_init: initialiser of all biases.
      partition_names: names of the expert, hidden and intermediate dims in the parameters'
        metadata, mesh axes or logical names; None: `(expert_axis, None, None)`.
      expert_axis, token_axes, mesh, config, implementation: see `jax_mok.moe`.
      axis_name: where the layer is called inside your own `shard_map`: the axes over which tokens
        are split, so that losses and counts are those of all tokens; see `jax_mok.route`.
      rngs: `nnx.Rngs` with a "params" stream.

    Raises:
      ValueError, TypeError: an argument that does not fit, when the layer is made or called.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        scoring: str = "softmax",
        normalize: bool = True,
        num_groups: int | None = None,
        top_k_groups: int | None = None,
        scale: float = 1.0,
        router_bias: bool = False,
        selection_bias: bool = False,
        bias_update_rate: float = 1e-3,
        expert_bias: bool = False,
        num_shared_experts: int = 0,
        shared_intermediate_size: int | None = None,
        shared_gate: bool = False,
        activation: Any = "swiglu",
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        router_dtype: Any = jnp.float32,
        kernel_init: Initializer = _layer.default_kernel_init,
        router_init: Initializer = _layer.default_kernel_init,
        bias_init: Initializer = _layer.default_bias_init,
        partition_names: tuple[Any, Any, Any] | None = None,
        expert_axis: str | tuple[str, ...] | None = "expert",
        token_axes: str | tuple[str, ...] | None = None,
        axis_name: str | tuple[str, ...] | None = None,
        mesh: Any = None,
        config: Config | None = None,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        self.settings = _layer.Settings(
            num_experts=num_experts,
            top_k=top_k,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            scoring=scoring,
            normalize=normalize,
            num_groups=num_groups,
            top_k_groups=top_k_groups,
            scale=scale,
            router_bias=router_bias,
            selection_bias=selection_bias,
            bias_update_rate=bias_update_rate,
            expert_bias=expert_bias,
            num_shared_experts=num_shared_experts,
            shared_intermediate_size=shared_intermediate_size,
            shared_gate=shared_gate,
            activation=activation,
            dtype=dtype,
            param_dtype=param_dtype,
            router_dtype=router_dtype,
            partition_names=partition_names,
            expert_axis=expert_axis,
            token_axes=token_axes,
            axis_name=axis_name,
            mesh=mesh,
            config=config,
            implementation=implementation,
        )
        parameters = self.settings.parameters(kernel_init, router_init, bias_init, making=True)
        self.parameter_names = tuple(parameters)
        for name, parameter in parameters.items():
            value = parameter.init(rngs.params(), parameter.shape, param_dtype)
            setattr(self, name, nnx.Param(value, **_metadata(parameter, mesh)))
        bias = RouterState(jnp.zeros(num_experts, jnp.float32)) if selection_bias else None
        self.selection_bias = bias

    def __call__(
        self, x: jax.Array, *, token_mask: jax.Array | None = None, update_bias: bool = False
    ) -> jax.Array:
        """Runs the layer.

        Args:
          x: [..., H], floating.
          token_mask: None or bool [...]. False marks padding: y is 0 there, whatever x holds, and
            the token goes to no expert and counts in no loss.
          update_bias: whether to take one step of the selection bias with this call's counts,
            after they were used. With several calls per optimizer step (accumulated gradients),
            leave it off and call `update_selection_bias` with the sum of their counts.

        Returns:
          y: [..., H], in `dtype`.
        """
        p = {name: getattr(self, name)[...] for name in self.parameter_names}
        bias = None if self.selection_bias is None else self.selection_bias[...]
        y, routing = self.settings.apply(p, bias, x, token_mask)
        self._sow(_layer.LOAD_BALANCE_LOSS, routing.load_balance_loss)
        self._sow(_layer.Z_LOSS, routing.z_loss)
        self._sow(_layer.EXPERT_COUNTS, routing.counts)
        if update_bias:
            self.update_selection_bias(routing.counts)
        return y

    def update_selection_bias(self, counts: jax.Array, rate: float | None = None) -> None:
        """One step of `jax_mok.update_selection_bias`, in place.

        Args:
          counts: int32 [E], the sown `expert_counts` of the whole batch.
          rate: None: `bias_update_rate`.
        """
        if self.selection_bias is None:
            raise ValueError(
                "MoE: update_selection_bias needs a layer made with selection_bias=True, "
                "got selection_bias=False"
            )
        rate = self.settings.bias_update_rate if rate is None else rate
        bias = self.selection_bias[...]
        self.selection_bias.set_value(update_selection_bias(bias, counts, rate))

    def _sow(self, name: str, value: jax.Array) -> None:
        if hasattr(self, "__captures__"):
            self.sow(nnx.Intermediate, name, value)
        elif not getattr(flax_config, "nnx_sow_capture_noop", False):
            # As `sow` does outside of `nnx.capture`, but replacing what an earlier call left:
            # a growing tuple would change the structure of the state, and recompile, every step.
            try:
                if hasattr(self, name):
                    getattr(self, name).set_value((value,))
                else:
                    setattr(self, name, nnx.Intermediate((value,)))
            except errors.TraceContextError:
                pass  # a layer that the traced function only closes over can keep nothing


def _metadata(parameter: _layer.Parameter, mesh: Any) -> dict[str, Any]:
    """Metadata of a parameter; Flax shards the value at once only where there is a fitting mesh."""
    context = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    metadata = {"out_sharding": parameter.axes}
    if mesh is not None:
        metadata["mesh"] = mesh
    eager = not context.empty and (context.are_all_axes_auto or context.are_all_axes_explicit)
    if eager:
        dims = zip(parameter.shape, spmd.get_pspec(parameter.axes))
        eager = all(_divides(context, axes, size) for size, axes in dims)
    return metadata | {"eager_sharding": bool(eager)}


def _divides(mesh: Any, axes: Any, size: int) -> bool:
    names = () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
    ways = 1
    for name in names:
        if name not in mesh.shape:
            return False
        ways *= mesh.shape[name]
    return size % ways == 0
