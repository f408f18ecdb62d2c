// What happens to a backward tile's accumulators: the activation's derivatives and the gradients of
// the rows' weights, rounding to bf16, and the way into the outbox. A consumer warp holds 16 rows.
#pragma once

#include "cuda/backward_outbox.cuh"
#include "cuda/epilogue.cuh"

namespace jax_mok::cuda {

// Where the matrices of column groups j and j + 1 (j even) go in a slot, for the 16 rows of a warp,
// is matrix_rows() ^ j << 4: chunks of 16 bytes are swizzled by the row.
MOK_DEVICE uint32_t matrix_rows(uint32_t slot, int warp_row) {
  const int lane = threadIdx.x % 32, row = lane & 15;
  return slot + (warp_row + row) * 128 + (((lane >> 4) ^ (row & 7)) << 4);
}

// What the epilogue needs to know of a thread's two rows, r and r + 8 of the warp's.
struct RowPair {
  float weight[2];
};

// Where a lane puts its part of a panel's results: 16 bytes of rows lane / 8, + 4, + 8 and + 12 of
// the warp's. `row` is the warp's first row in h, d_gate and d_up, which lie alike.
MOK_DEVICE void store_hidden_panel(const BackwardParams& p, bool shared, int row, int column,
                                   uint32_t staging) {
  const WorkspaceLayout& w = p.geometry.workspace;
  const int inner = shared ? p.geometry.shared_intermediate : p.geometry.intermediate;
  const int lane = threadIdx.x % 32;
  const int64_t at = (int64_t{row + lane / 8} * inner + column + lane % 8 * 8) * 2;
  const uint32_t from = staging + lane / 8 * 128;
#pragma unroll
  for (int array = 0; array < 3; ++array) {
    const Span& span = array == 0   ? (shared ? w.shared_h : w.h)
                       : array == 1 ? (shared ? w.shared_d_gate : w.d_gate)
                                    : (shared ? w.shared_d_up : w.d_up);
    char* const to = p.array<char>(span, 0) + at;
    uint4 value[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      value[i] = load_shared(from + array * kStagingBytes + i * 512 +
                             ((lane % 8 ^ (lane / 8 + i % 2 * 4)) << 4));
#pragma unroll
    for (int i = 0; i < 4; ++i) store_global(to + i * 4 * inner * 2, value[i]);
  }
}

// One panel of 64 hidden columns. dh holds the gradient of h; pre(group, g, u) gives gate and up of
// column group 0..7 as four values each, in the order of the fragment. Fragments become rows in
// `staging`, the warp's own; the warp stores them itself, 16 bytes a lane: so many bytes would wait
// in the copy engine's queue behind the next tile's operands. All three results leave at once:
// accumulators that were written to would serialise the next products.
template <ActivationKind kKind, bool kPlain, typename PreActivations, typename Store>
MOK_DEVICE void hidden_panel(const float* dh, const Activation& activation, const RowPair& weights,
                             float (&dot)[2], PreActivations pre, uint32_t staging, Store store) {
  // Lanes 0..15 address the rows of h (and of d_up), lanes 16..31 those of d_gate.
  const int lane = threadIdx.x % 32;
  const uint32_t row = anew(staging + (lane & 15) * 128 + ((lane & 7) << 4));
  const uint32_t first = row + (lane < 16 ? 0 : kStagingBytes);
  const uint32_t second = row + 2 * kStagingBytes;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    float g[4], u[4];
    pre(j, g, u);
    uint32_t h[2], d_gate[2], d_up[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      HiddenGradient out[2];
#pragma unroll
      for (int e = 0; e < 2; ++e)
        out[e] = activate_backward<kKind, kPlain>(activation, g[2 * i + e], u[2 * i + e],
                                                  dh[j * 4 + 2 * i + e], weights.weight[i], dot[i]);
      h[i] = pack_bf16(out[0].weighted_h, out[1].weighted_h);
      d_gate[i] = pack_bf16(out[0].d_gate, out[1].d_gate);
      d_up[i] = pack_bf16(out[0].d_up, out[1].d_up);
    }
    store_matrix_x4(first ^ j << 4, h[0], h[1], d_gate[0], d_gate[1]);
    store_matrix_x2(second ^ j << 4, d_up[0], d_up[1]);
  }
  __syncwarp();
  store();
  __syncwarp();
}

// Both passes see gate and up as the forward saves them.
MOK_DEVICE void round_to_bf16(float& a, float& b) {
  const uint32_t pair = pack_bf16(a, b);
  a = bf16_low(pair);
  b = bf16_high(pair);
}

// 256 columns of a block's part of dx.
MOK_DEVICE void input_results(const float (&d)[128], Outbox& outbox, int warp_row) {
  const int lane = threadIdx.x % 32;
  const uint32_t to =
      outbox.open_all() + (warp_row + (lane & 15)) * kInputLineBytes + (lane >> 4) * 16;
#pragma unroll
  for (int j = 0; j < 32; j += 2) {
    const float* v = &d[j * 4];
    store_matrix_x4(to + j * 16, pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]),
                    pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
  }
  outbox.close_all();
}

// Which panels of a weight tile exist: `columns_left` from the first column of either half (gate|up
// tiles) or of the tile.
MOK_DEVICE bool panel_exists(bool halves, int panel, int panels, int width, int columns_left) {
  const int in_half = halves ? panel % (panels / 2) : panel;
  return in_half * width < columns_left;
}

// The sum of an expert that a macrobatch cuts stays with its owner, thread by thread.
MOK_DEVICE float4* open_sum(const BackwardParams& p, int v, int buffer, int tile) {
  const Geometry& g = p.geometry;
  char* sums = p.array<char>(g.workspace.open_sums, v);
  sums += (int64_t{buffer} * g.shape.grad_weight_tiles + tile) * kOpenSumBytes;
  return reinterpret_cast<float4*>(sums) + threadIdx.x % kConsumerThreads;
}
// A thread's part of a tile of weight gradients: four values of column group 0..31.
struct WeightSum {
  const float (&d)[128];
  bool empty;  // no rows: all zero, whatever d holds

  MOK_DEVICE float4 group(int i) const {
    if (empty) return {0.0f, 0.0f, 0.0f, 0.0f};
    return {d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]};
  }
};

MOK_DEVICE void take_open_sum(float (&d)[128], const float4* from) {
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const float4 value = from[i * kConsumerThreads];
    d[4 * i] = value.x;
    d[4 * i + 1] = value.y;
    d[4 * i + 2] = value.z;
    d[4 * i + 3] = value.w;
  }
}
MOK_DEVICE void keep_open_sum(const WeightSum& sum, float4* to) {
#pragma unroll
  for (int i = 0; i < 32; ++i) to[i * kConsumerThreads] = sum.group(i);
}

MOK_DEVICE void weight_results_bf16(const WeightSum& sum, bool halves, int columns_left,
                                    Outbox& outbox, int warp_row) {
  int panels = 0;
#pragma unroll
  for (int panel = 0; panel < 4; ++panel) {
    if (!panel_exists(halves, panel, 4, 64, columns_left)) continue;
    const uint32_t rows = matrix_rows(outbox.open(panels++), warp_row);
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      const float4 a = sum.group(panel * 8 + j), b = sum.group(panel * 8 + j + 1);
      store_matrix_x4(rows ^ j << 4, pack_bf16(a.x, a.y), pack_bf16(a.z, a.w), pack_bf16(b.x, b.y),
                      pack_bf16(b.z, b.w));
    }
  }
  outbox.close(panels);
}
MOK_DEVICE void weight_results_f32(const WeightSum& sum, bool halves, int columns_left,
                                   Outbox& outbox, int warp_row) {
  const int lane = threadIdx.x % 32, row = lane / 4;
#pragma unroll
  for (int panel = 0; panel < 8; ++panel) {
    if (!panel_exists(halves, panel, 8, 32, columns_left)) continue;
    const uint32_t slot = outbox.open();
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float4 value = sum.group(panel * 4 + j);
      // Two columns are 8 bytes: half of a swizzled chunk.
      const int chunk = (j * 2 + lane % 4 / 2) ^ row;
      const uint32_t to = slot + (warp_row + row) * 128 + (chunk << 4) + lane % 2 * 8;
      store_shared(to, {value.x, value.y});
      store_shared(to + 8 * 128, {value.z, value.w});
    }
    outbox.close(1);
  }
}

// Gradients of 512 bias columns, two of each consumer thread: sums over the expert's rows in the
// order of the weights' gradients. Columns: those of b_gate, b_up, b_down one after the other.
__device__ inline void bias_results(const BackwardParams& p, int v, const GradTile& t) {
  const Geometry& g = p.geometry;
  const int inner = g.intermediate;
  int column = t.n * kBiasTileColumns + threadIdx.x % kConsumerThreads * 2;
  if (column >= 2 * inner + g.hidden) return;
  const char* rows;
  void* to;
  int width = inner;
  if (column < inner) {
    rows = p.array<char>(g.workspace.d_gate, 0);
    to = p.db_gate;
  } else if (column < 2 * inner) {
    rows = p.array<char>(g.workspace.d_up, 0);
    to = p.db_up;
    column -= inner;
  } else {
    rows = p.dy_ring(0);
    to = p.db_down;
    column -= 2 * inner;
    width = g.hidden;
  }
  const bool weighted = to == p.db_down;
  const GradRoute* routes = p.array<GradRoute>(g.workspace.routes, v);
  float2 sum = {0.0f, 0.0f};
  if (t.open_in >= 0) sum = *reinterpret_cast<float2*>(open_sum(p, v, t.open_in, t.weight_tile));
  const int blocks = (t.num_stages + t.skip) / 2;
  for (int b = 0; b < blocks; ++b) {
    const char* from = rows + (int64_t{t.hidden_row - b * kBlockRows} * width + column) * 2;
    const GradRoute* route = routes + int64_t{t.block - b} * kBlockRows;
    constexpr int kBatch = 8;  // loads under way together
    for (int first = 0; first < kBlockRows; first += kBatch) {
      uint32_t pair[kBatch];
      float weight[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        pair[i] =
            *reinterpret_cast<const volatile uint32_t*>(from + int64_t{first + i} * width * 2);
        weight[i] = weighted ? route[first + i].weight : 1.0f;
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        sum.x = fmaf(weight[i], bf16_low(pair[i]), sum.x);
        sum.y = fmaf(weight[i], bf16_high(pair[i]), sum.y);
      }
    }
  }
  if (t.open_out >= 0) {
    *reinterpret_cast<float2*>(open_sum(p, v, t.open_out, t.weight_tile)) = sum;
  } else {
    const int64_t index = int64_t{t.expert} * width + column;
    static_cast<uint32_t*>(to)[index / 2] = pack_bf16(sum.x, sum.y);
  }
}

// <b_down, dy> of every bias_tiles-th row of the segment, into the last of their parts.
__device__ inline void bias_dots(const BackwardParams& p, int v, const GradTile& t) {
  const Geometry& g = p.geometry;
  const int lane = threadIdx.x % 32;
  const __nv_bfloat16* bias =
      static_cast<const __nv_bfloat16*>(p.b_down) + int64_t{t.expert} * g.hidden;
  const GradRoute* routes = p.array<GradRoute>(g.workspace.routes, v);
  const int64_t part = int64_t{g.num_parts - 1} * g.shape.num_tokens * g.shape.top_k;
  const int rows = (t.num_stages + t.skip) / 2 * kBlockRows;
  const int warp = threadIdx.x / 32 - 4;
  for (int i = t.n + warp * g.bias_tiles; i < rows; i += kConsumerWarps * g.bias_tiles) {
    // Blocks lie in the ring as in the plan, and the segment ends with t's.
    const int below = i / kBlockRows, row = i % kBlockRows;
    float* to = routes[int64_t{t.block - below} * kBlockRows + row].part;
    if (to == nullptr) continue;
    const char* dy = p.dy_ring(0) + int64_t{t.token_row - below * kBlockRows + row} * p.row_bytes();
    float sum = 0.0f;
    for (int column = lane * 8; column < g.hidden; column += 256) {
      const uint4 a = load_peer_written(dy + column * 2);
      const uint4 b = *reinterpret_cast<const uint4*>(bias + column);
      const uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        sum = fmaf(bf16_low(x[k]), bf16_low(y[k]), sum);
        sum = fmaf(bf16_high(x[k]), bf16_high(y[k]), sum);
      }
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
    if (lane == 0) to[part] = sum;
  }
}

}  // namespace jax_mok::cuda
