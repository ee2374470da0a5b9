// Mutex that no other thread holds in the child of fork().
//
// fork() copies a mutex as it is, and only the forking thread continues in the child: a mutex that another thread held
// would stay locked, and the data that it guards half changed. Therefore every mutex of this kind is locked before
// fork() and unlocked after it, in both processes. Lock order: several mutexes are locked in the order of their
// addresses, by callers and by fork(). Construction and destruction wait for a fork() in progress, so that the thread
// may not hold a mutex of this kind then. Cost: that of std::mutex; construction allocates a node of a set.
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
