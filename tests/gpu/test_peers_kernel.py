"""Ranks that are launches of their own, as on several GPUs, on one: the bits of one launch, and
what they do when one of them comes late, misses a call, or is at work when another gives it up.
"""

import time

import kernel_library as kl
import pytest
from kernel_cases import P, make_inputs

REASON = kl.missing()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]
TIMEOUT, PEER_FAULT = 1, 2
PROBLEM = P(150, 256, 128, 12, 3, ranks=2, biases=True)


@pytest.fixture(scope="module")
def kernels():
    return kl.load()


def peers_of(kernels, problem=PROBLEM, **settings):
    """(ranks ready for calls, what a call gives)"""
    settings = kl.Settings(**{"start_timeout": 1.0, "timeout": 0.3, **settings})
    peers = kl.Peers(kernels, problem, make_inputs(kernels.torch, problem), settings)
    return peers, peers.run(call_id=1)["y"]


def same_bits(kernels, outputs, wanted):
    return all(kernels.torch.equal(outputs[name], wanted[name]) for name in outputs)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("backward", [False, True])
def test_as_one_launch(kernels, backward, ranks):
    """50 calls with random delays, each with the bits of one launch for all ranks."""
    problem = P(150, 256, 192, 12, 3, ranks=ranks, biases=True)
    inputs = make_inputs(kernels.torch, problem)
    if backward:
        wanted = kl.BackwardCall(kernels, problem, inputs).run()
    else:
        wanted = {"y": kl.Call(kernels, problem, inputs).run()}
    peers = kl.Peers(kernels, problem, inputs, backward=backward)
    for seed in range(50):
        assert same_bits(kernels, peers.run(jitter_seed=seed), wanted), seed


@pytest.mark.parametrize("ids", [(0, 0, 0), (7, 3, 9)], ids=["numbered", "named"])
def test_late_rank(kernels, ids):
    """A rank that comes when the other is at its next call refuses the one it is late for, at once,
    and both are at the same call again."""
    if ids[0] == 0:
        peers = kl.Peers(
            kernels,
            PROBLEM,
            make_inputs(kernels.torch, PROBLEM),
            kl.Settings(start_timeout=1.0, timeout=0.3),
        )
        good = peers.run()["y"]
    else:
        peers, good = peers_of(kernels)
    peers.launch(0, call_id=ids[0])
    peers.streams[0].synchronize()
    assert peers.is_nan(0)
    fault = peers.faults()[0]
    assert (fault["code"], fault["counter"], fault["phase"]) == (TIMEOUT, 1, 0)

    peers.launch(0, call_id=ids[1])
    began = time.monotonic()
    peers.launch(1, call_id=ids[0])
    peers.streams[1].synchronize()
    assert time.monotonic() - began < 0.5
    assert peers.is_nan(1)
    peers.launch(1, call_id=ids[1])
    kernels.synchronize()
    faults = peers.faults()
    assert set(faults) == {1} and faults[1]["code"] == PEER_FAULT and faults[1]["counter"] == 0
    assert kernels.torch.equal(peers.outputs["y"], good)
    assert kernels.torch.equal(peers.run(call_id=ids[2])["y"], good)


def test_missed_call(kernels):
    """A rank that never came to a call is at the next one with the others."""
    peers, good = peers_of(kernels)
    peers.launch(0, call_id=5)  # rank 1 misses it
    peers.streams[0].synchronize()
    assert peers.faults()[0]["code"] == TIMEOUT
    peers.launch(0, ["publish"], call_id=4)
    kernels.synchronize()
    peers.launch(1, call_id=4)
    peers.launch(0, kl.STAGES[1:], call_id=4)
    kernels.synchronize()
    assert not peers.faults()
    assert kernels.torch.equal(peers.outputs["y"], good)
    assert kernels.torch.equal(peers.run(call_id=8)["y"], good)


def test_missed_call_found_first(kernels):
    """The same, but the one that missed the call finds the other still at it: that costs one more,
    and no time."""
    peers, good = peers_of(kernels)
    peers.launch(0, call_id=5)
    peers.streams[0].synchronize()
    began = time.monotonic()
    peers.launch(1, call_id=4)
    peers.streams[1].synchronize()
    peers.launch(0, call_id=4)
    kernels.synchronize()
    assert time.monotonic() - began < 0.5
    faults = peers.faults()
    assert faults[0]["code"] == TIMEOUT  # the first is kept
    assert faults[1]["code"] == PEER_FAULT and faults[1]["value"] == 0
    assert peers.is_nan(0) and peers.is_nan(1)
    assert kernels.torch.equal(peers.run(call_id=8)["y"], good)


def test_failed_rank_waits_for_its_peer(kernels):
    """A rank that gives a call up stays in it until its peer, which is still at work, has ended it
    too."""
    peers, good = peers_of(kernels, start_timeout=5.0)
    for rank in range(2):
        peers.launch(rank, ["publish", "copy", "plan"], call_id=2)
    kernels.synchronize()
    peers.launch(0, ["work", "sum"], call_id=2)
    peers.launch(0, call_id=3)
    time.sleep(0.8)  # nothing may synchronise the device here
    heap_at = peers._heaps[1].view(kernels.torch.int64)  # rank 0 has not told that it is at call 3
    assert not (heap_at[: kernels.lib.mok_heap_control_bytes() // 8] == 3).any()
    peers.launch(1, ["work", "sum"], call_id=2)
    peers.streams[1].synchronize()
    assert peers.is_nan(1)
    peers.launch(1, call_id=3)
    kernels.synchronize()
    faults = peers.faults()
    assert faults[0]["code"] == TIMEOUT and faults[0]["counter"] == 1
    assert faults[1]["code"] == PEER_FAULT and faults[1]["value"] == 1
    assert kernels.torch.equal(peers.outputs["y"], good)
    assert kernels.torch.equal(peers.run(call_id=4)["y"], good)


def test_absent_rank(kernels):
    """Nobody waits twice for a rank that never came."""
    problem = P(150, 256, 128, 12, 3, ranks=3)
    peers, good = peers_of(kernels, problem, start_timeout=0.4)
    began = time.monotonic()
    for rank in range(3):
        peers.launch(rank, call_id=2, absent_rank=1)
    kernels.synchronize()
    assert time.monotonic() - began < 0.9
    faults = peers.faults()
    assert set(faults) == {0, 1, 2} and all(
        f["counter"] == 1 for f in faults.values() if f["code"] == 1
    )
    assert any(f["code"] == TIMEOUT for f in faults.values())
    assert all(peers.is_nan(rank) for rank in range(3))
    assert kernels.torch.equal(peers.run(call_id=3)["y"], good)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("backward", [False, True])
def test_given_up_at_work(kernels, backward, ranks):
    """Calls that run out of time somewhere in their tiles leave nothing but NaN, calls that do not
    the right bits, and the next call works."""
    torch = kernels.torch
    problem = P(600 // ranks, 512, 384, 16, 4, ranks=ranks)
    inputs = make_inputs(torch, problem)
    kind = kl.BackwardCall if backward else kl.Call
    storage = kl.Storage(kernels)
    plain = kind(kernels, problem, inputs, storage=storage)
    plain.run()
    wanted = {name: t.clone() for name, t in plain.outputs.items()}
    failed = 0
    for microseconds in (2, 5, 8, 12, 16, 20, 25, 30, 40, 50, 70, 100):
        settings = kl.Settings(timeout=microseconds * 1e-6, minibatch=128, ring=128)
        call = kind(kernels, problem, inputs, settings, storage=storage)
        for seed in range(20):
            call.poison()
            call.launch(jitter_seed=seed)
            kernels.synchronize()
            if call.faults():
                failed += 1
                for name, tensor in call.outputs.items():
                    # A rank that has heard of all others' results in time has its own.
                    parts = zip(tensor.chunk(ranks), wanted[name].chunk(ranks))
                    whole = [bool(a.isnan().all()) or torch.equal(a, b) for a, b in parts]
                    assert all(whole), (name, microseconds, seed, whole)
            else:
                assert same_bits(kernels, call.outputs, wanted)
        plain.run()
        assert same_bits(kernels, plain.outputs, wanted)
    assert failed > 20
