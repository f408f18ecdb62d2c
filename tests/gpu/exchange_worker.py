"""Run twice by test_exchange_jax.py: one process a GPU. Checks its part of all exchanges."""

import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import jax

port, rank = sys.argv[1], int(sys.argv[2])
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank, local_device_ids=[rank])

import exchange_cases
import numpy as np
from jax.sharding import Mesh

from jax_mok.bench import exchange
from jax_mok.bench.problem import ROUTINGS

mesh = Mesh(np.array(jax.devices("gpu")), ("expert",))
assert mesh.size == 2 and len(jax.local_devices(backend="gpu")) == 1
checked = 0
for mode in exchange.MODES:
    for routing in ROUTINGS:
        exchange_cases.check(mesh, 2, mode, routing)
        checked += 1
print(json.dumps({"checked": checked}))
