// h = act(g) * (u + up_offset), with g clamped above and u both ways, and its derivatives, on
// panels of columns.
#pragma once

#include <cstdint>
#include <limits>

namespace jax_mok::cpu {

enum class Gate : int32_t { kSwiglu = 0, kGeglu = 1, kReglu = 2 };

struct Activation {
  Gate gate = Gate::kSwiglu;
  float alpha = 1.0f;  // swiglu: g * sigmoid(alpha * g)
  float limit = std::numeric_limits<float>::infinity();
  float up_offset = 0.0f;
};

// gate, up: [rows][kPanel], of which the first `columns` count; h: rows with the given stride and
// room for kPanel.
void activate(const Activation& activation, int64_t rows, int64_t columns, const float* gate,
              const float* up, float* h, int64_t h_stride);

// Rows of kPanel columns of the rings that the backward fills.
struct HiddenGradients {
  float* weighted_hidden;  // weight * h
  float* grad_gate;        // of the pre-activations, as they came out of the GEMM and the bias
  float* grad_up;
  int64_t stride;
  float* dot;  // sum over the valid columns of h * grad_hidden, one per row
  int64_t dot_stride;
};

// grad_hidden [rows][kPanel] is the gradient of h before the row's weight; weights [rows]. Only the
// first `columns` count.
void activate_backward(const Activation& activation, int64_t rows, int64_t columns,
                       const float* gate, const float* up, const float* grad_hidden,
                       const float* weights, const HiddenGradients& out);

}  // namespace jax_mok::cpu
