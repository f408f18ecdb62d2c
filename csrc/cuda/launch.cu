// Host side of a call: tensor maps, kernel parameters, launches.
#include <cmath>
#include <cstring>

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
              const cuuint64_t* strides, const cuuint32_t* box) {
    const cuuint32_t steps[3] = {1, 1, 1};
    good =
        good && encode_tiled() != nullptr &&
        encode_tiled()(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, dimensions, const_cast<void*>(base),
                       sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                       CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                       CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
  }

  // [rows, columns] in boxes of a block's rows x 64 columns.
  void activations(CUtensorMap* map, const void* base, uint64_t rows, uint64_t columns) {
    const cuuint64_t sizes[2] = {columns, rows}, strides[1] = {columns * 2};
    const cuuint32_t box[2] = {kColumnUnit, kBlockRows};
    encode(map, base, 2, sizes, strides, box);
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

bool make_maps(const Geometry& g, const ForwardBuffers& b, ForwardMaps* maps) {
  const uint64_t v = g.num_virtual_ranks, block = kBlockRows;
  const uint64_t hidden = g.hidden, intermediate = g.intermediate;
  const uint64_t experts = v * g.shape.num_local_experts;
  const char* workspace = static_cast<const char*>(b.workspace);
  MapBuilder build;
  build.activations(&maps->x_ring, workspace + g.workspace.x_ring.offset,
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
    const void* kernel = forward_kernel(kind);
    if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                             kForwardSharedBytes))
      return e;
    // All CTAs of the launch wait for each other, so every SM must hold one.
    int per_sm = 0;
    if (cudaError_t e = cudaOccupancyMaxActiveBlocksPerMultiprocessor(
            &per_sm, kernel, kForwardThreads, kForwardSharedBytes))
      return e;
    if (per_sm < 1) return cudaErrorCooperativeLaunchTooLarge;
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
  ForwardParams p;
  std::memset(static_cast<void*>(&p), 0, sizeof(p));
  p.geometry = make_geometry(facts, num_sms);
  p.buffers = buffers;
  p.activation = facts.activation;
  p.plain_activation =
      !facts.has_biases && std::isinf(facts.activation.limit) && facts.activation.up_offset == 0.0f;
  p.first_rank = rank;
  p.timeout_ns = static_cast<uint64_t>(facts.timeout_seconds * 1e9);
  p.start_timeout_ns = static_cast<uint64_t>(facts.start_timeout_seconds * 1e9);
  p.hooks = hooks;
  if (stage == CallStage::kPublish) return launch_publish(p, num_sms, stream);
  const bool has_peers = facts.num_ranks > facts.num_virtual_ranks;
  if (stage == CallStage::kWork) {
    p.part = has_peers ? Part::kWork : Part::kAll;
    if (!make_maps(p.geometry, buffers, &p.maps)) return cudaErrorInvalidValue;
    if (has_peers)
      if (cudaError_t e = launch_await(p, stream)) return e;
    if (cudaError_t e = launch_plan(p, stream)) return e;
  } else {
    if (!has_peers) return cudaSuccess;
    p.part = Part::kSum;
    if (cudaError_t e = launch_hear(p, stream)) return e;
  }

  cudaLaunchAttribute cooperative = {};
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = p.geometry.ctas_per_rank * p.geometry.num_virtual_ranks;
  config.blockDim = kForwardThreads;
  config.dynamicSmemBytes = kForwardSharedBytes;
  config.stream = stream;
  config.attrs = &cooperative;
  config.numAttrs = 1;
  void* arguments[] = {&p};
  const void* const kernel = forward_kernel(facts.activation.kind);
  if (cudaError_t e = cudaLaunchKernelExC(&config, kernel, arguments)) return e;
  return p.part == Part::kWork ? launch_tell(p, stream) : cudaSuccess;
}

}  // namespace jax_mok::cuda
