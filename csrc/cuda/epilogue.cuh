// What happens to a tile's accumulators: activation and bias, rounding to bf16, and the way of each
// row to where it belongs. A consumer warp holds 16 rows; it turns fragments into rows through its
// own piece of shared memory, 64 columns at a time, and stores 16 bytes per thread.
#pragma once

#include "cuda/gemm_sm90.cuh"

namespace jax_mok::cuda {

constexpr int kStagingBytes = 16 * 64 * 2;  // per consumer warp

// act(g) * (u + up_offset). Comparisons are written so that NaN stays NaN. All three activations
// but relu are g * sigmoid(z): gelu's tanh form is the one with z = 2 sqrt(2/pi)(g + 0.044715 g^3).
template <ActivationKind kKind>
MOK_DEVICE float activate(const Activation& a, float g, float u) {
  g = g > a.limit ? a.limit : g;
  u = u > a.limit ? a.limit : u;
  u = u < -a.limit ? -a.limit : u;
  if constexpr (kKind == ActivationKind::kReglu) {
    return (g < 0.0f ? 0.0f : g) * (u + a.up_offset);
  } else {
    const float z = kKind == ActivationKind::kGeglu
                        ? 1.5957691216057308f * (g + 0.044715f * g * g * g)
                        : a.alpha * g;
    return __fdividef(g, 1.0f + __expf(-z)) * (u + a.up_offset);
  }
}

// 16 rows x 64 columns. fragment(j, words) gives the packed pairs of column groups j and j + 1
// (rows r and r + 8 of each); store(row, chunk, value) takes 16 bytes = 8 columns of a row.
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
    store(row, chunk, load_shared(staging + row * 128 + ((chunk ^ (row & 7)) << 4)));
  }
  __syncwarp();
}

// Bias of the thread's two columns of group j; 0 without biases.
MOK_DEVICE float2 bias_pair(const __nv_bfloat16* bias, int j) {
  if (bias == nullptr) return {0.0f, 0.0f};
  const uint32_t pair = *reinterpret_cast<const uint32_t*>(bias + j * 8 + threadIdx.x % 4 * 2);
  return {bf16_low(pair), bf16_high(pair)};
}

MOK_DEVICE const __nv_bfloat16* bias_of(const void* bias, int64_t expert, int columns,
                                        int first_column) {
  return bias == nullptr
             ? nullptr
             : static_cast<const __nv_bfloat16*>(bias) + expert * columns + first_column;
}

// Hidden activations of a warp's 16 rows. `hidden` is the first row's first column of the tile.
template <ActivationKind kKind>
MOK_DEVICE void store_hidden(const float (&d)[128], const Activation& activation, char* hidden,
                             int64_t row_bytes, int columns_left, const __nv_bfloat16* b_gate,
                             const __nv_bfloat16* b_up, uint8_t* staging) {
#pragma unroll
  for (int panel = 0; panel < 2; ++panel) {
    if (panel * 64 >= columns_left) break;
    write_panel(
        staging,
        [&](int j, uint32_t (&w)[4]) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int group = panel * 8 + j + i;
            const float2 bg = bias_pair(b_gate, group), bu = bias_pair(b_up, group);
            const float* gate = &d[group * 4];
            const float* up = &d[64 + group * 4];
            w[2 * i] = pack_bf16(activate<kKind>(activation, gate[0] + bg.x, up[0] + bu.x),
                                 activate<kKind>(activation, gate[1] + bg.y, up[1] + bu.y));
            w[2 * i + 1] = pack_bf16(activate<kKind>(activation, gate[2] + bg.x, up[2] + bu.x),
                                     activate<kKind>(activation, gate[3] + bg.y, up[3] + bu.y));
          }
        },
        [&](int row, int chunk, uint4 value) {
          store_global(hidden + row * row_bytes + panel * 128 + chunk * 16, value);
        });
  }
}

// Results of a warp's 16 rows. Lanes r and r + 16 hold where row r goes (its first column of the
// tile), null for a padding row.
MOK_DEVICE void store_results(const float (&d)[128], char* to, int columns_left,
                              const __nv_bfloat16* b_down, uint8_t* staging) {
#pragma unroll
  for (int panel = 0; panel < 4; ++panel) {
    if (panel * 64 >= columns_left) break;
    write_panel(
        staging,
        [&](int j, uint32_t (&w)[4]) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int group = panel * 8 + j + i;
            const float2 b = bias_pair(b_down, group);
            const float* y = &d[group * 4];
            w[2 * i] = pack_bf16(y[0] + b.x, y[1] + b.y);
            w[2 * i + 1] = pack_bf16(y[2] + b.x, y[3] + b.y);
          }
        },
        [&](int row, int chunk, uint4 value) {
          char* row_to = reinterpret_cast<char*>(
              __shfl_sync(0xffffffffu, reinterpret_cast<uint64_t>(to), row));
          if (row_to != nullptr) store_global(row_to + panel * 128 + chunk * 16, value);
        });
  }
}

}  // namespace jax_mok::cuda
