// Kernel parameters: everything a call needs, passed by value, with accessors that find the part of
// one rank. What forward and backward have in common comes first; the plan kernels take only that.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include "cuda/layout.h"
#include "plan/order.h"
#include "plan/routing.h"

namespace jax_mok::cuda {

// What a launch of the persistent kernel does. It holds every SM of its GPU, so it must not wait
// for a peer there: a collective of XLA, on another stream, may hold an SM of the peer's GPU and
// wait for one of this GPU. With peers on other GPUs, kWork and kSum are launches of their own, and
// the ranks wait for each other before them in kernels of one CTA.
enum class Part : int32_t { kAll, kWork, kSum };

struct CallParams {
  Geometry geometry;
  Part part;
  const void* x;
  const void* dy;  // backward only
  const int32_t* expert_ids;
  const float* expert_weights;
  void* saved_x;  // takes the place of the token ring in a forward that saves; read in the backward
  void* workspace;
  void* heaps[kMaxRanks];
  Status* status;
  uint64_t call_id;    // 0: the number of the call
  int32_t first_rank;  // rank of virtual rank 0
  uint64_t timeout_ns, start_timeout_ns;
  TestHooks hooks;

  __device__ int rank(int virtual_rank) const { return first_rank + virtual_rank; }
  __device__ plan::BlockMap block_map(int v) const {
    const int32_t* first = array<int32_t>(geometry.workspace.expert_first_block, v);
    return {first[geometry.shape.num_local_experts],
            array<int32_t>(geometry.workspace.block_expert, v), first};
  }

  // Rank v's part of a workspace array.
  template <typename T>
  __device__ T* array(const Span& span, int v) const {
    return reinterpret_cast<T*>(static_cast<char*>(workspace) + span.offset + v * span.bytes);
  }
  __device__ RankControl* control(int v) const {
    return array<RankControl>(geometry.workspace.control, v);
  }
  // Rows pulled into each slot of the token ring.
  __device__ uint32_t* x_full(int v) const {
    return array<uint32_t>(geometry.workspace.counters, v);
  }

  __device__ char* heap(int rank) const { return static_cast<char*>(heaps[rank]); }
  __device__ HeapControl* heap_control(int rank) const {
    return reinterpret_cast<HeapControl*>(heap(rank));
  }
  __device__ int64_t row_bytes() const { return int64_t{geometry.hidden} * 2; }
  // Rank v's tokens in x, or in another array [T, H] of bf16.
  __device__ const char* local_rows(const void* all, int v) const {
    return static_cast<const char*>(all) + int64_t{v} * geometry.shape.num_tokens * row_bytes();
  }
  // The token ring lies in the workspace, or in what the forward saves.
  __device__ char* x_ring(int v) const {
    if (saved_x != nullptr && geometry.pass == plan::Pass::kForward)
      return static_cast<char*>(saved_x) +
             int64_t{v} * geometry.shape.ring_blocks * kBlockRows * row_bytes();
    return array<char>(geometry.workspace.x_ring, v);
  }
  __device__ char* dy_ring(int v) const { return array<char>(geometry.workspace.dy_ring, v); }
  // Whether tokens may have to be pulled at all.
  __device__ bool reads_tokens() const {
    return geometry.pass == plan::Pass::kForward || !geometry.save ||
           plan::max_blocks(geometry.shape) > geometry.shape.ring_blocks;
  }
  __device__ int64_t ring_bytes() const {
    return int64_t{geometry.shape.ring_blocks} * kBlockRows * row_bytes();
  }

  // A rank reads its own ids, weights and tokens where they are, those of others in their heaps.
  __device__ const int32_t* ids_of(int source, int v) const {
    if (source != rank(v))
      return reinterpret_cast<const int32_t*>(heap(source) + geometry.heap.ids);
    return expert_ids + int64_t{v} * geometry.shape.num_tokens * geometry.shape.top_k;
  }
  __device__ const float* weights_of(int source, int v) const {
    if (source != rank(v))
      return reinterpret_cast<const float*>(heap(source) + geometry.heap.weights);
    return expert_weights + int64_t{v} * geometry.shape.num_tokens * geometry.shape.top_k;
  }
  __device__ const char* tokens_of(int source, int v) const {
    return source == rank(v) ? local_rows(x, v) : heap(source) + geometry.heap.x;
  }
  __device__ const char* cotangents_of(int source, int v) const {
    return source == rank(v) ? local_rows(dy, v) : heap(source) + geometry.heap.dy;
  }
};

// TMA descriptors. Activations are 2D [rows, columns] in boxes of 128 x 64; weights are 3D
// [columns / 64][rows][64] so that one box holds several swizzled 64-column panels.
struct ForwardMaps {
  CUtensorMap x_ring, w_gate, w_up, h, w_down;
  CUtensorMap x, s_gate, s_up, shared_h, s_down;
};

struct ForwardParams : CallParams {
  ForwardMaps maps;
  const void *b_gate, *b_up, *b_down;
  const float* s_scale;
  void* y;
  void* saved_gate_up;  // null: not saved
  Activation activation;
  bool plain_activation;  // no biases, alpha 1, no limit, no offset

  __device__ uint32_t* x_empty(int v) const { return x_full(v) + geometry.shape.ring_blocks; }
  __device__ uint32_t* h_full(int v) const { return x_empty(v) + geometry.shape.ring_blocks; }
  __device__ uint32_t* h_empty(int v) const { return h_full(v) + geometry.shape.macrobatch_blocks; }
  __device__ uint32_t* shared_full(int v) const {
    return h_empty(v) + geometry.shape.macrobatch_blocks;
  }
};

// Loads a kernel that runs beside others or right before the persistent kernel: they share a
// multiprocessor only if it divides its memory in the same way for both.
template <typename Kernel>
cudaError_t prepare_small_kernel(Kernel* kernel) {
  cudaFuncAttributes attributes;
  if (cudaError_t e = cudaFuncGetAttributes(&attributes, kernel)) return e;  // this loads it
  return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                              cudaSharedmemCarveoutMaxShared);
}

}  // namespace jax_mok::cuda
