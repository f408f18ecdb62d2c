// Sums the slots of every token, tokens in parallel.
#include "cpu/combine.h"

#include <algorithm>

#include "cpu/batch.h"
#include "cpu/thread_pool.h"
#include "cpu/workspace.h"

namespace jax_mok::cpu {

std::vector<Slots> slots_of_ranks(const LayerShape& shape, float* data) {
  const int64_t size = num_slots(shape) * (int64_t{shape.num_tokens} * shape.hidden);
  std::vector<Slots> slots;
  for (int32_t rank = 0; rank < shape.num_ranks; ++rank)
    slots.push_back({data + rank * size, shape.num_tokens, shape.hidden});
  return slots;
}

void combine(const LayerShape& shape, const ForwardBuffers& rank, const Slots& slots, bool weighted,
             Array out) {
  constexpr int64_t kTokens = 16;
  const int64_t tokens = shape.num_tokens;
  parallel_for((tokens + kTokens - 1) / kTokens, [&](int64_t run) {
    float* const sum = thread_scratch(shape.hidden);
    const int64_t end = std::min(tokens, (run + 1) * kTokens);
    for (int64_t token = run * kTokens; token < end; ++token) {
      std::fill(sum, sum + shape.hidden, 0.0f);
      for (int32_t slot = 0; slot < num_slots(shape); ++slot) {
        if (slot < shape.top_k && rank.ids[token * shape.top_k + slot] < 0) continue;
        const plan::RowSource row{0, static_cast<int32_t>(token), slot};
        const float* const value = slots.at(row);
        const float weight = weighted ? row_weight(shape, rank, row) : 1.0f;
        for (int64_t j = 0; j < shape.hidden; ++j) sum[j] += weight * value[j];
      }
      write(sum, shape.hidden, out.at(token * shape.hidden));
    }
  });
}

}  // namespace jax_mok::cpu
