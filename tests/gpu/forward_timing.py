"""Times the forward kernel on one GPU: python tests/gpu/forward_timing.py --help

Whole calls (plan, dispatch, experts, combine) between events, after a warm-up. The candidates take
turns, in another order every round: the card is power-capped, and who runs after a heavier
candidate finds slower clocks.
"""

import argparse
import random
import statistics

import kernel_library as kl

# hidden, intermediate, experts (all, or those of one rank), top_k
MODELS = {
    "qwen3-30b/64": (2048, 768, 64, 8),
    "deepseek-v3/128": (7168, 2048, 128, 8),
    "kimi-k2.7": (7168, 2048, 384, 8),
    "glm-5.2": (6144, 2048, 256, 8),
    "qwen3.5-397b": (4096, 1024, 512, 10),
    "deepseek-v4-pro/192": (7168, 3072, 192, 6),
}


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


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=list(MODELS)[:2])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--routing", default="uniform")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--library", nargs="*", help="built libraries instead of a fresh build")
    parser.add_argument("--settings", nargs="*", default=[""], help="e.g. comm_sms=8,ring=8192")
    args = parser.parse_args()
    libraries = {str(path): kl.Kernels(path) for path in args.library or [kl.build()]}
    torch = next(iter(libraries.values())).torch
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for name in args.models:
        problem = kl.Problem(args.tokens, *MODELS[name])
        inputs = kl.make_inputs(torch, problem, routing=args.routing)
        candidates = {"torch matmul 8192^3": lambda: a @ a}
        for path, kernels in libraries.items():
            for text in args.settings:
                key = " ".join([path.rsplit("/")[-1]] * (len(libraries) > 1) + [text or "default"])
                call = kl.Call(kernels, problem, inputs, parse_settings(text))
                candidates[key] = call.launch
        flops = 6 * problem.tokens * problem.top_k * problem.hidden * problem.intermediate
        print(f"{name}: {problem.tokens} tokens, {args.routing} routing", flush=True)
        for key, ms in measure(torch, candidates, args.rounds).items():
            work = 2 * 8192**3 if key.startswith("torch") else flops
            median = statistics.median(ms)
            print(
                f"  {key:40s} {median:8.3f} ms [{min(ms):.3f} .. {max(ms):.3f}]"
                f" {work / median * 1e-9:6.0f} TFLOP/s",
                flush=True,
            )
        del candidates, call, inputs
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
