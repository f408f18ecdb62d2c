// Stand-ins for the maths of a layer: hashes that keep the structure (which values enter which) and
// the order of sums, and the results a run must give, computed from the ids alone.
#pragma once

#include <cstdint>
#include <vector>

#include "cases.h"

namespace test {

inline uint64_t mix(uint64_t a, uint64_t b) {
  uint64_t v = a * 0x9e3779b97f4a7c15u + b + 0x632be59bd9b4e019u;
  v = (v ^ v >> 29) * 0xbf58476d1ce4e5b9u;
  return v ^ v >> 32;
}

// Not commutative: sums in another order give another value.
inline uint64_t then(uint64_t sum, uint64_t next) { return sum * 0x100000001b3u + next; }

constexpr uint64_t kPaddingValue = 0;  // padding rows hold zeros, which weight gradients rely on

inline uint64_t token_value(uint64_t salt, int32_t rank, int32_t token) {
  return mix(mix(salt, rank), token) | 1;
}
inline uint64_t gradient_value(uint64_t salt, int32_t rank, int32_t token) {
  return mix(token_value(salt, rank, token), 7) | 1;
}
// gate|up in hidden tile n of one row. The forward's down GEMM reads it as it is.
inline uint64_t gate_up_value(uint64_t x, int32_t expert, int32_t n) {
  return x == kPaddingValue ? kPaddingValue : mix(x, int64_t{expert} * 1000 + n) | 1;
}
// Tile n of y for one row, from all hidden tiles of the row.
inline uint64_t output_value(const uint64_t* hidden, int32_t hidden_tiles, int32_t expert,
                             int32_t n) {
  uint64_t sum = 0;
  for (int32_t i = 0; i < hidden_tiles; ++i)
    sum += mix(hidden[i], (int64_t{expert} * 1000 + i) * 1000 + n);
  return sum;
}

// ---- backward ----
// What a panel of a hidden tile leaves for one row.
struct HiddenGradient {
  uint64_t h, d_gate, d_up;
};
inline HiddenGradient hidden_gradient(uint64_t gate_up, uint64_t dy, int32_t panel) {
  if (gate_up == kPaddingValue) return {kPaddingValue, kPaddingValue, kPaddingValue};
  const uint64_t both = mix(gate_up, dy) + panel;
  return {mix(gate_up, panel) | 1, mix(both, 101) | 1, mix(both, 102) | 1};
}
// Tile n of dx for one row, from all hidden columns (panels of all tiles) of the row.
inline uint64_t dx_value(const uint64_t* d_gate, const uint64_t* d_up, int32_t columns,
                         int32_t expert, int32_t n) {
  return output_value(d_gate, columns, expert, n) + 3 * output_value(d_up, columns, expert, n);
}
// What the gradient of a row's expert weight is summed from: one part for a panel, one for b_down.
inline uint64_t dot_value(uint64_t h) { return mix(h, 103) | 1; }
inline uint64_t bias_dot_value(uint64_t dy) { return mix(dy, 104) | 1; }

// An expert's weight tiles: those of w_down, of w_gate and w_up, and of the biases.
enum class WeightKind { kDown, kGateUp, kBias };
struct WeightTiles {
  int32_t down, gate_up, bias;
  int32_t count() const { return down + gate_up + bias; }
  WeightKind kind(int32_t n) const {
    return n < down             ? WeightKind::kDown
           : n < down + gate_up ? WeightKind::kGateUp
                                : WeightKind::kBias;
  }
};
inline WeightTiles routed_weight_tiles(int32_t n) { return {(n + 2) / 3, (n + 1) / 3, n / 3}; }
inline WeightTiles shared_weight_tiles(int32_t n) { return {(n + 1) / 2, n / 2, 0}; }

// What one row adds to weight tile n: 0 for a padding row, which must leave no trace.
inline uint64_t down_weight_value(const uint64_t* h, uint64_t dy, int32_t columns, int32_t n) {
  return dy * output_value(h, h[0] == kPaddingValue ? 0 : columns, 0, n);
}
inline uint64_t gate_up_weight_value(uint64_t x, const uint64_t* d_gate, const uint64_t* d_up,
                                     int32_t columns, int32_t n) {
  return x * dx_value(d_gate, d_up, d_gate[0] == kPaddingValue ? 0 : columns, 0, n);
}
inline uint64_t bias_value(const uint64_t* d_gate, const uint64_t* d_up, uint64_t dy,
                           int32_t columns, int32_t n) {
  return dy * 5 + (d_gate[0] == kPaddingValue ? 0 : dx_value(d_gate, d_up, columns, 0, n));
}
inline uint64_t add_row(uint64_t sum, uint64_t value) {
  return value == 0 ? sum : then(sum, value);
}

// Static facts of a backward that the plan's shape does not tell.
struct GradFacts {
  int32_t panels = 1;               // of a hidden tile
  int32_t shared_hidden_tiles = 0;  // 0: no shared experts
  int32_t shared_weights = 0;
  int32_t hidden_columns(int32_t tiles) const { return tiles * panels; }
};
// Stands for the number of the shared experts where an expert's number enters a value.
constexpr int32_t kSharedExpert = 1 << 20;

struct Expected {
  std::vector<std::vector<uint64_t>> y;       // [rank][token]: y in the forward, dx in the backward
  std::vector<std::vector<uint64_t>> weight;  // [rank][local expert * grad_weight_tiles + n]
  std::vector<std::vector<uint64_t>> shared_weight;  // [rank][n]
  std::vector<std::vector<uint64_t>> dot;            // [rank][token * top_k + slot]
  std::vector<std::vector<uint64_t>> shared_dot;     // [rank][token]
};

// One row of the backward through one feed-forward network of `tiles` hidden tiles.
struct GradRow {
  uint64_t x, dy;
  std::vector<uint64_t> h, d_gate, d_up;

  GradRow(uint64_t salt, const RowSource& from, int32_t expert, int32_t tiles, int32_t panels)
      : x(token_value(salt, from.rank, from.token)),
        dy(gradient_value(salt, from.rank, from.token)) {
    for (int32_t n = 0; n < tiles; ++n)
      for (int32_t panel = 0; panel < panels; ++panel) {
        const HiddenGradient value = hidden_gradient(gate_up_value(x, expert, n), dy, panel);
        h.push_back(value.h);
        d_gate.push_back(value.d_gate);
        d_up.push_back(value.d_up);
      }
  }
  int32_t columns() const { return static_cast<int32_t>(h.size()); }
  uint64_t dx(int32_t expert, int32_t n) const {
    return dx_value(d_gate.data(), d_up.data(), columns(), expert, n);
  }
  uint64_t weight(const WeightTiles& tiles, int32_t n) const {
    switch (tiles.kind(n)) {
      case WeightKind::kDown:
        return down_weight_value(h.data(), dy, columns(), n);
      case WeightKind::kGateUp:
        return gate_up_weight_value(x, d_gate.data(), d_up.data(), columns(), n);
      default:
        return bias_value(d_gate.data(), d_up.data(), dy, columns(), n);
    }
  }
  uint64_t dot(bool biased) const {
    uint64_t sum = 0;
    for (uint64_t value : h) sum = then(sum, dot_value(value));
    return biased ? then(sum, bias_dot_value(dy)) : sum;
  }
};

inline Expected expected_forward(const Shape& s, const Ids& ids, uint64_t salt) {
  Expected expected;
  for (int32_t rank = 0; rank < s.num_ranks; ++rank) {
    expected.y.emplace_back();
    for (int32_t token = 0; token < s.num_tokens; ++token) {
      uint64_t sum = 0;
      for (int32_t slot = 0; slot < s.top_k; ++slot) {
        const int32_t expert = ids[rank][token * s.top_k + slot];
        if (expert < 0) continue;
        std::vector<uint64_t> hidden;
        for (int32_t n = 0; n < s.gate_up_tiles; ++n)
          hidden.push_back(gate_up_value(token_value(salt, rank, token), expert, n));
        for (int32_t n = 0; n < s.down_tiles; ++n)
          sum = then(sum, output_value(hidden.data(), s.gate_up_tiles, expert, n));
      }
      expected.y.back().push_back(sum);
    }
  }
  return expected;
}

// Weights: blocks from last to first, in a block from the first row to the last.
inline Expected expected_backward(const Shape& s, const GradFacts& facts, const Ids& ids,
                                  uint64_t salt) {
  const WeightTiles routed = routed_weight_tiles(s.grad_weight_tiles);
  const WeightTiles shared = shared_weight_tiles(facts.shared_weights);
  Expected expected;
  for (int32_t rank = 0; rank < s.num_ranks; ++rank) {
    expected.y.emplace_back();
    expected.dot.emplace_back();
    expected.shared_dot.emplace_back();
    for (int32_t token = 0; token < s.num_tokens; ++token) {
      uint64_t sum = 0;
      for (int32_t slot = 0; slot < s.top_k; ++slot) {
        const int32_t expert = ids[rank][token * s.top_k + slot];
        expected.dot.back().push_back(0);
        if (expert < 0) continue;
        const GradRow row(salt, {rank, token, slot}, expert, s.gate_up_tiles, facts.panels);
        for (int32_t n = 0; n < s.down_tiles; ++n) sum = then(sum, row.dx(expert, n));
        expected.dot.back().back() = row.dot(routed.bias > 0);
      }
      if (facts.shared_hidden_tiles > 0) {
        const GradRow row(salt, {rank, token, 0}, kSharedExpert, facts.shared_hidden_tiles,
                          facts.panels);
        for (int32_t n = 0; n < s.down_tiles; ++n) sum = then(sum, row.dx(kSharedExpert, n));
        expected.shared_dot.back().push_back(row.dot(false));
      }
      expected.y.back().push_back(sum);
    }
    expected.weight.emplace_back(s.num_local_experts * s.grad_weight_tiles, 0);
    auto blocks = reference_blocks(s, ids, rank);
    std::reverse(blocks.begin(), blocks.end());
    for (const ReferenceBlock& block : blocks)
      for (const RowSource& from : block.rows) {
        if (from.rank < 0) continue;
        const GradRow row(salt, from, rank * s.num_local_experts + block.expert, s.gate_up_tiles,
                          facts.panels);
        for (int32_t n = 0; n < s.grad_weight_tiles; ++n) {
          uint64_t& sum = expected.weight.back()[block.expert * s.grad_weight_tiles + n];
          sum = add_row(sum, row.weight(routed, n));
        }
      }
    expected.shared_weight.emplace_back(shared.count(), 0);
    if (facts.shared_hidden_tiles == 0) continue;
    for (int32_t first = (s.num_tokens - 1) / s.block_rows * s.block_rows; first >= 0;
         first -= s.block_rows)
      for (int32_t token = first; token < std::min(first + s.block_rows, s.num_tokens); ++token) {
        const GradRow row(salt, {rank, token, 0}, kSharedExpert, facts.shared_hidden_tiles,
                          facts.panels);
        for (int32_t n = 0; n < shared.count(); ++n) {
          uint64_t& sum = expected.shared_weight.back()[n];
          sum = add_row(sum, row.weight(shared, n));
        }
      }
  }
  return expected;
}

}  // namespace test
