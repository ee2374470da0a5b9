// Calls of BlockTables that add, change, read and remove rows, each with the same call of the model.
#pragma once

#include <numeric>

#include "tests/index/native/tables_fixture.hpp"

namespace pagecore::test {

class TablesRows : public TablesFixture {
 public:
  using TablesFixture::TablesFixture;

 protected:
  void add() {
    std::vector<std::vector<BlockId>> prefix;
    if (random_.one_in(2)) prefix = some_prefix();
    std::vector<Exact<BlockId>> lists;
    for (const auto& part : prefix) lists.emplace_back(part);
    std::vector<std::span<const BlockId>> parts;
    for (const auto& list : lists) parts.push_back(list.span());
    int64_t length = BlockTables::kWhole;
    if (!prefix.empty() && random_.one_in(2)) {
      length = random_.between(0, std::ssize(prefix[0]) * model_.block_sizes[0]);
      if (random_.one_in(3)) {  // a list of fewer blocks than the others
        const size_t g = random_.below(prefix.size());
        const auto least = (length + model_.block_sizes[g] - 1) / model_.block_sizes[g];
        if (least < std::ssize(prefix[g]))
          prefix[g].resize(static_cast<size_t>(random_.between(least, std::ssize(prefix[g]))));
        lists.clear();
        parts.clear();
        for (const auto& part : prefix) lists.emplace_back(part);
        for (const auto& list : lists) parts.push_back(list.span());
      }
      if (random_.one_in(15)) length = random_.pick({int64_t{-2}, length + 100});
    }
    RowId expected = -1, made = -1;
    if (agree(
            model_, "add", [&](ModelTables& model) { expected = model.add(prefix, length); },
            [&] { made = tables_->add(parts, length); })) {
      PC_CHECK(made == expected, "row ", made, ", expected ", expected);
    }
  }

  // Blocks of a row, truncated to tokens that every group can share, sometimes made invalid.
  std::vector<std::vector<BlockId>> some_prefix() {
    int64_t unit = 1;
    for (const TokenCount size : model_.block_sizes) unit = std::lcm(unit, size);
    const RowId from = any_row();
    const int64_t tokens = random_.between(0, length_of(from) / unit) * unit;
    std::vector<std::vector<BlockId>> prefix(model_.num_groups());
    for (size_t g = 0; g < prefix.size() && model_.rows.contains(from); ++g) {
      const auto& blocks = model_.rows.at(from).blocks[g];
      prefix[g].assign(blocks.begin(), blocks.begin() + tokens / model_.block_sizes[g]);
    }
    if (random_.one_in(6)) {
      auto& part = random_.pick(prefix);
      const auto other = static_cast<BlockId>(random_.below(42));
      if (!part.empty()) random_.pick(part) = random_.pick({other, kNullBlock, -1, kMost, kLeast});
    }
    if (random_.one_in(20)) random_.pick(prefix).push_back(1);
    if (random_.one_in(30)) prefix.pop_back();
    return prefix;
  }

  void fork() {
    const RowId parent = any_row();
    RowId expected = -1, made = -1;
    if (agree(
            model_, "fork", [&](ModelTables& model) { expected = model.fork(parent); },
            [&] { made = tables_->fork(parent); })) {
      PC_CHECK(made == expected, "row ", made, ", expected ", expected);
    }
  }

  void remove() {
    Rows rows = some_rows();
    if (random_.one_in(2) && rows.size() > 1) rows.resize(1);
    const Exact<RowId> names(rows);
    agree(model_, "remove", [&](ModelTables& model) { model.remove(rows); }, [&] { tables_->remove(names.span()); });
  }

  void reorder() {
    const Rows rows = some_rows();
    Rows parents;
    for (size_t i = 0; i < rows.size(); ++i) parents.push_back(random_.one_in(3) ? any_row() : random_.pick(rows));
    if (random_.one_in(30)) parents.push_back(any_row());
    const Exact<RowId> names(rows), sources(parents);
    agree(
        model_, "reorder", [&](ModelTables& model) { model.reorder(rows, parents); },
        [&] { tables_->reorder(names.span(), sources.span()); });
  }

  void truncate() {
    const Rows rows = some_rows();
    const Counts lengths = positions(rows);
    const bool keep = random_.one_in(2);
    const Exact<RowId> names(rows);
    const Exact<TokenCount> numbers(lengths);
    agree(
        model_, "truncate", [&](ModelTables& model) { model.truncate(rows, lengths, keep); },
        [&] { tables_->truncate(names.span(), numbers.span(), keep); });
  }

  void release() {
    const Rows rows = some_rows();
    const Counts before = positions(rows);
    const auto any = static_cast<int64_t>(random_.below(std::ssize(model_.block_sizes)));
    const int64_t group = random_.one_in(30) ? random_.pick({int64_t{-1}, int64_t{3}, INT64_MAX, INT64_MIN}) : any;
    const int64_t first = random_.one_in(3) ? random_.between(-1, 12) : 0;
    const Exact<RowId> names(rows);
    const Exact<TokenCount> numbers(before);
    int64_t expected = 0, freed = 0;
    if (agree(
            model_, "release_before",
            [&](ModelTables& model) { expected = model.release_before(rows, group, before, first); },
            [&] { freed = tables_->release_before(names.span(), group, numbers.span(), first); })) {
      PC_CHECK(freed == expected, freed, " became free, expected ", expected);
    }
  }

  void copies() {
    for (size_t g = 0; g < model_.num_groups(); ++g) {
      std::vector<int64_t> taken, expected;
      std::vector<BlockCopy> copies(tables_->settle_copies(static_cast<int64_t>(g)));
      if (random_.one_in(2)) PC_CHECK(tables_->settle_copies(static_cast<int64_t>(g)) == copies.size(), copies.size());
      tables_->take_copies(static_cast<int64_t>(g), copies);
      for (const BlockCopy& copy : copies) taken.insert(taken.end(), {copy.source, copy.target});
      for (const BlockCopy& copy : model_.take_copies(g)) expected.insert(expected.end(), {copy.source, copy.target});
      PC_CHECK(taken == expected, "copies ", shown(taken), ", expected ", shown(expected));
    }
  }

  void look() {
    tables_->check_invariants(is_alone());
    const Rows rows = some_rows();
    const auto group = static_cast<size_t>(random_.below(std::ssize(model_.block_sizes)));
    const int64_t num_rows = std::max<int64_t>(std::ssize(rows) + random_.between(-1, 2), 0);
    const int64_t width = random_.between(0, model_.max_blocks), stride = width + random_.between(0, 2);
    const auto extent = static_cast<size_t>(num_rows > 0 ? (num_rows - 1) * stride + width : 0);
    Exact<BlockId> blocks(extent);
    Exact<TokenCount> lengths(static_cast<size_t>(random_.between(0, num_rows)));
    blocks.fill(-5);
    lengths.fill(-5);
    const DenseTable out{blocks.data(), num_rows, width, stride, lengths.data(), std::ssize(lengths.span())};
    bool fits = std::ssize(rows) <= num_rows, is_known = true;
    for (const RowId row : rows) {
      is_known = is_known && model_.rows.contains(row);
      fits = fits && (!is_known || model_.ceil(group, length_of(row)) <= width);
    }
    const Exact<RowId> names(rows);
    if (!fits || !is_known) {
      try {
        tables_->fill(names.span(), static_cast<int64_t>(group), out);
      } catch (const Error&) {
        for (const BlockId block : blocks.span()) PC_CHECK(block == -5, "a refused fill writes nothing");
        return;
      }
      PC_CHECK(false, "fill was not refused");
    }
    tables_->fill(names.span(), static_cast<int64_t>(group), out);
    for (int64_t i = 0; i < num_rows; ++i) check_line(rows, group, i, blocks, out);
  }

 private:
  void check_line(const Rows& rows, size_t group, int64_t i, const Exact<BlockId>& blocks, const DenseTable& out) {
    const auto line = static_cast<size_t>(i * out.stride);
    const ModelRow* row = i < std::ssize(rows) ? &model_.rows.at(rows[static_cast<size_t>(i)]) : nullptr;
    for (size_t k = 0; k < static_cast<size_t>(out.width); ++k) {
      const bool is_held = row != nullptr && k < row->blocks[group].size();
      PC_CHECK(blocks[line + k] == (is_held ? row->blocks[group][k] : kNullBlock), "line ", i, " block ", k);
    }
    for (int64_t k = out.width; k < out.stride && i + 1 < out.num_rows; ++k)
      PC_CHECK(blocks[line + static_cast<size_t>(k)] == -5, "between lines nothing is written");
    if (i < out.num_lengths) PC_CHECK(out.lengths[i] == (row != nullptr ? row->length : 0), "length ", i);
  }
};

}  // namespace pagecore::test
