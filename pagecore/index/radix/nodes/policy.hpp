// Eviction policies: the state that each component of a node keeps, and the order that a policy makes of it.
//
// Every call that changes the tree has a logical timestamp, its turn; all that the call touches shares it, and ties are
// broken by depth: the node nearer the root is evicted first. Only priorities that expire use the caller's clock, in
// seconds.
//
// Lru orders states by what they save as well, as GreedyDual does (N. Young, 1994; Arlitt et al., 2000, "dynamic
// aging"). The clock of states is the latest deadline of those that were evicted, and
//
//   deadline = clock at the last use + weight x blocks that a hit saves
//
//   a state that              weight                    blocks since
//   continues one sequence    learned                   the last state before a branch: those between go earlier
//   has a later one           learned                   the state before it
//   is before a branch        kBranchWeight x (1 + hits, up to kCountedHits)    as one that continues a sequence
//   precedes such a state     kPassedWeight             the state before it
//
// A state that continues a single sequence serves the next turn of a chat; one before a branch serves every sequence
// that begins alike, but is touched by none of them while it is missing. A state whose own sequence has kept a later
// one serves a repetition of its last turn, or a sequence that branches off there; where sequences branch off after
// a later state, they use that one. How often the first two kinds are reused differs between chats, questions about
// one text, and calls of one prompt: ReuseRates counts it, and states that are gone count as if they were there.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <limits>

#include "pagecore/index/radix/nodes/node_heap.hpp"

namespace pagecore::radix {

// By the component that is evicted first.
enum class Policy {
  Lru,       // least recently used
  Lfu,       // fewest hits, then least recently used
  Fifo,      // oldest
  Mru,       // most recently used
  Filo,      // newest
  Slru,      // not protected (see is_protected), then least recently used; EvictionQueues limits what is protected
  Priority,  // lowest priority, then least recently used
  Rank,      // lowest rank, then least recently used
};

// True if the order falls back to the last use.
[[nodiscard]] inline bool is_by_use(Policy policy) {
  return policy != Policy::Fifo && policy != Policy::Mru && policy != Policy::Filo;
}

// Weights are in sixteenths.
inline constexpr uint64_t kBranchWeight = 24 * 16;
inline constexpr uint64_t kPassedWeight = 1;
inline constexpr uint32_t kReusedWeight = 16 * 16;  // of a state that is certainly reused
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
  uint32_t weight = 0;        // of states that continue a sequence or have a later one: learned by the last use
  uint64_t clock = 0;         // of states, at the last use; it never decreases and does not change an order by `used`
  bool is_branch = false;     // of a state: sequences branch off between it and the next state
  bool has_next = false;      // of a state: the sequence that it continued has kept a later one
  bool is_passed = false;     // of a state: one before a branch follows, and no sequence branches off in between
  bool is_reused = false;     // of a state: it was hit, or would have been, since it got its kind
  int32_t after_state = 0;    // of a state: blocks since the state before it, when it was added
  int32_t after_branch = 0;   // of a state: blocks since the last state before a branch, when it was added
  int32_t evicted_after = 0;  // of a state that is gone: blocks of its prefix; 0 if it was not evicted

  // True if the weight is learned.
  [[nodiscard]] bool is_learned() const { return !is_branch && !is_passed; }
  [[nodiscard]] uint64_t deadline() const {
    if (is_branch) return clock + kBranchWeight * static_cast<uint64_t>(1 + std::min(hits, kCountedHits)) * saved();
    if (is_passed) return clock + kPassedWeight * static_cast<uint64_t>(after_state);
    return clock + weight * (has_next ? static_cast<uint64_t>(after_state) : saved());
  }
  [[nodiscard]] uint64_t saved() const { return static_cast<uint64_t>(after_branch); }
  // True after a hit, and for a state before a branch, whose prefix several sequences have used; a state that such a
  // state follows serves nothing else.
  [[nodiscard]] bool is_protected() const { return is_branch || (hits > 0 && !is_passed); }

  void expire() {
    priority = kDefaultPriority;
    expiry = kNever;
  }
};

// Shares of states that were reused, apart for those that continue a sequence and those that have a later state. A
// state counts when it is evicted or gets another kind, but not if its own sequence has just gone on. Old states fade.
// Weights have two significant bits: states of one kind go by age unless the share has changed much between them.
class ReuseRates {
 public:
  void count_end(const EvictionState& state) {
    if (!state.is_learned()) return;
    Rate& rate = of(state);
    if (++rate.ended == kMostCounted) {
      rate.ended /= 2;
      rate.reused /= 2;
    }
    rate.weigh();
  }
  void count_reuse(EvictionState& state) {
    if (!state.is_learned() || state.is_reused) return;
    state.is_reused = true;
    ++of(state).reused;
    of(state).weigh();
  }
  [[nodiscard]] uint32_t weight(const EvictionState& state) const { return rates_[state.has_next ? 1 : 0].weight; }

 private:
  struct Rate {
    Rate(uint32_t ended, uint32_t reused) : ended(ended), reused(reused) { weigh(); }
    void weigh() {
      const uint32_t share = std::max<uint32_t>(1, kReusedWeight * std::min(reused, ended) / ended);
      const int dropped = std::max(static_cast<int>(std::bit_width(share)) - 2, 0);
      weight = share >> dropped << dropped;
    }

    uint32_t ended;
    uint32_t reused;
    uint32_t weight = 1;
  };
  static constexpr uint32_t kMostCounted = 256;

  [[nodiscard]] Rate& of(const EvictionState& state) { return rates_[state.has_next ? 1 : 0]; }

  // The first assumption: most states that continue a sequence are reused, and few of the others.
  std::array<Rate, 2> rates_{Rate{16, 10}, Rate{16, 3}};
};

// The value of a prefix, as given by the caller of an insertion or a release; NaN where none is given.
struct RetentionHint {
  double priority = std::numeric_limits<double>::quiet_NaN();
  double expiry = kNever;
  double rank = std::numeric_limits<double>::quiet_NaN();

  // Keeps the higher of two priorities with its expiry, unless it has expired by `now`; of equal priorities the later
  // expiry; and the later of two ranks.
  void apply(EvictionState& eviction, double now) const {
    if (eviction.expiry <= now) eviction.expire();
    if (priority > eviction.priority || (priority == eviction.priority && expiry > eviction.expiry)) {
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

// The value of the blocks of a prefix before `end`, from the end of the range before it on.
struct HintRange {
  int64_t end = 0;
  RetentionHint hint;
};

[[nodiscard]] inline HeapKey eviction_key(Policy policy, const EvictionState& eviction, int32_t depth) {
  switch (policy) {
    case Policy::Lru: return {static_cast<double>(eviction.deadline()), eviction.used, depth};
    case Policy::Lfu: return {static_cast<double>(eviction.hits), eviction.used, depth};
    case Policy::Fifo: return {0, eviction.made, depth};
    case Policy::Mru: return {0, ~eviction.used, depth};
    case Policy::Filo: return {0, ~eviction.made, depth};
    case Policy::Slru: return {eviction.is_protected() ? 1.0 : 0.0, eviction.used, depth};
    case Policy::Priority: return {eviction.priority, eviction.used, depth};
    case Policy::Rank: return {eviction.rank, eviction.used, depth};
  }
  return {};
}

}  // namespace pagecore::radix
