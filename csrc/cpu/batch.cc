// Turns the routing plan of a rank into batches, and runs over them in parallel.
#include "cpu/batch.h"

#include <algorithm>

#include "cpu/thread_pool.h"

namespace jax_mok::cpu {
namespace {

Piece piece_of(const plan::Shape& plan_shape, const plan::HostPlan& plan,
               const plan::Group& group) {
  const int64_t before = int64_t{group.first_block - plan.expert_first_block[group.expert]};
  const int64_t left = plan.expert_rows[group.expert] - before * kBlockRows;
  const int64_t row = int64_t{group.first_block} * kBlockRows;
  return {group.expert,
          plan::ring_row(plan_shape, group.first_block, 0, plan_shape.macrobatch_blocks),
          std::min(left, int64_t{group.num_blocks} * kBlockRows), plan.rows.data() + row};
}

std::vector<Batch> routed_batches(const LayerShape& shape, const plan::HostPlan& plan) {
  const plan::Shape s = plan_shape(shape);
  const plan::BlockMap map = plan.map();
  std::vector<Batch> batches(plan::num_macrobatches(s, map.num_blocks));
  for (const plan::Group& group : plan.groups)
    batches[plan::macrobatch_of(s, group.first_block)].groups.push_back(piece_of(s, plan, group));
  for (const plan::Group& segment : plan.segments)
    batches[plan::macrobatch_of(s, segment.first_block)].segments.push_back(
        {piece_of(s, plan, segment), plan::starts_weight_sum(map, segment),
         plan::ends_weight_sum(map, segment)});
  if (!batches.empty()) batches.back().last_of_routed = true;
  return batches;
}

std::vector<Batch> shared_batches(const LayerShape& shape,
                                  const std::vector<plan::RowSource>& rows) {
  std::vector<Batch> batches;
  const int64_t total = static_cast<int64_t>(rows.size());
  const int32_t expert = shape.num_local_experts;
  for (int64_t first = 0; first < total; first += shape.macrobatch_rows) {
    const int64_t count = std::min(shape.macrobatch_rows, total - first);
    Batch batch;
    batch.segments.push_back(
        {{expert, 0, count, rows.data() + first}, first + count == total, first == 0});
    for (int64_t row = 0; row < count; row += shape.minibatch_rows)
      batch.groups.push_back(
          {expert, row, std::min(shape.minibatch_rows, count - row), rows.data() + first + row});
    batches.push_back(std::move(batch));
  }
  return batches;
}

std::vector<plan::RowSource> shared_rows(const LayerShape& shape, int32_t rank) {
  std::vector<plan::RowSource> rows;
  if (shape.shared_intermediate == 0) return rows;
  rows.reserve(shape.num_tokens);
  for (int32_t token = 0; token < shape.num_tokens; ++token)
    rows.push_back({rank, token, shape.top_k});
  return rows;
}

ConstArray slice(ConstArray stack, int64_t index, int64_t size) {
  return stack ? stack.at(index * size) : ConstArray{};
}
Array slice(Array stack, int64_t index, int64_t size) {
  return stack ? stack.at(index * size) : Array{};
}

}  // namespace

plan::Shape plan_shape(const LayerShape& s) {
  plan::Shape shape{};
  shape.num_ranks = s.num_ranks;
  shape.num_tokens = s.num_tokens;
  shape.top_k = s.top_k;
  shape.num_local_experts = s.num_local_experts;
  shape.block_rows = kBlockRows;
  shape.gate_up_tiles = 1;  // the engine cuts a group into panels itself
  shape.down_tiles = 1;
  shape.grad_weight_tiles = 1;
  shape.group_blocks = static_cast<int32_t>(s.minibatch_rows / kBlockRows);
  shape.macrobatch_blocks = static_cast<int32_t>(s.macrobatch_rows / kBlockRows);
  shape.ring_blocks = shape.macrobatch_blocks;
  shape.source_order = plan::SourceOrder::kSequential;
  return shape;
}

std::vector<Schedule> make_schedules(const LayerShape& shape,
                                     const std::vector<const int32_t*>& ids_of_rank) {
  std::vector<Schedule> schedules(shape.num_ranks);
  parallel_for(shape.num_ranks, [&](int64_t rank) {
    Schedule& schedule = schedules[rank];
    schedule.plan = plan::build(plan_shape(shape), ids_of_rank.data(), static_cast<int32_t>(rank));
    schedule.shared_rows = shared_rows(shape, static_cast<int32_t>(rank));
    schedule.batches = routed_batches(shape, schedule.plan);
    for (Batch& batch : shared_batches(shape, schedule.shared_rows))
      schedule.batches.push_back(std::move(batch));
    for (const Batch& batch : schedule.batches)
      for (const Piece& group : batch.groups)
        schedule.ring_rows = std::max(schedule.ring_rows, group.ring_row + group.rows);
  });
  return schedules;
}

int32_t num_slots(const LayerShape& shape) {
  return shape.top_k + (shape.shared_intermediate > 0 ? 1 : 0);
}

int64_t inner_size(const LayerShape& shape, int32_t expert) {
  return expert == shape.num_local_experts ? shape.shared_intermediate : shape.intermediate;
}

int64_t inner_size(const LayerShape& shape, const Batch& batch) {
  return inner_size(shape, batch.groups.front().expert);
}

int64_t widest_inner(const LayerShape& shape) {
  return std::max(shape.intermediate, shape.shared_intermediate);
}

Ffn network(const LayerShape& shape, const ForwardBuffers& buffers, int32_t expert) {
  if (expert == shape.num_local_experts) return buffers.shared;
  const int64_t h = shape.hidden, i = shape.intermediate;
  const ExpertStack& stack = buffers.experts;
  return {{slice(stack.gate, expert, h * i), h, i}, {slice(stack.up, expert, h * i), h, i},
          {slice(stack.down, expert, i * h), i, h}, slice(stack.gate_bias, expert, i),
          slice(stack.up_bias, expert, i),          slice(stack.down_bias, expert, h)};
}

FfnGradients network_gradients(const LayerShape& shape, const BackwardBuffers& buffers,
                               int32_t expert) {
  if (expert == shape.num_local_experts) return buffers.shared;
  const int64_t h = shape.hidden, i = shape.intermediate;
  const FfnGradients& stack = buffers.experts;
  return {slice(stack.gate, expert, h * i), slice(stack.up, expert, h * i),
          slice(stack.down, expert, i * h), slice(stack.gate_bias, expert, i),
          slice(stack.up_bias, expert, i),  slice(stack.down_bias, expert, h)};
}

float row_weight(const LayerShape& shape, const ForwardBuffers& source,
                 const plan::RowSource& row) {
  if (row.slot < shape.top_k) return source.weights[int64_t{row.token} * shape.top_k + row.slot];
  return source.shared_scale != nullptr ? source.shared_scale[row.token] : 1.0f;
}

void for_each_run(const Batch& batch,
                  const std::function<void(const Piece&, int64_t, int64_t)>& body) {
  constexpr int64_t kRun = 32;
  struct Run {
    const Piece* piece;
    int64_t first;
  };
  std::vector<Run> runs;
  for (const Piece& piece : batch.groups)
    for (int64_t first = 0; first < piece.rows; first += kRun) runs.push_back({&piece, first});
  parallel_for(static_cast<int64_t>(runs.size()), [&](int64_t i) {
    const Run& run = runs[i];
    body(*run.piece, run.first, std::min(kRun, run.piece->rows - run.first));
  });
}

void pull(const LayerShape& shape, const Batch& batch, const std::vector<ConstArray>& of_rank,
          float* ring, int64_t stride) {
  for_each_run(batch, [&](const Piece& piece, int64_t first, int64_t count) {
    for (int64_t i = first; i < first + count; ++i) {
      const plan::RowSource& source = piece.sources[i];
      read(of_rank[source.rank].at(source.token * shape.hidden), shape.hidden,
           ring + (piece.ring_row + i) * stride);
    }
  });
}

void for_each_panel(const Batch& batch, int64_t columns,
                    const std::function<void(const Piece&, int64_t)>& body) {
  const int64_t panels = num_panels(columns);
  parallel_for(static_cast<int64_t>(batch.groups.size()) * panels,
               [&](int64_t i) { body(batch.groups[i / panels], i % panels); });
}

}  // namespace jax_mok::cpu
