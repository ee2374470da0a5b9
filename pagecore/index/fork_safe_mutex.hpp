// A mutex that no other thread holds in the child of fork().
//
// fork() copies a mutex as it is, and in the child only the thread that forked goes on: a mutex that another thread
// held would stay locked there for ever, and what it guards half changed. So every mutex of this kind is locked before
// fork() and unlocked behind it, in both processes. Lock order: those who hold several, fork() among them, lock them in
// the order of their addresses. Creating and destroying one waits for a fork() in progress, so no mutex of this kind
// may be held meanwhile. Cost: that of std::mutex. Creating one allocates a node of a set.
#pragma once

#include <mutex>

namespace pagecore {

class ForkSafeMutex {
 public:
  ForkSafeMutex();
  ~ForkSafeMutex();
  ForkSafeMutex(const ForkSafeMutex&) = delete;
  ForkSafeMutex& operator=(const ForkSafeMutex&) = delete;

  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  std::mutex mutex_;
};

}  // namespace pagecore
