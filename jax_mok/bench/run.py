"""The command line of the benchmark, and the benchmark of one layer."""

import argparse
import dataclasses
import pathlib

import jax
import jax.numpy as jnp

import jax_mok
from jax_mok.bench import candidates, latency, report, step, timing
from jax_mok.bench.problem import ROUTINGS, Problem, problems_of
from jax_mok.shapes import SHAPES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shape",
        nargs="+",
        metavar="NAME",
        help=f"named layers: {', '.join(SHAPES)}; default: qwen3-30b-a3b, on a CPU a small one",
    )
    parser.add_argument("--hidden", type=int, help="H, instead of the named one")
    parser.add_argument("--intermediate", type=int, help="I, instead of the named one")
    parser.add_argument(
        "--experts", type=int, help="E of the whole layer, instead of the named one"
    )
    parser.add_argument("--top-k", type=int, help="experts per token, instead of the named one")
    parser.add_argument("--tokens", type=int, nargs="+", default=None, help="tokens per rank")
    parser.add_argument("--ranks", type=int, help="expert-parallel ranks; default: all devices")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"))
    parser.add_argument("--routing", nargs="+", choices=ROUTINGS, default=["uniform"])
    parser.add_argument(
        "--minibatch", type=int, nargs="+", default=[None], help="rows; default: chosen by jax_mok"
    )
    parser.add_argument(
        "--comm-sms",
        type=int,
        nargs="+",
        default=[None],
        help="multiprocessors that only communicate, in both passes; default: chosen by jax_mok",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--backward", action="store_true", help="forward and backward")
    what.add_argument(
        "--step", action="store_true", help="a training step of attention and experts instead"
    )
    what.add_argument(
        "--latency", action="store_true", help="calls with few tokens, and what the links carry"
    )
    parser.add_argument(
        "--candidates",
        nargs="+",
        choices=dict.fromkeys((*candidates.CHOICES, *candidates.LAYERS)),
        default=list(candidates.CHOICES),
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each round and candidate")
    parser.add_argument("--save", metavar="NAME", help="keep NAME.json and NAME.png")
    parser.add_argument("--folder", type=pathlib.Path, default=report.RESULTS)
    parser.add_argument(
        "--link", type=float, default=333.0, help="GB/s each way between two ranks, for the floor"
    )
    parser.add_argument("--layers", type=int, help="of --step; default: as many as fit")
    parser.add_argument("--sequence", type=int, help="tokens of a sequence of --step")
    parser.add_argument(
        "--trace",
        type=pathlib.Path,
        metavar="FOLDER",
        help="of --step, on GPUs: keep a trace of each candidate there, and say what its time "
        "goes to",
    )


def main(args: argparse.Namespace) -> int:
    if args.step:
        return step.main(args)
    if args.latency:
        return latency.main(args)
    problems = problems_of(args)
    on_cpu, dtype = jax.default_backend() == "cpu", problems[0].dtype
    ceiling = timing.matmul_ceiling(jnp.dtype(dtype))
    print(f"{report.environment()}\nmatmul ceiling: {ceiling:.4g} TFLOP/s per device ({dtype})")
    record = {
        "environment": report.environment(),
        "matmul_tflops": ceiling,
        "link_gb_per_s": args.link,
        "problems": [],
    }
    for problem in problems:
        record["problems"].append(_measure(problem, args, ceiling, shared_device=on_cpu))
    if args.save:
        path = report.save(args.save, record, args.folder)
        report.plot(record, path.with_suffix(".png"))
        print(f"kept in {path}")
    return 0


def _measure(problem: Problem, args, ceiling: float, *, shared_device: bool) -> dict:
    shape, passes = problem.shape, 3 if args.backward else 1
    # Virtual CPU devices share the machine: together they can do what one can.
    share = problem.ranks if shared_device else 1
    flops = passes * problem.flops
    links = 0 if shared_device else (2 if args.backward else 1) * problem.link_bytes
    floor = max(flops * share / ceiling / 1e9, links / args.link / 1e6)
    title = (
        f"{shape.name}: H {shape.hidden_size}, I {shape.intermediate_size}, "
        f"E {shape.num_experts}, k {shape.top_k}; {problem.tokens} tokens x {problem.ranks} ranks, "
        f"{problem.dtype}, {problem.routing}, {'forward + backward' if passes == 3 else 'forward'}"
    )
    arguments = problem.arguments()
    names = candidates.expand(args.candidates, backward=args.backward)
    runs, rows, memory = {}, [], {}
    for name in names:
        try:
            run = candidates.make_run(name, problem, arguments, args.backward)
            if hasattr(run, "lower"):
                run = run.lower(*arguments).compile()
                memory[name] = timing.memory_of(run)
            timing.wait(run(*arguments))
            runs[name] = run
        except candidates.Unavailable as e:
            rows.append({"candidate": name, "why_not": str(e)})
        except Exception as e:  # a rival that fails is a result of the run, not its end
            if candidates.is_ours(name):
                raise
            rows.append({"candidate": name, "why_not": f"{type(e).__name__}: {str(e)[:200]}"})
        if candidates.is_ours(name):
            jax_mok.check_status()
    times = timing.in_turns(runs, arguments, rounds=args.rounds, seconds=args.seconds)
    jax_mok.check_status()
    for name, measured in times.items():
        rows.append(
            {
                "candidate": name,
                "ms": measured.median,
                "spread_ms": measured.spread,
                "rounds": len(measured.rounds),
                "tflops": flops / measured.median / 1e9,
                "share_of_floor": floor / measured.median,
                "temp_bytes": None,
                "peak_bytes": None,
                **memory.get(name, {}),
                "peer_heap_bytes": timing.peer_heap_bytes() if candidates.is_ours(name) else None,
            }
        )
    rows.sort(key=lambda r: names.index(r["candidate"]))
    settings = {"minibatch": problem.minibatch, "comm SMs": problem.comm_sms}
    chosen = [f"{name} {value}" for name, value in settings.items() if value is not None]
    report.print_layer(", ".join([title, *chosen]), rows)
    facts = dataclasses.asdict(problem) | {"imbalance": problem.imbalance}
    return {"title": title, "floor_ms": floor, "rows": rows, "problem": facts}
