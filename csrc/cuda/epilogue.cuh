// What happens to a tile's accumulators: activation and bias, rounding to bf16, and the way of each
// row to where it belongs. A consumer warp holds 16 rows; it turns fragments into rows through its
// own piece of shared memory, 64 columns at a time, and stores 16 bytes per thread.
#pragma once

#include "cuda/activation.cuh"
#include "cuda/gemm_sm90.cuh"
#include "cuda/params.cuh"

namespace jax_mok::cuda {

constexpr int kStagingBytes = 16 * 64 * 2;  // per consumer warp

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
      store_matrix_x4(shared_address(staging) + row * 128 + (((j + group) ^ (row & 7)) << 4), w[0],
                      w[1], w[2], w[3]);
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

// Where a thread keeps gate and up of 16 hidden columns of a block: [column / 16][gate,
// up][thread]. Its own fragments, so both passes move 16 bytes a thread without shuffling.
constexpr int kConsumerThreads = 256;
MOK_DEVICE int64_t saved_index(int64_t block_slot, int intermediate, int column) {
  return (block_slot * (intermediate / 16) + column / 16) * (2 * kConsumerThreads) +
         threadIdx.x % kConsumerThreads;
}

// Leaves the pre-activations of a gate|up tile for the backward, rounded to bf16. `bias` is the
// index of the tile's first column in the biases.
MOK_DEVICE void save_gate_up(const float (&d)[128], const ForwardParams& p, int block_slot,
                             int column, int64_t bias) {
  const int intermediate = p.geometry.intermediate;
  uint4* to = static_cast<uint4*>(p.saved_gate_up) + saved_index(block_slot, intermediate, column);
  const bool biased = p.b_gate != nullptr;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const __nv_bfloat16* from =
        static_cast<const __nv_bfloat16*>(half == 0 ? p.b_gate : p.b_up) + bias;
#pragma unroll
    for (int pair = 0; pair < 8; ++pair) {
      if (column + pair * 16 >= intermediate) break;
      uint32_t w[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int group = pair * 2 + i;
        const float* value = &d[half * 64 + group * 4];
        float2 b = {0.0f, 0.0f};
        if (biased) b = bias_pair(from, group);
        w[2 * i] = pack_bf16(value[0] + b.x, value[1] + b.y);
        w[2 * i + 1] = pack_bf16(value[2] + b.x, value[3] + b.y);
      }
      store_global(to + (pair * 2 + half) * kConsumerThreads, {w[0], w[1], w[2], w[3]});
    }
  }
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
        __shfl_sync(kAllLanes, reinterpret_cast<uint64_t>(to), i * 4 + lane / 8));
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
