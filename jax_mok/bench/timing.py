"""How times are taken (candidates in turns, their order reversed from round to round, medians), and
how much memory a program takes.
"""

import dataclasses
import statistics
import time

import jax
import jax.numpy as jnp

import jax_mok


@dataclasses.dataclass
class Measurement:
    """Milliseconds per call of each round."""

    rounds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    @property
    def spread(self) -> tuple[float, float]:
        return min(self.rounds), max(self.rounds)


def wait(result) -> None:
    """Until the work behind `result` is done: JAX arrays, a torch tensor, or what can `wait`."""
    if callable(getattr(result, "wait", None)):
        result.wait()
    elif type(result).__module__.startswith("torch"):
        import torch

        torch.cuda.synchronize()
    else:
        jax.block_until_ready(result)


def in_turns(runs: dict, arguments, *, rounds: int, seconds: float) -> dict[str, Measurement]:
    """Times every run in `rounds` rounds of about `seconds` each.

    Every run has been called once before. A call is first timed by itself; a round then starts as
    many as fit and waits for the last, so that dispatch overlaps as it does in a training step. A
    call that takes longer than a round takes part in fewer of them, two at least. On a CPU every
    call is waited for: XLA can stall there when many programs with collectives are queued.
    """
    queue = jax.default_backend() != "cpu"
    calls, rounds_of = {}, {}
    for name, run in runs.items():
        start = time.perf_counter()
        wait(run(*arguments))
        took = time.perf_counter() - start
        calls[name] = max(1, min(200, int(seconds / took)))
        rounds_of[name] = min(rounds, max(2, int(rounds * seconds / took)))
    measured: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(rounds):
        order = list(runs) if index % 2 == 0 else list(reversed(runs))
        for name in order:
            if index >= rounds_of[name]:
                continue
            start = time.perf_counter()
            for _ in range(calls[name]):
                result = runs[name](*arguments)
                if not queue:
                    wait(result)
            wait(result)
            measured[name].append((time.perf_counter() - start) / calls[name] * 1e3)
    return {name: Measurement(values) for name, values in measured.items()}


def matmul_ceiling(dtype, *, seconds: float = 0.5) -> float:
    """TFLOP/s of a large square matrix product on random data, on the first device."""
    size = 8192 if jax.default_backend() != "cpu" else 1536
    a = jax.random.normal(jax.random.key(0), (size, size), dtype)
    product = jax.jit(lambda a, b: jnp.matmul(a, b))
    wait(product(a, a))
    times = in_turns({"matmul": product}, (a, a), rounds=3, seconds=seconds)
    return 2 * size**3 / times["matmul"].median / 1e9


def memory_of(compiled) -> dict[str, int | None]:
    """What XLA planned for a program on one device: scratch memory, and the most alive at once
    (None where it does not know, as of programs from JAX's compilation cache)."""
    analysis = compiled.memory_analysis()
    return {
        "temp_bytes": getattr(analysis, "temp_size_in_bytes", None),
        "peak_bytes": getattr(analysis, "peak_memory_in_bytes", None) or None,
    }


def peer_heap_bytes() -> int:
    """What jax_mok holds on one GPU beside XLA's memory, for all calls so far."""
    held: dict[int, int] = {}
    for heap in jax_mok.peer_memory():
        held[heap["device"]] = held.get(heap["device"], 0) + heap["bytes"]
    return max(held.values(), default=0)
