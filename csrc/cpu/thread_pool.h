// The workers of the CPU engine, one set for the process. No result depends on how many there are.
#pragma once

#include <cstdint>
#include <functional>

namespace jax_mok::cpu {

// Threads that work on one call, the calling thread included. At first: JAX_MOK_NUM_THREADS if set,
// else the processors this process may run on.
int num_threads();

// Takes effect for work that starts from now on; 0 = the processors this process may run on.
void set_num_threads(int count);

// Calls body(i) for every i in [0, count), on the calling thread and on free workers; returns when
// all are done. Any number of threads may call it at once; body must not call it. If a body throws,
// the rest is skipped and one of the exceptions is thrown here.
void parallel_for(int64_t count, const std::function<void(int64_t)>& body);

}  // namespace jax_mok::cpu
