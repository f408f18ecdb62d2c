// The backward of one MoE layer on the GPU, as plain host functions: what an XLA FFI handler calls.
// Same rules as forward.h: nothing allocates, the caller owns every buffer, forward and backward
// calls share heaps, and prepare_module() loads the kernels of both.
#pragma once

#include "cuda/forward.h"

namespace jax_mok::cuda {

// num_comm_sms is the backward's own; everything else must be what the forward was called with.
// `save`: saved_x and saved_gate_up are what that forward left.
struct BackwardFacts : ForwardFacts {
  bool float32_weight_grads = false;  // of the routed experts; else bf16
};

// Device addresses of one rank; virtual ranks as in ForwardBuffers. Every rank has its own
// gradients of the shared experts: with virtual ranks ds_gate, ds_up and ds_down have one more
// leading dimension num_virtual_ranks.
struct BackwardBuffers {
  const void* x = nullptr;                // bf16 [T, H]
  const void* dy = nullptr;               // bf16 [T, H], the cotangent of y
  const int32_t* expert_ids = nullptr;    // [T, k]
  const float* expert_weights = nullptr;  // [T, k]
  const void* w_gate = nullptr;           // bf16 [El, H, I]
  const void* w_up = nullptr;             // bf16 [El, H, I]
  const void* w_down = nullptr;           // bf16 [El, I, H]
  const void* b_gate = nullptr;           // bf16 [El, I], or null
  const void* b_up = nullptr;             // bf16 [El, I], or null
  const void* b_down = nullptr;           // bf16 [El, H], or null
  const void* s_gate = nullptr;           // bf16 [H, S], or null
  const void* s_up = nullptr;             // bf16 [H, S], or null
  const void* s_down = nullptr;           // bf16 [S, H], or null
  const float* s_scale = nullptr;         // [T], or null (= 1)
  const void* saved_x = nullptr;          // as the forward wrote them; null without `save`
  const void* saved_gate_up = nullptr;

  void* dx = nullptr;                 // bf16 [T, H]
  float* d_expert_weights = nullptr;  // [T, k]; 0 where the slot is unused
  void* dw_gate = nullptr;            // [El, H, I], bf16 or float32
  void* dw_up = nullptr;              // [El, H, I]
  void* dw_down = nullptr;            // [El, I, H]
  void* db_gate = nullptr;            // bf16 [El, I], or null
  void* db_up = nullptr;              // bf16 [El, I], or null
  void* db_down = nullptr;            // bf16 [El, H], or null
  void* ds_gate = nullptr;            // bf16 [H, S], or null
  void* ds_up = nullptr;              // bf16 [H, S], or null
  void* ds_down = nullptr;            // bf16 [S, H], or null
  float* ds_scale = nullptr;          // [T], or null
  void* workspace = nullptr;          // backward_workspace_bytes(); contents do not matter
  void* heaps[kMaxRanks] = {};        // as in ForwardBuffers
  struct Status* status = nullptr;    // as in ForwardBuffers
  uint64_t call_id = 0;               // as in ForwardBuffers
};

// As check(), workspace_bytes() and heap_bytes(); a heap serves a forward and a backward if it has
// the larger size of the two.
std::string check_backward(const BackwardFacts& facts);
size_t backward_workspace_bytes(const BackwardFacts& facts);
size_t backward_heap_bytes(const BackwardFacts& facts);

// Enqueues a stage of a call. A rank with a fault fills all its gradients with NaN.
cudaError_t launch_backward(CallStage stage, const BackwardFacts& facts, int rank,
                            const BackwardBuffers& buffers, cudaStream_t stream,
                            const TestHooks& hooks = {});

}  // namespace jax_mok::cuda
