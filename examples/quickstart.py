"""One mixture-of-experts layer in plain JAX: route, run the experts, train. The experts are spread
over all devices; where there is only a CPU, over eight virtual ones."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # before JAX

import jax
import jax.numpy as jnp

import jax_mok

tokens, hidden, intermediate, num_experts = 1024, 64, 128, 8
mesh = jax.sharding.Mesh(jax.devices(), ("expert",))
keys = jax.random.split(jax.random.key(0), 5)
params = {
    "router": 0.1 * jax.random.normal(keys[0], (hidden, num_experts)),
    "gate": 0.1 * jax.random.normal(keys[1], (num_experts, hidden, intermediate)),
    "up": 0.1 * jax.random.normal(keys[2], (num_experts, hidden, intermediate)),
    "down": 0.1 * jax.random.normal(keys[3], (num_experts, intermediate, hidden)),
}
x = jax.random.normal(keys[4], (tokens, hidden))


def loss_fn(params, x):
    routing = jax_mok.route(x @ params["router"], top_k=2)
    y = jax_mok.moe(
        x, routing.expert_ids, routing.expert_weights, params["gate"], params["up"], params["down"]
    )
    return jnp.mean((y - jnp.sin(x)) ** 2) + 0.01 * routing.load_balance_loss


@jax.jit
def train_step(params, x):
    loss, grads = jax.value_and_grad(loss_fn)(params, x)
    return loss, jax.tree.map(lambda p, g: p - 30 * g, params, grads)


with jax.set_mesh(mesh):
    print(f"{mesh.size} devices, implementation {jax_mok.implementation_used()}")
    for step in range(20):
        loss, params = train_step(params, x)
        print(f"step {step:2d}: loss {loss:.4f}")
