// Numbers of blocks by their hashes.
#pragma once

#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

namespace pagecore::whatif {

// Numbers of hashes, in the order in which they are first seen, so that the blocks of a prefix are neighbours. Open
// addressing with linear probing. Cost: O(1), and 24 to 48 bytes a hash. Threads: one writer.
class BlockNumbers {
 public:
  // Only this share of the hashes gets numbers; 1 for all.
  explicit BlockNumbers(double rate) : entries_(1024) {
    if (rate < 1) threshold_ = static_cast<uint64_t>(std::ldexp(rate, 64));
  }

  // The number of a hash, or -1 if it is not in the sample.
  [[nodiscard]] int32_t find_or_add(uint64_t hash) {
    if (threshold_ != kEvery && mixed(hash) >= threshold_) return -1;
    if (2 * (size_ + 1) > entries_.size()) grow();
    Entry& entry = entries_[place_of(entries_, hash)];
    if (entry.number == kFree) entry = {hash, static_cast<int32_t>(size_++)};
    return entry.number;
  }
  [[nodiscard]] size_t size() const { return size_; }

 private:
  static constexpr int32_t kFree = -1;
  static constexpr uint64_t kEvery = ~uint64_t{0};
  struct Entry {
    uint64_t hash = 0;
    int32_t number = kFree;
  };

  // Hashes of other origins, such as numbers, are not mixed well.
  [[nodiscard]] static uint64_t mixed(uint64_t hash) {
    hash = (hash ^ (hash >> 32)) * 0x9E3779B97F4A7C15u;
    return hash ^ (hash >> 29);
  }
  [[nodiscard]] static size_t place_of(const std::vector<Entry>& entries, uint64_t hash) {
    size_t place = mixed(hash) >> 20;
    for (;; ++place) {
      place &= entries.size() - 1;
      if (entries[place].number == kFree || entries[place].hash == hash) return place;
    }
  }
  void grow() {
    std::vector<Entry> larger(2 * entries_.size());
    for (const Entry& entry : entries_) {
      if (entry.number != kFree) larger[place_of(larger, entry.hash)] = entry;
    }
    entries_.swap(larger);
  }

  uint64_t threshold_ = kEvery;
  size_t size_ = 0;
  std::vector<Entry> entries_;
};

}  // namespace pagecore::whatif
