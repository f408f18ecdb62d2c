"""Layers for the GPU tests through JAX: made on the device, with an oracle that compiles once a
shape, however many experts there are. And programs in processes of their own.
"""

import functools
import json
import os
import pathlib
import socket
import subprocess
import sys

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_mok
from jax_mok import _cuda
from jax_mok.config import resolve_activation

TOLERANCE = 6e-3  # relative L2 of bfloat16 results against float32
GRADIENT_TOLERANCE = 1e-2  # likewise, of a gradient, those of weights and biases by expert

ROUTINGS = ("uniform", "zipf", "one rank", "one expert", "some empty")


SHAPES = {
    "least": dict(tokens=1, hidden=64, intermediate=64, num_experts=1, top_k=1),
    "one token": dict(tokens=1, hidden=256, intermediate=128, num_experts=256, top_k=8),
    "odd": dict(tokens=321, hidden=192, intermediate=320, num_experts=8, top_k=3),
    "padded": dict(
        tokens=133,
        hidden=200,
        intermediate=72,
        num_experts=12,
        top_k=2,
        biases=True,
        shared=40,
        shared_gate=True,
    ),
    "gpt-oss": dict(
        tokens=257,
        hidden=2880,
        intermediate=2880,
        num_experts=8,
        top_k=4,
        biases=True,
        activation=jax_mok.Swiglu(1.702, 7.0, 1.0),
    ),
    "hidden 8192": dict(tokens=200, hidden=8192, intermediate=768, num_experts=8, top_k=2),
    "intermediate 1408": dict(
        tokens=500, hidden=2048, intermediate=1408, num_experts=16, top_k=6, shared=2816
    ),
    "512 experts": dict(tokens=512, hidden=256, intermediate=128, num_experts=512, top_k=10),
    "top-16": dict(tokens=300, hidden=512, intermediate=192, num_experts=40, top_k=16),
    "geglu": dict(
        tokens=300, hidden=512, intermediate=256, num_experts=8, top_k=2, activation="geglu"
    ),
    "reglu": dict(
        tokens=300, hidden=512, intermediate=256, num_experts=8, top_k=2, activation="reglu"
    ),
    "qwen3-30b": dict(tokens=2048, hidden=2048, intermediate=768, num_experts=64, top_k=8),
}


def require_hopper(mesh=None) -> None:
    """Skips where the kernels cannot run; nothing is left over from the test before."""
    topology = jax_mok._topology.find(mesh, None if mesh is None else "expert", ())
    why = _cuda.why_not(topology) if _cuda.handles(topology) else "the default device is no GPU"
    if why:
        pytest.skip(why)
    jax_mok.check_status()


def routed_ids(routing, count, num_experts, top_k, *, unused=0.0, seed=0) -> np.ndarray:
    """int32 [count, top_k], distinct within a token."""
    rng = np.random.default_rng(seed)
    popularity = np.ones(num_experts)
    if routing == "zipf":
        popularity = 1.0 / np.arange(1, num_experts + 1) ** 1.2
    elif routing == "one rank":  # all to the first experts: one rank's, of any number of ranks
        popularity[max(top_k, num_experts // 4) :] = 0
    elif routing == "some empty":
        popularity[::3] = 0 if num_experts // 3 * 2 >= top_k else 1
    noise = rng.gumbel(size=(count, num_experts))
    with np.errstate(divide="ignore"):
        scores = np.log(popularity) + noise
    ids = np.argsort(-scores, axis=1)[:, :top_k].astype(np.int32)
    if routing == "one expert":
        ids[:, 0], ids[:, 1:] = num_experts // 2, -1
    ids[rng.random(ids.shape) < unused] = -1
    return ids


def make(
    tokens,
    hidden,
    intermediate,
    num_experts,
    top_k,
    *,
    routing="uniform",
    unused=0.0,
    biases=False,
    shared=0,
    shared_gate=False,
    activation="swiglu",
    seed=0,
) -> cases.Case:
    ids = routed_ids(routing, tokens, num_experts, top_k, unused=unused, seed=seed)
    sizes = (tokens, hidden, intermediate, num_experts, top_k, shared)
    arrays = _random_arrays(sizes, biases, shared_gate, jax.random.key(seed))
    return cases.Case(ids=jnp.asarray(ids), activation=activation, **arrays)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _random_arrays(sizes, biases, shared_gate, key):
    """In one program: compiling one for every array would take longer than the tests."""
    t, h, i, e, k, s = sizes
    keys = iter(jax.random.split(key, 16))
    normal = lambda *shape, scale=1.0: (
        scale * jax.random.normal(next(keys), shape, jnp.float32)
    ).astype(jnp.bfloat16)
    scale_in, scale_out = h**-0.5, i**-0.5
    return dict(
        x=normal(t, h),
        weights=jax.random.uniform(next(keys), (t, k)),
        w_gate=normal(e, h, i, scale=scale_in),
        w_up=normal(e, h, i, scale=scale_in),
        w_down=normal(e, i, h, scale=scale_out),
        biases=(normal(e, i, scale=0.3), normal(e, i, scale=0.3), normal(e, h, scale=0.3))
        if biases
        else None,
        shared=jax_mok.SharedExpert(
            normal(h, s, scale=scale_in),
            normal(h, s, scale=scale_in),
            normal(s, h, scale=scale_out),
            jax.random.uniform(next(keys), (t,)) if shared_gate else None,
        )
        if s
        else None,
        cotangent=normal(t, h),
    )


def reference(
    x,
    expert_ids,
    expert_weights,
    w_gate,
    w_up,
    w_down,
    *,
    biases=None,
    shared=None,
    activation="swiglu",
):
    """`jax_mok.reference.moe` with a loop over the experts that is not unrolled; float32."""
    act = resolve_activation(activation)
    wide = lambda a: a.astype(jnp.float32)
    dot = lambda a, b: jnp.matmul(a, wide(b), precision=jax.lax.Precision.HIGHEST)
    x = wide(x)
    zeros = (jnp.zeros(w_gate.shape[0]),) * 3

    def one(y, expert):
        index, gate_, up_, down_, b_gate, b_up, b_down = expert
        chosen = expert_ids == index
        gate, up = dot(x, gate_) + wide(b_gate), dot(x, up_) + wide(b_up)
        out = dot(act(gate, up), down_) + wide(b_down)
        weight = jnp.where(chosen, expert_weights, 0).sum(-1, keepdims=True)
        return y + jnp.where(chosen.any(-1, keepdims=True), weight * out, 0), None

    indices = jnp.arange(w_gate.shape[0])
    experts = (indices, w_gate, w_up, w_down, *(biases or zeros))
    y, _ = jax.lax.scan(one, jnp.zeros_like(x), experts)
    if shared is not None:
        out = dot(act(dot(x, shared.w_gate), dot(x, shared.w_up)), shared.w_down)
        y = y + (out if shared.gate is None else shared.gate[:, None] * out)
    return y


def want(case) -> np.ndarray:
    """What the layer should give, in float32."""
    return np.asarray(jax.jit(lambda a: case.call(a, moe=reference))(case.args))


def run(case, **options) -> np.ndarray:
    """One jitted call on one device, checked for faults; traced anew each time."""
    y = jax.jit(lambda a, i: case.call(a, ids=i, **{"implementation": "fused", **options}))
    return np.asarray(jax_mok.synchronize(y(case.args, case.ids)))


def gradients_function(case, **options):
    """(args, ids, cotangent = that of `case`) -> (y, gradients of <cotangent, y>), to be jitted."""

    def run(args, ids, cotangent=case.cotangent):
        call = lambda a: case.call(a, ids=ids, **{"implementation": "fused", **options})
        y, vjp = jax.vjp(call, args)
        return y, vjp(cotangent)[0]

    return run


def gradients(case, **options):
    """The gradients of one jitted call on one device, checked for faults; traced anew each time."""
    _, grads = jax.jit(gradients_function(case, **options))(case.args, case.ids)
    return jax.tree.map(np.asarray, jax_mok.synchronize(grads))


def want_gradients(case):
    """What they should be: float32 autodiff of the oracle."""

    @jax.jit
    def run(args, cotangent):
        wide = lambda tree: jax.tree.map(lambda a: a.astype(jnp.float32), tree)
        _, vjp = jax.vjp(lambda a: case.call(a, moe=reference), wide(args))
        return vjp(wide(cotangent))[0]

    return jax.tree.map(np.asarray, run(case.args, case.cotangent))


def gradient_errors(grads, wanted, case) -> dict[str, float]:
    """Largest relative L2 of each gradient. Those of weights and biases count by expert; exactly
    zero is wanted of an expert without tokens and of an unused slot."""
    ids = np.asarray(case.ids)
    chosen = np.zeros(len(case.w_gate), bool)
    chosen[ids[ids >= 0]] = True
    names = ("x", "expert_weights", "w_gate", "w_up", "w_down", "biases", "shared")
    errors = {}
    for name, grad, want in zip(names, grads, wanted, strict=True):
        leaves, wants = jax.tree.leaves(grad), jax.tree.leaves(want)
        assert len(leaves) == len(wants)
        for i, (g, w) in enumerate(zip(leaves, wants)):
            assert g.shape == w.shape
            pairs = [(g, w)]
            if name.startswith("w_") or name == "biases":
                assert not g[~chosen].any(), f"{name} {i}: experts without tokens"
                pairs = list(zip(g[chosen], w[chosen]))
            if name == "expert_weights":
                assert not g[ids < 0].any(), "unused slots"
            worst = max((cases.relative_l2(*pair) for pair in pairs), default=0.0)
            errors[f"{name} {i}" if len(leaves) > 1 else name] = worst
    return errors


def assert_gradients(grads, case, tolerance=GRADIENT_TOLERANCE):
    errors = gradient_errors(grads, want_gradients(case), case)
    print({name: f"{error:.1e}" for name, error in errors.items()})
    assert all(error < tolerance for error in errors.values()), errors  # NaN is not less


def stacked(case, layers):
    """Weights of `layers` different layers, for a scan."""
    _, *rest = case.args
    return jax.tree.map(
        lambda a: jnp.stack([jnp.roll(a, i, 0) for i in range(layers)]), tuple(rest)
    )


def normalized(x):
    x = x.astype(jnp.float32)
    return (x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)).astype(jnp.bfloat16)


COMMAND_BUFFERS = {
    "off": "--xla_gpu_autotune_level=0 --xla_gpu_enable_command_buffer=",
    "on": "--xla_gpu_autotune_level=0 --xla_gpu_graph_min_graph_size=1 "
    "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,COLLECTIVES",
}


def command_buffer_results(what) -> dict:
    """What command_buffer_worker.py prints with command buffers off and on, in processes of their
    own: XLA reads its flags once."""
    worker = pathlib.Path(__file__).with_name("command_buffer_worker.py")
    results = {}
    for name, flags in COMMAND_BUFFERS.items():
        environment = {
            **os.environ,
            "XLA_FLAGS": flags,
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        }
        done = subprocess.run(
            [sys.executable, str(worker), what],
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        results[name] = json.loads(done.stdout.splitlines()[-1])
        print(name, results[name])
    return results


def in_two_processes(worker: str, flags: str) -> list[dict]:
    """What this folder's `worker` prints as JSON, run twice with the arguments PORT RANK."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    program = str(pathlib.Path(__file__).with_name(worker))
    processes = []
    for rank in range(2):
        environment = {
            **os.environ,
            "XLA_FLAGS": flags,
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, program, str(port), str(rank)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        outputs = [p.communicate(timeout=240)[0] for p in processes]
    finally:
        for p in processes:
            p.kill()
    assert [p.returncode for p in processes] == [0, 0], "\n".join(outputs)
    # XLA may have the last word.
    results = [[line for line in o.splitlines() if line.startswith("{")] for o in outputs]
    assert all(results), "\n".join(outputs)
    return [json.loads(lines[-1]) for lines in results]
