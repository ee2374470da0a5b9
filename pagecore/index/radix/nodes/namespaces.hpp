// Numbers of namespaces, reused once a namespace is empty.
//
// States: free -> empty (add) <-> used (add_child, remove_child); empty -> dead (drop_if_empty) -> free (forget_dead).
// A dead namespace that gets a child is used again: next_dead() takes it off the list.
// I1: num_children_[s] is the number of nodes at the top of s, or kFree.
// I2: a namespace is in dead_ at most once. Namespace 0 never dies.
// Cost: O(1). Only add() allocates. Threads: one writer.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "pagecore/index/radix/nodes/key.hpp"
#include "pagecore/native/checks.hpp"

namespace pagecore::radix {

class Namespaces {
 public:
  Namespaces() { static_cast<void>(add()); }

  [[nodiscard]] NamespaceId add() {
    if (!free_.empty()) {
      const NamespaceId space = free_.back();
      free_.pop_back();
      num_children_[static_cast<size_t>(space)] = 0;
      return space;
    }
    constexpr size_t kMost = std::numeric_limits<NamespaceId>::max();
    PC_EXPECTS(num_children_.size() < kMost, NotEnoughMemory, kMost, " namespaces are in use; evict some");
    if (num_children_.size() == num_children_.capacity()) num_children_.reserve(num_children_.size() * 2 + 4);
    free_.reserve(num_children_.capacity());
    dead_.reserve(num_children_.capacity());
    is_in_dead_.resize(num_children_.capacity());
    num_children_.push_back(0);
    return static_cast<NamespaceId>(num_children_.size() - 1);
  }

  void add_child(NamespaceId space) noexcept { ++num_children_[static_cast<size_t>(space)]; }
  void remove_child(NamespaceId space) noexcept {
    --num_children_[static_cast<size_t>(space)];
    drop_if_empty(space);
  }
  void drop_if_empty(NamespaceId space) noexcept {
    if (space == 0 || num_children_[static_cast<size_t>(space)] != 0) return;
    if (is_in_dead_[static_cast<size_t>(space)]) return;
    is_in_dead_[static_cast<size_t>(space)] = true;
    dead_.push_back(space);
  }

  // A dead namespace, or -1.
  [[nodiscard]] NamespaceId next_dead() noexcept {
    while (!dead_.empty() && num_children_[static_cast<size_t>(dead_.back())] > 0) {
      is_in_dead_[static_cast<size_t>(dead_.back())] = false;
      dead_.pop_back();
    }
    return dead_.empty() ? -1 : dead_.back();
  }
  // Frees the number that next_dead() has just returned.
  void forget_dead() noexcept {
    const NamespaceId space = dead_.back();
    dead_.pop_back();
    is_in_dead_[static_cast<size_t>(space)] = false;
    num_children_[static_cast<size_t>(space)] = kFree;
    free_.push_back(space);
  }

  [[nodiscard]] size_t count() const { return num_children_.size(); }
  // True for numbers that add() has returned and forget_dead() has not freed.
  [[nodiscard]] bool has(NamespaceId space) const {
    return space >= 0 && static_cast<size_t>(space) < count() && num_children_[static_cast<size_t>(space)] != kFree;
  }
  // `num_children`: nodes at the top of each namespace, counted by the caller.
  void check_invariants(const std::vector<int32_t>& num_children) const {
    PC_ASSERT(num_children.size() == num_children_.size());
    for (size_t i = 0; i < num_children.size(); ++i) PC_ASSERT(num_children[i] == std::max(0, num_children_[i]));
    for (const NamespaceId space : dead_) PC_ASSERT(is_in_dead_[static_cast<size_t>(space)]);
    for (const NamespaceId space : free_) PC_ASSERT(num_children_[static_cast<size_t>(space)] == kFree);
  }

 private:
  static constexpr int32_t kFree = -1;

  std::vector<int32_t> num_children_;  // by namespace
  std::vector<uint8_t> is_in_dead_;    // by namespace
  std::vector<NamespaceId> free_;
  std::vector<NamespaceId> dead_;
};

}  // namespace pagecore::radix
