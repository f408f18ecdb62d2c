// The persistent kernel of the forward on Hopper: one CTA per SM, from the token ring to y.
//
// Roles of a compute CTA: warp 0 loads tiles, warp 1 schedules, warp 2 signals, warp 3 pulls tokens
// (unless dedicated CTAs do), two warpgroups multiply and store. A dedicated CTA pulls with all its
// warps. In the end every CTA takes part in the sum.
#include "cuda/combine.cuh"
#include "cuda/dispatch.cuh"
#include "cuda/epilogue.cuh"
#include "cuda/forward_loader.cuh"
#include "cuda/forward_sm90.h"

namespace jax_mok::cuda {
namespace {

// Registers per thread: 168 at launch (65536 / 384); the consumers' accumulators need more.
constexpr int kLaunchRegisters = 168;
constexpr int kProducerRegisters = 72;
constexpr int kConsumerRegisters = 216;

struct ComputeStorage {
  ForwardStages stages;
  uint8_t staging[kConsumerWarps][kStagingBytes];
  uint8_t comm[kCommBufferBytes];
  StageBarriers<kForwardStages> stage_barriers;
  TileRing<Tile> ring;
  CommBarriers comm_barriers;
};
constexpr int kSwizzleAlignment = 1024;
constexpr int kDynamicBytes =
    kSwizzleAlignment +
    (sizeof(ComputeStorage) > sizeof(CommStorage) ? sizeof(ComputeStorage) : sizeof(CommStorage));
static_assert(kDynamicBytes <= 232448 - 64, "more shared memory than an SM has");

MOK_DEVICE const __nv_bfloat16* bias_at(const void* bias, int64_t index) {
  return bias == nullptr ? nullptr : static_cast<const __nv_bfloat16*>(bias) + index;
}

// Where row `row` of a down tile's block goes: its combine slot, or the shared experts' output, at
// the tile's first column. Null for padding, and for tiles that have no results.
MOK_DEVICE char* result_row(const ForwardParams& p, const Tile& tile, int v, int row) {
  const Geometry& g = p.geometry;
  const int64_t block_row = int64_t{tile.block} * kBlockRows + row;
  char* to = nullptr;
  if (tile.work == Work::kDown)
    to = p.array<RowRoute>(g.workspace.routes, v)[block_row].to;
  else if (tile.work == Work::kSharedDown && block_row < g.shape.num_tokens)
    to = p.array<char>(g.workspace.shared_y, v) + block_row * g.hidden * 2;
  return to == nullptr ? nullptr : to + tile.n * kTileColumns * 2;
}

// One consumer warp: multiplies and stores 16 rows of every tile.
template <ActivationKind kKind>
MOK_DEVICE void run_consumer(const ForwardParams& p, ComputeStorage& storage, int v, int warp,
                             AbortWord cta_abort) {
  const Geometry& g = p.geometry;
  const int warpgroup = warp / 4 - 1, lane = threadIdx.x % 32;
  const int warp_row = warpgroup * 64 + warp % 4 * 16;  // first of the warp's rows in the block
  uint8_t* staging = storage.staging[warp - 4];
  TileRing<Tile>& ring = storage.ring;
  Consumer<kForwardStages> consumer(storage.stages, storage.stage_barriers, warpgroup, cta_abort);
  float d[128];
  for (RingCursor at;; at.advance()) {
    if (!wait_barrier(&ring.known[at.slot()], at.parity(), cta_abort)) break;
    const Tile tile = ring.tiles[at.slot()];
    if (tile.work == Work::kEnd) break;
    // Looked up now, needed after the product.
    char* const to = result_row(p, tile, v, warp_row + lane % 16);

    consumer.multiply<Major::kK, Major::kRows>(d, tile.k_blocks);

    if (tile.work == Work::kGateUp || tile.work == Work::kSharedGateUp) {
      const bool shared = tile.work == Work::kSharedGateUp;
      const int columns = shared ? g.shared_intermediate : g.intermediate;
      const int column = tile.n * kGateUpColumns;
      if (!shared && p.saved_gate_up != nullptr)
        save_gate_up(d, p, tile.h_slot, column, int64_t{tile.expert} * columns + column);
      char* hidden = p.array<char>(shared ? g.workspace.shared_h : g.workspace.h, 0) +
                     ((int64_t{tile.h_slot} * kBlockRows + warp_row) * columns + column) * 2;
      if (p.plain_activation) {
        store_hidden<kKind, true>(d, p.activation, hidden, columns * 2, columns - column, nullptr,
                                  nullptr, staging);
      } else {
        const int64_t first = int64_t{tile.expert} * columns + column;
        store_hidden<kKind, false>(d, p.activation, hidden, columns * 2, columns - column,
                                   shared ? nullptr : bias_at(p.b_gate, first),
                                   shared ? nullptr : bias_at(p.b_up, first), staging);
      }
    } else {
      const int column = tile.n * kTileColumns;
      if (tile.work == Work::kSharedDown || p.b_down == nullptr)
        store_results<false>(d, to, g.hidden - column, nullptr, staging);
      else
        store_results<true>(d, to, g.hidden - column,
                            bias_at(p.b_down, int64_t{tile.expert} * g.hidden + column), staging);
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&ring.done[at.slot()]);
  }
}

template <ActivationKind kKind>
__global__ void __launch_bounds__(kForwardThreads, 1)
    forward_sm90(const __grid_constant__ ForwardParams p) {
  extern __shared__ uint8_t dynamic[];
  __shared__ uint32_t cta_abort, verdict;
  uint8_t* const aligned =
      reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(dynamic) + kSwizzleAlignment - 1) &
                                 ~uintptr_t{kSwizzleAlignment - 1});
  const Geometry& g = p.geometry;
  const int v = blockIdx.x / g.ctas_per_rank;
  const int cta = blockIdx.x % g.ctas_per_rank;
  const int num_compute = compute_ctas(g);
  // Uniform in the warp, and known to be to the compiler.
  const int warp = __shfl_sync(kAllLanes, threadIdx.x / 32, 0);

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
  const bool given_up = cta_abort != 0 || p.part == Part::kSum;
  __syncthreads();  // from here on a role may raise the word

  if (given_up) {
    // fall through to the combine, which writes NaN if the call has failed
  } else if (cta >= num_compute) {
    CommStorage& storage = *reinterpret_cast<CommStorage*>(aligned);
    const int comm_ctas = g.comm_ctas_per_rank;
    const Watch watch = make_watch(p, v, AbortWord(&cta_abort));
    Dispatcher<plan::Pass::kForward>(p, watch, v, warp * comm_ctas + cta - num_compute,
                                     comm_ctas * kCommWarps, storage.buffers[warp],
                                     &storage.barriers[warp])
        .run();
    __syncwarp();
  } else {
    ComputeStorage& storage = *reinterpret_cast<ComputeStorage*>(aligned);
    if (warp < 4) {
      registers_decrease<kProducerRegisters>();
      const Watch watch = make_watch(p, v, AbortWord(&cta_abort));
      if (warp == 3) {
        if (g.comm_ctas_per_rank == 0)
          Dispatcher<plan::Pass::kForward>(p, watch, v, cta, num_compute, storage.comm,
                                           &storage.comm_barriers)
              .run();
      } else if (elect_one()) {
        if (warp == 0) {
          run_loader(p, storage.stages, storage.stage_barriers, storage.ring,
                     AbortWord(&cta_abort));
        } else if (warp == 1) {
          Scheduler(p, watch, v, storage.ring).run(cta, num_compute);
        } else {
          run_signaller(p, watch, v, storage.ring);
        }
      }
      __syncwarp();
      registers_increase<kLaunchRegisters>();
    } else {
      registers_increase<kConsumerRegisters>();
      run_consumer<kKind>(p, storage, v, warp, AbortWord(&cta_abort));
      __syncwarp();
      registers_decrease<kLaunchRegisters>();
    }
  }
  // Not kept from above: the consumers have no registers to spare.
  const Outcome outcome = finish(p, make_watch(p, v, AbortWord(&cta_abort)), cta, &verdict);
  const Share share = share_of(g, cta);
  const int64_t y_bytes = g.shape.num_tokens * p.row_bytes();
  if (outcome == Outcome::kSum)
    sum_all_slots(p, v, share, p.expert_weights, p.s_scale, p.y);
  else if (outcome == Outcome::kFail)
    fill_nan(static_cast<char*>(p.y) + v * y_bytes, y_bytes, share);
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
