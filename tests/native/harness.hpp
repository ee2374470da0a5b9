// Harness of the native drivers: named tests, printed seeds, checks, planted faults.
//
// A driver consists of test files and main.cpp. A test runs rounds. The random numbers of a round depend only on the
// seed, the test's name and the round's number, so that a failed round can be repeated alone.
#pragma once

#include <cstdint>
#include <cstdio>
#include <functional>
#include <iterator>
#include <latch>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "pagecore/native/checks.hpp"

namespace pagecore::test {

// SplitMix64 (G. Steele, D. Lea, C. Flood, 2014): the same numbers on every machine.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t bits() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
  // 0 .. limit - 1; limit > 0
  int64_t below(int64_t limit) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(limit)); }
  // low .. high, inclusive
  int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }
  bool one_in(int64_t n) { return below(n) == 0; }
  // 0 <= x < 1
  double unit() { return static_cast<double>(bits() >> 11) * 0x1p-53; }
  // mean 0, variance 1, within -6 .. 6: the sum of twelve uniform numbers
  double normal() {
    double sum = -6.0;
    for (int i = 0; i < 12; ++i) sum += unit();
    return sum;
  }
  template <typename Container>
  auto& pick(Container& from) {
    return *std::next(std::begin(from), below(static_cast<int64_t>(std::size(from))));
  }
  template <typename T>
  T pick(std::initializer_list<T> from) {
    return *(from.begin() + below(static_cast<int64_t>(from.size())));
  }
  // A seed for each of several threads.
  std::vector<uint64_t> seeds(int count) {
    std::vector<uint64_t> numbers;
    for (int i = 0; i < count; ++i) numbers.push_back(bits());
    return numbers;
  }
  template <typename T>
  void shuffle(std::vector<T>& items) {
    for (size_t i = items.size(); i > 1; --i)
      std::swap(items[i - 1], items[static_cast<size_t>(below(static_cast<int64_t>(i)))]);
  }

 private:
  uint64_t state_;
};

// Ends the process with the failure and the command that repeats it; callable from any thread.
[[noreturn]] void fail_check(const char* file, int line, const char* condition, const std::string& detail);

// Calls body(random) `count` times --scale times, or once for the round of --round.
void rounds(int64_t count, const std::function<void(Random&)>& body);

struct Registered {
  Registered(const char* name, void (*body)());
};

// A planted fault: the process must die with a report that contains `report`.
struct Planted {
  Planted(std::string name, std::string report, std::function<void()> body);
};

// Requires the call to throw an Error of that kind with a message.
template <typename Call>
void refuses(ErrorKind kind, const char* file, int line, Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    if (error.kind() != kind) fail_check(file, line, "raised another kind of error", error.what());
    if (std::string(error.what()).size() < 10) fail_check(file, line, "raised without a reason", error.what());
    return;
  }
  fail_check(file, line, "did not raise", "");
}

template <typename T>
std::string shown(std::span<const T> values) {
  std::string text = "[";
  for (const T& value : values) text += (text.size() > 1 ? " " : "") + std::to_string(value);
  return text + "]";
}
template <typename T>
std::string shown(const std::vector<T>& values) {
  return shown(std::span<const T>(values));
}

// Runs body(0) ... body(count - 1), each in its own thread, all released at the same moment.
template <typename Body>
void in_threads(int count, Body&& body) {
  std::latch start(count);
  std::vector<std::thread> threads;
  for (int who = 0; who < count; ++who) {
    threads.emplace_back([&, who] {
      start.arrive_and_wait();
      body(who);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Runs body() in a new thread, whose thread-local buffers are still empty.
template <typename Body>
void in_new_thread(Body&& body) {
  std::thread(body).join();
}

// Memory of exactly `size` elements; the sanitizer guards the bytes before and after it.
template <typename T>
class Exact {
 public:
  explicit Exact(size_t size) : size_(size), data_(new T[size]) {}
  explicit Exact(std::span<const T> values) : Exact(values.size()) {
    for (size_t i = 0; i < size_; ++i) data_[i] = values[i];
  }
  explicit Exact(const std::vector<T>& values) : Exact(std::span<const T>(values)) {}
  Exact(Exact&& other) noexcept : size_(other.size_), data_(other.data_) { other.data_ = nullptr; }
  Exact(const Exact&) = delete;
  Exact& operator=(const Exact&) = delete;
  ~Exact() { delete[] data_; }

  [[nodiscard]] T* data() { return data_; }
  [[nodiscard]] const T* data() const { return data_; }
  [[nodiscard]] size_t size() const { return size_; }
  [[nodiscard]] T& operator[](size_t i) { return data_[i]; }
  [[nodiscard]] const T& operator[](size_t i) const { return data_[i]; }
  [[nodiscard]] std::span<T> span() { return {data_, size_}; }
  [[nodiscard]] std::span<const T> span() const { return {data_, size_}; }
  [[nodiscard]] std::vector<T> copy() const { return {data_, data_ + size_}; }
  void fill(T value) {
    for (T& each : span()) each = value;
  }

 private:
  size_t size_;
  T* data_;
};

}  // namespace pagecore::test

#define PC_TEST(name)                                                        \
  static void name();                                                        \
  static const ::pagecore::test::Registered registered_##name{#name, &name}; \
  static void name()

#define PC_PLANT(name, report)                                                \
  static void name();                                                         \
  static const ::pagecore::test::Planted planted_##name{#name, report, name}; \
  static void name()

// PC_CHECK(condition, parts of the message ...)
#define PC_CHECK(condition, ...)                                                                                     \
  do {                                                                                                               \
    if (!(condition)) ::pagecore::test::fail_check(__FILE__, __LINE__, #condition, ::pagecore::concat(__VA_ARGS__)); \
  } while (false)

#define PC_REFUSES(kind, ...) \
  ::pagecore::test::refuses(::pagecore::ErrorKind::kind, __FILE__, __LINE__, [&] { __VA_ARGS__; })
