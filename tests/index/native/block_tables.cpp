// BlockTables against their model: one to three groups, shared pools, short pools, invalid calls, and another holder of
// blocks of the same pools.
#include <limits>
#include <memory>
#include <numeric>

#include "tests/index/native/model_tables.hpp"

using namespace pagecore;
using namespace pagecore::test;

namespace {

constexpr int32_t kMost = std::numeric_limits<int32_t>::max();
constexpr int32_t kLeast = std::numeric_limits<int32_t>::min();

class TablesLife {
 public:
  explicit TablesLife(Random& random) : random_(random) {
    const int64_t num_groups = random.between(1, 3);
    std::vector<std::shared_ptr<BlockPool>> of_groups;
    std::vector<int64_t> sizes;
    for (int64_t g = 0; g < num_groups; ++g) {
      if (pools_.empty() || !random.one_in(3)) make_pool();
      model_.pool_of.push_back(pools_.size() - 1);
      model_.block_sizes.push_back(static_cast<TokenCount>(random.pick({1, 2, 3, 4, 16})));
      of_groups.push_back(pools_.back());
      sizes.push_back(model_.block_sizes.back());
    }
    model_.copies.resize(static_cast<size_t>(num_groups));
    model_.max_sequences = static_cast<RowId>(random.between(1, 6));
    model_.max_blocks = static_cast<int32_t>(random.between(1, 7));
    tables_ = std::make_unique<BlockTables>(of_groups, sizes, model_.max_sequences, model_.max_blocks);
  }

  void step() {
    if (random_.one_in(20)) follow();
    switch (random_.below(14)) {
      case 0: return add();
      case 1: return fork();
      case 2: return remove();
      case 3: return reorder();
      case 4:
      case 5:
      case 6:
      case 7: return extend();
      case 8: return prepare();
      case 9: return truncate();
      case 10: return release();
      case 11: return copies();
      case 12: return outsider();
      default: return look();
    }
  }

  void same() {
    for (size_t i = 0; i < pools_.size(); ++i) same_counts(*pools_[i], model_.pools[i]);
    PC_CHECK(tables_->num_rows() == std::ssize(model_.rows), tables_->num_rows());
    for (RowId row = 0; row <= model_.max_sequences; ++row)
      PC_CHECK(tables_->lengths()[row] == length_of(row), "length ", tables_->lengths()[row], " of row ", row);
    for (const auto& [name, row] : model_.rows) {
      PC_CHECK(tables_->length(name) == row.length, "row ", name, " has ", tables_->length(name), " tokens");
      PC_CHECK(tables_->capacity(name) == model_.capacity(name), name);
      for (size_t g = 0; g < model_.num_groups(); ++g) {
        const auto blocks = tables_->blocks(name, static_cast<int64_t>(g));
        PC_CHECK(std::equal(blocks.begin(), blocks.end(), row.blocks[g].begin(), row.blocks[g].end()), "row ", name,
                 " group ", g, ": ", shown(blocks), ", expected ", shown(row.blocks[g]));
      }
    }
  }

  // A mirror that receives every change, in batches of any size, equals the tables.
  void same_copy() {
    if (copy_.empty() || random_.one_in(3)) return;
    for (bool is_all = false; !is_all;) {
      Exact<ChangedEntry> changes(static_cast<size_t>(random_.pick({int64_t{1}, int64_t{3}, random_.between(1, 400)})));
      const size_t count = tables_->take_changes(changes.span());
      PC_CHECK(count <= changes.size(), count);
      for (size_t i = 0; i < count; ++i) {
        PC_CHECK(i == 0 || changes[i - 1].index < changes[i].index, "changes ascend");
        copy_.at(static_cast<size_t>(changes[i].index)) = static_cast<int32_t>(changes[i].value);
      }
      is_all = count < changes.size();
    }
    size_t at = 0;
    for (size_t g = 0; g < model_.num_groups(); ++g) {
      const BlockId* table = tables_->table(static_cast<int64_t>(g));
      for (size_t i = 0; i < num_entries(); ++i, ++at)
        PC_CHECK(copy_[at] == table[i], "group ", g, " entry ", i, " is ", copy_[at], ", expected ", table[i]);
    }
    for (RowId row = 0; row <= model_.max_sequences; ++row, ++at)
      PC_CHECK(copy_[at] == tables_->lengths()[row], "length ", copy_[at], " of row ", row);
  }

  void end() {
    same();
    same_copy();
    tables_->check_invariants(false);
    tables_.reset();
    for (const auto& [name, row] : model_.rows) forget(row);
    for (size_t i = 0; i < pools_.size(); ++i) {
      PC_CHECK(pools_[i]->num_free() == model_.pools[i].num_free(), pools_[i]->num_free(),
               " free after everything was removed");
      pools_[i]->check_invariants();
    }
  }

 private:
  using Rows = std::vector<RowId>;
  using Counts = std::vector<TokenCount>;

  [[nodiscard]] size_t num_entries() const {
    return static_cast<size_t>(model_.max_sequences + 1) * static_cast<size_t>(model_.max_blocks);
  }

  // Starts anew each time: follow_changes() restarts the recording.
  void follow() {
    tables_->follow_changes();
    copy_.assign(model_.num_groups() * num_entries() + static_cast<size_t>(model_.max_sequences) + 1, 0);
  }

  void make_pool() {
    const Order order = random_.pick({Order::Lifo, Order::Fifo, Order::Address});
    const auto num_blocks = static_cast<BlockId>(random_.between(2, 40));
    pools_.push_back(std::make_shared<BlockPool>(num_blocks, order));
    model_.pools.emplace_back(num_blocks, order);
  }

  void forget(const ModelRow& row) {
    for (size_t g = 0; g < model_.num_groups(); ++g) {
      for (const BlockId block : row.blocks[g]) {
        if (block != kNullBlock) model_.pool(g).drop(block);
      }
    }
  }

  RowId any_row() {
    if (random_.one_in(40)) return random_.pick({-1, model_.max_sequences, kMost, kLeast});
    return static_cast<RowId>(random_.below(model_.max_sequences));
  }

  // Used rows in any order; sometimes with an invalid one.
  Rows some_rows() {
    Rows rows;
    for (const auto& [name, row] : model_.rows) rows.push_back(name);
    random_.shuffle(rows);
    rows.resize(static_cast<size_t>(random_.between(0, std::ssize(rows))));
    if (random_.one_in(15)) rows.push_back(any_row());
    return rows;
  }

  TokenCount length_of(RowId row) const { return model_.rows.contains(row) ? model_.rows.at(row).length : 0; }

  // A number for each row, from 0 to its length; rarely an invalid one.
  Counts positions(const Rows& rows) {
    Counts counts;
    for (const RowId row : rows) counts.push_back(static_cast<TokenCount>(random_.between(0, length_of(row))));
    spoil(counts);
    return counts;
  }
  void spoil(Counts& counts) {
    if (!counts.empty() && random_.one_in(20)) random_.pick(counts) = random_.pick({-1, kMost, kLeast, kMost - 1});
    if (random_.one_in(60)) counts.push_back(0);
  }

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

  Counts step_counts(const Rows& rows) {
    Counts counts;
    for (const RowId row : rows) {
      const int64_t room = model_.max_length() - length_of(row);
      const int64_t most = random_.pick({int64_t{1}, int64_t{3}, room, room});
      counts.push_back(static_cast<TokenCount>(random_.between(0, std::min(room, most))));
    }
    spoil(counts);
    return counts;
  }

  // Result of a step in the model: refused, short (nothing changes), or done, with slots for each group.
  enum class Outcome { Refused, Short, Done };
  Outcome model_step(const Rows& rows, const Counts& counts, const std::vector<int32_t>& first_blocks,
                     const std::function<bool()>& real, std::vector<std::vector<SlotId>>& slots) {
    ModelTables before = model_;
    bool is_done = false;
    if (!agree(
            model_, "extend", [&](ModelTables& model) { slots = model.extend(rows, counts, first_blocks); },
            [&] { is_done = real(); })) {
      return Outcome::Refused;
    }
    const bool is_short = model_.is_short();
    PC_CHECK(is_done == !is_short, "blocks are short: ", is_short, ", needed ", shown(model_.needed));
    if (!is_short) return Outcome::Done;
    same_shortage(rows, counts, first_blocks);
    before.needed = model_.needed;
    before.available = model_.available;
    model_ = std::move(before);
    return Outcome::Short;
  }

  void same_shortage(const Rows& rows, const Counts& counts, const std::vector<int32_t>& first_blocks) {
    try {
      tables_->fail_out_of_blocks();
    } catch (const Error& error) {
      PC_CHECK(error.kind() == ErrorKind::OutOfBlocks, error.what());
      PC_CHECK(error.requested() == model_.needed, shown(error.requested()), ", expected ", shown(model_.needed));
      PC_CHECK(error.available() == model_.available, shown(error.available()), " of ", shown(model_.available));
    }
    Exact<int64_t> lacking(model_.num_groups());
    tables_->shortage(rows, counts, lacking.span(), first_blocks);
    for (size_t g = 0; g < lacking.size(); ++g) {
      const int64_t expected = std::max<int64_t>(model_.needed[g] - model_.available[g], 0);
      PC_CHECK(lacking[g] == expected, "group ", g, " lacks ", lacking[g], ", expected ", expected);
    }
  }

  void extend() {
    const Rows rows = some_rows();
    const Counts counts = step_counts(rows);
    int64_t total = 0;
    for (const TokenCount count : counts) total += std::clamp<int64_t>(count, 0, 4096);
    const bool is_wide = random_.one_in(2);
    const auto size = static_cast<size_t>(total);
    std::vector<Exact<int64_t>> wide;
    std::vector<Exact<int32_t>> narrow;
    std::vector<SlotsOut> out;
    for (size_t g = 0; g < model_.num_groups(); ++g) {
      wide.emplace_back(is_wide ? size : 0).fill(-9);
      narrow.emplace_back(is_wide ? 0 : size).fill(-9);
      out.push_back(is_wide ? SlotsOut{wide[g].data(), total, SlotType::Int64}
                            : SlotsOut{narrow[g].data(), total, SlotType::Int32});
    }
    const Exact<RowId> names(rows);
    const Exact<TokenCount> numbers(counts);
    refuse_short_outputs(names, numbers, out);
    std::vector<std::vector<SlotId>> slots;
    const Outcome outcome =
        model_step(rows, counts, {}, [&] { return tables_->try_extend(names.span(), numbers.span(), out); }, slots);
    for (size_t g = 0; g < model_.num_groups(); ++g) {
      std::vector<SlotId> written = wide[g].copy();
      if (!is_wide) written.assign(narrow[g].data(), narrow[g].data() + narrow[g].size());
      const std::vector<SlotId> expected = outcome == Outcome::Done ? slots[g] : std::vector<SlotId>(size, -9);
      PC_CHECK(written == expected, "slots ", shown(written), ", expected ", shown(expected));
    }
  }

  // One slot or one group missing: refused before anything is taken.
  void refuse_short_outputs(const Exact<RowId>& names, const Exact<TokenCount>& numbers, std::vector<SlotsOut> out) {
    try {
      tables_->check_step(names.span(), numbers.span());
    } catch (const Error&) {
      return;  // refused for another reason
    }
    SlotsOut& shorter = random_.pick(out);
    --shorter.size;
    PC_REFUSES(ShapeError, static_cast<void>(tables_->try_extend(names.span(), numbers.span(), out)));
    ++shorter.size;
    out.pop_back();
    PC_REFUSES(ShapeError, static_cast<void>(tables_->try_extend(names.span(), numbers.span(), out)));
  }

  // Empty, or a first block for each group; rarely invalid.
  std::vector<int32_t> some_first_blocks() {
    std::vector<int32_t> firsts;
    if (random_.one_in(2)) return firsts;
    for (size_t g = 0; g < model_.num_groups(); ++g)
      firsts.push_back(static_cast<int32_t>(random_.between(0, model_.max_blocks + 1)));
    if (random_.one_in(20)) random_.pick(firsts) = random_.pick({-1, kLeast, kMost});
    if (random_.one_in(30)) firsts.push_back(0);
    return firsts;
  }

  void prepare() {
    const Rows rows = some_rows();
    const Counts counts = step_counts(rows);
    const std::vector<int32_t> first_blocks = some_first_blocks();
    int64_t total = 0;
    for (const TokenCount count : counts) total += std::clamp<int64_t>(count, 0, 4096);
    const auto type = random_.pick({SlotType::Int32, SlotType::Int64});
    StepBuffers buffers(std::ssize(rows), total, std::ssize(model_.block_sizes), type);
    std::vector<std::vector<SlotId>> slots;
    const ModelTables before = model_;
    const Exact<RowId> names(rows);
    const Exact<TokenCount> numbers(counts);
    const Exact<int32_t> firsts(first_blocks);
    const auto real = [&] { return tables_->try_prepare(names.span(), numbers.span(), buffers, firsts.span()); };
    const Outcome outcome = model_step(rows, counts, first_blocks, real, slots);
    buffers.check_invariants();
    if (outcome != Outcome::Done) return;
    TokenCount token = 0;
    for (size_t i = 0; i < rows.size(); ++i) {
      PC_CHECK(buffers.rows()[i] == rows[i] && buffers.query_lens()[i] == counts[i], i);
      PC_CHECK(buffers.cu_query_lens()[i] == token && buffers.seq_lens()[i] == model_.rows[rows[i]].length, i);
      for (TokenCount k = 0; k < counts[i]; ++k, ++token) {
        PC_CHECK(buffers.positions()[token] == before.rows.at(rows[i]).length + k, token);
        for (size_t g = 0; g < slots.size(); ++g) {
          const SlotId slot = type == SlotType::Int64 ? static_cast<int64_t*>(buffers.slots(g))[token]
                                                      : static_cast<int32_t*>(buffers.slots(g))[token];
          PC_CHECK(slot == slots[g][static_cast<size_t>(token)], "slot ", slot, " of token ", token);
        }
      }
    }
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

  // Another holder takes and shares blocks of the same pools, and frees only its own references.
  void outsider() {
    const auto which = static_cast<size_t>(random_.below(std::ssize(pools_)));
    auto& mine = theirs_[which];
    Exact<BlockId> block(1);
    if (!mine.empty() && random_.one_in(2)) {
      block[0] = mine.back();
      mine.pop_back();
      model_.pools[which].drop(block[0]);
      pools_[which]->free(block.span());
      return;
    }
    block[0] = static_cast<BlockId>(random_.below(model_.pools[which].num_blocks()));
    if (model_.pools[which].holders(block[0]) == 0) {
      if (model_.pools[which].num_free() == 0) return;
      PC_CHECK(pools_[which]->try_allocate(block.span()), "a free block cannot be allocated");
      PC_CHECK(model_.pools[which].take() == block[0], block[0]);
    } else {
      model_.pools[which].share(block[0]);
      pools_[which]->share(block.span());
    }
    mine.push_back(block[0]);
  }

  void look() {
    tables_->check_invariants(theirs_[0].empty() && theirs_[1].empty() && theirs_[2].empty());
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

  Random& random_;
  ModelTables model_;
  std::vector<std::shared_ptr<BlockPool>> pools_;
  std::unique_ptr<BlockTables> tables_;
  std::vector<int32_t> copy_;       // mirror of tables and lengths, after follow_changes()
  std::vector<BlockId> theirs_[3];  // references of another holder, by pool
};

BlockTables make(std::vector<int64_t> sizes, int64_t rows, int64_t blocks) {
  std::vector<std::shared_ptr<BlockPool>> pools;
  for (size_t i = 0; i < sizes.size(); ++i) pools.push_back(std::make_shared<BlockPool>(9, Order::Lifo));
  return {std::move(pools), std::move(sizes), rows, blocks};
}

}  // namespace

PC_TEST(tables_behave_as_their_model) {
  rounds(400, [](Random& random) {
    TablesLife life(random);
    for (int i = 0; i < 120; ++i) {
      life.step();
      life.same();
      life.same_copy();
    }
    life.end();
  });
}

PC_TEST(tables_refuse_impossible_sizes) {
  for (const int64_t wrong : {int64_t{0}, int64_t{-1}, int64_t{1} << 31, INT64_MAX, INT64_MIN}) {
    PC_REFUSES(ShapeError, make({wrong}, 2, 2));
    PC_REFUSES(ShapeError, make({4}, wrong, 2));
    PC_REFUSES(ShapeError, make({4}, 2, wrong));
  }
  PC_REFUSES(ShapeError, make({}, 2, 2));
  PC_REFUSES(ShapeError, BlockTables({std::make_shared<BlockPool>(9, Order::Lifo)}, {4, 4}, 2, 2));
}

PC_TEST(tables_refuse_changes_that_are_not_recorded_or_exceed_int32) {
  BlockTables tables = make({4}, 2, 2);
  Exact<ChangedEntry> changes(1);
  PC_REFUSES(UnsupportedOption, static_cast<void>(tables.take_changes(changes.span())));
  PC_REFUSES(ShapeError, make({1, 1}, 32767, 32768).follow_changes());
  tables.follow_changes();
  PC_CHECK(tables.take_changes(changes.span()) == 0, "nothing has changed");
}

// Another holder freed blocks of the tables: the tables report it, and their destructor frees no block twice.
PC_TEST(tables_report_a_block_that_another_holder_freed) {
  auto pool = std::make_shared<BlockPool>(9, Order::Lifo);
  BlockTables tables({pool}, {4}, 3, 4);
  const RowId row = tables.add({});
  Exact<RowId> rows(std::vector<RowId>{row});
  Exact<TokenCount> counts(std::vector<TokenCount>{6});
  Exact<int64_t> slots(6);
  const SlotsOut out{slots.data(), 6, SlotType::Int64};
  PC_CHECK(tables.try_extend(rows.span(), counts.span(), std::span(&out, 1)), "blocks suffice");
  const Exact<BlockId> stolen(std::vector<BlockId>{tables.blocks(row, 0)[1]});
  pool->free(stolen.span());
  PC_REFUSES(DoubleFree, static_cast<void>(tables.try_extend(rows.span(), counts.span(), std::span(&out, 1))));
  PC_REFUSES(DoubleFree, static_cast<void>(tables.fork(row)));
  PC_REFUSES(DoubleFree, tables.remove(rows.span()));
  const Exact<TokenCount> none(std::vector<TokenCount>{0});
  PC_REFUSES(DoubleFree, tables.truncate(rows.span(), none.span(), false));
  PC_REFUSES(Internal, tables.check_invariants(false));
}
