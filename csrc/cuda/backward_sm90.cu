// The persistent kernel of the backward on Hopper: one CTA per SM, from tokens and cotangents to
// all gradients.
//
// Roles of a compute CTA: warp 0 loads tiles, warp 1 schedules, warp 2 stores results, warp 3 pulls
// rows (unless dedicated CTAs do), two warpgroups multiply. In the end every CTA takes part in the
// sums of dx.
#include "cuda/backward_epilogue.cuh"
#include "cuda/backward_loader.cuh"
#include "cuda/backward_sm90.h"
#include "cuda/combine.cuh"
#include "cuda/dispatch.cuh"

namespace jax_mok::cuda {
namespace {

// Registers per thread: 168 at launch (65536 / 384); the consumers hold up to 192 accumulators.
constexpr int kLaunchRegisters = 168;
constexpr int kProducerRegisters = 56;
constexpr int kConsumerRegisters = 224;

struct SharedWords {
  int32_t virtual_rank;  // for consumers, who have no register for it
  uint32_t cta_abort;
  uint32_t verdict;
  int32_t progress;  // block whose hidden gradients the CTA works on
};
struct ComputeStorage {
  BackwardStages stages;
  uint8_t outbox[kOutboxBytes];
  uint8_t comm[kCommBufferBytes];
  StageBarriers<kBackwardStages> stage_barriers;
  AlternatingBarriers pair_barriers;
  OutboxBarriers outbox_barriers;
  TileRing<GradTile> ring;
  CommBarriers comm_barriers;

  // Instead of `stages`; reaches into the outbox.
  __device__ AlternatingStages& pairs() { return *reinterpret_cast<AlternatingStages*>(&stages); }
};
static_assert(offsetof(ComputeStorage, outbox) == sizeof(BackwardStages), "next to each other");
struct Storage {
  union {
    ComputeStorage compute;
    CommStorage comm;
  };
  SharedWords words;
};
// Nothing is left for aligning it: the kernel has no static shared memory, so the dynamic part
// begins where the hardware's own 1 KB ends.
constexpr int kDynamicBytes = sizeof(Storage);
static_assert(kDynamicBytes <= 232448, "more shared memory than an SM has");

// The same in all lanes, and known to be to the compiler: it must not take the products for
// divergent.
MOK_DEVICE int32_t uniform(int32_t value) { return __shfl_sync(kAllLanes, value, 0); }

// One consumer warp: multiplies and passes on 16 rows of every tile.
template <ActivationKind kKind, bool kPlain>
class GradConsumer {
 public:
  MOK_DEVICE GradConsumer(const BackwardParams& p, ComputeStorage& storage,
                          const volatile int32_t& virtual_rank, int warp, AbortWord cta_abort)
      : p_(p),
        virtual_rank_(virtual_rank),
        cta_abort_(cta_abort),
        ring_(storage.ring),
        outbox_(storage.outbox, storage.outbox_barriers, cta_abort),
        products_(storage.stages, storage.stage_barriers, warp / 4 - 1, cta_abort),
        pairs_(storage.pairs(), storage.pair_barriers, warp / 4 - 1, cta_abort) {}

  MOK_DEVICE void run() {
    float d[128];
    for (RingCursor at;; at.advance()) {
      if (!wait_barrier(&ring_.known[at.slot()], at.parity(), cta_abort_)) break;
      // Read where it stands, when it is needed: the accumulators leave few registers.
      const GradTile& tile = ring_.tiles[at.slot()];
      const GradWork work = static_cast<GradWork>(uniform(static_cast<int32_t>(tile.work)));
      if (work == GradWork::kEnd) break;
      switch (work) {
        case GradWork::kHidden:
          hidden(d, tile);
          break;
        case GradWork::kHiddenSaved:
          hidden_saved(d, tile);
          break;
        case GradWork::kInput:
          products_.template multiply<Major::kK, Major::kK>(d, 2 * (inner(tile) / kTileK));
          input_results(d, outbox_, warp_row());
          break;
        case GradWork::kDownWeight:
        case GradWork::kGateUpWeight:
          weight(d, tile);
          break;
        case GradWork::kBias:
          if (!wait_barrier(&ring_.ready[at.slot()], at.parity(), cta_abort_)) break;
          bias_results(p_, v(), tile);
          bias_dots(p_, v(), tile);
          break;
        default:
          break;
      }
      __syncwarp();
      if (threadIdx.x % 32 == 0) mbarrier_arrive(&ring_.done[at.slot()]);
    }
  }

 private:
  MOK_DEVICE int inner(const GradTile& t) const {
    return t.shared ? p_.geometry.shared_intermediate : p_.geometry.intermediate;
  }

  // Weight of the thread's row r (0) or r + 8 (1).
  MOK_DEVICE RowPair rows_of(const GradTile& t) const {
    RowPair rows;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t row = int64_t{t.block} * kBlockRows + warp_row() + threadIdx.x % 32 / 4 + i * 8;
      if (!t.shared)
        rows.weight[i] = p_.array<GradRoute>(p_.geometry.workspace.routes, v())[row].weight;
      else if (row >= p_.geometry.shape.num_tokens)
        rows.weight[i] = 0.0f;  // what lies there belongs to somebody else
      else
        rows.weight[i] = p_.s_scale == nullptr
                             ? 1.0f
                             : p_.s_scale[int64_t{v()} * p_.geometry.shape.num_tokens + row];
    }
    return rows;
  }
  MOK_DEVICE void store_panel(const GradTile& t, int column, uint32_t staging) const {
    store_hidden_panel(p_, t.shared, t.hidden_row + warp_row(), column, staging);
  }
  // Where the partial <h, dh> of a row begin, null if nowhere: of row i of the warp in lanes 4 i
  // and 4 i + 2, of row i + 8 in lanes 4 i + 1 and 4 i + 3. Asked for early, and not looked at: it
  // comes from memory.
  MOK_DEVICE float* dot_row(const GradTile& t) const {
    const Geometry& g = p_.geometry;
    const int lane = threadIdx.x % 32;
    const int64_t row = int64_t{t.block} * kBlockRows + warp_row() + lane / 4 + lane % 2 * 8;
    if (!t.shared) return p_.array<GradRoute>(g.workspace.routes, v())[row].part;
    return row < g.shape.num_tokens ? p_.array<float>(g.workspace.shared_parts, v()) + row
                                    : nullptr;
  }
  // dot: of the thread's two rows, over its part of the 128 columns around `column`.
  MOK_DEVICE void store_dots(const GradTile& t, int column, float* row, float (&dot)[2]) const {
    const int64_t tokens = p_.geometry.shape.num_tokens;
    const int64_t stride = t.shared ? tokens : tokens * p_.geometry.shape.top_k;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      dot[i] += __shfl_xor_sync(kAllLanes, dot[i], 1);
      dot[i] += __shfl_xor_sync(kAllLanes, dot[i], 2);
    }
    if (threadIdx.x % 4 < 2 && row != nullptr)
      row[column / kPartColumns * stride] = threadIdx.x % 4 == 0 ? dot[0] : dot[1];
    __syncwarp();  // products follow
  }

  // gate and up computed again, 128 columns at a time.
  MOK_DEVICE void hidden(float (&d)[128], const GradTile& t) {
    const RowPair rows = rows_of(t);
    const int first = uniform(t.n) * p_.geometry.hidden_tile_columns;
    const int end = min(first + p_.geometry.hidden_tile_columns, uniform(inner(t)));
#pragma unroll 1
    for (int column = first; column < end; column += kPartColumns) {
      float e[64];
      pairs_.multiply(d, e, p_.geometry.hidden / kTileK);
      hidden_epilogue(d, e, t, rows, column, end);
    }
  }
  MOK_DEVICE void hidden_epilogue(float (&d)[128], float (&e)[64], const GradTile& t,
                                  const RowPair& rows, int column, int end) {
    const bool biased = !kPlain && !t.shared && p_.b_gate != nullptr;
    const int64_t bias = int64_t{t.expert} * p_.geometry.intermediate + column;
    const __nv_bfloat16* b_gate = static_cast<const __nv_bfloat16*>(p_.b_gate) + bias;
    const __nv_bfloat16* b_up = static_cast<const __nv_bfloat16*>(p_.b_up) + bias;
    const uint32_t staging = outbox_.staging(warp_row() / 16);
    float dot[2] = {0.0f, 0.0f};
    float* dots_to = nullptr;
#pragma unroll
    for (int panel = 0; panel < 2; ++panel) {
      if (column + panel * 64 >= end) break;
      hidden_panel<kKind, kPlain>(
          e + panel * 32, p_.activation, rows, dot,
          [&](int j, float (&g)[4], float (&u)[4]) {
            const int group = panel * 8 + j;
            float2 bg, bu;
            if constexpr (!kPlain) {
              bg = biased ? bias_pair(b_gate, group) : float2{0.0f, 0.0f};
              bu = biased ? bias_pair(b_up, group) : float2{0.0f, 0.0f};
            }
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
#pragma unroll
              for (int k = i; k < i + 2; ++k) {
                g[k] = d[group * 4 + k];
                u[k] = d[64 + group * 4 + k];
              }
              if constexpr (!kPlain) {
                g[i] += bg.x;
                g[i + 1] += bg.y;
                u[i] += bu.x;
                u[i + 1] += bu.y;
              }
              round_to_bf16(g[i], g[i + 1]);
              round_to_bf16(u[i], u[i + 1]);
            }
          },
          staging,
          [&] {
            if (panel == 0) dots_to = dot_row(t);
            store_panel(t, column + panel * 64, staging);
          });
    }
    store_dots(t, column, dots_to, dot);
  }

  // gate and up as the forward has left them. They are asked for early: the first panel before the
  // product, the next all at once before this one's results are stored. Loads between the
  // computations would share scoreboards with the special functions, which then wait for memory.
  MOK_DEVICE void hidden_saved(float (&d)[128], const GradTile& t) {
    const RowPair rows = rows_of(t);
    const int intermediate = p_.geometry.intermediate;
    const uint4* from =
        static_cast<const uint4*>(p_.saved_gate_up) +
        saved_index(t.hidden_row / kBlockRows, intermediate, t.n * p_.geometry.hidden_tile_columns);
    uint4 gate[4], up[4];  // of 16 columns each
    const auto load = [&](int panel) {
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        gate[pair] = load_once(from + (panel * 8 + pair * 2) * kConsumerThreads);
        up[pair] = load_once(from + (panel * 8 + pair * 2 + 1) * kConsumerThreads);
      }
    };
    load(0);
    products_.template multiply<Major::kK, Major::kK>(d, p_.geometry.hidden / kTileK);
    const uint32_t staging = outbox_.staging(warp_row() / 16);
    float dot[2];
    float* dots_to = nullptr;
#pragma unroll
    for (int panel = 0; panel < 4; ++panel) {
      const int column = t.n * p_.geometry.hidden_tile_columns + panel * 64;
      if (column >= intermediate) break;
      const bool more = panel < 3 && column + 64 < intermediate;
      const bool dots_done = panel % 2 == 1 || column + 64 >= intermediate;
      if (panel % 2 == 0) dot[0] = dot[1] = 0.0f;
      hidden_panel<kKind, kPlain>(
          d + panel * 32, p_.activation, rows, dot,
          [&](int j, float (&g)[4], float (&u)[4]) {
            const uint4 a = gate[j / 2], b = up[j / 2];
            const uint32_t gw[2] = {j % 2 ? a.z : a.x, j % 2 ? a.w : a.y};
            const uint32_t uw[2] = {j % 2 ? b.z : b.x, j % 2 ? b.w : b.y};
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              g[2 * i] = bf16_low(gw[i]);
              g[2 * i + 1] = bf16_high(gw[i]);
              u[2 * i] = bf16_low(uw[i]);
              u[2 * i + 1] = bf16_high(uw[i]);
            }
          },
          staging,
          [&] {
            if (dots_done) dots_to = dot_row(t);
            if (more) load(panel + 1);
            store_panel(t, column, staging);
          });
      if (dots_done) store_dots(t, column, dots_to, dot);
    }
  }

  MOK_DEVICE void weight(float (&d)[128], const GradTile& t) {
    const bool empty = t.num_stages == 0;
    if (t.open_in >= 0) {
      take_open_sum(d, open_sum(p_, v(), t.open_in, t.weight_tile));
      products_.template multiply_onto<Major::kRows, Major::kRows>(d, t.num_stages);
    } else if (!empty) {
      products_.template multiply<Major::kRows, Major::kRows>(d, t.num_stages);
    }
    const bool halves = t.work == GradWork::kGateUpWeight;
    const int left =
        halves ? inner(t) - t.n * kGateUpColumns : p_.geometry.hidden - t.n * kTileColumns;
    const WeightSum sum = {d, empty};
    if (t.open_out >= 0) return keep_open_sum(sum, open_sum(p_, v(), t.open_out, t.weight_tile));
    if (p_.float32_weight_grads && !t.shared)
      weight_results_f32(sum, halves, left, outbox_, warp_row());
    else
      weight_results_bf16(sum, halves, left, outbox_, warp_row());
  }

  // Found out anew when they are needed.
  MOK_DEVICE int v() const { return virtual_rank_; }
  static MOK_DEVICE int warp_row() { return (thread_index() / 32 - 4) * 16; }

  const BackwardParams& p_;
  const volatile int32_t& virtual_rank_;
  const AbortWord cta_abort_;
  TileRing<GradTile>& ring_;
  Outbox outbox_;
  Consumer<kBackwardStages> products_;
  AlternatingConsumer pairs_;
};

// Sums of the partial <h, dh>, in the order of the columns.
MOK_DEVICE float sum_parts(const float* part, int64_t stride, int parts) {
  float sum = 0.0f;
  for (int i = 0; i < parts; ++i) sum += load_peer_written_float(part + i * stride);
  return sum;
}
MOK_DEVICE void sum_expert_weights(const BackwardParams& p, int v, const Share& share) {
  const Geometry& g = p.geometry;
  const int64_t slots = int64_t{g.shape.num_tokens} * g.shape.top_k;
  const float* parts = reinterpret_cast<const float*>(p.heap(p.rank(v)) + g.heap.parts);
  for (int64_t i = share.first; i < slots; i += share.step)
    p.d_expert_weights[v * slots + i] = p.expert_ids[v * slots + i] == plan::kUnusedSlot
                                            ? 0.0f
                                            : sum_parts(parts + i, slots, g.num_parts);
  if (p.ds_scale == nullptr) return;
  const int64_t tokens = g.shape.num_tokens;
  const float* shared = p.array<float>(g.workspace.shared_parts, v);
  for (int64_t i = share.first; i < tokens; i += share.step)
    p.ds_scale[v * tokens + i] = sum_parts(shared + i, tokens, g.num_shared_parts);
}

// A failed call leaves no numbers behind. Weight gradients of all virtual ranks alike: all of them
// fail together.
MOK_DEVICE void fail_all(const BackwardParams& p, int v, const Share& share) {
  const Geometry& g = p.geometry;
  const int64_t dx_bytes = g.shape.num_tokens * p.row_bytes();
  const int64_t slot_bytes = int64_t{g.shape.num_tokens} * g.shape.top_k * 4;
  fill_nan(static_cast<char*>(p.dx) + v * dx_bytes, dx_bytes, share);
  fill_nan(reinterpret_cast<char*>(p.d_expert_weights) + v * slot_bytes, slot_bytes, share);
  if (p.ds_scale != nullptr)
    fill_nan(p.ds_scale + int64_t{v} * g.shape.num_tokens, int64_t{g.shape.num_tokens} * 4, share);
  for (const BackwardParams::Output& output : p.weight_grads) {
    const int64_t bytes = output.bytes / g.num_virtual_ranks;
    fill_nan(static_cast<char*>(output.data) + v * bytes, bytes, share);
  }
}

// All threads: what comes after the tiles. Finds out anew who it is.
MOK_DEVICE void end(const BackwardParams& p, AbortWord cta_abort, volatile uint32_t* verdict) {
  const int v = block_index() / p.geometry.ctas_per_rank;
  const int cta = block_index() % p.geometry.ctas_per_rank;
  const Outcome outcome = finish(p, make_watch(p, v, cta_abort), cta, verdict);
  const Share share = share_of(p.geometry, cta);
  if (outcome == Outcome::kSum) {
    sum_all_slots(p, v, share, nullptr, nullptr, p.dx);
    sum_expert_weights(p, v, share);
  } else if (outcome == Outcome::kFail) {
    fail_all(p, v, share);
  }
}

template <ActivationKind kKind, bool kPlain>
__global__ void __launch_bounds__(kBackwardThreads, 1)
    backward_sm90(const __grid_constant__ BackwardParams p) {
  extern __shared__ __align__(1024) uint8_t dynamic[];
  Storage& storage = *reinterpret_cast<Storage*>(dynamic);
  const Geometry& g = p.geometry;
  const int v = blockIdx.x / g.ctas_per_rank;
  const int cta = blockIdx.x % g.ctas_per_rank;
  const int num_compute = compute_ctas(g);
  const bool computes = cta < num_compute;
  SharedWords& words = storage.words;
  // Uniform in the warp, and known to be to the compiler.
  const int warp = __shfl_sync(kAllLanes, threadIdx.x / 32, 0);

  if (threadIdx.x == 0) {
    if (shared_address(dynamic) % 1024 != 0) __trap();  // the swizzle would be another one
    words.virtual_rank = v;
    words.progress = p.block_map(v).num_blocks;
    words.cta_abort = p.control(v)->abort;  // set by the plan: nothing is run then
    if (computes) {
      storage.compute.stage_barriers.init();
      storage.compute.pair_barriers.init();
      storage.compute.outbox_barriers.init(kConsumerWarps);
      storage.compute.ring.init(kConsumerWarps + 1);  // and the loader
      mbarrier_init_fence();
    }
  }
  __syncthreads();
  const AbortWord cta_abort(&words.cta_abort);
  const bool given_up = cta_abort.raised() || p.part == Part::kSum;
  __syncthreads();  // from here on a role may raise the word

  if (given_up) {
    // fall through to the end, which writes NaN if the call has failed
  } else if (!computes) {
    const int comm_ctas = g.comm_ctas_per_rank;
    const Watch watch = make_watch(p, v, cta_abort);
    Dispatcher<plan::Pass::kBackward>(p, watch, v, warp * comm_ctas + cta - num_compute,
                                      comm_ctas * kCommWarps, storage.comm.buffers[warp],
                                      &storage.comm.barriers[warp])
        .run();
    __syncwarp();
  } else {
    ComputeStorage& compute = storage.compute;
    if (warp < 4) {
      registers_decrease<kProducerRegisters>();
      const Watch watch = make_watch(p, v, cta_abort);
      if (warp == 2) {
        Storer(p, watch, v, compute.outbox, compute.outbox_barriers, compute.ring).run();
      } else if (warp == 3) {
        if (g.comm_ctas_per_rank == 0)
          Dispatcher<plan::Pass::kBackward>(p, watch, v, cta, num_compute, compute.comm,
                                            &compute.comm_barriers, &words.progress)
              .run();
      } else if (elect_one()) {
        if (warp == 0) {
          GradLoader(p, v, compute.stages, compute.stage_barriers, compute.pairs(),
                     compute.pair_barriers, compute.ring, &words.progress, cta_abort)
              .run();
        } else {
          GradScheduler(p, watch, v, cta, num_compute, compute.ring).run();
        }
      }
      __syncwarp();
      registers_increase<kLaunchRegisters>();
    } else {
      registers_increase<kConsumerRegisters>();
      GradConsumer<kKind, kPlain>(p, compute, words.virtual_rank, warp, cta_abort).run();
      __syncwarp();
      registers_decrease<kLaunchRegisters>();
    }
  }
  end(p, cta_abort, &words.verdict);
}

}  // namespace

const int kBackwardSharedBytes = kDynamicBytes;

namespace {

template <bool kPlain>
const void* kernel_of(ActivationKind kind) {
  switch (kind) {
    case ActivationKind::kGeglu:
      return reinterpret_cast<const void*>(backward_sm90<ActivationKind::kGeglu, kPlain>);
    case ActivationKind::kReglu:
      return reinterpret_cast<const void*>(backward_sm90<ActivationKind::kReglu, kPlain>);
    default:
      return reinterpret_cast<const void*>(backward_sm90<ActivationKind::kSwiglu, kPlain>);
  }
}

}  // namespace

const void* backward_kernel(ActivationKind kind, bool plain) {
  return plain ? kernel_of<true>(kind) : kernel_of<false>(kind);
}

}  // namespace jax_mok::cuda
