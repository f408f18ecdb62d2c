"""Ways to compute the layer: each a function of the same arguments, or a reason why it is not here.

A candidate is `make(problem, arguments, backward) -> run`, `run(*arguments)` starting the work and
returning what has to be waited for. It raises `Unavailable` where it cannot run.
"""

import functools
import importlib.util

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jax_mok
from jax_mok import ffi, xla
from jax_mok.bench.problem import Problem
from jax_mok.config import resolve_activation
from jax_mok.ffi import Operands


class Unavailable(Exception):
    """Why a candidate cannot run here."""


def _step(layer, backward: bool):
    """The forward pass, or the gradients of everything, as one jit-compiled function."""
    if not backward:
        return jax.jit(layer)

    def loss(x, ids, weights, *experts):
        y = layer(x, ids, weights, *experts)
        # A cotangent that depends on y, so that no part of the forward pass can be left out.
        return jnp.sum(jnp.square(y.astype(jnp.float32)))

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 2, 3, 4, 5)))


def fused(problem: Problem, arguments, backward: bool):
    mesh = problem.mesh()
    config = jax_mok.Config(minibatch_size=problem.minibatch)
    try:
        layer = functools.partial(jax_mok.moe, mesh=mesh, config=config, implementation="fused")
        jax.eval_shape(layer, *arguments)
    except ValueError as e:
        raise Unavailable(str(e)) from e
    return _step(layer, backward)


def collectives(problem: Problem, arguments, backward: bool, ragged_dot=jax.lax.ragged_dot):
    ffi.register()
    mesh, spec = problem.mesh(), P("expert")

    def local(x, ids, weights, w_gate, w_up, w_down):
        return xla.moe(
            ids,
            Operands(x, weights, w_gate, w_up, w_down, None, None, None),
            activation=resolve_activation("swiglu"),
            expert_axes=("expert",),
            manual_axes=("expert",),
            num_experts=problem.shape.num_experts,
            platform=mesh.devices.flat[0].platform,
            ragged_dot=ragged_dot,
        )

    # Not every ragged_dot knows over which axes its result varies.
    check_vma = ragged_dot is jax.lax.ragged_dot
    layer = jax.shard_map(
        local, mesh=mesh, in_specs=(spec,) * 6, out_specs=spec, check_vma=check_vma
    )
    return _step(layer, backward)


def tokamax(problem: Problem, arguments, backward: bool):
    if importlib.util.find_spec("tokamax") is None:
        raise Unavailable("tokamax is not installed")
    if problem.mesh().devices.flat[0].platform == "cpu":
        raise Unavailable("tokamax has no kernels for a CPU")
    import tokamax as library

    def ragged_dot(rows, w, group_sizes, preferred_element_type=None):
        return library.ragged_dot(rows, w, group_sizes).astype(preferred_element_type)

    return collectives(problem, arguments, backward, ragged_dot)


def torch_grouped_mm(problem: Problem, arguments, backward: bool):
    """PyTorch on one GPU: sort, gather, grouped GEMMs, scatter-add; autograd backwards."""
    if importlib.util.find_spec("torch") is None:
        raise Unavailable("torch is not installed")
    import torch

    if not torch.cuda.is_available():
        raise Unavailable("torch sees no GPU")
    if problem.ranks != 1:
        raise Unavailable("the torch pipeline here is for one GPU")
    if not hasattr(torch, "_grouped_mm"):
        raise Unavailable(f"torch {torch.__version__} has no _grouped_mm")
    if problem.dtype != "bfloat16":
        raise Unavailable("torch._grouped_mm takes bfloat16 only")
    num_experts = problem.shape.num_experts

    def to_torch(a):
        t = torch.from_dlpack(a).clone()
        return t.requires_grad_(backward) if t.is_floating_point() else t

    def layer(x, ids, weights, w_gate, w_up, w_down):
        flat = ids.reshape(-1).long()
        order = torch.argsort(flat, stable=True)
        offsets = torch.bincount(flat, minlength=num_experts).cumsum(0).to(torch.int32)
        token = order // ids.shape[1]
        rows = x[token]
        gate = torch._grouped_mm(rows, w_gate, offs=offsets)
        up = torch._grouped_mm(rows, w_up, offs=offsets)
        hidden = torch.nn.functional.silu(gate) * up
        out = torch._grouped_mm(hidden, w_down, offs=offsets)
        out = out.float() * weights.reshape(-1)[order][:, None]
        y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        return y.index_add(0, token, out).to(x.dtype)

    converted = [to_torch(a) for a in arguments]

    def run(*_):
        y = layer(*converted)
        if backward:
            for t in converted:
                t.grad = None
            y.float().square().sum().backward()
        return y

    return run


CANDIDATES = {
    "jax_mok": fused,
    "xla": collectives,
    "tokamax": tokamax,
    "torch": torch_grouped_mm,
}
