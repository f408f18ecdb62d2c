// The end of a call: the ranks meet once all results are pushed, then every rank sums the slots of
// its tokens, in slot order and in fp32. With peers on other GPUs the last CTA tells them so at the
// end of the work, and waiting for them and the sums are two more launches: see Part.
#pragma once

#include "cuda/peers.cuh"

namespace jax_mok::cuda {

// Until all CTAs of the rank have left their tiles, whether they have finished them or not: what
// they store must not land on what comes after. They notice when a call is given up.
MOK_DEVICE void wait_ctas(const CallParams& p, const Watch& watch) {
  const uint32_t all = p.geometry.ctas_per_rank;
  const uint64_t start = global_timer_ns();
  uint32_t done;
  while ((done = load_acquire_gpu(&watch.control->ctas_done)) < all) {
    if (global_timer_ns() - start > p.start_timeout_ns)  // longer than any wait of theirs
      return report(watch, {FaultCode::kTimeout, FaultPhase::kCombine, 0, -1,
                            static_cast<int32_t>(done), static_cast<int32_t>(all)});
    __nanosleep(20);
  }
}

// All of these by all threads of one CTA, at least as many as ranks.
//
// After all CTAs: tells the peers that all results for them are pushed, or that the call has failed
// here. Returns which.
__device__ inline bool tell_peers(const CallParams& p, const Watch& watch) {
  const int peer = thread_index();
  const bool good = __syncthreads_and(load_acquire_gpu(&watch.control->abort) == 0);
  jitter(p, 0x20000);
  if (peer < p.geometry.shape.num_ranks) {
    HeapControl* heap = p.heap_control(peer);
    store_release_sys(good ? &heap->pushed[watch.rank] : &heap->failed[watch.rank],
                      p.heap_control(watch.rank)->id);
  }
  return good;
}

// `good`: what tell_peers said. Decides for the whole rank whether the sum may be formed, so that a
// rank's output is either all there or all NaN. Returns which.
__device__ inline bool hear_peers(const CallParams& p, const Watch& watch, bool good) {
  const int num_ranks = p.geometry.shape.num_ranks, peer = thread_index();
  if (good) {
    const HeapControl* own = p.heap_control(watch.rank);
    good = __syncthreads_and(peer >= num_ranks || wait_peer(watch, own, &own->pushed[peer], peer,
                                                            FaultPhase::kCombine, p.timeout_ns));
    if (!good && peer < num_ranks)
      store_release_sys(&p.heap_control(peer)->failed[watch.rank], own->id);
  }
  if (peer == 0) store_release_gpu(&watch.control->verdict, good ? kSum : kFail);
  return good;
}

// Sums of 8 columns, in fp32.
struct ColumnSums {
  float sum[8] = {};

  MOK_DEVICE void add(const uint4& value, float weight) {
    const uint32_t pairs[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum[2 * i] = fmaf(weight, bf16_low(pairs[i]), sum[2 * i]);
      sum[2 * i + 1] = fmaf(weight, bf16_high(pairs[i]), sum[2 * i + 1]);
    }
  }
  MOK_DEVICE uint4 packed() const {
    return {pack_bf16(sum[0], sum[1]), pack_bf16(sum[2], sum[3]), pack_bf16(sum[4], sum[5]),
            pack_bf16(sum[6], sum[7])};
  }
};

// One token of y (or dx) at 8 columns, and at the 8 columns half a row further: sums over the slots
// in use of weight * result, in slot order, then the shared experts. All loads of a batch are under
// way together: even those of the ids, so a slot that is not in use is loaded and left out. Null
// weights or scale stand for ones.
MOK_DEVICE void sum_slots(const CallParams& p, int v, int token, int column, const float* weights,
                          const float* shared_scale, void* result) {
  const Geometry& g = p.geometry;
  const int num_tokens = g.shape.num_tokens, top_k = g.shape.top_k;
  const int64_t row = int64_t{v} * num_tokens + token;
  const int64_t half_row = g.hidden;  // bytes
  const int64_t slot_bytes = int64_t{num_tokens} * g.hidden * 2;
  const int64_t offset = (int64_t{token} * g.hidden + column) * 2;
  const char* slots = p.heap(p.rank(v)) + g.heap.slots + offset;
  const int32_t* ids = p.expert_ids + row * top_k;
  ColumnSums sums[2];
  constexpr int kBatch = 8;
  for (int first = 0; first < top_k; first += kBatch) {
    uint4 value[kBatch][2];
    float weight[kBatch];
    int32_t id[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      id[i] = plan::kUnusedSlot;
      if (first + i < top_k) {
        const char* slot = slots + (first + i) * slot_bytes;
        value[i][0] = load_peer_written(slot);
        value[i][1] = load_peer_written(slot + half_row);
        id[i] = ids[first + i];
        weight[i] = weights == nullptr ? 1.0f : weights[row * top_k + first + i];
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (id[i] == plan::kUnusedSlot) continue;
      sums[0].add(value[i][0], weight[i]);
      sums[1].add(value[i][1], weight[i]);
    }
  }
  if (g.shared_intermediate > 0) {
    const float scale = shared_scale == nullptr ? 1.0f : shared_scale[row];
    const char* shared = p.array<char>(g.workspace.shared_y, v) + offset;
    sums[0].add(load_peer_written(shared), scale);
    sums[1].add(load_peer_written(shared + half_row), scale);
  }
  char* to = static_cast<char*>(result) + v * slot_bytes + offset;
  store_global(to, sums[0].packed());
  store_global(to + half_row, sums[1].packed());
}

// A thread's share of the work of all threads of a rank.
struct Share {
  int64_t first, step;
};
MOK_DEVICE Share share_of(const Geometry& g, int cta) {
  return {int64_t{cta} * blockDim.x + thread_index(), int64_t{g.ctas_per_rank} * blockDim.x};
}
MOK_DEVICE void sum_all_slots(const CallParams& p, int v, const Share& share, const float* weights,
                              const float* shared_scale, void* result) {
  const int chunks = p.geometry.hidden / 16;  // of 8 columns, in half a row
  const int end = p.geometry.shape.num_tokens * chunks;
  for (int i = share.first; i < end; i += share.step)
    sum_slots(p, v, i / chunks, i % chunks * 8, weights, shared_scale, result);
}
// NaN as bf16 and as float32. `bytes` is a multiple of 4.
MOK_DEVICE void fill_nan(void* to, int64_t bytes, const Share& share) {
  for (int64_t i = share.first; i < bytes / 4; i += share.step)
    static_cast<uint32_t*>(to)[i] = 0x7fff7fffu;
}

enum class Outcome { kSum, kFail, kLater };

// All threads of all CTAs of the rank, after their work: whether the ranks have agreed on sums.
// `verdict` lies in shared memory.
__device__ inline Outcome finish(const CallParams& p, const Watch& watch, int cta,
                                 volatile uint32_t* verdict) {
  __syncthreads();
  const bool first = thread_index() == 0;
  uint32_t done = 0;
  if (p.part != Part::kSum && first) done = add_acq_rel_sys(&watch.control->ctas_done, 1) + 1;
  if (p.part == Part::kWork) {
    // The CTA that ends last speaks for all, and waits for nobody.
    if (__syncthreads_or(done == static_cast<uint32_t>(p.geometry.ctas_per_rank)))
      tell_peers(p, watch);
    return Outcome::kLater;
  }
  if (p.part == Part::kAll && cta == 0) {
    if (first) wait_ctas(p, watch);
    __syncthreads();
    hear_peers(p, watch, tell_peers(p, watch));
  }
  if (first) {
    // The first CTA always decides: its own waits are bounded.
    uint32_t decided;
    while ((decided = load_acquire_gpu(&watch.control->verdict)) == kPending) __nanosleep(40);
    *verdict = decided;
  }
  __syncthreads();
  return *verdict == kSum ? Outcome::kSum : Outcome::kFail;
}

}  // namespace jax_mok::cuda
