"""Times the backward kernel on one GPU, or checks it at full size:
python tests/gpu/backward_timing.py --help

Like forward_timing.py: whole calls, in turns, in another order every round. Rates count 6 T k H I
floating point operations for a forward and 12 for a backward, whatever is recomputed. The sums at
the end of each table are of one round's times.
"""

import dataclasses

import kernel_library as kl
from forward_timing import (
    MODELS,
    add_matmul,
    fail_on_faults,
    gemm_flops,
    measure,
    parser,
    report,
    variants,
)
from kernel_cases import (
    Problem,
    gradient_name,
    make_inputs,
    reference_gradients,
    relative_l2,
    relative_l2_each,
)

TORCH = "torch._grouped_mm"


def torch_pipeline(torch, problem, inputs):
    """(forward, forward and backward) of sort, gather, grouped GEMMs and scatter-add; autograd."""
    names = "x expert_weights w_gate w_up w_down".split()
    leaves = {name: inputs[name].detach().requires_grad_() for name in names}
    flat = inputs["expert_ids"].reshape(-1).long()
    ones = torch.ones_like(flat)

    def layer(x, expert_weights, w_gate, w_up, w_down):
        order = torch.argsort(flat, stable=True)
        counts = ones.new_zeros(problem.experts).scatter_add_(0, flat, ones)  # bincount would wait
        offsets = counts.cumsum(0).to(torch.int32)
        token = order // problem.top_k
        rows = x.index_select(0, token)
        gate = torch._grouped_mm(rows, w_gate, offs=offsets)
        up = torch._grouped_mm(rows, w_up, offs=offsets)
        hidden = torch.nn.functional.silu(gate) * up
        out = torch._grouped_mm(hidden, w_down, offs=offsets)
        out = out.float() * expert_weights.reshape(-1)[order][:, None]
        y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        return y.index_add(0, token, out).to(x.dtype)

    def forward():
        with torch.no_grad():
            return layer(**leaves)

    def forward_backward():
        return torch.autograd.grad(layer(**leaves), list(leaves.values()), inputs["dy"])

    return forward, forward_backward


def add_torch(torch, problem, inputs, candidates, work):
    """Adds the pipeline if it runs here; says why not otherwise."""
    try:
        forward, both = torch_pipeline(torch, problem, inputs)
        forward()
        both()
        torch.cuda.synchronize()
    except (AttributeError, RuntimeError) as error:  # no such function, not for this GPU, no memory
        print(f"  {TORCH}: not measured: {str(error).splitlines()[0]}", flush=True)
        return
    candidates[f"{TORCH} forward"], work[f"{TORCH} forward"] = forward, 3 * gemm_flops(problem)
    name = f"{TORCH} forward + backward"
    candidates[name], work[name] = both, 9 * gemm_flops(problem)


def time_model(name, args, libraries):
    torch = libraries[0][1].torch
    problem = Problem(args.tokens, *MODELS[name])
    inputs = make_inputs(torch, problem, routing=args.routing)
    print(f"{name}: {problem.tokens} tokens, {args.routing} routing", flush=True)
    candidates, work, calls, sums = {}, {}, {}, {}
    add_matmul(torch, candidates, work)
    storages = {}  # of a library: its calls run one after the other and share their memory
    for label, kernels, settings in libraries:
        storage = storages.setdefault(kernels, kl.Storage(kernels))

        def add(key, call, gemms, label=label):
            key = f"{label} {key}".strip()
            calls[key], work[key] = call, gemms * gemm_flops(problem)
            candidates[key] = call.launch
            return key

        # The call with the largest workspace first: the others then find it large enough.
        recomputed = kl.BackwardCall(kernels, problem, inputs, settings, storage=storage)
        keep = dataclasses.replace(settings, save=True)
        forward_save = kl.Call(kernels, problem, inputs, keep, storage)
        forward_save.launch()  # so that the backward finds residuals
        saved = kl.BackwardCall(kernels, problem, inputs, settings, forward_save, storage)
        plain = dataclasses.replace(settings, save=False)
        f = add("forward", kl.Call(kernels, problem, inputs, plain, storage), 3)
        fs = add("forward, saving", forward_save, 3)
        bs = add("backward, saved", saved, 6)
        br = add("backward, recomputed", recomputed, 6)
        sums[f"{label} forward + backward, saved".strip()] = (fs, bs)
        sums[f"{label} forward + backward, recomputed".strip()] = (f, br)
    if not args.no_torch:
        add_torch(torch, problem, inputs, candidates, work)
    times = measure(torch, candidates, args.rounds)
    fail_on_faults(calls)
    for key, (first, second) in sums.items():
        times[key] = [a + b for a, b in zip(times[first], times[second])]
        work[key] = work[first] + work[second]
    report(times, work)


def part(torch, problem, inputs, tokens=None, experts=None):
    """The layer with some of its tokens, or some of its experts; on one rank."""
    inputs = dict(inputs)
    if tokens is not None:
        for name in ("x", "dy", "expert_ids", "expert_weights"):
            inputs[name] = inputs[name][tokens]
        problem = dataclasses.replace(problem, tokens=len(tokens))
    if experts is not None:
        new_id = torch.full((problem.experts + 1,), -1, device=experts.device, dtype=torch.int32)
        new_id[experts] = torch.arange(len(experts), device=experts.device, dtype=torch.int32)
        inputs["expert_ids"] = new_id[inputs["expert_ids"].long()]  # -1 stays: the last entry
        for name in ("w_gate", "w_up", "w_down"):
            inputs[name] = inputs[name][experts]
        problem = dataclasses.replace(problem, experts=len(experts))
    return problem, inputs


def check_model(name, args, libraries):
    """Prints relative L2 of the gradients of a few tokens and a few experts against float32."""
    torch = libraries[0][1].torch
    problem = Problem(args.tokens, *MODELS[name])
    inputs = make_inputs(torch, problem, routing=args.routing)
    device = inputs["x"].device
    tokens = torch.linspace(0, problem.tokens - 1, min(16, problem.tokens), device=device).long()
    rows = torch.bincount(inputs["expert_ids"].flatten().long(), minlength=problem.experts)
    by_rows = rows.argsort(descending=True, stable=True)
    last = problem.experts - 1  # the farthest in every tensor
    experts = by_rows[[0, problem.experts // 2, last]]
    experts = torch.cat([experts, experts.new_tensor([last])]).unique()
    of_tokens, of_experts = ["x", "expert_weights"], ["w_gate", "w_up", "w_down"]
    want = reference_gradients(torch, *part(torch, problem, inputs, tokens=tokens), of_tokens)
    want |= reference_gradients(torch, *part(torch, problem, inputs, experts=experts), of_experts)
    print(
        f"{name}: {problem.tokens} tokens, {args.routing} routing: {len(tokens)} tokens, experts "
        f"{experts.tolist()} with {rows[experts].tolist()} rows",
        flush=True,
    )
    storages = {}
    for label, kernels, settings in libraries:
        storage = storages.setdefault(kernels, kl.Storage(kernels))
        for save in (False, True):
            forward = None
            if save:
                keep = dataclasses.replace(settings, save=True)
                forward = kl.Call(kernels, problem, inputs, keep, storage)
                forward.run()
            call = kl.BackwardCall(kernels, problem, inputs, settings, forward, storage)
            call.poison()
            call.launch()
            kernels.synchronize()
            errors = [f"faults {call.faults()}"]
            for gradient, chosen, error in (
                *((n, tokens, relative_l2) for n in of_tokens),
                *((n, experts, relative_l2_each) for n in of_experts),
            ):
                gradient = gradient_name(gradient)
                value = error(call.outputs[gradient][chosen], want[gradient])
                errors.append(f"{gradient} {value:.2e}")
            form = "saved" if save else "recomputed"
            print(f"  {f'{label} {form}'.strip()}: {', '.join(errors)}", flush=True)


def main():
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--no-torch", action="store_true", help="without torch's grouped GEMMs")
    options.add_argument(
        "--check", action="store_true", help="compare a few tokens and experts with float32 instead"
    )
    args = options.parse_args()
    libraries = variants(args)
    for name in args.models:
        (check_model if args.check else time_model)(name, args, libraries)
        libraries[0][1].torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
