// Eviction policies: the state that each component of a node keeps, and the order that a policy makes of it.
//
// Every call that changes the tree has a logical timestamp, its turn; all that the call touches shares it, and ties are
// broken by depth: the node nearer the root is evicted first. Only priorities that expire use the caller's clock, in
// seconds.
//
// States have one rule more under Lru: a state before a branch of the tree stays for more rounds after a use, and for
// yet more after hits. Rounds age states as the web caches of Arlitt et al. (2000) age objects ("dynamic aging"): a
// round ends when every state that continues a single sequence and was used before the round has gone. A state that
// continues a single sequence serves the next turn of a chat; one before a branch serves every sequence that begins
// alike, but is touched by none of them while it is missing. A state whose own sequence has kept a later one serves
// only a repetition of its last turn: it does not outlive the round of its last use.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "pagecore/index/radix/node_heap.hpp"

namespace pagecore::radix {

// By the component that is evicted first.
enum class Policy {
  Lru,       // least recently used
  Lfu,       // fewest hits, then least recently used
  Fifo,      // oldest
  Mru,       // most recently used
  Filo,      // newest
  Slru,      // without a hit since its insertion, then least recently used
  Priority,  // lowest priority, then least recently used
  Rank,      // lowest rank, then least recently used
};

// Rounds that a state before a branch stays after a use, for itself and for each hit; other states stay one round.
inline constexpr uint64_t kBranchRounds = 32;
inline constexpr int32_t kCountedHits = 7;
inline constexpr double kDefaultPriority = 35;
inline constexpr double kNever = std::numeric_limits<double>::infinity();

struct EvictionState {
  uint64_t used = 0;  // turn of the last use
  uint64_t made = 0;  // turn of the insertion
  double priority = kDefaultPriority;
  double expiry = kNever;  // time at which the priority falls back to the default
  double rank = 0;
  int32_t hits = 0;
  uint64_t round = 0;      // of the last use; it never decreases, so that it does not change an order by `used`
  bool is_branch = false;  // of a state: sequences branch off between it and the next state
  bool has_next = false;   // of a state: the sequence that it continued has kept a later one

  // The round that ends its stay. Only states can be before branches.
  [[nodiscard]] uint64_t last_round() const {
    if (is_branch) return round + kBranchRounds * static_cast<uint64_t>(1 + std::min(hits, kCountedHits));
    return has_next ? round : round + 1;
  }

  void expire() {
    priority = kDefaultPriority;
    expiry = kNever;
  }
};

// The value of a prefix, as given by the caller of an insertion or a release; NaN where none is given.
struct RetentionHint {
  double priority = std::numeric_limits<double>::quiet_NaN();
  double expiry = kNever;
  double rank = std::numeric_limits<double>::quiet_NaN();

  // Keeps the higher of two priorities with its expiry, unless it has expired by `now`, and the later of two ranks.
  void apply(EvictionState& eviction, double now) const {
    if (eviction.expiry <= now) eviction.expire();
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

[[nodiscard]] inline HeapKey eviction_key(Policy policy, const EvictionState& eviction, int32_t depth) {
  switch (policy) {
    case Policy::Lru: return {static_cast<double>(eviction.last_round()), eviction.used, depth};
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
