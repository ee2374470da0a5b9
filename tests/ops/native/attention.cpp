// Attention with random options on every instruction set of the machine, against float64.
//
// Slots that no query attends to hold NaN, and ids of such blocks are arbitrary.
#include <limits>
#include <memory>
#include <optional>

#include "pagecore/ops/cpu/dispatch.hpp"
#include "pagecore/ops/cpu/ops.hpp"
#include "tests/ops/native/stored.hpp"

using namespace pagecore;
using namespace pagecore::test;
using namespace pagecore::cpu;

namespace {

struct Sequence {
  int64_t query_begin, queries, length, row;
};

class Case {
 public:
  explicit Case(Random& random) : random_(random), meets_pairs_(random.one_in(3)) {
    choose_sizes();
    choose_options();
    make_batch();
    make_arrays();
    make_args();
  }

  void runs_as_defined() {
    in_new_thread([&] { attention(args_, nullptr); });
    compare();
    if (random_.one_in(2)) return;
    Plan plan;
    plan.options = host_plan_options(num_heads_, num_kv_heads_);
    plan.options.causal = args_.causal;
    plan.options.window_left = args_.window_left;
    plan.options.window_right = args_.window_right;
    plan.options.num_workers = random_.between(1, 6);
    plan.options.batch_invariant = random_.one_in(2);
    plan.options.split_floor = random_.pick({kTileTokens, kSplitFloor});
    plan.options.query_tile = random_.pick({int64_t{1}, int64_t{3}, int64_t{40}, plan.options.query_tile});
    const Exact<int32_t> cu(narrow_copy(cu_)), lens(narrow_copy(lens_));
    plan.replan({cu.data(), lens.data(), std::ssize(sequences_)});
    const PlanView view = view_of(plan);
    poison_outputs();
    in_new_thread([&] { attention(args_, &view); });
    compare();
  }

  void refuses_what_is_wrong() {
    const std::vector<char> out = out_->memory().copy(), lse = lse_->memory().copy();
    const Exact<int32_t> cu(narrow_copy(cu_));
    std::vector<int32_t> others = narrow_copy(lens_);
    others[0] += 1;
    const Exact<int32_t> lens(others);
    Plan other;
    other.options = host_plan_options(num_heads_, num_kv_heads_);
    other.replan({cu.data(), lens.data(), std::ssize(sequences_)});
    const PlanView view = view_of(other);
    PC_REFUSES(ShapeError, attention(args_, &view));
    for (const int64_t row : {int64_t{-1}, args_.table.num_rows, std::numeric_limits<int64_t>::max() >> 33})
      wrong_rows(row);
    for (const int64_t length : {int64_t{-1}, args_.table.width * block_size_ + 1}) wrong_lengths(length);
    for (const int64_t end : {int64_t{-1}, num_tokens_ + 1}) wrong_queries(end);
    for (const int64_t block : {int64_t{-1}, num_blocks_, int64_t{1} << 30}) wrong_block(block);
    wrong_mask();
    same_bytes(*out_, out, "output of a refused call");
    same_bytes(*lse_, lse, "lse of a refused call");
  }

 private:
  // ---- making

  void choose_sizes() {
    const bool is_wide = random_.one_in(20);  // the heads of one query exceed the row target of an item
    group_ = random_.pick({1, 1, 2, 3, 8});
    if (meets_pairs_ && random_.one_in(4)) group_ = random_.between(kDecodeRows - 1, kDecodeRows + 1);
    if (is_wide) group_ = kPromptRows + random_.between(1, 9);
    num_kv_heads_ = is_wide ? 1 : random_.between(1, 3);
    num_heads_ = group_ * num_kv_heads_;
    const int64_t any = random_.between(1, 70);
    dim_ = random_.pick({any, int64_t{16}, int64_t{64}, int64_t{128}});
    value_dim_ = random_.one_in(2) ? dim_ : random_.between(1, 70);
    if (meets_pairs_) {
      dim_ = random_.pick({32, 64, 80, 96});
      value_dim_ = random_.pick({32, 48, 64, 96});
    }
    block_size_ = random_.pick({1, 3, 5, 16, 16, 40});
  }

  void choose_options() {
    args_.causal = !random_.one_in(3);
    if (random_.one_in(3)) args_.window_left = random_.between(0, 90);
    if (random_.one_in(4)) args_.window_right = random_.between(0, 5);
    args_.scale = random_.one_in(2) ? 1.0 / std::sqrt(static_cast<double>(dim_)) : 0.3;
    args_.softcap = random_.one_in(3) ? 3.0 : 0.0;
    if (random_.one_in(3)) args_.sinks = sinks_.emplace(random_, num_heads_, -2.0, 2.0).per_head();
    if (random_.one_in(3)) args_.alibi_slopes = slopes_.emplace(random_, num_heads_, -0.1, 0.3).per_head();
    if (random_.one_in(3)) args_.key_scale = key_scale_.emplace(random_, num_kv_heads_, 0.5, 1.5).per_head();
    if (random_.one_in(3)) args_.value_scale = value_scale_.emplace(random_, num_kv_heads_, 0.5, 1.5).per_head();
  }

  void make_batch() {
    const int64_t num_sequences = random_.between(1, 4);
    const bool is_decode = random_.one_in(3);
    int64_t query = 0, longest = 0;
    cu_.push_back(0);
    for (int64_t i = 0; i < num_sequences; ++i) {
      const int64_t queries = is_decode ? 1 : random_.pick({int64_t{0}, int64_t{1}, random_.between(1, 9)});
      const int64_t most = random_.one_in(25) ? 2200 : 150;  // long ones are folded, and split if batch-invariant
      const int64_t length = random_.pick(
          {int64_t{0}, int64_t{63}, int64_t{64}, int64_t{65}, random_.between(0, most), random_.between(0, most)});
      sequences_.push_back({query, queries, length, 0});
      query += queries;
      longest = std::max(longest, length);
      cu_.push_back(query);
      lens_.push_back(length);
    }
    num_tokens_ = query + (random_.one_in(3) ? random_.between(1, 3) : 0);
    width_ = (longest + block_size_ - 1) / block_size_ + random_.between(0, 2);
    needs_cu_ = !is_decode || random_.one_in(2);
    make_mask();
    make_table();
  }

  void make_mask() {
    has_mask_ = random_.one_in(3);
    if (!has_mask_) return;
    for (const Sequence& sequence : sequences_) {
      for (int64_t i = 0; i < sequence.queries * sequence.length; ++i)
        mask_.push_back(static_cast<uint8_t>(random_.one_in(4) ? 0 : random_.between(1, 255)));
    }
  }

  // Assigns random blocks, each to one sequence; entries that no query attends to are invalid ids.
  void make_table() {
    const int64_t num_rows = std::ssize(sequences_) + random_.between(0, 2);
    num_blocks_ = 1;
    for (const Sequence& sequence : sequences_) num_blocks_ += (sequence.length + block_size_ - 1) / block_size_;
    std::vector<int64_t> ids, rows;
    for (int64_t id = 0; id < num_blocks_; ++id) ids.push_back(id);
    for (int64_t row = 0; row < num_rows; ++row) rows.push_back(row);
    random_.shuffle(ids);
    if (num_rows > std::ssize(sequences_) || random_.one_in(2)) random_.shuffle(rows);
    blocks_.assign(static_cast<size_t>(num_rows), std::vector<int64_t>(static_cast<size_t>(width_), 1 << 30));
    size_t next = 0;
    for (size_t i = 0; i < sequences_.size(); ++i) {
      Sequence& sequence = sequences_[i];
      sequence.row = rows[i];
      row_names_.push_back(rows[i]);
      for (int64_t at = 0; at * block_size_ < sequence.length; ++at) {
        int64_t& entry = blocks_[static_cast<size_t>(sequence.row)][static_cast<size_t>(at)];
        const int64_t id = ids[next++];
        if (attended_block(i, at)) entry = id;
      }
    }
  }

  [[nodiscard]] bool attends(size_t i, int64_t query, int64_t key) const {
    const Sequence& sequence = sequences_[i];
    const int64_t position = sequence.length - sequence.queries + query;
    if (args_.causal && key > position) return false;
    if (args_.window_left >= 0 && key < position - args_.window_left) return false;
    if (!args_.causal && args_.window_right >= 0 && key > position + args_.window_right) return false;
    if (!has_mask_) return true;
    int64_t start = 0;
    for (size_t before = 0; before < i; ++before) start += sequences_[before].queries * sequences_[before].length;
    return mask_[static_cast<size_t>(start + query * sequence.length + key)] != 0;
  }
  [[nodiscard]] bool attended(size_t i, int64_t key) const {
    for (int64_t query = 0; query < sequences_[i].queries; ++query) {
      if (attends(i, query, key)) return true;
    }
    return false;
  }
  [[nodiscard]] bool attended_block(size_t i, int64_t at) const {
    for (int64_t key = at * block_size_; key < std::min((at + 1) * block_size_, sequences_[i].length); ++key) {
      if (attended(i, key)) return true;
    }
    return false;
  }

  std::unique_ptr<Array> floats(std::vector<int64_t> shape, Float type) {
    return std::make_unique<Array>(random_, std::move(shape), size_of(type));
  }

  // Keys or values: plain, or in a format that can store the dim.
  std::unique_ptr<Stored> stored(Float type, int64_t dim) {
    Format format = random_.one_in(2) ? random_.pick(kFormats) : Format::Plain;
    if (!Stored::stores(format, dim)) format = Format::E4M3Token;
    return std::make_unique<Stored>(random_, format, type, num_blocks_, block_size_, num_kv_heads_, dim);
  }

  void make_arrays() {
    query_type_ = meets_pairs_ ? Float::BF16 : random_.pick(kFloats);
    out_type_ = random_.one_in(2) ? query_type_ : random_.pick(kFloats);
    key_type_ = meets_pairs_ ? Float::BF16 : random_.pick(kFloats);
    value_type_ = meets_pairs_ || random_.one_in(2) ? key_type_ : random_.pick(kFloats);
    query_ = floats({num_tokens_, num_heads_, dim_}, query_type_);
    key_ = stored(key_type_, dim_);
    value_ = stored(value_type_, value_dim_);
    out_ = floats({num_tokens_, num_heads_, value_dim_}, out_type_);
    lse_ = floats({num_tokens_, num_heads_}, Float::F32);
    query_->fill_bytes(-1);  // NaN in every type
    for (int64_t token = 0; token < cu_.back(); ++token) fill(*query_, query_type_, {token}, num_heads_, dim_);
    for (size_t i = 0; i < sequences_.size(); ++i) {
      for (int64_t key = 0; key < sequences_[i].length; ++key) {
        if (!attended(i, key)) continue;
        const auto [block, within] = place(i, key);
        key_->fill(random_, block, within);
        value_->fill(random_, block, within);
      }
    }
    poison_outputs();
  }

  [[nodiscard]] std::pair<int64_t, int64_t> place(size_t i, int64_t key) const {
    return {blocks_[static_cast<size_t>(sequences_[i].row)][static_cast<size_t>(key / block_size_)], key % block_size_};
  }

  void fill(Array& array, Float type, std::vector<int64_t> index, int64_t heads, int64_t dim) {
    for (int64_t head = 0; head < heads; ++head) {
      index.resize(array.shape().size() - 2);
      index.insert(index.end(), {head, 0});
      char* row = array.at(index);
      for (int64_t d = 0; d < dim; ++d) narrow(type, random_.normal(), row + d * size_of(type));
    }
  }

  void poison_outputs() {
    out_->fill_bytes(-1);
    lse_->fill_bytes(-1);
  }

  void make_args() {
    args_.query = as_rows(*query_, query_type_);
    args_.key = key_->cache();
    args_.value = value_->cache();
    args_.out = as_rows(*out_, out_type_);
    has_lse_ = !random_.one_in(4);
    if (has_lse_) args_.lse = as_lse(*lse_);
    args_.table = table_.emplace(random_, blocks_, width_).table();
    args_.seq_lens = lens_ids_.emplace(random_, lens_).indices();
    bool is_identity = true;
    for (size_t i = 0; i < row_names_.size(); ++i)
      is_identity = is_identity && row_names_[i] == static_cast<int64_t>(i);
    if (!is_identity || random_.one_in(2)) args_.rows = rows_ids_.emplace(random_, row_names_).indices();
    if (needs_cu_) args_.cu_query_lens = cu_ids_.emplace(random_, cu_).indices();
    if (!has_mask_) return;
    mask_memory_.emplace(std::ssize(mask_), random_.below(8));
    std::copy(mask_.begin(), mask_.end(), mask_memory_->data());
    args_.mask = reinterpret_cast<const uint8_t*>(mask_memory_->data());
    args_.mask_size = std::ssize(mask_);
  }

  // ---- comparing

  void compare() {
    for (const Array* array : {query_.get(), out_.get(), lse_.get()}) array->memory().check();
    key_->check_guards();
    value_->check_guards();
    for (size_t i = 0; i < sequences_.size(); ++i) {
      for (int64_t query = 0; query < sequences_[i].queries; ++query) {
        for (int64_t head = 0; head < num_heads_; ++head) compare_row(i, query, head);
      }
    }
    for (int64_t token = cu_.back(); token < num_tokens_; ++token) {
      for (int64_t head = 0; head < num_heads_; ++head) {
        for (int64_t d = 0; d < value_dim_; ++d)
          PC_CHECK(widen(out_type_, out_->at({token, head, d})) == 0.0, "padding row ", token);
        if (has_lse_) PC_CHECK(widen(Float::F32, lse_->at({token, head})) == -INFINITY, "padding row ", token);
      }
    }
  }

  [[nodiscard]] double score(size_t i, int64_t query, int64_t head, int64_t key) const {
    const auto [block, within] = place(i, key);
    const char* q = query_->at({sequences_[i].query_begin + query, head, 0});
    double product = 0.0;
    for (int64_t d = 0; d < dim_; ++d)
      product += widen(query_type_, q + d * size_of(query_type_)) * key_->number(block, within, head / group_, d);
    product *= args_.scale * (key_scale_ ? (*key_scale_)[head / group_] : 1.0);
    if (args_.softcap != 0.0) product = args_.softcap * std::tanh(product / args_.softcap);
    const int64_t position = sequences_[i].length - sequences_[i].queries + query;
    return product + (slopes_ ? (*slopes_)[head] * static_cast<double>(key - position) : 0.0);
  }

  void compare_row(size_t i, int64_t query, int64_t head) {
    const int64_t length = sequences_[i].length, token = sequences_[i].query_begin + query;
    std::vector<double> scores(static_cast<size_t>(length), -INFINITY);
    double top = sinks_ ? (*sinks_)[head] : -INFINITY;
    for (int64_t key = 0; key < length; ++key) {
      if (attends(i, query, key)) scores[static_cast<size_t>(key)] = score(i, query, head, key);
      top = std::max(top, scores[static_cast<size_t>(key)]);
    }
    double total = sinks_ ? std::exp((*sinks_)[head] - top) : 0.0;
    std::vector<double> out(static_cast<size_t>(value_dim_), 0.0), size(static_cast<size_t>(value_dim_), 0.0);
    for (int64_t key = 0; key < length; ++key) {
      if (scores[static_cast<size_t>(key)] == -INFINITY) continue;
      const double weight = std::exp(scores[static_cast<size_t>(key)] - top);
      total += weight;
      const auto [block, within] = place(i, key);
      for (size_t d = 0; d < out.size(); ++d) {
        const double value = value_->number(block, within, head / group_, static_cast<int64_t>(d));
        out[d] += weight * value;
        size[d] += weight * std::fabs(value);
      }
    }
    const double factor = total == 0.0 ? 0.0 : (value_scale_ ? (*value_scale_)[head / group_] : 1.0) / total;
    // If all inputs are bfloat16, the weights may be rounded to bfloat16 like the output.
    const bool rounds =
        query_type_ == Float::BF16 && key_->number_type() == Float::BF16 && value_->number_type() == Float::BF16;
    const double bound = out_type_ == Float::BF16 ? (rounds ? 1e-2 : 5e-3) : out_type_ == Float::F16 ? 1e-3 : 3e-5;
    for (size_t d = 0; d < out.size(); ++d) {
      const double found = widen(out_type_, out_->at({token, head, static_cast<int64_t>(d)}));
      PC_CHECK(std::fabs(found - out[d] * factor) <= bound * size[d] * factor + 1e-7, isa(), ": token ", token,
               " head ", head, " dim ", d, " is ", found, ", expected ", out[d] * factor);
    }
    if (!has_lse_) return;
    const double expected = total == 0.0 ? -INFINITY : top + std::log(total);
    const double found = widen(Float::F32, lse_->at({token, head}));
    PC_CHECK(found == expected || std::fabs(found - expected) <= 3e-5 * std::max(1.0, std::fabs(expected)), isa(),
             ": lse of token ", token, " head ", head, " is ", found, ", expected ", expected);
  }

  // ---- refusals

  static std::vector<int32_t> narrow_copy(const std::vector<int64_t>& values) { return {values.begin(), values.end()}; }

  void wrong_rows(int64_t row) {
    std::vector<int64_t> names = row_names_;
    random_.pick(names) = row;
    const Ids ids(random_, names);
    AttentionArgs wrong = args_;
    wrong.rows = ids.indices();
    PC_REFUSES(InvalidSequence, attention(wrong, nullptr));
  }

  void wrong_lengths(int64_t length) {
    std::vector<int64_t> lens = lens_;
    random_.pick(lens) = length;
    const Ids ids(random_, lens);
    AttentionArgs wrong = args_;
    wrong.seq_lens = ids.indices();
    PC_REFUSES(ShapeError, attention(wrong, nullptr));
  }

  void wrong_queries(int64_t end) {
    std::vector<int64_t> cu = cu_;
    cu.back() = end;
    const Ids ids(random_, cu);
    AttentionArgs wrong = args_;
    wrong.cu_query_lens = ids.indices();
    PC_REFUSES(ShapeError, attention(wrong, nullptr));
  }

  void wrong_mask() {
    const Exact<uint8_t> shorter(mask_.size());
    AttentionArgs wrong = args_;
    wrong.mask = shorter.data();
    int64_t size = 0;
    for (const Sequence& sequence : sequences_) size += sequence.queries * sequence.length;
    for (const int64_t other : {size - 1, size + 1}) {
      wrong.mask_size = other;
      if (other >= 0) PC_REFUSES(ShapeError, attention(wrong, nullptr));
    }
  }

  // Invalidates one entry that some query attends to.
  void wrong_block(int64_t block) {
    for (size_t i = 0; i < sequences_.size(); ++i) {
      for (int64_t key = 0; key < sequences_[i].length; ++key) {
        if (!attended(i, key)) continue;
        auto blocks = blocks_;
        blocks[static_cast<size_t>(sequences_[i].row)][static_cast<size_t>(key / block_size_)] = block;
        const IdTable table(random_, blocks, width_);
        AttentionArgs wrong = args_;
        wrong.table = table.table();
        PC_REFUSES(InvalidBlock, attention(wrong, nullptr));
        return;
      }
    }
  }

  Random& random_;
  const bool meets_pairs_;  // all bfloat16, mostly with whole pairs, so that few rows are read in place
  int64_t group_, num_kv_heads_, num_heads_, dim_, value_dim_, block_size_, num_blocks_, num_tokens_, width_;
  std::vector<Sequence> sequences_;
  std::vector<int64_t> cu_, lens_, row_names_;
  std::vector<std::vector<int64_t>> blocks_;
  std::vector<uint8_t> mask_;
  bool has_mask_ = false, has_lse_ = false, needs_cu_ = true;
  std::optional<HeadNumbers> sinks_, slopes_, key_scale_, value_scale_;
  Float query_type_, key_type_, value_type_, out_type_;
  std::unique_ptr<Array> query_, out_, lse_;
  std::unique_ptr<Stored> key_, value_;
  std::optional<IdTable> table_;
  std::optional<Ids> lens_ids_, rows_ids_, cu_ids_;
  std::optional<Guarded> mask_memory_;
  AttentionArgs args_;
};

}  // namespace

PC_TEST(attention_is_as_defined_on_every_instruction_set) {
  for (const std::string& name : available_isas()) {
    set_isa(name);
    rounds(150, [](Random& random) { Case(random).runs_as_defined(); });
  }
  set_isa("");
}

PC_TEST(attention_refuses_and_writes_nothing) {
  rounds(120, [](Random& random) { Case(random).refuses_what_is_wrong(); });
}
