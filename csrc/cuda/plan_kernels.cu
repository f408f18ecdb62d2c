// The plan of a rank on the device: a stable counting sort of the ids of all ranks by expert, in
// a few kernels. Rows take the places that csrc/plan gives them; nothing depends on the order in
// which threads run.
//
//   publish  copy ids into the heap, clear the counters, tell the peers
//   copy     (several ranks) copy tokens into the heap, tell the peers
//   count    per chunk of ids: check them, count the rows of every local expert
//   prefix   per (source rank, expert): running sums over the source's chunks
//   place    blocks of every expert; for every row where it comes from and goes to
//   share    (several ranks) rows of a token that is pulled for another expert already
#include "cuda/peers.cuh"
#include "cuda/plan_kernels.h"

namespace jax_mok::cuda {
namespace {

constexpr int kPublishThreads = 512;
constexpr int kCopyThreads = 1024;
constexpr int kPlanWarps = 8;
constexpr int kPlanThreads = kPlanWarps * 32;
constexpr int kMaxPlanSharedBytes = (kPlanWarps * kMaxLocalExperts + kMaxLocalExperts + 1) * 4;

// ---- publish and copy ----

// By all threads of all CTAs of a rank, after what they have written: true in the CTA that is last.
__device__ bool is_last(uint32_t* ctas) {
  __syncthreads();
  bool last = false;
  if (threadIdx.x == 0) {
    last = add_acq_rel_sys(ctas, 1) == gridDim.x - 1;
    if (last) *ctas = 0;
  }
  return __syncthreads_or(last);
}

MOK_DEVICE void clear_words(void* to, int64_t bytes, int64_t thread, int64_t threads) {
  for (int64_t i = thread; i < bytes / 4; i += threads) static_cast<uint32_t*>(to)[i] = 0;
}

__global__ void __launch_bounds__(kPublishThreads) publish(const __grid_constant__ CallParams p) {
  const Geometry& g = p.geometry;
  const int v = blockIdx.y, rank = p.rank(v);
  const int64_t thread = blockIdx.x * blockDim.x + threadIdx.x;
  const int64_t threads = gridDim.x * blockDim.x;
  clear_words(p.control(v), sizeof(RankControl), thread, threads);
  clear_words(p.x_full(v), g.workspace.counters.bytes, thread, threads);
  clear_words(p.array<char>(g.workspace.zero_row, v), g.hidden * 2, thread, threads);
  if (g.shape.num_ranks > 1) {
    const int64_t num_ids = int64_t{g.shape.num_tokens} * g.shape.top_k;
    int32_t* ids = reinterpret_cast<int32_t*>(p.heap(rank) + g.heap.ids);
    for (int64_t i = thread; i < num_ids; i += threads) ids[i] = p.ids_of(rank, v)[i];
    if (g.pass == plan::Pass::kBackward) {
      float* weights = reinterpret_cast<float*>(p.heap(rank) + g.heap.weights);
      for (int64_t i = thread; i < num_ids; i += threads) weights[i] = p.weights_of(rank, v)[i];
    }
  }

  // The CTA that ends last speaks for all.
  HeapControl* own = p.heap_control(rank);
  if (!is_last(&own->published_ctas)) return;
  if (threadIdx.x == 0) {
    const uint32_t call = ++own->call;
    own->id = p.call_id != 0 ? p.call_id : call;
    own->past[call % kPastCalls] = own->id;
  }
  __syncthreads();
  if (threadIdx.x < g.shape.num_ranks && rank != p.hooks.absent_rank)
    store_release_sys(&p.heap_control(threadIdx.x)->at[rank], own->id);
}

MOK_DEVICE void copy_16(void* to, const void* from, int64_t bytes, int64_t thread,
                        int64_t threads) {
  uint4* const target = static_cast<uint4*>(to);
  const uint4* const source = static_cast<const uint4*>(from);
  constexpr int kBatch = 4;  // loads in flight
  for (int64_t first = thread; first < bytes / 16; first += kBatch * threads) {
    uint4 value[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      if (first + i * threads < bytes / 16) value[i] = source[first + i * threads];
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      if (first + i * threads < bytes / 16) target[first + i * threads] = value[i];
  }
}

__global__ void __launch_bounds__(kCopyThreads) copy(const __grid_constant__ CallParams p) {
  const Geometry& g = p.geometry;
  const int v = blockIdx.y, rank = p.rank(v);
  const int64_t thread = blockIdx.x * blockDim.x + threadIdx.x;
  const int64_t threads = gridDim.x * blockDim.x;
  const int64_t bytes = g.shape.num_tokens * p.row_bytes();
  if (p.reads_tokens())
    copy_16(p.heap(rank) + g.heap.x, p.local_rows(p.x, v), bytes, thread, threads);
  if (g.pass == plan::Pass::kBackward)
    copy_16(p.heap(rank) + g.heap.dy, p.local_rows(p.dy, v), bytes, thread, threads);
  HeapControl* own = p.heap_control(rank);
  if (is_last(&own->copied_ctas) && threadIdx.x < g.shape.num_ranks && rank != p.hooks.absent_rank)
    store_release_sys(&p.heap_control(threadIdx.x)->copied[rank], own->id);
}

// ---- count ----

// One warp's chunk of a source's ids: lane l holds those at first + l, first + l + 32, ...; past
// the end those of an unused slot. All are asked for at once: a chunk costs one round trip to
// memory.
class ChunkIds {
 public:
  // Those of another rank only if all ranks have come (`came`): memory of a rank that is gone is
  // left alone.
  MOK_DEVICE ChunkIds(const CallParams& p, int v, int source, int chunk, bool came)
      : first_(chunk * kChunkIds + threadIdx.x % 32) {
    const int num_ids = came ? p.geometry.shape.num_tokens * p.geometry.shape.top_k : 0;
    const int32_t* ids = p.ids_of(source, v);
    const auto load = [&](int i) { return i >= 0 && i < num_ids ? ids[i] : plan::kUnusedSlot; };
    below_ = load(first_ - 32);
#pragma unroll
    for (int r = 0; r < kRounds; ++r) id_[r] = load(first_ + 32 * r);
  }
  // visit(flat index, id, the id 32 places before) by all lanes, in ascending order.
  template <typename Visit>
  MOK_DEVICE void for_each(Visit visit) const {
#pragma unroll
    for (int r = 0; r < kRounds; ++r)
      visit(first_ + 32 * r, id_[r], r > 0 ? id_[r > 0 ? r - 1 : 0] : below_);
  }

 private:
  static constexpr int kRounds = kChunkIds / 32;
  const int first_;
  int32_t id_[kRounds], below_;
};
static_assert(kMaxTopK <= 32, "a token's earlier ids are among the 32 before");

// The local expert of an id, or -1 if another rank owns it or the slot is unused.
MOK_DEVICE int local_expert(const CallParams& p, int rank, int32_t id) {
  const int num_local = p.geometry.shape.num_local_experts;
  if (!plan::valid_expert(id, p.geometry.num_experts)) return -1;
  return plan::owner(id, num_local) == rank ? plan::local(id, num_local) : -1;
}

// Whole warp: lane l has the id at flat index i, and the one 32 places before.
MOK_DEVICE void check_id(const CallParams& p, const Watch& watch, int source, int i, int32_t id,
                         int32_t below) {
  const int top_k = p.geometry.shape.top_k, lane = threadIdx.x % 32;
  const int token = i / top_k, slot = i % top_k;
  bool repeated = false;
  for (int back = 1; back < top_k; ++back) {
    // Who gives is asked by one lane only, so it knows which of its two ids is wanted.
    const int32_t other = __shfl_sync(kAllLanes, lane + back < 32 ? id : below, (lane - back) & 31);
    repeated |= back <= slot && other == id;
  }
  if (id == plan::kUnusedSlot) return;
  const bool valid = plan::valid_expert(id, p.geometry.num_experts);
  if (valid && !repeated) return;
  const FaultCode code = valid ? FaultCode::kIdRepeated : FaultCode::kIdOutOfRange;
  report(watch, {code, FaultPhase::kStart, source, token, id, slot});
}

__global__ void __launch_bounds__(kPlanThreads) count(const __grid_constant__ CallParams p) {
  extern __shared__ int32_t counters[];  // [warps][El]
  const Geometry& g = p.geometry;
  const int source = blockIdx.y, v = blockIdx.z, rank = p.rank(v);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int chunk = blockIdx.x * kPlanWarps + warp;
  const Watch watch = make_watch(p, v);
  // Published by a kernel before, here or on a GPU that another kernel waited for.
  const ChunkIds ids(p, v, source, chunk, source == rank || !aborted(watch));
  const HeapControl* own = p.heap_control(rank);
  // Every rank checks the ids of all ranks: so all come to the same verdict. Peers on other GPUs
  // have been waited for.
  const bool awaited = g.shape.num_ranks > g.num_virtual_ranks;
  const bool came = awaited ? !aborted(watch)
                            : threadIdx.x != 0 || wait_peer(watch, own, &own->at[source], source,
                                                            FaultPhase::kStart, p.start_timeout_ns);
  if (!__syncthreads_and(came)) return;

  const int num_local = g.shape.num_local_experts;
  if (chunk >= g.num_chunks) return;
  int32_t* mine = counters + warp * num_local;
  for (int e = lane; e < num_local; e += 32) mine[e] = 0;
  __syncwarp();
  ids.for_each([&](int i, int32_t id, int32_t below) {
    check_id(p, watch, source, i, id, below);
    const int e = local_expert(p, rank, id);
    if (e >= 0) atomicAdd(&mine[e], 1);
  });
  __syncwarp();
  int32_t* out = p.array<int32_t>(g.workspace.chunk_counts, v) +
                 int64_t{source} * num_local * g.num_chunks + chunk;
  for (int e = lane; e < num_local; e += 32) out[int64_t{e} * g.num_chunks] = mine[e];
}

// ---- prefix ----

MOK_DEVICE int32_t inclusive_warp_sum(int32_t x) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int32_t below = __shfl_up_sync(kAllLanes, x, step);
    if (threadIdx.x % 32 >= step) x += below;
  }
  return x;
}

__global__ void __launch_bounds__(kPlanThreads) prefix(const __grid_constant__ CallParams p) {
  const Geometry& g = p.geometry;
  const int v = blockIdx.y;
  if (p.control(v)->abort != 0) return;
  const int num_local = g.shape.num_local_experts;
  const int pair = blockIdx.x * kPlanWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (pair >= g.shape.num_ranks * num_local) return;
  int32_t* of_chunk = p.array<int32_t>(g.workspace.chunk_counts, v) + int64_t{pair} * g.num_chunks;
  constexpr int kRounds = 8;  // loads in flight
  int32_t total = 0;
  for (int first = lane; first - lane < g.num_chunks; first += 32 * kRounds) {
    int32_t rows[kRounds];
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const int chunk = first + 32 * r;
      rows[r] = chunk < g.num_chunks ? of_chunk[chunk] : 0;
    }
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const int chunk = first + 32 * r;
      const int32_t sum = inclusive_warp_sum(rows[r]);
      if (chunk < g.num_chunks) of_chunk[chunk] = total + sum - rows[r];
      total += __shfl_sync(kAllLanes, sum, 31);
    }
  }
  if (lane == 0) p.array<int32_t>(g.workspace.counts, v)[pair] = total;
}

// ---- place ----

MOK_DEVICE int32_t expert_rows(const CallParams& p, int v, int e) {
  const plan::Shape& s = p.geometry.shape;
  const int32_t* counts = p.array<int32_t>(p.geometry.workspace.counts, v);
  int32_t rows = 0;
  for (int source = 0; source < s.num_ranks; ++source)
    rows += counts[source * s.num_local_experts + e];
  return rows;
}

// first_block[e] = blocks of the experts before e, in shared memory; by the whole CTA.
__device__ void scan_blocks(const CallParams& p, int v, int32_t* first_block) {
  __shared__ int32_t warp_sums[kPlanWarps];
  const int num_local = p.geometry.shape.num_local_experts;
  const int per_thread = (num_local + kPlanThreads - 1) / kPlanThreads;
  const int begin = min(static_cast<int>(threadIdx.x) * per_thread, num_local);
  const int end = min(begin + per_thread, num_local);
  int32_t sum = 0;
  for (int e = begin; e < end; ++e) {
    first_block[e] = sum;
    sum += plan::num_blocks(expert_rows(p, v, e), kBlockRows);
  }
  const int32_t inclusive = inclusive_warp_sum(sum);
  const int warp = threadIdx.x / 32;
  if (threadIdx.x % 32 == 31) warp_sums[warp] = inclusive;
  __syncthreads();
  int32_t before = inclusive - sum;
  for (int w = 0; w < warp; ++w) before += warp_sums[w];
  for (int e = begin; e < end; ++e) first_block[e] += before;
  if (threadIdx.x == kPlanThreads - 1) first_block[num_local] = before + sum;
  __syncthreads();
}

// An expert's blocks, and the padding of the last one; by the whole CTA.
template <plan::Pass kPass>
MOK_DEVICE void place_blocks(const CallParams& p, int v, int e, const int32_t* first_block) {
  const Geometry& g = p.geometry;
  const int first = first_block[e], end = first_block[e + 1];
  int32_t* block_expert = p.array<int32_t>(g.workspace.block_expert, v);
  for (int b = first + threadIdx.x; b < end; b += blockDim.x) block_expert[b] = e;
  const char* zeros = p.array<char>(g.workspace.zero_row, v);
  for (int row = first * kBlockRows + expert_rows(p, v, e) + threadIdx.x; row < end * kBlockRows;
       row += blockDim.x) {
    if constexpr (kPass == plan::Pass::kForward)
      p.array<RowRoute>(g.workspace.routes, v)[row] = {zeros, nullptr};
    else
      p.array<GradRoute>(g.workspace.routes, v)[row] = {zeros, zeros, nullptr, nullptr, 0.0f};
  }
}

template <plan::Pass kPass>
__global__ void __launch_bounds__(kPlanThreads) place(const __grid_constant__ CallParams p) {
  extern __shared__ int32_t shared[];
  const Geometry& g = p.geometry;
  const plan::Shape& s = g.shape;
  const int source = blockIdx.y, v = blockIdx.z, rank = p.rank(v);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int chunk = blockIdx.x * kPlanWarps + warp;
  const bool given_up = p.control(v)->abort != 0;
  const ChunkIds ids(p, v, source, chunk, source == rank || !given_up);
  const int num_local = s.num_local_experts;
  int32_t* first_block = shared;                              // [El + 1]
  int32_t* next = shared + num_local + 1 + warp * num_local;  // next[e]: rows placed so far
  if (chunk < g.num_chunks) {
    const int32_t* before = p.array<int32_t>(g.workspace.chunk_counts, v) +
                            int64_t{source} * num_local * g.num_chunks + chunk;
    for (int e = lane; e < num_local; e += 32) next[e] = before[int64_t{e} * g.num_chunks];
  }
  if (given_up) return;
  scan_blocks(p, v, first_block);  // synchronises

  const int cta = blockIdx.y * gridDim.x + blockIdx.x, ctas = gridDim.x * gridDim.y;
  for (int e = cta; e < num_local; e += ctas) place_blocks<kPass>(p, v, e, first_block);
  if (cta == 0)
    for (int e = threadIdx.x; e <= num_local; e += blockDim.x)
      p.array<int32_t>(g.workspace.expert_first_block, v)[e] = first_block[e];

  if (chunk >= g.num_chunks) return;
  const int32_t* counts = p.array<int32_t>(g.workspace.counts, v);
  const char* tokens = p.tokens_of(source, v);
  char* slots = p.heap(source) + g.heap.slots;
  const int64_t row_bytes = p.row_bytes();
  const int num_ids = s.num_tokens * s.top_k;
  int32_t* token_rows =
      s.num_ranks > 1 ? p.array<int32_t>(g.workspace.token_rows, v) + int64_t{source} * num_ids
                      : nullptr;
  ids.for_each([&](int i, int32_t id, int32_t) {
    const int e = local_expert(p, rank, id);
    // Lanes with the same expert take consecutive places, in lane order.
    const uint32_t same = __match_any_sync(kAllLanes, e);
    const int earlier = __popc(same & ((1u << lane) - 1));
    const int32_t j = e >= 0 ? next[e] + earlier : 0;
    __syncwarp();
    if (e >= 0 && earlier == 0) next[e] += __popc(same);
    __syncwarp();
    if (e < 0) {
      if (token_rows != nullptr && i < num_ids) token_rows[i] = -1;
      return;
    }
    const int token = i / s.top_k, slot = i % s.top_k;
    const int32_t row =
        first_block[e] * kBlockRows +
        plan::row_position(counts + e, num_local, s.num_ranks, source, j, s.source_order);
    const char* from = tokens + token * row_bytes;
    char* to = slots + plan::combine_slot(token, slot, s.num_tokens) * row_bytes;
    if constexpr (kPass == plan::Pass::kForward) {
      p.array<RowRoute>(g.workspace.routes, v)[row] = {from, to};
    } else {
      float* parts = reinterpret_cast<float*>(p.heap(source) + g.heap.parts);
      p.array<GradRoute>(g.workspace.routes, v)[row] = {
          from, p.cotangents_of(source, v) + token * row_bytes, to, parts + i,
          p.weights_of(source, v)[i]};
    }
    if (token_rows != nullptr) token_rows[i] = row;
  });
}

// ---- share ----

// A token of another rank that several experts here want is pulled once: its later rows are copied
// from the one that is pulled first. Only where the ring holds all blocks, so that it is still
// there.
template <plan::Pass kPass>
__global__ void __launch_bounds__(kPlanThreads) share(const __grid_constant__ CallParams p) {
  const Geometry& g = p.geometry;
  const plan::Shape& s = g.shape;
  const int source = blockIdx.y, v = blockIdx.z;
  if (p.control(v)->abort != 0 || source == p.rank(v)) return;
  const int num_blocks = p.array<int32_t>(g.workspace.expert_first_block, v)[s.num_local_experts];
  if (num_blocks > s.ring_blocks) return;
  const int num_ids = s.num_tokens * s.top_k;
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= num_ids) return;
  const int32_t* rows = p.array<int32_t>(g.workspace.token_rows, v) + int64_t{source} * num_ids;
  if (rows[i] < 0) return;
  const int slot = i % s.top_k;
  const int32_t first = plan::first_use_of(rows + (i - slot), s.top_k, slot, s, kPass);
  if (first < 0) return;
  const int64_t offset = first * p.row_bytes();
  if constexpr (kPass == plan::Pass::kForward) {
    p.array<RowRoute>(g.workspace.routes, v)[rows[i]].from = p.x_ring(v) + offset;
  } else {
    GradRoute& route = p.array<GradRoute>(g.workspace.routes, v)[rows[i]];
    route.x = p.x_ring(v) + offset;
    route.dy = p.dy_ring(v) + offset;
  }
}

}  // namespace

cudaError_t prepare_plan_kernels() {
  const auto set_shared = [](auto* kernel) {
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                kMaxPlanSharedBytes);
  };
  if (cudaError_t e = prepare_small_kernel(publish)) return e;
  if (cudaError_t e = prepare_small_kernel(copy)) return e;
  if (cudaError_t e = prepare_small_kernel(prefix)) return e;
  if (cudaError_t e = prepare_small_kernel(share<plan::Pass::kForward>)) return e;
  if (cudaError_t e = prepare_small_kernel(share<plan::Pass::kBackward>)) return e;
  for (auto* kernel : {count, place<plan::Pass::kForward>, place<plan::Pass::kBackward>}) {
    if (cudaError_t e = prepare_small_kernel(kernel)) return e;
    if (cudaError_t e = set_shared(kernel)) return e;
  }
  return cudaSuccess;
}

namespace {

// A CTA for every SM, shared among the virtual ranks.
dim3 publishing_ctas(const Geometry& g, int num_sms) {
  const unsigned ranks = g.num_virtual_ranks;
  return dim3((num_sms + ranks - 1) / ranks, ranks);
}

}  // namespace

cudaError_t launch_publish(const CallParams& p, int num_sms, cudaStream_t stream) {
  publish<<<publishing_ctas(p.geometry, num_sms), kPublishThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t launch_copy(const CallParams& p, int num_sms, cudaStream_t stream) {
  if (p.geometry.shape.num_ranks == 1) return cudaSuccess;
  copy<<<publishing_ctas(p.geometry, num_sms), kCopyThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t launch_plan(const CallParams& p, cudaStream_t stream) {
  const Geometry& g = p.geometry;
  const unsigned ranks = g.num_virtual_ranks, sources = g.shape.num_ranks;
  const unsigned experts = g.shape.num_local_experts;
  const unsigned chunk_ctas = (g.num_chunks + kPlanWarps - 1) / kPlanWarps;
  const unsigned pair_ctas = (sources * experts + kPlanWarps - 1) / kPlanWarps;
  count<<<dim3(chunk_ctas, sources, ranks), kPlanThreads, kPlanWarps * experts * 4, stream>>>(p);
  prefix<<<dim3(pair_ctas, ranks), kPlanThreads, 0, stream>>>(p);
  const bool forward = g.pass == plan::Pass::kForward;
  const auto place_pass = forward ? place<plan::Pass::kForward> : place<plan::Pass::kBackward>;
  place_pass<<<dim3(chunk_ctas, sources, ranks), kPlanThreads,
               (kPlanWarps * experts + experts + 1) * 4, stream>>>(p);
  if (sources > 1) {
    const unsigned num_ids = g.shape.num_tokens * g.shape.top_k;
    const unsigned id_ctas = (num_ids + kPlanThreads - 1) / kPlanThreads;
    const auto share_pass = forward ? share<plan::Pass::kForward> : share<plan::Pass::kBackward>;
    share_pass<<<dim3(id_ctas, sources, ranks), kPlanThreads, 0, stream>>>(p);
  }
  return cudaGetLastError();
}

}  // namespace jax_mok::cuda
