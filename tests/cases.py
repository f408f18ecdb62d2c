"""Layers to test with: random data, options, meshes, and how results are compared."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

import jax_mok
from jax_mok import reference


@dataclasses.dataclass
class Case:
    """Arguments of a layer; `args` are the differentiable ones, in the order of `moe`."""

    x: Any
    ids: Any
    weights: Any
    w_gate: Any
    w_up: Any
    w_down: Any
    biases: Any = None
    shared: Any = None
    activation: Any = "swiglu"
    cotangent: Any = None

    @property
    def args(self):
        return (
            self.x,
            self.weights,
            self.w_gate,
            self.w_up,
            self.w_down,
            self.biases,
            self.shared,
        )

    def call(self, args, *, moe=jax_mok.moe, ids=None, **options):
        x, weights, w_gate, w_up, w_down, biases, shared = args
        return moe(
            x,
            self.ids if ids is None else ids,
            weights,
            w_gate,
            w_up,
            w_down,
            biases=biases,
            shared=shared,
            activation=self.activation,
            **options,
        )

    def loss(self, args, **options):
        y = self.call(args, **options)
        return jnp.sum(y.astype(jnp.float32) * self.cotangent.astype(jnp.float32))

    def value_and_grads(self, *, jit=True, **options):
        """(y, gradients of every differentiable argument) of <cotangent, y>."""

        def run(args):
            y, vjp = jax.vjp(lambda a: self.call(a, **options), args)
            return y, vjp(self.cotangent)[0]

        return (jax.jit(run) if jit else run)(self.args)

    def reference(self):
        """The same from the readable definition, in float32."""
        wide = jax.tree.map(lambda a: a.astype(jnp.float32), self.args)

        def run(args):
            y, vjp = jax.vjp(lambda a: self.call(a, moe=reference.moe), args)
            return y, vjp(self.cotangent.astype(jnp.float32))[0]

        return jax.jit(run)(wide)


def make(
    *,
    tokens=(8, 6),
    hidden=24,
    intermediate=40,
    num_experts=8,
    top_k=3,
    dtype=jnp.float32,
    biases=False,
    shared=0,
    shared_gate=False,
    activation="swiglu",
    unused=0.0,
    experts=None,
    seed=0,
) -> Case:
    """Random layer. `unused`: share of slots that are -1. `experts`: the ones tokens may choose."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape, scale=1.0: jnp.asarray(
        rng.standard_normal(shape, dtype=np.float32) * scale, dtype
    )
    allowed = np.arange(num_experts) if experts is None else np.asarray(experts)
    count = int(np.prod(tokens))
    ids = np.stack([rng.permutation(allowed)[:top_k] for _ in range(count)] or [np.zeros(top_k)])
    ids = ids[:count].astype(np.int32)
    ids[rng.random(ids.shape) < unused] = -1
    x = normal(*tokens, hidden)
    scale_in, scale_out = hidden**-0.5, intermediate**-0.5
    return Case(
        x=x,
        ids=jnp.asarray(ids.reshape(*tokens, top_k)),
        weights=jnp.asarray(rng.random((*tokens, top_k), dtype=np.float32)),
        w_gate=normal(num_experts, hidden, intermediate, scale=scale_in),
        w_up=normal(num_experts, hidden, intermediate, scale=scale_in),
        w_down=normal(num_experts, intermediate, hidden, scale=scale_out),
        biases=(
            normal(num_experts, intermediate, scale=0.3),
            normal(num_experts, intermediate, scale=0.3),
            normal(num_experts, hidden, scale=0.3),
        )
        if biases
        else None,
        shared=jax_mok.SharedExpert(
            normal(hidden, shared, scale=scale_in),
            normal(hidden, shared, scale=scale_in),
            normal(shared, hidden, scale=scale_out),
            jnp.asarray(rng.random(tokens, dtype=np.float32)) if shared_gate else None,
        )
        if shared
        else None,
        activation=activation,
        cotangent=normal(*tokens, hidden),
    )


def mesh(shape, names, *, permute=False, axis_type=AxisType.Auto) -> Mesh:
    """A mesh of the first devices; `permute`: in an order that is not theirs."""
    count = int(np.prod(shape))
    devices = np.array(jax.devices()[:count])
    if permute:
        devices = devices[np.random.default_rng(7).permutation(count)]
    return Mesh(devices.reshape(shape), names, axis_types=(axis_type,) * len(names))


def relative_l2(value, want) -> float:
    """Norm of the difference over the norm of what is wanted; NaN never passes a comparison."""
    value, want = np.asarray(value, np.float64), np.asarray(want, np.float64)
    norm = np.linalg.norm(want)
    return float(np.linalg.norm(value - want) / norm) if norm else float(np.linalg.norm(value))


def assert_close(value, want, tolerance, what=""):
    """Every leaf of the tree within `tolerance` relative L2."""
    leaves = jax.tree_util.tree_leaves_with_path(value)
    wants = jax.tree_util.tree_leaves_with_path(want)
    assert [p for p, _ in leaves] == [p for p, _ in wants]
    for (path, leaf), (_, expected) in zip(leaves, wants):
        assert leaf.shape == expected.shape
        error = relative_l2(leaf, expected)
        assert error <= tolerance, f"{what}{jax.tree_util.keystr(path)}: relative L2 {error:.2e}"


def assert_same_bits(value, want, what=""):
    for (path, leaf), expected in zip(
        jax.tree_util.tree_leaves_with_path(value), jax.tree.leaves(want)
    ):
        same = np.asarray(leaf).tobytes() == np.asarray(expected).tobytes()
        assert same, f"{what}{jax.tree_util.keystr(path)} differs"
