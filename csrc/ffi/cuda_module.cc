// The Python module jax_mok._cuda_core: the CUDA handlers as capsules, sizes of a call, the state
// of peer memory, and facts about this machine's GPUs. Importing it needs no GPU, driver or NCCL;
// whoever asks about GPUs starts the driver.
#include <cuda_runtime_api.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <stdexcept>
#include <string>

#include "cuda/nccl_library.h"
#include "cuda/peer_memory.h"
#include "ffi/cuda_facts.h"
#include "ffi/cuda_handlers.h"

namespace nb = nanobind;

namespace {

using namespace jax_mok;

template <typename T>
nb::capsule capsule(T* pointer) {
  return nb::capsule(reinterpret_cast<void*>(pointer));
}

nb::dict handlers() {
  const auto stages = [](auto* prepare, auto* initialize, auto* execute) {
    nb::dict result;
    result["prepare"] = capsule(prepare);
    result["initialize"] = capsule(initialize);
    result["execute"] = capsule(execute);
    return result;
  };
  nb::dict result;
  result["jax_mok_forward_cuda"] =
      stages(JaxMokForwardCudaPrepare, JaxMokForwardCudaInitialize, JaxMokForwardCuda);
  result["jax_mok_backward_cuda"] =
      stages(JaxMokBackwardCudaPrepare, JaxMokBackwardCudaInitialize, JaxMokBackwardCuda);
  result["jax_mok_exchange_cuda"] =
      stages(JaxMokExchangeCudaPrepare, JaxMokExchangeCudaInitialize, JaxMokExchangeCuda);
  return result;
}

struct DictSource {
  const nb::dict& dict;
  int64_t integer(const char* name) const { return nb::cast<int64_t>(nb::int_(dict[name])); }
  double real(const char* name) const { return nb::cast<double>(nb::float_(dict[name])); }
};

cuda::ForwardFacts facts(const nb::dict& dict) { return ffi::read_facts(DictSource{dict}); }
cuda::BackwardFacts backward_facts(const nb::dict& dict) {
  return ffi::read_backward_facts(DictSource{dict});
}
cuda::ExchangeFacts exchange_facts(const nb::dict& dict) {
  return ffi::read_exchange_facts(DictSource{dict});
}

void require(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  require(cudaDeviceGetAttribute(&value, which, device));
  return value;
}

int num_devices() {
  int count = 0;
  require(cudaGetDeviceCount(&count));
  return count;
}

std::vector<nb::dict> devices() {
  std::vector<nb::dict> result;
  const int count = num_devices();
  for (int d = 0; d < count; ++d) {
    cudaDeviceProp properties;
    require(cudaGetDeviceProperties(&properties, d));
    std::vector<int> peers;
    for (int other = 0; other < count; ++other) {
      int can = 0;
      if (other != d) require(cudaDeviceCanAccessPeer(&can, d, other));
      if (can != 0) peers.push_back(other);
    }
    nb::dict device;
    device["name"] = std::string(properties.name);
    device["compute_capability"] = nb::make_tuple(properties.major, properties.minor);
    device["multiprocessors"] = properties.multiProcessorCount;
    device["memory_bytes"] = properties.totalGlobalMem;
    device["cooperative_launch"] = attribute(cudaDevAttrCooperativeLaunch, d) != 0;
    device["peers"] = peers;
    result.push_back(device);
  }
  return result;
}

bool can_access_peer(int device, int peer) {
  int can = 0;
  require(cudaDeviceCanAccessPeer(&can, device, peer));
  return can != 0;
}

nb::dict versions() {
  const cuda::NcclLibrary& nccl = cuda::nccl_library();
  int driver = 0;
  cudaDriverGetVersion(&driver);  // 0 without a driver
  nb::dict result;
  result["cuda_built_with"] = CUDART_VERSION;
  result["cuda_driver"] = driver;
  result["nccl"] = nccl.version == 0 ? std::string() : cuda::nccl_version_name(nccl.version);
  result["nccl_problem"] = nccl.problem;
  return result;
}

std::vector<nb::dict> heaps() {
  std::vector<nb::dict> result;
  for (const cuda::PeerHeap& heap : cuda::all_heaps()) {
    nb::dict entry;
    entry["device"] = heap.device;
    entry["rank"] = heap.rank;
    entry["num_ranks"] = heap.num_ranks;
    entry["bytes"] = heap.bytes * heap.num_virtual_ranks;
    entry["used_bytes"] = heap.used * heap.num_virtual_ranks;
    entry["calls"] = cuda::num_calls(heap);
    entry["named_calls"] = heap.ids != nullptr;
    result.push_back(entry);
  }
  return result;
}

std::vector<nb::dict> take_faults() {
  std::vector<nb::dict> result;
  for (const cuda::Status& s : cuda::take_faults()) {
    nb::dict fault;
    fault["code"] = s.code;
    fault["rank"] = s.rank;
    fault["phase"] = s.phase;
    fault["tile"] = s.tile;
    fault["counter"] = s.counter;
    fault["value"] = s.value;
    fault["target"] = s.target;
    fault["call"] = s.call;
    result.push_back(fault);
  }
  return result;
}

}  // namespace

NB_MODULE(_cuda_core, m) {
  m.doc() = "CUDA part of jax_mok: XLA FFI handlers, peer memory, facts about GPUs.";
  m.attr("max_ranks") = cuda::kMaxRanks;
  m.attr("max_top_k") = cuda::kMaxTopK;
  m.def("handlers", &handlers, "XLA FFI handlers for the CUDA platform, by target name");
  m.def(
      "check", [](const nb::dict& f) { return cuda::check(facts(f)); }, nb::arg("facts"),
      "Empty, or why a forward call with these facts cannot run");
  m.def(
      "check_backward", [](const nb::dict& f) { return cuda::check_backward(backward_facts(f)); },
      nb::arg("facts"), "Empty, or why a backward call with these facts cannot run");
  m.def(
      "check_exchange", [](const nb::dict& f) { return cuda::check_exchange(exchange_facts(f)); },
      nb::arg("facts"), "Empty, or why the benchmark's exchange of rows cannot run like this");
  m.def(
      "allows_move",
      [](const nb::dict& f, int rank, const std::array<int32_t, 4>& m) {
        return cuda::is_allowed(exchange_facts(f), rank, {m[0], m[1], m[2], m[3]});
      },
      nb::arg("facts"), nb::arg("rank"), nb::arg("move"),
      "Whether that rank's kernel makes a move (source rank and row, target rank and row)");
  m.def(
      "workspace_bytes", [](const nb::dict& f) { return cuda::workspace_bytes(facts(f)); },
      nb::arg("facts"));
  m.def(
      "backward_workspace_bytes",
      [](const nb::dict& f) { return cuda::backward_workspace_bytes(backward_facts(f)); },
      nb::arg("facts"));
  m.def(
      "exchange_workspace_bytes",
      [](const nb::dict& f) { return cuda::exchange_workspace_bytes(exchange_facts(f)); },
      nb::arg("facts"));
  m.def(
      "heap_bytes", [](const nb::dict& f) { return ffi::layer_heap_bytes(facts(f)); },
      nb::arg("facts"), "Of one rank's peer heap, for both passes");
  m.def(
      "saved_rows", [](const nb::dict& f) { return cuda::saved_rows(facts(f)); }, nb::arg("facts"),
      "Rows of what one rank's forward leaves for the backward");
  m.def("forward_calls", &ffi::cuda_forward_calls, "Launches so far, one for each device");
  m.def("backward_calls", &ffi::cuda_backward_calls);
  m.def("devices", &devices, "All GPUs that CUDA sees; RuntimeError without a driver");
  m.def("can_access_peer", &can_access_peer, nb::arg("device"), nb::arg("peer"));
  m.def("versions", &versions);
  m.def("heaps", &heaps, "Peer memory of this process");
  m.def("take_faults", &take_faults, "Faults since the last call of this; clears them");
}
