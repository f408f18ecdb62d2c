// Host side of the layout: what is allowed, what the settings default to, and where arrays lie.
#include "cuda/layout.h"

#include <algorithm>

#include "plan/routing.h"

namespace jax_mok::cuda {
namespace {

constexpr int kDefaultGroupBlocks = 8;
constexpr int kDefaultRingBlocks = 96;
// How many tiles lie between the gate|up tiles of a group and its down tiles: more than all CTAs of
// a GPU have under way while one of them is at a gate|up tile.
constexpr int kLeadTiles = 300;

std::string field(const char* name, long long value, const std::string& allowed) {
  return std::string(name) + " is " + std::to_string(value) + "; allowed: " + allowed;
}

int64_t round_up(int64_t value, int64_t unit) { return plan::ceil_div(value, unit) * unit; }

DispatchUnit make_unit(int hidden) {
  const int row_bytes = hidden * 2, most = kCommBufferBytes / kMinCommBuffers;
  DispatchUnit unit;
  unit.parts = static_cast<int>(plan::ceil_div(row_bytes, most));
  unit.part_bytes = static_cast<int>(round_up(plan::ceil_div(row_bytes, unit.parts), 128));
  unit.buffers = std::min(kMaxCommBuffers, kCommBufferBytes / unit.part_bytes);
  unit.rows = 1;  // a power of two, so that units do not cross blocks
  while (unit.rows * 2 * unit.parts <= unit.buffers) unit.rows *= 2;
  return unit;
}

int columns_of(int64_t columns, int tile) {
  return static_cast<int>(plan::ceil_div(columns, tile));
}
int blocks_of(int rows) { return static_cast<int>(plan::ceil_div(rows, kBlockRows)); }

WorkspaceLayout make_workspace(const Geometry& g) {
  const plan::Shape& s = g.shape;
  const int64_t ranks = s.num_ranks, experts = s.num_local_experts;
  const int64_t blocks = std::max<int64_t>(plan::max_blocks(s), 1);
  const int64_t hidden_bytes = int64_t{g.hidden} * 2;
  const int64_t shared_bytes = int64_t{g.shared_intermediate} * 2;
  WorkspaceLayout w;
  int64_t end = 0;
  // With virtual ranks a tensor map spans the array of all ranks, so nothing may lie between their
  // parts: arrays of rows are multiples of 256 bytes anyway.
  const auto add = [&](int64_t bytes) {
    const Span span = {end, round_up(bytes, 256)};
    end += span.bytes * g.num_virtual_ranks;
    end = round_up(end, 1024);
    return span;
  };
  w.control = add(sizeof(RankControl));
  const bool backward = g.pass == plan::Pass::kBackward;
  const int64_t macrobatches = plan::max_macrobatches(s);
  w.counters = add(4 * (backward ? s.ring_blocks + experts + g.shared_blocks + 1 + macrobatches
                                 : 2 * int64_t{s.ring_blocks} + 2 * int64_t{s.macrobatch_blocks} +
                                       g.shared_blocks));
  w.chunk_counts = add(4 * ranks * g.num_chunks * experts);
  w.counts = add(4 * ranks * experts);
  w.expert_first_block = add(4 * (experts + 1));
  w.block_expert = add(4 * blocks);
  w.routes = add(blocks * kBlockRows *
                 static_cast<int64_t>(backward ? sizeof(GradRoute) : sizeof(RowRoute)));
  w.token_rows = add(ranks > 1 ? 4 * ranks * s.num_tokens * s.top_k : 0);
  w.zero_row = add(hidden_bytes);
  // What is saved needs no place here; the backward needs one for what was not.
  const bool in_workspace = backward ? !g.save || plan::max_blocks(s) > s.ring_blocks : !g.save;
  w.x_ring = add(in_workspace ? int64_t{s.ring_blocks} * kBlockRows * hidden_bytes : 0);
  w.h = add(int64_t{s.macrobatch_blocks} * kBlockRows * g.intermediate * 2);
  w.shared_h = add(int64_t{g.shared_blocks} * kBlockRows * shared_bytes);
  w.shared_y = add(g.shared_intermediate > 0 ? int64_t{s.num_tokens} * hidden_bytes : 0);
  if (backward) {
    w.dy_ring = add(int64_t{s.ring_blocks} * kBlockRows * hidden_bytes);
    w.d_gate = add(w.h.bytes);
    w.d_up = add(w.h.bytes);
    w.shared_d_gate = add(w.shared_h.bytes);
    w.shared_d_up = add(w.shared_h.bytes);
    w.shared_parts = add(4 * int64_t{g.num_shared_parts} * s.num_tokens);
    w.open_sums = add(macrobatches > 1 ? 2 * int64_t{s.grad_weight_tiles} * kOpenSumBytes : 0);
  }
  w.bytes = end;
  return w;
}

HeapLayout make_heap(const Geometry& g) {
  const plan::Shape& s = g.shape;
  const int64_t rows = int64_t{s.num_tokens}, row_bytes = int64_t{g.hidden} * 2;
  HeapLayout h;
  h.ids = round_up(sizeof(HeapControl), 1024);
  h.x = h.ids + round_up(rows * s.top_k * 4, 1024);
  const bool peers = s.num_ranks > 1, backward = g.pass == plan::Pass::kBackward;
  const int64_t tokens = peers ? round_up(rows * row_bytes, 1024) : 0;
  h.dy = h.x + tokens;
  h.weights = h.dy + (backward ? tokens : 0);
  h.slots = h.weights + (backward && peers ? round_up(rows * s.top_k * 4, 1024) : 0);
  h.parts = h.slots + round_up(rows * s.top_k * row_bytes, 1024);
  h.bytes = h.parts + (backward ? round_up(g.num_parts * rows * s.top_k * 4, 1024) : 0);
  return h;
}

}  // namespace

std::string check(const ForwardFacts& f) {
  if (f.num_ranks < 1 || f.num_ranks > kMaxRanks)
    return field("num_ranks", f.num_ranks, "1 to " + std::to_string(kMaxRanks));
  if (f.num_virtual_ranks != 1 && f.num_virtual_ranks != f.num_ranks)
    return field("num_virtual_ranks", f.num_virtual_ranks, "1, or num_ranks");
  if (f.num_tokens < 0) return field("num_tokens", f.num_tokens, "0 and up");
  if (f.top_k < 1 || f.top_k > kMaxTopK)
    return field("top_k", f.top_k, "1 to " + std::to_string(kMaxTopK));
  if (f.hidden < kColumnUnit || f.hidden % kColumnUnit != 0)
    return field("hidden", f.hidden, "multiples of " + std::to_string(kColumnUnit));
  if (f.intermediate < kColumnUnit || f.intermediate % kColumnUnit != 0)
    return field("intermediate", f.intermediate, "multiples of " + std::to_string(kColumnUnit));
  if (f.shared_intermediate < 0 || f.shared_intermediate % kColumnUnit != 0)
    return field("shared_intermediate", f.shared_intermediate,
                 "0, or multiples of " + std::to_string(kColumnUnit));
  if (f.num_experts < f.num_ranks || f.num_experts % f.num_ranks != 0)
    return field("num_experts", f.num_experts, "multiples of num_ranks");
  if (f.num_experts / f.num_ranks > kMaxLocalExperts)
    return field("num_experts", f.num_experts,
                 "at most " + std::to_string(kMaxLocalExperts) + " per rank");
  if (f.num_comm_sms < 0) return field("num_comm_sms", f.num_comm_sms, "0 and up");
  if (f.minibatch_size < 0) return field("minibatch_size", f.minibatch_size, "0 and up");
  if (f.macrobatch_size < 0) return field("macrobatch_size", f.macrobatch_size, "0 and up");
  if (f.ring_size < 0) return field("ring_size", f.ring_size, "0 and up");
  if (!(f.timeout_seconds > 0) || !(f.start_timeout_seconds > 0))
    return "timeout_seconds and start_timeout_seconds must be above 0";
  if (const char* wrong = plan::check(make_geometry(f, 1).shape)) return wrong;
  return "";
}

std::string check_backward(const BackwardFacts& f) {
  if (std::string wrong = check(f); !wrong.empty()) return wrong;
  if (const char* wrong = plan::check_backward(make_geometry(f, 1, plan::Pass::kBackward).shape))
    return wrong;
  return "";
}

Geometry make_geometry(const ForwardFacts& f, int num_sms, plan::Pass pass) {
  const bool backward = pass == plan::Pass::kBackward;
  Geometry g = {};
  g.pass = pass;
  g.save = f.save;
  g.num_virtual_ranks = f.num_virtual_ranks;
  g.num_experts = f.num_experts;
  g.hidden = f.hidden;
  g.intermediate = f.intermediate;
  g.shared_intermediate = f.shared_intermediate;
  g.shared_blocks = f.shared_intermediate > 0 ? blocks_of(f.num_tokens) : 0;
  g.shared_gate_up_tiles = static_cast<int>(plan::ceil_div(f.shared_intermediate, kGateUpColumns));
  // Gate and up take two thirds of the accumulators where they are computed again. One half of 256
  // columns after the other would do too, but read the tokens twice.
  g.hidden_tile_columns = f.save ? kTileColumns : kGateUpColumns;
  g.num_parts = columns_of(f.intermediate, kPartColumns) + (f.has_biases ? 1 : 0);
  g.num_shared_parts = columns_of(f.shared_intermediate, kPartColumns);
  // Tiles of 128 x 256: dW_down [I, H], and dW_gate and dW_up [H, I] side by side.
  const auto down_weight_tiles = [&](int inner) {
    return columns_of(inner, kBlockRows) * columns_of(f.hidden, kTileColumns);
  };
  const auto gate_up_weight_tiles = [&](int inner) {
    return columns_of(f.hidden, kBlockRows) * columns_of(inner, kGateUpColumns);
  };
  g.down_weight_tiles = down_weight_tiles(f.intermediate);
  g.gate_up_weight_tiles = gate_up_weight_tiles(f.intermediate);
  g.bias_tiles = f.has_biases ? columns_of(2 * f.intermediate + f.hidden, kBiasTileColumns) : 0;
  g.shared_down_weight_tiles = down_weight_tiles(f.shared_intermediate);
  g.shared_gate_up_weight_tiles = gate_up_weight_tiles(f.shared_intermediate);
  g.num_chunks = static_cast<int>(plan::ceil_div(int64_t{f.num_tokens} * f.top_k, kChunkIds));

  g.ctas_per_rank = std::max(num_sms / f.num_virtual_ranks, 1);
  if (f.num_comm_sms > 0)  // at least one CTA of a rank computes
    g.comm_ctas_per_rank =
        std::min(std::max(f.num_comm_sms / f.num_virtual_ranks, 1), g.ctas_per_rank - 1);
  g.unit = make_unit(f.hidden);

  plan::Shape& s = g.shape;
  s.num_ranks = f.num_ranks;
  s.num_tokens = f.num_tokens;
  s.top_k = f.top_k;
  s.num_local_experts = f.num_experts / f.num_ranks;
  s.block_rows = kBlockRows;
  s.gate_up_tiles = columns_of(f.intermediate, backward ? g.hidden_tile_columns : kGateUpColumns);
  s.down_tiles = columns_of(f.hidden, kTileColumns);
  s.grad_weight_tiles = backward ? g.down_weight_tiles + g.gate_up_weight_tiles + g.bias_tiles : 0;
  s.source_order = plan::SourceOrder::kInterleaved;
  s.rows_in_flight = 0;  // a worker holds nothing back while it waits for the ring

  s.macrobatch_blocks = 1;  // max_blocks does not depend on it
  const int64_t most = std::max<int64_t>(plan::max_blocks(s), 1);
  // Twice what a balanced routing brings; more is walked in several macrobatches.
  const int64_t balanced =
      plan::ceil_div(int64_t{f.num_tokens} * f.top_k, kBlockRows) + s.num_local_experts;
  const int64_t macrobatch = f.macrobatch_size > 0 ? blocks_of(f.macrobatch_size) : 2 * balanced;
  s.macrobatch_blocks = static_cast<int>(std::clamp<int64_t>(macrobatch, 1, most));
  s.group_blocks = f.minibatch_size > 0 ? blocks_of(f.minibatch_size) : kDefaultGroupBlocks;
  s.group_blocks = std::min(s.group_blocks, s.macrobatch_blocks);
  if (!backward)
    s.lead_blocks = s.group_blocks +
                    static_cast<int>(plan::ceil_div(kLeadTiles, s.gate_up_tiles + s.down_tiles));
  // With several ranks the ring holds a macrobatch, so that a token is pulled once for all its
  // experts here. So it does where the backward reads it.
  const int64_t ring = backward || f.save ? s.macrobatch_blocks
                       : f.ring_size > 0  ? blocks_of(f.ring_size)
                       : f.num_ranks > 1  ? s.macrobatch_blocks
                                          : kDefaultRingBlocks;
  s.ring_blocks = static_cast<int>(std::max(std::min(ring, most), plan::min_ring_blocks(s)));
  g.shared_hidden_tiles = columns_of(f.shared_intermediate, g.hidden_tile_columns);

  g.workspace = make_workspace(g);
  g.heap = make_heap(g);
  return g;
}

size_t workspace_bytes(const ForwardFacts& facts) {
  return make_geometry(facts, 1).workspace.bytes;
}

size_t heap_bytes(const ForwardFacts& facts) { return make_geometry(facts, 1).heap.bytes; }

int64_t saved_rows(const ForwardFacts& facts) {
  return int64_t{make_geometry(facts, 1).shape.macrobatch_blocks} * kBlockRows;
}

size_t backward_workspace_bytes(const BackwardFacts& facts) {
  return make_geometry(facts, 1, plan::Pass::kBackward).workspace.bytes;
}

size_t backward_heap_bytes(const BackwardFacts& facts) {
  return make_geometry(facts, 1, plan::Pass::kBackward).heap.bytes;
}

}  // namespace jax_mok::cuda
