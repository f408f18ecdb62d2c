// Where the host threads of a group's devices in this process keep in step. Needs nothing of CUDA.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

namespace jax_mok::cuda {

// A place is a point of a call that all know by the same id. Members come to the places in one
// order, but a member may miss some of them: its program may fail before the call.
class LocalMeeting {
 public:
  // Once for every device, before any of them passes; its number here.
  int join();
  int num_members() const;

  // Waits until all other members have come to this place, or past it, or `seconds`: who is missing
  // then shows on the device, and is not waited for again before it moves. call_id 0: calls have no
  // ids, and the n-th place of a member is the n-th of the others.
  void pass(int member, uint64_t call_id, int point, double seconds);

 private:
  struct Place {
    uint64_t call_id;
    int point;
    uint64_t number;  // in the order in which the first member came to them
  };
  uint64_t number_of(uint64_t call_id, int point);

  mutable std::mutex mutex_;
  std::condition_variable moved_;
  std::deque<Place> places_;  // the last ones
  struct Member {
    uint64_t reached = 0;  // number of its last place
    bool missing = false;
    uint64_t unnamed = 0;  // places without an id
  };
  std::vector<Member> members_;
  uint64_t last_number_ = 0;
};

}  // namespace jax_mok::cuda
