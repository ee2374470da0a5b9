#include "pagecore/index/pools/fork_safe_mutex.hpp"

#include <pthread.h>

#include <functional>
#include <ranges>
#include <set>

#include "pagecore/native/checks.hpp"

namespace pagecore {
namespace {

// Every live mutex, in the order of addresses.
struct Registry {
  std::mutex mutex;
  bool is_prepared = false;
  std::set<ForkSafeMutex*, std::less<>> living;
};

// Never destroyed: threads may use pools while the process exits, and pools may outlive static objects.
Registry& registry() {
  static Registry* const only = new Registry;
  return *only;
}

void lock_all() {
  registry().mutex.lock();
  for (ForkSafeMutex* const each : registry().living) each->lock();
}

void unlock_all() {
  for (ForkSafeMutex* const each : std::views::reverse(registry().living)) each->unlock();
  registry().mutex.unlock();
}

}  // namespace

ForkSafeMutex::ForkSafeMutex() {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  if (!all.is_prepared) all.is_prepared = pthread_atfork(lock_all, unlock_all, unlock_all) == 0;
  PC_EXPECTS(all.is_prepared, NotEnoughMemory,
             "fork handlers cannot be registered: out of memory; free some and retry");
  all.living.insert(this);
}

ForkSafeMutex::~ForkSafeMutex() {
  const std::lock_guard lock(registry().mutex);
  registry().living.erase(this);
}

}  // namespace pagecore
