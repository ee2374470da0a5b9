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

struct Standing {
  uint64_t used = 0;  // the turn of the last use
  uint64_t made = 0;
  double priority = kDefaultPriority;
  double expiry = kNever;  // when the priority falls back to the default
  double rank = 0;
  int32_t hits = 0;
};

// What the caller says about what it inserts or releases; NaN stands for "nothing".
struct Wish {
  double priority = std::numeric_limits<double>::quiet_NaN();
  double expiry = kNever;
  double rank = std::numeric_limits<double>::quiet_NaN();

  // The higher of two priorities stays, with its expiry, unless that has passed; the later of two ranks.
  void apply(Standing& standing, double now) const {
    if (standing.expiry <= now) {
      standing.priority = kDefaultPriority;
      standing.expiry = kNever;
    }
    if (priority >= standing.priority) {
      standing.priority = priority;
      standing.expiry = expiry;
    }
    if (rank == rank) standing.rank = rank;
  }
  void found(Standing& standing) const {
    if (priority == priority) {
      standing.priority = priority;
      standing.expiry = expiry;
    }
    if (rank == rank) standing.rank = rank;
  }
};

[[nodiscard]] inline HeapKey key_of(Policy policy, const Standing& standing, int32_t depth) {
  switch (policy) {
    case Policy::Lru: return {0, standing.used, depth};
    case Policy::Lfu: return {static_cast<double>(standing.hits), standing.used, depth};
    case Policy::Fifo: return {0, standing.made, depth};
    case Policy::Mru: return {0, ~standing.used, depth};
    case Policy::Filo: return {0, ~standing.made, depth};
    case Policy::Slru: return {standing.hits > 0 ? 1.0 : 0.0, standing.used, depth};
    case Policy::Priority: return {standing.priority, standing.used, depth};
    case Policy::Rank: return {standing.rank, standing.used, depth};
  }
  return {};
}

}  // namespace pagecore::radix
