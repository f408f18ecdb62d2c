// The gated activations and their derivatives, element by element.
#pragma once

#include "cuda/forward.h"
#include "cuda/ptx.cuh"

namespace jax_mok::cuda {

MOK_DEVICE float sigmoid(float z) {
  float e, r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(z * -1.4426950408889634f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.0f + e));
  return r;
}
// As fminf and fmaxf, but NaN stays NaN.
MOK_DEVICE float at_most(float x, float bound) {
  asm("min.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(bound));
  return x;
}
MOK_DEVICE float at_least(float x, float bound) {
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(bound));
  return x;
}

// act(g) * (u + up_offset). kPlain: alpha 1, no limit and no offset, which saves a third of the
// work. Gelu's tanh form is g * sigmoid(2 sqrt(2/pi) (g + 0.044715 g^3)).
template <ActivationKind kKind, bool kPlain>
MOK_DEVICE float activate(const Activation& a, float g, float u) {
  if constexpr (!kPlain) {
    g = at_most(g, a.limit);
    u = at_least(at_most(u, a.limit), -a.limit) + a.up_offset;
  }
  if constexpr (kKind == ActivationKind::kReglu) {
    return at_least(g, 0.0f) * u;
  } else if constexpr (kKind == ActivationKind::kGeglu) {
    return g * sigmoid(1.5957691216057308f * (g + 0.044715f * g * g * g)) * u;
  } else {
    return g * sigmoid(kPlain ? g : a.alpha * g) * u;
  }
}

// Gradients of one hidden element. g, u: pre-activations; dh: gradient of h before the row's weight
// w. dot accumulates h * dh, the gradient of w.
struct HiddenGradient {
  float weighted_h, d_gate, d_up;
};
template <ActivationKind kKind, bool kPlain>
MOK_DEVICE HiddenGradient activate_backward(const Activation& a, float g, float u, float dh,
                                            float w, float& dot) {
  float gate = g, up = u;
  if constexpr (!kPlain) {
    gate = at_most(g, a.limit);
    up = at_least(at_most(u, a.limit), -a.limit) + a.up_offset;
  }
  float value, slope;
  if constexpr (kKind == ActivationKind::kReglu) {
    value = at_least(gate, 0.0f);
    slope = gate > 0.0f ? 1.0f : 0.0f;
  } else {
    // value = gate * sigmoid(z), slope = sigmoid(z) + gate z' sigmoid(z) (1 - sigmoid(z)).
    float z, gate_dz;
    if constexpr (kKind == ActivationKind::kGeglu) {
      constexpr float kScale = 1.5957691216057308f;
      const float cubic = 0.044715f * gate * gate;
      z = kScale * gate * (1.0f + cubic);
      gate_dz = kScale * gate * (1.0f + 3.0f * cubic);
    } else {
      z = kPlain ? gate : a.alpha * gate;
      gate_dz = z;
    }
    const float s = sigmoid(z);
    value = gate * s;
    slope = fmaf(gate_dz * s, 1.0f - s, s);
  }
  const float h = value * up, d = w * dh;
  dot = fmaf(h, dh, dot);
  HiddenGradient out = {w * h, d * up * slope, d * value};
  if constexpr (!kPlain) {
    if (g > a.limit) out.d_gate = 0.0f;
    if (u > a.limit || u < -a.limit) out.d_up = 0.0f;
  }
  return out;
}

}  // namespace jax_mok::cuda
