"""Ways to compute the layer: each a function of the same arguments, or a reason why it is not here.

JAX candidates are `LAYERS[name](setting) -> layer`, `layer(x, ids, weights, w_gate, w_up, w_down)`
being differentiable and called under jit with global arrays. PyTorch's is a pipeline of its own.
Both raise `Unavailable` where they cannot run.
"""

import dataclasses
import functools
import importlib.util
import logging
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_mok
from jax_mok.bench import pipeline
from jax_mok.bench.problem import Problem

Layer = Callable[..., jax.Array]


class Unavailable(Exception):
    """Why a candidate cannot run here."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """Where a layer runs: tokens are split over all axes of the mesh, experts over "expert"."""

    mesh: Mesh
    num_experts: int
    dtype: str
    minibatch: int | None = None  # jax_mok's Config.minibatch_size
    comm_sms: int | None = None  # jax_mok's Config.fwd_num_comm_sms and bwd_num_comm_sms

    @classmethod
    def of(cls, problem: Problem) -> "Setting":
        return cls(
            problem.mesh(),
            problem.shape.num_experts,
            problem.dtype,
            problem.minibatch,
            problem.comm_sms,
        )

    @property
    def platform(self) -> str:
        return self.mesh.devices.flat[0].platform


def fused(setting: Setting, **config) -> Layer:
    """`config`: further fields of jax_mok's Config."""
    config = jax_mok.Config(
        minibatch_size=setting.minibatch,
        fwd_num_comm_sms=setting.comm_sms,
        bwd_num_comm_sms=setting.comm_sms,
        **config,
    )
    layer = functools.partial(jax_mok.moe, mesh=setting.mesh, config=config, implementation="fused")
    try:  # a layer of the least size tells whether there is a fused implementation here
        rows, experts = setting.mesh.size, setting.num_experts
        tiny = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.dtype(setting.dtype))
        jax.eval_shape(
            layer,
            tiny(rows, 64),
            jax.ShapeDtypeStruct((rows, 1), jnp.int32),
            jax.ShapeDtypeStruct((rows, 1), jnp.float32),
            *(tiny(experts, 64, 64) for _ in range(3)),
        )
    except ValueError as e:
        raise Unavailable(str(e)) from e
    return layer


def plain(setting: Setting) -> Layer:
    """What `moe` falls back to."""
    return functools.partial(jax_mok.moe, mesh=setting.mesh, implementation="xla")


def tokamax(setting: Setting) -> Layer:
    """The pipeline with tokamax's Mosaic kernels: never with what it falls back to by itself."""
    if importlib.util.find_spec("tokamax") is None:
        raise Unavailable("tokamax is not installed")
    if setting.platform == "cpu":
        raise Unavailable("tokamax has no kernels for a CPU")
    import tokamax as library

    # It warns about each product that it has no tuned setting for, at great length.
    logging.getLogger("absl").setLevel(logging.ERROR)
    return sorted_rows(setting, functools.partial(library.ragged_dot, implementation="mosaic"))


def tokamax_tuned(setting: Setting) -> Layer:
    """The same with larger tiles. tokamax has tuned settings for few shapes and GPUs, and takes
    tiles of 64 x 64 on Hopper else. These are its own for the largest of those layers, on an H100.
    """
    tokamax(setting)  # says why it cannot run, if so
    try:
        from tokamax._src.ops.ragged_dot import base, pallas_mosaic_gpu
    except ImportError as e:
        raise Unavailable(f"this tokamax is laid out differently: {e}") from e
    config = pallas_mosaic_gpu.Config(
        block_m=128,
        block_n=64,
        block_k=128,
        num_stages=4,
        split_k=1,
        persistent=True,
        grid_minor_dim=1,
        grid_tile_width=8,
    )
    tuned = functools.partial(pallas_mosaic_gpu.PallasMosaicGpuRaggedDot, config=config)
    dot = tuned(vjp=functools.partial(base.vjp, dlhs_ragged_dot=tuned(), drhs_ragged_dot=tuned()))
    return sorted_rows(setting, lambda a, w, groups: dot(a, w, group_sizes=groups))


def sorted_rows(setting: Setting, ragged_dot) -> Layer:
    """`pipeline.layer` with a `ragged_dot`, over the mesh."""
    axes = tuple(setting.mesh.axis_names)
    local = functools.partial(
        pipeline.layer,
        num_experts=setting.num_experts,
        expert_axis="expert" if setting.mesh.shape["expert"] > 1 else None,
        ragged_dot=ragged_dot,
    )
    return jax.shard_map(
        local,
        mesh=setting.mesh,
        in_specs=(P(axes),) * 3 + (P("expert"),) * 3,
        out_specs=P(axes),
        check_vma=False,  # a ragged_dot need not know over which axes its result varies
    )


LAYERS = {
    "jax_mok": fused,
    "jax_mok[save]": functools.partial(fused, residuals="save"),
    "jax_mok[recompute]": functools.partial(fused, residuals="recompute"),
    "xla": plain,
    "tokamax": tokamax,
    "tokamax[tuned]": tokamax_tuned,
}
CHOICES = ("jax_mok", "xla", "tokamax", "torch")  # each in all ways in which it can be set


def expand(names, *, backward: bool) -> list[str]:
    """The candidates behind the names on the command line; a name with [...] is one way of it."""
    ways = {"tokamax": ["tokamax", "tokamax[tuned]"]}
    if backward:
        ways["jax_mok"] = ["jax_mok[save]", "jax_mok[recompute]"]
    return [way for name in names for way in ways.get(name, [name])]


def is_ours(name: str) -> bool:
    return name.startswith("jax_mok")


def make_run(name: str, problem: Problem, arguments, backward: bool) -> Callable:
    """`run(*arguments)`, which starts the work and returns what has to be waited for."""
    if name == "torch":
        return torch_grouped_mm(problem, arguments, backward)
    layer = LAYERS[name](Setting.of(problem))
    if not backward:
        return jax.jit(layer)

    def loss(x, ids, weights, *experts):
        y = layer(x, ids, weights, *experts)
        # A cotangent that depends on y, so that no part of the forward pass can be left out.
        return jnp.sum(jnp.square(y.astype(jnp.float32)))

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 2, 3, 4, 5)))


def torch_grouped_mm(problem: Problem, arguments, backward: bool) -> Callable:
    """PyTorch with `_grouped_mm`; over several GPUs with NCCL, a process for each."""
    if importlib.util.find_spec("torch") is None:
        raise Unavailable("torch is not installed")
    import torch

    if not torch.cuda.is_available():
        raise Unavailable("torch sees no GPU")
    if not hasattr(torch, "_grouped_mm"):
        raise Unavailable(f"torch {torch.__version__} has no _grouped_mm")
    if problem.dtype != "bfloat16":
        raise Unavailable("torch._grouped_mm takes bfloat16 only")
    from jax_mok.bench import torch_pipeline

    if problem.ranks == 1:
        return torch_pipeline.on_one_gpu(problem, arguments, backward)
    if jax.process_count() > 1 or torch.cuda.device_count() < problem.ranks:
        raise Unavailable("the torch pipeline runs on the GPUs of one machine, from one process")
    return torch_pipeline.Ranks(problem, backward)
