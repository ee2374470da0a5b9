// Ids that the tree holds, by lane, and the claims of insertions.
//
// Offered ids are compared with the path of the offer, block by block:
//   same id as the tree's, or null in a window   nothing
//   the tree has another id there                duplicate: stays the caller's
//   the tree has none there                      claimed: marked as held, and listed in Inserted::taken
//
// An id that is held already is refused. In a batch, another offer may have claimed it for the same prefix: claim()
// then only notes it in Suspects, for the caller to compare.
//
// I1: an id is held by at most one block of a lane; a state id by at most one node.
// I2: between calls of the tree, held ids = ids in nodes.
// States of an id: free -> held (claim) -> free (withdraw, erase).
// claim() is all or nothing; withdraw() undoes it. Cost: O(blocks from the start of the path on). Threads: one writer.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "pagecore/index/radix/nodes/node_store.hpp"
#include "pagecore/index/radix/retention/held_ids.hpp"

namespace pagecore::radix {

using Ids = std::vector<int32_t>;

struct State {
  int64_t blocks;  // of the prefix that it follows
  int32_t id;
};

// One insertion. The memory is the caller's.
struct Offer {
  Query query;
  std::vector<const int32_t*> lanes;  // one id for each whole block of the query
  std::span<const State> states;      // ascending
  RetentionHint hint;
  double time = -kNever;  // on the caller's clock
  // Values by block, in place of `hint`; the ends ascend, and the last one is not before the end of the offer.
  std::span<const HintRange> ranges = {};
};

// Result of an insertion. Lists are by lane, states last.
struct Inserted {
  int64_t blocks = 0;      // whole blocks of the query: in the tree now
  int64_t old_blocks = 0;  // in the tree before
  std::vector<Ids> taken;
  std::vector<Ids> duplicates;
  bool fills_path = false;  // some of `taken` are for blocks that were in the tree before
};

// Ids of a batch that more than one offer may have, by lane, states last.
struct Suspects {
  explicit Suspects(size_t num_lanes) : refused(num_lanes), all(num_lanes) {}

  std::vector<HeldIds> refused;  // held already when they were offered
  std::vector<HeldIds> all;      // these, and duplicates
  bool has_any = false;
};

class Claims {
 public:
  explicit Claims(const NodeStore& nodes)
      : nodes_(nodes), held_(static_cast<size_t>(nodes.components().num_lanes()) + 1) {}
  Claims(const Claims&) = delete;
  Claims& operator=(const Claims&) = delete;

  // Checks an offer against the path of its first `blocks` blocks and claims what the tree lacks. With `suspects`, ids
  // that are held already are added there instead of refused.
  void claim(const Offer& offer, int64_t blocks, const Path& path, Inserted& out, Suspects* suspects = nullptr);
  // Undoes claim(); `out` has taken nothing then.
  void withdraw(Inserted& out);
  // Throws DoubleFree: the tree holds the id at another place.
  [[noreturn]] void refuse(int32_t lane, int32_t id) const;

  // The ids of a lane, or states for num_lanes().
  [[nodiscard]] HeldIds& held(int32_t lane) { return held_[static_cast<size_t>(lane)]; }
  [[nodiscard]] const HeldIds& held(int32_t lane) const { return held_[static_cast<size_t>(lane)]; }
  [[nodiscard]] HeldIds& states() { return held_.back(); }

  void shrink() noexcept;
  [[nodiscard]] size_t nbytes() const;
  void check_invariants() const;

 private:
  void check_states(const Offer& offer, int64_t blocks) const;
  void claim_lane(const Offer& offer, int32_t lane, const Path& path, Inserted& out, Suspects* suspects);
  void claim_states(const Offer& offer, const Path& path, Inserted& out, Suspects* suspects);
  // Precondition: `taken` has room.
  void add(int32_t lane, int32_t id, int32_t min_id, Ids& taken, Suspects* suspects) {
    if (id >= min_id && held(lane).add(id)) [[likely]] {
      taken.push_back(id);
    } else {
      not_added(lane, id, min_id, suspects);
    }
  }
  void not_added(int32_t lane, int32_t id, int32_t min_id, Suspects* suspects) const;
  [[nodiscard]] const char* kind_of(int32_t lane) const {
    return lane == nodes_.components().num_lanes() ? "state " : "block ";
  }

  const NodeStore& nodes_;
  std::vector<HeldIds> held_;  // by lane, states last
};

}  // namespace pagecore::radix
