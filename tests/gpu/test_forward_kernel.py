"""The forward kernel by itself: right against float32, and the same bits under every setting."""

import dataclasses

import kernel_library as kl
import pytest
from kernel_cases import (
    ACTIVATIONS,
    ROUTINGS,
    SHAPES,
    P,
    make_inputs,
    reference,
    relative_l2,
)

REASON = kl.missing()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]
TOLERANCE = 6e-3  # relative L2 of bf16 results against float32


@pytest.fixture(scope="module")
def kernels():
    return kl.load()


def check(kernels, problem, **routing):
    inputs = make_inputs(kernels.torch, problem, **routing)
    got = kl.Call(kernels, problem, inputs).run()
    error = relative_l2(got, reference(kernels.torch, problem, inputs))
    assert error < TOLERANCE, error


@pytest.mark.parametrize("name", SHAPES)
def test_shape(kernels, name):
    check(kernels, SHAPES[name])


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("ranks", [1, 4])
def test_routing(kernels, routing, ranks):
    check(kernels, P(400, 512, 256, 32, 4, ranks=ranks), routing=routing)


@pytest.mark.parametrize("unused", [0.3, 1.0])
@pytest.mark.parametrize("ranks", [1, 4])
def test_unused_slots(kernels, unused, ranks):
    check(kernels, P(200, 256, 128, 16, 4, ranks=ranks), unused=unused)


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize(
    "activation",
    ACTIVATIONS,
    ids=str,
)
def test_activation(kernels, activation, biases):
    check(kernels, P(300, 320, 192, 8, 2, biases=biases, **activation))


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("shared", [64, 448, 1024])
def test_shared_experts(kernels, shared, ranks, gate):
    check(kernels, P(333, 512, 256, 16, 4, ranks=ranks, shared=shared, shared_gate=gate))


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("ring", [0, 128])
@pytest.mark.parametrize("ranks", [1, 4, 8])
def test_plan(kernels, ranks, ring, routing):
    """The device's plan is csrc/plan's, row for row; a token crosses to a rank once."""
    problem = P(301, 128, 64, 32, 5, ranks=ranks)
    inputs = make_inputs(kernels.torch, problem, routing=routing, unused=0.1)
    settings = kl.Settings(ring=ring, minibatch=ring)
    call = kl.Call(kernels, problem, inputs, settings)
    call.run()
    wrong, shared_rows = call.plan_mismatches()
    assert wrong == 0
    if ranks > 1 and ring == 0 and routing == "uniform":
        assert shared_rows > 0
    if ring == 128:
        assert shared_rows == 0


@pytest.mark.parametrize("ranks", [1, 4])
def test_same_bits(kernels, ranks):
    """Across runs, settings and numbers of ranks, with residuals kept or not; all memory poisoned
    in between.
    """
    torch = kernels.torch
    problem = P(2048 // ranks, 1024, 384, 32, 8, ranks=ranks, shared=256)
    inputs = make_inputs(torch, problem, routing="zipf")
    call = kl.Call(kernels, problem, inputs)
    first = call.run()
    assert relative_l2(first, reference(torch, problem, inputs)) < TOLERANCE
    for _ in range(3):
        assert torch.equal(call.run(), first)
    for name, settings in kl.SAME_BITS.items():
        for save in (False, True):
            changed = dataclasses.replace(settings, save=save)
            assert torch.equal(kl.Call(kernels, problem, inputs, changed).run(), first), name
    for other in (1, 2, 4, 8):
        same = dataclasses.replace(problem, ranks=other, tokens=2048 // other)
        assert torch.equal(kl.Call(kernels, same, inputs).run(), first), other


def test_changing_routing_in_one_workspace(kernels):
    torch = kernels.torch
    problem = P(200, 256, 128, 16, 4, ranks=4)
    inputs = make_inputs(torch, problem)
    call = kl.Call(kernels, problem, inputs, kl.Settings(minibatch=256, macrobatch=512))
    for seed, routing in enumerate(ROUTINGS * 2):
        changed = make_inputs(torch, problem, routing=routing, seed=seed, unused=0.1)
        for name, tensor in inputs.items():
            tensor.copy_(changed[name])
        assert relative_l2(call.run(), reference(torch, problem, inputs)) < TOLERANCE


@pytest.mark.parametrize("ranks", [4, 8])
def test_jitter(kernels, ranks):
    """1,000 calls with random delays in all roles of all ranks."""
    torch = kernels.torch
    problem = P(128, 256, 128, 16, 4, ranks=ranks)
    inputs = make_inputs(torch, problem)
    settings = kl.Settings(minibatch=128, macrobatch=512, ring=128)
    call = kl.Call(kernels, problem, inputs, settings)
    want = call.run()
    wrong = 0
    for seed in range(1, 1001):
        call.poison()  # a row of the call before would be right
        call.launch(jitter_seed=seed)
        wrong += (call.y != want).sum()
    kernels.synchronize()
    assert not call.faults()
    assert int(wrong) == 0


def test_nan_stays_in_its_token(kernels):
    torch = kernels.torch
    problem = P(300, 256, 128, 8, 2)
    inputs = make_inputs(torch, problem)
    inputs["x"][17, 3] = float("nan")
    y = kl.Call(kernels, problem, inputs).run()
    bad = y.isnan().any(1)
    assert bad[17] and int(bad.sum()) == 1


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("fault", ["high", "negative", "repeated"])
def test_bad_ids(kernels, fault, ranks):
    """Reported by every rank alike, NaN everywhere, and the next call works."""
    torch = kernels.torch
    problem = P(100, 256, 128, 16, 4, ranks=ranks)
    inputs = make_inputs(torch, problem)
    call = kl.Call(kernels, problem, inputs)
    good = call.run()
    kl.check_bad_id(call, fault)
    assert torch.equal(call.run(), good)


@pytest.mark.parametrize("absent", [0, 2])
def test_absent_rank(kernels, absent):
    """A rank that never comes: every rank leaves in time and says who was missing."""
    torch = kernels.torch
    problem = P(100, 256, 128, 16, 4, ranks=4)
    inputs = make_inputs(torch, problem)
    call = kl.Call(kernels, problem, inputs, kl.Settings(start_timeout=0.05, timeout=0.05))
    good = call.run()
    kl.check_absent_rank(call, absent)
    assert torch.equal(call.run(), good)


@pytest.mark.parametrize("phase", ["gate_up", "down"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_stuck(kernels, ranks, phase):
    torch = kernels.torch
    problem = P(1000, 1024, 256, 16, 4, ranks=ranks, shared=128)
    call = kl.Call(kernels, problem, make_inputs(torch, problem), kl.Settings(timeout=0.05))
    good = call.run()
    kl.check_stuck(call, phase)
    assert torch.equal(call.run(), good)


def test_given_up_anywhere(kernels):
    torch = kernels.torch
    problem = P(4000, 1024, 512, 32, 4, shared=256)
    call = kl.Call(kernels, problem, make_inputs(torch, problem))
    good = call.run()
    kl.check_given_up_anywhere(call, lambda: assert_y(call, good))
    assert torch.equal(call.run(), good)


def assert_y(call, good):
    assert call.kernels.torch.equal(call.outputs["y"], good)


@pytest.mark.parametrize(
    "problem, field",
    [
        (P(8, 100, 64, 4, 2), "hidden"),
        (P(8, 64, 96, 4, 2), "intermediate"),
        (P(8, 64, 64, 4, 33), "top_k"),
        (P(8, 64, 64, 6, 2, ranks=4), "num_experts"),
        (P(8, 64, 64, 4, 2, shared=32), "shared_intermediate"),
    ],
)
def test_refused(kernels, problem, field):
    assert kernels.check(problem).startswith(field)


def test_no_tokens(kernels):
    problem = P(0, 64, 64, 4, 2, ranks=2)
    inputs = make_inputs(kernels.torch, problem)
    assert kl.Call(kernels, problem, inputs).run().shape == (0, 64)
