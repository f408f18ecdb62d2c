// The protocol with one real thread per actor, for ThreadSanitizer: counters are the only
// synchronisation, rows and results are plain memory.
#include <mutex>
#include <thread>

#include "check.h"
#include "protocol_cases.h"

using namespace test;

namespace {

// Every actor on its own thread; "" if all went well.
std::string run_threads(World& world) {
  Crew crew(world);
  std::atomic<bool> stop{false};
  std::mutex mutex;
  std::string wrong;
  const auto report = [&](const std::string& what) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (wrong.empty()) wrong = what;
    stop = true;
  };
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  std::vector<std::thread> threads;
  for (const auto& owned : crew.actors)
    threads.emplace_back([&, actor = owned.get()] {
      try {
        while (!actor->done() && !stop.load(std::memory_order_relaxed)) {
          if (actor->step()) continue;
          if (std::chrono::steady_clock::now() > deadline)
            report("no progress in time: " + actor->where());
          std::this_thread::yield();
        }
      } catch (const Violation& e) {
        report(actor->where() + ": " + e.what());
      }
    });
  for (std::thread& thread : threads) thread.join();
  return wrong;
}

}  // namespace

TEST(threads_agree_with_the_reference) {
  Rng rng(11);
  for (int round = 0; round < 60; ++round) {
    Setup setup = random_setup(rng, 3, 12, 4);
    setup.comm_workers = std::min(setup.comm_workers, 2);
    setup.compute_workers = std::min(setup.compute_workers, 2);
    Shape& s = setup.shape;
    CHECK(check(s) == nullptr, check(s));
    const auto skew = static_cast<Skew>(round % kNumSkews);
    const Routing first(s, random_ids(rng, s, skew)), second(s, random_ids(rng, s, skew));
    std::vector<Launch> launches;
    launches.push_back(make_launch(setup, Pass::kForward, first, 1));
    launches.push_back(make_launch(setup, Pass::kBackward, first, 1));
    launches.push_back(make_launch(setup, Pass::kForward, second, 2));
    launches.push_back(make_launch(setup, Pass::kBackward, second, 2));
    World world(setup, std::move(launches), false);
    const std::string wrong = run_threads(world);
    CHECK(wrong.empty(), "round ", round, ": ", wrong, "; ", describe(s));
  }
}
