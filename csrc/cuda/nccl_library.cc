// Finds NCCL's functions with dlsym.
#include "cuda/nccl_library.h"

#include <dlfcn.h>

#include <chrono>
#include <mutex>
#include <thread>

namespace jax_mok::cuda {
namespace {

constexpr char kName[] = "libnccl.so.2";

template <typename F>
bool find(void* library, const char* name, F* function) {
  *function = reinterpret_cast<F>(dlsym(library, name));
  return *function != nullptr;
}

NcclLibrary load() {
  NcclLibrary nccl;
  // Only the copy that is there already: it is the one that makes XLA's communicators. Loading one
  // by its name could bring in the system's, of another version, and XLA would then get that one.
  void* library = dlopen(kName, RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) {
    nccl.problem = std::string("NCCL is not loaded in this process (") + kName +
                   "); it comes with jax's CUDA plugin: pip install 'jax[cuda13]'";
    return nccl;
  }
  const auto need = [&](const char* name, auto* function) {
    if (!find(library, name, function) && nccl.problem.empty())
      nccl.problem = std::string("NCCL lacks ") + name;
  };
  need("ncclGetVersion", &nccl.GetVersion);
  if (nccl.GetVersion != nullptr) nccl.GetVersion(&nccl.version);
  need("ncclGetErrorString", &nccl.GetErrorString);
  need("ncclGetLastError", &nccl.GetLastError);
  need("ncclCommGetAsyncError", &nccl.CommGetAsyncError);
  need("ncclCommUserRank", &nccl.CommUserRank);
  need("ncclCommCount", &nccl.CommCount);
  need("ncclMemAlloc", &nccl.MemAlloc);
  need("ncclMemFree", &nccl.MemFree);
  need("ncclCommWindowRegister", &nccl.CommWindowRegister);
  need("ncclAllReduce", &nccl.AllReduce);
  find(library, "ncclGetLsaDevicePointer", &nccl.GetLsaDevicePointer);
  if (nccl.version != 0 && nccl.version < NcclLibrary::kOldestVersion)
    nccl.problem = "NCCL is too old";
  if (!nccl.problem.empty())
    nccl.problem +=
        ": found version " + nccl_version_name(nccl.version) + ", needed is 2.28 or newer";
  return nccl;
}

}  // namespace

const NcclLibrary& nccl_library() {
  static std::mutex mutex;
  static const NcclLibrary* found = nullptr;
  std::lock_guard<std::mutex> lock(mutex);
  // JAX loads NCCL only when it starts its backend, so one that is missing may come yet.
  if (found == nullptr || found->version == 0) found = new NcclLibrary(load());
  return *found;
}

std::string nccl_version_name(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

std::string NcclLibrary::finish(int result, NcclComm* comm, const char* what) const {
  while (result == kInProgress) {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    const int asked = CommGetAsyncError(comm, &result);
    if (asked != kSuccess) result = asked;
  }
  if (result == kSuccess) return "";
  return std::string(what) + " failed: " + GetErrorString(result) + " (" + GetLastError(comm) + ")";
}

}  // namespace jax_mok::cuda
