// The pipeline of two products that share a tile's rows of the output: d = A1 B1, 256 columns wide,
// and e = A2 B2, 128 columns wide. Their stages take turns; one of 128 columns alone would need
// more bytes than an SM can load while it lasts. The narrow product's stages are smaller, so that
// four stages fit where three of the other pipeline do with a little more.
#pragma once

#include "cuda/gemm_sm90.cuh"

namespace jax_mok::cuda {

constexpr int kNarrowBBytes = kBBytes / 2;

// Two pairs of a wide and a narrow stage.
struct AlternatingStages {
  uint8_t a[2][2][kABytes];  // [pair][wide, narrow]
  struct {
    uint8_t wide[kBBytes];
    uint8_t narrow[kNarrowBBytes];
  } b[2];
};
struct AlternatingBarriers {
  uint64_t full[2][2];   // the copy engine's bytes
  uint64_t empty[2][2];  // 1 arrival per consumer warp

  __device__ void init() {
    for (int i = 0; i < 4; ++i) {
      mbarrier_init(&full[i / 2][i % 2], 1);
      mbarrier_init(&empty[i / 2][i % 2], kConsumerWarps);
    }
  }
};
// Counts the pairs of stages.
struct PairCursor {
  uint32_t count = 0;
  MOK_DEVICE int pair() const { return count & 1; }
  MOK_DEVICE uint32_t parity() const { return count >> 1 & 1; }
  MOK_DEVICE void advance() { ++count; }
};

// One consumer warpgroup's (0 or 1) view. See Consumer.
class AlternatingConsumer {
 public:
  MOK_DEVICE AlternatingConsumer(AlternatingStages& stages, AlternatingBarriers& barriers,
                                 int warpgroup, AbortWord cta_abort)
      : stages_(stages),
        barriers_(barriers),
        a_offset_(warpgroup * kPanelBytes),
        cta_abort_(cta_abort) {}

  // B1 lies along rows, B2 along k. k_blocks (at least one) stages of each.
  MOK_DEVICE void multiply(float (&d)[128], float (&e)[64], int k_blocks) {
    wide<true>(d, false);
    narrow<true>(e);
    for (int k = 1; k < k_blocks; ++k) {
      wide<false>(d, true);
      narrow<false>(e);
    }
    wgmma_wait<0>();
    give_back(at_.pair() ^ 1, 1);
  }

 private:
  // behind: the narrow products of the pair before are still under way.
  template <bool kOverwrite>
  MOK_DEVICE void wide(float (&d)[128], bool behind) {
    const int pair = at_.pair();
    wait_barrier(&barriers_.full[pair][0], at_.parity(), cta_abort_);
    wgmma_fence();
    const uint32_t a = descriptor<Major::kK>(stages_.a[pair][0] + a_offset_);
    const uint32_t b = descriptor<Major::kRows>(stages_.b[pair].wide);
#pragma unroll
    for (int i = 0; i < kTileK / 16; ++i)
      wgmma_64x256x16<Major::kK, Major::kRows>(
          d, a + i * kStepK16<Major::kK>, b + i * kStepK16<Major::kRows>, !kOverwrite || i > 0);
    wgmma_commit();
    if (behind) {
      wgmma_wait<1>();
      give_back(pair ^ 1, 1);
    }
  }
  template <bool kOverwrite>
  MOK_DEVICE void narrow(float (&e)[64]) {
    const int pair = at_.pair();
    wait_barrier(&barriers_.full[pair][1], at_.parity(), cta_abort_);
    wgmma_fence();
    const uint32_t a = descriptor<Major::kK>(stages_.a[pair][1] + a_offset_);
    const uint32_t b = descriptor<Major::kK>(stages_.b[pair].narrow);
#pragma unroll
    for (int i = 0; i < kTileK / 16; ++i)
      wgmma_64x128x16<Major::kK, Major::kK>(e, a + i * kStepK16<Major::kK>,
                                            b + i * kStepK16<Major::kK>, !kOverwrite || i > 0);
    wgmma_commit();
    wgmma_wait<1>();
    give_back(pair, 0);
    at_.advance();
  }
  MOK_DEVICE void give_back(int pair, int narrow) {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&barriers_.empty[pair][narrow]);
  }

  AlternatingStages& stages_;
  AlternatingBarriers& barriers_;
  const int a_offset_;
  const AbortWord cta_abort_;
  PairCursor at_;
};

}  // namespace jax_mok::cuda
