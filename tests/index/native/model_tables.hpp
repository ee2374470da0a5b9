// Model of BlockTables, token by token: the oracle of the drivers. A value, like the pools that it contains.
#pragma once

#include <algorithm>
#include <map>
#include <set>
#include <vector>

#include "pagecore/index/tables/block_tables.hpp"
#include "tests/index/native/model_pool.hpp"

namespace pagecore::test {

struct ModelRow {
  TokenCount length = 0;
  std::vector<std::vector<BlockId>> blocks;  // of each group
  std::vector<TokenCount> shared_to;         // of each group: tokens before it are not written
};

struct PendingCopy {
  BlockCopy copy;
  bool is_dropped;
};

class ModelTables {
 public:
  using Rows = std::vector<RowId>;
  using Counts = std::vector<TokenCount>;

  std::vector<ModelPool> pools;
  std::vector<size_t> pool_of;  // of each group
  std::vector<TokenCount> block_sizes;
  RowId max_sequences = 0;
  int32_t max_blocks = 0;
  std::map<RowId, ModelRow> rows;
  std::vector<std::vector<PendingCopy>> copies;  // of each group
  // Of the latest step: blocks that each group needs, and blocks of its pool that earlier groups leave.
  std::vector<int64_t> needed, available;

  [[nodiscard]] size_t num_groups() const { return block_sizes.size(); }
  [[nodiscard]] int64_t max_length() const {
    return *std::min_element(block_sizes.begin(), block_sizes.end()) * int64_t{max_blocks};
  }

  RowId add(const std::vector<std::vector<BlockId>>& prefix, int64_t computed) {
    ModelRow row;
    row.blocks.resize(num_groups());
    row.shared_to.resize(num_groups());
    if (!prefix.empty()) {
      expect(prefix.size() == num_groups(), ErrorKind::ShapeError);
      for (size_t g = 0; g < num_groups(); ++g) {
        const int64_t tokens = std::ssize(prefix[g]) * block_sizes[g];
        const bool is_enough =
            computed == BlockTables::kWhole ? tokens == std::ssize(prefix[0]) * block_sizes[0] : tokens >= computed;
        expect(is_enough && tokens <= max_length(), ErrorKind::ShapeError);
        row.shared_to[g] = static_cast<TokenCount>(tokens);
      }
      row.length = row.shared_to[0];
      row.blocks = prefix;
    }
    if (computed != BlockTables::kWhole) {
      expect(computed >= 0 && (computed == 0 || !prefix.empty()), ErrorKind::ShapeError);
      row.length = static_cast<TokenCount>(computed);
    }
    const RowId made = new_row(row);
    for (size_t g = 0; g < num_groups(); ++g) {
      for (size_t i = 0; i < row.blocks[g].size(); ++i) {
        const bool is_hole = row.blocks[g][i] == kNullBlock;
        const bool is_computed =
            row.length == row.shared_to[g] || static_cast<TokenCount>(i + 1) * block_sizes[g] <= row.length;
        expect(!is_hole || is_computed, ErrorKind::InvalidBlock);
        if (!is_hole) pool(g).share(row.blocks[g][i]);
      }
    }
    return made;
  }

  RowId fork(RowId parent) {
    const ModelRow copy = used(parent);
    const RowId made = new_row(copy);
    share(copy);
    return made;
  }

  void remove(const Rows& names) {
    distinct(names);
    for (size_t g = 0; g < num_groups(); ++g) {
      for (const RowId name : names) shrink(g, rows[name], 0);
    }
    for (const RowId name : names) rows.erase(name);
  }

  void reorder(const Rows& names, const Rows& parents) {
    expect(names.size() == parents.size(), ErrorKind::ShapeError);
    for (const RowId parent : parents) used(parent);
    distinct(names);
    const std::map<RowId, ModelRow> before = rows;
    for (size_t i = 0; i < names.size(); ++i) {
      if (names[i] != parents[i]) share(before.at(parents[i]));
    }
    for (size_t g = 0; g < num_groups(); ++g) {
      for (size_t i = 0; i < names.size(); ++i) {
        if (names[i] != parents[i]) shrink(g, rows[names[i]], 0);
      }
    }
    for (size_t i = 0; i < names.size(); ++i) rows[names[i]] = before.at(parents[i]);
  }

  // Slots of each group; compare `needed` and `available` to detect a short pool. `first_blocks` is empty, or has the
  // first block that each group takes.
  std::vector<std::vector<SlotId>> extend(const Rows& names, const Counts& counts,
                                          const std::vector<int32_t>& first_blocks = {}) {
    expect(names.size() == counts.size(), ErrorKind::ShapeError);
    distinct(names);
    for (size_t i = 0; i < names.size(); ++i) {
      expect(counts[i] >= 0 && rows[names[i]].length + int64_t{counts[i]} <= max_length(), ErrorKind::ShapeError);
    }
    expect(first_blocks.empty() || first_blocks.size() == num_groups(), ErrorKind::ShapeError);
    for (const int32_t first : first_blocks) expect(first >= 0, ErrorKind::ShapeError);
    std::vector<std::vector<SlotId>> slots(num_groups());
    needed.assign(num_groups(), 0);
    available.assign(num_groups(), 0);
    for (size_t g = 0; g < num_groups(); ++g) {
      available[g] = pool(g).num_free();
      const int32_t first = first_blocks.empty() ? 0 : first_blocks[g];
      for (size_t i = 0; i < names.size(); ++i) extend_row(g, rows[names[i]], counts[i], first, slots[g]);
    }
    for (size_t i = 0; i < names.size(); ++i) rows[names[i]].length += counts[i];
    return slots;
  }
  [[nodiscard]] bool is_short() const {
    for (size_t g = 0; g < num_groups(); ++g) {
      if (needed[g] > available[g]) return true;
    }
    return false;
  }

  void truncate(const Rows& names, const Counts& lengths, bool keep_capacity) {
    expect(names.size() == lengths.size(), ErrorKind::ShapeError);
    distinct(names);
    for (size_t i = 0; i < names.size(); ++i)
      expect(lengths[i] >= 0 && lengths[i] <= rows[names[i]].length, ErrorKind::ShapeError);
    for (size_t g = 0; g < num_groups() && !keep_capacity; ++g) {
      for (size_t i = 0; i < names.size(); ++i) shrink(g, rows[names[i]], ceil(g, lengths[i]));
    }
    for (size_t i = 0; i < names.size(); ++i) {
      ModelRow& row = rows[names[i]];
      for (TokenCount& shared_to : row.shared_to)
        if (lengths[i] < row.length || !keep_capacity) shared_to = std::min(shared_to, lengths[i]);
      row.length = lengths[i];
    }
  }

  int64_t release_before(const Rows& names, int64_t group, const Counts& positions, int64_t first) {
    expect(group >= 0 && group < std::ssize(block_sizes), ErrorKind::ShapeError);
    expect(names.size() == positions.size(), ErrorKind::ShapeError);
    expect(first >= 0, ErrorKind::ShapeError);
    distinct(names);
    const auto g = static_cast<size_t>(group);
    int64_t freed = 0;
    for (size_t i = 0; i < names.size(); ++i)
      expect(positions[i] >= 0 && positions[i] <= rows[names[i]].length, ErrorKind::ShapeError);
    for (size_t i = 0; i < names.size(); ++i)
      freed += drop(g, rows[names[i]], static_cast<size_t>((first + block_sizes[g] - 1) / block_sizes[g]),
                    static_cast<size_t>(positions[i] / block_sizes[g]));
    return freed;
  }

  std::vector<BlockCopy> take_copies(size_t g) {
    std::vector<BlockCopy> kept;
    std::set<BlockId> read;
    for (size_t i = copies[g].size(); i-- > 0;) {
      const BlockCopy copy = copies[g][i].copy;
      const bool is_dropped = copies[g][i].is_dropped || pool(g).holders(copy.target) == 0;
      if (is_dropped && !read.contains(copy.target)) continue;
      read.insert(copy.source);
      kept.insert(kept.begin(), copy);
    }
    copies[g].clear();
    return kept;
  }

  [[nodiscard]] int64_t capacity(RowId name) const {
    int64_t capacity = INT64_MAX;
    for (size_t g = 0; g < num_groups(); ++g)
      capacity = std::min(capacity, std::ssize(rows.at(name).blocks[g]) * block_sizes[g]);
    return capacity;
  }
  [[nodiscard]] int32_t ceil(size_t g, TokenCount length) const {
    return static_cast<int32_t>((int64_t{length} + block_sizes[g] - 1) / block_sizes[g]);
  }
  ModelPool& pool(size_t g) { return pools[pool_of[g]]; }

 private:
  static void expect(bool condition, ErrorKind kind) {
    if (!condition) fail(kind, "the model refuses");
  }

  const ModelRow& used(RowId name) const {
    expect(rows.contains(name), ErrorKind::InvalidSequence);
    return rows.at(name);
  }

  void distinct(const Rows& names) const {
    std::set<RowId> seen;
    for (const RowId name : names) {
      used(name);
      expect(seen.insert(name).second, ErrorKind::InvalidSequence);
    }
  }

  RowId new_row(const ModelRow& row) {
    for (RowId name = 0; name < max_sequences; ++name) {
      if (rows.emplace(name, row).second) return name;
    }
    fail(ErrorKind::OutOfRows, "the model refuses");
  }

  void share(const ModelRow& row) {
    for (size_t g = 0; g < num_groups(); ++g) {
      for (const BlockId block : row.blocks[g]) {
        if (block != kNullBlock) pool(g).share(block);
      }
    }
  }

  int64_t drop(size_t g, ModelRow& row, size_t from, size_t to) {
    int64_t freed = 0;
    for (size_t i = to; i-- > from;) {
      const BlockId block = row.blocks[g][i];
      if (block == kNullBlock) continue;
      row.blocks[g][i] = kNullBlock;
      if (!pool(g).drop(block)) continue;
      forget(g, block);
      ++freed;
    }
    return freed;
  }

  void shrink(size_t g, ModelRow& row, int32_t count) {
    const auto size = static_cast<size_t>(count);
    if (row.blocks[g].size() <= size) return;
    drop(g, row, size, row.blocks[g].size());
    row.blocks[g].resize(size);
  }

  void forget(size_t g, BlockId target) {
    for (PendingCopy& each : copies[g]) each.is_dropped |= each.copy.target == target;
  }

  // Invented blocks replace those that the pool lacks, so that all needed blocks are counted.
  BlockId take(size_t g) {
    ++needed[g];
    return pool(g).num_free() > 0 ? pool(g).take() : -1;
  }

  void extend_row(size_t g, ModelRow& row, TokenCount count, int32_t first, std::vector<SlotId>& slots) {
    std::vector<BlockId>& blocks = row.blocks[g];
    for (int64_t position = row.length; position < int64_t{row.length} + count; ++position) {
      const auto at = static_cast<size_t>(position / block_sizes[g]);
      const bool is_first = position == row.length || position % block_sizes[g] == 0;
      if (position < row.shared_to[g]) {
        slots.push_back(kPaddingSlot);
        continue;
      }
      if (position / block_sizes[g] < first) {
        if (at == blocks.size()) blocks.push_back(kNullBlock);
        slots.push_back(kPaddingSlot);
        continue;
      }
      if (at == blocks.size()) {
        blocks.push_back(take(g));
      } else if (is_first) {
        own(g, row, at);
      }
      slots.push_back(SlotId{blocks[at]} * block_sizes[g] + position % block_sizes[g]);
    }
  }

  void own(size_t g, ModelRow& row, size_t at) {
    BlockId& block = row.blocks[g][at];
    if (block == kNullBlock) {
      block = take(g);
    } else if (block > 0 && pool(g).holders(block) > 1) {
      const BlockId source = block;
      block = take(g);
      pool(g).drop(source);
      if (static_cast<int64_t>(at) * block_sizes[g] >= row.length) return;
      if (block > 0) forget(g, block);
      copies[g].push_back({{source, block}, false});
    }
  }
};

}  // namespace pagecore::test
