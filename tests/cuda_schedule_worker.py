"""Compiles programs for two H200s, on a machine that needs none. Arguments: WHAT FOLDER FLAGS.

WHAT = schedule: leaves in FOLDER, for every program, the order in which XLA issues its operations,
and on which streams. WHAT = memory: prints, as JSON, the bytes that a program needs beside its
arguments and results with residuals saved and with residuals computed again.
"""

import json
import os
import sys

what, folder, flags = sys.argv[1:]
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

import jax_mok
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


def stack(args, ids, config):
    """Gradients of eight layers in a scan, each of which keeps its residuals."""

    def loss(args):
        layer = lambda x, _: (
            x + case.call((x, *args[1:]), ids=ids, implementation="fused", config=config),
            None,
        )
        y, _ = jax.lax.scan(layer, args[0], None, length=8)
        return jnp.mean(jnp.square(y.astype(jnp.float32)))

    return jax.value_and_grad(loss)(args)


def compiled(function, *operands):
    traced = jax.jit(function).trace(*operands)
    return traced.lower(lowering_platforms=("cuda",)).compile()


dense = shapes([jnp.zeros((512, 512), jnp.bfloat16)] * 3, P("expert"))
with _cuda.testing(assume_hopper=True):
    if what == "schedule":
        compiled(independent, args, ids)
        compiled(training, dense, args, ids)
    else:
        sizes = {}
        for residuals in ("save", "recompute"):
            config = jax_mok.Config(residuals=residuals, macrobatch_size=1024)
            program = compiled(lambda a, i, c=config: stack(a, i, c), args, ids)
            sizes[residuals] = program.memory_analysis().temp_size_in_bytes
        print(json.dumps(sizes))
