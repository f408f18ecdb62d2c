// The end of a call: the ranks meet once all results are pushed, then every rank sums the slots of
// its tokens, in slot order and in fp32.
#pragma once

#include "cuda/faults.cuh"

namespace jax_mok::cuda {

// All threads of the rank's first CTA. Decides for the whole rank whether the sum may be formed, so
// that a rank's output is either all there or all NaN.
__device__ inline void meet_peers(const ForwardParams& p, const Watch& watch, int v) {
  const int num_ranks = p.geometry.shape.num_ranks;
  HeapControl* own = p.heap_control(watch.rank);
  if (threadIdx.x == 0)
    wait_counter(watch, &watch.control->ctas_done, p.geometry.ctas_per_rank, FaultPhase::kCombine,
                 0, -1);
  __syncthreads();
  bool good = load_acquire_gpu(&watch.control->abort) == 0;
  good = __syncthreads_and(good);
  jitter(p, 0x20000);
  const int peer = threadIdx.x;
  if (good) {
    bool came = true;
    if (peer < num_ranks) {
      store_release_sys(&p.heap_control(peer)->pushed[watch.rank], watch.call);
      came = wait_peer(watch, own, &own->pushed[peer], peer, FaultPhase::kCombine, p.timeout_ns);
    }
    good = __syncthreads_and(came);
  }
  if (!good && peer < num_ranks)
    store_release_sys(&p.heap_control(peer)->failed[watch.rank], watch.call);
  if (threadIdx.x == 0) store_release_gpu(&watch.control->verdict, good ? kSum : kFail);
}

// y[token][8 columns] = sum over the slots in use of weight * result, then the shared experts.
MOK_DEVICE uint4 sum_slots(const ForwardParams& p, int v, int token, int column) {
  const Geometry& g = p.geometry;
  const int num_tokens = g.shape.num_tokens, top_k = g.shape.top_k;
  const int64_t offset = (int64_t{token} * g.hidden + column) * 2;
  const int64_t slot_bytes = int64_t{num_tokens} * g.hidden * 2;
  const char* slots = p.heap(p.rank(v)) + g.heap.slots + offset;
  const int64_t routing = (int64_t{v} * num_tokens + token) * top_k;
  const int32_t* ids = p.buffers.expert_ids + routing;
  const float* weights = p.buffers.expert_weights + routing;
  float sum[8] = {};
  const auto add = [&](const uint4& v4, float weight) {
    const uint32_t pairs[4] = {v4.x, v4.y, v4.z, v4.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum[2 * i] = fmaf(weight, bf16_low(pairs[i]), sum[2 * i]);
      sum[2 * i + 1] = fmaf(weight, bf16_high(pairs[i]), sum[2 * i + 1]);
    }
  };
  constexpr int kBatch = 8;  // loads in flight
  for (int first = 0; first < top_k; first += kBatch) {
    uint4 value[kBatch];
    float weight[kBatch];
    bool used[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int slot = first + i;
      used[i] = slot < top_k && ids[slot] >= 0;
      if (used[i]) {
        weight[i] = weights[slot];
        value[i] = load_peer_written(slots + slot * slot_bytes);
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      if (used[i]) add(value[i], weight[i]);
  }
  if (g.shared_intermediate > 0) {
    const float* scale = p.buffers.s_scale;
    const char* shared = p.array<char>(g.workspace.shared_y, v) + offset;
    add(load_peer_written(shared),
        scale == nullptr ? 1.0f : scale[int64_t{v} * num_tokens + token]);
  }
  return {pack_bf16(sum[0], sum[1]), pack_bf16(sum[2], sum[3]), pack_bf16(sum[4], sum[5]),
          pack_bf16(sum[6], sum[7])};
}

// All threads of all CTAs of the rank, after their work.
__device__ inline void combine(const ForwardParams& p, const Watch& watch, int v, int cta) {
  __shared__ uint32_t verdict;
  __syncthreads();
  if (threadIdx.x == 0) add_release_sys(&watch.control->ctas_done, 1);
  if (cta == 0) meet_peers(p, watch, v);
  if (threadIdx.x == 0) {
    // The first CTA always decides: its own waits are bounded.
    while ((verdict = load_acquire_gpu(&watch.control->verdict)) == kPending) __nanosleep(40);
  }
  __syncthreads();
  const Geometry& g = p.geometry;
  const bool good = verdict == kSum;
  const int chunks = g.hidden / 8;
  const int total = g.shape.num_tokens * chunks;
  uint4* y = static_cast<uint4*>(p.buffers.y) + int64_t{v} * total;
  const uint4 nan = {0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu};
  for (int i = cta * blockDim.x + threadIdx.x; i < total; i += g.ctas_per_rank * blockDim.x)
    y[i] = good ? sum_slots(p, v, i / chunks, i % chunks * 8) : nan;
}

}  // namespace jax_mok::cuda
