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
// Tile n of the first GEMM for one row: h in the forward (dy = 0), its gradient in the backward.
inline uint64_t hidden_value(uint64_t x, uint64_t dy, int32_t expert, int32_t n) {
  return x == kPaddingValue ? kPaddingValue : mix(x ^ dy * 3, int64_t{expert} * 1000 + n) | 1;
}
// Tile n of the second GEMM for one row, from all hidden tiles of the row.
inline uint64_t output_value(const uint64_t* hidden, int32_t hidden_tiles, int32_t expert,
                             int32_t n) {
  uint64_t sum = 0;
  for (int32_t i = 0; i < hidden_tiles; ++i)
    sum += mix(hidden[i], (int64_t{expert} * 1000 + i) * 1000 + n);
  return sum;
}
// What one row adds to tile n of its expert's weight gradients.
inline uint64_t weight_value(uint64_t x, uint64_t dy, const uint64_t* hidden, int32_t hidden_tiles,
                             int32_t n) {
  uint64_t sum = 0;
  for (int32_t i = 0; i < hidden_tiles; ++i) sum += hidden[i] * (2 * i + 1);
  return (x * 31 + dy) * sum * (2 * n + 1);
}

struct Expected {
  std::vector<std::vector<uint64_t>> y;       // [rank][token]: y in the forward, dx in the backward
  std::vector<std::vector<uint64_t>> weight;  // [rank][local expert * grad_weight_tiles + n]
};

inline Expected expected_results(const Shape& s, const Ids& ids, jax_mok::plan::Pass pass,
                                 uint64_t salt) {
  const bool backward = pass == jax_mok::plan::Pass::kBackward;
  const auto hidden_of = [&](const RowSource& row, int32_t expert) {
    std::vector<uint64_t> hidden(s.gate_up_tiles, kPaddingValue);
    if (row.rank >= 0)
      for (int32_t n = 0; n < s.gate_up_tiles; ++n)
        hidden[n] =
            hidden_value(token_value(salt, row.rank, row.token),
                         backward ? gradient_value(salt, row.rank, row.token) : 0, expert, n);
    return hidden;
  };
  Expected expected;
  for (int32_t rank = 0; rank < s.num_ranks; ++rank) {
    expected.y.emplace_back();
    for (int32_t token = 0; token < s.num_tokens; ++token) {
      uint64_t sum = 0;
      for (int32_t slot = 0; slot < s.top_k; ++slot) {
        const int32_t expert = ids[rank][token * s.top_k + slot];
        if (expert < 0) continue;
        const auto hidden = hidden_of({rank, token, slot}, expert);
        for (int32_t n = 0; n < s.down_tiles; ++n)
          sum = then(sum, output_value(hidden.data(), s.gate_up_tiles, expert, n));
      }
      expected.y.back().push_back(sum);
    }
    expected.weight.emplace_back(s.num_local_experts * s.grad_weight_tiles, 0);
    if (!backward) continue;
    auto blocks = reference_blocks(s, ids, rank);
    std::reverse(blocks.begin(), blocks.end());
    for (const ReferenceBlock& block : blocks)
      for (int32_t n = 0; n < s.grad_weight_tiles; ++n) {
        uint64_t part = 0;
        for (const RowSource& row : block.rows) {
          if (row.rank < 0) continue;
          const auto hidden = hidden_of(row, rank * s.num_local_experts + block.expert);
          part += weight_value(token_value(salt, row.rank, row.token),
                               gradient_value(salt, row.rank, row.token), hidden.data(),
                               s.gate_up_tiles, n);
        }
        uint64_t& sum = expected.weight.back()[block.expert * s.grad_weight_tiles + n];
        sum = then(sum, part);
      }
  }
  return expected;
}

}  // namespace test
