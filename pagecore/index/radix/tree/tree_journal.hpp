// The journal of a tree: content hashes of blocks, and the changes that they name. Off by default.
//
// With a journal, storages have two more lanes with the halves of each block's hash, so that splits, joins and
// compaction move the hashes along with the blocks. note_...() do nothing without a journal, and never fail.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "pagecore/index/radix/nodes/node_store.hpp"
#include "pagecore/index/radix/tree/journal.hpp"

namespace pagecore::radix {

class TreeJournal {
 public:
  explicit TreeJournal(NodeStore& nodes) : nodes_(nodes) {}
  TreeJournal(const TreeJournal&) = delete;
  TreeJournal& operator=(const TreeJournal&) = delete;

  // Hashes every block that the tree has. `roots` are the hashes of the namespaces by number.
  void start(size_t max_bytes, std::vector<ContentHash> roots);
  void stop() noexcept { journal_.reset(); }
  [[nodiscard]] bool is_on() const { return journal_ != nullptr; }
  void set_root(NamespaceId space, ContentHash root) { journal_->set_root(space, root); }
  // Appends the roots that the changes since the last take() name.
  void list_roots(std::vector<ContentHash>& out) const {
    if (is_on()) journal_->list_roots(out);
  }
  // Moves the changes since the last call to `out`; none without a journal.
  void take(Changes& out) noexcept;
  // Everything that the tree holds as stored records, parents before their children.
  void list_contents(Changes& out) const;

  // Blocks [first, first + count) of a node are new.
  void note_new(NodeId node, int32_t first, int32_t count) {
    if (is_on()) add_new(node, first, count);
  }
  // A component got, or is about to lose, one block of a node.
  void note_stored(int32_t component, NodeId node, int32_t place) {
    if (is_on()) add_stored(component, node, place);
  }
  void note_removed(int32_t component, NodeId node, int32_t place) noexcept {
    if (is_on()) journal_->add_removed(component, nodes_.hash(node, place));
  }
  // Every component is about to lose the last `blocks` blocks of a leaf.
  void note_tail(NodeId leaf, int32_t blocks) noexcept {
    if (is_on()) add_tail(leaf, blocks);
  }
  void check_invariants() const;

 private:
  [[nodiscard]] ContentHash hash_before(NodeId node, int32_t place) const;
  void hash_blocks(NodeId node, int32_t first, int32_t count);
  [[nodiscard]] StoredBlocks stored_blocks(int32_t component, NodeId node, int32_t first, int32_t count) const;
  template <typename Visit>
  void for_each_run(NodeId node, int32_t first, int32_t count, Visit&& visit) const;
  void add_new(NodeId node, int32_t first, int32_t count);
  void add_stored(int32_t component, NodeId node, int32_t place);
  void add_tail(NodeId leaf, int32_t blocks) noexcept;

  NodeStore& nodes_;
  const Components& components_ = nodes_.components();
  std::unique_ptr<Journal> journal_;
};

}  // namespace pagecore::radix
