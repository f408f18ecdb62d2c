"""The layer to measure: shape, routing, random arguments placed on a mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_mok.shapes import SHAPES, MoeShape

# Where there is no accelerator: a layer that a CPU computes in a second or so.
CPU_SHAPE = MoeShape("cpu-default", 512, 1024, 16, 2)

ROUTINGS = ("uniform", "zipf", "one-rank")


@dataclasses.dataclass(frozen=True)
class Problem:
    """One layer on one mesh; `tokens` is per rank."""

    shape: MoeShape
    tokens: int
    ranks: int
    dtype: str = "bfloat16"
    routing: str = "uniform"
    minibatch: int | None = None  # jax_mok's Config.minibatch_size
    comm_sms: int | None = None  # jax_mok's Config.fwd_num_comm_sms and bwd_num_comm_sms
    seed: int = 0

    @property
    def flops(self) -> int:
        """Forward operations of one rank, under balanced routing."""
        return self.shape.flops(self.tokens)

    @property
    def link_bytes(self) -> int:
        """Least bytes that one rank pulls over the link in the forward pass, balanced routing.

        A token crosses once to each other rank that holds one of its experts, and one row comes
        back for each of its experts there.
        """
        s, n = self.shape, self.ranks
        away = 1 - (1 - 1 / n) ** s.top_k
        width = jnp.dtype(self.dtype).itemsize * s.hidden_size
        return int(self.tokens * width * ((n - 1) * away + s.top_k * (n - 1) / n))

    @property
    def imbalance(self) -> float:
        """Rows of the busiest expert, as a multiple of an even share."""
        counts = np.bincount(self.expert_ids().ravel(), minlength=self.shape.num_experts)
        return float(counts.max() / counts.mean())

    def mesh(self) -> Mesh:
        devices = np.array(jax.devices()[: self.ranks])
        return Mesh(devices, ("expert",), axis_types=(AxisType.Auto,))

    def expert_ids(self) -> np.ndarray:
        """int32 [tokens · ranks, k], distinct within a token."""
        rng = np.random.default_rng(self.seed)
        count, experts = self.tokens * self.ranks, self.shape.num_experts
        if self.routing == "uniform":
            score = rng.random((count, experts), dtype=np.float32)
        elif self.routing == "zipf":
            # Gumbel top-k: k draws without replacement from p(e) ~ 1 / (e + 1)^1.2.
            log_p = -1.2 * np.log1p(np.arange(experts, dtype=np.float32))
            score = log_p + rng.gumbel(size=(count, experts)).astype(np.float32)
        else:  # all to the experts of one rank; a single rank takes the part of one of eight
            ranks = self.ranks if self.ranks > 1 else 8
            score = rng.random((count, experts), dtype=np.float32)
            score[:, max(experts // ranks, self.shape.top_k) :] -= 2
        ids = np.argpartition(-score, self.shape.top_k - 1, axis=1)[:, : self.shape.top_k]
        return ids.astype(np.int32)

    def arguments(self):
        """(x, expert_ids, expert_weights, w_gate, w_up, w_down), sharded over the mesh."""
        s, rows = self.shape, NamedSharding(self.mesh(), P("expert"))
        count = self.tokens * self.ranks
        weights = np.random.default_rng(1).random((count, s.top_k), dtype=np.float32)
        return (
            _normal(2, (count, s.hidden_size), 1.0, self.dtype, rows),
            jax.device_put(self.expert_ids(), rows),
            jax.device_put(weights / weights.sum(1, keepdims=True), rows),
            *_expert_weights(s, self.dtype, rows),
        )


@functools.lru_cache(maxsize=1)
def _expert_weights(shape: MoeShape, dtype: str, sharding: NamedSharding):
    """(w_gate, w_up, w_down), kept for the next problem with the same layer."""
    sizes = (shape.num_experts, shape.hidden_size, shape.intermediate_size)
    turned = (shape.num_experts, shape.intermediate_size, shape.hidden_size)
    return (
        _normal(3, sizes, sizes[1] ** -0.5, dtype, sharding),
        _normal(4, sizes, sizes[1] ** -0.5, dtype, sharding),
        _normal(5, turned, turned[1] ** -0.5, dtype, sharding),
    )


@functools.partial(jax.jit, static_argnums=(1, 3, 4))
def _normal(seed, shape, scale, dtype, sharding):
    a = jax.random.normal(jax.random.key(seed), shape, dtype) * jnp.asarray(scale, dtype)
    return jax.lax.with_sharding_constraint(a, sharding)


def shapes_of(args) -> list[MoeShape]:
    """The layers' shapes that the command line asks for."""
    on_cpu = jax.default_backend() == "cpu"
    names = args.shape or (["cpu-default"] if on_cpu else ["qwen3-30b-a3b"])
    known = SHAPES | {CPU_SHAPE.name: CPU_SHAPE}
    unknown = [n for n in names if n not in known]
    if unknown:
        raise SystemExit(f"--shape: {unknown} is not among {', '.join(known)}.")
    changes = {
        "hidden_size": args.hidden,
        "intermediate_size": args.intermediate,
        "num_experts": args.experts,
        "top_k": args.top_k,
    }
    changes = {k: v for k, v in changes.items() if v is not None}
    return [dataclasses.replace(known[n], **changes) for n in names]


def dtype_of(args) -> str:
    return args.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")


def problems_of(args) -> list[Problem]:
    """The layers, with all their numbers of tokens, routings, minibatches and comm SMs."""
    ranks = args.ranks or len(jax.devices())
    tokens = args.tokens or ([512] if jax.default_backend() == "cpu" else [8192])
    return [
        Problem(shape, t, ranks, dtype_of(args), routing, minibatch, comm_sms)
        for shape in shapes_of(args)
        for t in tokens
        for routing in args.routing
        for minibatch in args.minibatch
        for comm_sms in args.comm_sms
    ]
