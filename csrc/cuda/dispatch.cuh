// Dispatch: a communicating warp pulls rows of tokens, from whichever rank holds them, into the
// token ring; in the backward their cotangents too, into a ring of their own. Data goes peer ->
// shared memory -> ring by bulk copies, never through registers, so one thread keeps several rows
// in flight.
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

// One thread. Worker `id` of `count` takes the units id, id + count, ... in the order of the pass
// (backward: blocks from last to first), and moves them piece by piece (a piece is a row or a part
// of one, and fills one buffer). A piece is stored as soon as it is loaded, and its buffer loaded
// anew once the store has read it. The rows of a unit are signalled together, one unit late: by
// then their stores have long landed, and nobody waits for the round trip.
//
// A worker that has to wait (for a free place in the ring, or for the row that it is to copy) first
// stores and signals all it holds. So it only ever waits for work that is earlier in that order
// than anything it keeps back, and the ring need not be larger than a group.
template <plan::Pass kPass>
class Dispatcher {
 public:
  using Params = std::conditional_t<kPass == plan::Pass::kForward, ForwardParams, BackwardParams>;
  using Route = std::conditional_t<kPass == plan::Pass::kForward, RowRoute, GradRoute>;

  __device__ Dispatcher(const Params& p, const Watch& watch, int v, int id, int count,
                        uint8_t* buffers, CommBarriers* barriers)
      : p_(p),
        watch_(watch),
        unit_(p.geometry.unit),
        v_(v),
        count_(count),
        num_blocks_(p.block_map(v).num_blocks),
        num_units_(num_blocks_ * (kBlockRows / unit_.rows)),
        row_bytes_(p.geometry.hidden * 2),
        routes_(p.template array<Route>(p.geometry.workspace.routes, v)),
        buffers_(buffers),
        barriers_(barriers),
        loading_{id},
        storing_{id} {}

  __device__ void run() {
    for (int i = 0; i < unit_.buffers; ++i) mbarrier_init(&barriers_->loaded[i], 1);
    mbarrier_init_fence();
    fence_async_proxy();  // the peers wrote their tokens with ordinary stores
    look_up_route();
    while (storing_.unit < num_units_) {
      // One buffer is left to the store that may still be reading it.
      while (in_flight_ < unit_.buffers - 1 && loading_.unit < num_units_ && reached(need()))
        load();
      if (in_flight_ > 0) {
        if (!store()) return;
      } else {
        signal_stored();
        if (!wait(need())) return;
      }
    }
    signal_stored();
  }

 private:
  // Walks over the pieces of this worker's units, and over the buffers. Divisions happen once per
  // unit only: a single thread has to keep up with the copies.
  struct Cursor {
    int unit;
    int tensor = 0, row = 0, part = 0, buffer = 0;
    uint32_t parity = 0;
  };
  __device__ void advance(Cursor& c) const {
    if (++c.buffer == unit_.buffers) {
      c.buffer = 0;
      c.parity ^= 1;
    }
    if (++c.part < unit_.parts) return;
    c.part = 0;
    if (++c.row < unit_.rows) return;
    c.row = 0;
    if (++c.tensor < num_tensors(c.unit)) return;
    c.tensor = 0;
    c.unit += count_;
  }
  // Blocks before this unit's in the order of the pass, and the block.
  __device__ int step_of(int unit) const { return unit * unit_.rows / kBlockRows; }
  __device__ int block_of(int unit) const {
    return kPass == plan::Pass::kForward ? step_of(unit) : num_blocks_ - 1 - step_of(unit);
  }
  __device__ int row_in_block(int unit) const { return unit * unit_.rows % kBlockRows; }
  // Backward: cotangents, and tokens unless the forward has saved them.
  __device__ int num_tensors(int unit) const {
    if constexpr (kPass == plan::Pass::kForward)
      return 1;
    else
      return p_.is_saved(num_blocks_, block_of(unit)) ? 1 : 2;
  }
  __device__ char* ring_of(int tensor) const {
    return kPass == plan::Pass::kBackward && tensor == 0 ? p_.dy_ring(v_) : p_.x_ring(v_);
  }
  __device__ uint32_t bytes_of(const Cursor& c) const {
    return min(unit_.part_bytes, row_bytes_ - c.part * unit_.part_bytes);
  }
  __device__ uint8_t* buffer_of(const Cursor& c) const {
    return buffers_ + c.buffer * unit_.part_bytes;
  }

  __device__ void look_up_route() {
    if (loading_.unit >= num_units_) return;
    const Route& route =
        routes_[block_of(loading_.unit) * kBlockRows + row_in_block(loading_.unit) + loading_.row];
    if constexpr (kPass == plan::Pass::kForward)
      next_from_ = route.from;
    else
      next_from_ = loading_.tensor == 0 ? route.dy : route.x;
  }

  // What the next piece to load waits for: a counter of this rank, or nothing (null).
  struct Need {
    const uint32_t* counter;
    uint32_t target;
    int slot;
  };
  __device__ Need need() const {
    const plan::Shape& shape = p_.geometry.shape;
    if (loading_.part > 0) return {nullptr, 0, 0};
    if (in_ring(next_from_)) {  // a token that this rank has pulled for another expert already
      const int block = static_cast<int>((next_from_ - ring_of(loading_.tensor)) /
                                         (int64_t{row_bytes_} * kBlockRows));
      return {p_.x_full(v_) + block, plan::x_full_target(shape, 0), block};
    }
    if (loading_.row > 0 || loading_.tensor > 0) return {nullptr, 0, 0};
    const int block = block_of(loading_.unit);
    if constexpr (kPass == plan::Pass::kForward) {
      const int generation = block / shape.ring_blocks;
      if (generation == 0) return {nullptr, 0, 0};
      const int slot = plan::ring_slot(block, shape.ring_blocks);
      return {p_.x_empty(v_) + slot, plan::x_empty_target(shape, kPass, generation), slot};
    } else {
      // The rings hold a macrobatch, and all of the one before is needed until its end.
      const int before = plan::macrobatch_of(shape, block) + 1;
      if (before >= plan::num_macrobatches(shape, num_blocks_)) return {nullptr, 0, 0};
      return {p_.macrobatch_done(v_) + before, static_cast<uint32_t>(compute_ctas(p_.geometry)),
              before};
    }
  }
  // Copies inside the ring only happen where it holds all blocks: see the plan.
  __device__ bool in_ring(const char* row) const {
    const char* ring = ring_of(loading_.tensor);
    return row >= ring && row < ring + p_.ring_bytes();
  }
  __device__ bool reached(const Need& n) const {
    return n.counter == nullptr ||
           static_cast<int32_t>(load_acquire_gpu(n.counter) - n.target) >= 0;
  }
  __device__ bool wait(const Need& n) const {
    return n.counter == nullptr || wait_counter(watch_, n.counter, n.target, FaultPhase::kDispatch,
                                                loading_.unit * unit_.rows, n.slot);
  }

  __device__ void load() {
    const Cursor& c = loading_;
    jitter(p_, c.unit + 1);
    if (c.part == 0 && in_ring(next_from_)) fence_async_proxy();
    const uint32_t bytes = bytes_of(c);
    uint64_t* loaded = &barriers_->loaded[c.buffer];
    bulk_wait_read<1>();
    mbarrier_arrive_expect(loaded, bytes);
    bulk_load(buffer_of(c), next_from_ + c.part * unit_.part_bytes, bytes, loaded);
    ++in_flight_;
    advance(loading_);
    look_up_route();
  }

  __device__ bool store() {
    const Cursor& c = storing_;
    const int unit = c.unit;
    if (!wait_barrier_timed(watch_, &barriers_->loaded[c.buffer], c.parity, FaultPhase::kDispatch,
                            unit))
      return false;
    if (c.row == 0 && c.part == 0)
      store_to_ = ring_of(c.tensor) + row_bytes_ * plan::ring_row(p_.geometry.shape, block_of(unit),
                                                                  row_in_block(unit),
                                                                  p_.geometry.shape.ring_blocks);
    const uint32_t bytes = bytes_of(c);
    bulk_store(store_to_, buffer_of(c), bytes);
    bulk_commit();
    store_to_ += bytes;  // the pieces of a unit are neighbours in the ring
    --in_flight_;
    advance(storing_);
    if (storing_.unit == unit) return true;
    // A unit has at least two pieces, so the unit before this one lies at least two stores back.
    bulk_wait<2>();
    if (unsignalled_ >= 0) signal(unsignalled_);
    unsignalled_ = unit;
    // The first group is waited for by everybody.
    if (step_of(unit) < p_.geometry.shape.group_blocks) signal_stored();
    return true;
  }

  __device__ void signal_stored() {
    if (unsignalled_ < 0) return;
    bulk_wait<0>();
    signal(unsignalled_);
    unsignalled_ = -1;
  }
  __device__ void signal(int unit) {
    const int slot = plan::ring_slot(block_of(unit), p_.geometry.shape.ring_blocks);
    add_release_gpu(p_.x_full(v_) + slot, unit_.rows);
  }

  const Params& p_;
  const Watch& watch_;
  const DispatchUnit unit_;
  const int v_, count_, num_blocks_, num_units_, row_bytes_;
  const Route* const routes_;
  uint8_t* const buffers_;
  CommBarriers* const barriers_;
  Cursor loading_, storing_;
  const char* next_from_ = nullptr;
  char* store_to_ = nullptr;
  int in_flight_ = 0;     // pieces loaded or loading, not stored
  int unsignalled_ = -1;  // unit whose stores are issued but not told of
};

}  // namespace jax_mok::cuda
