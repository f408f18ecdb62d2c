"""The CPU engine behind the custom calls, driven below `jax_mok.moe`: values and gradients against
float64 NumPy, bit equality over everything that must not matter, poison."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from engine import (
    GRADIENTS,
    PER_TOKEN,
    SHARED,
    Layer,
    assert_close,
    assert_same_bits,
    backward_local,
    forward_local,
    reference,
    registered,  # noqa: F401
    run,
    sharded,
)
from jax.sharding import PartitionSpec as P

from jax_mok import _core

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
