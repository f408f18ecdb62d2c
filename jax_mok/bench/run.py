"""The benchmark itself: problems from the command line, candidates in turns, report."""

import argparse
import dataclasses
import pathlib

import jax
import jax.numpy as jnp

from jax_mok.bench import report, timing
from jax_mok.bench.candidates import CANDIDATES, Unavailable
from jax_mok.bench.problem import ROUTINGS, Problem
from jax_mok.shapes import SHAPES, MoeShape

# Where there is no accelerator: a layer that a CPU computes in a second or so.
CPU_SHAPE = MoeShape("cpu-default", 512, 1024, 16, 2)


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
    parser.add_argument("--backward", action="store_true", help="forward and backward")
    parser.add_argument("--candidates", nargs="+", choices=CANDIDATES, default=list(CANDIDATES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each round and candidate")
    parser.add_argument("--save", metavar="NAME", help="keep NAME.json and NAME.png")
    parser.add_argument("--folder", type=pathlib.Path, default=report.RESULTS)
    parser.add_argument(
        "--link", type=float, default=333.0, help="GB/s each way between two ranks, for the floor"
    )


def main(args: argparse.Namespace) -> int:
    on_cpu = jax.default_backend() == "cpu"
    names = args.shape or (["cpu-default"] if on_cpu else ["qwen3-30b-a3b"])
    known = SHAPES | {CPU_SHAPE.name: CPU_SHAPE}
    unknown = [n for n in names if n not in known]
    if unknown:
        raise SystemExit(f"--shape: {unknown} is not among {', '.join(known)}.")
    changes = {
        "hidden_size": args.hidden,
        "intermediate_size": args.intermediate,
        "num_experts": args.experts,
        "top_k": args.top_k,
    }
    changes = {k: v for k, v in changes.items() if v is not None}
    dtype = args.dtype or ("float32" if on_cpu else "bfloat16")
    ranks = args.ranks or len(jax.devices())
    tokens = args.tokens or ([512] if on_cpu else [8192])
    problems = [
        Problem(dataclasses.replace(known[n], **changes), t, ranks, dtype, routing, minibatch)
        for n in names
        for t in tokens
        for routing in args.routing
        for minibatch in args.minibatch
    ]
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
    runs, rows, memory = {}, [], {}
    for name in args.candidates:
        try:
            run = CANDIDATES[name](problem, arguments, args.backward)
            if hasattr(run, "lower"):
                analysis = run.lower(*arguments).compile().memory_analysis()
                memory[name] = getattr(analysis, "temp_size_in_bytes", None)
            timing.wait(run(*arguments))
            runs[name] = run
        except Unavailable as e:
            rows.append({"candidate": name, "why_not": str(e)})
        except Exception as e:  # a rival that fails is a result of the run, not its end
            if name == "jax_mok":
                raise
            rows.append({"candidate": name, "why_not": f"{type(e).__name__}: {str(e)[:200]}"})
    times = timing.in_turns(runs, arguments, rounds=args.rounds, seconds=args.seconds)
    for name, measured in times.items():
        rows.append(
            {
                "candidate": name,
                "ms": measured.median,
                "spread_ms": measured.spread,
                "tflops": flops / measured.median / 1e9,
                "share_of_floor": floor / measured.median,
                "temp_bytes": memory.get(name),
            }
        )
    rows.sort(key=lambda r: list(CANDIDATES).index(r["candidate"]))
    report.print_table(title, rows)
    facts = dataclasses.asdict(problem) | {"shape": dataclasses.asdict(shape)}
    return {"title": title, "floor_ms": floor, "rows": rows, "problem": facts}
