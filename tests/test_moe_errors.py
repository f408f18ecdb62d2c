"""Bad input: an error that names the argument, the value and what is allowed; never a hang."""

import re

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_mok
from jax_mok import Config, SharedExpert, Swiglu, _cuda


def arguments(**changes):
    case = cases.make(tokens=(16,), hidden=8, intermediate=12)
    args = {
        "x": case.x,
        "expert_ids": case.ids,
        "expert_weights": case.weights,
        "w_gate": case.w_gate,
        "w_up": case.w_up,
        "w_down": case.w_down,
    }
    return args | changes


z = jnp.zeros
shared = lambda a=(8, 4), b=(8, 4), c=(4, 8), gate=None, dtype=jnp.float32: SharedExpert(
    z(a, dtype), z(b, dtype), z(c, dtype), gate
)

STATIC = {
    # name: (changed arguments, exception, words that the message must hold)
    "x int": (dict(x=z((16, 8), jnp.int32)), TypeError, ["x must be", "int32"]),
    "x float16": (dict(x=z((16, 8), jnp.float16)), TypeError, ["x must be", "float16"]),
    "x scalar": (dict(x=z(())), ValueError, ["x must have shape", "()"]),
    "x not an array": (dict(x="tokens"), TypeError, ["x must be", "str"]),
    "ids float": (dict(expert_ids=z((16, 3))), TypeError, ["expert_ids", "int32", "float32"]),
    "ids rank": (dict(expert_ids=z((16,), jnp.int32)), ValueError, ["expert_ids", "(16,)"]),
    "ids tokens": (dict(expert_ids=z((15, 3), jnp.int32)), ValueError, ["expert_ids", "(15, 3)"]),
    "weights dtype": (
        dict(expert_weights=z((16, 3), jnp.bfloat16)), TypeError, ["expert_weights", "bfloat16"]),
    "weights shape": (dict(expert_weights=z((16, 2))), ValueError, ["expert_weights", "(16, 2)"]),
    "w_gate rank": (dict(w_gate=z((8, 8))), ValueError, ["w_gate", "[E, H, I]", "(8, 8)"]),
    "w_gate hidden": (dict(w_gate=z((8, 9, 12))), ValueError, ["w_gate", "H = 8", "(8, 9, 12)"]),
    "w_up": (dict(w_up=z((8, 8, 13))), ValueError, ["w_up", "(8, 8, 12)", "(8, 8, 13)"]),
    "w_down": (dict(w_down=z((8, 8, 12))), ValueError, ["w_down", "(8, 12, 8)"]),
    "w dtype": (dict(w_up=z((8, 8, 12), jnp.bfloat16)), TypeError, ["w_up", "bfloat16"]),
    "no experts": (
        dict(w_gate=z((0, 8, 12)), w_up=z((0, 8, 12)), w_down=z((0, 12, 8))),
        ValueError, ["at least 1"]),
    "top_k > E": (
        dict(expert_ids=z((16, 9), jnp.int32), expert_weights=z((16, 9))),
        ValueError, ["top_k = 9", "[1, 8]"]),
    "top_k 0": (
        dict(expert_ids=z((16, 0), jnp.int32), expert_weights=z((16, 0))),
        ValueError, ["top_k = 0"]),
    "biases count": (dict(biases=(z((8, 12)),)), ValueError, ["biases", "length 1"]),
    "biases array": (dict(biases=z((3, 8, 12))), ValueError, ["biases"]),
    "bias shape": (
        dict(biases=(z((8, 12)), z((8, 12)), z((8, 12)))), ValueError, ["biases[2]", "(8, 8)"]),
    "bias dtype": (
        dict(biases=(z((8, 12), jnp.bfloat16), z((8, 12)), z((8, 8)))), TypeError, ["biases[0]"]),
    "shared type": (dict(shared=(z((8, 4)),) * 3), TypeError, ["shared", "SharedExpert", "tuple"]),
    "shared shape": (dict(shared=shared(c=(5, 8))), ValueError, ["shared.w_down", "(4, 8)"]),
    "shared rank": (dict(shared=shared(a=(8,))), ValueError, ["shared.w_gate", "(8,)"]),
    "shared empty": (
        dict(shared=shared((8, 0), (8, 0), (0, 8))), ValueError, ["shared=None"]),
    "shared dtype": (dict(shared=shared(dtype=jnp.bfloat16)), TypeError, ["shared.w_gate"]),
    "shared gate": (dict(shared=shared(gate=z((15,)))), ValueError, ["shared.gate", "(16,)"]),
    "activation": (dict(activation="gelu"), ValueError, ["activation", "'gelu'", "swiglu"]),
    "implementation": (dict(implementation="cuda"), ValueError, ["implementation", "'cuda'"]),
    "config": (dict(config={"timeout_seconds": 1}), TypeError, ["config", "dict"]),
    "weight grads": (
        dict(
            x=z((16, 8), jnp.bfloat16), w_gate=z((8, 8, 12), jnp.bfloat16),
            w_up=z((8, 8, 12), jnp.bfloat16), w_down=z((8, 12, 8), jnp.bfloat16),
            config=Config(weight_grad_dtype=jnp.float32)),
        ValueError, ["weight_grad_dtype", "bfloat16"]),
}  # fmt: skip


@pytest.mark.parametrize("name", STATIC)
def test_static(name):
    changes, exception, words = STATIC[name]
    for run in (jax_mok.moe, jax.jit(jax_mok.moe, static_argnames=())):
        if run is not jax_mok.moe and not all(
            isinstance(v, jax.Array | tuple | SharedExpert) for v in changes.values()
        ):
            continue
        with pytest.raises(exception) as error:
            run(**arguments(**changes))
        for word in words:
            assert word in str(error.value), str(error.value)


@pytest.mark.parametrize("value", [2**32 + 3, -(2**32), 2**31])
@pytest.mark.parametrize("kind", [np.asarray, np.ndarray.tolist])
def test_ids_that_int32_cannot_hold(value, kind):
    """From NumPy, where int64 is the default: JAX would wrap them to ids that look right."""
    ids = np.array(arguments()["expert_ids"], np.int64)
    jax_mok.moe(**arguments(expert_ids=kind(ids)))
    ids[5, 1] = value
    with pytest.raises(ValueError, match=f"expert_ids must fit in int32, got {value}"):
        jax_mok.moe(**arguments(expert_ids=kind(ids)))


MESH_ERRORS = {
    "missing axis": (((8,), ("data",)), {}, ["expert_axis 'expert'", "'data': 8"]),
    "experts not divisible": (((3,), ("expert",)), {}, ["E = 8", "3 ranks"]),
    "tokens not divisible": (((8,), ("expert",)), dict(tokens=(12,)), ["12 tokens", "8 devices"]),
    "unknown token axis": (((8,), ("expert",)), dict(token_axes="rows"), ["token_axes", "rows"]),
    "token axes without expert": (
        ((2, 4), ("data", "expert")), dict(token_axes="data"), ["token_axes", "expert_axis"]),
    "axis not a name": (((8,), ("expert",)), dict(expert_axis=3), ["expert_axis"]),
    "axis twice": (((8,), ("expert",)), dict(expert_axis=("expert", "expert")), ["expert_axis"]),
}  # fmt: skip


@pytest.mark.parametrize("name", MESH_ERRORS)
def test_mesh(name, implementation):
    mesh, options, words = MESH_ERRORS[name]
    options = dict(options)
    case = cases.make(tokens=options.pop("tokens", (24,)))
    with pytest.raises((ValueError, TypeError)) as error:
        jax.jit(
            lambda a: case.call(a, mesh=cases.mesh(*mesh), implementation=implementation, **options)
        )(case.args)
    for word in words:
        assert word in str(error.value), str(error.value)


def test_token_axes_inside_shard_map():
    case = cases.make(tokens=(16,))
    spec = jax.sharding.PartitionSpec("expert")
    run = jax.shard_map(
        lambda x, i, w, *e: jax_mok.moe(x, i, w, *e, token_axes="expert"),
        mesh=cases.mesh((8,), ("expert",)),
        in_specs=spec,
        out_specs=spec,
    )
    with pytest.raises(ValueError, match="token_axes"):
        run(case.x, case.ids, case.weights, case.w_gate, case.w_up, case.w_down)


BAD_IDS = {
    "too large": ([0, 8, 1], ["is 8", "allowed are 0 to"]),
    "far too large": ([0, 2**31 - 1, 1], ["is 2147483647", "allowed are"]),
    "below -1": ([0, -2, 1], ["is -2", "allowed are"]),
    "smallest": ([-(2**31), 0, 1], ["is -2147483648", "allowed are"]),
    "repeated": ([5, 1, 5], ["is 5", "earlier slot"]),
}


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("name", BAD_IDS)
def test_ids_at_run_time(name, ranks, implementation):
    """One token of one rank: the whole program fails, on all ranks, and the next one works."""
    row, words = BAD_IDS[name]
    case = cases.make(tokens=(16,))
    mesh = cases.mesh((ranks,), ("expert",))

    @jax.jit
    def run(args, ids):
        y = case.call(args, ids=ids, mesh=mesh, implementation=implementation)
        return y, jnp.sum(y)  # the sum makes the ranks meet again after the call

    bad = case.ids.at[11].set(jnp.array(row, jnp.int32))
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        jax.block_until_ready(run(case.args, bad))
    for word in ["expert_ids", *words]:
        assert word in str(error.value), str(error.value)
    y, _ = run(case.args, case.ids)
    cases.assert_close(y, case.reference()[0], 2e-6)


@pytest.mark.parametrize("row, code", [([0, 8, 1], 3), ([5, 1, 5], 4)])
def test_every_implementation_has_the_same_words_for_a_bad_id(row, code):
    """Up to what it cannot know: the rank, the number of experts."""
    case = cases.make(tokens=(16,))
    ids = case.ids.at[11].set(jnp.array(row, jnp.int32))
    slot = 1 if code == 3 else 2
    messages = []
    for implementation in ("fused", "xla"):
        with pytest.raises(jax.errors.JaxRuntimeError, match="expert_ids") as error:
            jax.block_until_ready(case.call(case.args, ids=ids, implementation=implementation))
        messages.append(str(error.value))
    with pytest.raises(ValueError, match="expert_ids") as error:
        jax_mok.ops.schedule(ids, num_experts=8)
    messages.append(str(error.value))
    # What a kernel reports: code of the fault, then rank, token, slot and id in these fields.
    fault = dict(code=code, rank=0, phase=0, call=1, tile=0, counter=11, target=slot)
    messages.append(_cuda._describe(fault | dict(value=row[slot])))
    words = set()
    for message in messages:
        line = message[message.index("expert_ids[") :].splitlines()[0]
        line = re.sub(r"of (rank 0|one rank) is", "of RANK is", line)
        words.add(re.sub(r"0 to (7|the number of experts - 1),", "0 to LAST,", line))
    (only,) = words
    assert only.startswith(f"expert_ids[11, {slot}] of RANK is {row[slot]}")
    assert ("0 to LAST" in only) == (code == 3)


@pytest.mark.parametrize("implementation", ["fused", "xla"])
def test_bad_ids_in_one_data_group_fail_the_others_too(implementation):
    """Else the others would wait in the next sum over the data axis until XLA ends the process."""
    case = cases.make(tokens=(16,))
    mesh = cases.mesh((2, 4), ("data", "expert"))
    bad = case.ids.at[15, 0].set(99)
    run = jax.jit(
        lambda a, i: jnp.sum(case.call(a, ids=i, mesh=mesh, implementation=implementation))
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match="expert_ids"):
        jax.block_until_ready(run(case.args, bad))
    assert np.isfinite(run(case.args, case.ids))


CONFIG = {
    "negative": (dict(fwd_num_comm_sms=-1), ["fwd_num_comm_sms", "-1"]),
    "zero ring": (dict(macrobatch_size=0), ["macrobatch_size", "0"]),
    "huge ring": (dict(macrobatch_size=2**31), ["macrobatch_size", "2147483648"]),
    "float": (dict(minibatch_size=2.5), ["minibatch_size", "2.5"]),
    "bool": (dict(bwd_num_comm_sms=True), ["bwd_num_comm_sms", "True"]),
    "residuals": (dict(residuals="all"), ["residuals", "'all'", "recompute"]),
    "timeout": (dict(timeout_seconds=0), ["timeout_seconds", "0"]),
    "grad dtype": (dict(weight_grad_dtype=jnp.int8), ["weight_grad_dtype", "int8"]),
    "grad dtype's name": (dict(weight_grad_dtype="f33"), ["weight_grad_dtype", "'f33'"]),
    "timeout bool": (dict(timeout_seconds=True), ["timeout_seconds", "True"]),
    "precision": (dict(precision="mxfp8"), ["precision", "mxfp8"]),
}


@pytest.mark.parametrize("name", CONFIG)
def test_config(name):
    fields, words = CONFIG[name]
    with pytest.raises((ValueError, TypeError)) as error:
        Config(**fields)
    for word in words:
        assert word in str(error.value), str(error.value)


@pytest.mark.parametrize("fields", [dict(alpha="x"), dict(limit=-1.0), dict(up_offset=np.inf)])
def test_swiglu(fields):
    with pytest.raises(ValueError, match=f"Swiglu.{next(iter(fields))}"):
        Swiglu(**fields)


def test_numbers_of_numpy():
    case = cases.make(tokens=(8,))
    case.activation = Swiglu(np.float32(1.5), np.float64(7), np.float32(1))
    config = Config(timeout_seconds=np.float32(3), macrobatch_size=np.int64(64))
    y = case.call(case.args, config=config, implementation="fused")
    cases.assert_close(y, case.reference()[0], 2e-6)


def test_number_of_threads():
    for bad in (-1, 1.5, True):
        with pytest.raises(ValueError, match="num_threads"):
            jax_mok.set_num_threads(bad)
    jax_mok.set_num_threads(2**40)  # as many as the engine ever takes
    jax_mok.set_num_threads(0)
