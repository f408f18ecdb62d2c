// The part of NCCL that peer memory needs, found in the running process: the copy that XLA's own
// communicators belong to. NCCL is neither linked nor needed at build time, so the few declarations
// stand here; they are those of nccl.h 2.28.9, and unchanged up to 2.32.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace jax_mok::cuda {

struct NcclComm;  // ncclComm

// The head of ncclWindow_vidmem (nccl_device/impl/core__types.h), which a window handle points to,
// in device memory.
struct NcclWindow {
  void* host_window;
  char* flat_base;  // the window of rank 0 of the LSA team; rank r's lies r * stride behind it
  int32_t lsa_rank;
  int32_t world_rank;
  uint32_t stride_4g;  // in units of 4 GiB
};

struct NcclLibrary {
  static constexpr int kSuccess = 0, kInProgress = 7;  // ncclResult_t
  static constexpr int kInt64 = 4;                     // ncclDataType_t
  static constexpr int kMin = 3;                       // ncclRedOp_t
  static constexpr int kSymmetricWindow = 1;           // NCCL_WIN_COLL_SYMMETRIC
  static constexpr int kOldestVersion = 22800;         // 2.28.0

  int (*GetVersion)(int*) = nullptr;
  const char* (*GetErrorString)(int) = nullptr;
  const char* (*GetLastError)(NcclComm*) = nullptr;
  int (*CommGetAsyncError)(NcclComm*, int*) = nullptr;
  int (*CommUserRank)(const NcclComm*, int*) = nullptr;
  int (*CommCount)(const NcclComm*, int*) = nullptr;
  int (*MemAlloc)(void**, size_t) = nullptr;
  int (*MemFree)(void*) = nullptr;
  int (*CommWindowRegister)(NcclComm*, void*, size_t, NcclWindow**, int) = nullptr;
  int (*AllReduce)(const void*, void*, size_t, int, int, NcclComm*, cudaStream_t) = nullptr;
  // Only in 2.29 and later; null before.
  int (*GetLsaDevicePointer)(NcclWindow*, size_t, int, void**) = nullptr;

  int version = 0;      // 0 = no NCCL
  std::string problem;  // empty, or why the library cannot be used

  // Waits for a call on a communicator that does not block; empty, or what went wrong.
  std::string finish(int result, NcclComm* comm, const char* what) const;
};

// Looks NCCL up, until it is found.
const NcclLibrary& nccl_library();

// "2.28.9" of 22809.
std::string nccl_version_name(int version);

}  // namespace jax_mok::cuda
