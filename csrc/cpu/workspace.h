// Scratch memory of a call, kept between calls: fresh pages cost more than the arithmetic of a
// small layer. Its contents are undefined; nothing in the engine reads what it has not written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <utility>
#include <vector>

#include "cpu/gemm.h"

namespace jax_mok::cpu {

// A row of floats with one cache line to spare: rows whose distance is a power of two would all
// fall into the same few cache sets.
inline int64_t padded_stride(int64_t columns) { return num_panels(columns) * kPanel + 16; }

// One block of memory handed out from the front.
class Workspace {
 public:
  // Takes everything back and makes room for so many bytes. Throws std::bad_alloc.
  void reserve(size_t bytes);
  float* take(int64_t floats);
  static size_t bytes_for(int64_t floats) {
    return (static_cast<size_t>(floats) * 4 + 63) / 64 * 64;
  }

 private:
  struct Free {
    void operator()(char* memory) const;
  };
  std::unique_ptr<char, Free> memory_;
  size_t capacity_ = 0, used_ = 0;
};

// Borrows a workspace for the lifetime of the object.
class BorrowedWorkspace {
 public:
  BorrowedWorkspace();
  ~BorrowedWorkspace();
  BorrowedWorkspace(const BorrowedWorkspace&) = delete;
  BorrowedWorkspace& operator=(const BorrowedWorkspace&) = delete;
  Workspace& operator*() { return *workspace_; }

 private:
  std::unique_ptr<Workspace> workspace_;
};

// Buffers that are allocated together: add all, then allocate.
class MemoryPlan {
 public:
  // *pointer gets room for the product of the sizes. Throws std::bad_alloc if that overflows.
  void add(float** pointer, std::initializer_list<int64_t> sizes);
  void allocate(Workspace& workspace);

 private:
  std::vector<std::pair<float**, int64_t>> buffers_;
  size_t bytes_ = 0;
};

// Scratch of the calling thread: at least that many floats, valid until its next call.
float* thread_scratch(int64_t floats);

}  // namespace jax_mok::cpu
