// How ranks wait for each other.
//
// All ranks make the same calls in the same order, but a rank may come late, when the others have
// given the call up, and it may miss a call, if its program fails before it. So nobody counts on
// numbers: a call goes by an id, and what peer r has written to at[r] tells a rank
//   its own id:          r is at this call;
//   an id of its past:   r is still to come;
//   any other:           r is at a call that this rank has yet to come to, or has missed.
// In the last case, and when r says so, r has given this call up, and so does the rank, which tells
// r. Either way both are at the same call again with their next one, or the one after it.
//
// A rank whose call has failed does not leave it while a peer may still be in it, which would read
// and write what belongs to the next call: it waits for all peers that have come to the call. That
// one of two sees the other (the one that comes that the other has failed, or the one that has
// failed that the other has come) is what the fences are for.
#pragma once

#include "cuda/faults.cuh"

namespace jax_mok::cuda {

// Whether this rank has been at the call, or nobody has.
MOK_DEVICE bool is_past(const HeapControl* own, uint64_t id) {
  if (id == 0) return true;
  for (uint32_t i = 0; i < kPastCalls; ++i)
    if (own->past[(own->call - i) % kPastCalls] == id) return true;
  return false;
}

// Until rank `peer` has written this call's id to `word`, a word of this rank's heap; false = the
// call is given up.
MOK_DEVICE bool wait_peer(const Watch& w, const HeapControl* own, const uint64_t* word, int peer,
                          FaultPhase phase, uint64_t timeout_ns) {
  const uint64_t start = global_timer_ns(), id = own->id;
  for (;;) {
    // In this order: a peer writes the others before it goes on to another call.
    const uint64_t at = load_acquire_sys(&own->at[peer]);
    const bool failed = load_acquire_sys(&own->failed[peer]) == id;
    const bool come = load_acquire_sys(word) == id;
    if (come && !failed) return true;
    if (failed || (at != id && !is_past(own, at))) {
      report(w, {FaultCode::kPeerFault, phase, 0, peer, failed, 1});
      return false;
    }
    if (aborted(w)) return false;
    if (global_timer_ns() - start > timeout_ns) {
      report(w, {FaultCode::kTimeout, phase, 0, peer, 0, 1});
      return false;
    }
    __nanosleep(40);
  }
}

// This rank has told that it has given the call up: until rank `peer`, if it has come to the call,
// has ended it too. The waits of a call are bounded, and so is this one.
MOK_DEVICE void wait_ended(const HeapControl* own, int peer, uint64_t timeout_ns) {
  __threadfence_system();
  const uint64_t start = global_timer_ns(), id = own->id;
  while (load_acquire_sys(&own->at[peer]) == id && load_acquire_sys(&own->pushed[peer]) != id &&
         load_acquire_sys(&own->failed[peer]) != id && global_timer_ns() - start < timeout_ns)
    __nanosleep(200);
}

}  // namespace jax_mok::cuda
