// The kernels' host interface with C linkage, so that Python tests can call it without JAX; and the
// comparison of a plan that the device made with the one of csrc/plan.
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "cuda/backward.h"
#include "cuda/layout.h"
#include "plan/host_plan.h"

using namespace jax_mok::cuda;

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

void copy_message(const std::string& text, char* message, size_t capacity) {
  std::strncpy(message, text.c_str(), capacity - 1);
  message[capacity - 1] = 0;
}

}  // namespace

EXPORT void mok_check(const ForwardFacts* facts, char* message, size_t capacity) {
  copy_message(check(*facts), message, capacity);
}
EXPORT size_t mok_workspace_bytes(const ForwardFacts* facts) { return workspace_bytes(*facts); }
EXPORT size_t mok_heap_bytes(const ForwardFacts* facts) { return heap_bytes(*facts); }
EXPORT int64_t mok_saved_rows(const ForwardFacts* facts) { return saved_rows(*facts); }
EXPORT int mok_launch_stage(int stage, const ForwardFacts* facts, int rank,
                            const ForwardBuffers* buffers, void* stream, const TestHooks* hooks) {
  return launch_forward(static_cast<CallStage>(stage), *facts, rank, *buffers,
                        static_cast<cudaStream_t>(stream), *hooks);
}
EXPORT int mok_launch(const ForwardFacts* facts, int rank, const ForwardBuffers* buffers,
                      void* stream, const TestHooks* hooks) {
  for (const CallStage stage : kCallStages)
    if (cudaError_t e = launch_forward(stage, *facts, rank, *buffers,
                                       static_cast<cudaStream_t>(stream), *hooks))
      return e;
  return cudaSuccess;
}

EXPORT void mok_check_backward(const BackwardFacts* facts, char* message, size_t capacity) {
  copy_message(check_backward(*facts), message, capacity);
}
EXPORT size_t mok_backward_workspace_bytes(const BackwardFacts* facts) {
  return backward_workspace_bytes(*facts);
}
EXPORT size_t mok_backward_heap_bytes(const BackwardFacts* facts) {
  return backward_heap_bytes(*facts);
}
EXPORT int mok_launch_backward_stage(int stage, const BackwardFacts* facts, int rank,
                                     const BackwardBuffers* buffers, void* stream,
                                     const TestHooks* hooks) {
  return launch_backward(static_cast<CallStage>(stage), *facts, rank, *buffers,
                         static_cast<cudaStream_t>(stream), *hooks);
}
EXPORT int mok_launch_backward(const BackwardFacts* facts, int rank, const BackwardBuffers* buffers,
                               void* stream, const TestHooks* hooks) {
  for (const CallStage stage : kCallStages)
    if (cudaError_t e = launch_backward(stage, *facts, rank, *buffers,
                                        static_cast<cudaStream_t>(stream), *hooks))
      return e;
  return cudaSuccess;
}

EXPORT int mok_prepare() { return prepare_module(); }
EXPORT int mok_init_heap(void* heap, void* stream) {
  return init_heap(heap, static_cast<cudaStream_t>(stream));
}
// What init_heap clears; the rest of a heap may hold anything before a call.
EXPORT size_t mok_heap_control_bytes() { return sizeof(HeapControl); }
EXPORT const char* mok_error(int code) {
  return cudaGetErrorString(static_cast<cudaError_t>(code));
}
EXPORT size_t mok_sizeof(const char* name) {
  const std::pair<const char*, size_t> sizes[] = {
      {"ForwardFacts", sizeof(ForwardFacts)},   {"ForwardBuffers", sizeof(ForwardBuffers)},
      {"TestHooks", sizeof(TestHooks)},         {"Status", sizeof(Status)},
      {"BackwardFacts", sizeof(BackwardFacts)}, {"BackwardBuffers", sizeof(BackwardBuffers)},
  };
  for (const auto& [known, size] : sizes)
    if (std::strcmp(known, name) == 0) return size;
  return 0;
}

// Rows, blocks and experts of all virtual ranks' plans that differ from csrc/plan's. `workspace` is
// a copy, on the host, of the workspace after a call; ids are those of all ranks, on the host.
// *shared_rows = rows that were to be copied from an earlier row of the same token.
EXPORT long mok_plan_mismatches(const ForwardFacts* facts, const ForwardBuffers* buffers,
                                const char* workspace, const int32_t* ids, long* shared_rows) {
  namespace plan = jax_mok::plan;
  const Geometry g = make_geometry(*facts, 1);
  const WorkspaceLayout& w = g.workspace;
  const int64_t row_bytes = int64_t{g.hidden} * 2;
  std::vector<const int32_t*> ids_of_rank;
  for (int r = 0; r < facts->num_ranks; ++r)
    ids_of_rank.push_back(ids + int64_t{r} * facts->num_tokens * facts->top_k);
  long wrong = 0;
  *shared_rows = 0;
  for (int v = 0; v < facts->num_ranks; ++v) {
    const plan::HostPlan want = plan::build(g.shape, ids_of_rank.data(), v);
    const auto at = [&](const Span& span) { return workspace + span.offset + v * span.bytes; };
    const auto device = [&](const Span& span) {
      return static_cast<const char*>(buffers->workspace) + span.offset + v * span.bytes;
    };
    const int32_t* first_block = reinterpret_cast<const int32_t*>(at(w.expert_first_block));
    for (size_t e = 0; e < want.expert_first_block.size(); ++e)
      wrong += first_block[e] != want.expert_first_block[e];
    const int32_t* block_expert = reinterpret_cast<const int32_t*>(at(w.block_expert));
    for (int b = 0; b < want.num_blocks(); ++b) wrong += block_expert[b] != want.block_expert[b];
    const RowRoute* routes = reinterpret_cast<const RowRoute*>(at(w.routes));
    for (size_t row = 0; row < want.rows.size(); ++row) {
      const plan::RowSource& source = want.rows[row];
      const char* from = device(w.zero_row);
      const char* to = nullptr;
      if (!plan::is_padding(source)) {
        const char* heap = static_cast<const char*>(buffers->heaps[source.rank]);
        to = heap + g.heap.slots +
             row_bytes * plan::combine_slot(source.token, source.slot, facts->num_tokens);
        from = heap + g.heap.x + row_bytes * source.token;
        if (source.rank == v) {
          from = static_cast<const char*>(buffers->x) +
                 row_bytes * (int64_t{v} * facts->num_tokens + source.token);
        } else if (want.first_use[row] >= 0 && want.num_blocks() <= g.shape.ring_blocks) {
          from = device(w.x_ring) + row_bytes * want.first_use[row];
          ++*shared_rows;
        }
      }
      wrong += routes[row].from != from || routes[row].to != to;
    }
  }
  return wrong;
}
