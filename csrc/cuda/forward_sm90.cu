// The persistent kernel of the forward on Hopper: one CTA per SM, from the token ring to y.
//
// Roles of a compute CTA: warp 0 loads tiles, warp 1 schedules, warp 2 signals, warp 3 pulls tokens
// (unless dedicated CTAs do), two warpgroups multiply and store. A dedicated CTA pulls with all its
// warps. In the end every CTA takes part in the sum.
#include "cuda/combine.cuh"
#include "cuda/dispatch.cuh"
#include "cuda/epilogue.cuh"
#include "cuda/forward_sm90.h"

namespace jax_mok::cuda {
namespace {

// Registers per thread: 168 at launch (65536 / 384); the consumers' accumulators need more.
constexpr int kLaunchRegisters = 168;
constexpr int kProducerRegisters = 56;
constexpr int kConsumerRegisters = 224;

struct ComputeStorage {
  Stages stages;
  Staging staging[kConsumerWarps];
  uint8_t comm[kCommBufferBytes];
  StageBarriers stage_barriers;
  TileRing ring;
  CommBarriers comm_barriers;
};
constexpr int kCommWarps = 12;  // of a dedicated CTA
struct CommStorage {
  uint8_t buffers[kCommWarps][kCommBufferBytes];
  CommBarriers barriers[kCommWarps];
};
constexpr int kSwizzleAlignment = 1024;
constexpr int kDynamicBytes =
    kSwizzleAlignment +
    (sizeof(ComputeStorage) > sizeof(CommStorage) ? sizeof(ComputeStorage) : sizeof(CommStorage));
static_assert(kDynamicBytes <= 232448 - 64, "more shared memory than an SM has");

MOK_DEVICE const __nv_bfloat16* bias_at(const void* bias, int64_t index) {
  return bias == nullptr ? nullptr : static_cast<const __nv_bfloat16*>(bias) + index;
}

// Where row `row` of a tile's block goes: the first of the tile's columns there, or null.
MOK_DEVICE char* destination(const ForwardParams& p, const Tile& tile, int v, int row) {
  const Geometry& g = p.geometry;
  const int64_t block_row = int64_t{tile.block} * kBlockRows + row;
  const int64_t hidden_row = int64_t{tile.h_slot} * kBlockRows + row;
  switch (tile.work) {
    case Work::kGateUp:
      return p.array<char>(g.workspace.h, 0) +
             (hidden_row * g.intermediate + tile.n * kGateUpColumns) * 2;
    case Work::kSharedGateUp:
      return p.array<char>(g.workspace.shared_h, 0) +
             (hidden_row * g.shared_intermediate + tile.n * kGateUpColumns) * 2;
    case Work::kDown: {
      char* to = p.array<RowRoute>(g.workspace.routes, v)[block_row].to;
      return to == nullptr ? nullptr : to + tile.n * kTileColumns * 2;
    }
    default:
      if (block_row >= g.shape.num_tokens) return nullptr;
      return p.array<char>(g.workspace.shared_y, v) +
             (block_row * g.hidden + tile.n * kTileColumns) * 2;
  }
}

// The barrier of the tile before the one at the cursor.
MOK_DEVICE uint64_t* before(uint64_t (&barriers)[kTileRing], const RingCursor& at) {
  return &barriers[at.slot == 0 ? kTileRing - 1 : at.slot - 1];
}

// One consumer warp: 16 rows of a block. A tile's rows are held back in registers and stored during
// the next tile; if that one has to be waited for, at once: it may be waiting for the rows held.
template <ActivationKind kKind>
MOK_DEVICE void run_consumer(const ForwardParams& p, ComputeStorage& storage, int v, int warp,
                             const volatile uint32_t* cta_abort) {
  const Geometry& g = p.geometry;
  const int warpgroup = warp / 4 - 1, lane = threadIdx.x % 32;
  const int warp_row = warpgroup * 64 + warp % 4 * 16;
  Staging& staging = storage.staging[warp - 4];
  TileRing& ring = storage.ring;
  StageCursor from;
  HeldRows held;
  float d[128];
  RingCursor at;
  for (;; at.advance()) {
    if (!wait_barrier(&ring.known[at.slot], at.parity, cta_abort)) break;
    const Tile& tile = ring.tiles[at.slot];  // not overwritten before its rows are stored
    const Work work = tile.work;
    if (work == Work::kEnd) break;

    // What there is to do beside the product: the rows of the tile before, then where this tile's
    // go.
    const auto step = [&] {
      if (held.next < held.panels) {
        store_next_panel(held, staging, before(ring.done, at));
      } else if (held.next == held.panels) {
        if (lane < 16) staging.row_to[lane] = destination(p, tile, v, warp_row + lane);
        ++held.next;
      }
    };
    const auto all_steps = [&] {
      while (held.next <= held.panels) step();
    };
    multiply(d, storage.stages, storage.stage_barriers, from, tile.k_blocks, warpgroup, cta_abort,
             all_steps, step);
    all_steps();  // where the product was too short for them

    const bool shared = work == Work::kSharedGateUp || work == Work::kSharedDown;
    if (work == Work::kGateUp || work == Work::kSharedGateUp) {
      const int columns = shared ? g.shared_intermediate : g.intermediate;
      const int column = tile.n * kGateUpColumns;
      if (p.plain_activation) {
        hold_hidden<kKind, true>(held, d, p.activation, nullptr, nullptr);
      } else {
        const int64_t first = int64_t{tile.expert} * columns + column;
        hold_hidden<kKind, false>(held, d, p.activation,
                                  shared ? nullptr : bias_at(p.buffers.b_gate, first),
                                  shared ? nullptr : bias_at(p.buffers.b_up, first));
      }
      held.panels = min(2, (columns - column) / kColumnUnit);
    } else {
      const int column = tile.n * kTileColumns;
      if (shared || p.buffers.b_down == nullptr)
        hold_results<false>(held, d, nullptr);
      else
        hold_results<true>(held, d,
                           bias_at(p.buffers.b_down, int64_t{tile.expert} * g.hidden + column));
      held.panels = min(4, (g.hidden - column) / kColumnUnit);
    }
    held.next = 0;
  }
  while (held.next < held.panels) store_next_panel(held, staging, before(ring.done, at));
}

template <ActivationKind kKind>
__global__ void __launch_bounds__(kForwardThreads, 1)
    forward_sm90(const __grid_constant__ ForwardParams p) {
  extern __shared__ uint8_t dynamic[];
  __shared__ uint32_t cta_abort;
  uint8_t* const aligned =
      reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(dynamic) + kSwizzleAlignment - 1) &
                                 ~uintptr_t{kSwizzleAlignment - 1});
  const Geometry& g = p.geometry;
  const int v = cta_index() / g.ctas_per_rank;
  const int cta = cta_index() % g.ctas_per_rank;
  const int num_compute = compute_ctas(g);
  // Uniform in the warp, and known to be to the compiler.
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);

  if (threadIdx.x == 0) {
    cta_abort = p.control(v)->abort;  // set by the plan: nothing is run then
    if (cta < num_compute) {
      ComputeStorage& storage = *reinterpret_cast<ComputeStorage*>(aligned);
      storage.stage_barriers.init();
      storage.ring.init(kConsumerWarps);
      mbarrier_init_fence();
    }
  }
  __syncthreads();
  const bool given_up = cta_abort != 0;
  __syncthreads();  // from here on a role may raise the word

  if (given_up) {
    // fall through to the combine, which writes NaN
  } else if (cta >= num_compute) {
    CommStorage& storage = *reinterpret_cast<CommStorage*>(aligned);
    const int comm_ctas = g.comm_ctas_per_rank;
    const Watch watch = make_watch(p, v, &cta_abort);
    if (elect_one())
      Dispatcher(p, watch, v, warp * comm_ctas + cta - num_compute, comm_ctas * kCommWarps,
                 storage.buffers[warp], &storage.barriers[warp])
          .run();
    __syncwarp();
  } else {
    ComputeStorage& storage = *reinterpret_cast<ComputeStorage*>(aligned);
    if (warp < 4) {
      registers_decrease<kProducerRegisters>();
      const Watch watch = make_watch(p, v, &cta_abort);
      if (elect_one()) {
        if (warp == 0) {
          run_loader(p, storage.stages, storage.stage_barriers, storage.ring, &cta_abort);
        } else if (warp == 1) {
          Scheduler(p, watch, v, storage.ring).run(cta, num_compute);
        } else if (warp == 2) {
          run_signaller(p, watch, v, storage.ring);
        } else if (g.comm_ctas_per_rank == 0) {
          Dispatcher(p, watch, v, cta, num_compute, storage.comm, &storage.comm_barriers).run();
        }
      }
      __syncwarp();
      registers_increase<kLaunchRegisters>();
    } else {
      registers_increase<kConsumerRegisters>();
      run_consumer<kKind>(p, storage, v, warp, &cta_abort);
      __syncwarp();
      registers_decrease<kLaunchRegisters>();
    }
  }
  // Nothing is kept from above: the consumers have no registers to spare.
  const int rank_here = cta_index() / g.ctas_per_rank;
  combine(p, make_watch(p, rank_here, &cta_abort), rank_here, cta_index() % g.ctas_per_rank);
  // Loads that were under way when the call was given up must land before the CTA's memory goes.
  if (cta_abort != 0) __nanosleep(1000000);
}

}  // namespace

const int kForwardSharedBytes = kDynamicBytes;

const void* forward_kernel(ActivationKind kind) {
  switch (kind) {
    case ActivationKind::kGeglu:
      return reinterpret_cast<const void*>(forward_sm90<ActivationKind::kGeglu>);
    case ActivationKind::kReglu:
      return reinterpret_cast<const void*>(forward_sm90<ActivationKind::kReglu>);
    default:
      return reinterpret_cast<const void*>(forward_sm90<ActivationKind::kSwiglu>);
  }
}

}  // namespace jax_mok::cuda
