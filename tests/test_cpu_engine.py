"""The CPU engine behind the custom calls, driven below `jax_mok.moe`: values and gradients against
float64 NumPy, bit equality over everything that must not matter, meetings, errors, poison."""

import dataclasses
import os
import subprocess
import sys
import textwrap
import threading

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


def fitting(rows: int) -> int:
    return -(-rows // 64) * 64


LAYERS = {
    "plain": Layer(),
    "everything": Layer(biases=True, shared=16, scaled=True),
    "shared": Layer(shared=48),
    "bf16": Layer(dtype="bfloat16", biases=True, shared=40, scaled=True),
    "gpt-oss": Layer(biases=True, alpha=1.702, limit=0.7, up_offset=1.0),
    "geglu": Layer(kind=1),
    "reglu": Layer(kind=2, limit=0.5),
    "top-1": Layer(top_k=1),
    "top-all": Layer(top_k=8, tokens=16),
    "tiny": Layer(hidden=1, inner=1, experts=8, tokens=8),
    "odd": Layer(hidden=33, inner=71, tokens=40, biases=True),
}


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("name", LAYERS)
def test_values_and_gradients(name, ranks):
    layer = LAYERS[name]
    tolerance = 1e-2 if layer.dtype == "bfloat16" else 3e-6
    assert_close(run(layer, ranks), reference(layer), tolerance)


@pytest.mark.parametrize("name", ["everything", "bf16"])
def test_bits_do_not_depend_on_how_it_is_run(name):
    layer = dataclasses.replace(LAYERS[name], tokens=192, experts=8, top_k=3, hidden=72, inner=104)
    want = run(layer)
    _core.set_num_threads(1)
    assert_same_bits(run(layer), want)
    _core.set_num_threads(5)
    assert_same_bits(run(layer), want)
    for macrobatch, minibatch, saved in [(64, 64, 0), (64, 64, 64), (128, 64, 128), (640, 0, 640)]:
        got = run(layer, macrobatch_rows=macrobatch, minibatch_rows=minibatch, saved_rows=saved)
        assert_same_bits(got, want)
    # Over ranks the shared expert's gradients are sums of the ranks' own.
    per_rank = [n for n in want if n not in SHARED]
    for ranks in (2, 8):
        assert_same_bits(run(layer, ranks), want, per_rank)
        got = run(layer, ranks, macrobatch_rows=64, minibatch_rows=64, saved_rows=64)
        assert_same_bits(got, want, per_rank)


@pytest.mark.parametrize("hidden,inner", [(2880, 24), (8, 1408), (24, 96), (96, 8)])
def test_bits_of_a_row_do_not_depend_on_its_company(hidden, inner):
    layer = Layer(hidden=hidden, inner=inner, experts=2, tokens=37, top_k=1)
    arrays = layer.arrays()
    arrays["ids"][:] = 0
    whole = run(layer, arrays=arrays)
    for token in (*range(16), 32, 36):
        one = {
            n: a[token : token + 1] if n in PER_TOKEN and a.size else a for n, a in arrays.items()
        }
        alone = run(dataclasses.replace(layer, tokens=1), arrays=one)
        for name in ("y", "x", "weights"):
            np.testing.assert_array_equal(alone[name][0], whole[name][token])


def test_float32_gradients_of_bfloat16_weights():
    layer = Layer(dtype="bfloat16", tokens=128)
    rounded = run(layer, macrobatch_rows=64)
    full = run(layer, macrobatch_rows=64, dw_dtype=jnp.float32)
    for name in ("w_gate", "w_up", "w_down"):
        assert full[name].dtype == np.float32
        np.testing.assert_array_equal(full[name].astype(rounded[name].dtype), rounded[name])


def test_no_tokens():
    layer = Layer(shared=16, scaled=True, biases=True)
    attributes = layer.attributes(2)

    def local(inputs):
        # Cut inside: empty inputs of a shard_map crash jaxlib 0.11.2's compiler.
        inputs |= {n: inputs[n][:0] for n in PER_TOKEN}
        y, saved = forward_local(inputs, attributes)
        grads = dict(zip(GRADIENTS, backward_local(inputs, saved, attributes)))
        return y.sum()[None], {n: grads[n][None] for n in grads if grads[n].size}

    arrays = layer.arrays()
    _, grads = sharded(local, 2, arrays, (P("e"), P("e")))(arrays)
    assert {"w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down", *SHARED} == set(grads)
    for name, grad in grads.items():
        assert not np.asarray(grad).any(), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_without_rows_get_zero_gradients(dtype):
    """First with every expert busy, so that the memory that comes back is not zero by luck."""
    layer = Layer(tokens=64, dtype=dtype, biases=True)
    run(layer, 4)
    arrays = layer.arrays()
    arrays["ids"] = np.full_like(arrays["ids"], -1)
    arrays["ids"][:, 0] = 3
    out = run(layer, 4, arrays=arrays)
    others = [e for e in range(layer.experts) if e != 3]
    for name in ("w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down"):
        assert not out[name][others].any(), name
        assert out[name][3].any(), name
    assert_close(out, reference(layer, arrays), 1e-2 if dtype == "bfloat16" else 3e-6)


def test_unused_slots():
    layer = Layer()
    arrays = layer.arrays()
    arrays["ids"][:] = -1
    out = run(layer, 4, arrays=arrays)
    for name, value in out.items():
        assert not value.any(), name


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_nan_stays_with_its_token(ranks):
    layer = Layer(tokens=32, shared=16, biases=True)
    arrays = layer.arrays()
    clean = run(layer, ranks, arrays=arrays)
    arrays["x"] = arrays["x"].copy()
    arrays["x"][5] = np.nan
    dirty = run(layer, ranks, arrays=arrays)
    others = np.arange(layer.tokens) != 5
    for name in ("y", "x", "weights"):
        np.testing.assert_array_equal(dirty[name][others], clean[name][others], err_msg=name)
    assert np.isnan(dirty["y"][5]).all() and np.isnan(dirty["x"][5]).all()
    hit = set(arrays["ids"][5]) - {-1}
    for expert in range(layer.experts):
        assert np.isnan(dirty["w_gate"][expert]).any() == (expert in hit)


def test_saved_projections_are_fully_written():
    """Rows that no token fills are zero, not what the memory held."""
    layer = Layer(tokens=16)
    rows = 256

    def local(inputs):
        return forward_local(inputs, layer.attributes(4, macrobatch_rows=rows), rows)[1]

    arrays = layer.arrays()
    saved = np.asarray(sharded(local, 4, arrays, P("e"))(arrays)).reshape(4, rows, -1)
    for rank in range(4):
        used = np.abs(saved[rank]).sum(1) > 0
        mine = (arrays["ids"] >= 0) & (arrays["ids"] // 2 == rank)
        assert used.sum() == mine.sum()
    assert np.isfinite(saved).all()


# ---- meetings ----


def many_calls(layer, ranks, calls, with_psum):
    attributes = layer.attributes(ranks)

    def local(inputs):
        total = 0.0
        for i in range(calls):
            y = forward_local(inputs | {"x": inputs["x"] * (1.0 + i)}, attributes)[0]
            if with_psum:
                total += jax.lax.pcast(jax.lax.psum(y, "e"), "e", to="varying") * 0.5
            total += jnp.tanh(y)
        return total

    arrays = layer.arrays()
    return sharded(local, ranks, arrays, P("e")), arrays


@pytest.mark.parametrize("with_psum", [False, True])
def test_independent_calls_in_one_program(with_psum):
    """XLA runs them at once, in an order of its own for every device."""
    function, arrays = many_calls(Layer(tokens=256), 8, 6, with_psum)
    outputs = [function(arrays) for _ in range(4)]
    for output in outputs[1:]:
        np.testing.assert_array_equal(output, outputs[0])


def test_python_threads():
    functions = [many_calls(Layer(tokens=256, seed=s), 8, 2, True) for s in range(3)]
    want = [np.asarray(f(a)) for f, a in functions]
    failures = []

    def work(index):
        function, arrays = functions[index]
        for output in [function(arrays) for _ in range(5)]:
            if not np.array_equal(output, want[index]):
                failures.append(index)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_loop_and_call_counts():
    layer, ranks, steps = Layer(), 4, 3
    attributes = layer.attributes(ranks)

    def local(inputs):
        def step(x, _):
            return forward_local(inputs | {"x": x}, attributes)[0], None

        return jax.lax.scan(step, inputs["x"], None, length=steps)[0]

    arrays = layer.arrays()
    function = sharded(local, ranks, arrays, P("e"))
    jax.block_until_ready(function(arrays))
    before = _core.forward_calls(), _core.backward_calls()
    jax.block_until_ready(function(arrays))
    assert _core.forward_calls() - before[0] == steps * ranks
    assert _core.backward_calls() == before[1]


def test_groups_meet_apart():
    """Two groups of four ranks in one meeting: each sees its own tokens and weights only."""
    layer = Layer(tokens=32)
    first, second = layer.arrays(), dataclasses.replace(layer, seed=1).arrays()
    attributes = layer.attributes(4, world=8)
    mesh = mesh_of(2, 4)
    both = {n: np.concatenate([first[n], second[n]]) for n in first if first[n].size}
    specs = {n: P(("d", "e")) for n in both}

    def local(inputs):
        index = [jax.lax.axis_index(a).astype(jnp.int32) for a in ("e", "d", ("d", "e"))]
        inputs = {n: jnp.zeros(0) for n in NAMES} | inputs
        operands = (jnp.stack([*index, 0 * index[0]]), *(inputs[n] for n in NAMES))
        x = inputs["x"]
        return call(ffi.FORWARD, [(x.shape, x.dtype), ((0,), jnp.float32)], operands, attributes)[0]

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(specs,), out_specs=P(("d", "e")), check_vma=False
    )
    y = np.asarray(jax.jit(mapped)(both))
    np.testing.assert_array_equal(y[:32], run(layer, 4)["y"])
    np.testing.assert_array_equal(y[32:], run(dataclasses.replace(layer, seed=1), 4)["y"])


def in_subprocess(code, timeout=120, **environment):
    here = os.path.dirname(__file__)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([here, *sys.path])} | environment
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=env, capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_72_devices():
    code = """
        import numpy as np, test_cpu_engine as t
        t.ffi.register()
        layer = t.Layer(tokens=144, experts=144, top_k=4)
        t.assert_same_bits(t.run(layer, 72), t.run(layer, 1))
        function, arrays = t.many_calls(layer, 72, 4, True)
        np.testing.assert_array_equal(function(arrays), function(arrays))
    """
    in_subprocess(code, XLA_FLAGS="--xla_force_host_platform_device_count=72")


# ---- errors ----


@pytest.mark.parametrize(
    "wrong,text",
    [
        ((2, 1, 8), r"expert_ids\[2, 1\] of rank 1 is 8; allowed are 0 to 7"),
        ((0, 0, -2), r"expert_ids\[0, 0\] of rank 1 is -2"),
        ((3, 1, "first"), r"expert_ids\[3, 1\] of rank 1 is \d, which an earlier slot"),
    ],
)
def test_bad_ids_fail_on_every_device(wrong, text):
    layer = Layer(tokens=32)
    arrays = layer.arrays()
    arrays["ids"] = np.tile(np.array([[0, 5]], np.int32), (32, 1))
    function, _ = many_calls(layer, 4, 1, True)
    jax.block_until_ready(function(arrays))
    token, slot, value = wrong
    bad = arrays | {"ids": arrays["ids"].copy()}
    bad["ids"][8 + token, slot] = bad["ids"][8 + token, 0] if value == "first" else value
    with pytest.raises(Exception, match=text):
        jax.block_until_ready(function(bad))
    jax.block_until_ready(function(arrays))


@pytest.mark.parametrize(
    "changes,attributes,text",
    [
        (
            {"w_up": (8, 24, 41)},
            {},
            r"w_up is float32 \[8, 24, 41\], expected float32 \[8, 24, 40\]",
        ),
        ({"w_down": (8, 24, 40)}, {}, "w_down is float32"),
        ({"weights": (32, 3)}, {}, "expert_weights is float32"),
        ({"b_gate": (8, 40)}, {}, r"b_up is float32 \[\]"),
        ({"s_scale": (5,)}, {}, r"s_scale is float32 \[5\]"),
        ({}, {"num_experts": 12}, r"w_gate is float32 \[8, 24, 40\], expected float32 \[12"),
        ({}, {"macrobatch_rows": 65}, "macrobatch_rows is 65, allowed are multiples of 64"),
        ({}, {"minibatch_rows": -64}, "minibatch_rows is -64"),
        ({}, {"activation": 3}, "activation is 3, allowed are 0 to 2"),
        ({}, {"world": 0}, "world is 0"),
    ],
)
def test_wrong_arguments_are_named(changes, attributes, text):
    layer = Layer()
    arrays = layer.arrays() | {n: np.zeros(s, np.float32) for n, s in changes.items()}

    def local(inputs):
        return forward_local(inputs, layer.attributes(1, **attributes))[0]

    with pytest.raises(Exception, match=text):
        jax.block_until_ready(sharded(local, 1, arrays, P("e"))(arrays))


def test_check():
    check = jax.jit(
        lambda flag: jax.ffi.ffi_call(ffi.CHECK, jax.ShapeDtypeStruct((1,), jnp.int32))(flag)
    )
    assert check(jnp.zeros(4, jnp.int32))[0] == 0
    with pytest.raises(Exception, match=r"expert_ids\[3, 1\] of one rank is 17; allowed"):
        jax.block_until_ready(check(jnp.array([1, 3, 1, 17], jnp.int32)))
    with pytest.raises(Exception, match=r"expert_ids\[3, 1\] of one rank is 4, which an earlier"):
        jax.block_until_ready(check(jnp.array([2, 3, 1, 4], jnp.int32)))


def test_a_device_that_never_comes():
    """The others get an error that says so, within the time set, and the next call works."""
    code = """
        import jax, numpy as np, pytest, test_cpu_engine as t
        t.ffi.register()
        layer, ranks = t.Layer(), 4
        attributes = layer.attributes(ranks)

        def local(inputs):
            stays_away = (inputs["x"][0, 0] > 1e6) & (jax.lax.axis_index("e") == 2)
            come = lambda: t.forward_local(inputs, attributes)[0]
            return jax.lax.cond(stays_away, lambda: inputs["x"], come)

        arrays = layer.arrays()
        function = t.sharded(local, ranks, arrays, t.P("e"))
        want = np.asarray(function(arrays))
        late = arrays | {"x": np.full_like(arrays["x"], 1e9)}
        with pytest.raises(Exception, match=r"3 of 4 devices came to the call"):
            jax.block_until_ready(function(late))
        np.testing.assert_array_equal(function(arrays), want)
    """
    in_subprocess(code, JAX_MOK_TIMEOUT_SECONDS="0.5")
