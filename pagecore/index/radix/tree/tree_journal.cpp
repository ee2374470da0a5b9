#include "pagecore/index/radix/tree/tree_journal.hpp"

#include <algorithm>

namespace pagecore::radix {

void TreeJournal::start(size_t max_bytes, std::vector<ContentHash> roots) {
  PC_EXPECTS(journal_ == nullptr, UnsupportedOption,
             "the tree has a journal already; stop it, or close the publisher that started it");
  const std::vector<NodeId> order = nodes_.by_depth();
  auto journal = std::make_unique<Journal>(components_.block_size, max_bytes, std::move(roots));
  nodes_.add_hash_lanes();
  journal_ = std::move(journal);
  for (const NodeId node : order) hash_blocks(node, 0, nodes_.at(node).size);
}

void TreeJournal::take(Changes& out) noexcept {
  out.clear();
  if (journal_ != nullptr) journal_->take(out);
}

void TreeJournal::list_contents(Changes& out) const {
  PC_EXPECTS(journal_ != nullptr, UnsupportedOption, "the tree has no journal; start one first");
  out.clear();
  for (const NodeId node : nodes_.by_depth()) {
    for_each_run(node, 0, nodes_.at(node).size, [&](const StoredBlocks& stored, int32_t first) {
      append_stored(out, stored, components_.block_size, [&](int32_t i) { return nodes_.hash(node, first + i); });
    });
    if (nodes_.at(node).state == kNoState) continue;
    const int32_t last = nodes_.at(node).size - 1;
    append_stored(out, stored_blocks(components_.state(), node, last, 1), components_.block_size,
                  [&](int32_t) { return nodes_.hash(node, last); });
  }
}

// Hash of the block before block `place` of a node; the root of the namespace if it is the first of all.
ContentHash TreeJournal::hash_before(NodeId node, int32_t place) const {
  if (place > 0) return nodes_.hash(node, place - 1);
  const NodeId parent = nodes_.at(node).parent;
  if (parent < 0) return journal_->root(namespace_of(parent));
  return nodes_.hash(parent, nodes_.at(parent).size - 1);
}

void TreeJournal::hash_blocks(NodeId node, int32_t first, int32_t count) {
  ContentHash hash = hash_before(node, first);
  for (int32_t i = first; i < first + count; ++i) {
    hash = hash_block(hash, nodes_.tokens(node, i), components_.block_size, nodes_.marks(node),
                      int64_t{nodes_.at(node).start} + i);
    nodes_.set_hash(node, i, hash);
  }
}

StoredBlocks TreeJournal::stored_blocks(int32_t component, NodeId node, int32_t first, int32_t count) const {
  NodeId top = node;
  while (top >= 0) top = nodes_.at(top).parent;
  const int32_t start = nodes_.at(node).start + first;
  const std::span<const Mark> marks = nodes_.marks(node);
  const Mark* const begin = first_mark_from(marks, start);
  return {component,
          nodes_.at(node).depth + first,
          count,
          journal_->root(namespace_of(top)),
          hash_before(node, first),
          nodes_.tokens(node, first),
          {begin, first_mark_from(marks, int64_t{start} + count)},
          start};
}

// Calls `visit(stored, first)` for each run of blocks that a component has of blocks [first, first + count) of a node.
template <typename Visit>
void TreeJournal::for_each_run(NodeId node, int32_t first, int32_t count, Visit&& visit) const {
  if (components_.full_lanes > 0) visit(stored_blocks(0, node, first, count), first);
  for (int32_t w = 1; w <= components_.num_windows(); ++w) {
    const int32_t* const ids = nodes_.lane(node, components_.lane_of(w));
    const int32_t end = first + count;
    for (int32_t i = first; i < end; ++i) {
      if (ids[i] == kNullBlock) continue;
      const auto run_end = static_cast<int32_t>(std::find(ids + i, ids + end, kNullBlock) - ids);
      visit(stored_blocks(w, node, i, run_end - i), i);
      i = run_end;
    }
  }
}

void TreeJournal::add_new(NodeId node, int32_t first, int32_t count) {
  hash_blocks(node, first, count);
  for_each_run(node, first, count, [&](const StoredBlocks& stored, int32_t begin) {
    journal_->add_stored(stored, [&](int32_t i) { return nodes_.hash(node, begin + i); });
  });
}

void TreeJournal::add_stored(int32_t component, NodeId node, int32_t place) {
  journal_->add_stored(stored_blocks(component, node, place, 1), [&](int32_t) { return nodes_.hash(node, place); });
}

void TreeJournal::add_tail(NodeId leaf, int32_t blocks) noexcept {
  const int32_t size = nodes_.at(leaf).size;
  for (int32_t i = 0; components_.full_lanes > 0 && i < blocks; ++i) note_removed(0, leaf, size - 1 - i);
  for (int32_t w = 1; w <= components_.num_windows(); ++w) {
    const int32_t* const ids = nodes_.lane(leaf, components_.lane_of(w));
    for (int32_t i = size - 1; i >= size - blocks; --i) {
      if (ids[i] != kNullBlock) note_removed(w, leaf, i);
    }
  }
  if (nodes_.at(leaf).state != kNoState) note_removed(components_.state(), leaf, size - 1);
}

void TreeJournal::check_invariants() const {
  if (!is_on()) return;
  for (const NodeId node : nodes_.by_depth()) {
    ContentHash hash = hash_before(node, 0);
    for (int32_t i = 0; i < nodes_.at(node).size; ++i) {
      hash = hash_block(hash, nodes_.tokens(node, i), components_.block_size, nodes_.marks(node),
                        int64_t{nodes_.at(node).start} + i);
      PC_ASSERT(hash == nodes_.hash(node, i));
    }
  }
}

}  // namespace pagecore::radix
