// The order of all work on one rank: macrobatches, groups, tiles, ring slots, counter targets.
//
// Forward, per macrobatch in ascending order: gate|up tiles, group after group, then down tiles.
// With lead_blocks they take turns: gate|up tiles of so many blocks come first, then those of one
// block more and the down tiles of one block, and so on. Results are then pushed all along, where
// else the links would be idle before the down tiles and too slow for them, and what gate|up tiles
// leave is still in the cache. Backward, macrobatches and blocks in descending order, so that what
// the forward left in the rings is used first: all hidden-gradient tiles, all input-gradient tiles,
// then the weight gradients of the macrobatch's segments. Inside a group the block runs fastest:
// the workers that share a weight tile start together.
//
// Why this cannot deadlock: a worker runs its tiles in this total order, and every wait (rows in
// the token ring, a free slot, finished h) refers to earlier work only, given check(Shape). Hence
// the earliest unfinished item can always run, as long as all workers are resident.
//
// Every tile is a closed form of its index: roles and threads derive the same sequence, or fill a
// tile list in parallel, each from its own index.
#pragma once

#include <cstdint>

#include "plan/routing.h"
#include "plan/shape.h"

namespace jax_mok::plan {

enum class Phase : int32_t { kGateUp, kDown, kGradHidden, kGradInput, kGradWeight };

// A run of blocks of one expert inside one macrobatch. Also used for segments, the largest such
// run.
struct Group {
  int32_t first_block, num_blocks, expert;
};

// Work item. For kGradWeight `block` is the last block of a segment: the tile n of that expert's
// weight gradients accumulates the segment's blocks in descending order.
struct Tile {
  Phase phase;
  int32_t block, n;
};

MOK_HD bool operator==(const Group& a, const Group& b) {
  return a.first_block == b.first_block && a.num_blocks == b.num_blocks && a.expert == b.expert;
}
MOK_HD bool operator==(const Tile& a, const Tile& b) {
  return a.phase == b.phase && a.block == b.block && a.n == b.n;
}

// Which block belongs to which expert: the only routing dependent input of the order.
struct BlockMap {
  int32_t num_blocks;
  const int32_t* block_expert;        // [num_blocks]
  const int32_t* expert_first_block;  // [num_local_experts + 1], exclusive prefix sum
};

// ---- macrobatches ----
struct BlockRange {
  int32_t first, end;
};

MOK_HD int32_t num_macrobatches(const Shape& s, int32_t num_blocks) {
  return static_cast<int32_t>(ceil_div(num_blocks, s.macrobatch_blocks));
}
MOK_HD int32_t macrobatch_of(const Shape& s, int32_t block) { return block / s.macrobatch_blocks; }
MOK_HD BlockRange macrobatch_range(const Shape& s, int32_t num_blocks, int32_t macrobatch) {
  const int64_t first = int64_t{macrobatch} * s.macrobatch_blocks;
  return {static_cast<int32_t>(min64(first, num_blocks)),
          static_cast<int32_t>(min64(first + s.macrobatch_blocks, num_blocks))};
}
// The macrobatch that is worked on as the i-th one.
MOK_HD int32_t macrobatch_at(Pass pass, int32_t num_macrobatches, int32_t i) {
  return pass == Pass::kForward ? i : num_macrobatches - 1 - i;
}

// ---- segments and groups ----
// Pieces of an expert, from its first block and block count alone; with prefix sums over experts
// these give every group and segment its index.
MOK_HD int32_t expert_segments(const Shape& s, int32_t first_block, int32_t blocks) {
  if (blocks == 0) return 0;
  return macrobatch_of(s, first_block + blocks - 1) - macrobatch_of(s, first_block) + 1;
}

// The i-th segment of an expert.
MOK_HD Group expert_segment(const Shape& s, int32_t first_block, int32_t blocks, int32_t expert,
                            int32_t i) {
  const int64_t start = (int64_t{macrobatch_of(s, first_block)} + i) * s.macrobatch_blocks;
  const int64_t first = max64(start, first_block);
  const int64_t end = min64(start + s.macrobatch_blocks, int64_t{first_block} + blocks);
  return {static_cast<int32_t>(first), static_cast<int32_t>(end - first), expert};
}

MOK_HD int32_t expert_groups(const Shape& s, int32_t first_block, int32_t blocks) {
  const int32_t segments = expert_segments(s, first_block, blocks);
  if (segments == 0) return 0;
  const int64_t head = expert_segment(s, first_block, blocks, 0, 0).num_blocks;
  int64_t groups = ceil_div(head, s.group_blocks);
  if (segments > 1) {
    const int64_t tail = expert_segment(s, first_block, blocks, 0, segments - 1).num_blocks;
    groups += ceil_div(tail, s.group_blocks);
    groups += (int64_t{segments} - 2) * ceil_div(s.macrobatch_blocks, s.group_blocks);
  }
  return static_cast<int32_t>(groups);
}

// The i-th group of an expert. Groups start anew with every segment.
MOK_HD Group expert_group(const Shape& s, int32_t first_block, int32_t blocks, int32_t expert,
                          int32_t i) {
  const int64_t head = expert_segment(s, first_block, blocks, expert, 0).num_blocks;
  const int64_t head_groups = ceil_div(head, s.group_blocks);
  const int64_t full_groups = ceil_div(s.macrobatch_blocks, s.group_blocks);
  const int64_t segment_index = i < head_groups ? 0 : 1 + (i - head_groups) / full_groups;
  const int64_t in_segment = i < head_groups ? i : (i - head_groups) % full_groups;
  const Group segment =
      expert_segment(s, first_block, blocks, expert, static_cast<int32_t>(segment_index));
  const int64_t first = segment.first_block + in_segment * s.group_blocks;
  const int64_t end =
      min64(first + s.group_blocks, int64_t{segment.first_block} + segment.num_blocks);
  return {static_cast<int32_t>(first), static_cast<int32_t>(end - first), expert};
}

MOK_HD Group segment_of_block(const Shape& s, const BlockMap& map, int32_t block) {
  const int32_t expert = map.block_expert[block];
  const BlockRange range = macrobatch_range(s, map.num_blocks, macrobatch_of(s, block));
  const int64_t first = max64(range.first, map.expert_first_block[expert]);
  const int64_t end = min64(range.end, map.expert_first_block[expert + 1]);
  return {static_cast<int32_t>(first), static_cast<int32_t>(end - first), expert};
}

MOK_HD Group group_of_block(const Shape& s, const BlockMap& map, int32_t block) {
  const Group segment = segment_of_block(s, map, block);
  const int32_t skip = (block - segment.first_block) / s.group_blocks * s.group_blocks;
  return {segment.first_block + skip,
          static_cast<int32_t>(min64(s.group_blocks, segment.num_blocks - skip)), segment.expert};
}

// The block of a group that is pulled last: a tile of the group starts when its own block and this
// one are in the ring. In the backward blocks are pulled in descending order.
MOK_HD int32_t gating_block(Pass pass, const Group& group) {
  return pass == Pass::kForward ? group.first_block + group.num_blocks - 1 : group.first_block;
}

// ---- tiles of the phases that go block by block (all but kGradWeight) ----
MOK_HD int32_t tiles_per_block(const Shape& s, Phase phase) {
  return phase == Phase::kGateUp || phase == Phase::kGradHidden ? s.gate_up_tiles : s.down_tiles;
}
MOK_HD Phase first_phase(Pass pass) {
  return pass == Pass::kForward ? Phase::kGateUp : Phase::kGradHidden;
}
MOK_HD Phase second_phase(Pass pass) {
  return pass == Pass::kForward ? Phase::kDown : Phase::kGradInput;
}
MOK_HD Pass pass_of(Phase phase) {
  return phase == Phase::kGateUp || phase == Phase::kDown ? Pass::kForward : Pass::kBackward;
}

// Number of block tiles of a pass, and the index of a phase's first tile in the total order of
// block tiles, where phases do not take turns. Worker w of W takes the tiles with index % W == w.
MOK_HD int64_t num_block_tiles(const Shape& s, int32_t num_blocks) {
  return int64_t{num_blocks} * (int64_t{s.gate_up_tiles} + s.down_tiles);
}
MOK_HD int64_t phase_tiles(const Shape& s, int32_t num_blocks, int32_t macrobatch, Phase phase) {
  const BlockRange range = macrobatch_range(s, num_blocks, macrobatch);
  return int64_t{range.end - range.first} * tiles_per_block(s, phase);
}
MOK_HD int64_t phase_first_tile(const Shape& s, int32_t num_blocks, int32_t macrobatch,
                                Phase phase) {
  const Pass pass = pass_of(phase);
  const BlockRange range = macrobatch_range(s, num_blocks, macrobatch);
  const int32_t before = pass == Pass::kForward ? range.first : num_blocks - range.end;
  int64_t index = num_block_tiles(s, before);
  if (phase == second_phase(pass)) index += int64_t{range.end - range.first} * s.gate_up_tiles;
  return index;
}
// The smallest index >= first that worker w of W takes.
MOK_HD int64_t first_owned(int64_t first, int32_t worker, int32_t workers) {
  const int64_t behind = (first - worker) % workers;  // negative while first < worker
  return behind == 0 ? first : behind < 0 ? first - behind : first + workers - behind;
}

// Tile i of one phase of a macrobatch. A group of g blocks takes a run of g * n tiles, so tile i
// lies in the group of the macrobatch's (i / n)-th block, in the order of the pass.
MOK_HD Tile phase_tile(const Shape& s, const BlockMap& map, int32_t macrobatch, Phase phase,
                       int64_t i) {
  const int32_t n = tiles_per_block(s, phase);
  const BlockRange range = macrobatch_range(s, map.num_blocks, macrobatch);
  const int32_t step = static_cast<int32_t>(i / n);
  const bool forward = pass_of(phase) == Pass::kForward;
  const Group group = group_of_block(s, map, forward ? range.first + step : range.end - 1 - step);
  const int32_t last = group.first_block + group.num_blocks - 1;
  const int64_t before = forward ? group.first_block - range.first : range.end - 1 - last;
  const int32_t in_group = static_cast<int32_t>(i - before * n);
  const int32_t step_in_group = in_group % group.num_blocks;
  return {phase, forward ? group.first_block + step_in_group : last - step_in_group,
          in_group / group.num_blocks};
}

// ---- turns ----
// How the block tiles of a macrobatch of `blocks` blocks follow each other: first `first` tiles of
// the first phase, then `rounds` rounds of a block of each phase, then the rest of the second.
struct Turns {
  int64_t first, rounds;
  int64_t in_first, in_round;  // tiles of a round: of the first phase, of both
};
MOK_HD Turns turns_of(const Shape& s, Pass pass, int32_t blocks) {
  const bool takes_turns = pass == Pass::kForward && s.lead_blocks > 0 && s.lead_blocks < blocks;
  const int64_t lead = takes_turns ? s.lead_blocks : blocks;
  const int64_t n1 = s.gate_up_tiles;
  return {lead * n1, blocks - lead, n1, n1 + s.down_tiles};
}

// Tile with this index in the total order of a pass's block tiles, and back. A down tile comes
// after the gate|up tiles of its whole group, since the lead is no smaller than a group.
MOK_HD Tile tile_at(const Shape& s, const BlockMap& map, Pass pass, int64_t index) {
  const int64_t per_block = int64_t{s.gate_up_tiles} + s.down_tiles;
  const int32_t step = static_cast<int32_t>(index / per_block);
  // `step` lies in this macrobatch: each macrobatch takes per_block tiles for each of its blocks.
  const int32_t macrobatch =
      macrobatch_of(s, pass == Pass::kForward ? step : map.num_blocks - 1 - step);
  const BlockRange range = macrobatch_range(s, map.num_blocks, macrobatch);
  const Turns turns = turns_of(s, pass, range.end - range.first);
  int64_t i = index - phase_first_tile(s, map.num_blocks, macrobatch, first_phase(pass));
  if (i < turns.first) return phase_tile(s, map, macrobatch, first_phase(pass), i);
  i -= turns.first;
  const int64_t round = min64(i / turns.in_round, turns.rounds);
  i -= round * turns.in_round;
  if (round < turns.rounds && i < turns.in_first)
    return phase_tile(s, map, macrobatch, first_phase(pass),
                      turns.first + round * turns.in_first + i);
  if (round < turns.rounds) i -= turns.in_first;
  return phase_tile(s, map, macrobatch, second_phase(pass), round * s.down_tiles + i);
}

MOK_HD int64_t tile_index(const Shape& s, const BlockMap& map, const Tile& tile) {
  const Pass pass = pass_of(tile.phase);
  const bool forward = pass == Pass::kForward;
  const int32_t macrobatch = macrobatch_of(s, tile.block);
  const BlockRange range = macrobatch_range(s, map.num_blocks, macrobatch);
  const Group group = group_of_block(s, map, tile.block);
  const int32_t last = group.first_block + group.num_blocks - 1;
  const int64_t before = forward ? group.first_block - range.first : range.end - 1 - last;
  const int32_t in_group = forward ? tile.block - group.first_block : last - tile.block;
  // In its phase, then among the turns.
  const int64_t i =
      before * tiles_per_block(s, tile.phase) + int64_t{tile.n} * group.num_blocks + in_group;
  const Turns turns = turns_of(s, pass, range.end - range.first);
  int64_t at = i;
  if (tile.phase == second_phase(pass)) {
    const int64_t round = min64(i / s.down_tiles, turns.rounds);
    at += turns.first + round * turns.in_first;
    if (round < turns.rounds) at += turns.in_first;
  } else if (i >= turns.first) {
    at += ((i - turns.first) / turns.in_first) * s.down_tiles;
  }
  return phase_first_tile(s, map.num_blocks, macrobatch, first_phase(pass)) + at;
}

// ---- weight gradients ----
// A weight tile has one owner for the whole backward: it alone adds the segments of its expert, in
// the order of the walk, so the sum's order is fixed and needs no atomics.
MOK_HD int32_t weight_tile_owner(const Shape& s, int32_t expert, int32_t n, int32_t workers) {
  return static_cast<int32_t>((int64_t{expert} * s.grad_weight_tiles + n) % workers);
}
// First segment of an expert in the walk: store instead of add. An expert without blocks has no
// segment; its owner writes zeros.
MOK_HD bool starts_weight_sum(const BlockMap& map, const Group& segment) {
  return segment.first_block + segment.num_blocks == map.expert_first_block[segment.expert + 1];
}
MOK_HD bool ends_weight_sum(const BlockMap& map, const Group& segment) {
  return segment.first_block == map.expert_first_block[segment.expert];
}
// The segment that the walk visits after this one inside the macrobatch starts below first_block;
// walk a macrobatch's segments with: b = range.end; while (b > range.first) { g =
// segment_of_block(s, map, b - 1); ...; b = g.first_block; }

// ---- a tile as one word, for tile lists ----
MOK_HD uint64_t pack(const Tile& t) {
  return uint64_t{static_cast<uint32_t>(t.phase)} << 56 |
         uint64_t{static_cast<uint32_t>(t.n) & 0xffffffu} << 32 | static_cast<uint32_t>(t.block);
}
MOK_HD Tile unpack(uint64_t word) {
  return {static_cast<Phase>(word >> 56), static_cast<int32_t>(word & 0xffffffffu),
          static_cast<int32_t>(word >> 32 & 0xffffffu)};
}

// ---- rings ----
// Block b lives in slot b % capacity in both passes, so the backward finds the forward's rows. Its
// generation counts the users that the slot had before it in the same pass.
MOK_HD int32_t ring_slot(int32_t block, int32_t capacity) { return block % capacity; }
MOK_HD int32_t ring_generation(Pass pass, int32_t num_blocks, int32_t block, int32_t capacity) {
  return (pass == Pass::kForward ? block : num_blocks - 1 - block) / capacity;
}
MOK_HD int64_t ring_row(const Shape& s, int32_t block, int32_t row_in_block, int32_t capacity) {
  return int64_t{ring_slot(block, capacity)} * s.block_rows + row_in_block;
}
// True if the block is still in a ring when the forward has ended.
MOK_HD bool left_in_ring(int32_t num_blocks, int32_t block, int32_t capacity) {
  return block >= num_blocks - capacity;
}

// ---- counters: one word per slot, zero at the start of a pass, only ever incremented ----
// Wait until the counter is >= target. g = generation of the block in that ring.
// x_full: +1 per row pulled (padding rows count too). Token ring slot holds the block's rows.
MOK_HD uint32_t x_full_target(const Shape& s, int32_t g) {
  return static_cast<uint32_t>(s.block_rows) * (static_cast<uint32_t>(g) + 1u);
}
// x_empty: +1 per tile that has done its last read of the slot: forward every gate|up tile of the
// block, backward every weight tile of the block's segment. Wait before pulling into the slot.
MOK_HD uint32_t x_empty_target(const Shape& s, Pass pass, int32_t g) {
  return static_cast<uint32_t>(pass == Pass::kForward ? s.gate_up_tiles : s.grad_weight_tiles) *
         static_cast<uint32_t>(g);
}
// h_full: +1 per stored tile of the pass's first phase. Wait before reading the h slot.
MOK_HD uint32_t h_full_target(const Shape& s, int32_t g) {
  return static_cast<uint32_t>(s.gate_up_tiles) * (static_cast<uint32_t>(g) + 1u);
}
// h_empty: +1 per tile that has read the slot: the second phase's tiles of the block, in the
// backward also the weight tiles of its segment. Wait before storing a first-phase tile.
MOK_HD uint32_t h_empty_target(const Shape& s, Pass pass, int32_t g) {
  return (static_cast<uint32_t>(s.down_tiles) +
          static_cast<uint32_t>(pass == Pass::kForward ? 0 : s.grad_weight_tiles)) *
         static_cast<uint32_t>(g);
}

}  // namespace jax_mok::plan
