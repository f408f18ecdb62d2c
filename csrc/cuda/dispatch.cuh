// Dispatch: a communicating warp pulls rows of tokens, from whichever rank holds them, into the
// token ring. Data goes peer -> shared memory -> ring by bulk copies, never through registers, so
// one thread keeps several rows in flight.
#pragma once

#include "cuda/faults.cuh"

namespace jax_mok::cuda {

// Barriers of one communicating warp: the load of unit i completes on barrier i % in_flight.
struct CommBarriers {
  uint64_t loaded[kMaxUnitsInFlight];
};

// One thread. Worker `id` of `count` takes units id, id + count, ... in row order. Unit i is stored
// to the ring as soon as it is loaded; it is signalled, and its buffer loaded anew, once the store
// of the unit after it has been issued: so one store and in_flight - 1 loads are always under way.
class Dispatcher {
 public:
  __device__ Dispatcher(const ForwardParams& p, const Watch& watch, int v, int id, int count,
                        uint8_t* buffer, CommBarriers* barriers)
      : p_(p),
        watch_(watch),
        unit_(p.geometry.unit),
        v_(v),
        id_(id),
        count_(count),
        buffer_(buffer),
        barriers_(barriers) {}

  __device__ void run() {
    for (int i = 0; i < unit_.in_flight; ++i) mbarrier_init(&barriers_->loaded[i], 1);
    mbarrier_init_fence();
    fence_async_proxy();  // the peers wrote their tokens with ordinary stores
    const int num_blocks = p_.block_map(v_).num_blocks;
    const int num_units = num_blocks * kBlockRows / unit_.rows * unit_.parts;
    const int mine = id_ < num_units ? (num_units - id_ + count_ - 1) / count_ : 0;
    for (int i = 0; i < unit_.in_flight && i < mine; ++i)
      if (!load(i)) return;
    for (int i = 0; i < mine; ++i) {
      if (!store(i)) return;
      if (i > 0) {
        bulk_wait<1>();
        signal(i - 1);
        const int next = i - 1 + unit_.in_flight;
        if (next < mine && !load(next)) return;
      }
    }
    bulk_wait<0>();
    if (mine > 0) signal(mine - 1);
  }

 private:
  // Where the i-th unit of this worker lies.
  struct Place {
    int row, part, block;
  };
  __device__ Place place(int i) const {
    const int unit = id_ + i * count_;
    const int row = unit / unit_.parts * unit_.rows;
    return {row, unit % unit_.parts, row / kBlockRows};
  }
  __device__ uint32_t row_bytes() const { return p_.geometry.hidden * 2; }
  __device__ uint32_t bytes_of(const Place& at) const {
    const uint32_t begin = at.part * unit_.part_bytes;
    const uint32_t rest = row_bytes() - begin;
    return rest < static_cast<uint32_t>(unit_.part_bytes) ? rest : unit_.part_bytes;
  }
  __device__ uint8_t* buffer_of(int i) const {
    return buffer_ + i % unit_.in_flight * (unit_.rows * unit_.part_bytes);
  }

  __device__ bool load(int i) {
    const Place at = place(i);
    const plan::Shape& shape = p_.geometry.shape;
    const int capacity = shape.ring_blocks;
    const int generation = at.block / capacity;
    if (generation > 0) {
      const int slot = plan::ring_slot(at.block, capacity);
      const uint32_t free = plan::x_empty_target(shape, plan::Pass::kForward, generation);
      if (!wait_counter(watch_, p_.x_empty(v_) + slot, free, FaultPhase::kDispatch, at.row, slot))
        return false;
    }
    jitter(p_, at.row + 1);
    const RowRoute* routes = p_.array<RowRoute>(p_.geometry.workspace.routes, v_) + at.row;
    const char* from[kMaxUnitRows];
#pragma unroll
    for (int r = 0; r < kMaxUnitRows; ++r)
      if (r < unit_.rows) from[r] = routes[r].from;
    const uint32_t bytes = bytes_of(at);
    uint64_t* loaded = &barriers_->loaded[i % unit_.in_flight];
    mbarrier_arrive_expect(loaded, bytes * unit_.rows);
#pragma unroll
    for (int r = 0; r < kMaxUnitRows; ++r)
      if (r < unit_.rows)
        bulk_load(buffer_of(i) + r * bytes, from[r] + at.part * unit_.part_bytes, bytes, loaded);
    return true;
  }

  __device__ bool store(int i) {
    const Place at = place(i);
    uint64_t* loaded = &barriers_->loaded[i % unit_.in_flight];
    if (!wait_barrier_timed(watch_, loaded, i / unit_.in_flight & 1, FaultPhase::kDispatch, at.row))
      return false;
    const int64_t ring_row = plan::ring_row(p_.geometry.shape, at.block, at.row % kBlockRows,
                                            p_.geometry.shape.ring_blocks);
    char* ring = p_.array<char>(p_.geometry.workspace.x_ring, v_);
    bulk_store(ring + ring_row * row_bytes() + at.part * unit_.part_bytes, buffer_of(i),
               bytes_of(at) * unit_.rows);
    bulk_commit();
    return true;
  }

  __device__ void signal(int i) {
    const int slot = plan::ring_slot(place(i).block, p_.geometry.shape.ring_blocks);
    add_release_gpu(p_.x_full(v_) + slot, unit_.rows);
  }

  const ForwardParams& p_;
  const Watch& watch_;
  const DispatchUnit unit_;
  const int v_, id_, count_;
  uint8_t* const buffer_;
  CommBarriers* const barriers_;
};

}  // namespace jax_mok::cuda
