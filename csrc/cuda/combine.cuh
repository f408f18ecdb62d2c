// The end of a call: the ranks meet once all results are pushed, then every rank sums the slots of
// its tokens, in slot order and in fp32. With peers on other GPUs these are three launches: see
// Part.
#pragma once

#include "cuda/faults.cuh"

namespace jax_mok::cuda {

// Both by all threads of one CTA, at least as many as ranks.
//
// Once all CTAs are done: tells the peers that all results for them are pushed, or that the call
// has failed here. Returns which.
__device__ inline bool tell_peers(const ForwardParams& p, const Watch& watch) {
  if (threadIdx.x == 0)
    wait_counter(watch, &watch.control->ctas_done, p.geometry.ctas_per_rank, FaultPhase::kCombine,
                 0, -1);
  __syncthreads();
  const bool good = __syncthreads_and(load_acquire_gpu(&watch.control->abort) == 0);
  jitter(p, 0x20000);
  if (threadIdx.x < p.geometry.shape.num_ranks) {
    HeapControl* peer = p.heap_control(threadIdx.x);
    store_release_sys(good ? &peer->pushed[watch.rank] : &peer->failed[watch.rank], watch.call);
  }
  return good;
}

// `good`: what tell_peers said. Decides for the whole rank whether the sum may be formed, so that a
// rank's output is either all there or all NaN.
__device__ inline void hear_peers(const ForwardParams& p, const Watch& watch, bool good) {
  const int num_ranks = p.geometry.shape.num_ranks, peer = threadIdx.x;
  if (good) {
    const HeapControl* own = p.heap_control(watch.rank);
    good = __syncthreads_and(peer >= num_ranks || wait_peer(watch, own, &own->pushed[peer], peer,
                                                            FaultPhase::kCombine, p.timeout_ns));
    if (!good && peer < num_ranks)
      store_release_sys(&p.heap_control(peer)->failed[watch.rank], watch.call);
  }
  if (threadIdx.x == 0) store_release_gpu(&watch.control->verdict, good ? kSum : kFail);
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

// y of one token at 8 columns, and at the 8 columns half a row further: sums over the slots in use
// of weight * result, in slot order, then the shared experts. All loads of a batch are under way
// together: even those of the ids, so a slot that is not in use is loaded and left out.
MOK_DEVICE void sum_slots(const ForwardParams& p, int v, int token, int column) {
  const Geometry& g = p.geometry;
  const int num_tokens = g.shape.num_tokens, top_k = g.shape.top_k;
  const int64_t row = int64_t{v} * num_tokens + token;
  const int64_t half_row = g.hidden;  // bytes
  const int64_t slot_bytes = int64_t{num_tokens} * g.hidden * 2;
  const int64_t offset = (int64_t{token} * g.hidden + column) * 2;
  const char* slots = p.heap(p.rank(v)) + g.heap.slots + offset;
  const int32_t* ids = p.buffers.expert_ids + row * top_k;
  const float* weights = p.buffers.expert_weights + row * top_k;
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
        weight[i] = weights[first + i];
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
    const float scale = p.buffers.s_scale == nullptr ? 1.0f : p.buffers.s_scale[row];
    const char* shared = p.array<char>(g.workspace.shared_y, v) + offset;
    sums[0].add(load_peer_written(shared), scale);
    sums[1].add(load_peer_written(shared + half_row), scale);
  }
  char* y = static_cast<char*>(p.buffers.y) + v * slot_bytes + offset;
  store_global(y, sums[0].packed());
  store_global(y + half_row, sums[1].packed());
}

// All threads of all CTAs of the rank, after their work.
__device__ inline void combine(const ForwardParams& p, const Watch& watch, int v, int cta) {
  __shared__ uint32_t verdict;
  __syncthreads();
  if (p.part != Part::kSum && threadIdx.x == 0) add_release_sys(&watch.control->ctas_done, 1);
  if (p.part == Part::kWork) return;
  if (p.part == Part::kAll && cta == 0) hear_peers(p, watch, tell_peers(p, watch));
  if (threadIdx.x == 0) {
    // The first CTA always decides: its own waits are bounded.
    while ((verdict = load_acquire_gpu(&watch.control->verdict)) == kPending) __nanosleep(40);
  }
  __syncthreads();
  const Geometry& g = p.geometry;
  const int first = cta * blockDim.x + threadIdx.x, step = g.ctas_per_rank * blockDim.x;
  if (verdict == kSum) {
    const int chunks = g.hidden / 16;  // of 8 columns, in half a row
    for (int i = first; i < g.shape.num_tokens * chunks; i += step)
      sum_slots(p, v, i / chunks, i % chunks * 8);
  } else {
    const int chunks = g.shape.num_tokens * (g.hidden / 8);
    uint4* y = static_cast<uint4*>(p.buffers.y) + int64_t{v} * chunks;
    const uint32_t nan = 0x7fff7fffu;  // two of them
    for (int i = first; i < chunks; i += step) y[i] = {nan, nan, nan, nan};
  }
}

}  // namespace jax_mok::cuda
