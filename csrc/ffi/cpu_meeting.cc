// The meeting itself, its deadline, and the answers.
#include "ffi/cpu_meeting.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <new>
#include <system_error>
#include <thread>
#include <utility>

#include "cpu/growing_pool.h"

namespace jax_mok::ffi {

namespace xffi = xla::ffi;
using Clock = std::chrono::steady_clock;

xffi::TypeId MeetingPlace::id = {};

namespace {

// How long the devices of a meeting wait for each other before all fail; 0 = for ever. They run one
// program in one process, so they are apart by what one computes, never by a compilation.
double timeout_seconds() {
  static const double seconds = [] {
    const char* wanted = std::getenv("JAX_MOK_TIMEOUT_SECONDS");
    char* end = nullptr;
    const double value = wanted != nullptr ? std::strtod(wanted, &end) : 0.0;
    return wanted != nullptr && end != wanted && value >= 0.0 ? value : 600.0;
  }();
  return seconds;
}

void answer(xffi::Promise promise, const std::optional<xffi::Error>& error) {
  if (error)
    promise.SetError(*error);
  else
    promise.SetAvailable();
}

// Runs the engine for one group; returns what went wrong.
std::optional<xffi::Error> compute(const std::vector<std::optional<Arrival>>& members) {
  try {
    const Arrival& any = *members.front();
    if (any.direction == Direction::kForward) {
      std::vector<cpu::ForwardBuffers> ranks;
      for (const auto& member : members) ranks.push_back(member->buffers.forward);
      cpu::forward(any.shape, ranks);
    } else {
      std::vector<cpu::BackwardBuffers> ranks;
      for (const auto& member : members) ranks.push_back(member->buffers);
      cpu::backward(any.shape, ranks);
    }
    return std::nullopt;
  } catch (const std::bad_alloc&) {
    return xffi::Error(xffi::ErrorCode::kResourceExhausted,
                       "jax_mok: the CPU engine found no memory for its rings and slots; a smaller "
                       "macrobatch_size or fewer tokens need less");
  } catch (const std::exception& e) {
    return xffi::Error::Internal(std::string("jax_mok: ") + e.what());
  }
}

}  // namespace

xffi::Future failed(xffi::Error error) {
  xffi::Promise promise;
  xffi::Future future(promise);
  promise.SetError(std::move(error));
  return future;
}

class Meeting {
 public:
  Meeting(int64_t world, int32_t num_ranks)
      : world_(world), groups_(static_cast<size_t>(world / num_ranks)) {
    for (Group& group : groups_) group.members.resize(num_ranks);
  }

  // True if this was the last device that the meeting waits for.
  bool join(Arrival arrival, xffi::Future* future) {
    xffi::Promise promise;
    *future = xffi::Future(promise);
    const int32_t rank = arrival.rank, device = arrival.device;
    std::vector<Answer> answers;
    std::unique_lock<std::mutex> lock(mutex_);
    ++arrived_;
    const bool last = arrived_ == world_;
    if (expired_) {
      answer(promise, expired_);
      return last;
    }
    Group& group = groups_[arrival.group];
    group.promises.emplace_back(device, std::move(promise));
    if (group.members[rank]) {  // it may be in use: the group may be computing
      note_fault(device, xffi::Error::InvalidArgument(
                             "jax_mok: topology: two devices say they are rank " +
                             std::to_string(rank) + " of group " + std::to_string(arrival.group)));
    } else {
      if (!arrival.id_fault.empty()) {
        note_fault(device, xffi::Error::InvalidArgument("jax_mok.moe: " + arrival.id_fault));
        group.faulty = true;
      }
      group.members[rank] = std::move(arrival);
      if (++group.num_members == group.members.size()) {
        if (!group.faulty) {
          group.computing = true;
          ++num_computing_;
          lock.unlock();
          std::optional<xffi::Error> problem = compute(group.members);
          lock.lock();
          group.computing = false;
          --num_computing_;
          if (problem) note_fault(device, *problem);
        }
        if (expired_) take_answers(group, &answers);
      }
    }
    if (!expired_ && arrived_ == world_ && num_computing_ == 0) {
      for (Group& each : groups_) take_answers(each, &answers);
    }
    lock.unlock();
    give(std::move(answers), device);
    return last;
  }

  // Everyone that waits gets this error, and so does who comes later. A group that is being
  // computed is answered when that has ended, for until then its buffers are in use.
  void expire(const char* reason) {
    std::vector<Answer> answers;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (expired_ || arrived_ == world_) return;
      expired_ = xffi::Error(xffi::ErrorCode::kDeadlineExceeded, describe(reason));
      for (Group& group : groups_)
        if (!group.computing) take_answers(group, &answers);
    }
    give(std::move(answers), -1);
  }

 private:
  struct Group {
    std::vector<std::optional<Arrival>> members;              // by rank
    std::vector<std::pair<int32_t, xffi::Promise>> promises;  // with their device
    size_t num_members = 0;
    bool faulty = false, computing = false;
  };
  struct Answer {
    int32_t device;
    xffi::Promise promise;
    std::optional<xffi::Error> error;
  };

  // All devices get the fault of the lowest one, whoever came first.
  void note_fault(int32_t device, xffi::Error error) { faults_.emplace(device, std::move(error)); }

  void take_answers(Group& group, std::vector<Answer>* answers) {
    std::optional<xffi::Error> error = expired_;
    if (!error && !faults_.empty()) error = faults_.begin()->second;
    for (auto& [device, promise] : group.promises)
      answers->push_back({device, std::move(promise), error});
    group.promises.clear();
  }

  // The calling device's own promise is answered here: its handler has not returned, so nobody
  // waits on it yet. Any other one may run whatever XLA has queued behind it, collectives included,
  // in the thread that answers, and that must hold up neither this thread nor the next answer.
  // Nor may it happen under the lock: what is behind an answer may be the end of the program.
  static void give(std::vector<Answer> answers, int32_t own_device) {
    for (Answer& each : answers)
      if (each.device == own_device) answer(each.promise, each.error);
    for (Answer& each : answers)
      if (each.device != own_device)
        cpu::run_detached([each = std::move(each)] { answer(each.promise, each.error); });
  }

  std::string describe(const char* reason) const {
    std::string present;
    for (const Group& group : groups_)
      for (const auto& [device, promise] : group.promises)
        present += (present.empty() ? "" : ", ") + std::to_string(device);
    return std::string("jax_mok: ") + reason + ": " + std::to_string(arrived_) + " of " +
           std::to_string(world_) + " devices came to the call (those with index " + present +
           "); the others failed earlier, or do not run this program";
  }

  const int64_t world_;
  std::mutex mutex_;
  std::vector<Group> groups_;
  int64_t arrived_ = 0;
  int num_computing_ = 0;
  std::map<int32_t, xffi::Error> faults_;
  std::optional<xffi::Error> expired_;
};

namespace {

// Ends meetings whose time is up. Its thread starts with the first meeting and sleeps until the
// earliest deadline.
class Watch {
 public:
  void add(const std::shared_ptr<Meeting>& meeting) {
    const double seconds = timeout_seconds();
    if (seconds <= 0.0) return;
    const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                             std::chrono::duration<double>(std::min(seconds, 1e8)));
    std::lock_guard<std::mutex> lock(mutex_);
    drop_ended();  // else those of the last ten minutes would pile up
    const bool is_first = deadlines_.empty() || deadline < deadlines_.begin()->first;
    deadlines_.emplace(deadline, meeting);
    if (!running_)
      start();
    else if (is_first)
      wake_.notify_one();
  }

 private:
  // Not on the pool's threads: where the system has none left, a task of the pool runs in its
  // caller. Then meetings go unwatched until a thread can be had.
  void start() {
    try {
      std::thread([this] { work(); }).detach();
      running_ = true;
    } catch (const std::system_error&) {
    }
  }

  // From the earliest deadline on, as far as the meetings have ended.
  void drop_ended() {
    while (!deadlines_.empty() && deadlines_.begin()->second.expired())
      deadlines_.erase(deadlines_.begin());
  }

  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      drop_ended();
      if (deadlines_.empty()) {
        wake_.wait(lock);
        continue;
      }
      const auto first = deadlines_.begin();
      if (Clock::now() < first->first) {
        const Clock::time_point until = first->first;
        wake_.wait_until(lock, until);
        continue;
      }
      const std::shared_ptr<Meeting> meeting = first->second.lock();
      deadlines_.erase(first);
      lock.unlock();
      if (meeting) meeting->expire("not all devices came in time");
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::multimap<Clock::time_point, std::weak_ptr<Meeting>> deadlines_;
  bool running_ = false;
};

Watch& watch() {
  static Watch* const the_watch = new Watch;  // never destroyed: its thread outlives exit
  return *the_watch;
}

}  // namespace

MeetingPlace::~MeetingPlace() {
  for (auto& [key, run] : runs_)
    for (auto& [call, meeting] : run.waiting) meeting->expire("the program was discarded");
}

std::shared_ptr<Meeting> MeetingPlace::find(int64_t run_id, const Arrival& arrival) {
  std::lock_guard<std::mutex> lock(mutex_);
  Run& run = runs_[{run_id, arrival.meeting}];
  if (run.calls.empty()) run.calls.resize(arrival.world, 0);
  const int64_t call = run.calls[arrival.device]++;
  std::shared_ptr<Meeting>& meeting = run.waiting[call];
  if (!meeting) {
    meeting = std::make_shared<Meeting>(arrival.world, arrival.shape.num_ranks);
    if (arrival.world > 1) watch().add(meeting);
  }
  return meeting;
}

xffi::Future MeetingPlace::arrive(int64_t run_id, Arrival arrival) {
  const int32_t index = arrival.meeting;
  const std::shared_ptr<Meeting> meeting = find(run_id, arrival);
  xffi::Promise unused;
  xffi::Future future(unused);
  if (meeting->join(std::move(arrival), &future)) {
    // All devices have been here: the next call of any of them is a later one.
    std::lock_guard<std::mutex> lock(mutex_);
    const auto run = runs_.find({run_id, index});
    for (auto it = run->second.waiting.begin(); it != run->second.waiting.end(); ++it) {
      if (it->second != meeting) continue;
      run->second.waiting.erase(it);
      break;
    }
    // With nobody waiting, all have made the same number of calls, and counting may start anew.
    if (run->second.waiting.empty()) runs_.erase(run);
  }
  return future;
}

}  // namespace jax_mok::ffi
