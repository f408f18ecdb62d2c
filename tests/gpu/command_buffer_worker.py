"""Run by the GPU tests in processes of their own: layers in a row, in a scan, and again with other
weights in the same program, or ("gradient") the gradients of that; prints hashes of the results and
how often the kernels ran.
"""

import hashlib
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
sys.path.insert(1, str(pathlib.Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
from jax_layers import make

import jax_mok
from jax_mok import _cuda

parts = dict(biases=True, shared=128, shared_gate=True)
case = make(256, 512, 256, 16, 4, **parts)
other = make(256, 512, 256, 16, 4, seed=1, routing="zipf", **parts)


def chain(args, ids):
    x, *rest = args
    for i in range(4):
        y = case.call((x, *rest), ids=jnp.roll(ids, i, 0), implementation="fused")
        x = (x + 0.3 * y).astype(jnp.bfloat16)
    step = lambda x, _: (x + 0.1 * case.call((x, *rest), ids=ids, implementation="fused"), None)
    return jax.lax.scan(step, x, None, length=3)[0]


def chain_gradients(args, ids):
    return jax.value_and_grad(lambda a: jnp.sum(jnp.square(chain(a, ids).astype(jnp.float32))))(
        args
    )


function = {"forward": chain, "gradient": chain_gradients}[sys.argv[1]]
hashes = []
for ranks in (1, 4):
    with _cuda.testing(virtual_ranks=ranks):
        program = jax.jit(function).lower(case.args, case.ids).compile()
        for c in (case, other, case, case, other):  # the first runs capture, later ones replay
            digest = hashlib.sha256()
            for leaf in jax.tree.leaves(jax_mok.synchronize(program(c.args, c.ids))):
                digest.update(np.asarray(leaf).tobytes())
            hashes.append(digest.hexdigest()[:16])
print(json.dumps({"hashes": hashes, "calls": jax_mok.call_counts()}))
