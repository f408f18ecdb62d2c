// Threads for work that may block: a task never waits behind another one.
#pragma once

#include <functional>

namespace jax_mok::cpu {

// Runs the task on a thread of its own; threads are kept and used again. Where the system has none
// left, the task runs here, before this returns: late is better than never.
void run_detached(std::function<void()> task);

}  // namespace jax_mok::cpu
