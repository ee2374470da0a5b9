// How worthy of staying a component of a node is.
//
// A turn is a count of calls: what one call touches has one turn, and ties fall to what stands nearer the root. Time
// (seconds, of the caller's own clock) matters to priorities that expire and to nothing else.
#pragma once

#include <cstdint>
#include <limits>

#include "pagecore/index/radix_heap.hpp"

namespace pagecore::radix {

enum class Policy {
  Lru,       // used longest ago goes first
  Lfu,       // fewest hits, then longest ago
  Fifo,      // made first
  Mru,       // used last
  Filo,      // made last
  Slru,      // never hit again since it was made, then longest ago; then the others
  Priority,  // lowest priority, then longest ago
  Rank,      // lowest rank of the caller's, then longest ago
};

inline constexpr double kDefaultPriority = 35;
inline constexpr double kNever = std::numeric_limits<double>::infinity();

struct EvictionState {
  uint64_t used = 0;  // the turn of the last use
  uint64_t made = 0;
  double priority = kDefaultPriority;
  double expiry = kNever;  // when the priority falls back to the default
  double rank = 0;
  int32_t hits = 0;
};

// What the caller says about what it inserts or releases; NaN stands for "nothing".
struct RetentionHint {
  double priority = std::numeric_limits<double>::quiet_NaN();
  double expiry = kNever;
  double rank = std::numeric_limits<double>::quiet_NaN();

  // The higher of two priorities stays, with its expiry, unless that has passed; the later of two ranks.
  void apply(EvictionState& eviction, double now) const {
    if (eviction.expiry <= now) {
      eviction.priority = kDefaultPriority;
      eviction.expiry = kNever;
    }
    if (priority >= eviction.priority) {
      eviction.priority = priority;
      eviction.expiry = expiry;
    }
    if (rank == rank) eviction.rank = rank;
  }
  void initialise(EvictionState& eviction) const {
    if (priority == priority) {
      eviction.priority = priority;
      eviction.expiry = expiry;
    }
    if (rank == rank) eviction.rank = rank;
  }
};

[[nodiscard]] inline HeapKey key_of(Policy policy, const EvictionState& eviction, int32_t depth) {
  switch (policy) {
    case Policy::Lru: return {0, eviction.used, depth};
    case Policy::Lfu: return {static_cast<double>(eviction.hits), eviction.used, depth};
    case Policy::Fifo: return {0, eviction.made, depth};
    case Policy::Mru: return {0, ~eviction.used, depth};
    case Policy::Filo: return {0, ~eviction.made, depth};
    case Policy::Slru: return {eviction.hits > 0 ? 1.0 : 0.0, eviction.used, depth};
    case Policy::Priority: return {eviction.priority, eviction.used, depth};
    case Policy::Rank: return {eviction.rank, eviction.used, depth};
  }
  return {};
}

}  // namespace pagecore::radix
