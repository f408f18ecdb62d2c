// How the pools start their threads, which last as long as the process.
#pragma once

#include <system_error>
#include <thread>
#include <utility>

namespace jax_mok::cpu {

// False where the system has no thread left.
template <typename Work>
bool start_thread(Work work) {
  try {
    std::thread(std::move(work)).detach();
    return true;
  } catch (const std::system_error&) {
    return false;
  }
}

}  // namespace jax_mok::cpu
