// Backward of one expert-parallel group. Rank after rank, batches from last to first: pull x and
// dy, then per panel the pre-activations (saved or computed again, to the same bits), the gradient
// of h, the activation's derivatives and the row dots; then the gradient of x, pushed to its slot,
// and the weight gradients. In the end every source adds its slots.
#include <algorithm>

#include "cpu/batch.h"
#include "cpu/combine.h"
#include "cpu/hidden.h"
#include "cpu/layer.h"
#include "cpu/thread_pool.h"
#include "cpu/weight_gradient.h"
#include "cpu/workspace.h"

namespace jax_mok::cpu {
namespace {

class Backward {
 public:
  Backward(const LayerShape& shape, const std::vector<BackwardBuffers>& ranks)
      : shape_(shape), ranks_(ranks) {
    for (const BackwardBuffers& rank : ranks) {
      xs_.push_back(rank.forward.x);
      dys_.push_back(rank.dy);
    }
  }

  void run() {
    std::vector<const int32_t*> ids;
    for (const BackwardBuffers& rank : ranks_) ids.push_back(rank.forward.ids);
    const std::vector<Schedule> schedules = make_schedules(shape_, ids);
    BorrowedWorkspace workspace;
    allocate(schedules, *workspace);
    for (const BackwardBuffers& rank : ranks_)  // slots that are not used keep this zero
      std::fill_n(rank.d_weights, int64_t{shape_.num_tokens} * shape_.top_k, 0.0f);

    for (int32_t rank = 0; rank < shape_.num_ranks; ++rank) {
      clear_unused_gradients(shape_, ranks_[rank], schedules[rank]);
      const std::vector<Batch>& batches = schedules[rank].batches;
      for (auto batch = batches.rbegin(); batch != batches.rend(); ++batch) {
        pull_rows(*batch);
        hidden_gradients(rank, *batch);
        weight_dots(rank, *batch);
        input_gradients(rank, *batch);
        add_weight_gradients(shape_, ranks_[rank], *batch, rings_, open_);
      }
    }
    for (int32_t rank = 0; rank < shape_.num_ranks; ++rank)
      combine(shape_, ranks_[rank].forward, slots_[rank], false, ranks_[rank].dx);
  }

 private:
  void allocate(const std::vector<Schedule>& schedules, Workspace& workspace) {
    int64_t rows = 0;
    for (const Schedule& schedule : schedules) rows = std::max(rows, schedule.ring_rows);
    const int64_t hidden = shape_.hidden, inner = widest_inner(shape_);
    rings_.hidden_stride = padded_stride(hidden);
    rings_.inner_stride = padded_stride(inner);
    dots_stride_ = num_panels(inner);
    MemoryPlan memory;
    memory.add(&rings_.x, {rows, rings_.hidden_stride});
    memory.add(&rings_.dy, {rows, rings_.hidden_stride});
    memory.add(&rings_.weighted_hidden, {rows, rings_.inner_stride});
    memory.add(&rings_.grad_gate, {rows, rings_.inner_stride});
    memory.add(&rings_.grad_up, {rows, rings_.inner_stride});
    memory.add(&rings_.row_weights, {rows});
    memory.add(&dots_, {rows, dots_stride_});
    memory.add(&open_.biases, {2 * inner + hidden});
    const BackwardBuffers& any = ranks_.front();
    const bool needs_sums = any.experts.gate.dtype != Dtype::kFloat32 ||
                            (any.shared.gate && any.shared.gate.dtype != Dtype::kFloat32);
    const int64_t sums = needs_sums && has_cut(schedules) ? hidden * inner : 0;
    memory.add(&open_.gate, {sums});
    memory.add(&open_.up, {sums});
    memory.add(&open_.down, {sums});
    float* slot_data;
    memory.add(&slot_data, {shape_.num_ranks, num_slots(shape_), shape_.num_tokens, shape_.hidden});
    memory.allocate(workspace);
    slots_ = slots_of_ranks(shape_, slot_data);
  }

  static bool has_cut(const std::vector<Schedule>& schedules) {
    for (const Schedule& schedule : schedules)
      for (const Batch& batch : schedule.batches)
        for (const Segment& segment : batch.segments)
          if (!segment.starts_sum || !segment.ends_sum) return true;
    return false;
  }

  void pull_rows(const Batch& batch) {
    pull(shape_, batch, xs_, rings_.x, rings_.hidden_stride);
    pull(shape_, batch, dys_, rings_.dy, rings_.hidden_stride);
    for (const Piece& piece : batch.groups)
      for (int64_t i = 0; i < piece.rows; ++i) {
        const plan::RowSource& source = piece.sources[i];
        rings_.row_weights[piece.ring_row + i] =
            row_weight(shape_, ranks_[source.rank].forward, source);
      }
  }

  void hidden_gradients(int32_t rank, const Batch& batch) {
    const ForwardBuffers& mine = ranks_[rank].forward;
    const float* const saved = batch.last_of_routed ? mine.saved : nullptr;
    for_each_panel(batch, inner_size(shape_, batch), [&](const Piece& piece, int64_t panel) {
      const int64_t tile = piece.rows * kPanel;
      float* const gate = thread_scratch(3 * tile);
      float* const up = gate + tile;
      float* const grad_hidden = up + tile;
      const Ffn ffn = network(shape_, mine, piece.expert);
      const int64_t inner = ffn.gate.cols, row = piece.ring_row;
      if (saved != nullptr)
        load_pre_activations(piece, inner, panel, saved, gate, up);
      else
        pre_activations(piece, ffn, panel, hidden_rows(rings_.x, row), gate, up);
      multiply_panel_transposed(piece.rows, hidden_rows(rings_.dy, row), ffn.down, panel * kPanel,
                                {grad_hidden, kPanel, false});
      const int64_t at = row * rings_.inner_stride + panel * kPanel;
      activate_backward(shape_.activation, piece.rows, panel_columns(inner, panel), gate, up,
                        grad_hidden, rings_.row_weights + row,
                        {rings_.weighted_hidden + at, rings_.grad_gate + at, rings_.grad_up + at,
                         rings_.inner_stride, dots_ + row * dots_stride_ + panel, dots_stride_});
    });
  }

  // Gradient of a row's weight: <h, dh> + <b_down, dy> = <y, dy>, without y.
  void weight_dots(int32_t rank, const Batch& batch) {
    const ForwardBuffers& mine = ranks_[rank].forward;
    for_each_run(batch, [&](const Piece& piece, int64_t first, int64_t count) {
      const Ffn ffn = network(shape_, mine, piece.expert);
      const int64_t panels = num_panels(ffn.gate.cols);
      float* const bias = thread_scratch(shape_.hidden);
      if (ffn.down_bias) read(ffn.down_bias, shape_.hidden, bias);
      for (int64_t i = first; i < first + count; ++i) {
        const int64_t row = piece.ring_row + i;
        float dot = 0.0f;
        for (int64_t panel = 0; panel < panels; ++panel) dot += dots_[row * dots_stride_ + panel];
        if (ffn.down_bias) dot += bias_dot(bias, rings_.dy + row * rings_.hidden_stride);
        const plan::RowSource& source = piece.sources[i];
        const BackwardBuffers& to = ranks_[source.rank];
        if (source.slot < shape_.top_k)
          to.d_weights[int64_t{source.token} * shape_.top_k + source.slot] = dot;
        else if (to.d_shared_scale != nullptr)
          to.d_shared_scale[source.token] = dot;
      }
    });
  }

  float bias_dot(const float* bias, const float* dy) const {
    float lanes[kPanel] = {};
    int64_t j = 0;
    for (; j + kPanel <= shape_.hidden; j += kPanel)
      for (int64_t i = 0; i < kPanel; ++i) lanes[i] += bias[j + i] * dy[j + i];
    for (int64_t i = 0; j + i < shape_.hidden; ++i) lanes[i] += bias[j + i] * dy[j + i];
    for (int64_t width = kPanel / 2; width > 0; width /= 2)
      for (int64_t i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    return lanes[0];
  }

  void input_gradients(int32_t rank, const Batch& batch) {
    for_each_panel(batch, shape_.hidden, [&](const Piece& piece, int64_t panel) {
      float* const dx = thread_scratch(piece.rows * kPanel);
      const Ffn ffn = network(shape_, ranks_[rank].forward, piece.expert);
      const int64_t first = panel * kPanel;
      multiply_panel_transposed(piece.rows, inner_rows(rings_.grad_gate, piece.ring_row), ffn.gate,
                                first, {dx, kPanel, false});
      multiply_panel_transposed(piece.rows, inner_rows(rings_.grad_up, piece.ring_row), ffn.up,
                                first, {dx, kPanel, true});
      push(piece, slots_, first, panel_columns(shape_.hidden, panel), dx);
    });
  }

  Rows hidden_rows(const float* ring, int64_t row) const {
    return {ring + row * rings_.hidden_stride, rings_.hidden_stride};
  }
  Rows inner_rows(const float* ring, int64_t row) const {
    return {ring + row * rings_.inner_stride, rings_.inner_stride};
  }

  const LayerShape& shape_;
  const std::vector<BackwardBuffers>& ranks_;
  std::vector<ConstArray> xs_, dys_;
  GradientRings rings_{};
  OpenSums open_{};
  float* dots_ = nullptr;  // [rows][panels of the inner size]: row dots, one part per panel
  int64_t dots_stride_ = 0;
  std::vector<Slots> slots_;
};

}  // namespace

void backward(const LayerShape& shape, const std::vector<BackwardBuffers>& ranks) {
  Backward(shape, ranks).run();
}

}  // namespace jax_mok::cpu
