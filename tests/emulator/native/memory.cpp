#include "memory.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <map>
#include <vector>

#include "block.hpp"

namespace emulator {

namespace {

const uint64_t kPage = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
constexpr uint64_t kMost = uint64_t{1} << 42;    // of one allocation
constexpr uint64_t kArena = uint64_t{1} << 36;   // of addresses reserved at a time
constexpr uint64_t kSparse = uint64_t{1} << 28;  // larger allocations are not poisoned, so that their pages stay unused

struct Arena {
  uint64_t begin;
  uint64_t size;
};
std::vector<Arena> arenas;
uint64_t next;  // free address in the last arena
uint64_t end;

using Allocations = std::map<uint64_t, Allocation>;  // by first address
Allocations live;
Allocations released;

uint64_t pages(uint64_t num_bytes) { return (num_bytes + kPage - 1) / kPage * kPage; }

// Returns the first allocation after an address, and the last one that begins at or before it; null if there is none.
std::array<const Allocation*, 2> neighbours(const Allocations& among, uint64_t address) {
  const auto after = among.upper_bound(address);
  return {after != among.end() ? &after->second : nullptr,
          after != among.begin() ? &std::prev(after)->second : nullptr};
}

// Returns the bytes from an allocation to an address; 0 inside it.
uint64_t distance(const Allocation& allocation, uint64_t address) {
  if (address < allocation.begin) return allocation.begin - address;
  const uint64_t offset = address - allocation.begin;
  return offset < allocation.size ? 0 : offset - allocation.size;
}

bool reserve(uint64_t num_bytes) {
  const uint64_t size = std::max(num_bytes, kArena);
  void* all = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (all == MAP_FAILED) return false;
  next = reinterpret_cast<uint64_t>(all);
  end = next + size;
  arenas.push_back({next, size});
  return true;
}

// The last results of find_allocation, by bits of the address.
constexpr int kMemos = 16;
const Allocation* memos[kMemos];

}  // namespace

uint64_t allocate(uint64_t num_bytes) {
  if (num_bytes > kMost) return 0;
  const uint64_t length = pages(256 + num_bytes);
  if (end - next < length + 2 * kPage && !reserve(length + 2 * kPage)) return 0;
  const uint64_t first_page = next + kPage;
  const uint64_t begin = first_page + 256;
  if (mprotect(reinterpret_cast<void*>(first_page), length, PROT_READ | PROT_WRITE) != 0) return 0;
  if (num_bytes < kSparse) std::memset(reinterpret_cast<void*>(begin), 0xFF, num_bytes);
  next = first_page + length;
  live[begin] = {begin, num_bytes};
  return begin;
}

bool release(uint64_t address) {
  const auto found = live.find(address);
  if (found == live.end()) return false;
  if (is_device(address)) {
    void* const first_page = reinterpret_cast<void*>(address - 256);
    const uint64_t length = pages(256 + found->second.size);
    madvise(first_page, length, MADV_DONTNEED);
    mprotect(first_page, length, PROT_NONE);
    released.insert(*found);
  }
  live.erase(found);
  std::fill_n(memos, kMemos, nullptr);
  return true;
}

bool is_device(uint64_t address) {
  return std::any_of(arenas.begin(), arenas.end(), [&](const Arena& a) { return address - a.begin < a.size; });
}

void add_host_memory(uint64_t begin, uint64_t num_bytes) { live[begin] = {begin, num_bytes}; }

const Allocation* find_allocation(uint64_t address) {
  const Allocation*& memo = memos[address / 256 % kMemos];
  if (memo != nullptr && memo->holds(address, 1)) return memo;
  const Allocation* found = neighbours(live, address)[1];
  if (found == nullptr || !found->holds(address, 1)) return nullptr;
  return memo = found;
}

void describe(char* text, uint64_t size, uint64_t address, const Allocation* allocation) {
  if (address < uint64_t{1} << 16) {
    std::snprintf(text, size, "at or near the null pointer");
    return;
  }
  bool freed = false;
  if (allocation == nullptr) {  // the nearest one
    uint64_t least = ~uint64_t{0};
    for (const Allocations* among : {&live, &released}) {
      for (const Allocation* candidate : neighbours(*among, address)) {
        if (candidate == nullptr || distance(*candidate, address) >= least) continue;
        least = distance(*candidate, address);
        allocation = candidate;
        freed = among == &released;
      }
    }
  }
  if (allocation == nullptr) {
    std::snprintf(text, size, "where no memory is allocated");
    return;
  }
  const uint64_t offset = address - allocation->begin;
  const char* where = "after the end of";
  uint64_t gap = distance(*allocation, address);
  if (address < allocation->begin) {
    where = "before";
  } else if (offset < allocation->size) {
    where = freed ? "into" : "before the end of";
    gap = freed ? offset : allocation->size - offset;
  }
  std::snprintf(text, size, "%llu bytes %s the %sallocation of %llu bytes at 0x%llx",
                static_cast<unsigned long long>(gap), where, freed ? "freed " : "",
                static_cast<unsigned long long>(allocation->size), static_cast<unsigned long long>(allocation->begin));
}

void fail_access(const char* what, uint64_t address, uint64_t num_bytes, const Allocation* allocation, Site site) {
  char text[256];
  describe(text, sizeof(text), address, allocation);
  fail(site, "%s %llu bytes at 0x%llx, %s", what, static_cast<unsigned long long>(num_bytes),
       static_cast<unsigned long long>(address), text);
}

void fail_endless(Site site) {
  fail(site, "has made %u accesses to device memory without a barrier or collective: does it wait for another block?",
       kMaxAccesses);
}

void fail_alignment(const char* what, uint64_t address, uint64_t alignment, Site site) {
  fail(site, "%s at 0x%llx, which is not a multiple of %llu", what, static_cast<unsigned long long>(address),
       static_cast<unsigned long long>(alignment));
}

}  // namespace emulator
