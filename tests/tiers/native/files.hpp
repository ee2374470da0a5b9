// A file in memory with faults, as the file operations of the disk store see it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include "pagecore/tiers/disk/file_ops.hpp"
#include "tests/native/harness.hpp"

namespace pagecore::test {

// The operations are plain functions; they find the file here. One test runs at a time.
struct MemoryFile {
  std::mutex mutex;
  std::vector<char> bytes;
  std::atomic<int64_t> faults_in_1000{0};
  std::atomic<uint64_t> calls{0};

  static MemoryFile& only() {
    static MemoryFile file;
    return file;
  }
  void reset(size_t size) {
    const std::lock_guard lock(mutex);
    bytes.assign(size, 0);
    faults_in_1000 = 0;
  }
};

inline int64_t transfer(bool is_write, const iovec* parts, int count, int64_t offset) {
  MemoryFile& file = MemoryFile::only();
  Random random(0x5eed + file.calls.fetch_add(1));
  size_t most = SIZE_MAX;
  if (random.below(1000) < file.faults_in_1000) {
    switch (random.below(4)) {
      case 0: return -EIO;
      case 1: return -EINTR;
      case 2: return 0;
      default: most = static_cast<size_t>(random.between(1, 3)) * 512;
    }
  }
  int64_t moved = 0;
  for (int i = 0; i < count && most > 0; ++i) {
    const size_t size = std::min(parts[i].iov_len, most);
    const auto at = static_cast<size_t>(offset + moved);
    {
      const std::lock_guard lock(file.mutex);
      if (at + size > file.bytes.size()) return moved;
      if (is_write) {
        std::memcpy(file.bytes.data() + at, parts[i].iov_base, size);
      } else {
        std::memcpy(parts[i].iov_base, file.bytes.data() + at, size);
      }
    }
    moved += static_cast<int64_t>(size);
    most -= size;
  }
  return moved;
}

inline const tiers::FileOps kMemoryOps{
    [](int, const iovec* parts, int count, int64_t offset) { return transfer(false, parts, count, offset); },
    [](int, const iovec* parts, int count, int64_t offset) { return transfer(true, parts, count, offset); }};

// Payloads at multiples of 4,096 bytes, each of exactly nbytes: the sanitizer guards the bytes after it.
class Payload {
 public:
  explicit Payload(size_t nbytes) : nbytes_(nbytes), memory_(std::aligned_alloc(4096, whole(nbytes))) {
    std::memset(memory_, 0xA5, whole(nbytes));
  }
  Payload(Payload&& other) noexcept : nbytes_(other.nbytes_), memory_(other.memory_) { other.memory_ = nullptr; }
  Payload(const Payload&) = delete;
  Payload& operator=(const Payload&) = delete;
  ~Payload() { std::free(memory_); }

  [[nodiscard]] char* data() const { return static_cast<char*>(memory_); }
  void fill(uint64_t seed) {
    Random random(seed);
    for (size_t i = 0; i < nbytes_; ++i) data()[i] = static_cast<char>(random.bits());
  }
  [[nodiscard]] bool holds(uint64_t seed) const {
    Payload other(nbytes_);
    other.fill(seed);
    return std::memcmp(data(), other.data(), nbytes_) == 0;
  }
  [[nodiscard]] bool rest_is_untouched() const {
    for (size_t i = nbytes_; i < whole(nbytes_); ++i) {
      if (static_cast<unsigned char>(data()[i]) != 0xA5) return false;
    }
    return true;
  }

 private:
  static size_t whole(size_t nbytes) { return (nbytes + 4095) / 4096 * 4096; }

  size_t nbytes_;
  void* memory_;
};

}  // namespace pagecore::test
