// Hits of a least-recently-used prefix cache at every capacity, from one pass over the requests (stack distances;
// Mattson et al., 1970).
//
//   stack       most recent ... oldest            a cache that holds s blocks holds the first s
//   request     A B C D, of which A B C known     all move to the top, A first: ancestors are as near as descendants
//   depth(C)    blocks above C before the request; a cache that holds more blocks than that has C
//
// Requests run one after another. Each needs, for its time, one block that does not stay: its partial last block, or, if
// its last block is full and cached, a second copy of it, because the last token is computed in any case. A cache that
// was full then has a free block until a later request needs it, so that a cache for C blocks holds C or C - 1.
//
// I1: a cache for C blocks that has ever been full holds C blocks if C <= full_until_, otherwise C - 1.
// I2: owners_[s] is the block that was last used at slot s, or kNone; the tree over the slots counts the live ones.
// Sampling (SHARDS; Waldspurger et al., FAST'15): only blocks whose hash is below a threshold are followed, and the
// depth of each is divided by the rate.
// Cost: O(log n) a block; 16 bytes for a use of a block, of which at most half are not the last use. Threads: one
// writer.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <unordered_map>
#include <vector>

namespace pagecore::whatif {

struct PrefixRequest {
  std::span<const uint64_t> blocks;  // hash of each full block, which names all blocks before it, too
  int64_t first = 0;                 // blocks [first, reusable) are looked up
  int64_t reusable = 0;
  bool has_partial = false;  // a partial block follows
};

class StackDistances {
 public:
  // A rate of 1 is exact.
  explicit StackDistances(double rate) : rate_(rate) {
    threshold_ = rate >= 1 ? kEvery : static_cast<uint64_t>(std::ldexp(rate, 64));
    grow(1024);
  }

  // Adds a request; fills hits[i] with its hits in a cache of capacities[i] blocks, ascending.
  void add(const PrefixRequest& request, std::span<const int64_t> capacities, std::span<int64_t> hits) {
    std::fill(hits.begin(), hits.end(), 0);
    const auto count = static_cast<int64_t>(request.blocks.size());
    if (next_ + count > static_cast<int64_t>(owners_.size())) compact(count);
    path_.clear();
    int64_t last_depth = kNever;
    for (int64_t i = 0; i < count; ++i) {
      const uint64_t hash = request.blocks[static_cast<size_t>(i)];
      if (!is_sampled(hash)) continue;
      const auto [at, is_new] = numbers_.try_emplace(hash, static_cast<int32_t>(slots_.size()));
      if (is_new) slots_.push_back(kNone);
      path_.push_back(at->second);
      const int64_t depth = is_new ? kNever : live_ - live_until(slots_[static_cast<size_t>(at->second)]);
      if (i + 1 == count) last_depth = depth;
      if (i < request.first || i >= request.reusable) continue;
      ++num_lookups_;
      if (depth != kNever) count_hit(depth, capacities, hits);
    }
    for (const int32_t block : path_) remove(block);
    for (size_t i = path_.size(); i-- > 0;) push(path_[i]);
    if (request.has_partial) {
      full_until_ = 0;
    } else if (count > 0) {
      full_until_ = last_depth == kNever ? std::numeric_limits<int64_t>::max() : last_depth + 1;
    }
  }

  // Element c: lookups that a cache of c blocks answers and one of c - 1 does not.
  [[nodiscard]] const std::vector<int64_t>& hits() const { return hits_; }
  [[nodiscard]] int64_t num_lookups() const { return num_lookups_; }
  [[nodiscard]] int64_t num_blocks() const { return static_cast<int64_t>(slots_.size()); }

 private:
  static constexpr int64_t kNever = -1;
  static constexpr int32_t kNone = -1;
  static constexpr uint64_t kEvery = std::numeric_limits<uint64_t>::max();

  // The lowest bits of content hashes are well mixed; the product protects against hashes of other origins.
  [[nodiscard]] bool is_sampled(uint64_t hash) const {
    return threshold_ == kEvery || (hash ^ (hash >> 32)) * 0x9E3779B97F4A7C15u < threshold_;
  }

  void count_hit(int64_t depth, std::span<const int64_t> capacities, std::span<int64_t> hits) {
    int64_t enough = depth + (depth + 1 <= full_until_ ? 1 : 2);
    if (rate_ < 1) enough = std::llround(static_cast<double>(depth) / rate_) + 2;
    if (enough >= std::ssize(hits_)) hits_.resize(static_cast<size_t>(enough) + 1);
    ++hits_[static_cast<size_t>(enough)];
    const auto begin = std::lower_bound(capacities.begin(), capacities.end(), enough) - capacities.begin();
    for (auto i = static_cast<size_t>(begin); i < capacities.size(); ++i) ++hits[i];
  }

  // Binary indexed tree over the slots (Fenwick, 1994).

  [[nodiscard]] int64_t live_until(int32_t slot) const {
    int64_t sum = 0;
    for (size_t i = static_cast<size_t>(slot) + 1; i > 0; i &= i - 1) sum += counts_[i];
    return sum;
  }
  void change(int32_t slot, int32_t by) {
    for (size_t i = static_cast<size_t>(slot) + 1; i < counts_.size(); i += i & (~i + 1)) counts_[i] += by;
    live_ += by;
  }
  void remove(int32_t block) {
    int32_t& slot = slots_[static_cast<size_t>(block)];
    if (slot == kNone) return;
    change(slot, -1);
    owners_[static_cast<size_t>(slot)] = kNone;
    slot = kNone;
  }
  void push(int32_t block) {
    const auto slot = static_cast<int32_t>(next_++);
    owners_[static_cast<size_t>(slot)] = block;
    slots_[static_cast<size_t>(block)] = slot;
    change(slot, 1);
  }

  // Moves the live slots together, and makes room for `count` more and for as many uses as there are live slots.
  void compact(int64_t count) {
    int64_t used = 0;
    for (int64_t slot = 0; slot < next_; ++slot) {
      const int32_t block = owners_[static_cast<size_t>(slot)];
      if (block == kNone) continue;
      owners_[static_cast<size_t>(used)] = block;
      slots_[static_cast<size_t>(block)] = static_cast<int32_t>(used++);
    }
    next_ = used;
    grow(static_cast<size_t>(2 * used + count + 1024));
  }
  void grow(size_t size) {
    owners_.resize(size, kNone);
    std::fill(owners_.begin() + next_, owners_.end(), kNone);
    counts_.assign(size + 1, 0);
    for (size_t i = 1; i <= size; ++i) {
      counts_[i] += owners_[i - 1] == kNone ? 0 : 1;
      const size_t above = i + (i & (~i + 1));
      if (above <= size) counts_[above] += counts_[i];
    }
  }

  double rate_;
  uint64_t threshold_;
  int64_t live_ = 0;
  int64_t next_ = 0;  // slot
  int64_t num_lookups_ = 0;
  int64_t full_until_ = std::numeric_limits<int64_t>::max();
  std::unordered_map<uint64_t, int32_t> numbers_;  // block by hash
  std::vector<int32_t> slots_;                     // by block
  std::vector<int32_t> owners_;                    // by slot
  std::vector<int32_t> counts_;
  std::vector<int64_t> hits_;
  std::vector<int32_t> path_;
};

}  // namespace pagecore::whatif
