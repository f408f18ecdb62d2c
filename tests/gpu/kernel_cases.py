"""Layers that the kernel tests and timings run: sizes, random inputs, and a float32 oracle.

`torch` is an argument everywhere, since tests are collected where it is not installed. Tensors live
on the GPU if there is one, else on the CPU.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Problem:
    """Sizes and activation of a layer; `tokens` is per rank."""

    tokens: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    ranks: int = 1
    activation: str = "swiglu"
    alpha: float = 1.0
    limit: float = float("inf")
    up_offset: float = 0.0
    biases: bool = False
    shared: int = 0
    shared_gate: bool = False

    @property
    def has_kinks(self):
        """Whether the derivative of the activation jumps somewhere."""
        return self.activation == "reglu" or self.limit < float("inf")


P = Problem
SHAPES = {
    # every minimum
    "least": P(1, 64, 64, 1, 1),
    "one token": P(1, 256, 128, 8, 2),
    "odd tokens": P(321, 256, 192, 8, 3),
    # scaled-down models: hidden, intermediate, experts, top_k in the models' proportions
    "qwen3-30b": P(700, 512, 192, 32, 8),
    "deepseek-v3": P(500, 1792, 512, 64, 8),
    "kimi-k2": P(300, 1792, 512, 96, 8),
    "glm": P(400, 1536, 512, 64, 8),
    "qwen3.5-397b": P(300, 1024, 256, 128, 10),
    "deepseek-v4": P(300, 1792, 768, 96, 6),
    # awkward sizes
    "hidden 2880": P(257, 2880, 2880, 8, 4),
    "hidden 3584": P(130, 3584, 768, 8, 2),
    "hidden 8192": P(140, 8192, 320, 6, 2),
    "hidden 8256": P(140, 8256, 64, 6, 2),  # more pieces of a row than a warp has buffers
    "hidden 18432, 2 ranks": P(70, 18432, 64, 6, 2, ranks=2),
    "intermediate 1408": P(300, 2048, 1408, 16, 6),
    "top-16": P(128, 512, 256, 40, 16),
    "top-k all": P(99, 128, 64, 32, 32),
    "512 experts": P(512, 256, 128, 512, 8),
    "one expert": P(1000, 512, 256, 1, 1),
    # several ranks
    "2 ranks": P(333, 512, 256, 16, 4, ranks=2),
    "4 ranks": P(257, 1024, 448, 16, 4, ranks=4),
    "8 ranks": P(65, 512, 256, 32, 8, ranks=8),
    "72 ranks": P(33, 256, 128, 144, 6, ranks=72),
    "72 ranks, 1 token": P(1, 128, 64, 72, 4, ranks=72),
}
ROUTINGS = ["uniform", "zipf", "one_rank", "one_expert", "some_empty"]
ACTIVATIONS = [
    dict(activation="swiglu"),
    dict(activation="swiglu", alpha=1.702),  # alpha alone
    dict(activation="swiglu", alpha=1.702, limit=0.7, up_offset=1.0),
    dict(activation="geglu"),
    dict(activation="reglu"),
    dict(activation="reglu", limit=0.5),
]


def make_inputs(torch, problem, routing="uniform", unused=0.0, seed=0):
    """Random tensors of a layer, `dy` (the cotangent of y) among them.

    `routing` is one of ROUTINGS, `unused` the share of slots without an expert.
    """
    p = problem
    device = "cuda" if torch.cuda.is_available() else "cpu"
    gen = torch.Generator(device=device).manual_seed(seed)
    tokens = p.ranks * p.tokens

    def normal(*shape, scale=1.0, dtype=torch.bfloat16):
        return torch.randn(shape, generator=gen, device=device, dtype=dtype).mul_(scale)

    popularity = torch.zeros(p.experts, device=device)
    if routing == "zipf":
        popularity -= torch.log(torch.arange(1, p.experts + 1, device=device).float()) * 1.5
    elif routing == "one_rank":
        popularity[p.experts // p.ranks :] = -1e4
    elif routing == "one_expert":
        popularity[p.experts // 2] = 1e4
    elif routing == "some_empty":
        popularity[1::2] = -1e4
    elif routing != "uniform":
        raise ValueError(f"routing is {routing!r}; allowed: {ROUTINGS}")
    noise = torch.rand(tokens, p.experts, generator=gen, device=device).clamp(1e-6, 1 - 1e-6)
    scores = popularity - torch.log(-torch.log(noise))
    ids = scores.topk(p.top_k, dim=1).indices.int()
    if unused > 0:
        ids[torch.rand(ids.shape, generator=gen, device=device) < unused] = -1
    weights = torch.rand(ids.shape, generator=gen, device=device) + 0.1
    weights /= weights.sum(1, keepdim=True)
    e, h, i, s = p.experts, p.hidden, p.intermediate, p.shared
    inputs = dict(
        x=normal(tokens, h),
        expert_ids=ids.contiguous(),
        expert_weights=weights.contiguous(),
        w_gate=normal(e, h, i, scale=h**-0.5),
        w_up=normal(e, h, i, scale=h**-0.5),
        w_down=normal(e, i, h, scale=i**-0.5),
    )
    if p.biases:
        inputs |= dict(b_gate=normal(e, i), b_up=normal(e, i), b_down=normal(e, h))
    if p.shared:
        inputs |= dict(
            s_gate=normal(h, s, scale=h**-0.5),
            s_up=normal(h, s, scale=h**-0.5),
            s_down=normal(s, h, scale=s**-0.5),
        )
    if p.shared_gate:
        inputs |= dict(s_scale=normal(tokens, dtype=torch.float32))
    inputs["dy"] = normal(tokens, h)
    return inputs


def _round(t):
    """The nearest bf16, with the gradient of t."""
    return t + (t.detach().bfloat16().float() - t.detach())


def reference(torch, problem, inputs, round_gate_up=False):
    """The layer in float32, expert by expert; shared experts may have one weight per rank.

    `round_gate_up`: the activation sees gate and up as bf16, as a backward does that keeps them.
    """
    p = problem
    torch.backends.cuda.matmul.allow_tf32 = False
    x = inputs["x"].float()
    y = torch.zeros_like(x)

    def act(g, u):
        if round_gate_up:
            g, u = _round(g), _round(u)
        g = torch.where(g > p.limit, torch.full_like(g, p.limit), g)
        u = u.clamp(-p.limit, p.limit)
        if p.activation == "swiglu":
            a = g * torch.sigmoid(p.alpha * g)
        elif p.activation == "geglu":
            a = torch.nn.functional.gelu(g, approximate="tanh")
        else:
            a = torch.relu(g)
        return a * (u + p.up_offset)

    # unbind: autograd then stacks the experts' gradients once
    of_experts = {name: t.unbind(0) for name, t in inputs.items() if name[:2] in ("w_", "b_")}

    def of_expert(name, e):
        return of_experts[name][e].float()

    for e in range(p.experts):
        token, slot = (inputs["expert_ids"] == e).nonzero(as_tuple=True)
        if len(token) == 0:
            continue
        rows = x[token]
        g, u = rows @ of_expert("w_gate", e), rows @ of_expert("w_up", e)
        if p.biases:
            g, u = g + of_expert("b_gate", e), u + of_expert("b_up", e)
        out = act(g, u) @ of_expert("w_down", e)
        if p.biases:
            out = out + of_expert("b_down", e)
        y.index_add_(0, token, out * inputs["expert_weights"][token, slot][:, None])
    if p.shared:
        rows = x.view(p.ranks, p.tokens, p.hidden)
        out = act(rows @ inputs["s_gate"].float(), rows @ inputs["s_up"].float())
        out = (out @ inputs["s_down"].float()).view_as(x)
        y = y + out * (inputs["s_scale"][:, None] if p.shared_gate else 1.0)
    return y


GRADIENTS = (
    "x expert_weights w_gate w_up w_down b_gate b_up b_down s_gate s_up s_down s_scale".split()
)


def gradient_name(name):
    """x -> dx, w_gate -> dw_gate, ...; as in csrc/cuda/backward.h."""
    return "d_" + name if name == "expert_weights" else "d" + name


def reference_gradients(torch, problem, inputs, wanted=GRADIENTS):
    """{gradient's name: float32} of <dy, y> by autograd through `reference`.

    Gradients of the shared experts are per rank: [ranks, H, S], [ranks, S, H]. Where the derivative
    of the activation jumps, what decides is the bf16 value of gate and up: the backward may find
    them saved as such, and both of its forms give the same bits.
    """
    p = problem
    leaves = {}
    for name in wanted:
        if name not in inputs:
            continue
        t = inputs[name].detach().float()
        if name in ("s_gate", "s_up", "s_down"):
            t = t.expand(p.ranks, *t.shape)
        leaves[name] = t.clone().requires_grad_()
    y = reference(torch, p, inputs | leaves, round_gate_up=p.has_kinks)
    if not y.requires_grad:  # no slot is used
        return {gradient_name(name): torch.zeros_like(t) for name, t in leaves.items()}
    gradients = torch.autograd.grad(
        y, list(leaves.values()), inputs["dy"].float(), allow_unused=True, materialize_grads=True
    )
    return {gradient_name(name): g for name, g in zip(leaves, gradients)}


def relative_l2(got, want):
    got, want = got.float(), want.float()
    return float((got - want).norm() / want.norm().clamp_min(1e-30))


def relative_l2_each(got, want):
    """The largest over the entries of the first dimension; NaN if one of them is."""
    if len(want) == 0:
        return 0.0
    difference = (got.float() - want.float()).flatten(1).norm(dim=1)
    return float((difference / want.float().flatten(1).norm(dim=1).clamp_min(1e-30)).max())
