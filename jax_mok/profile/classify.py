"""What a kernel does, and whether it belongs to an MoE layer: from its HLO, its op name (which
holds JAX's name scopes) and, where there is neither, from the kernel's own name.
"""

import dataclasses
import re

from jax_mok.profile import origin
from jax_mok.profile.hlo import Instruction
from jax_mok.profile.trace import Device, Kernel

# Kinds, those that hide others first: an instant at which kernels of several kinds run counts
# for the first of them. So communication counts only where nothing else runs.
EXPERTS = "expert GEMMs"
JAX_MOK = "jax_mok"
GEMM = "other GEMMs, attention"
OTHER = "other compute"
SORT = "sorts"
GATHER = "gathers, scatters"
COPY = "copies"
COMMUNICATION = "communication"
KINDS = (EXPERTS, JAX_MOK, GEMM, OTHER, SORT, GATHER, COPY, COMMUNICATION)

# Why a kernel counts as part of MoE dispatch or combine.
BY_SCOPE = "scope"  # an op name of its lies in a MoE scope
BY_NAME = "name"  # only what kind of op or kernel it is says so
ALL_REDUCE = "all-reduce"  # in a MoE scope, but it may as well sum gradients

MOE_SCOPE = r"moe|expert|megablox|mixture|ragged_all_to_all"
# Parts of a model that may lie in a scope like "MoETransformer" and are no MoE layer; and the
# router, which stays when jax_mok comes.
_NOT_MOE = re.compile(
    r"attn|attention|embed|lm_?head|logits|loss|rotary|rope|router|gating|top_?k",
    re.IGNORECASE,
)

_COLLECTIVE = re.compile(
    r"^(ragged-all-to-all|all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute|"
    r"collective-broadcast|send|recv)(?![a-z])"
)
_COMMUNICATION_KERNEL = re.compile(
    r"nccl|nvshmem|(deep|hybrid)_?ep(?![a-z])|all_?to_?all|all_?gather|all_?reduce|reduce_?scatter|"
    r"collective_?permute|MemcpyP2P|MultiGpuBarrier",
    re.IGNORECASE,
)
_COLLECTIVES_OF_KERNELS = {
    "ragged_?all_?to_?all": "ragged-all-to-all",
    "all_?to_?all": "all-to-all",
    "all_?gather": "all-gather",
    "reduce_?scatter": "reduce-scatter",
    "all_?reduce": "all-reduce",
    "send_?recv|p2p|permute": "send-recv",
}
_DISPATCH_OP = re.compile(r"all-to-all|(deep|hybrid)_?ep", re.IGNORECASE)
_GROUPED = re.compile(
    r"ragged[_-]?(\w+_)?dot|grouped[_-]?(gemm|matmul|mm|dot)|GroupProblemShape|"
    r"(?<![a-z])t?gmm(?![a-z])|moe_?gemm|megablox",
    re.IGNORECASE,
)
_GEMM_TARGET = re.compile(r"cublas|cudnn\$(?!fmha|norm)|gemm|matmul", re.IGNORECASE)
_ATTENTION = re.compile(r"fmha|flash|attention|attn|splash|cudnn.*sdpa", re.IGNORECASE)
_GEMM_KERNEL = re.compile(
    r"gemm|gemv|nvjet|cublas|cutlass|xmma|wgmma|matmul|split_?k|dot_general|\bdot\b|convolution",
    re.IGNORECASE,
)
_SORT = re.compile(r"sort|top_?k|select_k", re.IGNORECASE)
_GATHER = re.compile(r"gather|scatter|take_along", re.IGNORECASE)
_MEMORY = re.compile(r"^(memcpy|memset)", re.IGNORECASE)
_COPY = re.compile(r"copy|transpose|concatenate|(?<![a-z])pad(?![a-z])", re.IGNORECASE)


@dataclasses.dataclass(frozen=True, slots=True)
class Label:
    """What a kernel is.

    kind: one of KINDS.
    moe: why it counts as MoE dispatch or combine (BY_SCOPE, BY_NAME, ALL_REDUCE); None if it does
      not, and for kinds that jax_mok does not take away.
    op: what it runs, for tables.
    scope: the op name up to the MoE scope, else the whole of it; "" if there is none.
    inside: whether that is a MoE scope.
    known: whether an op of the HLO stands behind it (or it copies), or only the kernel's name.
    """

    kind: str
    moe: str | None
    op: str
    scope: str
    inside: bool
    known: bool


class Classifier:
    """Labels kernels. `experts`: a regular expression that names more MoE scopes or kernels."""

    def __init__(self, experts: str | None = None):
        self._user = None if experts is None else re.compile(experts)
        pattern = MOE_SCOPE if experts is None else f"{MOE_SCOPE}|(?:{experts})"
        self._moe = re.compile(pattern, re.IGNORECASE)

    def label(self, kernel: Kernel, instruction: Instruction | None) -> Label:
        """`instruction`: where the kernel comes from, if that is known."""
        return self._classify(kernel.name, kernel.hlo_op, kernel.op_name, instruction)

    def labels(self, device: Device) -> list[Label]:
        """Of all kernels of a device, in their order."""
        known: dict[tuple, Label] = {}  # the same kernel runs in every step: look at it once
        found = []
        for kernel, instruction in zip(
            device.kernels, origin.origins(device.kernels, device.programs)
        ):
            name = instruction.name if instruction else ""
            key = (kernel.program_id, kernel.hlo_op, kernel.name, kernel.op_name, name)
            if key not in known:
                known[key] = self.label(kernel, instruction)
            found.append(known[key])
        return found

    def _scope(self, op_name: str) -> str | None:
        """The op name up to the end of its MoE scope, or None if it is in none."""
        # The first part names the jitted function, and a whole step may be called moe_step.
        first = re.match(r"jit\([^)]*\)/?", op_name)
        rest = op_name[first.end() :] if first else op_name
        found = self._moe.search(rest)
        if found is None or _NOT_MOE.search(rest, found.end()):
            return None
        return rest[: found.end()] + rest[found.end() :].split("/")[0]

    def _classify(
        self, name: str, hlo_op: str, annotated: str, instruction: Instruction | None
    ) -> Label:
        parts = instruction.parts if instruction else ()
        whole = instruction.op_name if instruction else ""
        op_names = [n for n in dict.fromkeys((annotated, whole)) if n]
        kind, own = self._kind(name, hlo_op, op_names, instruction)
        # Op names of the parts that make the kind come first: a gather that was fused into
        # something else keeps its own scope.
        op_names = [n for n in dict.fromkeys((*own, *op_names)) if n]
        scope = next((s for s in map(self._scope, op_names) if s is not None), None)
        named = self._user is not None and any(map(self._user.search, (name, hlo_op)))
        if kind == GEMM and (scope is not None or named) and not _ATTENTION.search(name):
            kind = EXPERTS
        own_name = hlo_op or (instruction.name if instruction else name)
        op = re.sub(r"(\.\d+|_\d+)+$", "", own_name)
        if kind == COMMUNICATION:
            op = _collective(name, hlo_op, parts)
        known = bool(hlo_op) or instruction is not None or kind == COPY
        moe = _moe(kind, op, scope, named, bool(op_names))
        shown = scope or next(iter(op_names), "")
        return Label(kind, moe, op, shown, scope is not None, known)

    def _kind(self, name, hlo_op, op_names, instruction) -> tuple[str, list[str]]:
        """The kind, and op names of the parts of a fusion that make it so."""
        parts = instruction.parts if instruction else ()
        target = instruction.target if instruction else ""
        with_opcode = lambda *opcodes: [n for opcode, n in parts if opcode in opcodes]
        last = " ".join(n.rsplit("/", 1)[-1] for n in op_names)
        texts = (name, hlo_op, target)

        if "jax_mok" in name or target.startswith("jax_mok_"):
            return JAX_MOK, []
        if any(_COLLECTIVE.match(opcode) for opcode, _ in parts) or _COLLECTIVE.match(hlo_op):
            return COMMUNICATION, [n for opcode, n in parts if _COLLECTIVE.match(opcode)]
        if not parts and _COMMUNICATION_KERNEL.search(name):
            return COMMUNICATION, []
        if re.match(r"nccl|nvshmem|MemcpyP2P", name, re.IGNORECASE):
            return COMMUNICATION, []
        if _MEMORY.match(name):
            return COPY, []
        if any(map(_GROUPED.search, (*texts, last))):
            return EXPERTS, []
        if dots := with_opcode("dot", "ragged-dot", "scaled-dot", "convolution"):
            return GEMM, dots
        if _GEMM_TARGET.search(target) or any(map(_ATTENTION.search, texts)):
            return GEMM, []
        if scatters := with_opcode("scatter", "gather"):
            return GATHER, scatters
        if sorts := with_opcode("sort", "topk"):
            return SORT, sorts
        # Without HLO, or a custom call: names have to do.
        if not parts or instruction.opcode == "custom-call":
            names = (*texts, last)
            if any(map(_GEMM_KERNEL.search, names)):
                return GEMM, []
            if any(map(_SORT.search, names)):
                return SORT, []
            if any(map(_GATHER.search, names)):
                return GATHER, []
        if any(map(_COPY.search, texts)) or (with_opcode("copy", "transpose") and len(parts) == 1):
            return COPY, []
        return OTHER, []


def _moe(kind: str, op: str, scope: str | None, named: bool, annotated: bool) -> str | None:
    """Why a kernel counts as MoE dispatch or combine, or None."""
    if kind == COMMUNICATION:
        if scope is not None:
            return ALL_REDUCE if op == "all-reduce" else BY_SCOPE
        # All-to-alls are rarely anything else. Sends may be, but where nothing else is known...
        suspect = _DISPATCH_OP.search(op) or (op == "send-recv" and not annotated)
        return BY_NAME if named or suspect else None
    if kind in (SORT, GATHER):
        if scope is not None:
            return BY_SCOPE
        return BY_NAME if named or (not annotated and not _NOT_MOE.search(op)) else None
    return None


def _collective(name: str, hlo_op: str, parts: tuple[tuple[str, str], ...]) -> str:
    """Which collective a kernel carries out, by HLO's name for it; else the kernel's name."""
    for opcode in (*(opcode for opcode, _ in parts), hlo_op):
        if found := _COLLECTIVE.match(opcode):
            return found[1]
    for pattern, op in _COLLECTIVES_OF_KERNELS.items():
        if re.search(pattern, name, re.IGNORECASE):
            return op
    return name
