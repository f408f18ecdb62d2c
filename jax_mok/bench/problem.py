"""The layer to measure: shape, routing, random arguments placed on a mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_mok.shapes import MoeShape

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
        else:
            score = rng.random((count, experts), dtype=np.float32)
            score[:, max(experts // self.ranks, self.shape.top_k) :] -= 2
        ids = np.argpartition(-score, self.shape.top_k - 1, axis=1)[:, : self.shape.top_k]
        return ids.astype(np.int32)

    def arguments(self):
        """(x, expert_ids, expert_weights, w_gate, w_up, w_down), sharded over the mesh."""
        s, dtype = self.shape, jnp.dtype(self.dtype)
        mesh = self.mesh()
        rows = NamedSharding(mesh, P("expert"))
        count = self.tokens * self.ranks

        def normal(seed, shape, scale):
            make = jax.jit(
                lambda: jax.random.normal(jax.random.key(seed), shape, dtype) * scale,
                out_shardings=rows,
            )
            return make()

        weights = np.random.default_rng(1).random((count, s.top_k), dtype=np.float32)
        sizes_in = (s.num_experts, s.hidden_size, s.intermediate_size)
        sizes_out = (s.num_experts, s.intermediate_size, s.hidden_size)
        scale_in, scale_out = s.hidden_size**-0.5, s.intermediate_size**-0.5
        return (
            normal(2, (count, s.hidden_size), dtype.type(1)),
            jax.device_put(self.expert_ids(), rows),
            jax.device_put(weights / weights.sum(1, keepdims=True), rows),
            normal(3, sizes_in, dtype.type(scale_in)),
            normal(4, sizes_in, dtype.type(scale_in)),
            normal(5, sizes_out, dtype.type(scale_out)),
        )
