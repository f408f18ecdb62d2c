"""The lower layer: what `moe` is made of, for those who look inside or build their own.

`schedule` is the plan that a call makes of its expert ids, as NumPy arrays. The CPU engine and the
GPU kernels use the same code for it. `forward` and `backward` are the two custom calls of the CPU
engine on one rank's arrays, without autodiff around them.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jax_mok import _core, ffi
from jax_mok.config import Config, SharedExpert
from jax_mok.moe import check_ids_fit, rank_call

SourceOrder = Literal["interleaved", "sequential"]

# Values of the first column of `Schedule.tiles` and `Schedule.backward_tiles`.
GATE_UP, DOWN, GRAD_HIDDEN, GRAD_INPUT, GRAD_WEIGHT = range(5)

_INT32 = np.iinfo(np.int32)


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """What one rank does with the rows routed to it, in which order. Made by `schedule`.

    A *row* is one token for one expert; rows of an expert follow each other and are padded to whole
    *blocks*; experts without rows have none. A *group* is a run of blocks that the expert GEMM gets
    together (minibatch), a *macrobatch* a run of blocks that the ring buffers hold at once,
    whatever their experts; a *segment* is the part of an expert inside one macrobatch. All arrays
    are int32 and read-only; L is the number of experts of a rank, B of its blocks.

    Attributes:
      num_experts: experts of all ranks.
      rank: whose schedule this is: it has the experts from rank · L to (rank + 1) · L - 1. Experts
        are counted from 0 within the rank below.
      block_rows: rows of a block.
      macrobatch_blocks: blocks of a macrobatch (the last one may have fewer).
      counts: [num_ranks, L], rows that each rank sends to each expert.
      expert_rows: [L], rows of each expert, without padding.
      expert_first_block: [L + 1], an expert's blocks are those from its entry to the next.
      block_expert: [B], expert of each block.
      rows: [B · block_rows, 3], (rank, token, slot) that a row comes from and that its result goes
        back to; (-1, -1, -1) is padding.
      first_use: [B · block_rows], the first row of the same macrobatch that holds the same token
        of the same rank, or -1 if this is the first, or padding: rows with -1 have to be fetched.
      groups: [G, 3], (first block, number of blocks, expert), in ascending order.
      segments: [S, 3], the same for segments.
      tiles: [N, 3], (phase, block, n) in the order of the forward pass: for each macrobatch all
        `GATE_UP` tiles, then all `DOWN` tiles; inside a group the block runs fastest. (On GPUs the
        two take turns after a while; no bit depends on it.)
      backward_tiles: the same for the backward pass, which goes from the last block to the first:
        for each macrobatch `GRAD_HIDDEN`, `GRAD_INPUT`, then one `GRAD_WEIGHT` tile per segment,
        named by its last block, which adds up the segment's blocks in descending order.
    """

    num_experts: int
    rank: int
    block_rows: int
    macrobatch_blocks: int
    counts: np.ndarray
    expert_rows: np.ndarray
    expert_first_block: np.ndarray
    block_expert: np.ndarray
    rows: np.ndarray
    first_use: np.ndarray
    groups: np.ndarray
    segments: np.ndarray
    tiles: np.ndarray
    backward_tiles: np.ndarray

    @property
    def num_blocks(self) -> int:
        return len(self.block_expert)

    @property
    def num_macrobatches(self) -> int:
        return -(-self.num_blocks // self.macrobatch_blocks)


def schedule(
    expert_ids: Any,
    *,
    num_experts: int,
    rank: int = 0,
    block_rows: int = 128,
    minibatch_size: int | None = None,
    macrobatch_size: int | None = None,
    source_order: SourceOrder = "interleaved",
    tiles_per_block: tuple[int, int] = (1, 1),
) -> Schedule:
    """The plan of one rank, computed on the host.

    Args:
      expert_ids: integers [num_ranks, T, k], or [T, k] for one rank: the experts of each token of
        each rank; -1 = slot unused; distinct within a token. T may be 0.
      num_experts: experts of all ranks, a multiple of num_ranks; each rank has a run of them.
      rank: whose plan to make.
      block_rows: rows of a block: 128 on a GPU, 64 in the CPU engine.
      minibatch_size: most rows of a group, rounded up to whole blocks and at most a macrobatch;
        None = 8 blocks.
      macrobatch_size: rows of a macrobatch, rounded up to whole blocks; None = all in one.
      source_order: order of an expert's rows. "interleaved": one row of each rank in turn, so that
        all links are busy (GPU); "sequential": by (rank, token, slot), so that sums over an
        expert's rows do not depend on how many ranks there are (CPU).
      tiles_per_block: tiles that a block's gate and up projection and its down projection are cut
        into.

    Returns:
      A `Schedule`.

    Raises:
      ValueError: an argument out of its range, ids out of range or repeated within a token (the
        message tells which), or more rows or tiles than int32 can count.
      TypeError: expert_ids are not integers, or a size is not an int.

    Example:
      >>> jax_mok.ops.schedule([[0, 2], [2, -1]], num_experts=3, block_rows=2).expert_rows
      array([1, 0, 2], dtype=int32)
    """
    ids = _ids(expert_ids)
    num_experts = _size("num_experts", num_experts, 1)
    rank = _size("rank", rank, 0)
    block_rows = _size("block_rows", block_rows, 1)
    gate_up_tiles, down_tiles = (
        _size(f"tiles_per_block[{i}]", n, 1) for i, n in enumerate(tiles_per_block)
    )
    if source_order not in ("interleaved", "sequential"):
        raise ValueError(
            f"source_order must be 'interleaved' or 'sequential', got {source_order!r}."
        )
    num_ranks = ids.shape[0]
    if num_ranks == 0 or ids.shape[2] == 0:
        raise ValueError(
            f"expert_ids must have at least one rank and one slot per token, got shape {ids.shape}."
        )
    if num_experts % num_ranks:
        raise ValueError(
            f"num_experts must be a multiple of the number of ranks, {num_ranks}, "
            f"got {num_experts}."
        )
    if rank >= num_ranks:
        raise ValueError(f"rank must be in [0, {num_ranks - 1}], got {rank}.")

    if macrobatch_size is None:  # every expert may need one padded block
        rows = ids.size // block_rows + num_experts // num_ranks
        macrobatch_blocks = max(1, min(rows, _INT32.max))
    else:
        macrobatch_blocks = -(-_size("macrobatch_size", macrobatch_size, 1) // block_rows)
    group_blocks = (
        8
        if minibatch_size is None
        else -(-_size("minibatch_size", minibatch_size, 1) // block_rows)
    )
    arrays = _core.plan_build(
        ids,
        num_experts=num_experts,
        rank=rank,
        block_rows=block_rows,
        group_blocks=min(group_blocks, macrobatch_blocks),
        macrobatch_blocks=macrobatch_blocks,
        gate_up_tiles=gate_up_tiles,
        down_tiles=down_tiles,
        grad_weight_tiles=1,
        interleaved=source_order == "interleaved",
    )
    arrays["counts"] = arrays["counts"].reshape(num_ranks, num_experts // num_ranks)
    return Schedule(
        num_experts=num_experts,
        rank=rank,
        block_rows=block_rows,
        macrobatch_blocks=macrobatch_blocks,
        **arrays,
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gradients:
    """Gradients of the arguments of `forward`; None where the argument was None.

    Those of weights that every rank holds (`shared`, or all of them on a mesh with further axes)
    are this rank's part of the sum.
    """

    x: jax.Array
    expert_weights: jax.Array
    w_gate: jax.Array
    w_up: jax.Array
    w_down: jax.Array
    biases: tuple[jax.Array, jax.Array, jax.Array] | None
    shared: SharedExpert | None


def forward(
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
    *,
    biases: tuple[jax.Array, jax.Array, jax.Array] | None = None,
    shared: SharedExpert | None = None,
    activation: Any = "swiglu",
    expert_axis: str | tuple[str, ...] | None = None,
    config: Config | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """The forward custom call on one rank's arrays (CPU engine).

    Args:
      x: [T, H]; the others as for `jax_mok.moe`, all local to the rank.
      expert_axis: None on one device; inside a `shard_map` in which all mesh axes are manual, the
        axis over which the experts are sharded.
      config: `residuals="save"` (the default) asks for what `backward` can use.

    Returns:
      (y [T, H], saved): saved is float32 [macrobatch rows, 2I], the gate and up projections of the
      last macrobatch, or None with `residuals="recompute"`.
    """
    args = (x, expert_ids, expert_weights, w_gate, w_up, w_down, biases, shared)
    spec, topology, ids, operands = rank_call(args, activation, expert_axis, config)
    save = spec.residuals == "save"
    y, saved = ffi.forward(spec, topology, ids, operands, save=save)
    return y, saved if save else None


def backward(
    dy: jax.Array,
    saved: jax.Array | None,
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
    *,
    biases: tuple[jax.Array, jax.Array, jax.Array] | None = None,
    shared: SharedExpert | None = None,
    activation: Any = "swiglu",
    expert_axis: str | tuple[str, ...] | None = None,
    config: Config | None = None,
    weight_grad_dtype: Any = None,
) -> Gradients:
    """The backward custom call on one rank's arrays (CPU engine).

    Args:
      dy: [T, H], dtype of x.
      saved: what `forward` returned with the same `config`, or None: everything is computed again,
        to the same bits.
      weight_grad_dtype: of the gradients of w_gate, w_up, w_down: None = that of x, or float32, in
        which they are summed.
      The others as for `forward`.
    """
    args = (x, expert_ids, expert_weights, w_gate, w_up, w_down, biases, shared)
    spec, topology, ids, operands = rank_call(args, activation, expert_axis, config)
    if dy.shape != operands.x.shape or dy.dtype != operands.x.dtype:
        raise ValueError(
            f"dy must be {operands.x.dtype.name} {operands.x.shape} as x, "
            f"got {dy.dtype.name} {dy.shape}."
        )
    rows = (spec.macrobatch_rows, 2 * w_gate.shape[-1])
    if saved is not None and saved.shape != rows:
        raise ValueError(
            f"saved must have shape {rows} (the same config as forward's), got {saved.shape}."
        )
    dtype = jnp.dtype(weight_grad_dtype or operands.x.dtype)
    if dtype not in (operands.x.dtype, jnp.float32):
        raise ValueError(f"weight_grad_dtype must be None or float32, got {dtype.name}.")
    grads = ffi.backward(spec, topology, dy, ids, operands, saved, weight_grad_dtype=dtype)
    return Gradients(
        grads.x,
        grads.expert_weights,
        grads.w_gate,
        grads.w_up,
        grads.w_down,
        grads.biases,
        None if shared is None else SharedExpert(*grads.shared, grads.shared_gate),
    )


def _ids(expert_ids: Any) -> np.ndarray:
    """`expert_ids` as contiguous int32 [num_ranks, T, k]."""
    ids = np.asarray(expert_ids)
    if not np.issubdtype(ids.dtype, np.integer):
        raise TypeError(f"expert_ids must be integers, got dtype {ids.dtype.name}.")
    if ids.ndim == 2:
        ids = ids[None]
    if ids.ndim != 3:
        raise ValueError(
            f"expert_ids must have shape [num_ranks, T, k] or [T, k], got {np.shape(expert_ids)}."
        )
    check_ids_fit(ids)
    return np.ascontiguousarray(ids, np.int32)


def _size(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be an int, got {value!r}.")
    if not least <= value <= _INT32.max:
        raise ValueError(f"{name} must be in [{least}, {_INT32.max}], got {value}.")
    return int(value)


__all__ = [
    "DOWN",
    "GATE_UP",
    "GRAD_HIDDEN",
    "GRAD_INPUT",
    "GRAD_WEIGHT",
    "Gradients",
    "Schedule",
    "backward",
    "forward",
    "schedule",
]
