"""Times the forward kernel on one GPU: python tests/gpu/forward_timing.py --help

Whole calls (plan, dispatch, experts, combine) between events, after a warm-up. The candidates take
turns, in another order every round: the card is power-capped, and who runs after a heavier
candidate finds slower clocks.
"""

import argparse
import random
import statistics

import kernel_library as kl
from kernel_cases import ROUTINGS, Problem, make_inputs

# hidden, intermediate, experts (all, or those of one rank), top_k
MODELS = {
    "qwen3-30b/64": (2048, 768, 64, 8),
    "deepseek-v3/128": (7168, 2048, 128, 8),
    "kimi-k2.7": (7168, 2048, 384, 8),
    "glm-5.2": (6144, 2048, 256, 8),
    "qwen3.5-397b": (4096, 1024, 512, 10),
    "deepseek-v4-pro/192": (7168, 3072, 192, 6),
}
MATMUL = "torch matmul 8192^3"


def time_call(torch, launch, repeats):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        launch()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeats


def parse_settings(text):
    return kl.Settings(**{k: int(v) for k, v in (s.split("=") for s in text.split(",") if s)})


def measure(torch, candidates, rounds, milliseconds=40):
    """{name: times in ms} of {name: launch}; each turn lasts about `milliseconds`."""
    repeats = {}
    for name, launch in candidates.items():
        time_call(torch, launch, 2)
        repeats[name] = max(2, int(milliseconds / time_call(torch, launch, 2)))
    times = {name: [] for name in candidates}
    names = list(candidates)
    for _ in range(rounds):
        random.shuffle(names)
        for name in names:
            times[name].append(time_call(torch, candidates[name], repeats[name]))
    return times


def fail_on_faults(calls):
    """A call that gave up was quick: {name: call}."""
    for name, call in calls.items():
        faults = call.faults()
        assert not faults, (name, faults)


def gemm_flops(problem):
    """Of one of the three expert GEMMs, without padding."""
    p = problem
    return 2 * p.ranks * p.tokens * p.top_k * p.hidden * p.intermediate


def add_matmul(torch, candidates, work):
    """The ceiling of the run, first among the candidates; `work`: {name: floating point
    operations}.
    """
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    candidates[MATMUL] = lambda: a @ a
    work[MATMUL] = 2 * 8192**3


def report(times, work):
    """One line a candidate: median, range, rate, and the rate as a share of the matmul's."""
    ceiling = work[MATMUL] / statistics.median(times[MATMUL])
    for name, ms in times.items():
        median = statistics.median(ms)
        rate = work[name] / median
        print(
            f"  {name:52s} {median:8.3f} ms [{min(ms):.3f} .. {max(ms):.3f}]"
            f" {rate * 1e-9:6.0f} TFLOP/s {100 * rate / ceiling:4.0f} %",
            flush=True,
        )


def parser(description):
    """The options that all timings have."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("models", nargs="*", default=list(MODELS)[:2], help=" ".join(MODELS))
    options.add_argument("--tokens", type=int, default=8192)
    options.add_argument("--routing", default="uniform", choices=ROUTINGS)
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--library", nargs="*", help="built libraries instead of a fresh build")
    options.add_argument("--settings", nargs="*", default=[""], help="e.g. comm_sms=8,ring=8192")
    return options


def variants(args):
    """[(label, kernels, settings)] of every library under every settings."""
    libraries = {str(path): kl.Kernels(path) for path in args.library or [kl.build()]}
    found = []
    for path, kernels in libraries.items():
        for text in args.settings:
            library = path.rsplit("/")[-1] if len(libraries) > 1 else ""
            label = " ".join(filter(None, [library, text]))
            found.append((label, kernels, parse_settings(text)))
    return found


def main():
    args = parser(__doc__.splitlines()[0]).parse_args()
    libraries = variants(args)
    torch = libraries[0][1].torch
    for name in args.models:
        problem = Problem(args.tokens, *MODELS[name])
        inputs = make_inputs(torch, problem, routing=args.routing)
        candidates, work, calls = {}, {}, {}
        add_matmul(torch, candidates, work)
        for label, kernels, settings in libraries:
            key = label or "default"
            calls[key] = kl.Call(kernels, problem, inputs, settings)
            candidates[key] = calls[key].launch
            work[key] = 3 * gemm_flops(problem)
        print(f"{name}: {problem.tokens} tokens, {args.routing} routing", flush=True)
        times = measure(torch, candidates, args.rounds)
        fail_on_faults(calls)
        report(times, work)
        del candidates, calls, inputs
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
