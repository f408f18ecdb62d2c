"""The backward kernel by itself: every gradient against float32 autodiff, and the same bits under
every setting, with the forward's residuals or without.

All memory that a call may not rely on is NaN before each run (kernel_library), so every test is
also one of padding rows and of leftovers.
"""

import dataclasses
import random

import kernel_library as kl
import pytest
from kernel_cases import (
    ACTIVATIONS,
    ROUTINGS,
    SHAPES,
    P,
    make_inputs,
    reference_gradients,
    relative_l2,
    relative_l2_each,
)

REASON = kl.missing()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]
DEFAULTS = kl.Settings()
# Relative L2 of bf16 gradients against float32: per tensor, per expert, and of dx per token.
TOLERANCE = 1e-2
FLOAT32_TOLERANCE = 6e-3  # of weight gradients in float32: their operands are bf16
OF_EXPERTS = "dw_gate dw_up dw_down db_gate db_up db_down".split()
WEIGHT_GRADS = "dw_gate dw_up dw_down".split()
OF_TOKENS = "dx d_expert_weights ds_scale".split()  # do not depend on how tokens are spread


@pytest.fixture(scope="module")
def kernels():
    return kl.load()


def backward(kernels, problem, inputs, settings=DEFAULTS, save=False):
    """A BackwardCall; with `save` after the forward that it needs has run."""
    if not save:
        return kl.BackwardCall(kernels, problem, inputs, settings)
    forward = kl.Call(kernels, problem, inputs, dataclasses.replace(settings, save=True))
    forward.run()
    return kl.BackwardCall(kernels, problem, inputs, settings, saved=forward)


def dot_scale(problem, count):
    """About half of the norm that `count` row products of a hidden row have in these random layers.

    One product can be near zero by chance; its error is then large beside it, but not beside this.
    """
    return 0.3 * (problem.hidden * count) ** 0.5


def check(torch, problem, inputs, got, float32=False):
    """All gradients against `reference_gradients`; what must be zero is exactly zero."""
    want = reference_gradients(torch, problem, inputs)
    assert got.keys() == want.keys()
    ids = inputs["expert_ids"].long()
    used = ids >= 0
    has_rows = torch.bincount(ids[used], minlength=problem.experts) > 0
    errors = {}
    for name in want:
        g, w = got[name], want[name]
        assert g.shape == w.shape, name
        if name in ("d_expert_weights", "ds_scale"):
            count = int(used.sum()) if name == "d_expert_weights" else len(g)
            norm = max(float(w.norm()), dot_scale(problem, count), 1e-30)
            errors[name] = float((g - w).norm()) / norm
        else:
            errors[name] = relative_l2(g, w)
        if name in OF_EXPERTS:
            assert (g[~has_rows] == 0).all(), name
            errors[name, "one expert"] = relative_l2_each(g[has_rows], w[has_rows])
        elif name in ("ds_gate", "ds_up", "ds_down"):
            errors[name, "one rank"] = relative_l2_each(g, w)
        elif name == "dx" and not problem.has_kinks:
            errors[name, "one token"] = relative_l2_each(g, w)
    assert (got["d_expert_weights"][~used] == 0).all()

    def allowed(name):
        if problem.has_kinks:
            # A value beside a jump of the derivative may lie on the other side of it here: a few
            # elements, which weigh much in an expert with few rows.
            return 10 * TOLERANCE if isinstance(name, tuple) else 2.5 * TOLERANCE
        return FLOAT32_TOLERANCE if float32 and name in WEIGHT_GRADS else TOLERANCE

    wrong = {name: error for name, error in errors.items() if not error < allowed(name)}
    assert not wrong, wrong


def check_both(kernels, problem, settings=DEFAULTS, **routing):
    """Recomputed against float32, and with residuals the same bits."""
    inputs = make_inputs(kernels.torch, problem, **routing)
    recomputed = backward(kernels, problem, inputs, settings).run()
    check(kernels.torch, problem, inputs, recomputed, settings.float32_weight_grads)
    assert_same_bits(kernels, backward(kernels, problem, inputs, settings, True).run(), recomputed)


def different_bits(torch, got, want):
    """Number of elements, on the device."""
    integers = {2: torch.int16, 4: torch.int32}[got.element_size()]
    return (got.view(integers) != want.view(integers)).sum()


def assert_same_bits(kernels, got, want, what="", names=None):
    wrong = {n: int(different_bits(kernels.torch, got[n], want[n])) for n in names or want}
    wrong = {name: count for name, count in wrong.items() if count}
    assert not wrong, (what, wrong)


@pytest.mark.parametrize("name", SHAPES)
def test_shape(kernels, name):
    check_both(kernels, SHAPES[name])


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("ranks", [1, 4])
def test_routing(kernels, routing, ranks):
    check_both(kernels, P(400, 512, 256, 32, 4, ranks=ranks), routing=routing)


@pytest.mark.parametrize("unused", [0.3, 1.0])
@pytest.mark.parametrize("ranks", [1, 4])
def test_unused_slots(kernels, unused, ranks):
    check_both(kernels, P(200, 256, 128, 16, 4, ranks=ranks, biases=True), unused=unused)


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_activation(kernels, activation, biases):
    check_both(kernels, P(300, 320, 192, 8, 2, biases=biases, **activation))


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("shared", [64, 448, 1024])
def test_shared_experts(kernels, shared, ranks, gate):
    check_both(kernels, P(333, 512, 256, 16, 4, ranks=ranks, shared=shared, shared_gate=gate))


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_everything_at_once(kernels, ranks):
    problem = P(
        190,
        320,
        192,
        16,
        4,
        ranks=ranks,
        activation="geglu",
        up_offset=0.5,
        biases=True,
        shared=192,
        shared_gate=True,
    )
    settings = kl.Settings(minibatch=128, macrobatch=384)
    check_both(kernels, problem, settings, routing="zipf", unused=0.1)


@pytest.mark.parametrize("save", [False, True])
def test_weights_without_rows_after_hidden_gradients(kernels, save):
    """On 132 SMs CTA 0 goes from hidden gradients straight to weights of an expert without rows,
    whose zeros wait for no operands: they must not fall where hidden gradients still lie."""
    problem = P(128, 512, 256, 12, 1)
    inputs = make_inputs(kernels.torch, problem, routing="one_expert")
    call = backward(kernels, problem, inputs, save=save)
    first = call.run()
    check(kernels.torch, problem, inputs, first)
    for seed in range(1, 101):
        assert_same_bits(kernels, call.run(jitter_seed=seed), first, seed)


@pytest.mark.parametrize("routing", ["uniform", "one_expert", "some_empty"])
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("macrobatch", [0, 512])
def test_float32_weight_grads(kernels, macrobatch, ranks, routing):
    """Closer than bf16, and rounded they are the bf16 results."""
    torch = kernels.torch
    problem = P(400, 512, 256, 16, 4, ranks=ranks, biases=True)
    inputs = make_inputs(torch, problem, routing=routing)
    settings = kl.Settings(macrobatch=macrobatch)
    rounded = backward(kernels, problem, inputs, settings).run()
    for save in (False, True):
        exact = dataclasses.replace(settings, float32_weight_grads=True)
        got = backward(kernels, problem, inputs, exact, save).run()
        check(torch, problem, inputs, got, float32=True)
        got |= {name: got[name].bfloat16() for name in WEIGHT_GRADS}
        assert_same_bits(kernels, got, rounded, save)


def spread_problem(ranks):
    """2,048 tokens over any number of ranks."""
    return P(2048 // ranks, 512, 192, 32, 8, ranks=ranks, biases=True, shared=128, shared_gate=True)


@pytest.mark.parametrize("ranks", [1, 4])
def test_same_bits(kernels, ranks):
    """Across runs and settings, recomputed and with residuals: all saved, or some replayed."""
    problem = spread_problem(ranks)
    inputs = make_inputs(kernels.torch, problem, routing="zipf", unused=0.05)
    call = backward(kernels, problem, inputs)
    first = call.run()
    check(kernels.torch, problem, inputs, first)
    for _ in range(3):
        assert_same_bits(kernels, call.run(), first, "again")
    for name, settings in kl.SAME_BITS.items():
        for save in (False, True):
            got = backward(kernels, problem, inputs, settings, save).run()
            assert_same_bits(kernels, got, first, (name, save))


@pytest.mark.parametrize("save", [False, True])
def test_same_bits_of_tokens_on_any_number_of_ranks(kernels, save):
    """Gradients that belong to a token; sums over tokens are taken in another order."""
    first = None
    for ranks in (1, 2, 4, 8):
        problem = spread_problem(ranks)
        inputs = make_inputs(kernels.torch, problem, routing="zipf", unused=0.05)
        got = backward(kernels, problem, inputs, save=save).run()
        check(kernels.torch, problem, inputs, got)
        first = first or got
        assert_same_bits(kernels, got, first, ranks, OF_TOKENS)


def test_communication_of_its_own(kernels):
    """The backward's communication SMs need not be those of the forward that it differentiates."""
    problem = P(500, 512, 192, 16, 4, ranks=4)
    inputs = make_inputs(kernels.torch, problem)
    want = backward(kernels, problem, inputs).run()
    forward = kl.Call(kernels, problem, inputs, kl.Settings(comm_sms=8, save=True))
    forward.run()
    for comm_sms in (0, 4, 24):
        settings = kl.Settings(comm_sms=comm_sms)
        got = kl.BackwardCall(kernels, problem, inputs, settings, saved=forward).run()
        assert_same_bits(kernels, got, want, comm_sms)


def test_training_steps_in_one_workspace(kernels):
    """Forward and backward in turns on the same heaps and workspace, with changing routing."""
    torch = kernels.torch
    problem = P(200, 256, 128, 16, 4, ranks=4)
    inputs = make_inputs(torch, problem)
    settings = kl.Settings(minibatch=256, macrobatch=512)
    forward = kl.Call(kernels, problem, inputs, dataclasses.replace(settings, save=True))
    saved = kl.BackwardCall(kernels, problem, inputs, settings, saved=forward)
    recomputed = kl.BackwardCall(kernels, problem, inputs, settings, storage=forward.storage)
    for seed, routing in enumerate(ROUTINGS * 2):
        changed = make_inputs(torch, problem, routing=routing, seed=seed, unused=0.1)
        for name, tensor in inputs.items():
            tensor.copy_(changed[name])
        forward.run()
        got = saved.run()
        check(torch, problem, inputs, got)
        assert_same_bits(kernels, recomputed.run(), got, routing)


@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("ranks", [4, 8])
def test_jitter(kernels, ranks, save):
    """1,000 calls with random delays in all roles of all ranks."""
    problem = P(128, 256, 128, 16, 4, ranks=ranks, biases=True, shared=64)
    inputs = make_inputs(kernels.torch, problem)
    settings = kl.Settings(minibatch=128, macrobatch=512, ring=128)
    call = backward(kernels, problem, inputs, settings, save)
    want = call.run()
    wrong = 0
    for seed in range(1, 1001):
        call.poison()  # what the call before left would be right
        call.launch(jitter_seed=seed)
        for name, tensor in call.outputs.items():
            wrong += different_bits(kernels.torch, tensor, want[name])
    kernels.synchronize()
    assert not call.faults()
    assert int(wrong) == 0


@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("name", ["x", "dy"])
def test_nan_stays_in_its_token(kernels, name, save):
    """Only that token's gradients and those of its experts' weights change at all."""
    torch = kernels.torch
    problem = P(300, 256, 128, 8, 2, biases=True)
    inputs = make_inputs(torch, problem)
    clean = backward(kernels, problem, inputs, save=save).run()
    inputs[name][17, 3] = float("nan")
    got = backward(kernels, problem, inputs, save=save).run()
    token = torch.arange(problem.tokens, device=kernels.device) == 17
    expert = torch.zeros(problem.experts, dtype=torch.bool, device=kernels.device)
    expert[inputs["expert_ids"][17].long()] = True
    for gradient in ("dx", "d_expert_weights", *OF_EXPERTS):
        mine = expert if gradient in OF_EXPERTS else token
        g, c = got[gradient], clean[gradient]
        assert torch.equal(g[~mine], c[~mine]), gradient
        if (name, gradient) == ("x", "db_down"):  # a sum of dy: x is not in it
            assert torch.equal(g, c)
        elif (name, gradient) != ("x", "db_up"):  # NaN may count as cut off: derivative 0
            assert g[mine].isnan().flatten(1).any(1).all(), gradient


@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("fault", ["high", "negative", "repeated"])
def test_bad_ids(kernels, fault, ranks, save):
    """Reported by every rank alike, NaN everywhere, and the next call works."""
    problem = P(100, 256, 128, 16, 4, ranks=ranks, biases=True, shared=64, shared_gate=True)
    inputs = make_inputs(kernels.torch, problem)
    call = backward(kernels, problem, inputs, save=save)
    good = call.run()
    kl.check_bad_id(call, fault)
    assert_same_bits(kernels, call.run(), good)


@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("absent", [0, 2])
def test_absent_rank(kernels, absent, save):
    """A rank that never comes: every rank leaves in time and says who was missing."""
    problem = P(100, 256, 128, 16, 4, ranks=4, biases=True, shared=64, shared_gate=True)
    inputs = make_inputs(kernels.torch, problem)
    settings = kl.Settings(start_timeout=0.05, timeout=0.05)
    call = backward(kernels, problem, inputs, settings, save)
    good = call.run()
    kl.check_absent_rank(call, absent)
    assert_same_bits(kernels, call.run(), good)


@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("phase", ["grad_hidden", "grad_input", "grad_weight"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_stuck(kernels, ranks, phase, save):
    problem = P(1000, 1024, 256, 16, 4, ranks=ranks, biases=True, shared=128)
    inputs = make_inputs(kernels.torch, problem)
    call = backward(kernels, problem, inputs, kl.Settings(timeout=0.05), save)
    good = call.run()
    kl.check_stuck(call, phase)
    assert_same_bits(kernels, call.run(), good)


@pytest.mark.parametrize("save", [False, True])
def test_given_up_anywhere(kernels, save):
    problem = P(4000, 1024, 512, 32, 4, shared=256)
    call = backward(kernels, problem, make_inputs(kernels.torch, problem), save=save)
    good = call.run()
    kl.check_given_up_anywhere(call, lambda: assert_same_bits(kernels, call.outputs, good))
    assert_same_bits(kernels, call.run(), good)


def test_calls_after_a_failure_of_the_other(kernels):
    """Forward and backward share heaps: one that gave up leaves nothing behind for the other."""
    torch = kernels.torch
    problem = P(100, 256, 128, 16, 4, ranks=4, shared=64)
    inputs = make_inputs(torch, problem)
    settings = kl.Settings(start_timeout=0.05, timeout=0.05, save=True)
    forward = kl.Call(kernels, problem, inputs, settings)
    y = forward.run()
    call = kl.BackwardCall(kernels, problem, inputs, saved=forward)
    good = call.run()
    call.launch(absent_rank=1)
    kernels.synchronize()
    assert call.faults()
    assert torch.equal(forward.run(), y)
    forward.launch(absent_rank=1)
    kernels.synchronize()
    assert forward.faults()
    recomputed = kl.BackwardCall(kernels, problem, inputs, settings, storage=forward.storage)
    assert_same_bits(kernels, recomputed.run(), good)


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
    assert kernels.check_backward(problem).startswith(field)


@pytest.mark.parametrize("float32", [False, True])
@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_no_tokens(kernels, ranks, save, float32):
    """Sums over no tokens are zero."""
    problem = P(0, 64, 64, 4, 2, ranks=ranks, biases=True, shared=64, shared_gate=True)
    inputs = make_inputs(kernels.torch, problem)
    settings = kl.Settings(float32_weight_grads=float32)
    got = backward(kernels, problem, inputs, settings, save).run()
    assert got["dx"].shape == (0, 64)
    for name, tensor in got.items():
        assert (tensor == 0).all(), name


def random_case(seed):
    """(problem, options of make_inputs, settings, save), anything that is allowed."""
    rng = random.Random(seed)
    ranks = rng.choice([1, 1, 2, 4, 8])
    experts = ranks * rng.randint(1, 16)
    shared = rng.choice([0, 0, 64, 192])
    problem = P(
        rng.randint(1, 300),
        64 * rng.randint(1, 12),
        64 * rng.randint(1, 8),
        experts,
        rng.randint(1, min(experts, 10)),
        ranks=ranks,
        biases=rng.random() < 0.4,
        shared=shared,
        shared_gate=shared > 0 and rng.random() < 0.5,
        **rng.choice(ACTIVATIONS),
    )
    settings = kl.Settings(
        comm_sms=rng.choice([0, 0, 4, 16]),
        minibatch=128 * rng.choice([0, 1, 2, 4]),
        macrobatch=128 * rng.choice([0, 0, 1, 3, 8]),
        ring=128 * rng.choice([0, 1, 5]),
        jitter_seed=rng.choice([0, seed + 1]),
        float32_weight_grads=rng.random() < 0.3,
    )
    routing = dict(routing=rng.choice(ROUTINGS), unused=rng.choice([0.0, 0.0, 0.2, 0.9]), seed=seed)
    return problem, routing, settings, rng.random() < 0.5


@pytest.mark.parametrize("seed", range(40))
def test_fuzz(kernels, seed):
    problem, routing, settings, save = random_case(seed)
    inputs = make_inputs(kernels.torch, problem, **routing)
    got = backward(kernels, problem, inputs, settings, save).run()
    check(kernels.torch, problem, inputs, got, settings.float32_weight_grads)
