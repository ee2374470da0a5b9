// Journal of the tree: which component got or lost which blocks, in order, for those who follow the cache from outside.
//
//   tree    insert, evict, replace_id ──> Journal ──take()──> Changes      the reader swaps the buffers and converts
//                                                                          them without the tree
//   Changes   records  [ stored full 3 blocks | removed full 1 | stored window0 2 ]
//             hashes   [ h h h               | h              | h h            ]   consumed in order
//             tokens   [ t t t               |                | t t            ]   block_size of each stored block
//             marks    [ m                                    | m              ]
//
// I1: the journal applied to an empty tree gives the blocks that the tree holds, or `has_overflowed` is set.
// Adding never fails: a journal that is full, or without memory, drops its content and waits for a take(). The reader
// then lists the whole tree.
// Cost: O(1) a block and one copy of its tokens. Threads: the writer of the tree.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "pagecore/index/radix/nodes/content_hash.hpp"

namespace pagecore::radix {

struct ChangeRecord {
  bool is_stored = false;
  int32_t component = 0;
  int32_t first = 0;       // stored: index of the first block in its prefix
  int32_t count = 0;       // blocks, or states
  int32_t num_marks = 0;   // their `block` counts from the first block of the record
  ContentHash root = 0;    // stored: of the namespace
  ContentHash parent = 0;  // stored: of the block before the first; the root if there is none
};

struct Changes {
  std::vector<ChangeRecord> records;
  std::vector<ContentHash> hashes;
  std::vector<int32_t> tokens;
  std::vector<Mark> marks;
  bool has_overflowed = false;

  void clear() noexcept {
    records.clear();
    hashes.clear();
    tokens.clear();
    marks.clear();
    has_overflowed = false;
  }
  [[nodiscard]] size_t nbytes() const {
    return records.size() * sizeof(ChangeRecord) + hashes.size() * sizeof(ContentHash) +
           tokens.size() * sizeof(int32_t) + marks.size() * sizeof(Mark);
  }
};

// Blocks of one node, as a change describes them.
struct StoredBlocks {
  int32_t component;
  int32_t first;
  int32_t count;
  ContentHash root;
  ContentHash parent;
  const int32_t* tokens;
  std::span<const Mark> marks;  // of these blocks, with indices in their storage
  int32_t start;                // of the first block in the storage
};

// Appends a stored record, or extends the last one if the blocks follow its blocks; `hash_of` returns the hash of each.
template <typename HashOf>
void append_stored(Changes& changes, const StoredBlocks& stored, int64_t block_size, HashOf&& hash_of) {
  ChangeRecord* last = changes.records.empty() ? nullptr : &changes.records.back();
  if (last == nullptr || !last->is_stored || last->component != stored.component || last->root != stored.root ||
      last->first + last->count != stored.first || changes.hashes.back() != stored.parent) {
    changes.records.push_back({true, stored.component, stored.first, 0, 0, stored.root, stored.parent});
    last = &changes.records.back();
  }
  for (int32_t i = 0; i < stored.count; ++i) changes.hashes.push_back(hash_of(i));
  changes.tokens.insert(changes.tokens.end(), stored.tokens, stored.tokens + stored.count * block_size);
  for (const Mark& mark : stored.marks) {
    changes.marks.push_back(mark);
    changes.marks.back().block += last->count - stored.start;
  }
  last->num_marks += static_cast<int32_t>(stored.marks.size());
  last->count += stored.count;
}

class Journal {
 public:
  Journal(int64_t block_size, size_t max_bytes, std::vector<ContentHash> roots)
      : block_size_(block_size), max_bytes_(max_bytes), roots_(std::move(roots)) {}

  // Root of each namespace, by number; set before the first insertion into it. By default 0.
  void set_root(NamespaceId space, ContentHash root) {
    if (static_cast<size_t>(space) >= roots_.size()) roots_.resize(static_cast<size_t>(space) + 1);
    roots_[static_cast<size_t>(space)] = root;
  }
  [[nodiscard]] ContentHash root(NamespaceId space) const {
    return static_cast<size_t>(space) < roots_.size() ? roots_[static_cast<size_t>(space)] : 0;
  }

  template <typename HashOf>
  void add_stored(const StoredBlocks& stored, HashOf&& hash_of) noexcept {
    const size_t bytes = static_cast<size_t>(stored.count) * (sizeof(ContentHash) + block_size_ * sizeof(int32_t)) +
                         sizeof(ChangeRecord) + stored.marks.size() * sizeof(Mark);
    add(bytes, [&] { append_stored(changes_, stored, block_size_, hash_of); });
  }
  void add_removed(int32_t component, ContentHash hash) noexcept {
    add(sizeof(ChangeRecord) + sizeof(ContentHash), [&] {
      const bool extends = !changes_.records.empty() && !changes_.records.back().is_stored &&
                           changes_.records.back().component == component;
      if (!extends) changes_.records.push_back({false, component, 0, 0, 0, 0, 0});
      changes_.hashes.push_back(hash);
      ++changes_.records.back().count;
    });
  }

  // Appends the roots of the stored records; a root can come twice.
  void list_roots(std::vector<ContentHash>& out) const {
    for (const ChangeRecord& record : changes_.records) {
      if (record.is_stored) out.push_back(record.root);
    }
  }

  // Moves all changes since the last call to `out`, whose memory the journal uses from now on.
  void take(Changes& out) noexcept {
    out.clear();
    std::swap(changes_, out);
  }

 private:
  template <typename Append>
  void add(size_t bytes, Append&& append) noexcept {
    if (changes_.has_overflowed) return;
    if (changes_.nbytes() + bytes <= max_bytes_) {
      try {
        append();
        return;
      } catch (...) {  // out of memory
      }
    }
    changes_ = {};
    changes_.has_overflowed = true;
  }

  int64_t block_size_;
  size_t max_bytes_;
  std::vector<ContentHash> roots_;
  Changes changes_;
};

}  // namespace pagecore::radix
