// Memory that all ranks of an expert-parallel group can read and write: the heap of every rank, as
// addressed from this device.
//
// With several devices a heap is NCCL memory, registered as a symmetric window on XLA's own
// communicator; the peers' addresses are read off the window once. With one rank, or virtual ranks,
// it is plain device memory. Heaps are made in XLA's Initialize stage only, where no kernel of this
// program runs yet, by all ranks of a group alike; all calls of a (device, group) share them.
//
// A heap never moves and is never given back before the process ends: calls that are under way, on
// this device or a peer, use it. A call whose needs no heap meets yet gets a new, larger one, and
// which one a call uses depends on nothing but the sizes that were asked for until then, in their
// order, which is the same on all ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/forward.h"
#include "cuda/local_meeting.h"
#include "cuda/nccl_library.h"

namespace jax_mok::cuda {

// Names the calls on a heap so that all ranks know each by the same id: by the run of the program
// that it belongs to, and by its place there.
class CallIds {
 public:
  // The next call of a run.
  uint64_t next(int64_t run);

 private:
  struct Run {
    int64_t run;
    uint64_t calls;
  };
  std::mutex mutex_;
  std::deque<Run> runs_;  // the last ones
};

struct PeerHeap {
  int device = 0;
  int rank = 0;  // of this device; 0 with virtual ranks
  int num_ranks = 1;
  int num_virtual_ranks = 1;
  size_t bytes = 0;              // of one rank
  size_t used = 0;               // the most that a call has asked for
  std::vector<void*> addresses;  // heap of every rank
  Status* status = nullptr;      // [num_virtual_ranks], host memory that the device can write
  // All null with one rank or virtual ranks. A stream beside the call's, for CallStage::kCopy:
  // where it begins, and where the call goes on.
  cudaStream_t copy_stream = nullptr;
  cudaEvent_t published = nullptr, copied = nullptr;
  std::shared_ptr<LocalMeeting> meeting;
  int member = 0;  // this device's number there
  std::shared_ptr<CallIds> ids;
};

struct HeapNeed {
  int num_ranks = 1;
  int num_virtual_ranks = 1;
  size_t bytes = 0;          // of one rank
  NcclComm* comm = nullptr;  // null with one rank or virtual ranks
  int64_t run = kNoRun;      // XLA's id of this run of the program: tells whether ranks agree on it
  static constexpr int64_t kNoRun = -1;
};

// Both work on the current device. They return what is wrong, or an empty string and the heap.
// `make_heap` is collective over the communicator's ranks the first time that it sees a need, and
// blocks; `find_heap` only looks up what `make_heap` made.
std::string make_heap(const HeapNeed& need, const PeerHeap** heap);
std::string find_heap(const HeapNeed& need, const PeerHeap** heap);

// Every heap of this process.
std::vector<PeerHeap> all_heaps();

// Calls that have begun on a heap; waits for nothing.
uint32_t num_calls(const PeerHeap& heap);

// The next call on a heap, in this run of the program: ForwardBuffers::call_id.
uint64_t next_call_id(const PeerHeap& heap, int64_t run);

// The faults reported since this was last asked; clears them. Meant for after a synchronisation:
// a call that still runs may report later.
std::vector<Status> take_faults();

}  // namespace jax_mok::cuda
