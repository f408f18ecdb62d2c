// What the roles of a kernel are made of in a simulation: programs that stop at every wait, and
// copies that land behind their back.
#pragma once

#include <coroutine>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "cases.h"

namespace test {

// A program or a part of one that another waits for with co_await.
class [[nodiscard]] Program {
 public:
  struct promise_type {
    std::coroutine_handle<> caller = std::noop_coroutine();

    Program get_return_object() { return Program(Handle::from_promise(*this)); }
    std::suspend_always initial_suspend() noexcept { return {}; }
    auto final_suspend() noexcept {
      struct Return {
        bool await_ready() noexcept { return false; }
        std::coroutine_handle<> await_suspend(Handle self) noexcept {
          return self.promise().caller;
        }
        void await_resume() noexcept {}
      };
      return Return{};
    }
    void return_void() {}
    void unhandled_exception() { throw; }  // to whoever lets the program go on
  };
  using Handle = std::coroutine_handle<promise_type>;

  Program() = default;
  explicit Program(Handle handle) : handle_(handle) {}
  Program(Program&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Program& operator=(Program&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Program() {
    if (handle_) handle_.destroy();
  }

  bool await_ready() const { return false; }
  Handle await_suspend(std::coroutine_handle<> caller) {
    handle_.promise().caller = caller;
    return handle_;
  }
  void await_resume() const {}
  Handle handle() const { return handle_; }

 private:
  Handle handle_ = nullptr;
};

// A program under way: where it stands, and what it waits for.
class RunningProgram {
 public:
  void start(Program program) {
    program_ = std::move(program);
    stop_at(program_.handle(), nullptr);
  }
  bool done() const { return program_.handle().done(); }
  // Up to the next wait; false if it still waits.
  bool step() {
    if (done() || (condition_ && !condition_())) return false;
    at_.resume();
    return true;
  }
  void stop_at(std::coroutine_handle<> at, std::function<bool()> condition) {
    at_ = at;
    condition_ = std::move(condition);
  }

 private:
  Program program_;
  std::coroutine_handle<> at_ = nullptr;
  std::function<bool()> condition_;
};

// co_await stops the program, at least for others to act, and until the condition holds.
struct Until {
  RunningProgram& program;
  std::function<bool()> condition;

  bool await_ready() const { return false; }
  void await_suspend(std::coroutine_handle<> at) { program.stop_at(at, std::move(condition)); }
  void await_resume() const {}
};

// Bulk copies of one thread. Each reads its source at some time and writes its destination at some
// later one, in no particular order; what is told apart are groups of them.
class Copies {
 public:
  // count values: from + i goes to to[i * stride], where the mask has bits.
  struct Copy {
    const uint64_t* from;
    uint64_t* to;
    int32_t count = 1, stride = 1;
    uint64_t mask = ~uint64_t{0};
    std::function<void()> landed;
  };

  void add(Copy copy) { under_way_.push_back({std::move(copy), {}, false, groups_}); }
  void commit() { ++groups_; }
  // All but the last `groups` groups have read their sources, or written their destinations.
  bool read(uint64_t groups) const {
    for (const Moving& m : under_way_)
      if (!m.read && m.group + groups < groups_) return false;
    return true;
  }
  bool written(uint64_t groups) const {
    for (const Moving& m : under_way_)
      if (m.group + groups < groups_) return false;
    return true;
  }
  bool empty() const { return under_way_.empty(); }

  // One of them goes on.
  bool step(Rng& rng) {
    if (empty()) return false;
    const size_t i = rng() % under_way_.size();
    Moving& m = under_way_[i];
    if (!m.read) {
      m.values.assign(m.copy.from, m.copy.from + m.copy.count);
      return m.read = true;
    }
    for (int32_t k = 0; k < m.copy.count; ++k) {
      uint64_t& to = m.copy.to[int64_t{k} * m.copy.stride];
      to = (to & ~m.copy.mask) | (m.values[k] & m.copy.mask);
    }
    const std::function<void()> landed = std::move(m.copy.landed);
    under_way_.erase(under_way_.begin() + static_cast<int64_t>(i));
    if (landed) landed();
    return true;
  }

 private:
  struct Moving {
    Copy copy;
    std::vector<uint64_t> values;
    bool read;
    uint64_t group;
  };
  std::vector<Moving> under_way_;
  uint64_t groups_ = 0;
};

}  // namespace test
