// The pipeline of one 128 x 256 tile: a loader thread brings stages of both operands into shared
// memory by TMA, two consumer warpgroups multiply them, 64 rows each.
#pragma once

#include "cuda/faults.cuh"
#include "cuda/wgmma.cuh"

namespace jax_mok::cuda {

constexpr int kPanelBytes = 64 * 128;  // 64 rows of 128 bytes
constexpr int kABytes = kBlockRows * kTileK * 2;
constexpr int kBBytes = kTileColumns * kTileK * 2;
constexpr int kConsumerWarps = 8;

template <int kStages>
struct Stages {
  uint8_t a[kStages][kABytes];  // two panels, one of each warpgroup
  uint8_t b[kStages][kBBytes];  // four panels
};
template <int kStages>
struct StageBarriers {
  uint64_t full[kStages];   // the copy engine's bytes
  uint64_t empty[kStages];  // 1 arrival per consumer warp

  __device__ void init() {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&full[i], 1);
      mbarrier_init(&empty[i], kConsumerWarps);
    }
  }
};
// Which phase of every barrier of a loader its last loads complete, so that they can be waited for
// when the call is given up: they must land before the CTA's memory goes. A barrier without loads
// needs no waiting for the phase before its first.
class LastLoads {
 public:
  MOK_DEVICE void begin(int barrier, uint32_t parity) {
    parities_ = (parities_ & ~(1u << barrier)) | parity << barrier;
  }
  MOK_DEVICE void wait(int barrier, uint64_t* full) const {
    wait_landed(full, parities_ >> barrier & 1);
  }

 private:
  uint32_t parities_ = ~0u;
};
template <int kStages>
struct StageCursor {
  int stage = 0;
  uint32_t parity = 0;
  MOK_DEVICE void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// One consumer warpgroup's (0 or 1) view of the pipeline. Stages are given back one behind, when
// their products are known to have read them. After an abort it runs on with whatever the stages
// hold, without waiting: leaving a loop with products in flight would cost the compiler's
// pipelining.
template <int kStages>
class Consumer {
 public:
  MOK_DEVICE Consumer(Stages<kStages>& stages, StageBarriers<kStages>& barriers, int warpgroup,
                      AbortWord cta_abort)
      : stages_(stages),
        barriers_(barriers),
        a_offset_(warpgroup * kPanelBytes),
        cta_abort_(cta_abort) {}

  // The product of a tile, k_blocks (at least one) stages deep. The first product overwrites d, and
  // the compiler knows: so accumulators take no registers between tiles.
  template <Major kA, Major kB>
  MOK_DEVICE void multiply(float (&d)[128], int k_blocks) {
    const auto product = [&](int i, bool accumulate) {
      wgmma_64x256x16<kA, kB>(d, a<kA>(i), b<kB>(i), accumulate);
    };
    step<true>(false, product);
    for (int k = 1; k < k_blocks; ++k) step<false>(true, product);
    drain();
  }

  // The same, added to what d holds.
  template <Major kA, Major kB>
  MOK_DEVICE void multiply_onto(float (&d)[128], int k_blocks) {
    for (int k = 0; k < k_blocks; ++k)
      step<false>(k > 0, [&](int i, bool accumulate) {
        wgmma_64x256x16<kA, kB>(d, a<kA>(i), b<kB>(i), accumulate);
      });
    drain();
  }

 private:
  // behind: the products of the stage before are still under way.
  template <bool kOverwrite, typename Product>
  MOK_DEVICE void step(bool behind, Product product) {
    wait_barrier(&barriers_.full[at_.stage], at_.parity, cta_abort_);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kTileK / 16; ++i) product(i, !kOverwrite || i > 0);
    wgmma_commit();
    if (behind) {
      wgmma_wait<1>();
      give_back(1);
    }
    at_.advance();
  }
  MOK_DEVICE void drain() {
    wgmma_wait<0>();
    give_back(1);
  }
  // The stage `behind` stages behind the current one.
  MOK_DEVICE void give_back(int behind) {
    int stage = at_.stage - behind;
    if (stage < 0) stage += kStages;
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&barriers_.empty[stage]);
  }
  template <Major kMajor>
  MOK_DEVICE uint32_t a(int i) const {
    return descriptor<kMajor>(stages_.a[at_.stage] + a_offset_) + i * kStepK16<kMajor>;
  }
  template <Major kMajor>
  MOK_DEVICE uint32_t b(int i) const {
    return descriptor<kMajor>(stages_.b[at_.stage]) + i * kStepK16<kMajor>;
  }

  Stages<kStages>& stages_;
  StageBarriers<kStages>& barriers_;
  const int a_offset_;
  const AbortWord cta_abort_;
  StageCursor<kStages> at_;
};

}  // namespace jax_mok::cuda
