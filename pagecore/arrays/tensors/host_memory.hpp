// One allocation of host memory, aligned for vector loads and, when large, for huge pages.
//
// Small: 64-byte aligned, with the size rounded up to 64 bytes so that a vector load of the last element stays inside.
// Large: mapped at a 2 MiB boundary with huge pages advised. The operating system supplies zeroed pages when they are
// first touched, so a large pool takes no memory until it is used.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "pagecore/native/checks.hpp"
#include "pagecore/native/rounding.hpp"

namespace pagecore {

class HostMemory {
 public:
  static constexpr size_t kAlignment = 64;
  static constexpr size_t kHugePage = size_t{1} << 21;
  static constexpr size_t kLarge = size_t{1} << 22;  // two huge pages; alignment of less could waste half
  static constexpr size_t kMost = size_t{1} << 62;

  HostMemory() = default;
  HostMemory(size_t size_bytes, bool zeroed) {
    PC_EXPECTS(size_bytes <= kMost, NotEnoughMemory, size_bytes, " bytes are requested; the limit is 2^62");
    if (size_bytes >= kLarge) {
      map(round_up(size_bytes, kHugePage));
    } else {
      take(round_up(std::max<size_t>(size_bytes, 1), kAlignment), zeroed);
    }
  }
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;
  HostMemory(HostMemory&& other) noexcept { swap(other); }
  HostMemory& operator=(HostMemory&& other) noexcept {
    swap(other);
    return *this;
  }
  ~HostMemory() {
    if (mapped_) {
      munmap(data_, size_bytes_);
    } else {
      std::free(data_);
    }
  }

  [[nodiscard]] char* data() const noexcept { return data_; }
  [[nodiscard]] size_t size_bytes() const noexcept { return size_bytes_; }

 private:
  void swap(HostMemory& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_bytes_, other.size_bytes_);
    std::swap(mapped_, other.mapped_);
  }

  void take(size_t size_bytes, bool zeroed) {
    void* address = nullptr;
    const int failed = posix_memalign(&address, kAlignment, size_bytes);
    PC_EXPECTS(failed == 0, NotEnoughMemory, "the system cannot allocate ", size_bytes, " bytes; request less");
    if (zeroed) std::memset(address, 0, size_bytes);
    data_ = static_cast<char*>(address);
    size_bytes_ = size_bytes;
  }

  // Map one extra huge page, then unmap the parts outside of the aligned range.
  void map(size_t size_bytes) {
    const size_t mapped_bytes = size_bytes + kHugePage;
    void* address = mmap(nullptr, mapped_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    PC_EXPECTS(address != MAP_FAILED, NotEnoughMemory, "the system cannot allocate ", size_bytes,
               " bytes; request less");
    char* begin = static_cast<char*>(address);
    const size_t head = (kHugePage - reinterpret_cast<uintptr_t>(begin) % kHugePage) % kHugePage;
    if (head > 0) munmap(begin, head);
    if (head < kHugePage) munmap(begin + head + size_bytes, kHugePage - head);
    data_ = begin + head;
    size_bytes_ = size_bytes;
    mapped_ = true;
    (void)madvise(data_, size_bytes, MADV_HUGEPAGE);  // a hint: a system without huge pages uses small ones
  }

  char* data_ = nullptr;
  size_t size_bytes_ = 0;
  bool mapped_ = false;
};

}  // namespace pagecore
