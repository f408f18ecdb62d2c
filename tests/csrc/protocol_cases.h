// Random set-ups of the protocol that must run through.
#pragma once

#include "protocol_crew.h"

namespace test {

// How rows are cut into pieces and units: as csrc/cuda/layout.cc does, units are powers of two, and
// long rows have more pieces than there are buffers.
inline void random_unit(Rng& rng, Setup& setup) {
  if (pick(rng, 0, 3) == 0) {
    setup.unit_rows = 1;
    setup.buffers = pick(rng, 2, 3);
    setup.row_parts = setup.buffers + pick(rng, 1, 4);
    return;
  }
  setup.row_parts = pick(rng, 1, 2);
  setup.unit_rows = 2 / setup.row_parts;
  if (pick(rng, 0, 1) == 1 && setup.unit_rows * 2 <= setup.shape.block_rows) setup.unit_rows *= 2;
  setup.buffers = setup.unit_rows * setup.row_parts;
}

// A legal set-up with the smallest ring or a little more.
inline Setup random_setup(Rng& rng, int32_t most_ranks, int32_t most_tokens, int32_t most_experts) {
  Setup setup;
  Shape& s = setup.shape;
  s = random_shape(rng, most_ranks, most_tokens, most_experts);
  s.block_rows = 2 << pick(rng, 0, 1);
  s.rows_in_flight = 0;
  setup.comm_workers = pick(rng, 0, 1) * pick(rng, 1, 3);
  random_unit(rng, setup);
  setup.compute_workers = pick(rng, 1, 4);
  setup.look_ahead = pick(rng, 1, 4);
  setup.grad.panels = pick(rng, 1, 2);
  if (pick(rng, 0, 2) == 0) {
    setup.grad.shared_hidden_tiles = pick(rng, 1, 3);
    setup.grad.shared_weights = pick(rng, 1, 4);
  }
  setup.consumer_warps = pick(rng, 1, 2);
  setup.weight_panels = pick(rng, 1, 4);
  setup.weight_panels_together = pick(rng, 0, 1) == 0;
  // The kernel's lead, the smallest that it can have, and the smallest that does not deadlock.
  const int32_t leads[] = {-1, 2 * s.group_blocks, s.group_blocks - 1};
  setup.dispatch_lead = leads[pick(rng, 0, 2)];
  setup.save = pick(rng, 0, 1) == 1;
  if (setup.save)
    s.ring_blocks = s.macrobatch_blocks;
  else
    s.ring_blocks = s.group_blocks + pick(rng, 0, 2) * pick(rng, 0, 2);
  return setup;
}

}  // namespace test
