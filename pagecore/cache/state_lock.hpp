// The re-entrant lock of a cache.
//
// Owner and depth change under the interpreter's lock alone, so that taking a free lock, and giving one back, is a few
// instructions that cannot fail and allocate nothing. A thread that must wait sleeps without the interpreter's lock
// until the generation changes: each release, and each notify(), makes a new one, so that no wake-up is lost.
// Threads: wait() by any thread without the interpreter's lock; everything else by threads that hold it.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <new>

namespace pagecore {

class StateLock {
 public:
  [[nodiscard]] bool try_acquire(unsigned long thread) noexcept {
    if (depth_ > 0 && owner_ != thread) return false;
    owner_ = thread;
    ++depth_;
    return true;
  }
  void release() noexcept {
    if (--depth_ == 0 && num_waiting_ > 0) notify();
  }
  // Gives the lock back however often it is held, to sleep; returns the depth for resume().
  [[nodiscard]] int64_t suspend() noexcept {
    const int64_t depth = depth_;
    depth_ = 0;
    if (num_waiting_ > 0) notify();
    return depth;
  }
  // The lock was acquired again after suspend().
  void resume(int64_t depth) noexcept { depth_ = depth; }

  [[nodiscard]] uint64_t generation() const noexcept { return generation_; }
  void begin_waiting() noexcept { ++num_waiting_; }
  void end_waiting() noexcept { --num_waiting_; }
  [[nodiscard]] bool has_waiting() const noexcept { return num_waiting_ > 0; }
  void notify() noexcept {
    const std::lock_guard held(mutex_);
    ++generation_;
    changed_.notify_all();
  }
  // Until the generation is another than `seen`, or 50 ms have passed: the caller looks for signals then.
  void wait(uint64_t seen) noexcept {
    std::unique_lock held(mutex_);
    changed_.wait_for(held, std::chrono::milliseconds(50), [&] { return generation_ != seen; });
  }

  // In the child of a fork, whose only thread is the one that forked: others held or awaited the lock in vain. No
  // operation was half done, since each makes its changes without giving up the interpreter's lock.
  void reset_in_child(unsigned long thread) noexcept {
    new (&mutex_) std::mutex;
    new (&changed_) std::condition_variable;
    num_waiting_ = 0;
    if (owner_ != thread) depth_ = 0;
  }

 private:
  unsigned long owner_ = 0;
  int64_t depth_ = 0;
  int64_t num_waiting_ = 0;
  uint64_t generation_ = 0;  // changes under both locks
  std::mutex mutex_;
  std::condition_variable changed_;
};

}  // namespace pagecore
