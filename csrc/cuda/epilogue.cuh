// What happens to a tile's accumulators: activation and bias, rounding to bf16, and the way of each
// row to where it belongs. A consumer warp holds 16 rows; it turns fragments into rows through its
// own piece of shared memory, 64 columns at a time, and stores 16 bytes per thread.
#pragma once

#include "cuda/gemm_sm90.cuh"

namespace jax_mok::cuda {

constexpr int kStagingBytes = 16 * 64 * 2;  // per consumer warp

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

// 16 rows x 64 columns. fragment(j, words) gives the packed pairs of column groups j and j + 1
// (rows r and r + 8 of each). In the end lane l holds, for i = 0..3, the 16 bytes = 8 columns l % 8
// of row 4 i + l / 8, and calls store(i, value).
template <typename Fragment, typename Store>
MOK_DEVICE void write_panel(uint8_t* staging, Fragment fragment, Store store) {
  const int lane = threadIdx.x % 32;
  {
    const int row = lane & 15, group = lane >> 4;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      uint32_t w[4];
      fragment(j, w);
      // 16-byte chunks are swizzled by the row: no bank is hit twice by a matrix.
      store_matrix_x4(staging + row * 128 + (((j + group) ^ (row & 7)) << 4), w[0], w[1], w[2],
                      w[3]);
    }
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = i * 4 + lane / 8, chunk = lane & 7;
    store(i, load_shared(staging + row * 128 + ((chunk ^ (row & 7)) << 4)));
  }
  __syncwarp();
}

// Bias of the thread's two columns of group j.
MOK_DEVICE float2 bias_pair(const __nv_bfloat16* bias, int j) {
  const uint32_t pair = *reinterpret_cast<const uint32_t*>(bias + j * 8 + threadIdx.x % 4 * 2);
  return {bf16_low(pair), bf16_high(pair)};
}

// Hidden activations of a warp's 16 rows. `hidden` is the first row's first column of the tile.
// Biases are read only if not kPlain, and may be null then.
template <ActivationKind kKind, bool kPlain>
MOK_DEVICE void store_hidden(const float (&d)[128], const Activation& activation, char* hidden,
                             int row_bytes, int columns_left, const __nv_bfloat16* b_gate,
                             const __nv_bfloat16* b_up, uint8_t* staging) {
  const int lane = threadIdx.x % 32;
  char* const mine = hidden + lane / 8 * row_bytes + lane % 8 * 16;
#pragma unroll
  for (int panel = 0; panel < 2; ++panel) {
    if (panel * 64 >= columns_left) break;
    write_panel(
        staging,
        [&](int j, uint32_t (&w)[4]) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int group = panel * 8 + j + i;
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
            w[2 * i] = pack_bf16(h[0], h[1]);
            w[2 * i + 1] = pack_bf16(h[2], h[3]);
          }
        },
        [&](int i, uint4 value) { store_global(mine + i * 4 * row_bytes + panel * 128, value); });
  }
}

// Results of a warp's 16 rows. Lanes r and r + 16 hold where row r goes (its first column of the
// tile), null for a padding row.
template <bool kBias>
MOK_DEVICE void store_results(const float (&d)[128], char* to, int columns_left,
                              const __nv_bfloat16* b_down, uint8_t* staging) {
  const int lane = threadIdx.x % 32;
  char* row_to[4];  // of the rows that this lane stores
#pragma unroll
  for (int i = 0; i < 4; ++i)
    row_to[i] = reinterpret_cast<char*>(
        __shfl_sync(0xffffffffu, reinterpret_cast<uint64_t>(to), i * 4 + lane / 8));
#pragma unroll
  for (int panel = 0; panel < 4; ++panel) {
    if (panel * 64 >= columns_left) break;
    write_panel(
        staging,
        [&](int j, uint32_t (&w)[4]) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float* y = &d[(panel * 8 + j + i) * 4];
            if constexpr (kBias) {
              const float2 b = bias_pair(b_down, panel * 8 + j + i);
              w[2 * i] = pack_bf16(y[0] + b.x, y[1] + b.y);
              w[2 * i + 1] = pack_bf16(y[2] + b.x, y[3] + b.y);
            } else {
              w[2 * i] = pack_bf16(y[0], y[1]);
              w[2 * i + 1] = pack_bf16(y[2], y[3]);
            }
          }
        },
        [&](int i, uint4 value) {
          if (row_to[i] != nullptr) store_global(row_to[i] + panel * 128 + lane % 8 * 16, value);
        });
  }
}

}  // namespace jax_mok::cuda
