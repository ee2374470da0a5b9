// Steps of BlockTables: extend and prepare take blocks for new tokens, or report the shortage; each with the same call
// of the model.
#pragma once

#include "tests/index/native/tables_rows.hpp"

namespace pagecore::test {

class TablesSteps : public TablesRows {
 public:
  using TablesRows::TablesRows;

 protected:
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
};

}  // namespace pagecore::test
