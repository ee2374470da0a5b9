// Hits of a least-recently-used prefix cache at every capacity, from one pass over the requests (stack distances;
// Mattson et al., 1970).
//
//   stack       most recent ... oldest            a cache that holds s blocks holds the first s
//   request     A B C D, of which A B C known     all move to the top, A first: ancestors are as near as descendants
//   depth(C)    blocks above C before the request; a cache that holds more blocks than that has C
//
// Requests run one after another. Each needs, for its time, one block that does not stay: its partial last block, or,
// if its last block is full and cached, a second copy of it, because the last token is computed in any case. A cache
// that was full then has a free block until a later request needs it, so that a cache for C blocks holds C or C - 1.
//
// I1: a cache for C blocks that has ever been full holds C blocks if C <= full_until_, otherwise C - 1.
// I2: owners_[s] is the block that was last used at slot s, or kNone; the tree over the slots counts the live ones.
// Sampling (SHARDS; Waldspurger et al., FAST'15): if only a share of the blocks is followed, depths are divided by it.
// A call of add() that has no memory changes no count, but may leave more room.
// Cost: O(log n) a block, O(1) for one that follows its predecessor of the last use; 13 bytes a block. Threads: one
// writer.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace pagecore::whatif {

struct PrefixRequest {
  std::span<const int32_t> blocks;  // number of each full block, below 0 for blocks that are not followed
  int64_t first = 0;                // blocks [first, reusable) are looked up
  int64_t reusable = 0;
  bool has_partial = false;  // a partial block follows
};

// Set of live slots that counts those up to a slot: a bitmap, and a binary indexed tree over its words (Fenwick, 1994).
class LiveSlots {
 public:
  // Makes room for reset(), which allocates nothing then.
  void reserve(size_t size) {
    words_.reserve(size / 64 + 1);
    counts_.reserve(size / 64 + 2);
  }
  // Empties the set and makes room for `size` slots, of which the first `live` are live.
  void reset(size_t size, size_t live) {
    words_.assign(size / 64 + 1, 0);
    for (size_t i = 0; i < live; ++i) words_[i / 64] |= uint64_t{1} << (i % 64);
    counts_.assign(words_.size() + 1, 0);
    for (size_t i = 1; i < counts_.size(); ++i) {
      counts_[i] += std::popcount(words_[i - 1]);
      const size_t above = i + (i & (~i + 1));
      if (above < counts_.size()) counts_[above] += counts_[i];
    }
  }
  [[nodiscard]] int64_t count_until(int64_t slot) const {
    const auto word = static_cast<size_t>(slot) / 64;
    int64_t sum = std::popcount(words_[word] << (63 - static_cast<size_t>(slot) % 64));
    for (size_t i = word; i > 0; i &= i - 1) sum += counts_[i];
    return sum;
  }
  // Flips the bits of a word that are set in `bits`, all of which are live, or all of which are not.
  void flip(size_t word, uint64_t bits) {
    if (bits == 0) return;
    const int32_t count = std::popcount(bits);
    const int32_t by = (words_[word] & bits) != 0 ? -count : count;
    words_[word] ^= bits;
    for (size_t i = word + 1; i < counts_.size(); i += i & (~i + 1)) counts_[i] += by;
  }

 private:
  std::vector<uint64_t> words_;
  std::vector<int32_t> counts_;
};

class StackDistances {
 public:
  // `rate` is the share of the blocks that is followed; 1 is exact.
  explicit StackDistances(double rate) : rate_(rate) { resize(1024, 0); }

  // Adds a request; fills hits[i] with its hits in a cache of capacities[i] blocks, ascending.
  void add(const PrefixRequest& request, std::span<const int64_t> capacities, std::span<int64_t> hits) {
    std::fill(hits.begin(), hits.end(), 0);
    const auto count = static_cast<int64_t>(request.blocks.size());
    make_room(request);
    if (next_ + count > std::ssize(owners_)) compact(count);
    path_.clear();
    enough_.clear();
    int64_t num_new = 0, num_lookups = 0, most = 0;
    int64_t depth = kNever, below = kNone;  // of the block before, and the slot under it
    for (int64_t i = 0; i < count; ++i) {
      const int32_t block = request.blocks[static_cast<size_t>(i)];
      if (block < 0) continue;
      path_.push_back(block);
      const int64_t slot = slots_[static_cast<size_t>(block)];
      const bool is_new = slot == kNone;
      num_new += is_new ? 1 : 0;
      // Blocks of one request lie next to each other until another request uses some of them.
      depth = is_new ? kNever : slot == below ? depth + 1 : live_count_ - live_.count_until(slot);
      below = is_new ? kNone : slot - 1;
      if (i < request.first || i >= request.reusable) continue;
      ++num_lookups;
      if (depth == kNever) continue;
      enough_.push_back(enough_for(depth));
      most = std::max(most, enough_.back());
    }
    if (most >= std::ssize(hits_)) hits_.resize(static_cast<size_t>(most + most / 2) + 1);
    // Nothing fails from here on.
    num_blocks_ += num_new;
    num_lookups_ += num_lookups;
    for (const int64_t enough : enough_) count_hit(enough, capacities, hits);
    remove_path();
    push_path();
    if (request.has_partial) {
      full_until_ = 0;
    } else if (count > 0) {
      full_until_ = depth == kNever ? std::numeric_limits<int64_t>::max() : depth + 1;
    }
  }

  // Element c: lookups that a cache of c blocks answers and one of c - 1 does not.
  [[nodiscard]] const std::vector<int64_t>& hits() const { return hits_; }
  [[nodiscard]] int64_t num_lookups() const { return num_lookups_; }
  [[nodiscard]] int64_t num_blocks() const { return num_blocks_; }

 private:
  static constexpr int64_t kNever = -1;
  static constexpr int32_t kNone = -2;

  void make_room(const PrefixRequest& request) {
    path_.reserve(request.blocks.size());
    enough_.reserve(request.blocks.size());
    int32_t last = -1;
    for (const int32_t block : request.blocks) last = std::max(last, block);
    if (last >= std::ssize(slots_)) slots_.resize(static_cast<size_t>(last) + 1, kNone);
  }
  // The smallest capacity that holds a block at a depth.
  [[nodiscard]] int64_t enough_for(int64_t depth) const {
    if (rate_ < 1) return std::llround(static_cast<double>(depth) / rate_) + 2;
    return depth + (depth + 1 <= full_until_ ? 1 : 2);
  }
  void count_hit(int64_t enough, std::span<const int64_t> capacities, std::span<int64_t> hits) {
    ++hits_[static_cast<size_t>(enough)];
    for (size_t i = capacities.size(); i-- > 0 && capacities[i] >= enough;) ++hits[i];
  }

  void remove_path() {
    size_t word = 0;
    uint64_t bits = 0;
    for (const int32_t block : path_) {
      const int32_t slot = slots_[static_cast<size_t>(block)];
      if (slot == kNone) continue;
      owners_[static_cast<size_t>(slot)] = kNone;
      --live_count_;
      if (static_cast<size_t>(slot) / 64 != word) {
        live_.flip(word, bits);
        bits = 0;
        word = static_cast<size_t>(slot) / 64;
      }
      bits |= uint64_t{1} << (slot % 64);
    }
    live_.flip(word, bits);
  }
  void push_path() {
    uint64_t bits = 0;
    for (size_t i = path_.size(); i-- > 0; ++next_) {
      owners_[static_cast<size_t>(next_)] = path_[i];
      slots_[static_cast<size_t>(path_[i])] = static_cast<int32_t>(next_);
      bits |= uint64_t{1} << (next_ % 64);
      if (next_ % 64 == 63 || i == 0) {
        live_.flip(static_cast<size_t>(next_) / 64, bits);
        bits = 0;
      }
    }
    live_count_ += std::ssize(path_);
  }

  // Moves the live slots together, and makes room for `count` more and for one use of each live block.
  void compact(int64_t count) {
    const auto size = static_cast<size_t>(2 * live_count_ + count + 1024);
    owners_.reserve(size);
    live_.reserve(size);
    int64_t used = 0;
    for (int64_t slot = 0; slot < next_; ++slot) {
      const int32_t block = owners_[static_cast<size_t>(slot)];
      if (block == kNone) continue;
      owners_[static_cast<size_t>(used)] = block;
      slots_[static_cast<size_t>(block)] = static_cast<int32_t>(used++);
    }
    resize(size, used);
  }
  void resize(size_t size, int64_t used) {
    owners_.resize(size);
    std::fill(owners_.begin() + used, owners_.end(), kNone);
    live_.reset(size, static_cast<size_t>(used));
    next_ = live_count_ = used;
  }

  double rate_;
  int64_t live_count_ = 0;
  int64_t next_ = 0;  // slot
  int64_t num_lookups_ = 0;
  int64_t num_blocks_ = 0;
  int64_t full_until_ = std::numeric_limits<int64_t>::max();
  std::vector<int32_t> slots_;   // by block
  std::vector<int32_t> owners_;  // by slot
  LiveSlots live_;
  std::vector<int64_t> hits_;
  std::vector<int32_t> path_;
  std::vector<int64_t> enough_;  // of each hit of a request: the smallest capacity that has it
};

}  // namespace pagecore::whatif
