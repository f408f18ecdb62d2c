// A new thread is started whenever there are more tasks than idle threads.
#include "cpu/growing_pool.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <utility>

#include "cpu/start_thread.h"

namespace jax_mok::cpu {
namespace {

class GrowingPool {
 public:
  void run(std::function<void()> task) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (tasks_.size() < idle_ || start_thread([this] { work(); })) {
        tasks_.push_back(std::move(task));
        wake_.notify_one();
        return;
      }
    }
    task();
  }

 private:
  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      while (tasks_.empty()) {
        ++idle_;
        wake_.wait(lock);
        --idle_;
      }
      std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      task = nullptr;
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> tasks_;
  size_t idle_ = 0;
};

}  // namespace

void run_detached(std::function<void()> task) {
  static GrowingPool* const pool = new GrowingPool;  // never destroyed: its threads outlive exit
  pool->run(std::move(task));
}

}  // namespace jax_mok::cpu
