// Both sides of an exchange of rows: where its memory lies and how its stages are enqueued, and the
// kernel that moves rows. Publishing, copying and meeting are those of a layer's call, for which
// this one is a layer without ids.
#include "cuda/exchange.h"

#include <cstring>

#include "cuda/combine.cuh"
#include "cuda/meeting.h"
#include "cuda/plan_kernels.h"

namespace jax_mok::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kBatch = 8;          // loads of a lane in flight
constexpr int kPublishCtas = 128;  // of what is not timed
constexpr int64_t kAlignment = 1024;

// When a rank's CTAs began and ended, by its GPU's clock. Zeroed at the start of a call.
struct Clock {
  unsigned long long not_begun;  // the complement, so that the earliest is the largest
  unsigned long long ended;
};

struct ExchangeParams : CallParams {
  ExchangeFacts facts;
  const Move* moves;
  int32_t* ns;

  __device__ Clock* clock(int v) const { return array<Clock>(geometry.workspace.counters, v); }
};

// By all lanes of a warp.
MOK_DEVICE void copy_row(char* to, const char* from, int bytes) {
  constexpr int kStep = 32 * 16;
  for (int first = threadIdx.x % 32 * 16; first < bytes; first += kBatch * kStep) {
    uint4 piece[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      if (first + i * kStep < bytes) piece[i] = load_once(from + first + i * kStep);
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      if (first + i * kStep < bytes) store_global(to + first + i * kStep, piece[i]);
  }
}

// A warp's share of a rank's list.
MOK_DEVICE void move_share(const ExchangeParams& p, const Watch& watch, int v) {
  const int step = gridDim.x * kWarps, end = p.facts.num_moves;
  const int4* list = reinterpret_cast<const int4*>(p.moves) + int64_t{v} * end;
  const int64_t row_bytes = p.facts.row_bytes;
  int i = blockIdx.x + threadIdx.x / 32 * gridDim.x;
  int4 next = i < end ? list[i] : int4{};
  for (; i < end; i += step) {
    const Move move = {next.x, next.y, next.z, next.w};
    if (i + step < end) next = list[i + step];
    if (move.source_rank == -1) continue;
    if (!is_allowed(p.facts, watch.rank, move)) {
      if (threadIdx.x % 32 == 0)
        report(watch, {FaultCode::kMoveOutOfRange, FaultPhase::kDispatch, i, move.source_row,
                       p.facts.push ? move.target_rank : move.source_rank, move.target_row});
      return;
    }
    copy_row(p.heap(move.target_rank) + p.geometry.heap.slots + move.target_row * row_bytes,
             p.heap(move.source_rank) + p.geometry.heap.x + move.source_row * row_bytes,
             p.facts.row_bytes);
  }
}

// Waits for nobody: see Part.
__global__ void __launch_bounds__(kThreads) move_rows(const __grid_constant__ ExchangeParams p) {
  const int v = blockIdx.y;
  const Watch watch = make_watch(p, v);
  Clock* clock = p.clock(v);
  const bool first = threadIdx.x == 0;
  if (first) atomicMax(&clock->not_begun, ~global_timer_ns());
  jitter(p, 0x30000);
  // All threads or none: no row comes in part.
  if (!__syncthreads_or(aborted(watch))) move_share(p, watch, v);
  __threadfence_system();  // stores have landed, on whichever rank
  __syncthreads();
  uint32_t done = 0;
  if (first) {
    atomicMax(&clock->ended, global_timer_ns());
    done = add_acq_rel_sys(&watch.control->ctas_done, 1) + 1;
  }
  // The CTA that ends last speaks for all.
  if (!__syncthreads_or(done == gridDim.x)) return;
  const bool good = tell_peers(p, watch);
  if (!first) return;
  const uint64_t begun = ~atomicMax(&clock->not_begun, 0ull),
                 ended = atomicMax(&clock->ended, 0ull);
  p.ns[v] = good ? static_cast<int32_t>(min(ended - begun, uint64_t{INT32_MAX})) : -1;
}

// The geometry of a layer without ids and experts, whose slots are the places for rows.
Geometry make_geometry(const ExchangeFacts& f) {
  Geometry g;
  std::memset(static_cast<void*>(&g), 0, sizeof(g));
  g.pass = plan::Pass::kForward;
  g.shape.num_ranks = f.num_ranks;
  g.shape.num_tokens = f.num_tokens;
  g.num_virtual_ranks = f.num_virtual_ranks;
  g.hidden = f.row_bytes / 2;
  const auto round_up = [](int64_t bytes) {
    return plan::ceil_div(bytes, kAlignment) * kAlignment;
  };
  const auto add = [&](int64_t bytes) {
    const Span span = {g.workspace.bytes, round_up(bytes)};
    g.workspace.bytes += span.bytes * f.num_virtual_ranks;
    return span;
  };
  g.workspace.control = add(sizeof(RankControl));
  g.workspace.counters = add(sizeof(Clock));
  g.workspace.zero_row = add(f.row_bytes);
  g.heap.x = round_up(sizeof(HeapControl));
  g.heap.slots = g.heap.x + round_up(int64_t{f.num_tokens} * f.row_bytes);
  g.heap.bytes = g.heap.slots + round_up(int64_t{f.num_rows} * f.row_bytes);
  return g;
}

}  // namespace

std::string check_exchange(const ExchangeFacts& f) {
  const struct {
    const char* name;
    int32_t value, least, most;
  } fields[] = {
      {"num_ranks", f.num_ranks, 2, kMaxRanks},  {"num_tokens", f.num_tokens, 1, INT32_MAX},
      {"num_rows", f.num_rows, 1, INT32_MAX},    {"num_moves", f.num_moves, 1, INT32_MAX},
      {"row_bytes", f.row_bytes, 16, INT32_MAX}, {"num_sms", f.num_sms, 1, 1024},
  };
  for (const auto& field : fields)
    if (field.value < field.least || field.value > field.most)
      return std::string(field.name) + " is " + std::to_string(field.value) +
             "; allowed: " + std::to_string(field.least) + " to " + std::to_string(field.most);
  if (f.row_bytes % 16 != 0)
    return "row_bytes is " + std::to_string(f.row_bytes) + "; allowed: multiples of 16";
  if (f.num_virtual_ranks != 1 && f.num_virtual_ranks != f.num_ranks)
    return "num_virtual_ranks is " + std::to_string(f.num_virtual_ranks) +
           "; allowed: 1 and num_ranks, which is " + std::to_string(f.num_ranks);
  if (!(f.timeout_seconds > 0 && f.start_timeout_seconds > 0))
    return "timeout_seconds and start_timeout_seconds must be greater than 0";
  return "";
}

size_t exchange_workspace_bytes(const ExchangeFacts& facts) {
  return make_geometry(facts).workspace.bytes;
}
size_t exchange_heap_bytes(const ExchangeFacts& facts) { return make_geometry(facts).heap.bytes; }

cudaError_t prepare_exchange() { return prepare_small_kernel(move_rows); }

cudaError_t launch_exchange(CallStage stage, const ExchangeFacts& f, int rank,
                            const ExchangeBuffers& b, cudaStream_t stream, const TestHooks& hooks) {
  ExchangeParams p;
  std::memset(static_cast<void*>(&p), 0, sizeof(p));
  p.geometry = make_geometry(f);
  p.x = b.x;
  p.workspace = b.workspace;
  std::memcpy(p.heaps, b.heaps, sizeof(p.heaps));
  p.status = b.status;
  p.call_id = b.call_id;
  p.first_rank = rank;
  p.timeout_ns = static_cast<uint64_t>(f.timeout_seconds * 1e9);
  p.start_timeout_ns = static_cast<uint64_t>(f.start_timeout_seconds * 1e9);
  p.hooks = hooks;
  p.facts = f;
  p.moves = b.moves;
  p.ns = b.ns;
  const bool has_peers = f.num_ranks > f.num_virtual_ranks;
  const size_t bytes = size_t(f.num_rows) * f.row_bytes;
  const auto places = [&](int v) {
    return static_cast<char*>(b.heaps[rank + v]) + p.geometry.heap.slots;
  };
  switch (stage) {
    case CallStage::kPublish:
      for (int v = 0; v < f.num_virtual_ranks; ++v)
        if (cudaError_t e = cudaMemsetAsync(places(v), 0xff, bytes, stream)) return e;
      return launch_publish(p, kPublishCtas, stream);
    case CallStage::kCopy:
      return launch_copy(p, kPublishCtas, stream);
    case CallStage::kPlan:
      return has_peers ? launch_await_ids(p, stream) : cudaSuccess;
    case CallStage::kWork:
      if (has_peers)
        if (cudaError_t e = launch_await_tokens(p, stream)) return e;
      move_rows<<<dim3(f.num_sms, f.num_virtual_ranks), kThreads, 0, stream>>>(p);
      return cudaGetLastError();
    case CallStage::kSum:
      if (has_peers)
        if (cudaError_t e = launch_hear(p, stream)) return e;
      for (int v = 0; v < f.num_virtual_ranks; ++v)
        if (cudaError_t e = cudaMemcpyAsync(static_cast<char*>(b.rows) + v * bytes, places(v),
                                            bytes, cudaMemcpyDeviceToDevice, stream))
          return e;
      return cudaSuccess;
  }
  return cudaErrorInvalidValue;
}

}  // namespace jax_mok::cuda
