// Compiles every function of csrc/plan that device code may call, in device code, without warnings.
// Only compiled: running it would need a GPU and show no more than the host tests do.
#include "plan/order.h"
#include "plan/routing.h"
#include "plan/shape.h"

using namespace jax_mok::plan;

__global__ void use_everything(Shape s, BlockMap map, const int32_t* counts, int64_t* out) {
  const int32_t i = static_cast<int32_t>(threadIdx.x);
  if (check(s) != nullptr || check_backward(s) != nullptr) return;
  int64_t sum = max_rows(s) + max_blocks(s) + max_macrobatches(s) + max_segments(s) +
                max_groups(s) + max_tiles(s);
  sum += valid_expert(i, 8) + owner(i, 4) + local(i, 4) + num_blocks(i, s.block_rows) +
         row_position(counts, 1, s.num_ranks, 0, i, s.source_order) + combine_slot(i, 1, 4) +
         first_use_of(counts, s.top_k, 0, s) + is_padding(padding_row());
  sum += expert_segments(s, 0, i) + expert_segment(s, 0, i, 0, 0).num_blocks +
         expert_groups(s, 0, i) + expert_group(s, 0, i, 0, 0).num_blocks;
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    const int32_t m = macrobatch_at(pass, num_macrobatches(s, map.num_blocks), 0);
    const Tile tile = tile_at(s, map, pass, i);
    const Group group = group_of_block(s, map, tile.block);
    const Group segment = segment_of_block(s, map, tile.block);
    const int32_t g = ring_generation(pass, map.num_blocks, tile.block, s.ring_blocks);
    sum += (unpack(pack(tile)) == tile) + tile_index(s, map, tile) + gating_block(pass, group) +
           first_owned(phase_first_tile(s, map.num_blocks, m, first_phase(pass)), i, 132) +
           phase_tiles(s, map.num_blocks, m, second_phase(pass)) + (group == segment) +
           weight_tile_owner(s, segment.expert, 0, 132) + starts_weight_sum(map, segment) +
           ends_weight_sum(map, segment) + x_full_target(s, g) + x_empty_target(s, pass, g) +
           h_full_target(s, g) + h_empty_target(s, pass, g) +
           ring_row(s, tile.block, 0, s.ring_blocks) +
           left_in_ring(map.num_blocks, tile.block, s.ring_blocks);
  }
  out[i] = sum;
}
