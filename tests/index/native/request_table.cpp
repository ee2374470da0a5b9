// RequestTable against a map of rows to slots.
#include <limits>
#include <map>
#include <memory>

#include "pagecore/index/slots/request_table.hpp"
#include "tests/index/native/model_pool.hpp"

using namespace pagecore;
using namespace pagecore::test;

namespace {

constexpr int32_t kMost = std::numeric_limits<int32_t>::max();
constexpr int32_t kLeast = std::numeric_limits<int32_t>::min();

class TableLife {
 public:
  explicit TableLife(Random& random)
      : random_(random),
        type_(random.pick({SlotType::Int32, SlotType::Int64})),
        num_rows_(static_cast<RowId>(random.between(1, 70))),
        width_(static_cast<TokenCount>(random.between(1, 20))),
        table_(num_rows_, width_, type_) {}

  void step() {
    switch (random_.below(5)) {
      case 0: return allocate();
      case 1: return free();
      case 2:
      case 3: return write();
      default: return look();
    }
  }

 private:
  void allocate() {
    Exact<RowId> out(static_cast<size_t>(random_.between(0, random_.one_in(4) ? num_rows_ + 1 : 5)));
    out.fill(-7);
    const bool fits = std::ssize(out.span()) <= num_rows_ - std::ssize(rows_);
    PC_CHECK(table_.try_allocate(out.span()) == fits, out.size());
    for (const RowId row : out.span()) {
      RowId lowest = 0;
      while (rows_.contains(lowest)) ++lowest;
      PC_CHECK(row == (fits ? lowest : -7), "row ", row);
      if (fits) rows_[row].assign(static_cast<size_t>(width_), 0);
    }
  }

  RowId any_row() {
    if (rows_.empty() || random_.one_in(25)) return random_.pick({-1, num_rows_, kMost, kLeast});
    return random_.pick(rows_).first;
  }

  void free() {
    std::vector<RowId> rows;
    for (int64_t i = random_.between(0, 4); i > 0; --i) rows.push_back(any_row());
    const Exact<RowId> names(rows);
    agree(
        rows_, "free",
        [&](Rows& model) {
          for (const RowId row : rows) {
            if (model.erase(row) == 0) fail(ErrorKind::InvalidSequence, "the model refuses");
            lengths_of_freed_.push_back(row);
          }
        },
        [&] { table_.free(names.span()); });
    for (const RowId row : lengths_of_freed_) {
      if (!rows_.contains(row)) lengths_.erase(row);
    }
    lengths_of_freed_.clear();
  }

  SlotId any_slot() {
    if (random_.one_in(60)) return random_.pick({int64_t{kMost} + 1, int64_t{kLeast} - 1, INT64_MAX, INT64_MIN});
    return random_.pick({random_.between(0, 5000), int64_t{kMost}, int64_t{-1}, int64_t{kLeast}});
  }

  void write() {
    std::vector<RowId> rows;
    std::vector<TokenCount> starts, counts;
    int64_t total = 0;
    for (int64_t i = random_.between(0, 5); i > 0; --i) {
      rows.push_back(any_row());
      starts.push_back(static_cast<TokenCount>(random_.between(0, width_)));
      counts.push_back(static_cast<TokenCount>(random_.between(0, width_ - starts.back())));
      if (random_.one_in(40)) starts.back() = random_.pick({-1, kLeast, kMost, width_ + 1});
      if (random_.one_in(40)) counts.back() = random_.pick({-1, kMost, width_ + 1});
      total += std::clamp<int64_t>(counts.back(), 0, 100);
    }
    if (random_.one_in(40)) total += random_.pick({-1, 1});
    if (random_.one_in(60)) starts.push_back(0);
    std::vector<SlotId> slots;
    for (int64_t i = 0; i < total; ++i) slots.push_back(any_slot());
    const Exact<RowId> names(rows);
    const Exact<TokenCount> firsts(starts), numbers(counts);
    const Exact<SlotId> values(slots);
    auto lengths = lengths_;
    if (agree(
            rows_, "write", [&](Rows& model) { model_write(model, lengths, rows, starts, counts, slots); },
            [&] { table_.write(names.span(), firsts.span(), numbers.span(), values.span()); })) {
      lengths_ = lengths;
    }
  }

  using Rows = std::map<RowId, std::vector<SlotId>>;

  void model_write(Rows& model, std::map<RowId, TokenCount>& lengths, const std::vector<RowId>& rows,
                   const std::vector<TokenCount>& starts, const std::vector<TokenCount>& counts,
                   const std::vector<SlotId>& slots) const {
    const auto expect = [](bool condition, ErrorKind kind) {
      if (!condition) fail(kind, "the model refuses");
    };
    expect(starts.size() == rows.size(), ErrorKind::ShapeError);
    int64_t total = 0;
    for (size_t i = 0; i < rows.size(); ++i) {
      expect(model.contains(rows[i]), ErrorKind::InvalidSequence);
      expect(starts[i] >= 0 && counts[i] >= 0 && int64_t{starts[i]} + counts[i] <= width_, ErrorKind::ShapeError);
      total += counts[i];
    }
    expect(total == std::ssize(slots), ErrorKind::ShapeError);
    for (const SlotId slot : slots)
      expect(type_ == SlotType::Int64 || slot == static_cast<int32_t>(slot), ErrorKind::InvalidBlock);
    auto slot = slots.begin();
    for (size_t i = 0; i < rows.size(); ++i) {
      for (TokenCount k = 0; k < counts[i]; ++k) model[rows[i]][static_cast<size_t>(starts[i] + k)] = *slot++;
      if (counts[i] > 0) lengths[rows[i]] = std::max(lengths[rows[i]], starts[i] + counts[i]);
    }
  }

  void look() {
    table_.check_invariants();
    PC_CHECK(table_.num_used() == std::ssize(rows_) && table_.num_free() == num_rows_ - std::ssize(rows_), "rows");
    for (const auto& [row, slots] : rows_) {
      const auto length = lengths_.find(row);
      PC_CHECK(table_.length(row) == (length == lengths_.end() ? 0 : length->second), "row ", row);
      const int64_t start = random_.between(0, width_), stop = random_.between(start, width_);
      const auto size = static_cast<size_t>(stop - start);
      Exact<int64_t> wide(type_ == SlotType::Int64 ? size : 0);
      Exact<int32_t> narrow(type_ == SlotType::Int32 ? size : 0);
      void* out = type_ == SlotType::Int64 ? static_cast<void*>(wide.data()) : narrow.data();
      table_.read(row, start, stop, out);
      for (size_t i = 0; i < size; ++i) {
        const SlotId found = type_ == SlotType::Int64 ? wide[i] : narrow[i];
        PC_CHECK(found == slots[static_cast<size_t>(start) + i], "row ", row, " has ", found, " at ", start, " + ", i);
      }
      for (const int64_t wrong : {int64_t{-1}, stop + 1, INT64_MIN})
        PC_REFUSES(ShapeError, table_.read(row, wrong, stop, nullptr));
      for (const int64_t wrong : {int64_t{width_} + 1, INT64_MAX})
        PC_REFUSES(ShapeError, table_.read(row, 0, wrong, nullptr));
    }
    for (const RowId wrong : {-1, num_rows_, kMost, kLeast}) {
      PC_REFUSES(InvalidSequence, static_cast<void>(table_.length(wrong)));
      PC_REFUSES(InvalidSequence, table_.read(wrong, 0, 0, nullptr));
    }
  }

  Random& random_;
  SlotType type_;
  RowId num_rows_;
  TokenCount width_;
  RequestTable table_;
  Rows rows_;
  std::map<RowId, TokenCount> lengths_;  // of rows that were written
  std::vector<RowId> lengths_of_freed_;
};

}  // namespace

PC_TEST(request_table_behaves_as_its_model) {
  rounds(150, [](Random& random) {
    TableLife life(random);
    for (int i = 0; i < 80; ++i) life.step();
  });
}

PC_TEST(request_table_refuses_impossible_sizes) {
  for (const int64_t wrong : {int64_t{0}, int64_t{-1}, int64_t{1} << 31, INT64_MAX, INT64_MIN}) {
    PC_REFUSES(ShapeError, RequestTable(wrong, 4, SlotType::Int64));
    PC_REFUSES(ShapeError, RequestTable(4, wrong, SlotType::Int32));
  }
  PC_REFUSES(NotEnoughMemory, RequestTable(kMost - 1, kMost, SlotType::Int64));
}
