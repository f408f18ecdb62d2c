"""Compiles programs for two H200s, on a machine that needs none. Arguments: FOLDER FLAGS.

Leaves in FOLDER, for every program, the order in which XLA issues its operations, and on which
streams.
"""

import os
import sys

folder, flags = sys.argv[1:]
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    f"--xla_gpu_autotune_level=0 --xla_dump_to={folder} --xla_dump_hlo_as_text {flags}"
)

import cases
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_mok import _cuda

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 62914560
  clock_rate_ghz: 1.98
  device_memory_size: 150754820096
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H200"
"""

topology = topologies.get_topology_desc("two", "cuda", topology="1x1x2", target_config=H200)
mesh = Mesh(np.array(topology.devices), ("expert",))
case = cases.make(
    tokens=(512,), hidden=512, intermediate=256, num_experts=16, top_k=4, dtype=jnp.bfloat16
)
shapes = lambda tree, spec: jax.tree.map(
    lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec)), tree
)
args, ids = shapes(case.args, P("expert")), shapes(case.ids, P("expert"))


def independent(args, ids):
    """Layers, sums and gathers that do not depend on each other."""

    def local(args, ids):
        x, total = args[0], jnp.zeros((), jnp.float32)
        ys = []
        for i in range(4):
            ys.append(case.call((x * (i + 1), *args[1:]), ids=ids, implementation="fused"))
            scaled = x.astype(jnp.float32) * (i + 1)
            total += jax.lax.psum(jnp.sum(scaled), "expert")
            total += jnp.sum(jax.lax.all_gather(scaled, "expert", tiled=True))
        return jnp.stack(ys, 1), jax.lax.psum(total, "expert")

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P("expert"), P("expert")),
        out_specs=(P("expert"), P()),
        check_vma=False,
    )
    return mapped(args, ids)


def training(dense, args, ids):
    """Dense weights gathered beside the layers, and all gradients."""

    def loss(dense, args):
        x = args[0]
        for w in dense:
            x = jax.nn.gelu(x @ w)
            x = x + case.call((x, *args[1:]), ids=ids, implementation="fused")
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    return jax.value_and_grad(loss)(dense, args)


dense = shapes([jnp.zeros((512, 512), jnp.bfloat16)] * 3, P("expert"))
with _cuda.testing(assume_hopper=True):
    for function, operands in ((independent, (args, ids)), (training, (dense, args, ids))):
        lowered = jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",))
        lowered.compile()
