// Each row's result is pushed to its own slot at the source rank: one writer a slot. The source
// then adds the slots of a token in slot order.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/layer.h"
#include "plan/routing.h"

namespace jax_mok::cpu {

// Slots of one rank: [slot][token][H] in float32, unused ones never written nor read.
struct Slots {
  float* data;
  int64_t num_tokens, hidden;

  float* at(const plan::RowSource& row) const {
    return data +
           plan::combine_slot(row.token, row.slot, static_cast<int32_t>(num_tokens)) * hidden;
  }
};

// The slots of all ranks one after another in `data`, [num_ranks][slots of a token][T][H].
std::vector<Slots> slots_of_ranks(const LayerShape& shape, float* data);

// out[t] = sum over the used slots of t, in slot order, of weight * slot, rounded once. Without
// `weighted` the weights are 1.
void combine(const LayerShape& shape, const ForwardBuffers& rank, const Slots& slots, bool weighted,
             Array out);

}  // namespace jax_mok::cpu
