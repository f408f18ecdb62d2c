// A very small test frame: TEST(name) { CHECK(condition, "context ", values...); }
// A failed check prints the condition, its context and its place, and ends its test.
#pragma once

#include <chrono>
#include <cstdio>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace test {

struct Case {
  const char* name;
  void (*run)();
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

struct Register {
  Register(const char* name, void (*run)()) { cases().push_back({name, run}); }
};

template <typename... Context>
[[noreturn]] void fail(const char* file, int line, const char* condition,
                       const Context&... context) {
  std::ostringstream text;
  text << file << ":" << line << ": " << condition << " is false";
  if constexpr (sizeof...(context) > 0) {
    text << "; ";
    (text << ... << context);
  }
  throw std::runtime_error(text.str());
}

inline int run_all() {
  int failed = 0;
  for (const Case& c : cases()) {
    const auto start = std::chrono::steady_clock::now();
    const char* outcome = "ok";
    try {
      c.run();
    } catch (const std::exception& e) {
      std::printf("%s\n", e.what());
      outcome = "FAILED";
      ++failed;
    }
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    std::printf("%-6s %s (%.2f s)\n", outcome, c.name, seconds.count());
    std::fflush(stdout);
  }
  return failed == 0 ? 0 : 1;
}

}  // namespace test

#define TEST(name)                                           \
  static void test_##name();                                 \
  static test::Register register_##name(#name, test_##name); \
  static void test_##name()

#define CHECK(condition, ...)                                                                \
  do {                                                                                       \
    if (!(condition)) test::fail(__FILE__, __LINE__, #condition __VA_OPT__(, ) __VA_ARGS__); \
  } while (false)

int main() { return test::run_all(); }
