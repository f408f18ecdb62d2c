// The forward of one MoE layer on the GPU, as plain host functions: what an XLA FFI handler calls.
// Nothing here needs CUDA's device headers, and nothing allocates: the caller owns every buffer.
//
// Order of calls:  check -> prepare_module (once per device, before anything runs on it)
//                  -> init_heap (once per heap) -> launch_forward, stage by stage (any number of
//                  calls, in stream order, by all ranks alike).
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>

namespace jax_mok::cuda {

constexpr int kMaxRanks = 128;  // ranks of one expert-parallel group
constexpr int kMaxTopK = 32;    // slots of a token

// act(g) * (u + up_offset), with g cut off above and u on both sides at `limit`.
enum class ActivationKind : int32_t { kSwiglu, kGeglu, kReglu };
struct Activation {
  ActivationKind kind = ActivationKind::kSwiglu;
  float alpha = 1.0f;  // swiglu: g * sigmoid(alpha * g)
  float limit = std::numeric_limits<float>::infinity();
  float up_offset = 0.0f;
};

// How gate|up and down tiles follow each other; no bit depends on it.
enum class ForwardOrder : int32_t { kChosen, kPhases, kTurns };

// Static facts of a call: equal on all ranks. Sizes of settings are in rows; 0 = chosen from the
// shape.
struct ForwardFacts {
  int32_t num_ranks = 1;
  int32_t num_virtual_ranks = 1;  // 1, or num_ranks: then all ranks run in this one launch
  int32_t num_tokens = 0;         // per rank
  int32_t hidden = 0;             // H, a multiple of 64
  int32_t intermediate = 0;       // I, a multiple of 64
  int32_t top_k = 0;
  int32_t num_experts = 0;  // of all ranks
  Activation activation;
  bool has_biases = false;
  int32_t shared_intermediate = 0;  // S of the shared experts, a multiple of 64; 0 = none
  bool has_shared_gate = false;
  // The forward leaves the dispatched tokens and gate|up of its last macrobatch for the backward.
  bool save = false;

  int32_t num_comm_sms = 0;     // 0: communication runs in spare warps of the compute CTAs
  int32_t minibatch_size = 0;   // rows of one expert handed to the GEMM together
  int32_t macrobatch_size = 0;  // rows whose hidden activations are held at once
  int32_t ring_size = 0;        // rows of the token ring
  ForwardOrder order = ForwardOrder::kChosen;
  double timeout_seconds = 60.0;         // of a wait inside the call, once all ranks have come
  double start_timeout_seconds = 600.0;  // of the wait for the other ranks to begin the call
};

// Device addresses of one rank. All tensors are dense and row major. With virtual ranks the
// per-rank tensors follow each other in one array (leading dimension num_ranks) and the expert
// tensors hold all experts. bf16 is passed as void.
struct ForwardBuffers {
  const void* x = nullptr;                // bf16 [T, H]
  const int32_t* expert_ids = nullptr;    // [T, k]; -1 = slot unused
  const float* expert_weights = nullptr;  // [T, k]
  const void* w_gate = nullptr;           // bf16 [El, H, I]
  const void* w_up = nullptr;             // bf16 [El, H, I]
  const void* w_down = nullptr;           // bf16 [El, I, H]
  const void* b_gate = nullptr;           // bf16 [El, I], or null
  const void* b_up = nullptr;             // bf16 [El, I], or null
  const void* b_down = nullptr;           // bf16 [El, H], or null
  const void* s_gate = nullptr;           // bf16 [H, S], or null
  const void* s_up = nullptr;             // bf16 [H, S], or null
  const void* s_down = nullptr;           // bf16 [S, H], or null
  const float* s_scale = nullptr;         // [T], or null (= 1)
  void* y = nullptr;                      // bf16 [T, H]
  void* saved_x = nullptr;                // bf16 [saved_rows(), H], or null
  void* saved_gate_up = nullptr;          // bf16 [saved_rows(), 2 I], laid out our way
  void* workspace = nullptr;              // workspace_bytes(); contents do not matter
  void* heaps[kMaxRanks] = {};            // heap of every rank, as addressed from this device
  struct Status* status = nullptr;        // [num_virtual_ranks], in memory that outlives the call
  // What all ranks know this call by, and no other call on these heaps. 0: its number since
  // init_heap, which is the same on all ranks as long as none of them misses a call.
  uint64_t call_id = 0;
};

// What went wrong first. Written once; the host reads it after synchronising and clears it (all
// zero = nothing wrong). A rank with a fault writes NaN to its whole output.
enum class FaultCode : int32_t {
  kNone = 0,
  kTimeout = 1,       // a wait ran out of time
  kPeerFault = 2,     // rank `counter` gave the same call up (`value` 1), or is at another one (0)
  kIdOutOfRange = 3,  // expert id `value` at (rank `tile`, token `counter`, slot `target`)
  kIdRepeated = 4,    // likewise: an earlier slot of the token has the same id
  // Of an exchange: move `tile` of the rank's list, of row `counter` to or from rank `value`, to
  // row `target`.
  kMoveOutOfRange = 5,
};
enum class FaultPhase : int32_t {
  kStart,
  kDispatch,
  kGateUp,
  kDown,
  kCombine,
  // of the backward
  kGradHidden,
  kGradInput,
  kGradWeight,
};
struct Status {
  int32_t code;     // FaultCode
  int32_t rank;     // the rank that found it
  int32_t phase;    // FaultPhase
  int32_t tile;     // kTimeout: index of the tile or row that was waited for
  int32_t counter;  // kTimeout: slot of the counter, in kStart and kCombine the missing rank
  int32_t value;    // what the counter held
  int32_t target;   // what was waited for
  int32_t call;     // number of the call since init_heap
};

// For tests only: delays and absences that the protocol must survive.
struct TestHooks {
  uint32_t jitter_seed = 0;  // other than 0: random delays of up to some 10 us all over the kernel
  int32_t absent_rank = -1;  // this rank never says that it has come
  int32_t num_sms = 0;       // other than 0: as if the GPU had so many, for calls side by side
  int32_t stuck_phase = -1;  // a FaultPhase: the first CTA never begins its first tile of it
};

// Empty, or a sentence that names the field, its value and what is allowed.
std::string check(const ForwardFacts& facts);

// Bytes for all ranks of the launch. The heap is symmetric: heap_bytes() on every rank, at the same
// offset of a window that the peers can read and write (with virtual ranks: num_ranks times that,
// one after the other).
size_t workspace_bytes(const ForwardFacts& facts);
size_t heap_bytes(const ForwardFacts& facts);

// Rows of one rank's saved_x and saved_gate_up: a macrobatch.
int64_t saved_rows(const ForwardFacts& facts);

// Loads every kernel and sets its attributes, on the current device; fails on a device that is not
// sm_90 or cannot hold the kernel. Must not run while another rank's kernel waits for this one.
cudaError_t prepare_module();

// Clears the control words of a fresh heap (one per rank). Peers must not have begun a call.
cudaError_t init_heap(void* heap, cudaStream_t stream);

// The parts of a call, in their order. kCopy may run on another stream, beside kPlan: after
// kPublish and before kWork. kPublish, kCopy and kWork's results wait for nobody; kPlan and kWork
// wait, on the device, for what the peers enqueue in kPublish and kCopy, and kSum for their kWork:
// so if the ranks of a process meet on the host before kPlan and before kSum, nothing ever waits
// for work that is not enqueued yet. Where all ranks run in one launch, kWork is the rest of the
// call.
enum class CallStage { kPublish, kCopy, kPlan, kWork, kSum };
constexpr CallStage kCallStages[] = {CallStage::kPublish, CallStage::kCopy, CallStage::kPlan,
                                     CallStage::kWork, CallStage::kSum};

// Enqueues a stage of a call. `rank` is this device's rank (0 with virtual ranks).
cudaError_t launch_forward(CallStage stage, const ForwardFacts& facts, int rank,
                           const ForwardBuffers& buffers, cudaStream_t stream,
                           const TestHooks& hooks = {});

}  // namespace jax_mok::cuda
