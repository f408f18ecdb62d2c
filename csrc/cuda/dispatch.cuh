// Dispatch: a communicating warp pulls rows of tokens, from whichever rank holds them, into the
// token ring; in the backward their cotangents too, into a ring of their own. Data goes peer ->
// shared memory -> ring by bulk copies, never through registers; every lane has a piece on its way.
#pragma once

#include <type_traits>

#include "cuda/backward_params.cuh"
#include "cuda/faults.cuh"

namespace jax_mok::cuda {

// Barriers of one communicating warp, one per buffer: the load into it has completed.
struct CommBarriers {
  uint64_t loaded[kMaxCommBuffers];
};

// Shared memory of a CTA that does nothing but pull.
constexpr int kCommWarps = 12;
struct CommStorage {
  uint8_t buffers[kCommWarps][kCommBufferBytes];
  CommBarriers barriers[kCommWarps];
};

// Worker `id` of `count`, a whole warp, takes the units id, id + count, ... in the order of the
// pass (backward: blocks from last to first). A unit is moved at once, piece by lane (a piece is a
// row or a part of one): what a row costs is a thread's instructions more than its bytes, so lanes
// do it side by side. The rows of a unit are signalled together, while the next unit's are loading:
// by then they have been stored.
//
// A worker that has to wait (for a free place in the ring, or for the row that it is to copy) first
// signals all it holds. So it only ever waits for work that is earlier in that order than anything
// it keeps back, and the ring need not be larger than a group.
template <plan::Pass kPass>
class Dispatcher {
 public:
  using Params = std::conditional_t<kPass == plan::Pass::kForward, ForwardParams, BackwardParams>;
  using Route = std::conditional_t<kPass == plan::Pass::kForward, RowRoute, GradRoute>;

  __device__ Dispatcher(const Params& p, const Watch& watch, int v, int id, int count,
                        uint8_t* buffers, CommBarriers* barriers,
                        const volatile int32_t* progress = nullptr)
      : p_(p),
        watch_(watch),
        unit_(p.geometry.unit),
        v_(v),
        count_(count),
        num_blocks_(p.block_map(v).num_blocks),
        num_units_(num_blocks_ * (kBlockRows / unit_.rows)),
        row_bytes_(p.geometry.hidden * 2),
        routes_(p.template array<Route>(p.geometry.workspace.routes, v)),
        progress_(progress),
        id_(id),
        lanes_(min(unit_.rows * unit_.parts, unit_.buffers)),
        active_(lane_ < lanes_),
        row_(active_ ? lane_ / unit_.parts : 0),
        offset_(lane_ % unit_.parts * unit_.part_bytes),
        buffer_(buffers + (active_ ? lane_ : 0) * unit_.part_bytes),
        loaded_(&barriers->loaded[active_ ? lane_ : 0]) {}

  __device__ void run() {
    if (active_) mbarrier_init(loaded_, 1);
    mbarrier_init_fence();
    fence_async_proxy();  // the peers wrote their tokens with ordinary stores
    Sources next = sources(id_);
    for (int unit = id_; unit < num_units_; unit += count_) {
      const Sources from = next;
      next = sources(unit + count_);  // not waited for yet
      jitter(p_, unit + 1);
      const int block = block_of(unit);
      const int slot = plan::ring_slot(block, p_.geometry.shape.ring_blocks);
      const int64_t to = (int64_t{slot} * kBlockRows + row_in_block(unit) + row_) * row_bytes_;
      bool good = make_room(block, slot, unit);
      if constexpr (kPass == plan::Pass::kForward) {
        good = good && move(from.x, p_.x_ring(v_), to, unit);
      } else {
        good = good && move(from.dy, p_.dy_ring(v_), to, unit);
        // Tokens too, unless the forward has saved them.
        if (!p_.is_saved(num_blocks_, block)) good = good && move(from.x, p_.x_ring(v_), to, unit);
      }
      if (!good) return bulk_wait<0>();  // the CTA's memory is no longer read
      unsignalled_ = slot;
      // The first group is waited for by everybody.
      if (step_of(unit) < p_.geometry.shape.group_blocks) signal_stored();
    }
    signal_stored();
  }

 private:
  // Blocks before this unit's in the order of the pass, and the block.
  __device__ int step_of(int unit) const { return unit * unit_.rows / kBlockRows; }
  __device__ int block_of(int unit) const {
    return kPass == plan::Pass::kForward ? step_of(unit) : num_blocks_ - 1 - step_of(unit);
  }
  __device__ int row_in_block(int unit) const { return unit * unit_.rows % kBlockRows; }
  // Where the lane's row of a unit comes from.
  struct Sources {
    const char *x, *dy;
  };
  __device__ Sources sources(int unit) const {
    if (unit >= num_units_ || !active_) return {};
    const Route& route = routes_[block_of(unit) * kBlockRows + row_in_block(unit) + row_];
    if constexpr (kPass == plan::Pass::kForward)
      return {route.from, nullptr};
    else
      return {route.x, route.dy};
  }

  // Signals what is held back, then waits; the lanes may wait for different counters, or for none.
  __device__ bool wait(const uint32_t* counter, uint32_t target, int slot, int unit) {
    if (all_lanes(counter == nullptr || reached(load_acquire_gpu(counter), target))) return true;
    signal_stored();
    return all_lanes(
        counter == nullptr ||
        wait_counter(watch_, counter, target, FaultPhase::kDispatch, unit * unit_.rows, slot));
  }

  // Until the unit's place in the ring is free.
  __device__ bool make_room(int block, int slot, int unit) {
    const plan::Shape& shape = p_.geometry.shape;
    if constexpr (kPass == plan::Pass::kForward) {
      const int generation = block / shape.ring_blocks;
      return generation == 0 || wait(p_.x_empty(v_) + slot,
                                     plan::x_empty_target(shape, kPass, generation), slot, unit);
    } else {
      // The rings hold a macrobatch, and all of the one before is needed until its end.
      if (!keep_near(block, unit)) return false;
      const int before = plan::macrobatch_of(shape, block) + 1;
      if (before >= plan::num_macrobatches(shape, num_blocks_)) return true;
      const bool good =
          wait(p_.macrobatch_done(v_) + before, compute_ctas(p_.geometry), before, unit);
      fence_async_proxy();  // bias tiles have read the rings with ordinary loads
      return good;
    }
  }

  // The backward's rings hold a macrobatch. Rows that come long before they are needed would be
  // evicted from L2 in the meantime, and push out what is needed now: so a worker keeps a few
  // rounds of tiles ahead of what its CTA works on. Whoever is farthest behind waits for rows that
  // nobody holds back, since the lead is more than a group.
  __device__ bool keep_near(int block, int unit) {
    const plan::Shape& shape = p_.geometry.shape;
    const int lead = count_ * 3 / (2 * shape.gate_up_tiles) + 2 * shape.group_blocks;
    const auto near = [&] { return all_lanes(*progress_ <= block + lead); };
    if (progress_ == nullptr || near()) return true;
    signal_stored();
    while (!near()) {  // the CTA's own scheduler and storer find out if it is stuck
      if (!all_lanes(!watch_.cta_abort.raised() && !aborted(watch_))) return false;
      __nanosleep(200);
    }
    return true;
  }

  // Until the lane's row is there, if it is a token that this rank pulls for another expert, too.
  // Copies inside the ring only happen where it holds all blocks: see the plan.
  __device__ bool wait_in_ring(const char* from, const char* ring, int unit) {
    if (p_.geometry.shape.num_ranks == 1) return true;
    const bool in_ring = active_ && from >= ring && from < ring + p_.ring_bytes();
    if (!__any_sync(kAllLanes, in_ring)) return true;
    const int block =
        in_ring ? static_cast<int>((from - ring) / (int64_t{row_bytes_} * kBlockRows)) : 0;
    const bool good = wait(in_ring ? p_.x_full(v_) + block : nullptr,
                           plan::x_full_target(p_.geometry.shape, 0), block, unit);
    fence_async_proxy();
    return good;
  }

  // A row of every lane, or parts of it; of a long row one part after the other.
  __device__ bool move(const char* from, char* ring, int64_t to, int unit) {
    if (!wait_in_ring(from, ring, unit)) return false;
    for (int first = 0; first < unit_.parts; first += lanes_) {
      const int offset = offset_ + first * unit_.part_bytes;
      const bool active = active_ && offset < row_bytes_;
      const uint32_t bytes = min(unit_.part_bytes, row_bytes_ - offset);
      bulk_wait_read<0>();  // the buffer is free
      if (active) {
        mbarrier_arrive_expect(loaded_, bytes);
        bulk_load(buffer_, from + offset, bytes, loaded_);
      }
      signal_stored();
      if (!all_lanes(!active ||
                     wait_barrier_timed(watch_, loaded_, parity_, FaultPhase::kDispatch, unit))) {
        if (active) wait_landed(loaded_, parity_);
        return false;
      }
      if (active) {
        bulk_store(ring + to + offset, buffer_, bytes);
        parity_ ^= 1;
      }
      bulk_commit();
    }
    return true;
  }

  __device__ void signal_stored() {
    if (unsignalled_ < 0) return;
    bulk_wait<0>();
    __syncwarp();
    if (lane_ == 0) add_release_gpu(p_.x_full(v_) + unsignalled_, unit_.rows);
    unsignalled_ = -1;
  }

  const Params& p_;
  const Watch& watch_;
  const DispatchUnit unit_;
  const int v_, count_, num_blocks_, num_units_, row_bytes_;
  const Route* const routes_;
  const volatile int32_t* const progress_;  // block that the CTA works on, or null
  const int id_, lane_ = threadIdx.x % 32;
  const int lanes_;  // that move something
  // The lane's (first) piece of every unit: row, first byte in the row; and its buffer.
  const bool active_;
  const int row_, offset_;
  uint8_t* const buffer_;
  uint64_t* const loaded_;
  uint32_t parity_ = 0;
  int unsignalled_ = -1;  // place in the ring of the unit whose stores are issued but not told of
};

}  // namespace jax_mok::cuda
