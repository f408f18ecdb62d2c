// Host side of a call: tensor maps, kernel parameters, launches.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>

#include "cuda/backward_sm90.h"
#include "cuda/forward_sm90.h"
#include "cuda/meeting.h"
#include "cuda/plan_kernels.h"

namespace jax_mok::cuda {
namespace {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// The driver is asked for at run time: libcuda is never linked.
EncodeTiled encode_tiled() {
  static const EncodeTiled function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault,
                                         &result) != cudaSuccess ||
        result != cudaDriverEntryPointSuccess)
      found = nullptr;
    return reinterpret_cast<EncodeTiled>(found);
  }();
  return function;
}

struct MapBuilder {
  bool good = true;

  void encode(CUtensorMap* map, const void* base, int dimensions, const cuuint64_t* sizes,
              const cuuint64_t* strides, const cuuint32_t* box,
              CUtensorMapDataType type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16) {
    const cuuint32_t steps[3] = {1, 1, 1};
    good = good && encode_tiled() != nullptr &&
           encode_tiled()(map, type, dimensions, const_cast<void*>(base), sizes, strides, box,
                          steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                          CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                          CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
  }

  // [rows, columns] in boxes of a block's rows x 64 columns.
  void activations(CUtensorMap* map, const void* base, uint64_t rows, uint64_t columns) {
    const cuuint64_t sizes[2] = {columns, rows}, strides[1] = {columns * 2};
    const cuuint32_t box[2] = {kColumnUnit, kBlockRows};
    encode(map, base, 2, sizes, strides, box);
  }
  // [rows, columns] in boxes of 64 rows x 128 bytes.
  void squares(CUtensorMap* map, const void* base, uint64_t rows, uint64_t columns,
               bool float32 = false) {
    const uint64_t size = float32 ? 4 : 2;
    const cuuint64_t sizes[2] = {columns, rows}, strides[1] = {columns * size};
    const cuuint32_t box[2] = {static_cast<cuuint32_t>(128 / size), kTileK};
    encode(map, base, 2, sizes, strides, box,
           float32 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16);
  }
  // [rows, columns] seen as panels of 64 columns; a box is a stage's rows of `panels` panels.
  void weights(CUtensorMap* map, const void* base, uint64_t rows, uint64_t columns,
               uint32_t panels) {
    const cuuint64_t sizes[3] = {kColumnUnit, rows, columns / kColumnUnit};
    const cuuint64_t strides[2] = {columns * 2, kColumnUnit * 2};
    const cuuint32_t box[3] = {kColumnUnit, kTileK, panels};
    encode(map, base, 3, sizes, strides, box);
  }
};

bool make_forward_maps(const Geometry& g, const ForwardBuffers& b, ForwardMaps* maps) {
  const uint64_t v = g.num_virtual_ranks, block = kBlockRows;
  const uint64_t hidden = g.hidden, intermediate = g.intermediate;
  const uint64_t experts = v * g.shape.num_local_experts;
  const char* workspace = static_cast<const char*>(b.workspace);
  MapBuilder build;
  build.activations(&maps->x_ring, g.save ? b.saved_x : workspace + g.workspace.x_ring.offset,
                    v * g.shape.ring_blocks * block, hidden);
  build.activations(&maps->h, workspace + g.workspace.h.offset,
                    v * g.shape.macrobatch_blocks * block, intermediate);
  build.weights(&maps->w_gate, b.w_gate, experts * hidden, intermediate, 2);
  build.weights(&maps->w_up, b.w_up, experts * hidden, intermediate, 2);
  build.weights(&maps->w_down, b.w_down, experts * intermediate, hidden, 4);
  if (g.shared_intermediate > 0) {
    const uint64_t shared = g.shared_intermediate;
    build.activations(&maps->x, b.x, v * g.shape.num_tokens, hidden);
    build.activations(&maps->shared_h, workspace + g.workspace.shared_h.offset,
                      v * g.shared_blocks * block, shared);
    build.weights(&maps->s_gate, b.s_gate, hidden, shared, 2);
    build.weights(&maps->s_up, b.s_up, hidden, shared, 2);
    build.weights(&maps->s_down, b.s_down, shared, hidden, 4);
  }
  return build.good;
}

bool make_backward_maps(const Geometry& g, const BackwardFacts& f, const BackwardBuffers& b,
                        BackwardParams* p) {
  const uint64_t v = g.num_virtual_ranks, hidden = g.hidden;
  const char* workspace = static_cast<const char*>(b.workspace);
  const auto part = [&](const Span& span) { return workspace + span.offset; };
  const WorkspaceLayout& w = g.workspace;
  MapBuilder build;
  {
    const uint64_t experts = v * g.shape.num_local_experts, inner = g.intermediate;
    const uint64_t rows = v * g.shape.ring_blocks * kBlockRows;
    NetworkMaps& m = p->routed;
    const bool ring = w.x_ring.bytes > 0;  // else all tokens are saved
    build.squares(&m.x, ring ? part(w.x_ring) : b.saved_x, rows, hidden);
    if (g.save) build.squares(&p->saved_x_map, b.saved_x, rows, hidden);
    build.squares(&m.dy, part(w.dy_ring), rows, hidden);
    build.squares(&m.gate, b.w_gate, experts * hidden, inner);
    build.squares(&m.up, b.w_up, experts * hidden, inner);
    build.squares(&m.down, b.w_down, experts * inner, hidden);
    build.squares(&m.h, part(w.h), rows, inner);
    build.squares(&m.d_gate, part(w.d_gate), rows, inner);
    build.squares(&m.d_up, part(w.d_up), rows, inner);
    const bool f32 = f.float32_weight_grads;
    build.squares(&m.grad_gate, b.dw_gate, experts * hidden, inner, f32);
    build.squares(&m.grad_up, b.dw_up, experts * hidden, inner, f32);
    build.squares(&m.grad_down, b.dw_down, experts * inner, hidden, f32);
  }
  if (g.shared_intermediate > 0) {
    const uint64_t tokens = v * g.shape.num_tokens, inner = g.shared_intermediate;
    const uint64_t rows = v * g.shared_blocks * kBlockRows;
    NetworkMaps& m = p->shared;
    build.squares(&m.x, b.x, tokens, hidden);
    build.squares(&m.dy, b.dy, tokens, hidden);
    build.squares(&m.gate, b.s_gate, hidden, inner);
    build.squares(&m.up, b.s_up, hidden, inner);
    build.squares(&m.down, b.s_down, inner, hidden);
    build.squares(&m.h, part(w.shared_h), rows, inner);
    build.squares(&m.d_gate, part(w.shared_d_gate), rows, inner);
    build.squares(&m.d_up, part(w.shared_d_up), rows, inner);
    build.squares(&m.grad_gate, b.ds_gate, v * hidden, inner);
    build.squares(&m.grad_up, b.ds_up, v * hidden, inner);
    build.squares(&m.grad_down, b.ds_down, v * inner, hidden);
  }
  return build.good;
}

// What forward and backward have in common.
void fill_call(const ForwardFacts& facts, int rank, const TestHooks& hooks, CallParams* p) {
  p->first_rank = rank;
  p->timeout_ns = static_cast<uint64_t>(facts.timeout_seconds * 1e9);
  p->start_timeout_ns = static_cast<uint64_t>(facts.start_timeout_seconds * 1e9);
  p->hooks = hooks;
}
template <typename Buffers>
void fill_buffers(const Buffers& buffers, CallParams* p) {
  p->x = buffers.x;
  p->expert_ids = buffers.expert_ids;
  p->expert_weights = buffers.expert_weights;
  p->workspace = buffers.workspace;
  std::copy(std::begin(buffers.heaps), std::end(buffers.heaps), p->heaps);
  p->status = buffers.status;
  p->call_id = buffers.call_id;
}

bool is_plain(const ForwardFacts& facts) {
  return !facts.has_biases && std::isinf(facts.activation.limit) &&
         facts.activation.up_offset == 0.0f && facts.activation.alpha == 1.0f;
}

// One CTA per SM, all resident: they wait for each other.
cudaError_t launch_persistent(const void* kernel, const Geometry& g, int threads, int shared_bytes,
                              void* params, cudaStream_t stream) {
  cudaLaunchAttribute cooperative = {};
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = g.ctas_per_rank * g.num_virtual_ranks;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &cooperative;
  config.numAttrs = 1;
  void* arguments[] = {params};
  return cudaLaunchKernelExC(&config, kernel, arguments);
}

// A stage of either pass.
template <typename Params, typename MakeMaps>
cudaError_t launch_stage(CallStage stage, Params& p, MakeMaps make_maps, const void* kernel,
                         int threads, int shared_bytes, int num_sms, cudaStream_t stream) {
  const bool has_peers = p.geometry.shape.num_ranks > p.geometry.num_virtual_ranks;
  switch (stage) {
    case CallStage::kPublish:
      return launch_publish(p, num_sms, stream);
    case CallStage::kCopy:
      return launch_copy(p, num_sms, stream);
    case CallStage::kPlan:
      if (has_peers)
        if (cudaError_t e = launch_await_ids(p, stream)) return e;
      return launch_plan(p, stream);
    case CallStage::kWork:
      p.part = has_peers ? Part::kWork : Part::kAll;
      if (!make_maps()) return cudaErrorInvalidValue;
      if (has_peers)
        if (cudaError_t e = launch_await_tokens(p, stream)) return e;
      break;
    case CallStage::kSum:
      if (!has_peers) return cudaSuccess;
      p.part = Part::kSum;
      if (cudaError_t e = launch_hear(p, stream)) return e;
      break;
  }
  return launch_persistent(kernel, p.geometry, threads, shared_bytes, &p, stream);
}

cudaError_t prepare_persistent(const void* kernel, int threads, int shared_bytes) {
  if (cudaError_t e =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes))
    return e;
  int per_sm = 0;
  if (cudaError_t e =
          cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel, threads, shared_bytes))
    return e;
  return per_sm < 1 ? cudaErrorCooperativeLaunchTooLarge : cudaSuccess;
}

cudaError_t current_device_sms(int* num_sms) {
  int device;
  if (cudaError_t e = cudaGetDevice(&device)) return e;
  return cudaDeviceGetAttribute(num_sms, cudaDevAttrMultiProcessorCount, device);
}

}  // namespace

cudaError_t prepare_module() {
  int device, major, minor;
  if (cudaError_t e = cudaGetDevice(&device)) return e;
  if (cudaError_t e = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device))
    return e;
  if (cudaError_t e = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device))
    return e;
  if (major != 9 || minor != 0) return cudaErrorNoKernelImageForDevice;
  if (encode_tiled() == nullptr) return cudaErrorNotSupported;
  for (ActivationKind kind :
       {ActivationKind::kSwiglu, ActivationKind::kGeglu, ActivationKind::kReglu}) {
    if (cudaError_t e =
            prepare_persistent(forward_kernel(kind), kForwardThreads, kForwardSharedBytes))
      return e;
    for (bool plain : {false, true})
      if (cudaError_t e = prepare_persistent(backward_kernel(kind, plain), kBackwardThreads,
                                             kBackwardSharedBytes))
        return e;
  }
  if (cudaError_t e = prepare_meetings()) return e;
  return prepare_plan_kernels();
}

cudaError_t init_heap(void* heap, cudaStream_t stream) {
  return cudaMemsetAsync(heap, 0, sizeof(HeapControl), stream);
}

cudaError_t launch_forward(CallStage stage, const ForwardFacts& facts, int rank,
                           const ForwardBuffers& buffers, cudaStream_t stream,
                           const TestHooks& hooks) {
  if (facts.num_tokens == 0) return cudaSuccess;  // on all ranks alike: nobody waits for us
  int num_sms;
  if (cudaError_t e = current_device_sms(&num_sms)) return e;
  if (hooks.num_sms > 0) num_sms = std::min(num_sms, hooks.num_sms);
  ForwardParams p;
  std::memset(static_cast<void*>(&p), 0, sizeof(p));
  p.geometry = make_geometry(facts, num_sms);
  fill_call(facts, rank, hooks, &p);
  fill_buffers(buffers, &p);
  if (facts.save) {
    p.saved_x = buffers.saved_x;
    p.saved_gate_up = buffers.saved_gate_up;
  }
  p.b_gate = buffers.b_gate;
  p.b_up = buffers.b_up;
  p.b_down = buffers.b_down;
  p.s_scale = buffers.s_scale;
  p.y = buffers.y;
  p.activation = facts.activation;
  p.plain_activation = is_plain(facts);
  const auto make_maps = [&] { return make_forward_maps(p.geometry, buffers, &p.maps); };
  return launch_stage(stage, p, make_maps, forward_kernel(facts.activation.kind), kForwardThreads,
                      kForwardSharedBytes, num_sms, stream);
}

cudaError_t launch_backward(CallStage stage, const BackwardFacts& facts, int rank,
                            const BackwardBuffers& buffers, cudaStream_t stream,
                            const TestHooks& hooks) {
  int num_sms;
  if (cudaError_t e = current_device_sms(&num_sms)) return e;
  if (hooks.num_sms > 0) num_sms = std::min(num_sms, hooks.num_sms);
  BackwardParams p;
  std::memset(static_cast<void*>(&p), 0, sizeof(p));
  p.geometry = make_geometry(facts, num_sms, plan::Pass::kBackward);
  const Geometry& g = p.geometry;
  const int64_t v = g.num_virtual_ranks, experts = v * g.shape.num_local_experts;
  const int64_t h = g.hidden, i = g.intermediate, s = g.shared_intermediate;
  const int64_t routed = experts * h * i * (facts.float32_weight_grads ? 4 : 2);
  const BackwardParams::Output outputs[] = {
      {buffers.dw_gate, routed},
      {buffers.dw_up, routed},
      {buffers.dw_down, routed},
      {buffers.db_gate, facts.has_biases ? experts * i * 2 : 0},
      {buffers.db_up, facts.has_biases ? experts * i * 2 : 0},
      {buffers.db_down, facts.has_biases ? experts * h * 2 : 0},
      {buffers.ds_gate, v * h * s * 2},
      {buffers.ds_up, v * h * s * 2},
      {buffers.ds_down, v * h * s * 2},
  };
  std::copy(std::begin(outputs), std::end(outputs), p.weight_grads);
  if (facts.num_tokens == 0) {  // on all ranks alike: nobody waits for us
    for (const auto& output : outputs)
      if (stage == CallStage::kWork && output.bytes > 0)
        if (cudaError_t e = cudaMemsetAsync(output.data, 0, output.bytes, stream)) return e;
    return cudaSuccess;
  }
  fill_call(facts, rank, hooks, &p);
  fill_buffers(buffers, &p);
  p.dy = buffers.dy;
  if (facts.save) {
    p.saved_x = const_cast<void*>(buffers.saved_x);
    p.saved_gate_up = buffers.saved_gate_up;
  }
  p.b_gate = buffers.b_gate;
  p.b_up = buffers.b_up;
  p.b_down = buffers.b_down;
  p.s_scale = buffers.s_scale;
  p.dx = buffers.dx;
  p.d_expert_weights = buffers.d_expert_weights;
  p.db_gate = buffers.db_gate;
  p.db_up = buffers.db_up;
  p.db_down = buffers.db_down;
  p.ds_scale = buffers.ds_scale;
  p.activation = facts.activation;
  p.float32_weight_grads = facts.float32_weight_grads;
  const auto make_maps = [&] { return make_backward_maps(g, facts, buffers, &p); };
  return launch_stage(stage, p, make_maps, backward_kernel(facts.activation.kind, is_plain(facts)),
                      kBackwardThreads, kBackwardSharedBytes, num_sms, stream);
}

}  // namespace jax_mok::cuda
