"""The op: `moe` checks its arguments, finds the mesh, and runs an implementation on every rank."""

import dataclasses
import functools
import logging
import math
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_mok import _cuda, _fused, _topology, ffi, runtime, xla
from jax_mok.config import Activation, Config, SharedExpert, resolve_activation
from jax_mok.ffi import CallSpec, Operands

logger = logging.getLogger("jax_mok")

# Rings are a whole number of row tiles; this is the largest tile of any engine here.
ROW_TILE = 64
MAX_TOP_K = 1024
# The rings of a program for any number of tokens are those of one for this many in each rank.
SYMBOLIC_TOKENS = 1024
_INT32 = np.iinfo(np.int32)


# The scope is for whoever reads a trace: `python -m jax_mok profile` looks for it.
@jax.named_scope("jax_mok.moe")
def moe(
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
    *,
    biases: tuple[jax.Array, jax.Array, jax.Array] | None = None,
    shared: SharedExpert | None = None,
    activation: Any = "swiglu",
    expert_axis: str | tuple[str, ...] | None = "expert",
    token_axes: str | tuple[str, ...] | None = None,
    mesh: Any = None,
    config: Config | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Mixture-of-experts layer: dispatch, experts and combine, expert-parallel and differentiable.

    y[t] = Σ_k expert_weights[t, k] · expert_{expert_ids[t, k]}(x[t]), with
    expert_e(x) = (act(x·w_gate[e] + b_gate[e], x·w_up[e] + b_up[e]))·w_down[e] + b_down[e], plus
    the shared experts' output. Products are accumulated, activations and sums computed, in float32.

    Shapes are global under jit or outside of it, and local (one rank's) inside a `shard_map` in
    which `expert_axis` is manual.

    Args:
      x: [..., H], float32 or bfloat16. All leading dims are tokens; any number of them, also 0.
      expert_ids: int32 [..., k]: the experts of each token, distinct within a token; -1 = slot not
        used. Anything else is an error when the program runs.
      expert_weights: float32 [..., k].
      w_gate, w_up: [E, H, I], dtype of x, or float32: float32 weights of a bfloat16 layer are cast
        for the products, and get float32 gradients that were never rounded to bfloat16.
      w_down: [E, I, H], likewise.
      biases: None or (b_gate [E, I], b_up [E, I], b_down [E, H]), dtype of x.
      shared: None or a `SharedExpert`, dtype of x; its weights are the same on every rank.
      activation: "swiglu", "geglu" (tanh form), "reglu", or a `Swiglu`.
      expert_axis: mesh axis (or axes) over which the experts are sharded: rank r of n holds experts
        [r·E/n, (r+1)·E/n). None: every device holds all of them.
      token_axes: mesh axes over which the tokens are sharded, `expert_axis` among them. None: all
        axes of the mesh (for a mesh with explicit axes: those of x, and expert_axis).
      mesh: None: the one in which the call is made (`jax.set_mesh`, `shard_map`), or on which the
        arguments lie. Without any, the layer runs on one device. An `AbstractMesh` says nothing of
        devices: they must come from the program's arguments, its `out_shardings`, or the context.
      config: `Config`: ring sizes, residuals, time-out. None of it changes the result.
      implementation: "fused" (one custom call), "xla" (JAX collectives and `ragged_dot`), or None:
        fused where that is possible. See `jax_mok.implementation_used`.

    Returns:
      y, with the shape and dtype of x.

    Differentiable in every floating-point argument. Under `jax.vmap` the calls run one after the
    other; put batch dims into the leading dims of x instead.

    Raises:
      ValueError, TypeError: an argument that does not fit, at trace time.
      jax.errors.JaxRuntimeError: an id out of range or repeated within a token, when it runs, on
        every rank of a CPU. On a GPU y is NaN instead, and `jax_mok.synchronize` raises `MokError`
        where the fused implementation ran.

    Example:
      >>> routing = jax_mok.route(x @ w_router, top_k=2)
      >>> y = jax_mok.moe(x, routing.expert_ids, routing.expert_weights, w_gate, w_up, w_down)
    """
    config = Config() if config is None else config
    if not isinstance(config, Config):
        raise TypeError(f"config must be a jax_mok.Config or None, got {type(config).__name__}.")
    act = resolve_activation(activation)
    ids, ops = _as_arrays(x, expert_ids, expert_weights, w_gate, w_up, w_down, biases, shared)
    topology = _topology.find(mesh, expert_axis, jax.tree.leaves((ops, ids)))
    inside = bool(topology.expert_axes) and topology.expert_axes[0] in topology.manual_axes
    num_experts = _check(ids, ops, topology, local=inside)
    _check_weight_grads(config, ops)
    chosen, reason = runtime.choose(implementation, topology, ops.x.dtype, ids.shape[-1])
    if chosen == "fused" and (why := _why_not_symbolic(ids, ops, topology)):
        if implementation == "fused":
            raise ValueError(f'implementation="fused" is not possible: {why}. Use "xla" or None.')
        chosen, reason = "xla", why
    if ops.x.size == 0:
        return ops.x * 0  # nobody has a token, on any rank: nothing to run
    logger.info("jax_mok.moe: implementation %s (%s)", chosen, reason)
    ffi.register()

    run = functools.partial(
        _local,
        topology=topology,
        implementation=chosen,
        activation=act,
        config=config,
        num_experts=num_experts,
    )
    if not topology.own_axes:
        if token_axes is not None and topology.mesh is not None:
            raise ValueError(
                f"token_axes={token_axes!r}: inside a shard_map the tokens are local already; "
                "leave it out."
            )
        return run(ids, ops)
    return _in_shard_map(run, ids, ops, topology, token_axes, inside=inside)


def rank_call(args, activation, expert_axis, config: Config | None):
    """(spec, topology operand, ids, operands) of the custom calls on one rank's arrays.

    For `jax_mok.ops`: `args` are those of `moe` up to `shared`, local, with x [T, H].
    """
    ids, ops = _as_arrays(*args)
    topology = _topology.find(None, expert_axis, jax.tree.leaves((ops, ids)))
    if topology.own_axes:
        raise ValueError(
            f"the mesh axes {topology.own_axes} are not manual here: call this inside a shard_map "
            "over the whole mesh, or on one device without a mesh."
        )
    if ops.x.ndim != 2:
        raise ValueError(f"x must have shape [T, H], got {ops.x.shape}.")
    num_experts = _check(ids, ops, topology, local=True)
    ffi.register()
    ids, ops = _vary_alike((ids, ops), topology)
    act, config = resolve_activation(activation), config or Config()
    spec = _call_spec(ids, ops, topology, act, config, num_experts)
    return spec, _topology_operand(topology), ids, ops


def _as_arrays(x, expert_ids, expert_weights, w_gate, w_up, w_down, biases, shared):
    """Arguments as (ids, Operands) of JAX arrays; checks only what is needed to get there."""
    named = {
        "x": x,
        "expert_ids": expert_ids,
        "expert_weights": expert_weights,
        "w_gate": w_gate,
        "w_up": w_up,
        "w_down": w_down,
    }
    if biases is not None:
        if not isinstance(biases, tuple | list) or len(biases) != 3:
            raise ValueError(
                "biases must be None or the three arrays (b_gate, b_up, b_down), got "
                f"{type(biases).__name__}"
                + (f" of length {len(biases)}." if isinstance(biases, tuple | list) else ".")
            )
        named |= dict(zip(("biases[0]", "biases[1]", "biases[2]"), biases))
    if shared is not None:
        if not isinstance(shared, SharedExpert):
            raise TypeError(
                f"shared must be a jax_mok.SharedExpert or None, got {type(shared).__name__}."
            )
        for field in ("w_gate", "w_up", "w_down"):
            named[f"shared.{field}"] = getattr(shared, field)
        if shared.gate is not None:
            named["shared.gate"] = shared.gate
    arrays = {}
    _check_foreign_ids(expert_ids)
    for name, value in named.items():
        try:
            arrays[name] = jnp.asarray(value)
        except TypeError as e:
            raise TypeError(f"{name} must be an array, got {type(value).__name__}.") from e
    get = arrays.get
    ops = Operands(
        arrays["x"],
        arrays["expert_weights"],
        arrays["w_gate"],
        arrays["w_up"],
        arrays["w_down"],
        tuple(arrays[f"biases[{i}]"] for i in range(3)) if biases is not None else None,
        tuple(arrays[f"shared.{f}"] for f in ("w_gate", "w_up", "w_down")) if shared else None,
        get("shared.gate"),
    )
    return arrays["expert_ids"], ops


def check_ids_fit(ids: np.ndarray) -> None:
    """Raises `ValueError` if int32 cannot hold one of the integers `ids`."""
    wide = (ids > _INT32.max) | (ids < _INT32.min)
    if wide.any():
        raise ValueError(f"expert_ids must fit in int32, got {ids[wide][0]}.")


def _check_foreign_ids(expert_ids) -> None:
    """Ids from outside of JAX that are wider than int32, which JAX would wrap without a word."""
    if isinstance(expert_ids, jax.Array):
        return
    try:
        ids = np.asarray(expert_ids)
    except (TypeError, ValueError):  # not an array at all, or one of tracers: JAX knows
        return
    if ids.dtype.kind in "iu" and ids.dtype.itemsize > 4:
        check_ids_fit(ids)


def _check(ids, ops: Operands, topology, *, local: bool) -> int:
    """Checks shapes and dtypes; returns the number of experts of the whole layer."""
    x = ops.x
    if x.ndim < 1:
        raise ValueError(f"x must have shape [..., H], got {x.shape}.")
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        raise TypeError(f"x must be float32 or bfloat16, got {x.dtype.name}.")
    if ids.dtype != jnp.int32:
        raise TypeError(f"expert_ids must be int32, got {ids.dtype.name}.")
    if ops.expert_weights.dtype != jnp.float32:
        raise TypeError(f"expert_weights must be float32, got {ops.expert_weights.dtype.name}.")
    leading, hidden = x.shape[:-1], x.shape[-1]
    if ids.ndim != x.ndim or ids.shape[:-1] != leading:
        raise ValueError(
            f"expert_ids must have shape [..., k] with the leading dims {leading} of x, "
            f"got {ids.shape}."
        )
    if ops.expert_weights.shape != ids.shape:
        raise ValueError(
            f"expert_weights must have the shape {ids.shape} of expert_ids, "
            f"got {ops.expert_weights.shape}."
        )
    if ops.w_gate.ndim != 3 or ops.w_gate.shape[1] != hidden:
        raise ValueError(
            f"w_gate must have shape [E, H, I] with H = {hidden} as in x, got {ops.w_gate.shape}."
        )
    held, _, intermediate = ops.w_gate.shape
    if 0 in (held, hidden, intermediate):
        raise ValueError(
            f"E, H and I must be at least 1, got w_gate {ops.w_gate.shape} and x {x.shape}."
        )
    _check_shape("w_up", ops.w_up, (held, hidden, intermediate), "[E, H, I] as w_gate")
    _check_shape("w_down", ops.w_down, (held, intermediate, hidden), "[E, I, H]")
    weights = {"w_gate": ops.w_gate, "w_up": ops.w_up, "w_down": ops.w_down}
    for name, w in weights.items():
        if w.dtype not in (x.dtype, jnp.float32) or w.dtype != ops.w_gate.dtype:
            raise TypeError(
                f"{name} must have the dtype of x ({x.dtype.name}) or float32, and all three the "
                f"same, got {', '.join(f'{n} {a.dtype.name}' for n, a in weights.items())}."
            )
    if ops.biases is not None:
        shapes = [(held, intermediate), (held, intermediate), (held, hidden)]
        for i, (bias, shape) in enumerate(zip(ops.biases, shapes)):
            _check_shape(f"biases[{i}]", bias, shape, ("[E, I]", "[E, I]", "[E, H]")[i])
            _check_dtype(f"biases[{i}]", bias, x.dtype)
    if ops.shared is not None:
        size = ops.shared[0].shape[-1] if ops.shared[0].ndim == 2 else 0
        shapes = [(hidden, size), (hidden, size), (size, hidden)]
        for field, w, shape in zip(("w_gate", "w_up", "w_down"), ops.shared, shapes):
            what = "[S, H]" if field == "w_down" else "[H, S]"
            _check_shape(f"shared.{field}", w, shape, f"{what}, H = {hidden}")
            _check_dtype(f"shared.{field}", w, x.dtype)
        if size == 0:
            raise ValueError(
                f"shared.w_gate must have shape [H, S] with S >= 1, got {ops.shared[0].shape}; "
                "pass shared=None for no shared expert."
            )
    if ops.shared_gate is not None:
        _check_shape("shared.gate", ops.shared_gate, leading, "[...], the leading dims of x")
        _check_dtype("shared.gate", ops.shared_gate, jnp.dtype(jnp.float32))

    ranks = topology.num_ranks
    num_experts = held * ranks if local else held
    if num_experts % ranks:
        raise ValueError(
            f"w_gate has E = {num_experts} experts, which must be divisible by the {ranks} ranks "
            f"of expert_axis {topology.expert_axes}."
        )
    top_k = ids.shape[-1]
    most = min(num_experts, MAX_TOP_K)
    if not 1 <= top_k <= most:
        raise ValueError(
            f"expert_ids has top_k = {top_k} slots per token; with {num_experts} experts it must "
            f"be in [1, {most}]."
        )
    return num_experts


def _check_shape(name, array, shape, what):
    if array.shape != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)} ({what}), got {array.shape}.")


def _check_dtype(name, array, dtype):
    if array.dtype != dtype:
        raise TypeError(f"{name} must be {dtype.name}, got {array.dtype.name}.")


def _check_weight_grads(config: Config, ops: Operands) -> None:
    if config.weight_grad_dtype not in (None, ops.w_gate.dtype):
        raise ValueError(
            f"Config.weight_grad_dtype is float32, but w_gate is {ops.w_gate.dtype.name}, and in "
            "JAX a gradient has the dtype of its argument: pass float32 weights (they are cast for "
            "the products, and their gradients are not rounded)."
        )


def _why_not_symbolic(ids, ops: Operands, topology) -> str:
    """Why the fused implementation cannot take these symbolic dims of `jax.export`; mostly "".

    The number of tokens decides nothing but the size of the rings, and the CPU engine can do with
    any. Attributes and result shapes of the calls are made of the other sizes; on a GPU, of all.
    """
    sizes = [*ops.w_gate.shape, ids.shape[-1]]
    if ops.shared is not None:
        sizes.append(ops.shared[0].shape[-1])
    if _cuda.handles(topology):
        where, sizes = "on GPUs it takes no symbolic dims", [*sizes, *ops.x.shape]
    else:
        where = "it takes symbolic dims only for the tokens"
    if not any(map(jax.export.is_symbolic_dim, sizes)):
        return ""
    return f"{where}, and x has dims {ops.x.shape}, expert_ids {ids.shape}, w_gate {sizes[:3]}"


def _in_shard_map(run, ids, ops: Operands, topology, token_axes, *, inside: bool):
    """Runs `run(ids, ops)` with every mesh axis manual that is not so yet."""
    x = ops.x
    leading = x.shape[:-1]
    explicit = topology.explicit
    axes = _token_axes(token_axes, topology, x, inside=inside, explicit=explicit)
    ways = topology.size(axes)
    count = math.prod(leading)
    if count % ways:
        raise ValueError(
            f"x has {count} tokens (leading dims {leading}), which must be divisible by the {ways} "
            f"devices of token_axes {axes}. Pad them with expert_ids of -1, or pass token_axes."
        )
    if not leading or leading[0] % ways:
        # The first dim alone cannot be split so: split the tokens.
        y = _in_shard_map(run, *_flat_tokens(ids, ops), topology, axes, inside=inside)
        return y.reshape(x.shape)

    token, expert = P(axes), P(topology.expert_axes if not inside else None)
    some = lambda value, spec: None if value is None else jax.tree.map(lambda _: spec, value)
    specs = Operands(
        x=token,
        expert_weights=token,
        w_gate=expert,
        w_up=expert,
        w_down=expert,
        biases=some(ops.biases, expert),
        shared=some(ops.shared, P()),
        shared_gate=some(ops.shared_gate, token),
    )
    if explicit:
        put = lambda a, spec: jax.sharding.reshard(a, _explicit_part(spec, topology.mesh))
        ids, ops = put(ids, token), jax.tree.map(put, ops, specs)
    mapped = jax.shard_map(
        run,
        mesh=None if topology.manual_axes else topology.mesh,
        in_specs=(token, specs),
        out_specs=token,
        axis_names=set(topology.own_axes),
    )
    y = mapped(ids, ops)
    if explicit and not jax.typeof(x).sharding.mesh.empty:
        y = jax.sharding.reshard(y, jax.typeof(x).sharding)
    return y


def _token_axes(token_axes, topology, x, *, inside: bool, explicit: bool):
    expert_axes = () if inside else topology.expert_axes
    if token_axes is not None:
        axes = _topology.axis_names("token_axes", token_axes)
        unknown = [a for a in axes if a not in topology.own_axes]
        if unknown:
            raise ValueError(
                f"token_axes {token_axes!r}: {unknown} are not among the axes "
                f"{topology.own_axes} over which the tokens can be sharded here."
            )
        missing = [a for a in expert_axes if a not in axes]
        if missing:
            raise ValueError(
                f"token_axes {token_axes!r} must contain expert_axis {topology.expert_axes}: each "
                "rank that holds experts brings its own tokens."
            )
        return axes
    if explicit and not jax.typeof(x).sharding.mesh.empty:
        first = jax.typeof(x).sharding.spec[0] if x.ndim > 1 else None
        first = _topology.axis_names("sharding of x", first)
        more = expert_axes + topology.auto_axes
        return first + tuple(a for a in topology.own_axes if a in more and a not in first)
    return topology.own_axes


def _explicit_part(spec: P, mesh) -> P | NamedSharding:
    """`spec` without the axes that the compiler manages: types do not mention those."""
    types = dict(zip(mesh.axis_names, mesh.axis_types))
    keep = lambda names: tuple(
        n for n in _topology.axis_names("spec", names) if types[n] == AxisType.Explicit
    )
    spec = P(*(keep(names) for names in spec))
    # Inside the caller's shard_map the mesh is the one of the context.
    return spec if AxisType.Manual in mesh.axis_types else NamedSharding(mesh, spec)


def _flat_tokens(ids, ops: Operands):
    """(ids, operands) with all leading dims, the tokens, as one."""
    leading = ops.x.shape[:-1]
    flat = lambda a: a.reshape(math.prod(leading), *a.shape[len(leading) :])
    return flat(ids), dataclasses.replace(
        ops,
        x=flat(ops.x),
        expert_weights=flat(ops.expert_weights),
        shared_gate=None if ops.shared_gate is None else flat(ops.shared_gate),
    )


def _local(ids, ops: Operands, *, topology, implementation, activation, config, num_experts):
    """One rank's part: local arrays in, local y out; every mesh axis is manual here."""
    shape = ops.x.shape
    ids, ops = _vary_alike(_flat_tokens(ids, ops), topology)
    if implementation == "xla":
        y = xla.moe(
            ids,
            ops,
            activation=activation,
            expert_axes=topology.expert_axes,
            manual_axes=topology.all_axes,
            num_experts=num_experts,
            platform=topology.platform,
        )
    elif _cuda.handles(topology):
        y = _cuda.moe(
            ids,
            ops,
            topology=topology,
            activation=activation,
            config=config,
            num_experts=num_experts,
        )
    else:
        spec = _call_spec(ids, ops, topology, activation, config, num_experts)
        y = _fused.fused(spec, _topology_operand(topology), ids, ops)
    return y.reshape(shape)


def _vary_alike(operands, topology):
    """Makes all operands vary over the same mesh axes.

    Casting a replicated weight to "varying" is what sums its gradient, once: the transpose of
    `pcast` is a psum. Where the caller's shard_map does not track this (check_vma=False), there is
    nothing to do.
    """
    if topology.mesh is None:
        return operands
    varying = lambda a: jax.typeof(a).manual_axis_type.varying
    probe = jax.lax.axis_index(topology.all_axes) if topology.all_axes else None
    if probe is None or not varying(probe):
        return operands
    axes = set(topology.expert_axes)
    for leaf in jax.tree.leaves(operands):
        axes |= varying(leaf)

    def cast(a):
        missing = tuple(n for n in topology.all_axes if n in axes - varying(a))
        return jax.lax.pcast(a, missing, to="varying") if missing else a

    return jax.tree.map(cast, operands)


def _topology_operand(topology) -> jax.Array:
    """int32 [4]: rank in the expert group, group, device in the meeting, meeting."""
    if topology.mesh is None:
        return jnp.zeros(4, jnp.int32)
    others = tuple(a for a in topology.all_axes if a not in topology.expert_axes)
    index = lambda axes: jax.lax.axis_index(axes) if axes else jnp.int32(0)
    rank, group = index(topology.expert_axes), index(others)
    if jax.process_count() == 1:
        # All devices of the program meet at the call, so that all of them fail if one has to.
        place = [rank, group, index(topology.all_axes), jnp.int32(0)]
    else:
        # Other groups may live in other processes: each is a meeting of its own.
        place = [rank, jnp.int32(0), rank, group]
    return jnp.stack([jnp.asarray(p, jnp.int32) for p in place])


def _call_spec(ids, ops: Operands, topology, activation: Activation, config: Config, num_experts):
    num_tokens, top_k = ids.shape
    ranks = topology.num_ranks
    local_experts = num_experts // ranks
    round_up = lambda rows: -(-rows // ROW_TILE) * ROW_TILE
    if jax.export.is_symbolic_dim(num_tokens):
        num_tokens = SYMBOLIC_TOKENS  # only the size of the rings comes of it
    # Worst case: all tokens of all ranks choose my experts, and every expert's last tile is ragged.
    most = round_up(ranks * num_tokens * min(top_k, local_experts)) + local_experts * ROW_TILE
    if config.macrobatch_size is None:
        # What balanced routing brings to one rank, half as much again, and the ragged tiles.
        rows = min(most, round_up(3 * num_tokens * top_k // 2) + local_experts * ROW_TILE)
    else:
        rows = min(most, round_up(config.macrobatch_size))
    return CallSpec(
        num_ranks=ranks,
        world=topology.size(topology.all_axes) if jax.process_count() == 1 else ranks,
        num_experts=num_experts,
        macrobatch_rows=max(rows, ROW_TILE),
        minibatch_rows=0 if config.minibatch_size is None else round_up(config.minibatch_size),
        activation=activation,
        residuals=config.residuals,
    )
