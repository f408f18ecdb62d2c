// Where the devices of one call meet. A handler may not block: XLA may run the handlers of
// independent calls on the same few threads, in different orders for different devices, and a
// thread that waits for the others then waits for ever. So each arrival leaves its buffers and a
// promise and returns. The last one of a group computes for the whole group, and once every device
// has arrived and every group is done, all promises are answered: with success, or all with the
// same error, so that no device goes on alone into a collective.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cpu/layer.h"
#include "xla/ffi/api/ffi.h"

namespace jax_mok::ffi {

enum class Direction { kForward, kBackward };

// What one device brings.
struct Arrival {
  int32_t rank, group, device, meeting;  // see the operand `topology`
  int64_t world;
  Direction direction;
  cpu::LayerShape shape;
  cpu::BackwardBuffers buffers;  // the forward uses buffers.forward only
  std::string id_fault;          // what is wrong with the expert ids, or empty
};

class Meeting;

// The state of a call site: one for all devices of the process, so it tells apart the runs of the
// program (RunId), the meetings of a run, and a device's repeated calls (in a loop).
class MeetingPlace {
 public:
  static xla::ffi::TypeId id;

  MeetingPlace() = default;
  ~MeetingPlace();  // fails whoever still waits

  // Throws std::bad_alloc; otherwise faults go into the future.
  xla::ffi::Future arrive(int64_t run_id, Arrival arrival);

 private:
  struct Run {
    std::vector<int64_t> calls;                           // per device
    std::map<int64_t, std::shared_ptr<Meeting>> waiting;  // per number of the call
  };
  std::shared_ptr<Meeting> find(int64_t run_id, const Arrival& arrival);

  std::mutex mutex_;
  std::map<std::pair<int64_t, int32_t>, Run> runs_;  // per (run, meeting)
};

xla::ffi::Future failed(xla::ffi::Error error);

}  // namespace jax_mok::ffi
