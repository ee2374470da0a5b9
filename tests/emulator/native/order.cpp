#include "order.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <vector>

#include "block.hpp"

namespace emulator {

namespace {

// Of the launch.
std::vector<Write> writes;  // [0]: no write
std::vector<Allocation*> written;
std::unordered_map<uint64_t, std::vector<Release>> releases;  // by the address of the atomic
bool overwriting;

// Of the block.
uint32_t number;
std::unordered_map<uint32_t, std::vector<Acquisition>> acquired;  // by the releasing block
struct ThreadState {
  uint32_t last_write = 0;
  uint32_t num_fences = 0;
  Epochs fenced;
  std::vector<Release> seen;  // since its last fence
};
ThreadState states[kMaxThreads];

uint32_t this_write(const Accessor& now, const Site& site) {
  ThreadState& state = states[place.thread];
  const Write& last = writes[state.last_write];
  if (state.last_write == 0 || last.num_fences != state.num_fences || last.when.block != now.now.block ||
      last.when.warp != now.now.warp || last.site.line() != site.line()) {
    state.last_write = static_cast<uint32_t>(writes.size());
    writes.push_back({number, place.thread, state.num_fences, now.now, site});
  }
  return state.last_write;
}

// Returns true if a write precedes the fence of a release of its block.
bool is_released(const Write& write, const Release& release) {
  if (write.thread == release.thread) return write.num_fences < release.num_fences;
  const Accessor releaser{release.thread / kLanes, 0, release.fenced};
  return is_ordered(write.when, write.thread / kLanes, releaser);
}

bool is_seen(const Write& write, const Accessor& now) {
  const auto found = acquired.find(write.block);
  if (found == acquired.end()) return false;
  return std::any_of(found->second.begin(), found->second.end(), [&](const Acquisition& acquisition) {
    const bool here =
        acquisition.thread == place.thread || is_ordered(acquisition.when, acquisition.thread / kLanes, now);
    return here && is_released(write, acquisition.release);
  });
}

bool comes_before(const Write& write, const Accessor& now) {
  if (write.block != number) return is_seen(write, now);
  return write.thread == place.thread || is_ordered(write.when, write.thread / kLanes, now);
}

[[noreturn]] void refuse(const char* what, uint64_t address, const Write& write, const Site& site) {
  if (write.block == number) {
    fail(site, "races: it %s at 0x%llx what thread %d writes (line %u), without a barrier between", what,
         static_cast<unsigned long long>(address), write.thread, write.site.line());
  }
  const uint32_t x = write.block % static_cast<uint32_t>(place.num_blocks[0]);
  const uint32_t rest = write.block / static_cast<uint32_t>(place.num_blocks[0]);
  const uint32_t rows = static_cast<uint32_t>(place.num_blocks[1]);
  fail(site,
       "races: it %s at 0x%llx what block (%u, %u, %u), thread %d, writes (line %u), without a fence and an atomic "
       "on both sides",
       what, static_cast<unsigned long long>(address), x, rest % rows, rest / rows, write.thread, write.site.line());
}

// Returns memory for the numbers of writes; null if the system has none.
uint32_t* numbers_of(Allocation& allocation) {
  if (allocation.writes == nullptr) {
    void* all = mmap(nullptr, allocation.size * sizeof(uint32_t), PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (all == MAP_FAILED) return nullptr;
    allocation.writes = static_cast<uint32_t*>(all);
    written.push_back(&allocation);
  }
  return allocation.writes;
}

}  // namespace

void begin_launch_of_order(bool may_overwrite) {
  writes.assign(1, {});
  releases.clear();
  overwriting = may_overwrite;
}

void begin_block_of_order(uint32_t block_number) {
  number = block_number;
  acquired.clear();
  for (int t = 0; t < place.num_threads; ++t) states[t] = {};
}

void end_launch_of_order() {
  for (Allocation* allocation : written) {
    munmap(allocation->writes, allocation->size * sizeof(uint32_t));
    allocation->writes = nullptr;
  }
  written.clear();
}

void note_device_read(const Allocation& allocation, uint64_t address, uint32_t num_bytes, const Site& site) {
  const uint32_t* held = allocation.writes + (address - allocation.begin);
  uint32_t judged = 0;
  for (uint32_t i = 0; i < num_bytes; ++i) {
    if (held[i] == judged || held[i] == 0) continue;
    judged = held[i];
    if (!comes_before(writes[judged], running_thread())) refuse("reads", address + i, writes[judged], site);
  }
}

void note_device_write(const Allocation& allocation, uint64_t address, const void* value, uint32_t num_bytes,
                       const Site& site) {
  uint32_t* const all = numbers_of(const_cast<Allocation&>(allocation));
  if (all == nullptr) return;
  uint32_t* const held = all + (address - allocation.begin);
  const Accessor now = running_thread();
  const unsigned char* before = reinterpret_cast<const unsigned char*>(address);
  const unsigned char* after = static_cast<const unsigned char*>(value);
  uint32_t judged = 0;
  for (uint32_t i = 0; i < num_bytes && !overwriting; ++i) {
    if (held[i] == judged || held[i] == 0 || before[i] == after[i]) continue;
    judged = held[i];
    if (!comes_before(writes[judged], now)) refuse("overwrites", address + i, writes[judged], site);
  }
  std::fill_n(held, num_bytes, this_write(now, site));
}

void note_device_atomic(const Allocation& allocation, uint64_t address, uint32_t num_bytes) {
  if (allocation.writes != nullptr) std::fill_n(allocation.writes + (address - allocation.begin), num_bytes, 0);
  ThreadState& state = states[place.thread];
  std::vector<Release>& here = releases[address];
  for (const Release& release : here) {
    if (release.block != number) state.seen.push_back(release);
  }
  if (state.num_fences != 0) here.push_back({number, place.thread, state.num_fences, state.fenced});
}

void fence_device() {
  ThreadState& state = states[place.thread];
  const Epochs now = running_thread().now;
  for (const Release& release : state.seen) acquired[release.block].push_back({release, place.thread, now});
  state.seen.clear();
  ++state.num_fences;
  state.fenced = now;
}

}  // namespace emulator
