// Kernel parameters of the backward.
#pragma once

#include "cuda/params.cuh"

namespace jax_mok::cuda {

// TMA descriptors of one feed-forward network and its rows, all 2D [rows, columns]. Every box is 64
// rows of 128 bytes, swizzled: so one descriptor per tensor serves loads as either operand, with k
// along rows or along columns, and stores.
struct NetworkMaps {
  CUtensorMap x, dy;            // rows of tokens: the rings, or the local tokens
  CUtensorMap gate, up, down;   // weights [experts * H, I] twice, [experts * I, H]
  CUtensorMap h, d_gate, d_up;  // hidden rows: weight * h, and the gradients of gate and up
  CUtensorMap grad_gate, grad_up, grad_down;  // weight gradients, as the weights
};

struct BackwardParams : CallParams {
  NetworkMaps routed, shared;
  CUtensorMap saved_x_map;  // as routed.x
  const void *b_gate, *b_up, *b_down;
  const float* s_scale;
  const void* saved_gate_up;  // null: computed again
  void* dx;
  float* d_expert_weights;
  void *db_gate, *db_up, *db_down;
  float* ds_scale;
  // All gradients of weights, to fill them with NaN: address and bytes.
  struct Output {
    void* data;
    int64_t bytes;
  } weight_grads[9];
  Activation activation;
  bool float32_weight_grads;

  // B1 tiles done of every expert, and of every block of the shared experts; then of all of these.
  __device__ uint32_t* expert_full(int v) const { return x_full(v) + geometry.shape.ring_blocks; }
  __device__ uint32_t* shared_full(int v) const {
    return expert_full(v) + geometry.shape.num_local_experts;
  }
  __device__ uint32_t* all_shared_full(int v) const {
    return shared_full(v) + geometry.shared_blocks;
  }
  // Compute CTAs that have finished all tiles of a macrobatch.
  __device__ uint32_t* macrobatch_done(int v) const { return all_shared_full(v) + 1; }

  // Whether the forward has left a block's tokens and gate|up.
  __device__ bool is_saved(int num_blocks, int block) const {
    return geometry.save && plan::left_in_ring(num_blocks, block, geometry.shape.macrobatch_blocks);
  }
};

}  // namespace jax_mok::cuda
