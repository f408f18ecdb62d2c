"""Blocks of well-known model families, written as each family's own code has them, in float64.

Nothing of jax_mok is in the blocks: they have the families' parameter layouts, and every expert
sees every token. `FAMILIES` names how each is said with `route` and `moe`; outputs and the
gradients of all of the family's parameters must agree.
"""

import functools
import zlib

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_mok

TOKENS, HIDDEN, INTER, EXPERTS = 16, 24, 20, 16
TOLERANCE = 1e-5  # 1e-4 is what is promised


def silu(a):
    return a / (1 + jnp.exp(-a))


def sigmoid(a):
    return 1 / (1 + jnp.exp(-a))


def softmax(a):
    e = jnp.exp(a - a.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def gelu_tanh(a):
    return 0.5 * a * (1 + jnp.tanh((2 / jnp.pi) ** 0.5 * (a + 0.044715 * a**3)))


def top(scores, k):
    """Ids and values of the k largest."""
    ids = jnp.argsort(-scores, axis=-1)[..., :k]
    return ids, jnp.take_along_axis(scores, ids, axis=-1)


def combine(expert_outputs, ids, weights):
    """Σ_k weights[t, k] · expert_outputs[t, ids[t, k]]."""
    chosen = jnp.take_along_axis(expert_outputs, ids[..., None], axis=1)
    return (weights[..., None] * chosen).sum(1)


def linear_experts(x, p, act=silu):
    """Experts with `torch.nn.Linear` weights, [out, in]: down(act(gate(x)) · up(x)); [T, E, H]."""
    gate = jnp.einsum("th,eih->tei", x, p["gate_proj"])
    up = jnp.einsum("th,eih->tei", x, p["up_proj"])
    return jnp.einsum("tei,ehi->teh", act(gate) * up, p["down_proj"])


def linear_mlp(x, p):
    hidden = silu(x @ p["shared_gate_proj"].T) * (x @ p["shared_up_proj"].T)
    return hidden @ p["shared_down_proj"].T


def mixtral(p, x):
    """Softmax over the logits of the chosen two."""
    ids, logits = top(x @ p["router"].T, 2)
    return combine(linear_experts(x, p), ids, softmax(logits))


def qwen3_moe(p, x):
    """Softmax over all experts, the chosen ones' shares made to sum to one (norm_topk_prob)."""
    ids, weights = top(softmax(x @ p["router"].T), 4)
    return combine(linear_experts(x, p), ids, weights / weights.sum(-1, keepdims=True))


def olmoe(p, x):
    """Softmax over all experts, the shares as they are."""
    ids, weights = top(softmax(x @ p["router"].T), 4)
    return combine(linear_experts(x, p), ids, weights)


def qwen2_moe(p, x):
    """As OLMoE, plus a shared expert under a sigmoid gate."""
    ids, weights = top(softmax(x @ p["router"].T), 4)
    gate = sigmoid(x @ p["shared_expert_gate"].T)
    return combine(linear_experts(x, p), ids, weights) + gate * linear_mlp(x, p)


def deepseek_v3(p, x):
    """Sigmoid scores, a correction bias and groups for the choice, scaled shares, shared expert."""
    scores = sigmoid(x @ p["router"].T)
    for_choice = jax.lax.stop_gradient(scores) + BUFFERS["e_score_correction_bias"]
    groups = for_choice.reshape(-1, 4, EXPERTS // 4)
    best_groups, _ = top(top(groups, 2)[1].sum(-1), 2)
    allowed = (best_groups[:, :, None] == jnp.arange(4)).any(1)
    for_choice = jnp.where(allowed[:, :, None], groups, -jnp.inf).reshape(-1, EXPERTS)
    ids, _ = top(for_choice, 4)
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    weights = weights / (weights.sum(-1, keepdims=True) + 1e-20) * 2.5
    return combine(linear_experts(x, p), ids, weights) + linear_mlp(x, p)


def gpt_oss(p, x):
    """Biases everywhere; gate and up interleaved in one matrix, clamped; up has an offset."""
    ids, logits = top(x @ p["router"].T + p["router_bias"], 4)
    both = jnp.einsum("th,ehi->tei", x, p["gate_up_proj"]) + p["gate_up_proj_bias"]
    gate, up = both[..., ::2], both[..., 1::2]
    gate = jnp.where(gate > 7, 7.0, gate)
    up = jnp.where(up > 7, 7.0, jnp.where(up < -7, -7.0, up))
    hidden = (up + 1) * gate * sigmoid(1.702 * gate)
    out = jnp.einsum("tei,eih->teh", hidden, p["down_proj"]) + p["down_proj_bias"]
    return combine(out, ids, softmax(logits))


def grok_1(p, x):
    """GELU (tanh form) in the place of SiLU; softmax over all experts, two chosen."""
    ids, weights = top(softmax(x @ p["router"].T), 2)
    return combine(linear_experts(x, p, gelu_tanh), ids, weights)


def llama_4(p, x, top_k=1):
    """The sigmoid of the logit multiplies the expert's *input*; gate and up are halves of one."""
    ids, logits = top(x @ p["router"].T, top_k)
    y = linear_mlp(x, p)
    for slot in range(top_k):
        scaled = x * sigmoid(logits[:, slot : slot + 1])
        both = jnp.einsum("th,ehi->tei", scaled, p["gate_up_proj"])
        gate, up = both[..., :INTER], both[..., INTER:]
        out = jnp.einsum("tei,eih->teh", up * silu(gate), p["down_proj"])
        y = y + combine(out, ids[:, slot : slot + 1], jnp.ones_like(logits[:, slot : slot + 1]))
    return y


# How each family is said in terms of jax_mok. The transposes are those of loading a checkpoint.


def transposed(p, prefix=""):
    return [jnp.swapaxes(p[f"{prefix}{n}"], -1, -2) for n in ("gate_proj", "up_proj", "down_proj")]


def with_routing(routing, x, weights, **options):
    return jax_mok.moe(x, routing.expert_ids, routing.expert_weights, *weights, **options)


def routed_op(p, x, *, top_k, shared=False, routing=(), **options):
    """The families with `torch.nn.Linear` experts."""
    chosen = jax_mok.route(x @ p["router"].T, top_k=top_k, **dict(routing))
    if shared:
        gate = None
        if "shared_expert_gate" in p:
            gate = jax.nn.sigmoid(x @ p["shared_expert_gate"][0])
        options["shared"] = jax_mok.SharedExpert(*transposed(p, "shared_"), gate)
    return with_routing(chosen, x, transposed(p), **options)


def deepseek_op(p, x, **options):
    routing = dict(
        scoring="sigmoid",
        selection_bias=BUFFERS["e_score_correction_bias"],
        num_groups=4,
        top_k_groups=2,
        scale=2.5,
    )
    return routed_op(p, x, top_k=4, shared=True, routing=routing, **options)


def gpt_oss_op(p, x, **options):
    split = lambda a: (a[..., ::2], a[..., 1::2])
    gate_bias, up_bias = split(p["gate_up_proj_bias"])
    return with_routing(
        jax_mok.route(x @ p["router"].T + p["router_bias"], top_k=4),
        x,
        (*split(p["gate_up_proj"]), p["down_proj"]),
        biases=(gate_bias, up_bias, p["down_proj_bias"]),
        activation=jax_mok.Swiglu(alpha=1.702, limit=7.0, up_offset=1.0),
        **options,
    )


def llama_op(p, x, top_k=1, **options):
    """What multiplies an expert's input is not an expert weight: it goes into x.

    Every slot becomes a token of its own, with one expert of weight 1. The shared expert sees x as
    it is, so it stays outside of the call.
    """
    routing = jax_mok.route(x @ p["router"].T, top_k=top_k, scoring="sigmoid", normalize=False)
    y = jax_mok.moe(
        x[:, None, :] * routing.expert_weights[..., None],
        routing.expert_ids[..., None],
        jnp.ones((*routing.expert_ids.shape, 1)),
        p["gate_up_proj"][..., :INTER],
        p["gate_up_proj"][..., INTER:],
        p["down_proj"],
        **options,
    )
    w_gate, w_up, w_down = transposed(p, "shared_")
    return y.sum(1) + (jax.nn.silu(x @ w_gate) * (x @ w_up)) @ w_down


part = functools.partial
FAMILIES = {
    "Mixtral": (mixtral, part(routed_op, top_k=2)),
    "Qwen3-MoE": (qwen3_moe, part(routed_op, top_k=4)),
    "Qwen2-MoE": (
        qwen2_moe,
        part(routed_op, top_k=4, shared=True, routing=dict(normalize=False)),
    ),
    "OLMoE": (olmoe, part(routed_op, top_k=4, routing=dict(normalize=False))),
    "DeepSeek-V3": (deepseek_v3, deepseek_op),
    "gpt-oss": (gpt_oss, gpt_oss_op),
    "Grok-1": (
        grok_1,
        part(routed_op, top_k=2, routing=dict(normalize=False), activation="geglu"),
    ),
    "Llama-4": (llama_4, llama_op),
    "Llama-4, top-2": (part(llama_4, top_k=2), part(llama_op, top_k=2)),
}

LINEAR = {
    "gate_proj": (EXPERTS, INTER, HIDDEN),
    "up_proj": (EXPERTS, INTER, HIDDEN),
    "down_proj": (EXPERTS, HIDDEN, INTER),
}
FUSED_GATE_UP = {
    "gate_up_proj": (EXPERTS, HIDDEN, 2 * INTER),
    "down_proj": (EXPERTS, INTER, HIDDEN),
}
GPT_OSS = FUSED_GATE_UP | {
    "router_bias": (EXPERTS,),
    "gate_up_proj_bias": (EXPERTS, 2 * INTER),
    "down_proj_bias": (EXPERTS, HIDDEN),
}
SHARED = {
    "shared_gate_proj": (2 * INTER, HIDDEN),
    "shared_up_proj": (2 * INTER, HIDDEN),
    "shared_down_proj": (HIDDEN, 2 * INTER),
}
SHAPES = dict.fromkeys(FAMILIES, LINEAR) | {
    "Qwen2-MoE": LINEAR | SHARED | {"shared_expert_gate": (1, HIDDEN)},
    "DeepSeek-V3": LINEAR | SHARED,
    "gpt-oss": GPT_OSS,
    "Llama-4": FUSED_GATE_UP | SHARED,
    "Llama-4, top-2": FUSED_GATE_UP | SHARED,
}

# What a model keeps beside its trained parameters. Large enough to change many choices.
BUFFERS = {
    "e_score_correction_bias": np.random.default_rng(1).normal(0, 0.1, EXPERTS).astype(np.float32)
}


@functools.cache
def problem(family):
    """(parameters, x, cotangent), float32, and (y, gradients of parameters and x) in float64."""
    rng = np.random.default_rng(zlib.crc32(family.encode()))
    normal = lambda scale, shape: (scale * rng.standard_normal(shape)).astype(np.float32)
    shapes = {"router": (EXPERTS, HIDDEN)} | SHAPES[family]
    # gpt-oss: large enough for its clamps to matter.
    scale = 1.2 if family == "gpt-oss" else 0.4
    p = {name: normal(scale, shape) for name, shape in shapes.items()}
    x, cotangent = normal(1.0, (TOKENS, HIDDEN)), normal(1.0, (TOKENS, HIDDEN))
    with jax.enable_x64(True):
        wide = lambda tree: jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), tree)
        block = jax.jit(functools.partial(pull, FAMILIES[family][0]))
        want = jax.tree.map(np.asarray, block(wide(p), wide(x), wide(cotangent)))
    assert all(a.dtype == np.float64 for a in jax.tree.leaves(want))
    return (p, x, cotangent), want


def pull(block, p, x, cotangent):
    y, vjp = jax.vjp(block, p, x)
    return y, vjp(cotangent)


MESHES = {
    "1 device": ((1,), ("expert",), False),
    "4 devices, permuted": ((4,), ("expert",), True),
    "8 devices, permuted": ((8,), ("expert",), True),
}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_family(family, mesh, implementation):
    arguments, want = problem(family)
    shape, names, permute = MESHES[mesh]
    layer = functools.partial(
        FAMILIES[family][1],
        mesh=cases.mesh(shape, names, permute=permute),
        implementation=implementation,
    )
    cases.assert_close(jax.jit(functools.partial(pull, layer))(*arguments), want, TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_families_use_what_makes_them_special(family):
    """Every parameter matters, the clamps clamp, and the correction bias changes choices."""
    (p, x, _), (_, (grads, dx)) = problem(family)
    for grad in (*grads.values(), dx):
        assert np.linalg.norm(grad) > 0.1
    if family == "gpt-oss":
        both = np.einsum("th,ehi->tei", x, p["gate_up_proj"]) + p["gate_up_proj_bias"]
        assert 0.05 < np.mean(np.abs(both) > 7) < 0.5
    if family == "DeepSeek-V3":
        options = dict(top_k=4, scoring="sigmoid", num_groups=4, top_k_groups=2)
        ids = lambda **o: np.sort(jax_mok.route(x @ p["router"].T, **options | o).expert_ids)
        assert (ids() != ids(selection_bias=BUFFERS["e_score_correction_bias"])).any(
            -1
        ).mean() > 0.2
        ungrouped = ids(num_groups=None, top_k_groups=None)
        assert (ids() != ungrouped).any(-1).mean() > 0.2
