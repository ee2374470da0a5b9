#include "memory.hpp"

#include <sys/mman.h>

#include <cstdio>
#include <cstring>
#include <iterator>
#include <map>

namespace emulator {

namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kArena = uint64_t{1} << 42;
constexpr uint64_t kSparse = uint64_t{1} << 28;  // from here on memory is not poisoned, so that it takes none

uint64_t arena;
uint64_t next;
std::map<uint64_t, uint64_t> regions;   // begin -> size
std::map<uint64_t, uint64_t> released;  // the same

uint64_t pages(uint64_t num_bytes) { return (num_bytes + kPage - 1) / kPage * kPage; }

const std::pair<const uint64_t, uint64_t>* find(const std::map<uint64_t, uint64_t>& among, uint64_t address) {
  auto after = among.upper_bound(address);
  if (after == among.begin()) return nullptr;
  --after;
  return address - after->first < after->second ? &*after : nullptr;
}

// What was found last, by a part of the address.
constexpr int kMemos = 16;
Region memos[kMemos];

}  // namespace

uint64_t allocate(uint64_t num_bytes) {
  if (arena == 0) {
    void* all = mmap(nullptr, kArena, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (all == MAP_FAILED) return 0;
    arena = next = reinterpret_cast<uint64_t>(all);
  }
  if (num_bytes > kArena || next - arena > kArena - num_bytes - 4 * kPage) return 0;
  const uint64_t first_page = next + kPage;
  const uint64_t begin = first_page + 256;
  const uint64_t length = pages(256 + num_bytes);
  if (mprotect(reinterpret_cast<void*>(first_page), length, PROT_READ | PROT_WRITE) != 0) return 0;
  if (num_bytes < kSparse) std::memset(reinterpret_cast<void*>(begin), 0xFF, num_bytes);
  next = first_page + length;
  regions[begin] = num_bytes;
  return begin;
}

bool release(uint64_t address) {
  const auto found = regions.find(address);
  if (found == regions.end()) return false;
  if (is_device(address)) {
    void* const first_page = reinterpret_cast<void*>(address - 256);
    const uint64_t length = pages(256 + found->second);
    madvise(first_page, length, MADV_DONTNEED);
    mprotect(first_page, length, PROT_NONE);
    released.insert(*found);
  }
  regions.erase(found);
  for (Region& memo : memos) memo = {};
  return true;
}

bool is_device(uint64_t address) { return arena != 0 && address - arena < kArena; }

void add_region(uint64_t begin, uint64_t num_bytes) { regions[begin] = num_bytes; }

Region find_region(uint64_t address) {
  Region& memo = memos[address / 256 % kMemos];
  if (memo.holds(address, 1)) return memo;
  const auto* found = find(regions, address);
  if (found == nullptr) return {};
  return memo = {found->first, found->second};
}

void describe(char* text, uint64_t size, uint64_t address, uint64_t num_bytes, Region region) {
  const auto say = [&](const char* where, uint64_t distance, uint64_t begin, uint64_t length) {
    std::snprintf(text, size, "%llu bytes %s %llu bytes at 0x%llx", static_cast<unsigned long long>(distance), where,
                  static_cast<unsigned long long>(length), static_cast<unsigned long long>(begin));
  };
  if (address == 0) {
    std::snprintf(text, size, "the null pointer");
    return;
  }
  if (region.size == 0) {
    if (const auto* old = find(released, address)) {
      return say("into the freed allocation of", address - old->first, old->first, old->second);
    }
    // The nearest one.
    auto after = regions.upper_bound(address);
    uint64_t gap = ~uint64_t{0};
    if (after != regions.end()) {
      region = {after->first, after->second};
      gap = after->first - address;
    }
    if (after != regions.begin()) {
      --after;
      if (address - (after->first + after->second) < gap) region = {after->first, after->second};
    }
  }
  if (region.size == 0) {
    std::snprintf(text, size, "where no memory is allocated");
  } else if (address < region.begin) {
    say("before the allocation of", region.begin - address, region.begin, region.size);
  } else if (address < region.begin + region.size) {
    say("before the end of the allocation of", region.begin + region.size - address, region.begin, region.size);
  } else {
    say("behind the end of the allocation of", address - (region.begin + region.size), region.begin, region.size);
  }
  (void)num_bytes;
}

void fail_access(const char* what, uint64_t address, uint64_t num_bytes, Region region, const Site& site) {
  char text[256];
  describe(text, sizeof(text), address, num_bytes, region);
  fail(site, "%s %llu bytes at 0x%llx, %s", what, static_cast<unsigned long long>(num_bytes),
       static_cast<unsigned long long>(address), text);
}

void fail_alignment(const char* what, uint64_t address, uint64_t alignment, const Site& site) {
  fail(site, "%s at 0x%llx, which is no multiple of %llu", what, static_cast<unsigned long long>(address),
       static_cast<unsigned long long>(alignment));
}

}  // namespace emulator
