// Host threads that keep in step from place to place, and what one that is missing costs the
// others.
#include "cuda/local_meeting.h"

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "check.h"

using jax_mok::cuda::LocalMeeting;

namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Nobody leaves a place before all have come to it.
void keeps_in_step(bool named) {
  constexpr int kMembers = 4, kCalls = 2000;
  LocalMeeting meeting;
  std::vector<std::atomic<int>> come(2 * kCalls);
  for (int m = 0; m < kMembers; ++m) CHECK(meeting.join() == m);
  CHECK(meeting.num_members() == kMembers);
  std::atomic<int> early{0};
  std::vector<std::thread> threads;
  for (int m = 0; m < kMembers; ++m)
    threads.emplace_back([&, m] {
      for (int place = 0; place < 2 * kCalls; ++place) {
        ++come[place];
        meeting.pass(m, named ? 1000 + place / 2 * 7919 % kCalls : 0, place % 2, 60.0);
        if (come[place] != kMembers) ++early;
      }
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(early == 0);
}
TEST(keeps_in_step_by_ids) { keeps_in_step(true); }
TEST(keeps_in_step_by_numbers) { keeps_in_step(false); }

// One that misses calls is waited for once; then it is in step again.
TEST(misses_calls) {
  LocalMeeting meeting;
  meeting.join();
  meeting.join();
  const auto start = std::chrono::steady_clock::now();
  for (int call = 1; call <= 50; ++call)
    for (int point : {0, 1}) meeting.pass(0, call, point, 0.2);
  CHECK(seconds_since(start) >= 0.2 && seconds_since(start) < 2.0);

  std::atomic<bool> left{false};
  std::thread other([&] {
    meeting.pass(1, 51, 0, 60.0);
    left = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  CHECK(!left);
  meeting.pass(0, 51, 0, 60.0);
  other.join();
  CHECK(seconds_since(start) < 5.0);
}

// One that comes late to a call that the others have left does not wait for them there.
TEST(comes_late) {
  LocalMeeting meeting;
  meeting.join();
  meeting.join();
  for (int call = 1; call <= 3; ++call) meeting.pass(0, call, 0, 0.01);
  const auto start = std::chrono::steady_clock::now();
  for (int call = 1; call <= 3; ++call) meeting.pass(1, call, 0, 60.0);
  CHECK(seconds_since(start) < 1.0);
}

}  // namespace
