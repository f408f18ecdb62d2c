// What happens to a tile's accumulators: activation and bias, rounding to bf16, and the way of each
// row to where it belongs. A consumer warp holds 16 rows; it turns fragments into rows through its
// own piece of shared memory, 64 columns at a time, and stores 16 bytes per thread.
#pragma once

#include "cuda/gemm_sm90.cuh"

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

// act(g) * (u + up_offset). kPlain: no limit and no offset, which saves a third of the work.
// Gelu's tanh form is g * sigmoid(2 sqrt(2/pi) (g + 0.044715 g^3)).
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
    return g * sigmoid(a.alpha * g) * u;
  }
}

// A warp's piece of shared memory: a panel on its way from fragments to rows, and where the rows go
// (null: nowhere).
struct Staging {
  uint8_t panel[16 * 128];
  char* row_to[16];
};

// A warp's finished rows, packed, which it has not stored yet. They are stored panel by panel (64
// columns) while the products of the next tile run, so the tensor cores do not wait for it.
struct HeldRows {
  uint32_t words[4][16];  // [panel]: fragments of column groups 0..7, two words each
  int panels = 0;
  int next = 0;  // panels: all stored; panels + 1: besides, the next rows' places are looked up
};

// One panel: fragments become rows in shared memory, then every lane stores 16 bytes of four rows.
MOK_DEVICE void store_panel(const uint32_t (&words)[16], int panel, Staging& staging) {
  const int lane = threadIdx.x % 32;
  {
    const int row = lane & 15, group = lane >> 4;
#pragma unroll
    for (int j = 0; j < 8; j += 2)
      // 16-byte chunks are swizzled by the row: no bank is hit twice by a matrix.
      store_matrix_x4(staging.panel + row * 128 + (((j + group) ^ (row & 7)) << 4), words[2 * j],
                      words[2 * j + 1], words[2 * j + 2], words[2 * j + 3]);
  }
  __syncwarp();
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    const int row = i * 4 + lane / 8, chunk = lane & 7;
    const uint4 value = load_shared(staging.panel + row * 128 + ((chunk ^ (row & 7)) << 4));
    char* to = staging.row_to[row];
    if (to != nullptr) store_global(to + panel * 128 + chunk * 16, value);
  }
  __syncwarp();
}

// `stored` hears of the last one.
MOK_DEVICE void store_next_panel(HeldRows& held, Staging& staging, uint64_t* stored) {
  switch (held.next) {  // registers have no addresses: each panel is code of its own
    case 0:
      store_panel(held.words[0], 0, staging);
      break;
    case 1:
      store_panel(held.words[1], 1, staging);
      break;
    case 2:
      store_panel(held.words[2], 2, staging);
      break;
    default:
      store_panel(held.words[3], 3, staging);
  }
  if (++held.next == held.panels && threadIdx.x % 32 == 0) mbarrier_arrive(stored);
}

// Bias of the thread's two columns of group j.
MOK_DEVICE float2 bias_pair(const __nv_bfloat16* bias, int j) {
  const uint32_t pair = *reinterpret_cast<const uint32_t*>(bias + j * 8 + threadIdx.x % 4 * 2);
  return {bf16_low(pair), bf16_high(pair)};
}

// Hidden activations of a warp's 16 rows. Biases are read only if not kPlain, and may be null then.
template <ActivationKind kKind, bool kPlain>
MOK_DEVICE void hold_hidden(HeldRows& held, const float (&d)[128], const Activation& activation,
                            const __nv_bfloat16* b_gate, const __nv_bfloat16* b_up) {
#pragma unroll
  for (int group = 0; group < 16; ++group) {
    float2 bg = {0.0f, 0.0f}, bu = {0.0f, 0.0f};
    if (!kPlain && b_gate != nullptr) {
      bg = bias_pair(b_gate, group);
      bu = bias_pair(b_up, group);
    }
    float h[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float gate = d[group * 4 + e], up = d[64 + group * 4 + e];
      if constexpr (!kPlain) {
        gate += e % 2 ? bg.y : bg.x;
        up += e % 2 ? bu.y : bu.x;
      }
      h[e] = activate<kKind, kPlain>(activation, gate, up);
    }
    held.words[group / 8][group % 8 * 2] = pack_bf16(h[0], h[1]);
    held.words[group / 8][group % 8 * 2 + 1] = pack_bf16(h[2], h[3]);
  }
}

// Results of a warp's 16 rows.
template <bool kBias>
MOK_DEVICE void hold_results(HeldRows& held, const float (&d)[128], const __nv_bfloat16* b_down) {
#pragma unroll
  for (int group = 0; group < 32; ++group) {
    const float* y = &d[group * 4];
    float2 b = {0.0f, 0.0f};
    if constexpr (kBias) b = bias_pair(b_down, group);
    held.words[group / 8][group % 8 * 2] = pack_bf16(y[0] + b.x, y[1] + b.y);
    held.words[group / 8][group % 8 * 2 + 1] = pack_bf16(y[2] + b.x, y[3] + b.y);
  }
}

}  // namespace jax_mok::cuda
