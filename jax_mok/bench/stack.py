"""The training step to measure: a stack of blocks like those of Qwen3-30B-A3B, and its optimizer.

A block is RMSNorm, grouped-query attention with normalised and rotated queries and keys, RMSNorm,
router and experts; it is rematerialised as a whole. There is no embedding and no head: with a few
layers of 48 they would outweigh what is measured. The stack learns to map random vectors to their
sine. Parameters are in the dtype of the computation, AdamW's moments in float32.

Sequences are split over all devices of the mesh data x expert, experts over "expert"; parameters
and moments are split over "data" too (dense ones over both) and gathered where they are used.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_mok
from jax_mok.shapes import MoeShape

EPSILON = 1e-6
ROPE_BASE = 1e6
# Small: with 1e-3 parameters of this size move by 5 % a step, the losses of four layers part after
# four steps from the rounding of a norm, and candidates cannot be compared.
LEARNING_RATE = 2e-4
LOAD_BALANCE = 0.01  # weight of the router's loss


@dataclasses.dataclass(frozen=True)
class Stack:
    """Sizes. `batch` is in sequences of one device; there are H / 64 heads of `head_size`."""

    shape: MoeShape
    layers: int
    sequence: int
    batch: int
    ranks: int  # of the expert axis
    dtype: str
    head_size: int = 128

    @property
    def heads(self) -> int:
        return max(1, self.shape.hidden_size // 64)

    @property
    def key_heads(self) -> int:
        return max(1, self.heads // 8)

    @property
    def tokens(self) -> int:
        """Of one device and step."""
        return self.batch * self.sequence

    @property
    def flops(self) -> int:
        """Operations of one device and step, forward once and backward twice that."""
        s, attended = self.shape, self.heads * self.head_size
        dense = 2 * s.hidden_size * (2 * attended + 2 * self.key_heads * self.head_size)
        scores = 2 * self.sequence * attended  # causal: half of both products
        router = 2 * s.hidden_size * s.num_experts
        return 3 * self.layers * (self.tokens * (dense + scores + router) + s.flops(self.tokens))

    def mesh(self) -> Mesh:
        devices = np.array(jax.devices())
        if devices.size % self.ranks:
            raise SystemExit(f"--ranks {self.ranks} does not divide the {devices.size} devices.")
        return Mesh(devices.reshape(-1, self.ranks), ("data", "expert"), (AxisType.Auto,) * 2)

    def parameters(self) -> dict[str, tuple[tuple[int, ...], P]]:
        """Shape and partition of one layer's parameters."""
        h, i, e = self.shape.hidden_size, self.shape.intermediate_size, self.shape.num_experts
        attended, keys = self.heads * self.head_size, self.key_heads * self.head_size
        dense, experts = P(("data", "expert")), P("expert", "data")
        return {
            "attention_norm": ((h,), P()),
            "w_query": ((h, attended), dense),
            "w_key": ((h, keys), dense),
            "w_value": ((h, keys), dense),
            "query_norm": ((self.head_size,), P()),
            "key_norm": ((self.head_size,), P()),
            "w_out": ((attended, h), dense),
            "moe_norm": ((h,), P()),
            "w_router": ((h, e), P()),
            "w_gate": ((e, h, i), experts),
            "w_up": ((e, h, i), experts),
            "w_down": ((e, i, h), experts),
        }

    def layer_bytes(self) -> int:
        """Of one layer on all devices together: parameters, gradients, both moments."""
        count = sum(int(np.prod(shape)) for shape, _ in self.parameters().values())
        return count * (2 * jnp.dtype(self.dtype).itemsize + 8)


class Training:
    """Makes states and steps of a `Stack`, all with the same parameters at the start."""

    def __init__(self, stack: Stack, attention: str | None):
        import optax

        self.stack, self.mesh, self.attention = stack, stack.mesh(), attention
        self.rule = optax.adamw(LEARNING_RATE, b2=0.95, weight_decay=0.1)
        self.apply_updates = optax.apply_updates
        specs = [{n: spec for n, (_, spec) in stack.parameters().items()}] * stack.layers
        shapes = jax.eval_shape(self._start)
        place = lambda spec: NamedSharding(self.mesh, spec)
        places = jax.tree.map(place, specs, is_leaf=lambda a: isinstance(a, P))
        moments = optax.tree.map_params(
            self.rule,
            lambda _, where: where,
            shapes["moments"],
            places,
            transform_non_params=lambda _: place(P()),
        )
        self.places = {"parameters": places, "moments": moments}
        self.start = jax.jit(self._start, out_shardings=self.places)
        self.batch_place = place(P(("data", "expert")))

    def _start(self):
        def one(name, shape, key):
            if name.endswith("norm"):
                return jnp.ones(shape, self.stack.dtype)
            return (jax.random.normal(key, shape) * shape[-2] ** -0.5).astype(self.stack.dtype)

        keys = jax.random.split(jax.random.key(0), self.stack.layers)
        parameters = []
        for key in keys:
            sizes = self.stack.parameters()
            each = dict(zip(sizes, jax.random.split(key, len(sizes))))
            parameters.append({n: one(n, shape, each[n]) for n, (shape, _) in sizes.items()})
        return {"parameters": parameters, "moments": self.rule.init(_float32(parameters))}

    def data(self) -> tuple[jax.Array, jax.Array]:
        """(x, target) [sequences, length, H] of the dtype."""
        s = self.stack
        shape = (s.batch * self.mesh.size, s.sequence, s.shape.hidden_size)

        def make():
            x = jax.random.normal(jax.random.key(1), shape, jnp.float32)
            return x.astype(s.dtype), jnp.sin(3 * x).astype(s.dtype)

        return jax.jit(make, out_shardings=(self.batch_place,) * 2)()

    def step(self, experts: Callable) -> Callable:
        """A jitted (state, x, target) -> (state, (loss, gradient norm of the first layer)).

        `experts` is a layer of `candidates.LAYERS`, or `no_experts`. The state is donated.
        """
        block = functools.partial(_block, self.stack, self.mesh, self.attention, experts)
        block = jax.checkpoint(jax.jit(block))

        def loss_of(parameters, x, target):
            router_loss = 0.0
            for layer in parameters:
                x, balance = block(layer, x)
                router_loss += balance
            error = _norm(x).astype(jnp.float32) - target.astype(jnp.float32)
            return jnp.mean(jnp.square(error)) + LOAD_BALANCE * router_loss

        def step(state, x, target):
            parameters = state["parameters"]
            loss, grads = jax.value_and_grad(loss_of)(parameters, x, target)
            first = [jnp.sum(jnp.square(g)) for g in jax.tree.leaves(_float32(grads[0]))]
            updates, moments = self.rule.update(
                _float32(grads), state["moments"], _float32(parameters)
            )
            parameters = self.apply_updates(parameters, updates)
            return {"parameters": parameters, "moments": moments}, (loss, jnp.sqrt(sum(first)))

        return jax.jit(step, donate_argnums=0, out_shardings=(self.places, None))


def no_experts(x, ids, weights, w_gate, w_up, w_down):
    """Stands for the experts where their share is measured: routing stays, all else is gone."""
    return x * weights.sum(-1, keepdims=True).astype(x.dtype)


def _float32(tree: Any) -> Any:
    return jax.tree.map(lambda a: a.astype(jnp.float32), tree)


def _norm(x, scale=None):
    """RMSNorm over the last dim."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + EPSILON)
    return wide.astype(x.dtype) if scale is None else wide.astype(x.dtype) * scale


def _rotate(x):
    """Rotary position embedding (Su et al., arXiv:2104.09864) of [batch, length, heads, size]."""
    half = x.shape[-1] // 2
    frequency = ROPE_BASE ** (-jnp.arange(half) / half)
    angle = jnp.arange(x.shape[1])[:, None, None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _block(stack: Stack, mesh: Mesh, attention, experts, p, x):
    """(x + attention + experts, load-balance loss) of [sequences, length, H]."""
    # Here the parts of a dense parameter come together; those of the experts do in their layer.
    whole = lambda w: jax.lax.with_sharding_constraint(w, NamedSharding(mesh, P()))
    split = lambda a, size: a.reshape(*a.shape[:2], -1, size)
    h = _norm(x, p["attention_norm"])
    q, k, v = (split(h @ whole(p[n]), stack.head_size) for n in ("w_query", "w_key", "w_value"))
    q, k = _rotate(_norm(q, p["query_norm"])), _rotate(_norm(k, p["key_norm"]))
    rows = P(("data", "expert"))
    attend = jax.shard_map(
        functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=attention),
        mesh=mesh,
        in_specs=(rows,) * 3,
        out_specs=rows,
        check_vma=False,
    )
    attended = attend(q, k, v)
    x = x + attended.reshape(*x.shape[:2], -1) @ whole(p["w_out"])

    h = _norm(x, p["moe_norm"]).reshape(-1, x.shape[-1])
    logits = jnp.dot(h, p["w_router"], preferred_element_type=jnp.float32)
    routing = jax_mok.route(logits, top_k=stack.shape.top_k)
    weights = p["w_gate"], p["w_up"], p["w_down"]
    with jax.named_scope("moe"):  # of all candidates: `python -m jax_mok profile` looks for it
        y = experts(h, routing.expert_ids, routing.expert_weights, *weights)
    return x + y.reshape(x.shape), routing.load_balance_loss
