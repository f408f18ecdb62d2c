"""Run twice by test_two_gpus_jax.py: one process a GPU. Prints hashes of its part of the result and
of the gradients, and the words of the error that a missing rank gives.
"""

import hashlib
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
sys.path.insert(1, str(pathlib.Path(__file__).parent.parent))

import jax

port, rank = sys.argv[1], int(sys.argv[2])
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank, local_device_ids=[rank])

import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax_layers import gradients_function, make

import jax_mok
from jax_mok import _cuda

mesh = Mesh(np.array(jax.devices("gpu")), ("expert",))
assert mesh.size == 2 and len(jax.local_devices(backend="gpu")) == 1
case = make(1000, 512, 256, 32, 4, routing="zipf", biases=True)


def put(array):
    array = np.asarray(array)
    sharding = NamedSharding(mesh, P("expert"))
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


args, ids, cotangent = jax.tree.map(put, case.args), put(case.ids), put(case.cotangent)


def options(timeout_seconds=15):
    config = jax_mok.Config(timeout_seconds=timeout_seconds)
    return dict(mesh=mesh, implementation="fused", config=config)


def call(**settings):
    function = lambda a, i: case.call(a, ids=i, **options(**settings))
    return jax_mok.synchronize(jax.jit(function)(args, ids))


def gradients():
    program = jax.jit(gradients_function(case, **options()))
    _, grads = jax_mok.synchronize(program(args, ids, cotangent))
    return [digest(mine(g)) for g in jax.tree.leaves(grads)]


mine = lambda y: np.asarray(y.addressable_shards[0].data)
digest = lambda a: hashlib.sha256(np.ascontiguousarray(a).tobytes()).hexdigest()
first = mine(call())
for _ in range(20):
    assert mine(call()).tobytes() == first.tobytes()
grads = gradients()
for _ in range(10):
    assert gradients() == grads
error = ""
with _cuda.testing(absent_rank=0):
    try:
        call(timeout_seconds=0.5)
    except jax_mok.MokError as e:
        error = str(e)
assert mine(call()).tobytes() == first.tobytes(), "the call after the failure"
named = all(heap["named_calls"] for heap in _cuda.heaps())
print(json.dumps({"hash": digest(first), "gradients": grads, "error": error, "named": named}))
