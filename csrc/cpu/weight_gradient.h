// Gradients of an expert's weights and biases: sums over its rows from the last to the first, cut
// by the backward's walk at macrobatch borders. A panel has one owner, and a cut continues the same
// chain of additions, so no bit depends on where the cuts are.
#pragma once

#include <cstdint>

#include "cpu/batch.h"

namespace jax_mok::cpu {

// The rings that the hidden gradients of a macrobatch have filled.
struct GradientRings {
  float *x, *dy;                                 // [rows][hidden_stride]
  float *weighted_hidden, *grad_gate, *grad_up;  // [rows][inner_stride]
  float* row_weights;                            // [rows]
  int64_t hidden_stride, inner_stride;
};

// Sums of the expert that the macrobatch border cuts, where its gradients are not float32 and so
// cannot hold them. Routed and shared experts use it one after the other.
struct OpenSums {
  float *gate, *up, *down;  // [H, I], [H, I], [I, H]; null where not needed
  float* biases;            // [2 I + H]
};

// All weight gradients of a batch's segments, in parallel.
void add_weight_gradients(const LayerShape& shape, const BackwardBuffers& rank, const Batch& batch,
                          const GradientRings& rings, const OpenSums& open);

// Zeros for the experts that no row reached, and for the shared expert if there is no token.
void clear_unused_gradients(const LayerShape& shape, const BackwardBuffers& rank,
                            const Schedule& schedule);

}  // namespace jax_mok::cpu
