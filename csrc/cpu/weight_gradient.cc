// A task is one panel of columns of one gradient matrix of one segment; biases are one task.
#include "cpu/weight_gradient.h"

#include <algorithm>
#include <cstring>

#include "cpu/thread_pool.h"
#include "cpu/workspace.h"

namespace jax_mok::cpu {
namespace {

// One gradient matrix [rows, cols] = left^T right over the rows of a segment.
struct Product {
  const float *left, *right;
  int64_t left_stride, right_stride;
  int64_t rows, cols;
  float* sum;   // where an unfinished sum is kept; the gradient itself if that is float32
  Array final;  // the gradient
};

void add_panel(const Segment& segment, const Product& p, int64_t panel) {
  const int64_t first = panel * kPanel, columns = panel_columns(p.cols, panel);
  const int64_t depth = segment.piece.rows;
  const bool is_float = p.final.dtype == Dtype::kFloat32;
  constexpr int64_t kChunk = 256;  // of rows of the gradient: sums that stay in the L2 cache
  float* const tile = is_float ? nullptr : thread_scratch(kChunk * kPanel);
  for (int64_t row = 0; row < p.rows; row += kChunk) {
    const int64_t count = std::min(kChunk, p.rows - row);
    const Rows left{p.left + row, p.left_stride}, right{p.right + first, p.right_stride};
    if (is_float) {
      multiply_outer(count, columns, left, right, depth, kBlockRows,
                     {p.sum + row * p.cols + first, p.cols, !segment.starts_sum});
      continue;
    }
    if (!segment.starts_sum) {
      for (int64_t i = 0; i < count; ++i)
        std::memcpy(tile + i * kPanel, p.sum + (row + i) * p.cols + first, columns * sizeof(float));
    }
    multiply_outer(count, columns, left, right, depth, kBlockRows,
                   {tile, kPanel, !segment.starts_sum});
    const Array to = segment.ends_sum ? p.final : Array{p.sum, Dtype::kFloat32};
    for (int64_t i = 0; i < count; ++i)
      write(tile + i * kPanel, columns, to.at((row + i) * p.cols + first));
  }
}

// sum[j] (+)= rows from last to first, times a weight where there is one.
template <typename Weight>
void add_bias_gradient(const Segment& segment, const float* ring, int64_t stride, int64_t columns,
                       float* sum, Array final, Weight weight) {
  if (!final) return;
  if (segment.starts_sum) std::fill(sum, sum + columns, 0.0f);
  for (int64_t i = segment.piece.rows - 1; i >= 0; --i) {
    const float w = weight(i);
    for (int64_t j = 0; j < columns; ++j) sum[j] += w * ring[i * stride + j];
  }
  if (segment.ends_sum) write(sum, columns, final);
}

float* sum_of(Array final, float* open) {
  return final.dtype == Dtype::kFloat32 ? static_cast<float*>(final.data) : open;
}

void clear(Array array, int64_t count) {
  if (array) std::memset(array.data, 0, count * byte_width(array.dtype));
}

// `count` segments of a batch, of which at most one uses `open`.
void add_segments(const LayerShape& shape, const BackwardBuffers& rank, const Segment* segments,
                  int64_t count, const GradientRings& rings, const OpenSums& open) {
  const int64_t hidden = shape.hidden;
  const int64_t inner = inner_size(shape, segments->piece.expert);
  const int64_t inner_panels = num_panels(inner), hidden_panels = num_panels(hidden);
  const int64_t tasks = 2 * inner_panels + hidden_panels;

  parallel_for(count * tasks, [&](int64_t index) {
    const Segment& segment = segments[index / tasks];
    const int64_t task = index % tasks;
    const int64_t row = segment.piece.ring_row;
    const FfnGradients out = network_gradients(shape, rank, segment.piece.expert);
    const float* const x = rings.x + row * rings.hidden_stride;
    const float* const dy = rings.dy + row * rings.hidden_stride;
    const float* const grad_gate = rings.grad_gate + row * rings.inner_stride;
    const float* const grad_up = rings.grad_up + row * rings.inner_stride;
    if (task < 2 * inner_panels) {
      const bool is_gate = task < inner_panels;
      const Array final = is_gate ? out.gate : out.up;
      add_panel(segment,
                {x, is_gate ? grad_gate : grad_up, rings.hidden_stride, rings.inner_stride, hidden,
                 inner, sum_of(final, is_gate ? open.gate : open.up), final},
                is_gate ? task : task - inner_panels);
    } else {
      add_panel(segment,
                {rings.weighted_hidden + row * rings.inner_stride, dy, rings.inner_stride,
                 rings.hidden_stride, inner, hidden, sum_of(out.down, open.down), out.down},
                task - 2 * inner_panels);
    }
  });

  parallel_for(count, [&](int64_t index) {
    const Segment& segment = segments[index];
    const int64_t row = segment.piece.ring_row;
    const FfnGradients out = network_gradients(shape, rank, segment.piece.expert);
    if (!out.gate_bias && !out.down_bias) return;
    // A segment that is the whole of its expert sums in scratch of its own.
    const bool whole = segment.starts_sum && segment.ends_sum;
    float* const sums = whole ? thread_scratch(2 * inner + hidden) : open.biases;
    const auto once = [](int64_t) { return 1.0f; };
    add_bias_gradient(segment, rings.grad_gate + row * rings.inner_stride, rings.inner_stride,
                      inner, sums, out.gate_bias, once);
    add_bias_gradient(segment, rings.grad_up + row * rings.inner_stride, rings.inner_stride, inner,
                      sums + inner, out.up_bias, once);
    add_bias_gradient(segment, rings.dy + row * rings.hidden_stride, rings.hidden_stride, hidden,
                      sums + 2 * inner, out.down_bias,
                      [&](int64_t i) { return rings.row_weights[row + i]; });
  });
}

}  // namespace

void add_weight_gradients(const LayerShape& shape, const BackwardBuffers& rank, const Batch& batch,
                          const GradientRings& rings, const OpenSums& open) {
  if (batch.segments.empty()) return;
  const Segment* const segments = batch.segments.data();
  const int64_t count = static_cast<int64_t>(batch.segments.size());
  const Segment &first = segments[0], &last = segments[count - 1];
  // A macrobatch may cut two experts: the sum that the one before it in the walk left open is
  // finished first, then another may be left there.
  const bool finish_first = count > 1 && !last.starts_sum && !first.ends_sum;
  if (finish_first) add_segments(shape, rank, &last, 1, rings, open);
  add_segments(shape, rank, segments, finish_first ? count - 1 : count, rings, open);
}

void clear_unused_gradients(const LayerShape& shape, const BackwardBuffers& rank,
                            const Schedule& schedule) {
  parallel_for(int64_t{shape.num_local_experts} + 1, [&](int64_t index) {
    const int32_t expert = static_cast<int32_t>(index);
    const bool is_shared = expert == shape.num_local_experts;
    if (is_shared ? !schedule.shared_rows.empty() : schedule.plan.expert_rows[expert] > 0) return;
    const int64_t inner = inner_size(shape, expert);
    if (inner == 0) return;
    const FfnGradients out = network_gradients(shape, rank, expert);
    clear(out.gate, shape.hidden * inner);
    clear(out.up, shape.hidden * inner);
    clear(out.down, inner * shape.hidden);
    clear(out.gate_bias, inner);
    clear(out.up_bias, inner);
    clear(out.down_bias, shape.hidden);
  });
}

}  // namespace jax_mok::cpu
