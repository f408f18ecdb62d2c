// Element by element, over panels of columns: the same code for every column, so a value does not
// depend on where it stands. Formulas: Shazeer, "GLU Variants Improve Transformer" (2020);
// GELU in its tanh form, which is g * sigmoid(2 z) with z = sqrt(2/pi) (g + 0.044715 g^3).
#include "cpu/activation.h"

#include <algorithm>
#include <cstring>

#include "cpu/gemm.h"

namespace jax_mok::cpu {
namespace {

constexpr float kGeluScale = 1.5957691216057308f;  // 2 sqrt(2/pi)
constexpr float kGeluCubic = 0.044715f;

// e^x for finite results, relative error below 2e-7; saturates instead of overflowing, keeps NaN.
// Written without branches and library calls so that the compiler makes vectors of it.
inline float exponential(float x) {
  x = x > 88.0f ? 88.0f : x;
  x = x < -87.0f ? -87.0f : x;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const float shifted = x * 1.44269504088896341f + kRound;
  const float n = shifted - kRound;
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  uint32_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits << 23) + (127u << 23);  // the low bits of `shifted` are n: this is 2^n
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return p * power;
}

inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

struct Value {
  float value, slope;
};

template <Gate kGate>
inline Value act(float g, float alpha) {
  if constexpr (kGate == Gate::kSwiglu) {
    const float s = sigmoid(alpha * g);
    return {g * s, s + (alpha * g) * (s * (1.0f - s))};
  } else if constexpr (kGate == Gate::kGeglu) {
    const float square = g * g;
    const float s = sigmoid(kGeluScale * (g + kGeluCubic * (square * g)));
    const float inner = kGeluScale * (1.0f + 3.0f * kGeluCubic * square);
    return {g * s, s + g * (s * (1.0f - s)) * inner};
  } else {
    const float slope = g > 0.0f ? 1.0f : 0.0f;
    return {g < 0.0f ? 0.0f : g, slope};  // NaN stays NaN
  }
}

// Comparisons are written so that NaN passes the clamps.
inline float clamp_above(float x, float limit) { return x > limit ? limit : x; }
inline float clamp_both(float x, float limit) {
  x = x > limit ? limit : x;
  return x < -limit ? -limit : x;
}

// Whole vectors only; the rings have room for a full panel, and nobody reads what is in between.
inline int64_t full_vectors(int64_t columns) { return (columns + 15) / 16 * 16; }

template <Gate kGate>
void forward(const Activation& a, int64_t rows, int64_t columns, const float* gate, const float* up,
             float* h, int64_t h_stride) {
  const int64_t end = full_vectors(columns);
  for (int64_t i = 0; i < rows; ++i) {
    const float* const g = gate + i * kPanel;
    const float* const u = up + i * kPanel;
    float* const to = h + i * h_stride;
    for (int64_t j = 0; j < end; ++j)
      to[j] = act<kGate>(clamp_above(g[j], a.limit), a.alpha).value *
              (clamp_both(u[j], a.limit) + a.up_offset);
  }
}

template <Gate kGate>
void backward(const Activation& a, int64_t rows, int64_t columns, const float* gate,
              const float* up, const float* grad_hidden, const float* weights,
              const HiddenGradients& out) {
  const int64_t end = full_vectors(columns);
  for (int64_t i = 0; i < rows; ++i) {
    const float* const g = gate + i * kPanel;
    const float* const u = up + i * kPanel;
    const float* const dh = grad_hidden + i * kPanel;
    float* const weighted = out.weighted_hidden + i * out.stride;
    float* const dg = out.grad_gate + i * out.stride;
    float* const du = out.grad_up + i * out.stride;
    const float weight = weights[i];
    float dots[kPanel];
    for (int64_t j = 0; j < end; ++j) {
      const Value gated = act<kGate>(clamp_above(g[j], a.limit), a.alpha);
      const float lifted = clamp_both(u[j], a.limit) + a.up_offset;
      const float h = gated.value * lifted;
      const float d = weight * dh[j];
      weighted[j] = weight * h;
      dots[j] = h * dh[j];
      const float through_gate = (d * lifted) * gated.slope;
      const float through_up = d * gated.value;
      dg[j] = g[j] > a.limit ? 0.0f : through_gate;
      du[j] = (u[j] > a.limit) | (u[j] < -a.limit) ? 0.0f : through_up;
    }
    for (int64_t j = columns; j < kPanel; ++j) dots[j] = 0.0f;
    for (int64_t width = kPanel / 2; width > 0; width /= 2)
      for (int64_t j = 0; j < width; ++j) dots[j] += dots[j + width];
    out.dot[i * out.dot_stride] = dots[0];
  }
}

}  // namespace

void activate(const Activation& a, int64_t rows, int64_t columns, const float* gate,
              const float* up, float* h, int64_t h_stride) {
  switch (a.gate) {
    case Gate::kSwiglu:
      return forward<Gate::kSwiglu>(a, rows, columns, gate, up, h, h_stride);
    case Gate::kGeglu:
      return forward<Gate::kGeglu>(a, rows, columns, gate, up, h, h_stride);
    case Gate::kReglu:
      return forward<Gate::kReglu>(a, rows, columns, gate, up, h, h_stride);
  }
}

void activate_backward(const Activation& a, int64_t rows, int64_t columns, const float* gate,
                       const float* up, const float* grad_hidden, const float* weights,
                       const HiddenGradients& out) {
  switch (a.gate) {
    case Gate::kSwiglu:
      return backward<Gate::kSwiglu>(a, rows, columns, gate, up, grad_hidden, weights, out);
    case Gate::kGeglu:
      return backward<Gate::kGeglu>(a, rows, columns, gate, up, grad_hidden, weights, out);
    case Gate::kReglu:
      return backward<Gate::kReglu>(a, rows, columns, gate, up, grad_hidden, weights, out);
  }
}

}  // namespace jax_mok::cpu
