// The re-entrant lock of a cache.
//
// Owner and depth change only under the interpreter's lock (GIL). Acquiring a free lock and releasing it is therefore a
// few instructions that cannot fail and do not allocate. A thread that must wait sleeps without the GIL until the
// generation changes. Each release with waiting threads, and each notify(), starts a new generation, so that no wake-up
// is lost.
//
// A released lock goes to a thread that waits for it: others wait once, even if it is free. Else a thread that runs
// Python code between its calls would take it again before a waiting thread gets the GIL.
// Threads: wait() is called without the GIL; every other function is called with it.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <new>

namespace pagecore {

class StateLock {
 public:
  // `has_waited` is true for a thread that has slept since it asked.
  [[nodiscard]] bool try_acquire(unsigned long thread, bool has_waited) noexcept {
    if (depth_ > 0 ? owner_ != thread : is_promised_ && !has_waited) return false;
    is_promised_ = false;
    owner_ = thread;
    ++depth_;
    return true;
  }
  void release() noexcept {
    if (--depth_ > 0 || num_waiting_ == 0) return;
    is_promised_ = num_queued_ > 0;
    notify();
  }
  // Releases the lock completely before a sleep; returns the depth for resume().
  [[nodiscard]] int64_t suspend() noexcept {
    const int64_t depth = depth_;
    depth_ = 0;
    is_promised_ = num_queued_ > 0;
    if (num_waiting_ > 0) notify();
    return depth;
  }
  // Restores the depth after the lock was acquired again.
  void resume(int64_t depth) noexcept { depth_ = depth; }

  [[nodiscard]] int64_t depth() const noexcept { return depth_; }
  [[nodiscard]] uint64_t generation() const noexcept { return generation_; }
  void begin_waiting() noexcept { ++num_waiting_; }
  void end_waiting() noexcept { --num_waiting_; }
  // The same for a thread that waits for the lock itself.
  void begin_queueing() noexcept {
    begin_waiting();
    ++num_queued_;
  }
  void end_queueing() noexcept {
    end_waiting();
    --num_queued_;
  }
  [[nodiscard]] bool has_waiting() const noexcept { return num_waiting_ > 0; }
  void notify() noexcept {
    const std::lock_guard held(mutex_);
    ++generation_;
    changed_.notify_all();
  }
  // Sleeps until the generation differs from `seen`, or for 50 ms: the caller then checks for signals.
  void wait(uint64_t seen) noexcept {
    std::unique_lock held(mutex_);
    changed_.wait_for(held, std::chrono::milliseconds(50), [&] { return generation_ != seen; });
  }

  // Frees the lock in the child of a fork if another thread held it: only the forking thread exists there. No operation
  // of a cache was half done, because each one commits its changes without releasing the GIL; a scheduler settles the
  // call that the fork has cut.
  void reset_in_child(unsigned long thread) noexcept {
    new (&mutex_) std::mutex;
    new (&changed_) std::condition_variable;
    num_waiting_ = num_queued_ = 0;
    is_promised_ = false;
    if (owner_ != thread) depth_ = 0;
  }

 private:
  unsigned long owner_ = 0;
  int64_t depth_ = 0;
  int64_t num_waiting_ = 0;
  int64_t num_queued_ = 0;    // of these, for the lock itself
  bool is_promised_ = false;  // free, but for threads that have waited
  uint64_t generation_ = 0;   // changes under both locks
  std::mutex mutex_;
  std::condition_variable changed_;
};

}  // namespace pagecore
