"""What runs, how often, and whether it went well: the choice of implementation, counters, the CPU
engine's threads, failures on GPUs.
"""

import logging
from typing import Any

import jax

from jax_mok import _core, _cuda, _topology

logger = logging.getLogger("jax_mok")

IMPLEMENTATIONS = ("fused", "xla")

# Platforms for which this build has a fused implementation.
FUSED_PLATFORMS = ("cpu",) if _cuda.core is None else ("cpu", "gpu")


def choose(
    implementation: str | None,
    topology: _topology.Topology,
    dtype: Any = None,
    top_k: int | None = None,
) -> tuple[str, str]:
    """(implementation, reason) for a call on `topology`; raises where the wish cannot be met.

    `dtype` of x and `top_k`: None = not known, then they do not count.
    """
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(f'implementation must be None, "fused" or "xla", got {implementation!r}.')
    if implementation == "xla":
        return "xla", "asked for"
    platform = topology.platform
    if _cuda.handles(topology):
        why = _cuda.why_not(topology, dtype=dtype, top_k=top_k)
        if not why:
            return "fused", "asked for" if implementation else "the GPUs can run it"
    elif platform not in FUSED_PLATFORMS:
        why = f"there is no fused implementation for platform {platform!r} in this build"
    elif topology.experts_in_one_process() is False:
        why = "the ranks of the expert axis lie in several processes"
    elif topology.experts_in_one_process() is None and implementation is None:
        why = (
            "there are several processes and no mesh with devices in sight to tell whether the "
            "ranks of the expert axis share one"
        )
    else:
        asked = (
            "asked for" if implementation else "all ranks of the expert axis are in this process"
        )
        return "fused", asked
    if implementation == "fused":
        raise ValueError(f'implementation="fused" is not possible: {why}. Use "xla" or None.')
    return "xla", why


def implementation_used(
    *arrays: Any, mesh: Any = None, expert_axis: Any = "expert", implementation: str | None = None
) -> str:
    """The implementation that `moe` takes for a call in this place: "fused" or "xla".

    Args:
      *arrays: arguments of the call, in its order; they matter where neither `mesh` nor a
        surrounding mesh context says on which devices it runs, and on GPUs, whose kernels take x in
        bfloat16 only.
      mesh, expert_axis, implementation: as for `moe`.

    `moe` also logs what it picks, and why, at level INFO of the logger "jax_mok", once a trace.
    """
    dtype = arrays[0].dtype if arrays else None
    top_k = arrays[1].shape[-1] if len(arrays) > 1 else None
    return choose(implementation, _topology.find(mesh, expert_axis, arrays), dtype, top_k)[0]


def check_status() -> None:
    """Raises `MokError` if a call on a GPU of this process has failed since this was last asked.

    It looks at calls that have finished and waits for none: see `synchronize`. Such a call made its
    results NaN: y, or all gradients of its rank. The calls after it work. The message names the
    rank, the phase, and what was waited for, or the wrong expert id.
    """
    _cuda.check_status()


def synchronize(tree: Any = None) -> Any:
    """Waits for the arrays of `tree` as `jax.block_until_ready` does, then `check_status`.

    Returns `tree`. Raises `MokError` if a call that it depends on (or another) failed on a GPU.
    """
    tree = jax.block_until_ready(tree)
    check_status()
    return tree


def peer_memory() -> list[dict[str, int]]:
    """Memory that GPUs of this process hold for their peers to read and write, outside XLA's pool.

    One dict for each heap: {"device", "rank", "num_ranks", "bytes", "used_bytes", "calls",
    "named_calls"}, the last one: whether ranks tell calls apart by XLA's id of the run. All
    layers of a device and expert group share one. It is as large as the largest call needed; a
    larger call makes a new one, and the old one stays for programs that have its address.
    """
    return _cuda.heaps()


def set_num_threads(num_threads: int) -> None:
    """Threads that the CPU engine computes with, from the next call on; 0 = one for each core.

    The environment variable JAX_MOK_NUM_THREADS gives the initial value. Results do not depend on
    it, to the bit.
    """
    if isinstance(num_threads, bool) or not isinstance(num_threads, int) or num_threads < 0:
        raise ValueError(f"num_threads must be an int >= 0, got {num_threads!r}.")
    _core.set_num_threads(min(num_threads, 2**31 - 1))  # the engine has a bound of its own


def call_counts() -> dict[str, int]:
    """How often the custom calls of this process ran, one count for each device and call.

    {"forward": …, "backward": …}: to see, for instance, how often a remat policy repeats a layer.
    Wait for the results (`jax.block_until_ready`) before you read it.
    """
    gpu = _cuda.call_counts()
    return {
        "forward": _core.forward_calls() + gpu["forward"],
        "backward": _core.backward_calls() + gpu["backward"],
    }


def build_info() -> dict[str, Any]:
    """Facts of this installation: versions, and the platforms it has fused kernels for."""
    return {
        "jax": jax.__version__,
        "built_with_jaxlib": _core.built_with_jaxlib,
        "fused_platforms": list(FUSED_PLATFORMS),
        "why_no_cuda": _cuda.WHY_NO_CUDA,
    }
