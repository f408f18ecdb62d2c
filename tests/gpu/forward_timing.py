"""Times the forward kernel on one GPU: python tests/gpu/forward_timing.py [name ...]

Whole calls (plan, dispatch, experts, combine) between events, after a warm-up; the median of
several rounds over all candidates, so that drifts of the clocks hit every candidate alike.
"""

import argparse
import statistics

import kernel_library as kl

MODELS = {
    "qwen3-30b/64": kl.Problem(8192, 2048, 768, 64, 8),
    "deepseek-v3/128": kl.Problem(8192, 7168, 2048, 128, 8),
}


def time_call(torch, launch, repeats):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        launch()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeats


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--library", help="a built library instead of a fresh build")
    parser.add_argument("--settings", nargs="*", default=[""], help="e.g. comm_sms=8,ring=8192")
    args = parser.parse_args()
    kernels = kl.Kernels(args.library or kl.build())
    torch = kernels.torch
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for name in args.models:
        problem = MODELS[name]
        inputs = kl.make_inputs(torch, problem)
        calls = {"torch matmul 8192^3": lambda: a @ a}
        for text in args.settings:
            settings = kl.Settings(
                **{k: int(v) for k, v in (s.split("=") for s in text.split(",") if s)}
            )
            calls[text or "default"] = kl.Call(kernels, problem, inputs, settings).launch
        repeats = max(2, int(30 / (1 if problem.hidden < 4096 else 10)))
        times = {k: [] for k in calls}
        for launch in calls.values():
            time_call(torch, launch, repeats)
        for _ in range(args.rounds):
            for key, launch in calls.items():
                times[key].append(time_call(torch, launch, repeats))
        flops = 6 * problem.tokens * problem.top_k * problem.hidden * problem.intermediate
        print(f"{name}: {problem.tokens} tokens")
        for key, ms in times.items():
            work = 2 * 8192**3 if key.startswith("torch") else flops
            median = statistics.median(ms)
            print(
                f"  {key:40s} {median:8.3f} ms [{min(ms):.3f} .. {max(ms):.3f}]"
                f" {work / median * 1e-9:6.0f} TFLOP/s"
            )


if __name__ == "__main__":
    main()
