"""`bench --step`: a training step with each candidate's expert layers, in one run.

Every candidate first trains from the same parameters: losses and gradients have to agree, or the
benchmark fails. Then all take turns on one state.
"""

import concurrent.futures
import dataclasses
import functools
import importlib.util
import re
import time

import jax
import jax.numpy as jnp

import jax_mok
from jax_mok.bench import breakdown, candidates, report, timing
from jax_mok.bench.problem import dtype_of, shapes_of
from jax_mok.bench.stack import Stack, Training, no_experts

TOLERANCE = 2e-2  # relative difference of losses, and of gradient norms, between candidates
MAX_LAYERS = 48
CHECK_STEPS, CHECK_SECONDS = 10, 10.0  # of training before the timing: whichever ends first
WITHOUT = "without experts"


def main(args) -> int:
    if importlib.util.find_spec("optax") is None:
        raise SystemExit("bench --step needs optax.")
    if args.trace and jax.default_backend() != "gpu":
        raise SystemExit("bench --step --trace needs GPUs: there are no kernels in other traces.")
    stack = stack_of(args)
    attention = attention_implementation(stack)
    training = Training(stack, attention)
    shape = stack.shape
    title = (
        f"{shape.name}-like blocks: H {shape.hidden_size}, I {shape.intermediate_size}, "
        f"E {shape.num_experts}, k {shape.top_k}, {stack.heads}/{stack.key_heads} heads of "
        f"{stack.head_size}; {stack.layers} layers, {stack.batch} x {stack.sequence} tokens per "
        f"device; mesh {dict(training.mesh.shape)}, {stack.dtype}, remat per layer, AdamW with "
        f"float32 moments, attention by {attention}"
    )
    print(f"{report.environment()}\n{title}", flush=True)
    record = measure(training, args)
    record = {"environment": report.environment(), "title": title, **record}
    record["stack"] = dataclasses.asdict(stack)
    _print(record, training)
    if args.save:
        path = report.save(args.save, record, args.folder)
        report.plot_step(record, path.with_suffix(".png"))
        print(f"kept in {path}")
    for problem in record["disagreements"]:
        print(f"FAILED: {problem}")
    return 1 if record["disagreements"] else 0


def stack_of(args) -> Stack:
    """The stack that the command line asks for; as many layers as fit where it does not say."""
    on_cpu = jax.default_backend() == "cpu"
    if len(args.shape or ()) > 1 or len(args.tokens or ()) > 1:
        raise SystemExit("bench --step measures one shape and one number of tokens at a time.")
    sequence = args.sequence or (64 if on_cpu else 4096)
    tokens = args.tokens[0] if args.tokens else 4 * sequence
    if tokens % sequence:
        raise SystemExit(f"--tokens must be a multiple of the sequence, {sequence}; got {tokens}.")
    ranks = args.ranks or len(jax.devices())
    stack = Stack(shapes_of(args)[0], 1, sequence, tokens // sequence, ranks, dtype_of(args))
    if args.layers:
        return dataclasses.replace(stack, layers=args.layers)
    memory = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    if memory is None:
        return dataclasses.replace(stack, layers=2)
    # Beside the state: eight float32 copies of all rows, as plain JAX may hold them in a layer.
    rows = tokens * stack.shape.top_k * stack.shape.hidden_size * 4 * 8
    layers = int((0.95 * memory - rows) / (stack.layer_bytes() / len(jax.devices())))
    return dataclasses.replace(stack, layers=max(1, min(layers, MAX_LAYERS)))


def attention_implementation(stack: Stack) -> str:
    """cuDNN where it can run this attention, else XLA; says so if a GPU has to do without."""
    if jax.default_backend() != "gpu":
        return "xla"
    heads = lambda n: jnp.ones((1, stack.sequence, n, stack.head_size), stack.dtype)
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
    loss = lambda q, k, v: attend(q, k, v).astype(jnp.float32).sum()
    few = (heads(stack.heads), heads(stack.key_heads), heads(stack.key_heads))
    try:
        jax.block_until_ready(jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*few))
    except Exception as e:
        print(f"attention without cuDNN ({type(e).__name__}: {str(e)[:200]})")
        return "xla"
    return "cudnn"


def measure(training: Training, args) -> dict:
    """Rows of all candidates, what is left of a step without experts, and what does not agree."""
    stack = training.stack
    batch = training.data()
    names = [n for n in args.candidates if n != "torch"]
    names = candidates.expand(names, backward=True)
    steps, rows, histories = {}, {}, {}
    for name, compiled in _compile([*names, WITHOUT], training, batch).items():
        try:
            if isinstance(compiled, Exception):
                raise compiled
            histories[name] = _train(compiled, training, batch)
            jax_mok.check_status()
        except candidates.Unavailable as e:
            rows[name] = {"candidate": name, "why_not": str(e)}
        except Exception as e:  # a rival that fails is a result of the run, not its end
            if candidates.is_ours(name) or name == WITHOUT:
                raise
            rows[name] = {"candidate": name, "why_not": f"{type(e).__name__}: {str(e)[:200]}"}
        else:
            steps[name], facts = compiled, timing.memory_of(compiled)
            rows[name] = {"candidate": name, **facts, "losses": histories[name][0]}
            print(f"{name}: {facts}; losses {histories[name][0]}", flush=True)

    state = training.start()

    def run(step):
        nonlocal state
        state, (loss, _) = step(state, *batch)
        return loss

    runs = {name: functools.partial(run, step) for name, step in steps.items()}
    times = timing.in_turns(runs, (), rounds=args.rounds, seconds=args.seconds)
    jax_mok.check_status()
    if args.trace:
        for name, step_of in runs.items():
            kept = args.trace / re.sub(r"\W+", "_", name).strip("_")
            rows[name]["ms_by_kind"] = breakdown.trace_calls(step_of, kept)
    without = times.pop(WITHOUT).median
    for name, measured in times.items():
        ms = measured.median
        rows[name] |= {
            "ms": ms,
            "spread_ms": measured.spread,
            "rounds": len(measured.rounds),
            "tokens_per_second": stack.tokens * training.mesh.size / ms * 1e3,
            "tflops": stack.flops / ms / 1e9,
            "experts_ms": ms - without,
            "experts_share": 1 - without / ms,
            "peer_heap_bytes": timing.peer_heap_bytes() if candidates.is_ours(name) else None,
        }
    del histories[WITHOUT]
    without_row = rows.pop(WITHOUT)
    stats = jax.devices()[0].memory_stats() or {}
    return {
        "rows": list(rows.values()),
        "without_experts_ms": without,
        "without_experts_ms_by_kind": without_row.get("ms_by_kind"),
        "device_peak_bytes": stats.get("peak_bytes_in_use"),
        "disagreements": disagreements(histories),
    }


def _compile(names, training: Training, batch) -> dict:
    """The compiled step of each candidate, or the exception that it met."""
    state = jax.tree.map(
        lambda a, place: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place),
        jax.eval_shape(training.start),
        training.places,
    )
    setting = candidates.Setting(
        training.mesh, training.stack.shape.num_experts, training.stack.dtype
    )
    found: dict = {}
    for name in names:
        try:
            experts = no_experts if name == WITHOUT else candidates.LAYERS[name](setting)
            found[name] = training.step(experts).lower(state, *batch)
        except Exception as e:
            found[name] = e

    def compile_one(name):
        try:
            found[name] = found[name].compile()
        except Exception as e:
            found[name] = e

    todo = [name for name in names if not isinstance(found[name], Exception)]
    # XLA searches for the fastest products on the GPU: alone, and once for all that candidates have
    # in common. What is left to compile needs no search.
    alone = [name for name in (WITHOUT, "xla") if name in todo]
    for name in alone:
        compile_one(name)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(compile_one, [name for name in todo if name not in alone]))
    return found


def _train(step, training: Training, batch) -> tuple[list[float], list[float]]:
    """(losses, gradient norms) of the first steps."""
    state, losses, norms = training.start(), [], []
    began = time.perf_counter()
    while len(losses) < CHECK_STEPS:
        state, (loss, norm) = step(state, *batch)
        losses.append(float(loss))
        norms.append(float(norm))
        if len(losses) > 1 and time.perf_counter() - began > CHECK_SECONDS:
            break
    return losses, norms


def disagreements(histories: dict[str, tuple[list[float], list[float]]]) -> list[str]:
    """What differs by more than the tolerance: the loss after the last step that both made, and the
    gradient norms of the first step, each against the first candidate."""
    if len(histories) < 2:
        return []
    (reference, (losses, norms)), *others = histories.items()
    found = []
    for name, (its_losses, its_norms) in others:
        last = min(len(losses), len(its_losses)) - 1
        for what, a, b in (
            (f"loss after {last + 1} steps", its_losses[last], losses[last]),
            ("gradient norm", its_norms[0], norms[0]),
        ):
            difference = abs(a - b) / abs(b)
            text = f"{what}: {name} {a:.6g}, {reference} {b:.6g}, relative {difference:.2e}"
            print(text)
            if not difference <= TOLERANCE:
                found.append(text)
    return found


def _print(record, training: Training) -> None:
    ran = [r for r in record["rows"] if "ms" in r]
    others = [r["ms"] for r in ran if not candidates.is_ours(r["candidate"])]
    gigabytes = lambda count: "-" if count is None else f"{count / 1e9:.2f}"
    report.print_table(
        record["title"],
        [
            ("candidate", lambda r: r["candidate"]),
            ("ms/step", lambda r: f"{r['ms']:.2f}"),
            ("min", lambda r: f"{r['spread_ms'][0]:.2f}"),
            ("max", lambda r: f"{r['spread_ms'][1]:.2f}"),
            ("tokens/s", lambda r: f"{r['tokens_per_second']:,.0f}"),
            ("x best other", lambda r: f"{min(others) / r['ms']:.2f}" if others else "-"),
            ("experts", lambda r: f"{r['experts_ms']:.2f} ms, {r['experts_share']:.0%}"),
            ("TFLOP/s", lambda r: f"{r['tflops']:.3g}"),
            ("temp GB", lambda r: gigabytes(r["temp_bytes"])),
            ("peak GB", lambda r: gigabytes(r["peak_bytes"])),
            ("loss", lambda r: f"{r['losses'][-1]:.4f} ({len(r['losses'])})"),
        ],
        record["rows"],
    )
    print(
        f"a step without experts: {record['without_experts_ms']:.2f} ms (their parameters stay in "
        "the optimizer; the column experts is the difference: dispatch, experts and combine, both "
        f"passes); most of XLA's memory in use in the whole run: "
        f"{gigabytes(record['device_peak_bytes'])} GB"
    )
    if by_kind := record["without_experts_ms_by_kind"]:
        breakdown.print_breakdown([*ran, {"candidate": WITHOUT, "ms_by_kind": by_kind}])
