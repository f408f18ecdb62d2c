// Jobs stand in a list; a free worker joins the oldest one that still has work and may use another
// thread. A worker never waits for anything but work, so concurrent jobs cannot block each other.
#include "cpu/thread_pool.h"

#if defined(__linux__)
#include <sched.h>
#endif

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <list>
#include <mutex>
#include <thread>

#include "cpu/start_thread.h"

namespace jax_mok::cpu {
namespace {

// The OpenBLAS wheel is built for 64 threads: it keeps a buffer for each that is inside a call, and
// room for some more, which the threads of concurrent calls may take.
constexpr int kMostThreads = 64;

int processors() {
#if defined(__linux__)
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) return std::max(1, CPU_COUNT(&allowed));
#endif
  return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

int initial_threads() {
  if (const char* wanted = std::getenv("JAX_MOK_NUM_THREADS")) {
    const long count = std::strtol(wanted, nullptr, 10);
    if (count >= 1) return static_cast<int>(std::min<long>(count, kMostThreads));
  }
  return std::min(processors(), kMostThreads);
}

struct Job {
  Job(const std::function<void(int64_t)>& body, int64_t count, int free_places)
      : body(body), count(count), free_places(free_places) {}

  const std::function<void(int64_t)>& body;
  const int64_t count;
  int free_places;           // workers that may still join; guarded by the pool's mutex
  int workers = 0;           // workers inside; guarded by the pool's mutex
  std::exception_ptr error;  // guarded by the pool's mutex
  std::atomic<int64_t> next{0};

  bool exhausted() const { return next.load(std::memory_order_relaxed) >= count; }
};

class Pool {
 public:
  int threads() const { return threads_.load(std::memory_order_relaxed); }
  void set_threads(int count) {
    threads_ = std::min(count > 0 ? count : processors(), kMostThreads);
  }

  void run(int64_t count, const std::function<void(int64_t)>& body) {
    const int helpers = static_cast<int>(std::min<int64_t>(threads(), count)) - 1;
    if (helpers == 0) {
      for (int64_t i = 0; i < count; ++i) body(i);
      return;
    }
    Job job(body, count, helpers);
    std::unique_lock<std::mutex> lock(mutex_);
    // Where the system has no thread left, those that there are do the work.
    while (started_ < helpers && start_thread([this] { work(); })) ++started_;
    const auto place = jobs_.insert(jobs_.end(), &job);
    lock.unlock();
    for (int i = 0; i < helpers; ++i) wake_.notify_one();
    take_tasks(job);
    lock.lock();
    jobs_.erase(place);  // from here on nobody can join, and the job may leave the stack
    done_.wait(lock, [&] { return job.workers == 0; });
    if (job.error) std::rethrow_exception(job.error);
  }

 private:
  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      Job* job = nullptr;
      for (Job* candidate : jobs_) {
        if (candidate->free_places > 0 && !candidate->exhausted()) {
          job = candidate;
          break;
        }
      }
      if (job == nullptr) {
        wake_.wait(lock);
        continue;
      }
      --job->free_places;
      ++job->workers;
      lock.unlock();
      take_tasks(*job);
      lock.lock();
      if (--job->workers == 0) done_.notify_all();
    }
  }

  void take_tasks(Job& job) {
    for (;;) {
      const int64_t i = job.next.fetch_add(1, std::memory_order_relaxed);
      if (i >= job.count) return;
      try {
        job.body(i);
      } catch (...) {
        job.next.store(job.count, std::memory_order_relaxed);
        std::lock_guard<std::mutex> lock(mutex_);
        if (!job.error) job.error = std::current_exception();
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::list<Job*> jobs_;
  int started_ = 0;
  std::atomic<int> threads_{initial_threads()};
};

// Never destroyed: at exit its threads may still be waiting on it.
Pool& pool() {
  static Pool* const the_pool = new Pool;
  return *the_pool;
}

}  // namespace

int num_threads() { return pool().threads(); }
void set_num_threads(int count) { pool().set_threads(count); }
void parallel_for(int64_t count, const std::function<void(int64_t)>& body) {
  if (count > 0) pool().run(count, body);
}

}  // namespace jax_mok::cpu
