"""The CPU engine behind its custom calls, below `jax_mok.moe`, for tests: layers as NumPy arrays,
the calls on virtual devices, and the same in float64 NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jax_mok import _core, ffi

NAMES = (
    *("x", "ids", "weights", "w_gate", "w_up", "w_down"),
    *("b_gate", "b_up", "b_down", "s_gate", "s_up", "s_down", "s_scale"),
)
GRADIENTS = ("x", *NAMES[2:])
PER_TOKEN = ("x", "ids", "weights", "s_scale", "dy")
SHARED = ("s_gate", "s_up", "s_down")


@pytest.fixture(autouse=True, scope="module")
def registered():
    ffi.register()
    yield
    _core.set_num_threads(0)


@dataclasses.dataclass(frozen=True)
class Layer:
    """Global sizes of a layer, and its inputs as NumPy arrays."""

    tokens: int = 32
    hidden: int = 24
    inner: int = 40
    experts: int = 8
    top_k: int = 2
    shared: int = 0
    scaled: bool = False
    biases: bool = False
    dtype: str = "float32"
    kind: int = 0
    alpha: float = 1.0
    limit: float = float("inf")
    up_offset: float = 0.0
    seed: int = 0

    def arrays(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(self.seed)
        t, h, i, e, k, s = (
            *(self.tokens, self.hidden, self.inner),
            *(self.experts, self.top_k, self.shared),
        )

        def normal(*shape):
            value = rng.standard_normal(shape).astype(np.float32) / np.sqrt(shape[-2])
            return np.asarray(jnp.asarray(value, self.dtype))

        ids = np.argsort(rng.random((t, e)), axis=1)[:, :k].astype(np.int32)
        ids[rng.random((t, k)) < 0.1] = -1
        none = np.zeros(0, self.dtype)
        has = (lambda *shape: normal(*shape)) if self.biases else (lambda *shape: none)
        with_shared = (lambda *shape: normal(*shape)) if s else (lambda *shape: none)
        return {
            "x": np.asarray(jnp.asarray(rng.standard_normal((t, h)), self.dtype)),
            "ids": ids,
            "weights": rng.random((t, k)).astype(np.float32),
            "w_gate": normal(e, h, i),
            "w_up": normal(e, h, i),
            "w_down": normal(e, i, h),
            "b_gate": has(e, i),
            "b_up": has(e, i),
            "b_down": has(e, h),
            "s_gate": with_shared(h, s),
            "s_up": with_shared(h, s),
            "s_down": with_shared(s, h),
            "s_scale": rng.random(t if self.scaled else 0).astype(np.float32),
            "dy": np.asarray(jnp.asarray(rng.standard_normal((t, h)), self.dtype)),
        }

    def attributes(self, ranks: int, **changes) -> dict[str, np.generic]:
        integers = {
            "num_ranks": ranks,
            "world": ranks,
            "num_experts": self.experts,
            "macrobatch_rows": 0,
            "minibatch_rows": 0,
            "save": 0,
            "activation": self.kind,
        }
        integers |= changes
        return {n: np.int64(v) for n, v in integers.items()} | {
            "alpha": np.float32(self.alpha),
            "limit": np.float32(self.limit),
            "up_offset": np.float32(self.up_offset),
        }


def call(target, shapes_and_dtypes, operands, attributes):
    """The custom call; what is absent is an empty array here and a scalar there."""
    results = [
        ffi.result_like(() if s == (0,) else s, d, operands[1]) for s, d in shapes_and_dtypes
    ]
    operands = [ffi.absent(a.dtype) if a.shape == (0,) else a for a in operands]
    out = jax.ffi.ffi_call(target, results)(*operands, **attributes)
    return [jnp.zeros(0, a.dtype) if s == (0,) else a for a, (s, _) in zip(out, shapes_and_dtypes)]


def topology():
    rank = jax.lax.axis_index("e").astype(jnp.int32)
    return jnp.stack([rank, 0 * rank, rank, 0 * rank])


def forward_local(inputs, attributes, saved_rows=0):
    x, inner = inputs["x"], inputs["w_gate"].shape[-1]
    saved = (saved_rows, 2 * inner) if saved_rows else (0,)
    operands = (topology(), *(inputs[n] for n in NAMES))
    attributes = attributes | {"save": np.int64(saved_rows > 0)}
    results = [(x.shape, x.dtype), (saved, jnp.float32)]
    return call(ffi.FORWARD, results, operands, attributes)


def backward_local(inputs, saved, attributes, dw_dtype=None):
    operands = (topology(), inputs["dy"], *(inputs[n] for n in NAMES), saved)
    results = [
        (inputs[n].shape, dw_dtype if dw_dtype and n.startswith("w_") else inputs[n].dtype)
        for n in GRADIENTS
    ]
    return call(ffi.BACKWARD, results, operands, attributes)


def mesh_of(*sizes: int):
    devices = np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes)
    return jax.sharding.Mesh(devices, ("d", "e")[-len(sizes) :])


def sharded(local, ranks, arrays, out_specs):
    """jit(shard_map(local)) of a dict of global arrays; local gets the ranks' own.

    Absent operands are made inside: a shard_map with an empty input among others crashes the
    compiler of jaxlib 0.11.2 (in Shardy's clean-up of unused inputs).
    """
    absent = {n: a.dtype for n, a in arrays.items() if a.shape == (0,)}
    specs = {n: P() if n in SHARED else P("e") for n in arrays if n not in absent}

    def body(inputs):
        replicated = {n: jax.lax.pcast(inputs[n], "e", to="varying") for n in SHARED if n in inputs}
        return local(inputs | replicated | {n: jnp.zeros(0, t) for n, t in absent.items()})

    mapped = jax.shard_map(body, mesh=mesh_of(ranks), in_specs=(specs,), out_specs=out_specs)
    jitted = jax.jit(mapped)
    return lambda arrays: jitted({n: arrays[n] for n in specs})


def run(layer, ranks=1, *, saved_rows=0, dw_dtype=None, arrays=None, **settings):
    """y and the gradients by name; those of the shared expert are summed over the ranks."""
    arrays = arrays or layer.arrays()
    attributes = layer.attributes(ranks, **settings)

    def local(inputs):
        y, saved = forward_local(inputs, attributes, saved_rows)
        again = attributes | {"save": np.int64(saved_rows > 0)}
        grads = backward_local(inputs, saved, again, dw_dtype)
        stacked = {n: g[None] for n, g in zip(GRADIENTS, grads)}
        return y, stacked

    y, grads = sharded(local, ranks, arrays, (P("e"), P("e")))(arrays)
    out = {"y": np.asarray(y)}
    for name, grad in grads.items():
        grad = np.asarray(grad)
        if name in SHARED:
            out[name] = grad.astype(np.float32).sum(0)
        else:
            out[name] = grad.reshape(-1, *grad.shape[2:])
    return out


def sigmoid(z):
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-z))


def ffn(layer, x, wg, wu, wd, bg, bu, bd, dy, weight):
    """One network on some rows in float64: y without the row weights, gradients with them."""
    g, u = x @ wg + bg, x @ wu + bu
    gc, uc = np.minimum(g, layer.limit), np.clip(u, -layer.limit, layer.limit)
    if layer.kind == 0:
        s = sigmoid(layer.alpha * gc)
        act, slope = gc * s, s + layer.alpha * gc * s * (1 - s)
    elif layer.kind == 1:
        c = np.sqrt(2 / np.pi)
        t = np.tanh(c * (gc + 0.044715 * gc**3))
        act = 0.5 * gc * (1 + t)
        slope = 0.5 * (1 + t) + 0.5 * gc * (1 - t**2) * c * (1 + 3 * 0.044715 * gc**2)
    else:
        act, slope = np.maximum(gc, 0), (gc > 0) * 1.0
    h = act * (uc + layer.up_offset)
    y = h @ wd + bd
    dwy = weight[:, None] * dy
    dh = dwy @ wd.T
    dg = dh * (uc + layer.up_offset) * slope * (g <= layer.limit)
    du = dh * act * (np.abs(u) <= layer.limit)
    grads = dict(
        x=dg @ wg.T + du @ wu.T,
        weight=(y * dy).sum(1),
        w_gate=x.T @ dg,
        w_up=x.T @ du,
        w_down=h.T @ dwy,
        b_gate=dg.sum(0),
        b_up=du.sum(0),
        b_down=dwy.sum(0),
    )
    return y, grads


def reference(layer, arrays=None):
    a = {n: v.astype(np.float64) for n, v in (arrays or layer.arrays()).items()}
    ids = a["ids"].astype(int)
    y = np.zeros_like(a["x"])
    out = {n: np.zeros_like(a[n]) for n in GRADIENTS}
    zero = np.zeros(1)
    for e in range(layer.experts):
        token, slot = np.nonzero(ids == e)
        bias = [a[n][e] if layer.biases else zero for n in ("b_gate", "b_up", "b_down")]
        w = a["weights"][token, slot]
        mats = (a[n][e] for n in ("w_gate", "w_up", "w_down"))
        ye, g = ffn(layer, a["x"][token], *mats, *bias, a["dy"][token], w)
        np.add.at(y, token, w[:, None] * ye)
        np.add.at(out["x"], token, g["x"])
        out["weights"][token, slot] = g["weight"]
        for n in (
            "w_gate",
            "w_up",
            "w_down",
            *(("b_gate", "b_up", "b_down") if layer.biases else ()),
        ):
            out[n][e] = g[n]
    if layer.shared:
        w = a["s_scale"] if layer.scaled else np.ones(layer.tokens)
        ys, g = ffn(
            layer, a["x"], a["s_gate"], a["s_up"], a["s_down"], zero, zero, zero, a["dy"], w
        )
        y += w[:, None] * ys
        out["x"] += g["x"]
        for n in SHARED:
            out[n] = g["w" + n[1:]]
        if layer.scaled:
            out["s_scale"] = g["weight"]
    return {"y": y} | out


def assert_close(got, want, tolerance):
    """Relative L2 of every array; of experts one by one, so that none hides behind another."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        pairs = [(got[name], value)]
        if name.startswith(("w_", "b_")) and name in GRADIENTS and value.size:
            pairs = list(zip(got[name], value))
        for g, w in pairs:
            error = np.linalg.norm(g.astype(np.float64) - w)
            assert error <= tolerance * np.linalg.norm(w), (name, error, np.linalg.norm(w))


def assert_same_bits(got, want, names=None):
    for name in names or want:
        np.testing.assert_array_equal(
            got[name].view(np.uint8), want[name].view(np.uint8), err_msg=name
        )
