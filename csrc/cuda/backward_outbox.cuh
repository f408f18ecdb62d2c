// The way of a backward tile's results: consumer warps leave them in shared memory and go on with
// the next tile, a storer warp hands them to the copy engine and tells the other CTAs.
#pragma once

#include "cuda/backward_loader.cuh"
#include "cuda/epilogue.cuh"

namespace jax_mok::cuda {

constexpr int kOutboxSlots = 4;
constexpr int kOutboxSlotBytes = kBlockRows * 128;  // 128 rows x 64 columns of bf16, swizzled
// Rows of dx lie in all slots at once, in lines that are 16 bytes longer than a row: the matrices
// that consumers store then hit every bank once.
constexpr int kInputLineBytes = kTileColumns * 2 + 16;
constexpr int kOutboxBytes = kBlockRows * kInputLineBytes;
static_assert(kOutboxBytes >= kOutboxSlots * kOutboxSlotBytes, "slots overlap");

// Recomputed hidden gradients need more stages than other tiles, and reach into the outbox. Behind
// them every warp has a piece of its own where it turns hidden gradients into rows: h, d_gate and
// d_up, 16 rows x 64 columns each.
constexpr int kHiddenStagingStart = sizeof(AlternatingStages) - sizeof(BackwardStages);
static_assert(kHiddenStagingStart % 128 == 0, "swizzled");
static_assert(kHiddenStagingStart + kConsumerWarps * 3 * kStagingBytes <= kOutboxBytes,
              "more stages than the outbox has room for");

struct OutboxBarriers {
  uint64_t full[kOutboxSlots];   // 1 arrival per consumer warp
  uint64_t empty[kOutboxSlots];  // 1 arrival: the copy engine has read it

  __device__ void init(int consumer_warps) {
    for (int i = 0; i < kOutboxSlots; ++i) {
      mbarrier_init(&full[i], consumer_warps);
      mbarrier_init(&empty[i], 1);
    }
  }
};
// Counts the slots taken; one register where two would read better.
struct OutboxCursor {
  uint32_t count = 0;
  MOK_DEVICE int slot() const { return count % kOutboxSlots; }
  MOK_DEVICE uint32_t parity() const { return count / kOutboxSlots & 1; }
  MOK_DEVICE void advance() { ++count; }
};

// A consumer warp's side. Whole warp.
class Outbox {
 public:
  MOK_DEVICE Outbox(uint8_t* bytes, OutboxBarriers& barriers, AbortWord cta_abort)
      : bytes_(shared_address(bytes)), barriers_(barriers), cta_abort_(cta_abort) {}

  // The next slot, or the one `ahead` slots after it, once it may be written.
  MOK_DEVICE uint32_t open(int ahead = 0) {
    const OutboxCursor at = {at_.count + ahead};
    wait_barrier(&barriers_.empty[at.slot()], at.parity() ^ 1, cta_abort_);
    return bytes_ + at.slot() * kOutboxSlotBytes;
  }
  // The next slots are filled.
  MOK_DEVICE void close(int slots) {
    fence_async_proxy_shared();
    __syncwarp();
    for (int i = 0; i < slots; ++i, at_.advance())
      if (threadIdx.x % 32 == 0) mbarrier_arrive(&barriers_.full[at_.slot()]);
  }
  // All slots, as one piece of memory.
  MOK_DEVICE uint32_t open_all() {
    for (int i = 0; i < kOutboxSlots; ++i) open(i);
    return bytes_;
  }
  MOK_DEVICE void close_all() { close(kOutboxSlots); }
  // A warp's own piece for hidden gradients. Nobody takes it from there.
  MOK_DEVICE uint32_t staging(int warp) {
    return open_all() + kHiddenStagingStart + warp * 3 * kStagingBytes;
  }

 private:
  const uint32_t bytes_;  // address in shared memory
  OutboxBarriers& barriers_;
  const AbortWord cta_abort_;
  OutboxCursor at_;
};

// A storer warp's side: takes the slots in the order in which the consumers fill them.
class Storer {
 public:
  __device__ Storer(const BackwardParams& p, const Watch& watch, int v, const uint8_t* bytes,
                    OutboxBarriers& barriers, TileRing<GradTile>& ring)
      : p_(p), watch_(watch), v_(v), bytes_(bytes), barriers_(barriers), ring_(ring) {}

  // Whole warp.
  __device__ void run() {
    for (;; tile_at_.advance()) {
      if (!all_lanes(wait_barrier_timed(watch_, &ring_.known[tile_at_.slot()], tile_at_.parity(),
                                        FaultPhase::kGradHidden, -1)))
        break;
      const GradTile tile = ring_.tiles[tile_at_.slot()];
      if (tile.work == GradWork::kEnd || !all_lanes(store(tile)) ||
          !all_lanes(wait_barrier_timed(watch_, &ring_.done[tile_at_.slot()], tile_at_.parity(),
                                        phase_of(tile.work), tile.block)))
        break;
      if (lane_ == 0) {
        if (tile.work == GradWork::kHidden || tile.work == GradWork::kHiddenSaved)
          tell_hidden(tile);
        if (tile.work == GradWork::kMacrobatchEnd)
          add_release_gpu(p_.macrobatch_done(v_) + tile.block, 1);
        mbarrier_arrive(&ring_.released[tile_at_.slot()]);
      }
    }
    bulk_wait<0>();  // also what was pushed to other ranks
    fence_async_proxy();
  }

 private:
  __device__ bool store(const GradTile& t) {
    switch (t.work) {
      case GradWork::kInput:
        return store_input(t);
      case GradWork::kDownWeight:
      case GradWork::kGateUpWeight:
        return lane_ != 0 || t.open_out >= 0 || store_weight(t);
      default:
        return true;
    }
  }

  // Lane 0. What the consumers have stored can be read.
  __device__ void tell_hidden(const GradTile& t) {
    if (t.shared) {
      add_release_gpu(p_.shared_full(v_) + t.block, 1);
      add_release_gpu(p_.all_shared_full(v_), 1);
    } else {
      const int num_local = p_.geometry.shape.num_local_experts;
      add_release_gpu(p_.expert_full(v_) + t.expert - v_ * num_local, 1);
    }
  }

  // Lane 0. Panels of 64 columns of bf16, or of 32 of float32.
  __device__ bool store_weight(const GradTile& t) {
    const NetworkMaps& m = t.shared ? p_.shared : p_.routed;
    const Geometry& g = p_.geometry;
    const int inner = t.shared ? g.shared_intermediate : g.intermediate;
    const bool down = t.work == GradWork::kDownWeight;
    const int rows = down ? inner : g.hidden, columns = down ? g.hidden : inner;
    const int width = p_.float32_weight_grads && !t.shared ? 32 : 64;
    const int row = t.expert * rows + t.m * kBlockRows;
    const bool second = t.m * kBlockRows + 64 < rows;
    for (int i = 0; i < (down ? 1 : 2); ++i) {
      const CUtensorMap* map = down ? &m.grad_down : i == 0 ? &m.grad_gate : &m.grad_up;
      const int first = t.n * (down ? kTileColumns : kGateUpColumns);
      const int end = min(first + (down ? kTileColumns : kGateUpColumns), columns);
      for (int column = first; column < end; column += width)
        if (!pass_on(t, map, column, row, second)) return false;
    }
    return true;
  }

  // Whole warp. Every row goes to its own place.
  __device__ bool store_input(const GradTile& t) {
    const Geometry& g = p_.geometry;
    at_.count = __shfl_sync(kAllLanes, at_.count, 0);  // other tiles are lane 0's business
    OutboxCursor at = at_;
    bool good = true;
    for (int i = 0; i < kOutboxSlots && good; ++i, at.advance())
      good = wait_barrier_timed(watch_, &barriers_.full[at.slot()], at.parity(),
                                FaultPhase::kGradInput, t.block);
    if (!all_lanes(good)) return false;
    const int column = t.n * kTileColumns;
    const uint32_t bytes = min(kTileColumns, g.hidden - column) * 2;
    for (int row = lane_; row < kBlockRows; row += 32) {
      char* to = dx_row(t, row);
      if (to != nullptr) bulk_store(to + column * 2, bytes_ + row * kInputLineBytes, bytes);
    }
    bulk_commit();
    bulk_wait_read<0>();
    __syncwarp();
    for (int i = 0; i < kOutboxSlots; ++i, at_.advance())
      if (lane_ == 0) mbarrier_arrive(&barriers_.empty[at_.slot()]);
    return true;
  }
  __device__ char* dx_row(const GradTile& t, int row) const {
    const Geometry& g = p_.geometry;
    const int64_t block_row = int64_t{t.block} * kBlockRows + row;
    if (!t.shared) return p_.array<GradRoute>(g.workspace.routes, v_)[block_row].dx;
    if (block_row >= g.shape.num_tokens) return nullptr;
    return p_.array<char>(g.workspace.shared_y, v_) + block_row * p_.row_bytes();
  }

  // Lane 0. The next slot goes to `row` and `column` of the tensor, and is given back once the copy
  // engine has read it. `second`: the lower 64 rows exist.
  __device__ bool pass_on(const GradTile& t, const CUtensorMap* map, int column, int row,
                          bool second) {
    const int slot = at_.slot();
    if (!wait_barrier_timed(watch_, &barriers_.full[slot], at_.parity(), phase_of(t.work), t.block))
      return false;
    const uint8_t* from = bytes_ + slot * kOutboxSlotBytes;
    tma_store_2d(map, from, column, row);
    if (second) tma_store_2d(map, from + kOutboxSlotBytes / 2, column, row + 64);
    bulk_commit();
    bulk_wait_read<0>();
    mbarrier_arrive(&barriers_.empty[slot]);
    at_.advance();
    return true;
  }

  const BackwardParams& p_;
  const Watch& watch_;
  const int v_, lane_ = threadIdx.x % 32;
  const uint8_t* const bytes_;
  OutboxBarriers& barriers_;
  TileRing<GradTile>& ring_;
  RingCursor tile_at_;
  OutboxCursor at_;
};

}  // namespace jax_mok::cuda
