// Bounded waits, and how a call is given up: the first thread that runs out of time writes the
// rank's status and raises the rank's abort word; every other wait sees the word and ends too.
#pragma once

#include "cuda/params.cuh"
#include "cuda/ptx.cuh"

namespace jax_mok::cuda {

// A CTA's own copy of the abort word, in shared memory. Held as an address of 32 bits: consumers
// have no registers to spare.
class AbortWord {
 public:
  MOK_DEVICE AbortWord() : address_(0) {}  // none
  MOK_DEVICE explicit AbortWord(const uint32_t* word) : address_(shared_address(word)) {}
  MOK_DEVICE bool raised() const {
    uint32_t value;
    asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(value) : "r"(address_) : "memory");
    return value != 0;
  }
  MOK_DEVICE void raise() const {
    if (address_ != 0) asm volatile("st.volatile.shared.u32 [%0], 1;" ::"r"(address_) : "memory");
  }

 private:
  uint32_t address_;
};

// What a thread needs to wait for something and to give up. `cta_abort` is the CTA's own copy of
// the abort word in shared memory, for the roles that must not read global memory; null outside the
// persistent kernel.
struct Watch {
  RankControl* control;
  Status* status;
  AbortWord cta_abort;
  uint64_t timeout_ns;
  int32_t rank;
  uint32_t call;
};

MOK_DEVICE Watch make_watch(const CallParams& p, int v, AbortWord cta_abort = {}) {
  const int rank = p.rank(v);
  return {p.control(v), p.status + v, cta_abort, p.timeout_ns, rank, p.heap_control(rank)->call};
}

struct Fault {
  FaultCode code;
  FaultPhase phase;
  int32_t tile, counter, value, target;
};

MOK_DEVICE void raise_abort(const Watch& w) {
  w.cta_abort.raise();
  atomicExch(&w.control->abort, 1u);
}

// The first fault since the host last looked is kept.
MOK_DEVICE void report(const Watch& w, const Fault& f) {
  if (atomicCAS(&w.status->code, 0, static_cast<int32_t>(f.code)) == 0) {
    w.status->rank = w.rank;
    w.status->phase = static_cast<int32_t>(f.phase);
    w.status->tile = f.tile;
    w.status->counter = f.counter;
    w.status->value = f.value;
    w.status->target = f.target;
    w.status->call = static_cast<int32_t>(w.call);
    __threadfence_system();
  }
  raise_abort(w);
}

MOK_DEVICE bool aborted(const Watch& w) {
  if (load_relaxed_gpu(&w.control->abort) == 0) return false;
  w.cta_abort.raise();
  return true;
}

// Counters only grow; the difference is signed so that their width does not matter.
MOK_DEVICE bool reached(uint32_t value, uint32_t target) {
  return static_cast<int32_t>(value - target) >= 0;
}

// Until a counter of this rank has reached `target`; false = the call is given up.
MOK_DEVICE bool wait_counter(const Watch& w, const uint32_t* counter, uint32_t target,
                             FaultPhase phase, int tile, int slot) {
  uint32_t value = load_acquire_gpu(counter);
  if (reached(value, target)) return true;
  const uint64_t start = global_timer_ns();
  while (!reached(value = load_acquire_gpu(counter), target)) {
    if (aborted(w)) return false;
    if (global_timer_ns() - start > w.timeout_ns) {
      report(w, {FaultCode::kTimeout, phase, tile, slot, static_cast<int32_t>(value),
                 static_cast<int32_t>(target)});
      return false;
    }
    __nanosleep(20);
  }
  return true;
}

// mbarrier waits of roles without time keeping: they end when another role of the CTA gives up.
// Returns false then; who may not leave its loop (wgmma in flight) carries on with what is there.
MOK_DEVICE bool wait_barrier(uint64_t* barrier, uint32_t parity, AbortWord cta_abort) {
  while (!mbarrier_try_wait(barrier, parity))
    if (cta_abort.raised()) return false;
  return true;
}

// mbarrier waits of roles with time keeping: they find out when the CTA itself is stuck.
MOK_DEVICE bool wait_barrier_timed(const Watch& w, uint64_t* barrier, uint32_t parity,
                                   FaultPhase phase, int tile) {
  if (mbarrier_try_wait(barrier, parity)) return true;
  const uint64_t start = global_timer_ns();
  while (!mbarrier_try_wait(barrier, parity)) {
    if (w.cta_abort.raised() || aborted(w)) return false;
    if (global_timer_ns() - start > w.timeout_ns) {
      report(w, {FaultCode::kTimeout, phase, tile, -1, 0, 0});
      return false;
    }
  }
  return true;
}

// Test hook: a pause of 0 to 16 us that depends on the seed, the place and the thread's CTA.
MOK_DEVICE void jitter(const CallParams& p, uint32_t place) {
  if (p.hooks.jitter_seed == 0) return;
  uint32_t h = p.hooks.jitter_seed ^ (place * 0x9e3779b9u) ^ (blockIdx.x * 0x85ebca6bu);
  h = (h ^ h >> 16) * 0x7feb352du;
  h = (h ^ h >> 15) * 0x846ca68bu;
  if ((h & 0x30000) == 0) __nanosleep(h & 0x3fff);  // one place in four
}

// Test hook: whether this tile is never to begin; then until the call is given up.
MOK_DEVICE bool stuck(const CallParams& p, const Watch& w, FaultPhase phase) {
  if (static_cast<int32_t>(phase) != p.hooks.stuck_phase || blockIdx.x != 0) return false;
  while (!aborted(w)) __nanosleep(200);
  return true;
}

}  // namespace jax_mok::cuda
