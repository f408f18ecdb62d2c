// Two workspaces are kept for the next calls; more are in use only while calls overlap.
#include "cpu/workspace.h"

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace jax_mok::cpu {
namespace {

constexpr size_t kPage = size_t{2} << 20;
constexpr size_t kKept = 2;

struct Shelf {
  Shelf() { free.reserve(kKept); }  // so that putting back never throws
  std::mutex mutex;
  std::vector<std::unique_ptr<Workspace>> free;
};

Shelf& shelf() {
  static Shelf* const the_shelf = new Shelf;
  return *the_shelf;
}

}  // namespace

void Workspace::Free::operator()(char* memory) const { std::free(memory); }

void Workspace::reserve(size_t bytes) {
  used_ = 0;
  if (bytes <= capacity_) return;
  memory_.reset();
  capacity_ = 0;
  const size_t rounded = (bytes + kPage - 1) / kPage * kPage;
  if (rounded < bytes) throw std::bad_alloc();
  memory_.reset(static_cast<char*>(std::aligned_alloc(kPage, rounded)));
  if (!memory_) throw std::bad_alloc();
#if defined(__linux__)
  madvise(memory_.get(), rounded, MADV_HUGEPAGE);  // columns are walked with a row's stride
#endif
  capacity_ = rounded;
}

float* Workspace::take(int64_t floats) {
  const size_t bytes = bytes_for(floats);
  if (bytes > capacity_ - used_) throw std::bad_alloc();
  float* const result = reinterpret_cast<float*>(memory_.get() + used_);
  used_ += bytes;
  return result;
}

BorrowedWorkspace::BorrowedWorkspace() {
  {
    std::lock_guard<std::mutex> lock(shelf().mutex);
    if (!shelf().free.empty()) {
      workspace_ = std::move(shelf().free.back());
      shelf().free.pop_back();
    }
  }
  if (!workspace_) workspace_ = std::make_unique<Workspace>();
}

BorrowedWorkspace::~BorrowedWorkspace() {
  std::lock_guard<std::mutex> lock(shelf().mutex);
  if (shelf().free.size() < kKept) shelf().free.push_back(std::move(workspace_));
}

void MemoryPlan::add(float** pointer, std::initializer_list<int64_t> sizes) {
  int64_t floats = 1;
  for (const int64_t size : sizes)
    if (__builtin_mul_overflow(floats, size, &floats)) throw std::bad_alloc();
  if (floats > INT64_MAX / 8) throw std::bad_alloc();
  if (__builtin_add_overflow(bytes_, Workspace::bytes_for(floats), &bytes_)) throw std::bad_alloc();
  buffers_.emplace_back(pointer, floats);
}

void MemoryPlan::allocate(Workspace& workspace) {
  workspace.reserve(bytes_);
  for (const auto& [pointer, floats] : buffers_) *pointer = workspace.take(floats);
}

float* thread_scratch(int64_t floats) {
  thread_local Workspace scratch;
  scratch.reserve(Workspace::bytes_for(floats));
  return scratch.take(floats);
}

}  // namespace jax_mok::cpu
