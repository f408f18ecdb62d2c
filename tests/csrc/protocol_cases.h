// Random set-ups of the protocol that must run through.
#pragma once

#include "protocol_actors.h"

namespace test {

// A legal set-up with the smallest ring or a little more; `backward` as well if asked for.
inline Setup random_setup(Rng& rng, bool backward, int32_t most_ranks, int32_t most_tokens,
                          int32_t most_experts) {
  Setup setup;
  setup.shape = random_shape(rng, most_ranks, most_tokens, most_experts);
  setup.comm_workers = pick(rng, 1, 3);
  setup.unit_rows = pick(rng, 1, 4);
  setup.units_in_flight = pick(rng, 1, 3);
  setup.compute_workers = pick(rng, 1, 5);
  setup.look_ahead = pick(rng, 1, 4);
  setup.flush = pick(rng, 0, 1) == 1;
  Shape& s = setup.shape;
  s.rows_in_flight = rows_in_flight(setup);
  int64_t ring = min_ring_blocks(s);
  if (backward) {
    Shape checked = s;
    if (setup.flush) checked.rows_in_flight = 0;
    ring = max64(ring, min_ring_blocks_backward(checked));
    setup.reuse_tokens = pick(rng, 0, 1) == 1;
  }
  s.ring_blocks = static_cast<int32_t>(ring) + pick(rng, 0, 2) * pick(rng, 0, 2);
  return setup;
}

}  // namespace test
