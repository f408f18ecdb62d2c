"""The language model: a decoder-only transformer over bytes, every feed-forward layer of which is
a mixture of experts."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_mok.flax import MoE

NUM_BYTES = 256


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    layers: int = 4
    hidden_size: int = 128
    heads: int = 4
    num_experts: int = 8
    top_k: int = 2
    expert_size: int = 256
    shared_experts: int = 0
    scoring: str = "softmax"
    balance: str = "loss"  # "loss": by the load-balance loss; "bias": by the selection bias
    implementation: str | None = None
    dtype: Any = jnp.float32


class ByteLM(nnx.Module):
    """int32 bytes [batch, length] -> float32 logits [batch, length, 256] of the byte after each."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        size, dtype = config.hidden_size, config.dtype
        self.embed = nnx.Embed(NUM_BYTES, size, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List(Block(config, rngs=rngs) for _ in range(config.layers))
        self.norm = nnx.RMSNorm(size, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(size, NUM_BYTES, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, text: jax.Array) -> jax.Array:
        x = self.embed(text) * math.sqrt(self.embed.features)  # variance 1
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).astype(jnp.float32)


class Block(nnx.Module):
    """Attention, then experts, each on normalised inputs and added to the residual stream."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(config.hidden_size, dtype=config.dtype, rngs=rngs)
        self.attention = Attention(config, rngs=rngs)
        self.moe_norm = nnx.RMSNorm(config.hidden_size, dtype=config.dtype, rngs=rngs)
        self.moe = MoE(
            num_experts=config.num_experts,
            top_k=config.top_k,
            hidden_size=config.hidden_size,
            intermediate_size=config.expert_size,
            num_shared_experts=config.shared_experts,
            scoring=config.scoring,
            selection_bias=config.balance == "bias",
            bias_update_rate=0.01,  # ten times the usual: a run here has hundreds of steps
            implementation=config.implementation,
            dtype=config.dtype,
            rngs=rngs,
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.moe(self.moe_norm(x))


class Attention(nnx.Module):
    """Causal self-attention over [batch, length, hidden], with rotary positions."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        size, self.heads = config.hidden_size, config.heads
        self.qkv = nnx.Linear(size, 3 * size, use_bias=False, dtype=config.dtype, rngs=rngs)
        self.out = nnx.Linear(size, size, use_bias=False, dtype=config.dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, size = x.shape
        split = lambda a: a.reshape(batch, length, self.heads, size // self.heads)
        q, k, v = map(split, jnp.split(self.qkv(x), 3, axis=-1))
        y = jax.nn.dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        return self.out(y.reshape(x.shape))


def rotate(x: jax.Array) -> jax.Array:
    """Rotary position embedding (Su et al., arXiv:2104.09864) of [batch, length, heads, size]."""
    half = x.shape[-1] // 2
    frequency = 10_000.0 ** (-jnp.arange(half) / half)
    angle = jnp.arange(x.shape[1])[:, None, None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
