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
std::vector<Access> writes;  // [0]: no write
std::vector<Access> reads;   // [0]: no read
std::vector<Allocation*> accessed;
std::unordered_map<uint64_t, std::vector<Release>> releases;  // by the address of the atomic
bool overwriting;

// Of the block.
uint32_t number;
std::unordered_map<uint32_t, std::vector<Acquisition>> acquired;  // by the releasing block
struct ThreadState {
  uint32_t last_write = 0;
  uint32_t last_read = 0;
  uint32_t num_fences = 0;
  Epochs fenced;
  std::vector<Release> seen;  // since its last fence
};
ThreadState states[kMaxThreads];

// Returns the number of an access among `all`; `last` is the number of the thread's last one.
uint32_t number_of(std::vector<Access>& all, uint32_t& last, const Accessor& now, bool once, Site site) {
  const ThreadState& state = states[place.thread];
  const Access& before = all[last];
  if (last == 0 || before.num_fences != state.num_fences || before.when.block != now.now.block ||
      before.when.warp != now.now.warp || before.site.line() != site.line() || before.once != once) {
    last = static_cast<uint32_t>(all.size());
    all.push_back({number, place.thread, state.num_fences, now.now, site, once});
  }
  return last;
}

// Returns true if an access precedes the fence of a release of its block.
bool is_released(const Access& access, const Release& release) {
  if (access.thread == release.thread) return access.num_fences < release.num_fences;
  const Accessor releaser{release.thread / kLanes, 0, release.fenced};
  return is_ordered(access.when, access.thread / kLanes, releaser);
}

bool is_seen(const Access& access, const Accessor& now) {
  const auto found = acquired.find(access.block);
  if (found == acquired.end()) return false;
  return std::any_of(found->second.begin(), found->second.end(), [&](const Acquisition& acquisition) {
    const bool here =
        acquisition.thread == place.thread || is_ordered(acquisition.when, acquisition.thread / kLanes, now);
    return here && is_released(access, acquisition.release);
  });
}

bool comes_before(const Access& access, const Accessor& now) {
  if (access.block != number) return is_seen(access, now);
  return access.thread == place.thread || is_ordered(access.when, access.thread / kLanes, now);
}

// `what`: the present access; `did`: the earlier one.
[[noreturn]] void refuse(const char* what, uint64_t address, const char* did, const Access& access, Site site) {
  if (access.block == number) {
    fail(site, "races: it %s at 0x%llx what thread %d %s (line %u), without a barrier between", what,
         static_cast<unsigned long long>(address), access.thread, did, access.site.line());
  }
  const uint32_t x = access.block % static_cast<uint32_t>(place.num_blocks[0]);
  const uint32_t rest = access.block / static_cast<uint32_t>(place.num_blocks[0]);
  const uint32_t rows = static_cast<uint32_t>(place.num_blocks[1]);
  fail(site,
       "races: it %s at 0x%llx what block (%u, %u, %u), thread %d, %s (line %u), without a fence and an atomic "
       "on both sides",
       what, static_cast<unsigned long long>(address), x, rest % rows, rest / rows, access.thread, did,
       access.site.line());
}

// Returns memory for a number of each byte, `held` if it is not null; null if the system has none.
uint32_t* numbers_of(Allocation& allocation, uint32_t*& held) {
  if (held == nullptr) {
    void* all = mmap(nullptr, allocation.size * sizeof(uint32_t), PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (all == MAP_FAILED) return nullptr;
    held = static_cast<uint32_t*>(all);
    accessed.push_back(&allocation);
  }
  return held;
}

void release_numbers(const Allocation& allocation, uint32_t*& held) {
  if (held != nullptr) munmap(held, allocation.size * sizeof(uint32_t));
  held = nullptr;
}

// Checks a write of changed bytes against the reads of them.
void expect_read_before(const Allocation& allocation, uint64_t address, const unsigned char* after, uint32_t num_bytes,
                        const Accessor& now, Site site) {
  const uint32_t* held = allocation.reads + (address - allocation.begin);
  const unsigned char* before = reinterpret_cast<const unsigned char*>(address);
  uint32_t judged = 0;
  for (uint32_t i = 0; i < num_bytes; ++i) {
    if (held[i] == judged || held[i] == 0 || before[i] == after[i]) continue;
    judged = held[i];
    if (reads[judged].once || !comes_before(reads[judged], now)) {
      refuse("overwrites", address + i, reads[judged].once ? "reads once" : "reads", reads[judged], site);
    }
  }
}

}  // namespace

void begin_launch_of_order(bool may_overwrite) {
  writes.assign(1, {});
  reads.assign(1, {});
  releases.clear();
  overwriting = may_overwrite;
}

void begin_block_of_order(uint32_t block_number) {
  number = block_number;
  acquired.clear();
  for (int t = 0; t < place.num_threads; ++t) states[t] = {};
}

void end_launch_of_order() {
  for (Allocation* allocation : accessed) {
    release_numbers(*allocation, allocation->writes);
    release_numbers(*allocation, allocation->reads);
  }
  accessed.clear();
}

void note_device_read(const Allocation& allocation, uint64_t address, uint32_t num_bytes, bool once, Site site) {
  const Accessor now = running_thread();
  if (allocation.writes != nullptr) {
    const uint32_t* held = allocation.writes + (address - allocation.begin);
    uint32_t judged = 0;
    for (uint32_t i = 0; i < num_bytes; ++i) {
      if (held[i] == judged || held[i] == 0) continue;
      judged = held[i];
      if (once || !comes_before(writes[judged], now)) {
        refuse(once ? "reads once" : "reads", address + i, "writes", writes[judged], site);
      }
    }
  }
  Allocation& target = const_cast<Allocation&>(allocation);
  uint32_t* const all = numbers_of(target, target.reads);
  if (all == nullptr) return;
  uint32_t& last = states[place.thread].last_read;
  std::fill_n(all + (address - allocation.begin), num_bytes, number_of(reads, last, now, once, site));
}

void note_device_write(const Allocation& allocation, uint64_t address, const void* value, uint32_t num_bytes,
                       Site site) {
  Allocation& target = const_cast<Allocation&>(allocation);
  target.is_written = true;
  uint32_t* const all = numbers_of(target, target.writes);
  if (all == nullptr) return;
  uint32_t* const held = all + (address - allocation.begin);
  const Accessor now = running_thread();
  const unsigned char* before = reinterpret_cast<const unsigned char*>(address);
  const unsigned char* after = static_cast<const unsigned char*>(value);
  uint32_t judged = 0;
  for (uint32_t i = 0; i < num_bytes && !overwriting; ++i) {
    if (held[i] == judged || held[i] == 0 || before[i] == after[i]) continue;
    judged = held[i];
    if (!comes_before(writes[judged], now)) refuse("overwrites", address + i, "writes", writes[judged], site);
  }
  if (allocation.reads != nullptr && !overwriting) {
    expect_read_before(allocation, address, after, num_bytes, now, site);
  }
  std::fill_n(held, num_bytes, number_of(writes, states[place.thread].last_write, now, false, site));
}

void note_device_atomic(const Allocation& allocation, uint64_t address, uint32_t num_bytes) {
  for (uint32_t* held : {allocation.writes, allocation.reads}) {
    if (held != nullptr) std::fill_n(held + (address - allocation.begin), num_bytes, 0);
  }
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
