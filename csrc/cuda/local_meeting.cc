// The places of a meeting, numbered as they are first come to.
#include "cuda/local_meeting.h"

#include <algorithm>
#include <chrono>

namespace jax_mok::cuda {
namespace {

// Members are a place apart, unless one of them has missed calls.
constexpr size_t kPlaces = 256;
constexpr int kUnnamedPoint = -1;

}  // namespace

int LocalMeeting::join() {
  std::lock_guard<std::mutex> lock(mutex_);
  members_.push_back({});
  return static_cast<int>(members_.size()) - 1;
}

int LocalMeeting::num_members() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int>(members_.size());
}

void LocalMeeting::pass(int member, uint64_t call_id, int point, double seconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  // Without an id, members count their places themselves.
  const uint64_t here = call_id != 0 ? number_of(call_id, point)
                                     : number_of(++members_[member].unnamed, kUnnamedPoint);
  members_[member].reached = here;
  members_[member].missing = false;
  moved_.notify_all();
  const auto is_behind = [&](const Member& m) { return !m.missing && m.reached < here; };
  moved_.wait_for(lock, std::chrono::duration<double>(seconds),
                  [&] { return std::none_of(members_.begin(), members_.end(), is_behind); });
  for (Member& m : members_) m.missing = m.missing || is_behind(m);
}

uint64_t LocalMeeting::number_of(uint64_t call_id, int point) {
  for (auto place = places_.rbegin(); place != places_.rend(); ++place)
    if (place->call_id == call_id && place->point == point) return place->number;
  places_.push_back({call_id, point, ++last_number_});
  if (places_.size() > kPlaces) places_.pop_front();
  return last_number_;
}

}  // namespace jax_mok::cuda
