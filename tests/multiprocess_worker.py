"""One process of test_multiprocess.py. Arguments: RANK COUNT PORT LAYOUT IMPLEMENTATION OUT."""

import os
import sys

rank, count, port = map(int, sys.argv[1:4])
layout, implementation, out = sys.argv[4:]
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={8 // count}"

import jax

if count > 1:
    jax.distributed.initialize(f"127.0.0.1:{port}", count, rank)

import cases
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_mok

devices = np.array(jax.devices())
assert len(devices) == 8, devices
# "inside": the ranks of an expert group share a process; "across": they do not.
shape = {"inside": (2, 4), "across": (1, 8)}[layout]
mesh = Mesh(devices.reshape(shape), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)
wish = None if implementation == "auto" else implementation

case = cases.make(tokens=(16, 4), biases=True, shared=16, shared_gate=True)
tokens, expert = P(("data", "expert")), P("expert")
specs = (tokens, tokens, expert, expert, expert, (expert,) * 3,
         jax_mok.SharedExpert(P(), P(), P(), tokens))  # fmt: skip


def put(array, spec):
    array = np.asarray(array)
    return jax.make_array_from_callback(
        array.shape, NamedSharding(mesh, spec), lambda index: array[index]
    )


args, ids = jax.tree.map(put, case.args, specs), put(case.ids, tokens)
cotangent = put(case.cotangent, tokens)
used = jax_mok.implementation_used(mesh=mesh, implementation=wish)


@jax.jit
def step(args, ids, cotangent):
    """Three steps of gradient descent, so that what one process gets wrong spreads."""

    def loss(args):
        y = case.call(args, ids=ids, mesh=mesh, implementation=wish)
        return jnp.sum(y * cotangent) + 0.5 * jnp.sum(y * y)

    def body(args, _):
        value, grads = jax.value_and_grad(loss)(args)
        return jax.tree.map(lambda a, g: a - 0.01 * g, args, grads), value

    return jax.lax.scan(body, args, None, length=3)


result = step(args, ids, cotangent)
replicated = jax.jit(lambda t: t, out_shardings=NamedSharding(mesh, P()))(result)
jax.block_until_ready(replicated)  # before any process leaves: the sums need all of them
if rank == 0:
    leaves = [np.asarray(leaf.addressable_data(0)) for leaf in jax.tree.leaves(replicated)]
    np.savez(out, *leaves, used=used)
print("done", rank, flush=True)
