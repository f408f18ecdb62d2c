// What the engine is given: the static shape of a layer and the buffers of every rank.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/activation.h"
#include "cpu/dtype.h"
#include "cpu/gemm.h"
#include "plan/shape.h"

namespace jax_mok::cpu {

struct LayerShape {
  int32_t num_ranks, num_tokens, top_k, num_local_experts;
  int64_t hidden, intermediate;
  int64_t shared_intermediate;  // 0: no shared expert
  int64_t macrobatch_rows;      // rows of the rings
  int64_t minibatch_rows;       // most rows of an expert that go through the GEMMs together
  Activation activation;

  int32_t num_experts() const { return num_ranks * num_local_experts; }
};

// Rows come in blocks of 64, the unit in which weight gradients are summed. Padding costs memory
// only: products go by the 16 rows.
constexpr int32_t kBlockRows = 64;

plan::Shape plan_shape(const LayerShape& shape);

// A feed-forward network: gate and up [H, I], down [I, H]; biases may be absent.
struct Ffn {
  Matrix gate, up, down;
  ConstArray gate_bias, up_bias, down_bias;
};

struct FfnGradients {
  Array gate, up, down, gate_bias, up_bias, down_bias;
};

// The local experts of a rank, stacked along a first axis.
struct ExpertStack {
  ConstArray gate, up, down, gate_bias, up_bias, down_bias;
};

struct ForwardBuffers {
  ConstArray x;                         // [T, H]
  const int32_t* ids;                   // [T, k]
  const float* weights;                 // [T, k]
  ExpertStack experts;                  // [El, H, I], [El, I, H]
  Ffn shared;                           // where shape.shared_intermediate > 0
  const float* shared_scale = nullptr;  // [T], or null for 1
  Array y;                              // [T, H]; forward only
  float* saved = nullptr;  // [macrobatch_rows, 2 I]; the forward fills it, the backward reads it
};

struct BackwardBuffers {
  ForwardBuffers forward;
  ConstArray dy;         // [T, H]
  Array dx;              // [T, H]
  float* d_weights;      // [T, k]
  FfnGradients experts;  // stacked
  FfnGradients shared;
  float* d_shared_scale = nullptr;  // [T], where there is a scale
};

// All ranks of one expert-parallel group, in rank order. Both throw std::bad_alloc and
// std::invalid_argument.
void forward(const LayerShape& shape, const std::vector<ForwardBuffers>& ranks);
void backward(const LayerShape& shape, const std::vector<BackwardBuffers>& ranks);

}  // namespace jax_mok::cpu
