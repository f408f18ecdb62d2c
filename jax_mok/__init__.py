"""Mixture-of-experts layers for JAX: dispatch, experts and combine in one XLA custom call.

    y = jax_mok.moe(x, expert_ids, expert_weights, w_gate, w_up, w_down)

See `moe`. `jax_mok.flax.MoE` and `jax_mok.linen.MoE` are layers made of it. Importing jax_mok
starts no JAX backend and loads no framework.
"""

import pathlib

if not any(any(pathlib.Path(folder).glob("_core.*")) for folder in __path__):
    raise ImportError(
        f"{__path__[0]} is jax_mok's source tree, which Python found before the installed package: "
        "its native module is not there. Run from another folder, or with `python -P` (after "
        "`pip install .`)."
    )

from jax_mok import shapes
from jax_mok._fused import OUTPUT_NAME, RESIDUAL_NAME
from jax_mok.config import Config, SharedExpert, Swiglu
from jax_mok.errors import MokError
from jax_mok.ffi import disabled_safety_checks, register
from jax_mok.moe import moe
from jax_mok.routing import Routing, route, update_selection_bias
from jax_mok.runtime import (
    build_info,
    call_counts,
    check_status,
    implementation_used,
    peer_memory,
    set_num_threads,
    synchronize,
)

__version__ = "0.1.0"

__all__ = [
    "OUTPUT_NAME",
    "RESIDUAL_NAME",
    "Config",
    "MokError",
    "Routing",
    "SharedExpert",
    "Swiglu",
    "build_info",
    "call_counts",
    "check_status",
    "disabled_safety_checks",
    "implementation_used",
    "moe",
    "peer_memory",
    "register",
    "route",
    "set_num_threads",
    "shapes",
    "synchronize",
    "update_selection_bias",
]
